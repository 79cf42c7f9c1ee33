"""`tune worker`: others take part in a run's forecast, join late, leave and die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from support.shadow_files import a_profile, a_trace_file
from tuner.shadow.profiles import write_profile

TUNE = [sys.executable, "-m", "tuner.cli"]


def run_command(folder: Path, run_dir: Path, url: str, jobs: int = 1) -> list[str]:
    """Return the run that asks for shadows, with so many of its own."""
    return [
        *(*TUNE, "--method", "shadow", "--force-profile", "--storage", url),
        *("--jobs", str(jobs)),
        *("--max-num-seqs", "2,8,24"),
        # Time for the whole trace on any machine: a slow one replays stretches of it in less.
        *("--budget", "1h"),
        *("--profile", str(folder / "profile.yaml"), "--trace", str(folder / "prod.jsonl")),
        *("--run-dir", str(run_dir), "-o", str(folder / f"{run_dir.name}.yaml")),
    ]


def worker(run_dir: Path, url: str) -> subprocess.Popen[str]:
    command = [*TUNE, "worker", "--storage", url, "--run", str(run_dir), "--jobs", "1"]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def wait_for(path: Path, main: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert main.poll() is None, main.stderr.read() if main.stderr else ""
        time.sleep(0.05)


@pytest.mark.engine
@pytest.mark.slow
def test_workers_that_join_and_die_neither_lose_nor_double_a_setting(
    tmp_path: Path, server: str
) -> None:
    write_profile(tmp_path / "profile.yaml", a_profile())
    a_trace_file(tmp_path / "prod.jsonl", 4_000)
    url = f"postgresql+psycopg://{server}/postgres"
    run_dir = tmp_path / "shared"
    main = subprocess.Popen(
        run_command(tmp_path, run_dir, url), stderr=subprocess.PIPE, text=True
    )
    wait_for(run_dir / "run.json", main)
    doomed, steadfast = worker(run_dir, url), worker(run_dir, url)
    # It dies with a claim in its hands as soon as it has shown its log, thus begun to work.
    while not list(run_dir.glob(f"worker-*-{doomed.pid}.log")) and main.poll() is None:
        time.sleep(0.05)
    doomed.send_signal(signal.SIGKILL)
    _, said = main.communicate(timeout=240)
    _, heard = steadfast.communicate(timeout=60)
    doomed.communicate()
    assert main.returncode == 0, said
    assert steadfast.returncode == 0, heard
    assert "the run is over" in heard
    trials = [json.loads(x) for x in (run_dir / "trials.jsonl").read_text().splitlines()]
    settings = Counter((t["max_num_seqs"], t["max_num_batched_tokens"]) for t in trials)
    assert set(settings.values()) == {1}
    alone = tmp_path / "alone"
    done = subprocess.run(
        run_command(tmp_path, alone, f"sqlite:///{tmp_path / 'alone.db'}", jobs=2),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads((d / "result.json").read_text()) for d in (run_dir, alone)]
    assert answers[0]["recommendation"] == answers[1]["recommendation"]
    lone = [json.loads(x) for x in (alone / "trials.jsonl").read_text().splitlines()]
    assert set(settings) == {(t["max_num_seqs"], t["max_num_batched_tokens"]) for t in lone}
    judged = {(t["max_num_seqs"], t["max_num_batched_tokens"]): t for t in lone}
    for trial in trials:
        # What was cut short was so at the same place, whichever process had it.
        one = judged[trial["max_num_seqs"], trial["max_num_batched_tokens"]]
        assert (trial["tier"], trial["value"]) == (one["tier"], one["value"])
        assert trial["measurement"]["completed"] == one["measurement"]["completed"]


@pytest.mark.engine
def test_a_worker_refuses_another_trace_and_a_folder_without_a_run(tmp_path: Path) -> None:
    def said(*more: str) -> str:
        done = subprocess.run(
            [*TUNE, "worker", "--storage", f"sqlite:///{tmp_path / 's.db'}", *more],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 2
        return done.stderr

    assert "run.json cannot be read" in said("--run", str(tmp_path))
    trace = a_trace_file(tmp_path / "prod.jsonl", 60)
    stored = {"arguments": ["--trace", str(trace)], "trace_sha256": "0" * 64, "study": "x"}
    (tmp_path / "run.json").write_text(json.dumps(stored))
    assert "not the trace that the run was begun with" in said("--run", str(tmp_path))
