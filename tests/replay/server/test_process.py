"""`tune verify` against vLLM's real API server."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from support.fault_parts import Marked, marked
from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]
TUNE = [sys.executable, "-m", "tuner.cli"]
TRACE = ROOT / "traces" / "chat.jsonl"
PATIENCE_S = 240.0
# Server and client share two cores in some places where this runs.
ASKED = [*TUNE, "verify", "--trace", str(TRACE), "--window", "typical:5s"]
BEARING = ("--max-send-lag", "10s")


@pytest.fixture
def ours() -> Iterator[Marked]:
    """Mark what the test starts: other tests start servers meanwhile."""
    with marked("verify") as found:
        yield found


def verified(ours: Marked, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ASKED, *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=ours.environment(),
    )


def serves(ours: Marked) -> bool:
    """Return whether its API server runs now."""
    return any("-m vllm.entrypoints" in command for command in ours.alive().values())


def test_measured_stands_beside_predicted_and_the_server_is_gone_after(ours: Marked) -> None:
    slos = ("--slo", "e2e_p50=100s", "--slo", "e2e_p50=1ms")
    # Of this window some requests are longer: a prompt, or only a prompt with its answer.
    short = ("--engine-arg", "max-model-len=640")
    done = verified(ours, "--json", *slos, *short, "--predict", "live", *BEARING)
    assert done.returncode == 3, done.stderr
    assert "breaks 1 SLO: e2e_p50" in done.stderr
    found = json.loads(done.stdout)
    measured, predicted = found["measured"], found["predicted"]
    assert measured["offered"] == measured["completed"] + measured["refused"]
    assert measured["refused"] == predicted["refused"]
    assert measured["completed"] == predicted["completed"]
    assert min(measured["refused"], measured["completed"]) > 0
    assert found["failed"] == found["failed_ratio"] == 0
    assert any("HTTP 400" in what for what in found["errors"])
    assert any("answers of other than the recorded" in what for what in found["errors"])
    assert not found["slos_hold"]
    assert len(found["slos_broken"]) == 1
    assert predicted["offered"] == measured["offered"]
    assert 0 < found["gpu_cache_usage_perc"]["max"] <= 1
    assert found["added"]["ttft p50"] is not None
    ours.none_left()


def test_interrupted_it_takes_its_server_along(ours: Marked) -> None:
    command = [*ASKED, "--predict", "none"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=ours.environment()
    )
    deadline = time.monotonic() + PATIENCE_S
    while not serves(ours):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    ours.none_left()


def test_a_taken_port_and_a_server_that_dies_are_reported(ours: Marked) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = verified(ours, "--predict", "none", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be listened on" in done.stderr
    done = verified(ours, "--predict", "none", "--engine-arg", "kv-cache-memory-bytes=1")
    assert done.returncode == 4, done.stderr
    assert "the server ended with code" in done.stderr


def test_killed_it_takes_its_server_along(ours: Marked) -> None:
    command = [*ASKED, "--predict", "none", *BEARING]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=ours.environment())
    deadline_s = time.monotonic() + PATIENCE_S
    assert process.stderr is not None
    while b"the server answers" not in process.stderr.readline():
        assert time.monotonic() < deadline_s
    assert serves(ours)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ours.none_left(60.0)
