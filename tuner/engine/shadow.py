"""The shadow engine: vLLM's own scheduler and KV cache, with predicted steps.

Admission, chunked prefill, prefix hits, preemption and asynchronous scheduling are vLLM's;
only how long a batch takes comes from a step-time model. Needs neither model nor device.
Which configurations to try on it is left to `search`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tuner.engine.compat.core import read_batch
from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.fast_forward import HiddenDecodes, is_foreseeable, steps_within
from tuner.engine.protocol import (
    Batch,
    DecodeRun,
    Emitted,
    EngineInfo,
    EngineLimits,
    PrefixCacheNeeded,
    Prompt,
    Step,
)
from tuner.engine.scheduler_pair import SchedulerPair
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError

# Turns without a batch and without a token before the engine counts as stuck: as in `live`.
STUCK_TURNS = 10_000
_NO_BATCH = Batch(0, 0, 0, 0, 0, 0, 0)


class StepTimer(Protocol):
    """What says how long a batch takes."""

    @property
    def tidy_s(self) -> float:
        """Seconds of a turn that completes no batch."""

    def step_s(self, batch: Batch) -> float:
        """Return the seconds of one batch."""

    def decode_run_s(self, seqs: int, context_tokens: int) -> tuple[float, float]:
        """Return the seconds of a decode batch, and how much longer each like one after is."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch on its way through the model that is not there."""

    scheduled: Any
    output: Any
    step: Step


class ShadowEngine:
    """vLLM's scheduler behind the Engine protocol, with a StepTimer in the model's place.

    With `fast` it takes like steps at once and does not ask the scheduler about requests of
    which the answer is known; schedules and timelines are the same either way.
    """

    def __init__(
        self,
        shape: EngineShape,
        ceiling: EngineLimits,
        num_blocks: int,
        timer: StepTimer,
        *,
        fast: bool = True,
    ) -> None:
        self._pair = SchedulerPair(shape, ceiling, num_blocks)
        self._core: SchedulerCore | None = self._pair.core(sharing=True)
        self._shape, self._timer = shape, timer
        self._limits = ceiling
        self._fast = fast and is_foreseeable(shape)
        self._hidden = HiddenDecodes(self._core, shape.max_model_len)
        self._sent: deque[_Sent] = deque()
        self._is_blocked = False
        self._stuck_turns = 0
        self._arrived = 0
        self._info = EngineInfo.of_shadow(shape, ceiling, num_blocks)

    @property
    def info(self) -> EngineInfo:
        """What is known of the engine that this is the shadow of."""
        return self._info

    def shape(self) -> EngineShape:
        """Return what the scheduler knows of the engine."""
        return self._shape

    @property
    def _open_core(self) -> SchedulerCore:
        if self._core is None:
            raise EngineError("the engine is closed")
        return self._core

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits. Raises: EngineError while busy or above the ceiling."""
        if self.has_work():
            raise EngineError("limits change only while the engine is idle")
        if not limits.within(self._info.ceiling):
            raise EngineError(
                f"limits {limits} lie above the start-up values {self._info.ceiling}",
                "start the engine with a higher ceiling",
            )
        self._limits = limits
        self._set_visible_limits()

    def _set_visible_limits(self) -> None:
        """Leave to the scheduler what the hidden requests do not use."""
        hidden, limits = len(self._hidden), self._limits
        self._open_core.set_limits(
            limits.max_num_seqs - hidden, limits.max_num_batched_tokens - hidden
        )

    def reset(self, *, sharing: bool = True) -> None:
        """Forget the prefix cache. Raises: EngineError while busy or if vLLM declines.

        Without sharing a scheduler without a cache decides the same, as long as it preempts
        nobody, and has no blocks to book.
        """
        if self.has_work():
            raise EngineError("the prefix cache is cleared only while the engine is idle")
        core = self._pair.core(sharing=sharing)
        if core is not self._open_core:
            self._use(core)
        if not self._open_core.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache although it is idle")

    def _use(self, core: SchedulerCore) -> None:
        """Go on with an idle scheduler."""
        self._core = core
        self._hidden = HiddenDecodes(core, self._shape.max_model_len)
        self._set_visible_limits()

    def _scheduled(self, core: SchedulerCore) -> Any:  # noqa: ANN401 - vLLM is untyped here
        """Return vLLM's next batch. Raises: PrefixCacheNeeded, and is idle then."""
        scheduled = core.schedule()
        try:
            self._pair.check(core, preempts=bool(scheduled.preempted_req_ids))
        except PrefixCacheNeeded:
            self._sent.clear()
            self._use(self._pair.core(sharing=True))
            raise
        return scheduled

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request that answers with exactly output_tokens tokens."""
        self._arrived += 1
        core = self._open_core
        if core.counts()[1] == 0:
            self._is_blocked = False
        core.add(row, prompt, output_tokens, float(self._arrived))

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running."""
        self._hidden.drop(list(rows))
        self._open_core.abort(rows)
        self._is_blocked = False
        self._set_visible_limits()

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return self._open_core.has_requests() or bool(self._hidden) or bool(self._sent)

    def close(self) -> None:
        """Let go of the scheduler."""
        self._core = None

    def step(self, horizon_s: float = 0.0) -> Step:
        """Take one turn, or several like ones that begin before horizon_s."""
        if not self.has_work():
            raise EngineError("a step was asked of an engine without work")
        if not self._fast:
            step = self._turn()
        elif len(self._hidden) and self._admits_nobody():
            step = self._run(horizon_s)
        else:
            step = self._mixed_turn() if len(self._hidden) else self._turn()
            self._hidden.hide()
            self._set_visible_limits()
        self._stuck_turns = 0 if step.batch or step.emitted else self._stuck_turns + 1
        if self._stuck_turns > STUCK_TURNS:
            raise EngineError(
                f"the engine took {STUCK_TURNS} turns without scheduling anything",
                "a request may be larger than the KV cache",
            )
        return step

    def _turn(self) -> Step:
        """Let vLLM schedule a batch, and complete the one whose turn it is."""
        core = self._open_core
        if core.has_requests():
            scheduled = self._scheduled(core)
            output = core.sampled(scheduled)
            self._sent.append(_Sent(scheduled, output, self._timed(read_batch(scheduled))))
            more = scheduled.total_num_scheduled_tokens > 0 or core.has_requests()
            if len(self._sent) < core.queue_size and more:
                return Step(0.0, (), None, 0, 0, 0.0)
        done = self._sent.popleft()
        return replace(done.step, emitted=core.update(done.scheduled, done.output))

    def _timed(self, batch: Batch | None) -> Step:
        """Return a step of the batch at the scheduler's present state."""
        core = self._open_core
        running, waiting = core.counts()
        running += len(self._hidden)
        usage = 1 - self._hidden.free_blocks / core.all_blocks
        took_s = self._timer.tidy_s if batch is None else self._timer.step_s(batch)
        return Step(took_s, (), batch, running, waiting, usage, usage)

    def _admits_nobody(self) -> bool:
        """Whether the scheduler has nothing to decide: none in its sight could be admitted."""
        core = self._open_core
        running, waiting = core.counts()
        if running:
            return False
        hidden, limits = len(self._hidden), self._limits
        full = hidden >= min(limits.max_num_seqs, limits.max_num_batched_tokens)
        return waiting == 0 or full or self._is_blocked

    def _run(self, horizon_s: float) -> Step:
        """Let the hidden requests decode until something happens to one of them."""
        core, hidden = self._open_core, self._hidden
        seqs, context, rows = len(hidden), hidden.context_tokens, hidden.rows
        first_s, growth_s = self._timer.decode_run_s(seqs, context)
        most = min(hidden.steps_to_next_end(), steps_within(horizon_s, first_s, growth_s))
        done = hidden.advance(most)
        if done.steps == 0:
            return self._unhidden_turn()
        run = DecodeRun(rows, done.steps, first_s, growth_s)
        took_s = done.steps * first_s + growth_s * (done.steps * (done.steps - 1) // 2)
        waiting = core.counts()[1]
        return Step(
            took_s,
            self._ended(),
            Batch(seqs, 0, 0, context, 0, 0, 0),
            seqs,
            waiting,
            done.used_mean / core.all_blocks,
            done.used_peak / core.all_blocks,
            run,
        )

    def _ended(self) -> list[Emitted]:
        """End the hidden requests that have all their tokens."""
        ended = self._hidden.pop_ended()
        if ended:
            self._is_blocked = False
            self._set_visible_limits()
        return [Emitted(row, 0, is_last=True) for row in ended]

    def _unhidden_turn(self) -> Step:
        """Let vLLM decide about everybody, because blocks run short."""
        self._hidden.show()
        self._is_blocked = False
        self._set_visible_limits()
        return self._turn()

    def _mixed_turn(self) -> Step:
        """Let vLLM schedule those it sees, beside one step of those it does not."""
        core, hidden = self._open_core, self._hidden
        seqs, context, rows = len(hidden), hidden.context_tokens, hidden.rows
        running, _ = core.counts()
        room = self._limits.max_num_seqs - seqs - running
        if hidden.advance(1).steps == 0:
            return self._unhidden_turn()
        if not core.caches and hidden.free_blocks < hidden.blocks_wanted(room):
            hidden.pay()
        scheduled = self._scheduled(core)
        seen = read_batch(scheduled)
        self._is_blocked = seen is None
        output = core.sampled(scheduled)
        batch = seen or _NO_BATCH
        batch = replace(
            batch,
            decode_seqs=batch.decode_seqs + seqs,
            decode_context_tokens=batch.decode_context_tokens + context,
            preempted=len(scheduled.preempted_req_ids or ()),
        )
        step = self._timed(batch)
        # Hidden requests come first in vLLM's list, so their blocks are given back first.
        ended = self._ended()
        emitted = core.update(scheduled, output) + ended
        return replace(step, emitted=emitted, run=DecodeRun(rows, 1, step.duration_s))
