"""`tune worker`: others take rounds of a run's race, join late, leave and die."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.trial import TrialState

from support.job_parts import SHORT, arguments_for
from support.run_parts import a_profile, a_record
from support.toy import ToySource
from support.toy_tune import command, job_on, lines_of, wait_for, worker_on, write_trace
from tuner.errors import EngineError, TraceError, UsageError
from tuner.redact import redacted
from tuner.run.journal import Journal
from tuner.run.options import Method, TuningOptions
from tuner.run.start import prepare
from tuner.run.stored import StoredOptions, read_record
from tuner.run.worker import work
from tuner.shadow.profiles import write_profile

TOY: dict[str, Any] = {"noise_ratio": 0.3, "current": [16, 2048], "pause_s": 4.0}
"""Replays that differ by noise, and each takes a while, so that workers have time to join."""


def begun(arguments: list[str], costs: dict[str, Any] = TOY) -> subprocess.Popen[str]:
    words, nothing = command(arguments, **costs), subprocess.DEVNULL
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=nothing, text=True)


def wait_for_rounds(url: str, run_dir: Path, count: int, main: subprocess.Popen[str]) -> None:
    """Wait until so many rounds are being replayed at once."""
    study = json.loads((run_dir / "run.json").read_text())["study"]
    journal, deadline_s = Journal(url, study, join=True), time.monotonic() + 120.0
    try:
        while len(journal._rounds(TrialState.RUNNING)) < count:
            assert main.poll() is None, "the race is over"
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
    finally:
        journal.close()


@pytest.mark.slow
def test_workers_that_join_and_die_neither_lose_nor_double_a_round(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", n=400, per_s=20.0)
    url, run_dir = f"sqlite:///{tmp_path / 'shared.db'}", tmp_path / "run"
    shared = ["--storage", url]
    main = begun(
        [
            *("--trace", str(trace), "--run-dir", str(run_dir), "--method", "live", *shared),
            *("-o", str(tmp_path / "best.yaml"), "--max-num-seqs", "15,16"),
            *("--window", "all", "--budget", "10m"),
        ]
    )
    wait_for((run_dir / "run.json").exists, main)
    doomed, steadfast = (begun(["worker", *shared, "--run", str(run_dir)]) for _ in range(2))
    try:
        wait_for_rounds(url, run_dir, 2, main)
        doomed.send_signal(signal.SIGKILL)
        _, said = main.communicate(timeout=240)
        _, heard = steadfast.communicate(timeout=60)
    finally:
        for process in (main, doomed, steadfast):
            process.kill()
            process.wait()
    assert main.returncode == 0, said
    assert steadfast.returncode == 0, heard
    assert "the run is over" in heard
    raced = [t for t in lines_of(run_dir / "trials.jsonl") if t["phase"] == "race"]
    counted = Counter((t["race_round"], t["max_num_seqs"]) for t in raced)
    assert set(counted.values()) == {1}
    # Each round was made whole, by one process on one engine.
    makers = {(t["race_round"], t["attempt"]) for t in raced}
    assert len(makers) == len({number for number, _ in makers})
    trials = lines_of(run_dir / "trials.jsonl")
    own = {t["attempt"] for t in trials if t["phase"] == "cold"}
    elsewhere = [number for number, attempt in makers if attempt not in own]
    told = re.search(r"(\d+) rounds were replayed here", heard)
    assert told is not None
    # Those of the one that was killed count where it had ended them.
    assert len(elsewhere) >= int(told[1])
    result = json.loads((run_dir / "result.json").read_text())
    assert result["state"] == "complete"
    assert [t["number"] for t in result["trials"]] == sorted(
        t["number"] for t in result["trials"]
    )


@pytest.mark.slow
def test_a_worker_shares_what_a_run_calibrates_on(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", n=400, per_s=20.0)
    url, run_dir = f"sqlite:///{tmp_path / 'shared.db'}", tmp_path / "run"
    costs = {**TOY, "noise_ratio": 0.05, "pause_s": 0.3}
    own = ["--trace", str(trace), "--run-dir", str(run_dir), "-o", str(tmp_path / "best.yaml")]
    main = begun([*own, "--storage", url, "--window", "all", "--budget", "3m"], costs)
    wait_for((run_dir / "run.json").exists, main)
    worker = begun(["worker", "--storage", url, "--run", str(run_dir)], costs)
    try:
        _, said = main.communicate(timeout=240)
        _, heard = worker.communicate(timeout=60)
    finally:
        for process in (main, worker):
            process.kill()
            process.wait()
    assert main.returncode == 0, said
    assert worker.returncode == 0, heard
    assert re.search(r"calibrate round \d+:", heard), heard
    assert json.loads((run_dir / "result.json").read_text())["state"] == "complete"


def a_stored_run(folder: Path, trace: Path, **changed: Any) -> None:
    """Leave what a run of the toy has begun with."""
    record = a_record("0" * 64, trace=str(trace), storage=f"sqlite:///{folder}/s")
    (folder / "run.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(record, **changed))
    )


def test_a_worker_refuses_a_folder_without_a_run_and_another_trace(tmp_path: Path) -> None:
    arguments = ["--storage", f"sqlite:///{tmp_path / 's.db'}", "--run", str(tmp_path)]
    with pytest.raises(UsageError, match=r"holds no run: run\.json is missing"):
        worker_on(ToySource(), arguments)
    a_stored_run(tmp_path, write_trace(tmp_path / "t.jsonl", n=60))
    with pytest.raises(TraceError, match="not the trace that the run was begun with"):
        worker_on(ToySource(), arguments)


def test_a_worker_refuses_to_measure_on_another_kind_of_machine(tmp_path: Path) -> None:
    from tuner.traffic.formats import read_trace

    trace = write_trace(tmp_path / "t.jsonl", n=60)
    url = f"sqlite:///{tmp_path / 's.db'}"
    Journal(url, "study").close()
    a_stored_run(
        tmp_path,
        trace,
        trace_sha256=read_trace(trace).sha256,
        vllm_version="0.0",
        device="another toy",
    )
    with pytest.raises(UsageError, match="begun with device another toy, here is toy"):
        worker_on(ToySource(), ["--storage", url, "--run", str(tmp_path)])


def test_a_worker_takes_the_configuration_of_the_run_alone(tmp_path: Path) -> None:
    trace, config = write_trace(tmp_path / "t.jsonl", n=60), tmp_path / "current.yaml"
    config.write_text("model: toy\n")
    begun_with = prepare(TuningOptions(str(trace), config=config))
    record = a_record(begun_with.traffic.trace.sha256, trace=str(trace), config=config)
    record = msgspec.structs.replace(record, config_sha256=begun_with.engine.config_sha256)
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    url = f"sqlite:///{tmp_path / 's.db'}"
    journal = Journal(url, "study")
    journal.set_state("done")
    journal.close()
    arguments = ["--storage", url, "--run", str(tmp_path)]
    config.rename(tmp_path / "moved.yaml")
    config.write_text("model: another\n")
    with pytest.raises(UsageError, match="not the configuration that the run was begun with"):
        worker_on(ToySource(), arguments)
    moved = ["--config", str(tmp_path / "moved.yaml")]
    assert worker_on(ToySource(), [*arguments, *moved]) == 0
    # Nothing was left to do, and no engine was started for it.
    assert not list(tmp_path.glob("worker-*.log"))


def test_workers_of_a_run_that_ended_with_an_error_leave_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, url = write_trace(tmp_path / "t.jsonl"), f"sqlite:///{tmp_path / 's.db'}"
    with pytest.raises(EngineError, match="the toy died of its limits"):
        job_on(ToySource(dies_above=0), arguments_for(trace, "--storage", url, *SHORT))
    arguments = ["--storage", url, "--run", str(tmp_path / "run")]
    assert worker_on(ToySource(), arguments) == 0
    told = f"the run ended with an error; if it is resumed (tune --resume {tmp_path / 'run'})"
    assert told in capsys.readouterr().err
    journal, heard = Journal(url, read_record(tmp_path / "run").study, join=True), list[str]()
    journal.set_state("running")

    def hear(text: str) -> None:
        heard.append(text)
        journal.set_state("failed")

    work(tmp_path / "run", url, (), hear, ToySource())
    journal.close()
    assert heard[0].startswith("engine started")
    assert heard[-1].startswith(told)


def test_a_run_of_predictions_has_nothing_for_workers(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.yaml", a_profile())
    profile = str(tmp_path / "profile.yaml")
    record = a_record("", method=Method.SHADOW, profile=profile)
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(UsageError, match="a run of predictions alone"):
        worker_on(ToySource(), ["--storage", "sqlite://", "--run", str(tmp_path)])


def test_a_worker_needs_neither_prices_nor_secrets_of_the_run(tmp_path: Path) -> None:
    """Its engine serves nobody, and it compares no variants."""
    trace = write_trace(tmp_path / "t.jsonl", n=50)
    (tmp_path / "model").mkdir()
    served = redacted({"model": str(tmp_path / "model"), "api-key": "sk-123"})
    write_profile(tmp_path / "profile.yaml", a_profile(serve_values=served))
    options = TuningOptions(
        trace=str(trace),
        profile=str(tmp_path / "profile.yaml"),
        engine_args={"api-key": "sk-123"},
        variants={"fp8": {"quantization": "fp8"}},
        gpu_hour_price=2.5,
    )
    kept = StoredOptions.of(options).without_secrets().restored(tmp_path, {})
    assert prepare(kept, serves=False).engine.values["model"] == served["model"]
