"""`tune explore`: a page, or its data, of every setting at every load from a profile alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.shadow_files import a_profile, a_trace_file
from tuner.cli import run
from tuner.shadow.profiles import write_profile

Output = pytest.CaptureFixture[str]
FLOW = "time_s,in_flight,input_length,output_length\n0,3,200,80\n60,5,200,80\n120,0,200,80\n"
FEW = ("--max-num-seqs", "2,8", "--loads", "0.05,0.1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a profile and traffic."""
    write_profile(tmp_path / "profile.yaml", a_profile())
    a_trace_file(tmp_path / "prod.jsonl", 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explore(*more: str) -> int:
    return run(["explore", "--profile", "profile.yaml", "--trace", "prod.jsonl", *FEW, *more])


def test_a_page_is_written_and_only_said_on_standard_error(folder: Path, capfd: Output) -> None:
    assert explore("--force-profile") == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "load 0.1 x: " in err
    assert "replays predicted, and what is best at each load, in " in err
    assert err.endswith("page written to explore.html\n")
    page = (folder / "explore.html").read_text(encoding="utf-8")
    assert "Predicted" in page.split("<h1>")[1].split("</h1>")[0]
    assert "prod.jsonl" in page


def test_json_is_the_data_and_no_page_unless_one_is_named(folder: Path, capfd: Output) -> None:
    assert explore("--force-profile", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert not (folder / "explore.html").exists()
    assert [at["load"] for at in told["loads"]] == [0.05, 0.1]
    assert told["trace"]["requests"] == 400
    assert told["profile"]["vllm_version"] == a_profile().shape.vllm_version
    for at in told["loads"]:
        keys = ("max_num_seqs", "max_num_batched_tokens")
        current = [s for s in at["settings"] if {k: s[k] for k in keys} == told["current"]]
        assert current == [at["at_current"]]
        assert at["at_best"] in at["settings"]
    assert explore("--force-profile", "--json", "-o", "page.html") == 0
    assert (folder / "page.html").exists()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--trace prod.jsonl", "--profile is missing"),
        ("--profile profile.yaml", "--trace is missing"),
        ("--profile prod.jsonl --trace prod.jsonl", "prod.jsonl"),
        ("--profile profile.yaml --trace prod.jsonl -o gone/x.html", "folder does not exist"),
        ("--profile profile.yaml --trace prod.jsonl -o .", "that is a folder"),
        (
            "--profile profile.yaml --trace prod.jsonl --objective goodput --force-profile",
            "--objective goodput needs at least one --slo",
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    folder: Path, capsys: Output, typed: str, words: str
) -> None:
    before = sorted(folder.iterdir())
    assert run(["explore", *typed.split()]) == 2
    assert words in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.engine
def test_a_profile_made_elsewhere_is_refused_unless_forced(
    folder: Path, capsys: Output
) -> None:
    assert explore() == 2
    err = capsys.readouterr().err
    assert "the profile was made with vLLM" in err
    assert "--force-profile" in err
    assert not (folder / "explore.html").exists()


def test_a_trace_without_arrivals_is_refused_in_an_open_loop(
    folder: Path, capsys: Output
) -> None:
    (folder / "flow.csv").write_text(FLOW)
    typed = "explore --profile profile.yaml --trace flow.csv --load-model open --force-profile"
    assert run(typed.split()) == 2
    err = capsys.readouterr().err
    assert "flow.csv records requests in flight, not arrivals" in err
    assert "--load-model closed" in err


def test_in_a_closed_loop_nobody_is_best_who_finishes_less(folder: Path, capfd: Output) -> None:
    """A small cap shortens the tail of a few long answers, and all others wait for it."""
    lines = (
        {
            "arrived_at_s": i / 2,
            "input_length": 200,
            "output_length": 400 if i % 40 == 7 else 12,
        }
        for i in range(400)
    )
    (folder / "prod.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    closed = ("--load-model", "closed", "--concurrency", "24", "--loads", "1")
    assert explore("--force-profile", "--max-num-seqs", "2,8,32", *closed, "--json") == 0
    out, err = capfd.readouterr()
    assert "so balanced is for most requests per second" in err
    told = json.loads(out)
    assert told["objective"] == "throughput"
    (at,) = told["loads"]
    most = max(setting["requests_per_s"] for setting in at["settings"])
    assert at["at_best"]["requests_per_s"] >= 0.99 * most
    tails = {s["max_num_seqs"]: s["e2e_s"]["p95"] for s in at["settings"]}
    assert min(tails, key=tails.__getitem__) != at["best"]["max_num_seqs"]
