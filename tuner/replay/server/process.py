"""vLLM's API server as a child process: started from a file, watched, and stopped again.

Only the server that was started here is ever stopped, with all of its processes. It ends also
where this process is killed, so that no GPU stays taken.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, Self

from tuner.errors import EngineError, UsageError
from tuner.replay.process import START_TIMEOUT_S, last_words
from tuner.replay.server.scrape import DIRECT

# How long a server may take to end on its own before it is killed: ours.
STOP_PATIENCE_S = 20.0
_POLL_S = 0.25
RECORD_FILE: Final = "TUNE_RECORD"
"""Has a server record its traffic, as the recorder's `settings.FILE`."""


def free_port() -> int:
    """Return a port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class ServerProcess:
    """One `vllm serve`, for as long as the block runs.

    Raises: UsageError if the port is taken; EngineError when the server does not start or
        dies.
    """

    def __init__(self, config: Path, log_path: Path, port: int | None = None) -> None:
        self._config, self._log_path = config, log_path
        self._port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._refuse_taken_port()
        command = [
            # -P: a folder of the same name where we are is not the package that is installed.
            *(sys.executable, "-P", *_serve(), "--config", str(self._config.resolve())),
            *("--host", "127.0.0.1", "--port", str(self._port)),
        ]
        # What is replayed here is no traffic that anybody would want recorded.
        env = {key: value for key, value in os.environ.items() if key != RECORD_FILE}
        handle = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "ab") as log:
            # A session of its own, so that Ctrl-C reaches us alone and we end all of it.
            self._process = subprocess.Popen(
                kept(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _refuse_taken_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._port))
            except OSError as cause:
                raise UsageError(
                    f"port {self._port} cannot be listened on: {cause.strerror}",
                    "name another with --port, or leave it out for a free one",
                ) from cause

    def wait_ready(self, patience_s: float = START_TIMEOUT_S) -> float:
        """Wait until the server answers and return how long that took, in seconds.

        Raises: EngineError when it dies first or takes longer than `patience_s`.
        """
        began_s = time.monotonic()
        while not answers(f"{self.url}/health"):
            self.check()
            if time.monotonic() - began_s > patience_s:
                raise EngineError(
                    f"the server did not answer within {patience_s:.0f} s",
                    f"allow more with --start-timeout, or look why in {self._log_path}",
                )
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def check(self) -> None:
        """Raise EngineError with the server's last words if it has died."""
        if self._process is not None and (code := self._process.poll()) is not None:
            words = last_words(self._log_path)
            raise EngineError(
                f"the server ended with code {code}: {words}", f"see {self._log_path}"
            )

    def stop(self) -> None:
        """End the server and every process that it started; a second time does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_PATIENCE_S + _POLL_S * 4)
        finally:
            # Engine processes that outlived their parent are of the same group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_KEEPER = """
import ctypes, os, signal, subprocess, sys, time
parent, patience_s = int(sys.argv[1]), float(sys.argv[2])
def end_all(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s and child is not None and child.poll() is None:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)
child = None
signal.signal(signal.SIGTERM, end_all)
end_with_parent = ctypes.CDLL(None).prctl
end_with_parent(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit(1)
child = subprocess.Popen(sys.argv[3:], preexec_fn=lambda: end_with_parent(1, signal.SIGTERM))
code = child.wait()
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""Runs a command in its own group and ends the group when told, or when who started it dies.

The kernel tells of that death (PR_SET_PDEATHSIG, 1); a group is what no kernel ends for us.
"""


def kept(command: Sequence[str], patience_s: float = STOP_PATIENCE_S) -> list[str]:
    """Return a command that runs this one, and ends it with all it started once we are gone."""
    return [sys.executable, "-P", "-c", _KEEPER, str(os.getpid()), str(patience_s), *command]


def _serve() -> tuple[str, ...]:
    """Return what Python runs for `vllm serve`.

    The command asks for its own distribution and ends where the package comes from another, as
    CPU builds do; the module behind it does not.
    """
    try:
        distribution("vllm")
    except PackageNotFoundError:
        return ("-m", "vllm.entrypoints.openai.api_server")
    return ("-m", "vllm.entrypoints.cli.main", "serve")


def answers(url: str) -> bool:
    """Return whether a GET is answered with 200."""
    try:
        with DIRECT.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
