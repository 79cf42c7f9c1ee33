"""vLLM's API server as a child process: started from a file, watched, and stopped again.

Only the server that was started here is ever stopped, with all of its processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self

from tuner.errors import EngineError, UsageError
from tuner.recorder.settings import RECORD_FILE
from tuner.replay.process import START_TIMEOUT_S, last_words

# How long a server may take to end on its own before it is killed: ours.
STOP_PATIENCE_S = 20.0
_POLL_S = 0.25


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

    def __init__(
        self,
        config: Path,
        log_path: Path,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        self._config, self._log_path = config, log_path
        self._port = port or free_port()
        # What is replayed here is no traffic that anybody would want recorded.
        inherited = {key: value for key, value in os.environ.items() if key != RECORD_FILE}
        self._env = {**inherited, **(env or {})}
        self._more = list(more)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._refuse_taken_port()
        command = [
            *(sys.executable, *_serve(), "--config", str(self._config.resolve())),
            *("--host", "127.0.0.1", "--port", str(self._port), *self._more),
        ]
        with self._log_path.open("ab") as log:
            # A session of its own, so that Ctrl-C reaches us alone and we end all of it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
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

    def wait_ready(
        self,
        on_wait: Callable[[float], None] | None = None,
        patience_s: float = START_TIMEOUT_S,
    ) -> float:
        """Wait until the server answers and return how long that took, in seconds.

        Raises: EngineError when it dies first or takes longer than `patience_s`.
        """
        began_s = time.monotonic()
        while not answers(f"{self.url}/health"):
            self.check()
            waited_s = time.monotonic() - began_s
            if waited_s > patience_s:
                raise EngineError(
                    f"the server did not answer within {patience_s:.0f} s",
                    f"allow more with --start-timeout, or look why in {self._log_path}",
                )
            if on_wait is not None:
                on_wait(waited_s)
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def check(self) -> None:
        """Raise EngineError with the server's last words if it has died."""
        if self._process is not None and (code := self._process.poll()) is not None:
            words = last_words(self._log_path)
            raise EngineError(
                f"the server ended with code {code}{': ' + words if words else ''}",
                f"see {self._log_path}",
            )

    def stop(self) -> None:
        """End the server and every process that it started; a second time does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Engine processes that outlived their parent are of the same group.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()


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


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def answers(url: str) -> bool:
    """Return whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - ours to choose
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
