"""A server ends with whoever started it, whatever ends that, and with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignoring])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
"""A server that hears no SIGTERM, and neither does its engine."""

STARTS = """
import subprocess, sys, time
from tuner.replay.server.process import kept
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
process = subprocess.Popen(kept(command, 1.0), start_new_session=True)
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    """Say whether a process runs; one that nobody has waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def test_a_server_and_its_engine_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    starter = subprocess.Popen([sys.executable, "-c", STARTS, STUBBORN, str(pids)])
    until_s = soon(60)
    while not pids.exists() or not pids.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    left = [int(pid) for pid in pids.read_text().split()]
    assert all(map(is_there, left))
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    until_s = soon(30)
    while any(map(is_there, left)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not any(map(is_there, left))


@pytest.mark.parametrize(
    ("code", "ends"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_how_a_server_ended_is_told(code: str, ends: int) -> None:
    program = "from tuner.replay.server.process import kept; import subprocess, sys; "
    program += "done = subprocess.run(kept([sys.executable, '-c', sys.argv[1]])); "
    program += "print(done.returncode)"
    done = subprocess.run(
        [sys.executable, "-c", program, code], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == ends
