"""The reference: vLLM's own scheduler asked about every step, with predicted step times.

Admission, chunked prefill, prefix hits, preemption and asynchronous scheduling are vLLM's; only
how long a batch takes comes from a step-time model. The simulator is compared with it, and
gives way to it where the two depart. Needs vLLM, but neither model nor device.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from tuner.engine.compat import serve
from tuner.engine.compat.core import BatchReader
from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.guards import GuardedEngine
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch, EngineInfo, Prompt, Step
from tuner.engine.shape import EngineShape
from tuner.engine.steps import StepColumns
from tuner.errors import EngineError
from tuner.replay.loop import replay
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace


class StepTimer(Protocol):
    """What says how long a batch takes."""

    @property
    def tidy_s(self) -> float:
        """Seconds of a turn that completes no batch."""

    def step_s(self, batch: Batch) -> float:
        """Return the seconds of one batch."""

    def launch_s(self, batch: Batch) -> float:
        """Return the seconds that an asynchronous host takes to launch it meanwhile."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch on its way through the model that is not there, with what it will bring out.

    It `ends_s` after the engine was made, on the clock of its turns alone.
    """

    scheduled: Any
    output: Any
    step: Step
    ends_s: float


class ReferenceEngine(GuardedEngine):
    """vLLM's scheduler behind the Engine protocol, with a StepTimer in the model's place.

    `timer` may be another one while the engine is idle. Drafts are `accepted` at such rates.

    Raises: UsageError when vLLM is missing; ShadowError for options that it does not know.
    """

    def __init__(
        self,
        shape: EngineShape,
        ceiling: EngineLimits,
        num_blocks: int,
        timer: StepTimer,
        accepted: Sequence[float] = (),
    ) -> None:
        self._shape, self.timer, self._limits = shape, timer, ceiling
        self._core: SchedulerCore | None = SchedulerCore(shape, ceiling, num_blocks, accepted)
        self._core.set_limits(ceiling)
        self._sent: deque[_Sent] = deque()
        self._batches = BatchReader()
        self._arrived = 0
        self._now_s = 0.0
        self._info = EngineInfo.of_shadow(shape, ceiling, num_blocks)

    def shape(self) -> EngineShape:
        """Return what the scheduler knows of the engine."""
        return self._shape

    @property
    def _open(self) -> SchedulerCore:
        if self._core is None:
            raise EngineError("the engine is closed")
        return self._core

    def _take(self, limits: EngineLimits) -> None:
        self._open.set_limits(limits)

    def _forget(self) -> None:
        if not self._open.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache although it is idle")

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request that answers with exactly output_tokens tokens."""
        self._arrived += 1
        self._open.add(row, prompt, output_tokens, float(self._arrived))

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running."""
        self._open.abort(rows)

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return self._open.has_requests() or bool(self._sent)

    def close(self) -> None:
        """Let go of the scheduler."""
        self._core = None

    def _turn(self) -> Step:
        """Schedule a batch, and complete the one whose turn it is.

        With asynchronous scheduling the next batch is scheduled before the one on its way is
        completed, and the first turn completes none.
        """
        core, began_s = self._open, self._now_s
        if core.has_requests():
            scheduled = core.schedule()
            batch = self._batches.read(scheduled)
            sent = self._launched(scheduled, batch)
            self._sent.append(sent)
            self._now_s += sent.step.launch_s
            goes_on = batch is not None or core.has_requests()
            if len(self._sent) < core.queue_size and goes_on:
                return Step(self._now_s - began_s, (), None, 0, 0, 0.0)
        done = self._sent.popleft()
        self._now_s = max(self._now_s, done.ends_s)
        emitted = core.update(done.scheduled, done.output)
        return replace(done.step, duration_s=self._now_s - began_s, emitted=emitted)

    def _launched(self, scheduled: Any, batch: Batch | None) -> _Sent:
        """Return a batch at the scheduler's state; the device begins with it once free."""
        core = self._open
        running, waiting = core.counts()
        took_s = self.timer.tidy_s if batch is None else self.timer.step_s(batch)
        launch_s = 0.0 if batch is None or core.queue_size == 1 else self.timer.launch_s(batch)
        idle_from_s = self._sent[-1].ends_s if self._sent else self._now_s
        ends_s = max(max(idle_from_s, self._now_s) + took_s, self._now_s + launch_s)
        step = Step(took_s, (), batch, running, waiting, core.usage, launch_s)
        return _Sent(scheduled, core.sampled(scheduled), step, ends_s)


# How long vLLM's scheduler replays, in real time: ours, some thousand steps.
REPLAY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ReferenceReplay:
    """What vLLM's own scheduler made of a replay.

    `steps` is None where it ended in an `error`; `is_whole` tells whether it came to its end.
    """

    vllm_version: str
    steps: StepColumns | None
    is_whole: bool = False
    error: str = ""


def replay_reference(
    shape: EngineShape,
    ceiling: EngineLimits,
    num_blocks: int,
    timer: StepTimer,
    trace: Trace,
    limits: EngineLimits,
    plan: ReplayPlan,
    replay_s: float = REPLAY_S,
    accepted: Sequence[float] = (),
) -> ReferenceReplay | None:
    """Replay a trace on vLLM's scheduler for so long and return its steps.

    Drafts are accepted at rates. Runs in the process of a vLLM engine, and starts neither model
    nor device; None in any other process, where importing vLLM would take longer than all the
    rest. Nothing here imports numba, beside which vLLM does not start on a CPU.

    Raises: ShadowError, UsageError.
    """
    if "vllm" not in sys.modules:
        return None
    serve.prepare_environment()
    version = serve.vllm_version()
    cut = CutRule(max_wall_s=replay_s)
    try:
        engine = ReferenceEngine(shape, ceiling, num_blocks, timer, accepted)
        engine.set_limits(limits)
        prompts = PromptSource(trace, shape.vocab_size)
        log = replay(engine, trace, prompts, replace(plan, keep_steps=True, cut=cut))
    except EngineError as error:
        return ReferenceReplay(version, None, error=error.message)
    return ReferenceReplay(version, log.kept_steps, is_whole=log.cut_reason is None)
