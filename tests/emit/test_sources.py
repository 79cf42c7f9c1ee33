"""A recommendation is read from a run or a file, whole, or refused with what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.emit_parts import (
    CEILING,
    CHANGE,
    CURRENT,
    QWEN,
    RUN_ID,
    SHA256,
    WINNER,
    a_run_dir,
    an_outcome,
)
from tuner.cli import run
from tuner.emit.comments import comments
from tuner.emit.names import Format
from tuner.emit.registry import emit
from tuner.emit.sources import read_emitted, read_run, read_source
from tuner.emit.target import Names
from tuner.emit.vllm import render
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.search.objective import Tier
from tuner.search.race import Odds, RaceDecision, RaceVerdict

Output = pytest.CaptureFixture[str]
WITHOUT_SECRET = {key: value for key, value in QWEN.items() if key != "hf-token"}


def test_a_run_directory_gives_the_file_that_the_run_itself_wrote(tmp_path: Path) -> None:
    outcome = an_outcome()
    folder = a_run_dir(tmp_path, outcome, WITHOUT_SECRET)
    again = emit(Format.VLLM, read_run(folder), Names("best.yaml"))
    assert outcome.recommendation is not None
    said = comments(outcome, outcome.recommendation, str(folder))
    above = ["vllm serve --config best.yaml", *said]
    assert again == render(WITHOUT_SECRET, EngineLimits(48, 4096), above)


def test_an_emitted_file_gives_the_same_provenance_as_its_run(tmp_path: Path) -> None:
    of_run = read_run(a_run_dir(tmp_path, values=WITHOUT_SECRET))
    path = tmp_path / "best.yaml"
    path.write_text(emit(Format.VLLM, of_run, Names("best.yaml")))
    of_file = read_emitted(path)
    assert of_file.limits == of_run.limits == WINNER
    assert of_file.settings == yaml.safe_load(path.read_text())
    assert of_file.comments == of_run.comments
    same = {"run-id", "trace", "vllm-version", "device", "gain", "limits"}
    assert {key: of_file.facts[key] for key in same} == {key: of_run.facts[key] for key in same}
    assert of_run.facts["trace-sha256"] == SHA256
    assert SHA256.startswith(of_file.facts["trace-sha256"])
    assert of_run.facts["tuned-at"].startswith(of_file.facts["tuned-at"])
    assert of_run.facts["run-id"] == RUN_ID
    assert of_run.facts["gain"].startswith("e2e_p99 -20.0%, interval ")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("requests_per_s", "requests_per_s +25.0%, interval +17.6% … +33.3%"),
        ("goodput_per_s", "goodput_per_s: +25.0% (90% interval +17.6% … +33.3% over this)"),
    ],
)
def test_the_gain_is_that_of_the_rate_that_decided(
    tmp_path: Path, metric: str, said: str
) -> None:
    odds = Odds(0.99, None, 1.0, 0.25, 0.98, basis="this")
    of_run = read_run(
        a_run_dir(tmp_path, an_outcome(replace(CHANGE, metric=metric, odds=odds)))
    )
    path = tmp_path / "best.yaml"
    path.write_text(emit(Format.VLLM, of_run, Names("best.yaml")))
    assert read_emitted(path).facts["gain"] == of_run.facts["gain"] == said


def test_advice_to_keep_is_said_in_both(tmp_path: Path) -> None:
    keep = RaceDecision(
        RaceVerdict.KEEP, CURRENT, WINNER, (), None, 3, "the gain is within noise"
    )
    of_run = read_run(a_run_dir(tmp_path, an_outcome(keep)))
    path = tmp_path / "best.yaml"
    path.write_text(emit(Format.VLLM, of_run, Names("best.yaml")))
    for source in (of_run, read_emitted(path)):
        assert source.limits == CURRENT
        assert source.facts["gain"] == "none: keep what you have, the gain is within noise"


def test_a_file_of_another_make_is_taken_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# by hand\nmodel: m\nmax_num_seqs: 8\nmax-num-batched-tokens: 2K\n")
    found = read_emitted(path)
    assert (found.limits.max_num_seqs, found.limits.max_num_batched_tokens) == (8, 2048)
    assert found.comments == ("by hand",)
    assert found.facts == {}


def test_the_exact_form_can_be_emitted_again(tmp_path: Path) -> None:
    path = tmp_path / "exact.yaml"
    exact = emit(Format.VLLM_EXACT, read_run(a_run_dir(tmp_path)), Names("exact.yaml"))
    path.write_text(exact)
    found = read_emitted(path)
    assert (found.limits, found.started_at) == (WINNER, CEILING)
    assert emit(Format.VLLM_EXACT, found, Names("exact.yaml")) == exact


@pytest.mark.parametrize("before", ["\ufeff", "---\n", "\n", "\ufeff---\r\n"])
def test_what_editors_put_first_hides_no_evidence(before: str, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    remark = "# left out api-key, which is a secret: set VLLM_API_KEY in the environment\n"
    values = "model: m\nmax-num-seqs: 8\nmax-num-batched-tokens: 2048\n"
    path.write_text(f"{before}# tuned 2026-01-02 on 9 requests of a\n{remark}{values}")
    read = read_emitted(path)
    assert (read.lost, read.facts["tuned-at"]) == (("api-key",), "2026-01-02")


def test_a_secret_that_the_run_did_not_keep_is_named(tmp_path: Path) -> None:
    text = emit(Format.VLLM, read_run(a_run_dir(tmp_path)))
    assert "# left out hf-token, which is a secret: set HF_TOKEN in the environment" in text
    assert "redacted" not in text
    path = tmp_path / "best.yaml"
    path.write_text(text)
    assert read_emitted(path).lost == ("hf-token",)
    assert emit(Format.VLLM, read_emitted(path)) == text
    path.write_text(text + "hf-token: found\n")
    assert "which is a secret" not in emit(Format.VLLM, read_emitted(path))


def broken(folder: Path, **changed: object) -> Path:
    """Change the result of a run directory."""
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


def bad_sources(root: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Return what cannot be emitted from, and the words that say why."""
    began = a_run_dir(root / "began")
    (began / "result.json").unlink()
    (root / "empty").mkdir()
    cut = a_run_dir(root / "cut")
    (cut / "result.json").write_text('{"schema": 2')
    lacks = a_run_dir(root / "lacks")
    content = json.loads((lacks / "result.json").read_text())
    del content["baseline"]
    (lacks / "result.json").write_text(json.dumps(content))
    unmet = a_run_dir(root / "unmet", an_outcome(CHANGE, Tier.BREAKS_SLO))
    nowhere = a_run_dir(root / "nowhere", an_outcome(CHANGE, Tier.BREAKS_SLO))
    holds = {"winner": None, "current": None, "confirmed_live": None, "is_shown": True}
    files = {
        "pod.yaml": "apiVersion: v1\nkind: Pod\n",
        "a.yaml": "a: [\n",
        "x.txt": "model: m\n",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    return {
        "a run that did not end": (began, ("result.json is missing", "--resume")),
        "no run at all": (root / "empty", ("result.json is missing", "run directory")),
        "half a result": (cut, ("result.json cannot be read",)),
        "a damaged result": (lacks, ("result.json is damaged: ", "`baseline`")),
        "another schema": (
            broken(a_run_dir(root / "old"), schema=0),
            ("schema must be 2, got 0",),
        ),
        "nothing recommended": (
            unmet,
            ("recommends nothing: no configuration met the SLOs", "lower --load"),
        ),
        "nothing at any load": (
            broken(nowhere, capacity={**holds, "text": "the SLOs hold at no load"}),
            ("recommends nothing: no configuration met the SLOs", "hold at no load"),
        ),
        "nothing there": (root / "gone.yaml", ("gone.yaml does not exist",)),
        "no configuration of vLLM": (root / "pod.yaml", ("is a Kubernetes manifest",)),
        "no YAML": (root / "a.yaml", ("is not YAML",)),
        "another ending": (root / "x.txt", ("must end in .yaml",)),
    }


CASES = (
    "a run that did not end",
    "no run at all",
    "half a result",
    "a damaged result",
    "another schema",
    "nothing recommended",
    "nothing at any load",
    "nothing there",
    "no configuration of vLLM",
    "no YAML",
    "another ending",
)


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_emitted_from_is_reported(
    case: str, tmp_path: Path, capsys: Output
) -> None:
    source, shown = bad_sources(tmp_path)[case]
    with pytest.raises(UsageError) as raised:
        read_source(source)
    for words in shown:
        assert words in f"{raised.value.message} {raised.value.hint}"
    assert run(["emit", str(source)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
