"""A day in configurations: one for all hours, a day's and a night's, or the best of each.

Compares what switching gains over the best single configuration. Which hours a recording holds
is the business of `day_hours`, replaying of `retune`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tuner import stats
from tuner.day_hours import Hour
from tuner.engine.limits import EngineLimits
from tuner.search.objective import Tier
from tuner.stats import Estimate


@dataclass(frozen=True, slots=True)
class Served:
    """How a configuration serves a stretch: which demands it meets, and a value, less better.

    The value is comparable between configurations at the same stretch.
    """

    tier: Tier
    value: float


Table = Mapping[EngineLimits, Sequence[Sequence[Served]]]
"""What each configuration makes of each stretch: [hours][dates]."""


@dataclass(frozen=True, slots=True)
class DayPlan:
    """A configuration for each hour, and what it gains over one for the whole day.

    `gain` is 1 - value / value of the fixed one, weighed by requests; its interval varies with
    the dates and the shadow's error, and is None where there is nothing to switch.
    `hours_mended` are those that meet a demand which the fixed one does not.
    """

    by_hour: tuple[EngineLimits, ...]
    gain: Estimate | None
    hours_mended: int

    @property
    def settings(self) -> tuple[EngineLimits, ...]:
        """The different configurations, smallest first."""
        return tuple(sorted(set(self.by_hour)))

    def hours_of(self, hours: Sequence[Hour], limits: EngineLimits) -> list[int]:
        """Return the hours of day that a configuration serves."""
        return [h.hour for h, own in zip(hours, self.by_hour, strict=True) if own == limits]

    @property
    def pays(self) -> bool:
        """Whether switching gains beyond chance and the shadow's error."""
        beyond = self.gain is not None and self.gain.low is not None and self.gain.low > 0
        return beyond or self.hours_mended > 0


@dataclass(frozen=True, slots=True)
class DayPlans:
    """One configuration for all hours, two, and one for each."""

    fixed: DayPlan
    two: DayPlan
    hourly: DayPlan


def day_plans(hours: Sequence[Hour], table: Table, wrong_ratio: float) -> DayPlans:
    """Return the best plans of each kind.

    An hour switches only for a gain beyond the shadow's error: what is not known to be better
    is not worth a restart.
    """
    settings = sorted(table)
    fixed = min(settings, key=lambda limits: _loss(hours, table, [limits] * len(hours)))

    def with_choice(among: Iterable[EngineLimits], base: EngineLimits) -> DayPlan:
        chosen = tuple(
            _best(table, row, list(among), base, wrong_ratio) for row in range(len(hours))
        )
        return _plan(hours, table, chosen, fixed, wrong_ratio)

    pairs = [with_choice(pair, base) for pair in combinations(settings, 2) for base in pair]
    single = _plan(hours, table, (fixed,) * len(hours), fixed, wrong_ratio)
    two = min([single, *pairs], key=lambda plan: _loss(hours, table, plan.by_hour))
    return DayPlans(single, two, with_choice(settings, fixed))


def _loss(
    hours: Sequence[Hour], table: Table, by_hour: Sequence[EngineLimits]
) -> tuple[float, float]:
    """Return what is to be small: demands that are not met first, then the values."""
    tiers = values = 0.0
    for row, (hour, limits) in enumerate(zip(hours, by_hour, strict=True)):
        weight = hour.requests / len(hour.parts)
        for served in table[limits][row]:
            tiers += weight * list(Tier).index(served.tier)
            values += weight * math.log(served.value)
    return tiers, values


def _best(
    table: Table,
    row: int,
    among: Sequence[EngineLimits],
    base: EngineLimits,
    wrong_ratio: float,
) -> EngineLimits:
    """Return what serves an hour best; `base` unless another is clearly better."""

    def of(limits: EngineLimits) -> tuple[float, float]:
        served = table[limits][row]
        tiers = sum(list(Tier).index(s.tier) for s in served) / len(served)
        return tiers, sum(math.log(s.value) for s in served) / len(served)

    best = min(among, key=of)
    (tier, value), (base_tier, base_value) = of(best), of(base)
    if tier < base_tier or (tier == base_tier and base_value - value > math.log1p(wrong_ratio)):
        return best
    return base


def _plan(
    hours: Sequence[Hour],
    table: Table,
    by_hour: tuple[EngineLimits, ...],
    fixed: EngineLimits,
    wrong_ratio: float,
) -> DayPlan:
    """Put a plan together with what it gains, date by date."""
    logs: dict[int, list[tuple[float, float]]] = defaultdict(list)
    mended, switched = 0, 0.0
    for row, (hour, limits) in enumerate(zip(hours, by_hour, strict=True)):
        ours, theirs = table[limits][row], table[fixed][row]
        mended += any(o.tier < t.tier for o, t in zip(ours, theirs, strict=True))
        switched += hour.requests * (limits != fixed)
        weight = hour.requests / len(hour.parts)
        for date, our, their in zip(hour.dates, ours, theirs, strict=True):
            logs[date].append((weight, math.log(our.value) - math.log(their.value)))
    total = sum(hour.requests for hour in hours)
    if not switched:
        return DayPlan(by_hour, None, 0)
    gain = _over_dates(list(logs.values()), math.log1p(wrong_ratio) * switched / total)
    return DayPlan(by_hour, gain, mended)


def _over_dates(dates: Sequence[Sequence[tuple[float, float]]], wrong_log: float) -> Estimate:
    """Return the gain over all dates, each of which counts by its requests."""
    weights = np.array([sum(weight for weight, _ in held) for held in dates])
    means = np.array([sum(w * log for w, log in held) for held in dates]) / weights
    centre = float(means @ weights / weights.sum())
    half = wrong_log
    if len(dates) > 1:
        ratio = stats.paired_ratio(np.exp(means).tolist(), [1.0] * len(dates))
        high = ratio.high if ratio.high is not None else math.inf
        half = math.hypot(wrong_log, math.log(high / ratio.value))
    low, value, high = (1 - math.exp(centre + d) for d in (half, 0.0, -half))
    return Estimate(value, low, high, len(dates))
