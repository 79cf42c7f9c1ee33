"""`tune verify` against vLLM's real API server."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]
TUNE = [sys.executable, "-m", "tuner.cli"]
TRACE = ROOT / "traces" / "chat.jsonl"
PATIENCE_S = 240.0
# Server and client share two cores in some places where this runs.
ASKED = [*TUNE, "verify", "--trace", str(TRACE), "--window", "typical:5s"]
BEARING = ("--max-send-lag", "10s")


def verified(*more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ASKED, *more], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def servers() -> set[int]:
    """Return the processes of API servers that run now."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"vllm.entrypoints.openai.api_server" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_measured_stands_beside_predicted_and_the_server_is_gone_after() -> None:
    before = servers()
    slos = ("--slo", "e2e_p50=100s", "--slo", "e2e_p50=1ms")
    # Of this window some requests are longer: a prompt, or only a prompt with its answer.
    short = ("--engine-arg", "max-model-len=640")
    done = verified("--json", *slos, *short, "--predict", "live", *BEARING)
    assert done.returncode == 3, done.stderr
    assert "breaks 1 SLO: e2e_p50" in done.stderr
    found = json.loads(done.stdout)
    ours, theirs = found["measured"], found["predicted"]
    assert ours["offered"] == ours["completed"] + ours["refused"]
    assert (ours["refused"], ours["completed"]) == (theirs["refused"], theirs["completed"])
    assert min(ours["refused"], ours["completed"]) > 0
    assert found["failed"] == found["failed_ratio"] == 0
    assert any("HTTP 400" in what for what in found["errors"])
    assert any("answers of other than the recorded" in what for what in found["errors"])
    assert not found["slos_hold"]
    assert len(found["slos_broken"]) == 1
    assert found["predicted"]["offered"] == found["measured"]["offered"]
    assert 0 < found["gpu_cache_usage_perc"]["max"] <= 1
    assert found["added"]["ttft p50"] is not None
    assert servers() <= before


def test_interrupted_it_takes_its_server_along() -> None:
    before = servers()
    process = subprocess.Popen([*ASKED, "--predict", "none"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not servers() - before:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert servers() <= before


def test_a_taken_port_and_a_server_that_dies_are_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = verified("--predict", "none", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be listened on" in done.stderr
    done = verified("--predict", "none", "--engine-arg", "kv-cache-memory-bytes=1")
    assert done.returncode == 4, done.stderr
    assert "the server ended with code" in done.stderr


def test_killed_it_takes_its_server_along() -> None:
    before = servers()
    process = subprocess.Popen([*ASKED, "--predict", "none", *BEARING], stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + PATIENCE_S
    assert process.stderr is not None
    while b"the server answers" not in process.stderr.readline():
        assert time.monotonic() < deadline_s
    assert servers() - before
    process.send_signal(signal.SIGKILL)
    process.wait()
    while servers() - before and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not servers() - before
