"""A run of the tool on virtual time: its engine in this process, its clocks moved by no other.

The tool's own computing takes no time then, so that a run of twenty minutes takes seconds and
follows from its seed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast
from unittest.mock import patch

from support.planted import PlantedSource, VirtualClock
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.errors import EngineError
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineStart, _EngineWorker
from tuner.traffic.traces import Trace

_Answer = TypeVar("_Answer")

# What starting the engine's process takes, imports included: ours, as vLLM's does.
PROCESS_S: Final = 8.0


class _Ear:
    """The worker's end of a connection: it passes progress on, and remembers to stop."""

    def __init__(self) -> None:
        self.on_progress: Callable[[Progress], bool] | None = None
        self._is_stopped = False

    def send(self, message: tuple[str, Progress]) -> None:
        """Pass progress on."""
        if self.on_progress is not None and not self.on_progress(message[1]):
            self._is_stopped, self.on_progress = True, None

    def poll(self) -> bool:
        """Whether the replay is to be stopped."""
        return self._is_stopped

    def recv(self) -> str:
        """Return the request to stop."""
        self._is_stopped = False
        return "stop"


class PlantedProcess:
    """Stands in for EngineProcess, in this process and on the source's clock."""

    def __init__(
        self, source: EngineSource, log_path: Path, _start_timeout_s: float = 0.0
    ) -> None:
        self._source, self.log_path = cast("PlantedSource", source), log_path
        self._ear = _Ear()
        self._worker: _EngineWorker | None = None
        self._has_started = self._has_next = False
        self._expected = 0
        self.first_answer_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration."""
        answer: EngineFacts = self._asked("facts", self._source, values)
        return answer

    def expect(self, starts: int) -> None:
        """Say how many engines will start from now on."""
        self._expected = starts

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> EngineStart:
        """Start an engine in a process that has started none; that of the next one imports."""
        if self._has_started:
            self.kill()
        self._has_started = True
        answer: EngineStart = self._asked("start", self._source, values, ceiling)
        if self._expected > 1:
            self._source.clock.pass_s(max(0.0, PROCESS_S - answer.start_s - answer.warm_up_s))
            self._has_next = True
        self._expected = max(0, self._expected - 1)
        return answer

    def load(self, name: str, trace: Trace, seed: int) -> None:
        """Keep a trace, to be replayed by name."""
        self._asked("load", name, trace, seed)

    def replay(
        self,
        name: str,
        limits: EngineLimits,
        plan: ReplayPlan,
        on_progress: Callable[[Progress], bool] | None = None,
    ) -> ReplayLog:
        """Replay a loaded trace at the limits."""
        self._ear.on_progress = on_progress
        answer: ReplayLog = self._asked("replay", name, limits, plan)
        return answer

    def call(self, function: Callable[..., _Answer], *arguments: object) -> _Answer:
        """Call a function as in a process that has not imported vLLM."""
        with patch.dict(sys.modules):
            sys.modules.pop("vllm", None)
            answer: _Answer = self._asked("call", function, arguments)
        return answer

    def _asked(self, name: str, *arguments: object) -> Any:
        if self._worker is None:
            self._source.clock.pass_s(0.0 if self._has_next else PROCESS_S)
            self._has_next = False
            self._worker = _EngineWorker(cast("Any", self._ear))
            self.first_answer_s = self.first_answer_s or PROCESS_S
        try:
            return getattr(self._worker, name)(*arguments)
        except EngineError as error:
            self.kill()
            raise EngineError(error.message, f"see {self.log_path}") from error

    def kill(self) -> None:
        """End the process; the next request starts another."""
        self._worker, self._has_started = None, False

    def close(self, *, gently: bool = True) -> None:  # noqa: ARG002 - as EngineProcess
        """End the process."""
        self.kill()


@contextmanager
def on_virtual_time(clock: VirtualClock) -> Iterator[None]:
    """Have the tool read this clock, and start its engines in this process."""
    with (
        patch.object(time, "monotonic", clock.read),
        patch.object(time, "perf_counter", clock.read),
        patch("tuner.run.tune.EngineProcess", PlantedProcess),
    ):
        yield
