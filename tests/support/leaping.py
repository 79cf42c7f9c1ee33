"""A toy that takes like steps at once, which must come to the same as one by one.

It works out beforehand how many decode steps are alike, takes them one by one inside, and tells
of them as one. What a replay makes of that is compared with the plain toy's single steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from support.toy import ToyEngine, ToySource
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import DecodeRun, Emitted, Step


@dataclass(frozen=True, slots=True)
class LeapingSource(ToySource):
    """Starts toys that take like steps at once, as far as the horizon lets them."""

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> LeapingEngine:
        """Start a leaping toy at the ceiling."""
        self.facts(values)
        return LeapingEngine(self, ceiling)


class LeapingEngine(ToyEngine):
    """The toy of a LeapingSource."""

    def step(self, horizon_s: float = 0.0) -> Step:
        """Take one step, or all like ones that begin before the horizon."""
        count = self._like_steps(horizon_s)
        if count < 2:
            return super().step()
        steps = [ToyEngine.step(self) for _ in range(count)]
        first, last = steps[0], steps[-1]
        usage_ratios = [step.kv_usage_ratio for step in steps]
        return Step(
            duration_s=sum(step.duration_s for step in steps),
            emitted=[Emitted(out.row, 0, True) for out in last.emitted if out.is_last],
            batch=first.batch,
            running=first.running,
            waiting=first.waiting,
            kv_usage_ratio=sum(usage_ratios) / count,
            kv_peak_ratio=max(usage_ratios),
            run=DecodeRun(
                np.array([out.row for out in first.emitted]), count, first.duration_s
            ),
        )

    def _like_steps(self, horizon_s: float) -> int:
        """Return for how many steps exactly those who run now decode, each one token."""
        running, limits = self._running, self._limits
        may_admit = bool(self._waiting) and len(running) < limits.max_num_seqs
        decodes_only = all(seq.answered and seq.missing == 1 for seq in running)
        is_noisy = bool(self._source.noise_ratio)
        if not running or may_admit or not decodes_only or is_noisy:
            return 1
        if len(running) > limits.max_num_batched_tokens:
            return 1
        count = min(seq.output_tokens - seq.answered for seq in running)
        step_s = self._source.costs.seconds(len(running), 0)
        if math.isfinite(horizon_s):
            count = min(count, math.ceil(horizon_s / step_s))
        size = self._source.block_size
        blocks = sum(-(-(seq.computed + count) // size) for seq in running)
        return count if blocks <= self._source.num_blocks else 1
