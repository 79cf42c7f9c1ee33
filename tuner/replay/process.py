"""The process in which an engine and the replay loop live, and the parent's handle on it.

The parent requests starts and replays; the child starts the engine, warms it up, replays and
answers. The child's output goes to a log file, whose last words explain a death. No process
starts a second engine: what the first leaves on a device is counted against the next. The
process of an engine that is expected imports vLLM while the one before it starts.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar

from tuner.engine.gpu import Gpus, GpuWatch
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Engine, EngineFacts, EngineInfo, EngineSource
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError, ShadowError, TunerError
from tuner.redact import redacted_text
from tuner.replay.loop import Progress, ReplayLog, replay
from tuner.replay.plan import ReplayPlan
from tuner.replay.signals import undisturbed
from tuner.replay.warm_up import warm_up
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace

_Answer = TypeVar("_Answer")

# What a parent sends in the middle of a replay to end it.
STOP = "stop"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class EngineStart:
    """An engine that runs: what it is and what starting and warming it up took.

    `shape` is what a shadow of it needs; None for the reason `no_shadow`. `others` hold memory
    of its GPUs. `notes` are for the user: how it samples, and what was not warmed up.
    """

    info: EngineInfo
    start_s: float
    warm_up_s: float
    shape: EngineShape | None = None
    no_shadow: str = ""
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextmanager
def _without_main(source: EngineSource) -> Iterator[None]:
    """Keep a child from running the caller's script once more, which may have no guard.

    A source that is defined in the script needs it, and its `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    if type(source).__module__ != "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _EngineWorker:
    """The child's side: its engine and traces between two requests of the parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Engine | None = None
        self._traces: dict[str, tuple[Trace, PromptSource]] = {}

    def facts(self, source: EngineSource, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration."""
        return source.facts(values)

    def start(
        self, source: EngineSource, values: Mapping[str, object], ceiling: EngineLimits
    ) -> EngineStart:
        """Start and warm up the only engine of this process."""
        began_s = time.perf_counter()
        self._engine = source.start(values, ceiling)
        start_s = time.perf_counter() - began_s
        shape, no_shadow = None, ""
        try:
            shape = self._engine.shape()
        except ShadowError as reason:
            no_shadow = reason.message
        info, warm = self._engine.info, warm_up(self._engine)
        notes = tuple(filter(None, (info.sampling, warm.missed(info.ceiling))))
        return EngineStart(info, start_s, warm.took_s, shape, no_shadow, notes)

    def load(self, name: str, trace: Trace, seed: int) -> None:
        """Keep a trace under a name."""
        prompts = PromptSource(trace, self._running.info.vocab_size, seed)
        self._traces[name] = (trace, prompts)

    def replay(self, name: str, limits: EngineLimits, plan: ReplayPlan) -> ReplayLog:
        """Replay a kept trace at the limits, reporting progress on the way."""
        trace, prompts = self._traces[name]
        self._running.set_limits(limits)
        return replay(self._running, trace, prompts, plan, self._report)

    def call(self, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:  # noqa: ANN401
        """Call a function where vLLM is imported."""
        return function(*arguments)

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


def serve_parent(connection: Connection, log_path: str) -> None:
    """Serve the parent until it goes."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # It was gone before; what it has asked for must not start an engine.
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    worker = _EngineWorker(connection)
    with suppress(EOFError, BrokenPipeError):
        while True:
            message = connection.recv()
            if message == STOP:
                # It crossed the answer to the replay that it was meant for.
                continue
            name, arguments = message
            if name == "close":
                break
            try:
                answer: tuple[str, Any] = ("done", getattr(worker, name)(*arguments))
            except TunerError as error:
                answer = ("error", error)
            connection.send(answer)
    worker.close()


_ERROR_LINE = re.compile(r"(\w*(Error|Exception|OutOfMemory\w*)\b.*)")
# How vLLM says that what went wrong stands in the log of a worker of its own.
_ELSEWHERE = re.compile(r"root cause|background process", re.IGNORECASE)


def last_words(log_path: Path, since: int = 0) -> str:
    """Return the last error in a log that names one, or else its last line, without secrets."""
    if not log_path.exists():
        return "it left no log"
    with log_path.open("rb") as log:
        size = log_path.stat().st_size
        log.seek(max(since, size - 65536))
        lines = log.read().decode("utf-8", "replace").splitlines()
    notes = [line.strip() for line in lines if line.strip()]
    for line in reversed(notes):
        match = _ERROR_LINE.search(line)
        if match and not _ELSEWHERE.search(line):
            return redacted_text(match.group(1))[:400]
    return redacted_text(notes[-1])[:400] if notes else "it said nothing"


# How long a child may take to close its engine before it is killed, in seconds: ours; vLLM's
# workers on several devices take a few.
CLOSE_S = 20.0
START_TIMEOUT_S = 1800.0
"""How long a start may take unless said otherwise: ours; weights of a large model come over a
network, and graphs are captured."""
# The process of the next engine begins early where importing takes longer: ours, what it costs
# beside the start is not worth less.
WORTH_S = 3.0
_POLL_S = 0.1


def _shared(others: Sequence[str]) -> str:
    """Say who else is on the GPUs."""
    return (
        f"the GPU is shared with {', '.join(others)}: that memory is missing in the KV cache, "
        "and what computes beside a replay slows it down"
    )


def _receive(child: _Child, until_s: float, on_wait: Callable[[], None]) -> tuple[str, Any]:
    """Wait for the child's next message, until an instant of the monotonic clock.

    Raises: EOFError once the child is dead and no message is left; TimeoutError.
    """
    on_wait()
    while not child.connection.poll(_POLL_S):
        on_wait()
        if not child.process.is_alive() and not child.connection.poll():
            raise EOFError
        if time.monotonic() > until_s:
            raise TimeoutError
    kind, answer = child.connection.recv()
    return kind, answer


@dataclass(frozen=True, slots=True)
class _Child:
    """A process for one engine, and the parent's end of the line to it."""

    process: SpawnProcess
    connection: Connection
    began_s: float

    @classmethod
    def spawned(cls, source: EngineSource, log_path: Path) -> Self:
        """Return a child that waits to be told what to do."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve_parent, args=(theirs, str(log_path)), name="tune-engine"
        )
        child = cls(process, ours, time.monotonic())
        try:
            # A child that is started and never told what to do would show a traceback.
            with undisturbed(), _without_main(source):
                process.start()
        except BaseException:
            # Interrupted: nobody will know of it, and its log's folder may go before it does.
            child.kill()
            raise
        theirs.close()
        return child

    def close(self) -> None:
        """Have it free its resources and end."""
        with suppress(OSError):
            self.connection.send(("close", ()))
            self.process.join(CLOSE_S)

    def kill(self) -> None:
        """Kill it and all it started, and wait for its end."""
        pid = self.process.pid
        if pid is not None:
            # One that was waited for has no id any more that could not be another's.
            is_ended = self.process.exitcode is not None
            for kill in (os.killpg,) if is_ended else (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            self.process.join(CLOSE_S)


class EngineProcess:
    """The parent's handle on the engine's process.

    The process starts with the first request, again after a failure, and anew for every engine
    after the first, or before it if one is expected. Every request either returns, raises what
    the child raised, or raises EngineError with the last words of a child that died, or that
    took longer than `start_timeout_s` to start an engine.

    Units: seconds.
    """

    def __init__(
        self, source: EngineSource, log_path: Path, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._source, self._start_timeout_s = source, start_timeout_s
        self.log_path = log_path
        self._has_started = False
        self._gpus: Gpus | None = None
        self._child: _Child | None = None
        self._next: _Child | None = None
        self._is_next_ready = False
        self._expected = 0
        self._log_mark = 0
        self._requesting = threading.RLock()
        self.first_answer_s = 0.0
        """What a process takes to give its first answer, its imports included."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(gently=kind is None)

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration in the child. Raises: UsageError, EngineError."""
        answer: EngineFacts = self._request("facts", self._source, values)
        return answer

    def expect(self, starts: int) -> None:
        """Say how many engines will start from now on, as far as is known.

        While one starts the process of the next imports, where that takes long.
        """
        self._expected = starts

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> EngineStart:
        """Start an engine in a child that has started none before.

        What was loaded for another one has to be loaded anew. Nothing imports any more once
        this returns.

        Raises: UsageError, EngineError.
        """
        with self._requesting:
            if self._has_started:
                self._end_child()
            self._ensure()
            self._has_started = True
            if self._expected > 1 and self.first_answer_s > WORTH_S:
                self._begin_next()
            answer = self._started(values, ceiling)
            self._expected = max(0, self._expected - 1)
            self._await_next()
            return answer

    def _started(self, values: Mapping[str, object], ceiling: EngineLimits) -> EngineStart:
        """Start an engine in the child, and see who else is on its GPUs."""
        self._gpus = Gpus.of(values)
        own = None if self._child is None else self._child.process.pid
        others = () if self._gpus is None else tuple(self._gpus.others(own))
        try:
            answer: EngineStart = self._request("start", self._source, values, ceiling)
        except EngineError as error:
            if not others:
                raise
            raise EngineError(f"{error.message}; {_shared(others)}", error.hint) from error
        shared = (_shared(others),) if others else ()
        unwatched = () if self._gpus is None else self._gpus.notes
        return replace(answer, others=others, notes=(*shared, *unwatched, *answer.notes))

    def load(self, name: str, trace: Trace, seed: int) -> None:
        """Send a trace to the child, to be replayed by name."""
        self._request("load", name, trace, seed)

    def replay(
        self,
        name: str,
        limits: EngineLimits,
        plan: ReplayPlan,
        on_progress: Callable[[Progress], bool] | None = None,
    ) -> ReplayLog:
        """Replay a loaded trace at the limits, and watch the GPUs meanwhile.

        Raises: EngineError, ReplayError, TraceError.
        """
        watch = GpuWatch(self._gpus)
        answer: ReplayLog = self._request(
            "replay", name, limits, plan, on_progress=on_progress, on_wait=watch.look
        )
        return replace(answer, gpu=watch.log())

    def call(self, function: Callable[..., _Answer], *arguments: object) -> _Answer:
        """Call a function of a module in the child, where vLLM is imported already.

        Raises: TunerError that it raises; EngineError if the child dies.
        """
        answer: _Answer = self._request("call", function, arguments)
        return answer

    def _request(
        self,
        name: str,
        *arguments: object,
        on_progress: Callable[[Progress], bool] | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Any:  # noqa: ANN401 - each request has an answer of its own type
        with self._requesting:
            return self._answer(name, arguments, on_progress, on_wait)

    def _with_cause(self, error: BaseException) -> BaseException:
        """Return an error, with what the log says of it where it points there."""
        if not (isinstance(error, EngineError) and _ELSEWHERE.search(error.message)):
            return error
        words = last_words(self.log_path, self._log_mark)
        return EngineError(f"{error.message}: {words}", error.hint)

    def _answer(
        self,
        name: str,
        arguments: tuple[object, ...],
        on_progress: Callable[[Progress], bool] | None,
        on_wait: Callable[[], None],
    ) -> Any:  # noqa: ANN401 - as above
        child = self._ensure()
        connection = child.connection
        patience_s = self._start_timeout_s if name == "start" else math.inf
        try:
            connection.send((name, arguments))
            until_s = time.monotonic() + patience_s
            while True:
                kind, answer = _receive(child, until_s, on_wait)
                if kind == "progress":
                    if on_progress is not None and not on_progress(answer):
                        connection.send(STOP)
                        on_progress = None
                elif kind == "error":
                    raise self._with_cause(answer)
                else:
                    if not self.first_answer_s:
                        self.first_answer_s = time.monotonic() - child.began_s
                    return answer
        except (EOFError, ConnectionError) as gone:
            raise self._death(name, child.process) from gone
        except TimeoutError as late:
            self._drop_child()
            words = last_words(self.log_path, self._log_mark)
            raise EngineError(
                f"the engine did not start within {patience_s:.0f} s; its last words: {words}",
                f"allow more with --start-timeout, or look why in {self.log_path}",
            ) from late
        except EngineError as error:
            self._drop_child()
            hint = f"{error.hint}; " if error.hint else ""
            message = redacted_text(error.message)
            raise EngineError(message, f"{hint}see {self.log_path}") from error

    def _ensure(self) -> _Child:
        """Return the running child, or make the next one it, or start one."""
        if self._child is None:
            self._await_next()
            self._log_mark = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._child, self._next = self._next, None
        if self._child is None:
            self._child = _Child.spawned(self._source, self.log_path)
        return self._child

    def _begin_next(self) -> None:
        """Have the process of the next engine import what it needs."""
        if self._next is None:
            self._next = _Child.spawned(self._source, self.log_path)
            self._is_next_ready = False
            with suppress(ConnectionError):
                self._next.connection.send(("call", (self._source.prepare, ())))

    def _await_next(self) -> None:
        """Wait until the process of the next engine, if there is one, has imported.

        One that failed is forgotten: the start that needs it has another, and says why.
        """
        if self._next is None:
            return
        is_alive = self._next.process.is_alive()
        if is_alive and not self._is_next_ready:
            try:
                until_s = time.monotonic() + self._start_timeout_s
                kind, _ = _receive(self._next, until_s, lambda: None)
                is_alive = kind == "done"
            except (EOFError, ConnectionError, TimeoutError):
                is_alive = False
        self._is_next_ready = is_alive
        if not is_alive:
            self._next.kill()
            self._next.connection.close()
            self._next = None

    def _death(self, stage: str, process: SpawnProcess) -> EngineError:
        """Return the error for a child that died; the next request starts another."""
        process.join(CLOSE_S)
        code = process.exitcode
        self._drop_child()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how = "killed, most likely out of memory"
        words = last_words(self.log_path, self._log_mark)
        return EngineError(
            f"the engine's process died during {stage} ({how}): {words}",
            f"its log is {self.log_path}",
        )

    def kill(self) -> None:
        """End all children and what they started, at once; a thread may be waiting for one."""
        deadline_s = time.monotonic() + CLOSE_S
        self._kill_all()
        # A thread that waits for an answer fails before its connection becomes another's;
        # what it was starting a moment ago goes as well.
        while not (is_ours := self._requesting.acquire(timeout=_POLL_S)):
            if time.monotonic() > deadline_s:
                break
            self._kill_all()
        try:
            self._kill_all()
            if self._next is not None:
                self._next.connection.close()
                self._next = None
            self._drop_child()
        finally:
            if is_ours:
                self._requesting.release()

    def _kill_all(self) -> None:
        for child in (self._child, self._next):
            if child is not None:
                child.kill()

    def _drop_child(self) -> None:
        """End the child and all it started, at once; the next request has another."""
        if self._child is not None:
            self._child.kill()
            self._child.connection.close()
        self._child = None
        self._has_started = False

    def _end_child(self) -> None:
        """End the child, which has time to free its resources."""
        if self._child is not None:
            self._child.close()
        self._drop_child()

    def close(self, *, gently: bool = True) -> None:
        """End all children; if gently, they have time to free their resources."""
        if gently:
            self._end_child()
        self.kill()
