"""What runs in the engine's process: engine and replay loop, asked by the parent.

A crash or an out-of-memory of the engine is then a result and not the end, and stamps never
cross a process border. The parent's side is in `host`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Engine, EngineFacts, EngineInfo, EngineSource
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError, ShadowError, TunerError
from tuner.replay import Progress, ReplayLog, replay
from tuner.replay_plan import ReplayPlan
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace
from tuner.warmup import warm_up

# What a parent sends in the middle of a replay to end it.
STOP = "stop"
_PR_SET_PDEATHSIG = 1


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

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Engine | None = None
        self._traces: dict[str, tuple[Trace, PromptSource]] = {}

    def prepare(self, how: Callable[[], None]) -> None:
        """Do what a later start will not have to do any more."""
        how()

    def facts(self, source: EngineSource, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration."""
        return source.facts(values)

    def start(
        self, source: EngineSource, values: Mapping[str, object], ceiling: EngineLimits
    ) -> Started:
        """Start and warm up an engine, closing the last one first."""
        self.close()
        began_s = time.perf_counter()
        self._engine = source.start(values, ceiling)
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


def serve_parent(connection: Connection, log_path: str) -> None:
    """Serve the parent until it goes."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    child = _Child(connection)
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
                answer: tuple[str, Any] = ("done", getattr(child, name)(*arguments))
            except TunerError as error:
                answer = ("error", error)
            connection.send(answer)
    child.close()
