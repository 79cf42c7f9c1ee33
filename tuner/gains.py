"""What one configuration gains over another on the same traffic, stretch by stretch.

Pairs of stretches tell how the gain varies with the traffic, the profile's stated error how far
the shadow itself may be off. Which configurations to compare is left to `check`.

Tried and given up: replaying each stretch by itself. An engine that starts empty has no queue
from before, and so the gain under load comes out too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tuner import stats
from tuner.hashes import Ints
from tuner.metrics import Measurement, measure
from tuner.objective import Goal
from tuner.replay import ReplayLog
from tuner.slo import Slo
from tuner.stats import Estimate
from tuner.timeline import Timelines

STRETCHES: Final = 8
"""Ours: enough for an interval of Student's that is not mostly its factor."""

LEAST_PER_STRETCH: Final = 40
"""Ours: twice what a median demands."""


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a metric improves: a latency's fall, or a rate's rise.

    `ratio` is new / old of the score's value, of which less is better; its interval holds what
    varies between stretches and the shadow's stated error, n is the number of stretches.
    `is_tier_better` says that the new one meets in every stretch what the old one does not.
    """

    metric: str
    ratio: Estimate
    is_tier_better: bool

    @property
    def is_rate(self) -> bool:
        """Whether more of the metric is better, so that its inverse was compared."""
        return self.metric.endswith("_per_s") or self.metric == "capacity"

    @property
    def value(self) -> float:
        """The gain as a share of what there was."""
        return self._share(self.ratio.value)

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and upper end of the gain."""
        low, high = self.ratio.low or 0.0, self.ratio.high or math.inf
        return self._share(high), self._share(low)

    @property
    def pays(self) -> bool:
        """Whether it is a gain beyond the traffic's chance and the shadow's error."""
        return self.interval[0] > 0 or self.is_tier_better

    def _share(self, ratio: float) -> float:
        if not self.is_rate:
            return 1 - ratio
        return 1 / ratio - 1 if ratio > 0 else math.inf

    @property
    def text(self) -> str:
        """Say it in words."""
        low, high = self.interval
        verb = "rises" if self.is_rate else "falls"
        return f"{self.metric} {verb} by {self.value:.1%} ({low:.1%} … {high:.1%})"

    def as_json(self) -> dict[str, Any]:
        """Return the gain for --json."""
        low, high = self.interval
        return {
            "metric": self.metric,
            "value": self.value,
            "interval": [low if math.isfinite(low) else None, high],
            "stretches": self.ratio.n,
            "pays": self.pays,
        }


def by_stretch(log: ReplayLog, stretches: int, slos: Sequence[Slo]) -> list[Measurement]:
    """Return what a replay measured of each of so many stretches, cut by due order.

    The replay goes through: each stretch begins with what the one before has left in flight.
    What is counted by step and not by request, as gaps between tokens, is the whole replay's.

    Shapes: [stretches], each with as many requests, to within one.
    """
    lines = log.timelines
    rows = np.array_split(np.arange(len(lines)), stretches)
    return [measure([replace(log, timelines=_taken(lines, part))], slos) for part in rows]


def _taken(lines: Timelines, rows: Ints) -> Timelines:
    return replace(
        lines,
        due_s=lines.due_s[rows],
        sent_s=lines.sent_s[rows],
        first_s=lines.first_s[rows],
        last_s=lines.last_s[rows],
        output_tokens=lines.output_tokens[rows],
        outcome=lines.outcome[rows],
    )


def gain_over(
    old: Sequence[Measurement],
    new: Sequence[Measurement],
    goal: Goal,
    wrong_ratio: float,
) -> Gain | None:
    """Return what the new one gains, None where fewer than two stretches can be compared.

    Where the two are judged by different metrics, as when one breaks an SLO, the tail of the
    latency is compared, which both have.

    Shapes: old and new are [stretches], pair by pair.
    """
    pairs = [(o, n) for o, n in zip(old, new, strict=True) if _is_whole(o) and _is_whole(n)]
    if len(pairs) < 2:
        return None
    scores = [(goal.score(o), goal.score(n)) for o, n in pairs]
    metrics = {score.metric for both in scores for score in both}
    if len(metrics) == 1:
        metric = metrics.pop()
        values = [(o.value, n.value) for o, n in scores]
    else:
        metric = f"e2e_{goal.tail}"
        values = [
            (o.latency("e2e_s", goal.tail) or 0.0, n.latency("e2e_s", goal.tail) or 0.0)
            for o, n in pairs
        ]
    if min(min(both) for both in values) <= 0:
        return None
    ratio = stats.paired_ratio([n for _, n in values], [o for o, _ in values])
    is_tier_better = all(n.tier < o.tier for o, n in scores)
    return Gain(metric, _widened(ratio, wrong_ratio), is_tier_better)


def _is_whole(measured: Measurement) -> bool:
    return measured.cut_reason is None and measured.completed > 0


def _widened(ratio: Estimate, wrong_ratio: float) -> Estimate:
    """Return the ratio with the shadow's error in its interval; the two are independent."""
    centre = math.log(ratio.value)
    high = ratio.high if ratio.high is not None else math.inf
    half = math.hypot(math.log(high) - centre, math.log1p(wrong_ratio))
    return Estimate(ratio.value, math.exp(centre - half), _exp(centre + half), ratio.n)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700.0 else math.inf
