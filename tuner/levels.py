"""How full a replay was: quantities that hold from step to step, weighted by time.

Answers mean, tail and peak of queue depth, running sequences and KV usage. Latencies are in
`metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.replay import ReplayLog
from tuner.stats import Tally


@dataclass(frozen=True, slots=True)
class Level:
    """A quantity that holds for a while, such as queue depth, weighted by time."""

    mean: float
    p99: float
    max: float


def levels(logs: Sequence[ReplayLog], name: str) -> Level:
    """Return a level of the steps weighted by time, idle time counting as nothing."""
    held, peak = Tally(), 0.0
    for log in logs:
        idle_s = max(0.0, log.clock_s - log.steps.duration_s)
        held.add_counted(log.steps.levels[name])
        held.add(np.zeros(1), np.array([idle_s]))
        peak = max(peak, log.steps.peaks[name])
    pooled = held.finish()
    if pooled.total_weight <= 0:
        return Level(0.0, 0.0, 0.0)
    return Level(pooled.mean().value, pooled.value_at(0.99), peak)
