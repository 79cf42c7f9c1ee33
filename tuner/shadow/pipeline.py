"""Batches scheduled one after the other, or one ahead, with predicted steps.

vLLM decides what is in a batch, as it does in its engine: with asynchronous scheduling the next
batch is scheduled before the one on its way is completed. Of requests that only decode it is
not asked, and like steps are taken at once: `fast_forward` keeps account of them. The promises
that an engine makes to the replay are kept by `shadow`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tuner.engine.compat.core import read_batch
from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import (
    Batch,
    DecodeRun,
    Emitted,
    PrefixCacheNeeded,
    Prompt,
    Rows,
    Step,
)
from tuner.engine.shape import EngineShape
from tuner.shadow.fast_forward import HiddenDecodes


def steps_within(horizon_s: float, first_s: float, growth_s: float) -> int:
    """Return how many steps begin before the horizon, the first one in any case.

    >>> steps_within(0.0, 0.02, 0.0), steps_within(0.05, 0.02, 0.0)
    (1, 3)
    """
    if not math.isfinite(horizon_s):
        return 1 << 40
    if horizon_s <= 0:
        return 1
    # The root of growth/2 n^2 + (first - growth/2) n = horizon, in the form that bears a growth
    # of nearly nothing.
    slope_s = first_s - growth_s / 2
    before = 2 * horizon_s / (slope_s + math.sqrt(slope_s * slope_s + 2 * growth_s * horizon_s))
    # One more begins for the last that ends before the horizon; the root is not exact.
    steps = max(1, math.ceil(before))
    while steps > 1 and _ends_s(steps - 1, first_s, growth_s) >= horizon_s:
        steps -= 1
    while _ends_s(steps, first_s, growth_s) < horizon_s:
        steps += 1
    return steps


def _ends_s(steps: int, first_s: float, growth_s: float) -> float:
    return steps * first_s + growth_s * (steps * (steps - 1) / 2)


class SchedulerPair:
    """Makes each scheduler when it is first wanted, and keeps it."""

    def __init__(self, shape: EngineShape, ceiling: EngineLimits, num_blocks: int) -> None:
        self._shape, self._ceiling, self._num_blocks = shape, ceiling, num_blocks
        self._made: dict[bool, SchedulerCore] = {}

    def core(self, *, sharing: bool) -> SchedulerCore:
        """Return the scheduler for prompts that begin alike, or for such that never do."""
        caches = self._shape.prefix_caching and sharing
        if caches not in self._made:
            shape = replace(self._shape, prefix_caching=caches)
            self._made[caches] = SchedulerCore(shape, self._ceiling, self._num_blocks)
        return self._made[caches]

    def check(self, core: SchedulerCore, *, preempts: bool) -> None:
        """Refuse to go on where the cache that is missing would matter.

        Raises: PrefixCacheNeeded; then the scheduler is made anew, for it is still busy.
        """
        if preempts and self._shape.prefix_caching and not core.caches:
            del self._made[False]
            raise PrefixCacheNeeded("a request was preempted that the prefix cache would help")


_NO_BATCH = Batch(0, 0, 0, 0, 0, 0, 0)
_NOBODY: Rows = np.empty(0, dtype=np.int64)


class StepTimer(Protocol):
    """What says how long a batch takes."""

    @property
    def tidy_s(self) -> float:
        """Seconds of a turn that completes no batch."""

    def step_s(self, batch: Batch) -> float:
        """Return the seconds of one batch."""

    def decode_run_s(self, seqs: int, context_tokens: int) -> tuple[float, float]:
        """Return the seconds of a decode batch, and how much longer each like one after is."""


@dataclass(slots=True)
class _Sent:
    """A batch on its way through the model that is not there.

    `parts` are what vLLM scheduled of it, `rows` the hidden requests that decode in it, `last`
    those of them that have all their tokens then.
    """

    parts: list[tuple[Any, Any]]
    step: Step
    rows: Rows
    last: list[int]

    def drop(self, rows: Sequence[int]) -> None:
        """Take out hidden requests that are aborted while it is on its way."""
        gone = set(rows)
        if gone.intersection(self.rows.tolist()):
            self.rows = self.rows[~np.isin(self.rows, list(gone))]
            self.last = [row for row in self.last if row not in gone]


class Pipeline:
    """One scheduler at work. Hiding off, it is asked about every single step."""

    def __init__(
        self,
        core: SchedulerCore,
        pair: SchedulerPair,
        timer: StepTimer,
        max_model_len: int,
        *,
        hides: bool,
    ) -> None:
        self.core = core
        self._pair, self._timer = pair, timer
        self._is_ahead = core.queue_size > 1
        self._hides = hides
        self._hidden = HiddenDecodes(core, max_model_len)
        self._limits = EngineLimits(1, 1)
        self._sent: deque[_Sent] = deque()
        self._is_blocked = False

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits."""
        self._limits = limits
        self._set_visible_limits()

    def _set_visible_limits(self) -> None:
        """Leave to the scheduler what the hidden requests do not use."""
        hidden, limits = self._hidden, self._limits
        self.core.set_limits(
            limits.max_num_seqs - len(hidden), limits.max_num_batched_tokens - hidden.decoding
        )

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return self.core.has_requests() or bool(self._hidden) or bool(self._sent)

    def add(self, row: int, prompt: Prompt, output_tokens: int, arrival: float) -> None:
        """Queue a request."""
        if self.core.counts()[1] == 0:
            self._is_blocked = False
        self.core.add(row, prompt, output_tokens, arrival)

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running."""
        self._hidden.drop(list(rows))
        for sent in self._sent:
            sent.drop(rows)
        self.core.abort(rows)
        self._is_blocked = False
        self._set_visible_limits()

    def step(self, horizon_s: float) -> Step:
        """Take one turn, or several like ones that begin before horizon_s.

        Raises: PrefixCacheNeeded.
        """
        if not self._hides:
            return self._turn()
        if len(self._hidden) and self._is_alone():
            step = self._run_ahead(horizon_s) if self._is_ahead else self._run(horizon_s)
        else:
            step = self._mixed_turn() if len(self._hidden) else self._turn()
            self._hidden.hide()
        self._set_visible_limits()
        return step

    def _turn(self) -> Step:
        """Let vLLM schedule a batch, and complete the one whose turn it is."""
        if not self.core.has_requests():
            return self._completed()
        scheduled = self._scheduled()
        batch = read_batch(scheduled)
        parts = [(scheduled, self.core.sampled(scheduled))]
        return self._send(_Sent(parts, self._timed(batch), _NOBODY, []))

    def _scheduled(self) -> Any:  # noqa: ANN401 - vLLM is untyped here
        """Return vLLM's next batch. Raises: PrefixCacheNeeded."""
        scheduled = self.core.schedule()
        self._pair.check(self.core, preempts=bool(scheduled.preempted_req_ids))
        return scheduled

    def _send(self, sent: _Sent) -> Step:
        """Send a batch on its way, and complete the one whose turn it is, if it is one's."""
        self._sent.append(sent)
        more = sent.step.batch is not None or self.core.has_requests() or len(self._hidden) > 0
        if len(self._sent) < self.core.queue_size and more:
            return Step(0.0, (), None, 0, 0, 0.0)
        return self._completed()

    def _completed(self) -> Step:
        """Complete the batch whose turn it is."""
        done = self._sent.popleft()
        # Hidden requests come first in vLLM's list, so their blocks are given back first.
        ended = self._end(done.last)
        emitted = [one for part in done.parts for one in self.core.update(*part)]
        run = DecodeRun(done.rows, 1, done.step.duration_s) if done.rows.size else None
        return replace(done.step, emitted=emitted + ended, run=run)

    def _timed(self, batch: Batch | None) -> Step:
        """Return a step of the batch at the scheduler's present state."""
        running, waiting = self.core.counts()
        running += len(self._hidden)
        usage = 1 - self._hidden.free_blocks / self.core.all_blocks
        took_s = self._timer.tidy_s if batch is None else self._timer.step_s(batch)
        return Step(took_s, (), batch, running, waiting, usage, usage)

    def _is_alone(self) -> bool:
        """Whether the scheduler has nothing to decide: none in its sight could be admitted."""
        hidden, limits = self._hidden, self._limits
        running, waiting = self.core.counts()
        if running or not hidden.decoding:
            return False
        is_full = len(hidden) >= limits.max_num_seqs
        is_full = is_full or hidden.decoding >= limits.max_num_batched_tokens
        return waiting == 0 or is_full or self._is_blocked

    def _run(self, horizon_s: float) -> Step:
        """Let the hidden requests decode until something happens to one of them."""
        hidden = self._hidden
        context, rows = hidden.context_tokens, hidden.rows
        first_s, growth_s = self._timer.decode_run_s(len(rows), context)
        most = min(hidden.steps_to_next_end(), steps_within(horizon_s, first_s, growth_s))
        done = hidden.advance(most)
        if done.steps == 0:
            return self._unhidden_turn()
        step = self._like(_decodes(len(rows), context), done.used_mean, done.used_peak)
        run = DecodeRun(rows, done.steps, first_s, growth_s)
        return replace(
            step, duration_s=run.duration_s, emitted=self._end(hidden.take_last()), run=run
        )

    def _run_ahead(self, horizon_s: float) -> Step:
        """Complete the batch that is on its way and those like it but the last."""
        hidden = self._hidden
        if not self._sent or not self._is_like(self._sent[0]):
            return self._mixed_turn()
        sent, rows, blocks = self._sent[0], hidden.rows, self.core.all_blocks
        first_s, growth_s = sent.step.duration_s, self._timer.decode_run_s(len(rows), 0)[1]
        most = min(hidden.steps_to_next_end(), steps_within(horizon_s, first_s, growth_s))
        # Some are left, so that vLLM preempts nobody in the turn in which it sees all of them
        # again: until then it has not cached what it would have of the step on its way.
        done = hidden.advance(most, spare=len(hidden))
        if done.steps == 0:
            return self._unhidden_turn()
        run = DecodeRun(rows, done.steps, first_s, growth_s)
        context = hidden.context_tokens - len(rows)
        last = self._like(_decodes(len(rows), context), done.used_peak, done.used_peak)
        last = replace(last, duration_s=first_s + done.steps * growth_s)
        self._sent[0] = _Sent([], last, rows, hidden.take_last())
        # The last is scheduled and not completed, the first was scheduled before.
        others = done.used_mean * done.steps - done.used_peak
        usage = (sent.step.kv_usage_ratio + others / blocks) / done.steps
        peak = max(sent.step.kv_peak_ratio, done.used_before / blocks)
        return replace(
            sent.step,
            duration_s=run.duration_s,
            kv_usage_ratio=usage,
            kv_peak_ratio=peak,
            run=run,
        )

    def _is_like(self, sent: _Sent) -> bool:
        """Whether what is on its way is what would be scheduled next."""
        hidden, step = self._hidden, sent.step
        return (
            not sent.parts
            and not sent.last
            and step.batch is not None
            and step.batch.decode_seqs == hidden.decoding == len(hidden)
            and (step.running, step.waiting) == (len(hidden), self.core.counts()[1])
            and np.array_equal(sent.rows, hidden.rows)
        )

    def _like(self, batch: Batch, used: float, used_peak: float) -> Step:
        """Return a step of hidden requests alone, of which the caller knows the blocks."""
        blocks, waiting = self.core.all_blocks, self.core.counts()[1]
        running = len(self._hidden)
        return Step(0.0, (), batch, running, waiting, used / blocks, used_peak / blocks)

    def _end(self, rows: list[int]) -> list[Emitted]:
        """End hidden requests that have all their tokens."""
        self._hidden.end(rows)
        if rows:
            self._is_blocked = False
            self._set_visible_limits()
        return [Emitted(row, 0, is_last=True) for row in rows]

    def _unhidden_turn(self) -> Step:
        """Let vLLM decide about everybody, because blocks run short."""
        scheduled = self._hidden.show(on_its_way=bool(self._sent))
        if self._sent:
            sent = self._sent[0]
            sent.rows, sent.last = _NOBODY, []
            if scheduled is not None:
                sent.parts.insert(0, (scheduled, self.core.sampled(scheduled)))
        self._is_blocked = False
        self._set_visible_limits()
        return self._turn()

    def _mixed_turn(self) -> Step:
        """Let vLLM schedule those it sees, beside one step of those it does not."""
        hidden, core = self._hidden, self.core
        context, rows = hidden.context_tokens, hidden.rows
        room = self._limits.max_num_seqs - len(hidden) - core.counts()[0]
        if self._is_ahead and hidden.is_short_for(room):
            return self._unhidden_turn()
        if rows.size and hidden.advance(1).steps == 0:
            return self._unhidden_turn()
        if not self._is_ahead and not core.caches and hidden.is_short_for(room):
            hidden.pay()
        scheduled = self._scheduled()
        batch = read_batch(scheduled)
        parts = [] if batch is None else [(scheduled, core.sampled(scheduled))]
        self._is_blocked = batch is None
        if rows.size:
            batch = batch or _NO_BATCH
            batch = replace(
                batch,
                decode_seqs=batch.decode_seqs + len(rows),
                decode_context_tokens=batch.decode_context_tokens + context,
                preempted=len(scheduled.preempted_req_ids or ()),
            )
        return self._send(_Sent(parts, self._timed(batch), rows, hidden.take_last()))


def _decodes(seqs: int, context_tokens: int) -> Batch:
    return Batch(seqs, 0, 0, context_tokens, 0, 0, 0)
