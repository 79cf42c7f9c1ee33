"""A server that was started to verify something ends with whoever started it, however it ends.

Most are a stand-in by the name of vLLM's: a process that starts another, as vLLM does its
engine, and neither minds SIGTERM. The last are real ones, killed while they start and serve.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from support.fault_parts import Marked, Tally, at_instant, ended, how_many, marked
from support.prometheus_parts import answers, wait_for
from tuner.engine.demo import demo_engine_args
from tuner.replay.server.process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]

STAND_IN = """
import http.server, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", deaf], start_new_session=len(sys.argv) % 2 == 0)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
STARTS = """
import sys, time
from pathlib import Path
from tuner.replay.server.process import ServerProcess
folder, port = Path(sys.argv[1]), int(sys.argv[2])
with ServerProcess(folder / "config.yaml", folder / "server.log", port) as server:
    server.wait_ready()
    (folder / "ready").touch()
    time.sleep(600)
"""
"""What `tune verify` does before it replays anything."""
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGHUP)


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the module that serves is the stand-in."""
    package = tmp_path / "stand_in" / "vllm" / "entrypoints"
    for folder in (package / "openai", package / "cli"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "openai" / "api_server.py").write_text(STAND_IN)
    (package / "cli" / "main.py").write_text(STAND_IN)
    first = str(tmp_path / "stand_in")
    return {"PYTHONPATH": os.pathsep.join([first, os.environ.get("PYTHONPATH", "")])}


def begun(
    ours: Marked, folder: Path, environment: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server as `tune verify` does; return its starter and its port."""
    folder.mkdir(exist_ok=True)
    (folder / "ready").unlink(missing_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(demo_engine_args()))
    port = free_port()
    command = [sys.executable, "-c", STARTS, str(folder), str(port)]
    return ours.start(command, folder / "starter.log", environment), port


def check_gone(ours: Marked, port: int) -> None:
    """Nothing of it runs, and its port can be had again.

    A process that ends gives up its memory, and with that its mark, before its sockets: the
    port is waited for.
    """
    ours.none_left(60.0)
    wait_for(lambda: _is_free(port), lambda: f"port {port} is still taken", 10.0)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_no_server_outlives_who_started_it(
    stand_in: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally = Tally()
    for number in range(how_many(request, 10, 0.05)):
        rng, end = random.Random(f"server {number}"), ENDS[number % len(ENDS)]
        with marked("server") as ours:
            process, port = begun(ours, tmp_path / "home", stand_in)
            if rng.random() < 0.5:
                while process.poll() is None and not (tmp_path / "home" / "ready").exists():
                    time.sleep(0.02)
            at_instant(rng, process, 1.5)
            with tally.fault(f"verify: starter ends by {end.name}", f"number {number}"):
                assert process.poll() is None, (tmp_path / "home" / "starter.log").read_text()
                process.send_signal(end)
                ended(process)
                check_gone(ours, port)
    tally.report(record_property)


@pytest.mark.engine
@pytest.mark.model
def test_a_real_server_ends_too_while_it_starts_and_while_it_serves(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally = Tally()
    for number in range(how_many(request, 2, 0.004)):
        rng = random.Random(f"real {number}")
        with marked("real-server") as ours:
            process, port = begun(ours, tmp_path / "home")
            is_serving = number % 2 == 1
            while process.poll() is None and is_serving and not answers(port, "/health"):
                time.sleep(0.1)
            at_instant(rng, process, 3.0 if is_serving else 20.0)
            with tally.fault("verify: starter of a real vLLM killed", f"number {number}"):
                assert process.poll() is None, (tmp_path / "home" / "starter.log").read_text()
                process.kill()
                ended(process)
                check_gone(ours, port)
    tally.report(record_property)


def test_the_oracle_sees_a_server_that_is_left(
    tmp_path: Path, stand_in: dict[str, str]
) -> None:
    with marked("oracle") as ours:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        port = free_port()
        ours.start([*command, "--port", str(port)], tmp_path / "log", stand_in)
        while not answers(port, "/health"):
            time.sleep(0.05)
        with pytest.raises(AssertionError, match="still running"):
            ours.none_left(0.5)
