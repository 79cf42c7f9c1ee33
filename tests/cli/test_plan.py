"""`tune plan`: what is best at which load, predicted from a profile alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.shadow_files import a_profile, a_trace_file
from tuner.cli import run
from tuner.shadow.profiles import write_profile


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a profile and a trace."""
    folder = tmp_path_factory.mktemp("plan")
    write_profile(folder / "profile.yaml", a_profile())
    return str(folder / "profile.yaml"), str(a_trace_file(folder / "prod.jsonl", 400))


@pytest.mark.slow
@pytest.mark.engine
def test_more_load_wants_larger_caps_until_a_change_pays(
    files: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    profile, trace = files
    command = ["plan", "--profile", profile, "--trace", trace, "--force-profile"]
    assert run([*command, "--loads", "0.05,1", "--max-num-seqs", "2,8,24", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["engine"] == "shadow"
    assert shown["current"] == {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    light, heavy = shown["loads"]
    assert (light["load"], heavy["load"]) == (0.05, 1.0)
    assert not light["change_pays"]
    assert heavy["change_pays"]
    assert heavy["best"]["max_num_seqs"] > 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "--profile is missing"),
        (["--profile", "gone.yaml"], "gone.yaml cannot be read"),
        (["--profile", "x.yaml", "--loads", "0"], "must be a multiple above 0"),
    ],
)
def test_what_cannot_be_planned_is_told(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(a_trace_file(tmp_path / "prod.jsonl", 40))
    assert run(["plan", "--trace", trace, *more]) == 2
    assert words in capsys.readouterr().err
