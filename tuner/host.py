"""The parent's side of the process in which engine and replay loop live together.

The parent only decides and reports. The child's output goes to a log file, whose last words
explain a death. What the child does is in `child`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tuner.child import STOP, Started, serve_parent
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.errors import EngineError
from tuner.last_words import last_words
from tuner.replay import Progress, ReplayLog
from tuner.replay_plan import ReplayPlan
from tuner.traffic.traces import Trace

# How long a child may take to close its engine before it is killed, in seconds: ours; vLLM's
# workers on several devices take a few.
CLOSE_S = 20.0
_POLL_S = 0.1


def _receive(connection: Connection, process: SpawnProcess) -> tuple[str, Any]:
    """Wait for the child's next message. Raises: EOFError once it is dead and said it all."""
    while not connection.poll(_POLL_S):
        if not process.is_alive() and not connection.poll():
            raise EOFError
    kind, answer = connection.recv()
    return kind, answer


def _strike(process: SpawnProcess | None) -> None:
    """Kill a process and its group, and bury it."""
    if process is not None and process.pid is not None:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(process.pid, signal.SIGKILL)
        process.join(CLOSE_S)


class Host:
    """The parent's handle on the engine's process.

    The process starts with the first request and again after a failure. Every request either
    returns, raises what the child raised, or raises EngineError with the last words of a
    child that died. Which engines it runs may be said, or said anew, before any start.
    """

    def __init__(self, source: EngineSource | None, log_path: Path) -> None:
        self.source = source
        self.log_path = log_path
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._log_mark = 0
        self._asking = threading.RLock()
        self._process_began_s = 0.0
        self.first_answer_s = 0.0
        """What a process takes to give its first answer, its imports included."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(gently=kind is None)

    @property
    def _known_source(self) -> EngineSource:
        if self.source is None:
            raise EngineError("nobody has said which engine to start")
        return self.source

    def prepare(self, how: Callable[[], None]) -> None:
        """Let the child do something that any later start needs, like an import.

        Raises: UsageError, EngineError.
        """
        self._ask("prepare", how)

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Let the child resolve a configuration. Raises: UsageError, EngineError."""
        answer: EngineFacts = self._ask("facts", self._known_source, values)
        return answer

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> Started:
        """Start an engine in the child. Raises: UsageError, EngineError."""
        answer: Started = self._ask("start", self._known_source, values, ceiling)
        return answer

    def load(self, name: str, trace: Trace, seed: int) -> None:
        """Send a trace to the child, to be replayed by name."""
        self._ask("load", name, trace, seed)

    def replay(
        self,
        name: str,
        limits: EngineLimits,
        plan: ReplayPlan,
        on_progress: Callable[[Progress], bool] | None = None,
    ) -> ReplayLog:
        """Replay a loaded trace at the limits. Raises: EngineError, ReplayError, TraceError."""
        answer: ReplayLog = self._ask("replay", name, limits, plan, on_progress=on_progress)
        return answer

    def _ask(
        self,
        name: str,
        *arguments: object,
        on_progress: Callable[[Progress], bool] | None = None,
    ) -> Any:  # noqa: ANN401 - each request has an answer of its own type
        with self._asking:
            return self._asked(name, arguments, on_progress)

    def _asked(
        self,
        name: str,
        arguments: tuple[object, ...],
        on_progress: Callable[[Progress], bool] | None,
    ) -> Any:  # noqa: ANN401 - as above
        connection, process = self._ensure()
        try:
            connection.send((name, arguments))
            while True:
                kind, answer = _receive(connection, process)
                if kind == "progress":
                    if on_progress is not None and not on_progress(answer):
                        connection.send(STOP)
                        on_progress = None
                elif kind == "error":
                    raise answer
                else:
                    if not self.first_answer_s:
                        self.first_answer_s = time.monotonic() - self._process_began_s
                    return answer
        except (EOFError, ConnectionError) as gone:
            raise self._death(name, process) from gone
        except EngineError as error:
            self.kill()
            hint = error.hint or "its last words are there"
            raise EngineError(error.message, f"{hint}; see {self.log_path}") from error

    def _ensure(self) -> tuple[Connection, SpawnProcess]:
        """Return the running child, or start one."""
        if self._process is None or self._connection is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            self._log_mark = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = context.Process(
                target=serve_parent,
                args=(theirs, str(self.log_path)),
                name="tune-engine",
            )
            self._process_began_s = time.monotonic()
            self._process.start()
            theirs.close()
            self._connection = ours
        return self._connection, self._process

    def _death(self, stage: str, process: SpawnProcess) -> EngineError:
        """Describe how the child died, and forget it."""
        process.join(CLOSE_S)
        code = process.exitcode
        self.kill()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how = "killed, most likely out of memory"
        words = last_words(self.log_path, self._log_mark)
        return EngineError(
            f"the engine's process died during {stage} ({how}): {words}",
            f"all it said is in {self.log_path}",
        )

    def kill(self) -> None:
        """End the child and all it started, at once; another thread may be asking it."""
        deadline_s = time.monotonic() + CLOSE_S
        _strike(self._process)
        # Whoever asks hears of the end first, before its connection becomes another's; what it
        # was starting a moment ago goes as well.
        while not (is_ours := self._asking.acquire(timeout=_POLL_S)):
            if time.monotonic() > deadline_s:
                break
            _strike(self._process)
        try:
            _strike(self._process)
            if self._connection is not None:
                self._connection.close()
            self._process = self._connection = None
        finally:
            if is_ours:
                self._asking.release()

    def close(self, *, gently: bool = True) -> None:
        """End the child, giving it time to give back what it holds if gently."""
        if gently and self._process is not None and self._connection is not None:
            with suppress(OSError):
                self._connection.send(("close", ()))
                self._process.join(CLOSE_S)
        self.kill()
