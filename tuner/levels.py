"""How full a replay was: quantities that hold from step to step, weighted by time.

Answers mean, tail and peak of queue depth, running sequences and KV usage. Latencies are in
`metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner import stats
from tuner.replay import ReplayLog


@dataclass(frozen=True, slots=True)
class Level:
    """A quantity that holds for a while, such as queue depth, weighted by time."""

    mean: float
    p99: float
    max: float


def levels(logs: Sequence[ReplayLog], column: str) -> Level:
    """Return a step column weighted by time, idle time counting as nothing."""
    values: list[NDArray[np.float64]] = []
    held_s: list[NDArray[np.float64]] = []
    for log in logs:
        steps = log.steps
        idle_s = max(0.0, log.clock_s - float(steps.duration_s.sum()))
        values.append(np.append(getattr(steps, column), 0.0))
        held_s.append(np.append(steps.duration_s, idle_s))
    pooled, weights = np.concatenate(values), np.concatenate(held_s)
    if float(weights.sum()) <= 0:
        return Level(0.0, 0.0, 0.0)
    return Level(
        stats.time_weighted(pooled, weights),
        stats.time_weighted_quantile(pooled, weights, 0.99),
        float(pooled.max()),
    )
