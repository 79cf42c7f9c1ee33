"""A run that was interrupted or killed loses nothing it has measured, and goes on."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from support.run_parts import a_record
from support.toy import ToySource
from support.toy_tune import CROWDED, command, job_on, lines_of, wait_for, write_trace
from support.traffic import a_trace
from tuner.cli import hear_endings
from tuner.cli.commands import tune
from tuner.cli.tune import resumed, with_tuning
from tuner.errors import UsageError
from tuner.redact import REDACTED
from tuner.replay.slo import Slo
from tuner.run.directory import RunDir
from tuner.run.options import TraceReading, TuningOptions
from tuner.run.stored import StoredOptions, read_record
from tuner.traffic.formats import ReadOptions, TimeUnit
from tuner.traffic.traces import LoadModel

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


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trace, a run on it that has ended, and what that wrote."""
    folder = tmp_path_factory.mktemp("ended")
    arguments = arguments_for(write_trace(folder / "t.jsonl", n=100))
    more = ["--max-num-seqs", "8,16", "--engine-arg", "api-key=sk-secret"]
    assert job_on(ToySource(CROWDED), [*arguments, *more]) == 0
    return folder


@pytest.fixture
def ended(whole_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the directory of a run that has ended."""
    return shutil.copytree(whole_run / "run", tmp_path / "run")


AGAIN = ("--engine-arg", "api-key=sk-secret")
"""What a run that was begun with a secret is resumed with."""


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


@pytest.mark.slow
def test_a_run_shares_its_directory_with_none_and_on_ctrl_c_writes_the_best_so_far(
    trace: Path,
) -> None:
    run_dir, emitted = trace.parent / "run", trace.parent / "best.yaml"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 3), process)
        # It waits meanwhile: on a busy machine it might else be done by then.
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(UsageError, match="another run is using"):
            job_on(ToySource(CROWDED), ["--resume", str(run_dir)])
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
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
def test_a_terminal_that_is_closed_ends_a_run_as_ctrl_c_does(trace: Path) -> None:
    run_dir, (ours, theirs) = trace.parent / "run", pty.openpty()
    started = command(arguments_for(trace), costs=COSTS)
    plain = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(
        started, stdin=theirs, stdout=theirs, stderr=theirs, env=plain, text=True
    )
    try:
        os.close(theirs)
        wait_for(lambda: has_trials(run_dir, 3), process)
        process.send_signal(signal.SIGSTOP)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert json.loads((run_dir / "result.json").read_text())["state"] == "interrupted"
    assert "interrupted: best so far" in (trace.parent / "best.yaml").read_text()


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = [(kind, signal.getsignal(kind)) for kind in (signal.SIGINT, signal.SIGTERM)]
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hear_endings()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for kind, handler in [*before, (signal.SIGHUP, was)]:
            signal.signal(kind, handler)


@pytest.fixture
def killed(trace: Path) -> Path:
    """Return the directory of a run that was killed after some trials."""
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(lambda: has_trials(run_dir, 4), process)
    return run_dir


def to_the_race(run_dir: Path) -> list[tuple[object, ...]]:
    """Return what trials were for, each once, up to the first round of the race.

    Who replays in later rounds, and whether cold engines start once more, depends on how long
    replays took and on the time that is left.
    """
    last = {"race": 1, "cold": 0}
    trials = lines_of(run_dir / "trials.jsonl")
    early = [t for t in trials if t["race_round"] <= last.get(t["phase"], t["race_round"])]
    return list(dict.fromkeys(map(key_of, early)))


def recommended(run_dir: Path) -> tuple[int, int]:
    found = json.loads((run_dir / "result.json").read_text())["recommendation"]
    return found["max_num_seqs"], found["max_num_batched_tokens"]


def ends_as_uninterrupted(run_dir: Path) -> bool:
    """Whether a run measures up to the race, and chooses, what one does that is not killed."""
    whole = write_trace(run_dir.parent / "whole.jsonl", n=400)
    other = Path(f"{whole}.run")
    arguments = ["--trace", str(whole), "--budget", "60s", "--run-dir", str(other)]
    assert job_on(ToySource(CROWDED), [*arguments, "--method", "live"]) == 0
    assert to_the_race(run_dir) == to_the_race(other)
    return recommended(run_dir) == recommended(other)


@pytest.mark.slow
def test_a_run_killed_in_the_middle_is_resumed_without_loss_or_repetition(killed: Path) -> None:
    before = lines_of(killed / "trials.jsonl")
    assert not (killed / "result.json").exists()
    assert job_on(ToySource(CROWDED), ["--resume", str(killed)]) == 0
    after = lines_of(killed / "trials.jsonl")
    assert after[: len(before)] == before
    assert measured_once(after)
    assert [t["phase"] for t in after].count("current") == 1
    assert len({trial["number"] for trial in after}) == len(after)
    assert (killed.parent / "best.yaml").exists()
    assert ends_as_uninterrupted(killed)


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
    assert measured_once(after)
    assert ends_as_uninterrupted(killed)


def test_a_run_whose_trials_are_nowhere_is_refused_and_left_as_it_is(ended: Path) -> None:
    (ended / "study.db").unlink()
    (ended / "trials.jsonl").unlink()
    with pytest.raises(UsageError, match=r"no study named .* trials\.jsonl holds no trial"):
        job_on(ToySource(CROWDED), ["--resume", str(ended), *AGAIN])
    assert not (ended / "study.db").exists()
    assert (ended / "run.json").exists()


@pytest.mark.slow
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
    assert job_on(ToySource(CROWDED), ["--resume", str(ended), *AGAIN]) == 0
    assert (ended / "trials.1.jsonl").read_text() == damaged
    assert path.read_text().splitlines() == lines
    shown = capsys.readouterr().err
    message = "1 trials that the study does not know and 2 damaged lines"
    assert message in " ".join(shown.split())


@pytest.mark.slow
def test_a_run_killed_in_the_race_is_resumed_too(trace: Path) -> None:
    run_dir = trace.parent / "run"
    with running(arguments_for(trace)) as process:
        wait_for(
            lambda: any(t["phase"] == "race" for t in lines_of(run_dir / "trials.jsonl")),
            process,
        )
    assert job_on(ToySource(CROWDED), ["--resume", str(run_dir)]) == 0
    after = lines_of(run_dir / "trials.jsonl")
    assert measured_once(after)


def test_a_directory_that_holds_a_run_is_not_overwritten(trace: Path) -> None:
    run_dir = trace.parent / "run"
    RunDir(run_dir, resume=False).write_json("run.json", {})
    with pytest.raises(UsageError, match="holds a run already") as caught:
        job_on(ToySource(CROWDED), arguments_for(trace))
    assert f"--resume {run_dir}" in caught.value.hint


def test_another_trace_is_refused(ended: Path) -> None:
    other = write_trace(ended.parent / "other.jsonl", n=400, seed=1)
    with pytest.raises(UsageError, match="the trace is not the one"):
        job_on(ToySource(CROWDED), ["--resume", str(ended), *AGAIN, "--trace", str(other)])


def test_a_finished_run_is_resumed_to_the_same_end_with_its_secret_given_again(
    whole_run: Path, ended: Path
) -> None:
    kept = json.loads((ended / "run.json").read_text())["options"]
    assert kept["engine_args"] == {"api-key": REDACTED}
    with pytest.raises(UsageError, match="--engine-arg api-key is a secret"):
        job_on(ToySource(CROWDED), ["--resume", str(ended)])
    before, again = lines_of(ended / "trials.jsonl"), ended.parent / "again.yaml"
    assert job_on(ToySource(CROWDED), ["--resume", str(ended), *AGAIN, "-o", str(again)]) == 0
    assert lines_of(ended / "trials.jsonl") == before
    emitted = yaml.safe_load(again.read_text())
    assert emitted == yaml.safe_load((whole_run / "best.yaml").read_text())
    assert emitted["api-key"] == "sk-secret"
    assert b"sk-secret" not in b"".join(p.read_bytes() for p in ended.iterdir())


def test_what_was_found_is_told_where_the_file_cannot_be_written(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="/dev/full cannot be written") as shown:
        job_on(ToySource(CROWDED), ["--resume", str(ended), *AGAIN, "-o", "/dev/full"])
    assert f"tune emit {ended} --format vllm -o FILE" in shown.value.hint
    err = capsys.readouterr().err
    assert "\nlimited by: " in err
    assert f"evidence in {ended}" in err


def test_a_directory_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no run to resume: run\.json is missing"):
        job_on(ToySource(), ["--resume", str(tmp_path)])


def test_a_run_that_is_damaged_or_of_another_version_says_so(tmp_path: Path) -> None:
    for content, reason in (
        ('{"arguments": [', "cannot be read"),
        ('{"schema": 2, "study": "x"}', "cannot be read: Object missing required field"),
        ('{"study": "x", "arguments": ["--trace", "t"]}', "schema must be 2, got 1"),
    ):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UsageError, match=reason) as caught:
            job_on(ToySource(), ["--resume", str(tmp_path)])
        assert "start a new" in caught.value.hint


def test_a_profile_fills_in_what_the_command_line_leaves_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def filled(*arguments: str) -> dict[str, Any]:
        return with_tuning(tune.make_context("tune", list(arguments)).params)

    plain, batch = filled("--trace", "t"), filled("--trace", "t", "--tuning", "batch")
    assert (plain["objective"], plain["slo"]) == ("balanced", ())
    assert batch["objective"] == "throughput"
    assert capsys.readouterr().err == ""
    typed = ("--slo", "e2e_p50=9s", "--objective", "latency", "--max-num-seqs", "3")
    mine = filled("--trace", "t", "--tuning", "interactive", *typed)
    assert mine["slo"] == (Slo.parse("e2e_p50=9s"),)
    assert (mine["objective"], mine["max_num_seqs"]) == ("latency", (3,))
    assert "without ttft_p99=0.5s, tpot_p99=0.05s\n" in capsys.readouterr().err


def resumed_with(folder: Path, *typed: str) -> TuningOptions:
    return resumed(tune.make_context("tune", ["--resume", str(folder), *typed]))


def stored(folder: Path, **options: Any) -> None:
    content = msgspec.json.encode(a_record("0" * 64, **options))
    (folder / "run.json").write_bytes(content)


def test_a_resumed_run_refuses_what_would_mix_measurements(tmp_path: Path) -> None:
    stored(tmp_path)
    for changed in (["--load", "2"], ["--seed=3"], ["--slo", "e2e_p50=9s"]):
        with pytest.raises(UsageError, match=f"{changed[0][:6]}.* cannot change when a run"):
            resumed_with(tmp_path, *changed)
    with pytest.raises(UsageError, match="engine_args cannot change when a run is resumed"):
        read_record(tmp_path).options.check_goes_on(
            resumed_with(tmp_path, "--engine-arg", "dtype=float16")
        )


def test_every_option_comes_back_from_disk_as_it_was_given(tmp_path: Path) -> None:
    rows = ReadOptions(only_model="m", time_unit=TimeUnit.MILLISECONDS, seed=7)
    options = TuningOptions(
        trace=("a.jsonl", "b.jsonl"),
        config={"max-num-seqs": 8},
        engine_args={"dtype": "bfloat16"},
        slos=(Slo.parse("ttft_p99=0.1234567s"),),
        window="peak:300s",
        load=1.1,
        load_model=LoadModel.CLOSED,
        concurrency=4,
        is_greedy=True,
        ladder=(1, 3),
        seed=7,
        reading=TraceReading("csv", rows, is_spread=True),
        notes={"output": "best.yaml"},
    )
    kept = msgspec.json.encode(StoredOptions.of(options))
    again = msgspec.json.decode(kept, type=StoredOptions).restored(tmp_path, {})
    assert again == replace(options, run_dir=tmp_path, is_resumed=True)


def test_what_may_be_typed_anew_replaces_what_was_kept(tmp_path: Path) -> None:
    stored(tmp_path, load=2.0, notes={"output": "old.yaml", "emit_format": "args"})
    typed = ("--trace", "moved.jsonl", "--budget", "5m", "-o", "new.yaml")
    options = resumed_with(tmp_path, *typed)
    assert options.trace == ("moved.jsonl",)
    assert (options.budget_s, options.load) == (300.0, 2.0)
    assert options.notes == {"output": "new.yaml", "emit_format": "args"}


def test_the_login_of_a_storage_has_to_be_given_again(tmp_path: Path) -> None:
    url = "postgresql://tune:sekrit@127.0.0.1/study"
    stored(tmp_path, storage=url)
    assert "sekrit" not in (tmp_path / "run.json").read_text()
    with pytest.raises(UsageError, match="--storage is a secret or holds one"):
        resumed_with(tmp_path)
    assert resumed_with(tmp_path, "--storage", url).storage == url


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("storage", "postgresql://127.0.0.1/study?user=tune&password=sekrit"),
        ("model", "https://me:sekrit@hub.example/m"),
    ],
)
def test_whatever_url_holds_a_secret_has_to_be_given_again(
    tmp_path: Path, option: str, url: str
) -> None:
    stored(tmp_path, **{option: url})
    assert "sekrit" not in (tmp_path / "run.json").read_text()
    with pytest.raises(UsageError, match=f"--{option} is a secret or holds one"):
        resumed_with(tmp_path)
    assert getattr(resumed_with(tmp_path, f"--{option}", url), option) == url


def test_a_trace_that_a_program_gave_has_to_be_named(tmp_path: Path) -> None:
    stored(tmp_path, trace=a_trace([0.0, 1.0]))
    with pytest.raises(UsageError, match="which gave the trace itself") as caught:
        resumed_with(tmp_path)
    assert "--trace" in caught.value.hint
    assert resumed_with(tmp_path, "--trace", "t.jsonl").trace == ("t.jsonl",)
