"""The child process in which the engine and the replay loop live together.

A crash or an out-of-memory of the engine is then a result and not the end, and stamps never
cross a process border. The parent only decides and reports. The child's output goes to a log
file, whose last words explain a death.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tuner.engine.protocol import Engine, EngineFacts, EngineInfo, EngineLimits, EngineSource
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError, ShadowError, TunerError
from tuner.last_words import last_words
from tuner.prompts import PromptSource
from tuner.replay import Progress, ReplayLog, replay
from tuner.replay_plan import ReplayPlan
from tuner.traces import Trace
from tuner.warmup import warm_up

# How long a child may take to close its engine before it is killed, in seconds: ours; vLLM's
# workers on several devices take a few.
CLOSE_S = 20.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_STOP = "stop"


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that runs: what it is and what starting and warming it up took.

    `shape` is what a shadow of it has to know, None where there can be none; then `no_shadow`
    says why.
    """

    info: EngineInfo
    start_s: float
    warm_up_s: float
    shape: EngineShape | None = None
    no_shadow: str = ""


class _Child:
    """What the child process holds between two requests of the parent."""

    def __init__(self, connection: Connection, source: EngineSource) -> None:
        self._connection = connection
        self._source = source
        self._engine: Engine | None = None
        self._traces: dict[str, tuple[Trace, PromptSource]] = {}

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration."""
        return self._source.facts(values)

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> Started:
        """Start and warm up an engine, closing the last one first."""
        self.close()
        began_s = time.perf_counter()
        self._engine = self._source.start(values, ceiling)
        start_s = time.perf_counter() - began_s
        shape, no_shadow = None, ""
        try:
            shape = self._engine.shape()
        except ShadowError as reason:
            no_shadow = reason.message
        # Nothing has to warm up where steps are predicted.
        warm_s = 0.0 if self._engine.info.kind == "shadow" else warm_up(self._engine)
        return Started(self._engine.info, start_s, warm_s, shape, no_shadow)

    def load(self, name: str, trace: Trace, seed: int) -> int:
        """Keep a trace under a name and return its length."""
        prompts = PromptSource(trace, self._running.info.vocab_size, seed)
        self._traces[name] = (trace, prompts)
        return len(trace)

    def replay(self, name: str, limits: EngineLimits, plan: ReplayPlan) -> ReplayLog:
        """Replay a kept trace at the limits, reporting progress on the way."""
        trace, prompts = self._traces[name]
        self._running.set_limits(limits)
        return replay(self._running, trace, prompts, plan, self._report)

    def _report(self, progress: Progress) -> bool:
        self._connection.send(("progress", progress))
        if self._connection.poll():
            self._connection.recv()
            return False
        return True

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise EngineError("no engine was started")
        return self._engine

    def close(self) -> None:
        """Close the engine, if any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _child_main(connection: Connection, source: EngineSource, log_path: str) -> None:
    """Serve the parent until it goes."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    child = _Child(connection, source)
    with suppress(EOFError, BrokenPipeError):
        while True:
            message = connection.recv()
            if message == _STOP:
                # It crossed the answer to the replay that it was meant for.
                continue
            name, arguments = message
            if name == "close":
                break
            try:
                answer: tuple[str, Any] = ("done", getattr(child, name)(*arguments))
            except TunerError as error:
                answer = ("error", error)
            connection.send(answer)
    child.close()


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
    child that died.
    """

    def __init__(self, source: EngineSource, log_path: Path) -> None:
        self._source = source
        self.log_path = log_path
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._log_mark = 0
        self._asking = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(gently=kind is None)

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Let the child resolve a configuration. Raises: UsageError, EngineError."""
        answer: EngineFacts = self._ask("facts", values)
        return answer

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> Started:
        """Start an engine in the child. Raises: UsageError, EngineError."""
        answer: Started = self._ask("start", values, ceiling)
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
                        connection.send(_STOP)
                        on_progress = None
                elif kind == "error":
                    raise answer
                else:
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
                target=_child_main,
                args=(theirs, self._source, str(self.log_path)),
                name="tune-engine",
            )
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
        _strike(self._process)
        # Whoever asks hears of the end first, before its connection becomes another's.
        is_ours = self._asking.acquire(timeout=CLOSE_S)
        try:
            _strike(self._process)  # one that was being started a moment ago
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
