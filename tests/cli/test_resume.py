"""A run that was interrupted or killed loses nothing it has measured, and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.toy import ToySource
from support.toy_tune import CROWDED, command, job_on, lines_of, wait_for, write_trace
from tuner.cli.commands import tune
from tuner.cli.resume import (
    _drop_redacted,
    _refuse_changes,
    _without_secrets,
    with_stored,
    with_tuning,
)
from tuner.errors import UsageError
from tuner.redact import REDACTED
from tuner.replay.slo import parse_slo
from tuner.run.directory import RunDir

COSTS = {"knee": 10, "crowd_s": 0.0003}
"""Those of CROWDED, as the program takes them."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace whose replays take long enough to be interrupted."""
    return write_trace(tmp_path / "t.jsonl", n=400)


def arguments_for(trace: Path) -> list[str]:
    folder = trace.parent
    return [
        *("--trace", str(trace), "--budget", "60s", "--method", "live"),
        *("--run-dir", str(folder / "run"), "-o", str(folder / "best.yaml")),
    ]


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run the program in a process of its own, which does not outlive the test."""
    started = command(arguments, costs=COSTS)
    process = subprocess.Popen(
        started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def key_of(trial: dict[str, Any]) -> tuple[object, ...]:
    """Return what a trial is for; the same thing is never measured twice."""
    names = ("phase", "race_round", "max_num_seqs", "max_num_batched_tokens")
    return tuple(trial[name] for name in names)


def measured_once(trials: Sequence[dict[str, Any]]) -> bool:
    """Whether nothing was repeated, but a round that the kill has split: it is run anew."""
    return len({(*key_of(trial), trial["attempt"]) for trial in trials}) == len(trials)


def has_trials(run_dir: Path, least: int) -> bool:
    return len(lines_of(run_dir / "trials.jsonl")) >= least


def test_ctrl_c_writes_the_best_so_far_and_says_how_to_go_on(trace: Path) -> None:
    run_dir, emitted = trace.parent / "run", trace.parent / "best.yaml"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 3), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (out, err.splitlines()[-1]) == ("", "interrupted")
    assert f"go on with: tune --resume {run_dir}" in err
    assert "Traceback" not in err
    result = json.loads((run_dir / "result.json").read_text())
    assert result["state"] == "interrupted"
    read = yaml.safe_load(emitted.read_text())
    assert read["max-num-seqs"] == result["recommendation"]["max_num_seqs"]
    assert "interrupted: best so far" in emitted.read_text()


@pytest.mark.slow
def test_a_run_killed_in_the_middle_is_resumed_without_loss_or_repetition(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 4), process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    before = lines_of(run_dir / "trials.jsonl")
    assert not (run_dir / "result.json").exists()

    assert job_on(ToySource(CROWDED), ["--resume", str(run_dir)]) == 0
    after = lines_of(run_dir / "trials.jsonl")
    assert after[: len(before)] == before
    assert measured_once(after)
    assert [t["phase"] for t in after].count("present") == 1
    assert len({trial["number"] for trial in after}) == len(after)
    assert (trace.parent / "best.yaml").exists()
    capsys.readouterr()

    whole = write_trace(trace.parent / "whole.jsonl", n=400)
    arguments = ["--trace", str(whole), "--budget", "60s", "--run-dir", str(whole) + ".run"]
    arguments += ["--method", "live"]
    assert job_on(ToySource(CROWDED), arguments) == 0
    uninterrupted = lines_of(Path(f"{whole}.run") / "trials.jsonl")
    assert [key_of(trial) for trial in after] == [key_of(trial) for trial in uninterrupted]


@pytest.fixture
def killed(trace: Path) -> Path:
    """Return the directory of a run that was killed after some trials."""
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 4), process)
        process.kill()
        process.communicate(timeout=60)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["removed", "empty", "another storage"])
def test_a_run_whose_study_is_lost_goes_on_from_its_file_of_trials(
    killed: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    before, study, more = lines_of(killed / "trials.jsonl"), killed / "study.db", []
    if loss == "removed":
        study.unlink()
    elif loss == "empty":
        study.write_bytes(b"")
    else:
        more = ["--storage", f"sqlite:///{killed / 'another.db'}"]
    assert job_on(ToySource(CROWDED), ["--resume", str(killed), *more]) == 0
    said = capsys.readouterr().err
    assert f"{len(before)} trials were restored from trials.jsonl" in said
    after = lines_of(killed / "trials.jsonl")
    assert after[: len(before)] == before
    assert len({trial["number"] for trial in after}) == len(after)

    whole = write_trace(killed.parent / "whole.jsonl", n=400)
    arguments = ["--trace", str(whole), "--budget", "60s", "--run-dir", str(whole) + ".run"]
    assert job_on(ToySource(CROWDED), [*arguments, "--method", "live"]) == 0
    uninterrupted = lines_of(Path(f"{whole}.run") / "trials.jsonl")
    assert [key_of(trial) for trial in after] == [key_of(trial) for trial in uninterrupted]


def test_a_run_whose_trials_are_nowhere_is_refused_and_left_as_it_is(killed: Path) -> None:
    (killed / "study.db").unlink()
    (killed / "trials.jsonl").unlink()
    with pytest.raises(UsageError, match=r"no study named .* trials\.jsonl holds no trial"):
        job_on(ToySource(CROWDED), ["--resume", str(killed)])
    assert not (killed / "study.db").exists()
    assert (killed / "run.json").exists()


def test_an_older_copy_of_the_study_is_brought_up_to_date(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 2), process)
        process.send_signal(signal.SIGSTOP)
        copy = (run_dir / "study.db").read_bytes()
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: has_trials(run_dir, 5), process)
        process.kill()
        process.communicate(timeout=60)
    before = lines_of(run_dir / "trials.jsonl")
    (run_dir / "study.db").write_bytes(copy)
    (run_dir / "study.db-journal").unlink(missing_ok=True)
    assert job_on(ToySource(CROWDED), ["--resume", str(run_dir)]) == 0
    assert "trials were restored from trials.jsonl: the study lacked" in capsys.readouterr().err
    assert lines_of(run_dir / "trials.jsonl")[: len(before)] == before


def test_a_file_of_trials_that_cannot_be_restored_is_kept_beside_the_new_one(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ended / "trials.jsonl"
    lines = path.read_text().splitlines()
    # Torn, and a trial that this study never saw under a number that it has given away.
    strange = json.loads(lines[0]) | {"number": -1}
    damaged = "\n".join([*lines[:-1], lines[-1][:40], json.dumps(strange), "{}"])
    path.write_text(damaged)
    again = ["--resume", str(ended), "--engine-arg", "api-key=sk-secret"]
    assert job_on(ToySource(CROWDED), again) == 0
    assert (ended / "trials.1.jsonl").read_text() == damaged
    assert path.read_text().splitlines() == lines
    told = capsys.readouterr().err
    assert "1 trials that the study does not know and 2 damaged lines" in " ".join(told.split())


def test_a_run_killed_in_the_race_is_resumed_too(trace: Path) -> None:
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(
            lambda: any(t["phase"] == "race" for t in lines_of(run_dir / "trials.jsonl")),
            process,
        )
        process.kill()
        process.communicate(timeout=60)
    assert job_on(ToySource(CROWDED), ["--resume", str(run_dir)]) == 0
    after = lines_of(run_dir / "trials.jsonl")
    assert measured_once(after)


def test_a_finished_run_is_resumed_to_the_same_end(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job_on(ToySource(CROWDED), arguments_for(trace)) == 0
    run_dir = trace.parent / "run"
    before, first = lines_of(run_dir / "trials.jsonl"), (trace.parent / "best.yaml").read_text()
    assert job_on(ToySource(CROWDED), ["--resume", str(run_dir)]) == 0
    assert lines_of(run_dir / "trials.jsonl") == before
    assert yaml.safe_load((trace.parent / "best.yaml").read_text()) == yaml.safe_load(first)
    assert "trial   0" in capsys.readouterr().err


def test_two_processes_never_share_a_run_directory(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 1), process)
        with pytest.raises(UsageError, match="another run is using"):
            job_on(ToySource(CROWDED), ["--resume", str(run_dir)])
        assert process.poll() is None
    capsys.readouterr()


def test_a_directory_that_holds_a_run_is_not_overwritten(trace: Path) -> None:
    run_dir = trace.parent / "run"
    RunDir(run_dir, resume=False).write_json("run.json", {})
    with pytest.raises(UsageError, match="holds a run already") as caught:
        job_on(ToySource(CROWDED), arguments_for(trace))
    assert f"--resume {run_dir}" in caught.value.hint


@pytest.fixture
def ended(trace: Path) -> Path:
    """Return the directory of a run that has ended."""
    more = ["--max-num-seqs", "8,16", "--engine-arg", "api-key=sk-secret"]
    assert job_on(ToySource(CROWDED), [*arguments_for(trace), *more]) == 0
    return trace.parent / "run"


def test_another_trace_is_refused(ended: Path) -> None:
    other = write_trace(ended.parent / "other.jsonl", n=400, seed=1)
    again = ["--resume", str(ended), "--engine-arg", "api-key=sk-secret"]
    with pytest.raises(UsageError, match="the trace is not the one"):
        job_on(ToySource(CROWDED), [*again, "--trace", str(other)])


def test_a_secret_has_to_be_given_again(ended: Path) -> None:
    assert f"api-key={REDACTED}" in json.loads((ended / "run.json").read_text())["arguments"]
    with pytest.raises(UsageError, match="api-key is a secret and was not kept"):
        job_on(ToySource(CROWDED), ["--resume", str(ended)])
    again = ["--resume", str(ended), "--engine-arg", "api-key=sk-secret"]
    assert job_on(ToySource(CROWDED), again) == 0
    emitted = yaml.safe_load((ended.parent / "best.yaml").read_text())
    assert emitted["api-key"] == "sk-secret"
    assert b"sk-secret" not in b"".join(p.read_bytes() for p in ended.iterdir())


def test_a_directory_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no run to resume: run\.json is missing"):
        job_on(ToySource(), ["--resume", str(tmp_path)])


def test_a_damaged_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"arguments": [')
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        job_on(ToySource(), ["--resume", str(tmp_path)])


def test_options_that_hold_for_once_are_not_kept() -> None:
    typed = ["--trace", "t", "--run-dir", "r", "--resume=x", "--engine-arg=hf-token=abc"]
    context = tune.make_context("tune", ["--trace", "t"])
    kept, _ = with_stored(tune, typed, context.params)
    assert kept == ["--trace", "t", f"--engine-arg=hf-token={REDACTED}"]


def test_a_profile_fills_in_what_the_command_line_leaves_open() -> None:
    def filled(*arguments: str) -> dict[str, Any]:
        return with_tuning(tune.make_context("tune", list(arguments)).params)

    plain, batch = filled("--trace", "t"), filled("--trace", "t", "--tuning", "batch")
    assert (plain["objective"], plain["slo"]) == ("balanced", ())
    assert batch["objective"] == "throughput"
    typed = ("--slo", "e2e_p50=9s", "--objective", "latency", "--max-num-seqs", "3")
    mine = filled("--trace", "t", "--tuning", "interactive", *typed)
    assert mine["slo"] == (parse_slo("e2e_p50=9s"),)
    assert (mine["objective"], mine["max_num_seqs"]) == ("latency", (3,))


def test_a_resumed_run_refuses_what_would_mix_measurements(tmp_path: Path) -> None:
    for changed in (["--load", "2"], ["--seed=3"], ["--engine-arg", "dtype=float16"]):
        with pytest.raises(UsageError, match="cannot change when a run is resumed"):
            _refuse_changes(["--resume", str(tmp_path), *changed], set())
    _refuse_changes(["--resume", str(tmp_path), "--budget", "5m", "-o", "b.yaml"], set())
    _refuse_changes(["--engine-arg", "hf-token=x"], {"hf-token"})


def test_the_login_of_a_storage_is_not_kept() -> None:
    url = "postgresql://tune:sekrit@127.0.0.1/study"
    for arguments in (["--storage", url, "--seed", "1"], [f"--storage={url}", "--seed", "1"]):
        kept = _without_secrets(arguments)
        assert "sekrit" not in " ".join(kept)
        assert kept[-2:] == ["--seed", "1"]
        assert _drop_redacted(kept) == ["--seed", "1"]
