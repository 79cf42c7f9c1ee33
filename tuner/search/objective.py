"""What "better" means: objectives, SLO feasibility, and when a replay can no longer win.

Turns a measurement into a score that orders configurations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tuner.errors import UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.slo import Slo
from tuner.stats import QUANTILES, short, tail_statistic

# A configuration is hopeless once it is certain to be half as bad again as the best so far:
# ours, well beyond the noise of a single replay.
HOPELESS_RATIO = 1.5
WORST_SLACK = "worst SLO slack"
RATE = "requests_per_s"
# Rates of settings that all do not sustain the load tie within this, unless a larger error is
# known: ours, what two live replays of the same differ by on a quiet machine. Then the tail
# decides.
RATE_TIE_RATIO = 0.05
# What not sustaining the load costs at the least where another setting sustains it, as a share
# of what is optimised: ours, so that who just misses a load is a little worse off than who just
# bears it. Who is overloaded by more than that pays as much as it is overloaded.
MISSED_LOAD = 0.1


class Objective(StrEnum):
    """What is optimised among configurations that meet every SLO."""

    BALANCED = "balanced"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    GOODPUT = "goodput"
    CAPACITY = "capacity"


Bounds = tuple[float | None, float | None]
"""Both ends of an interval; None where it has no end."""


def moved(metric: str, change: float) -> float:
    """Return the change of a metric for that of a score, in which a rate is its inverse.

    >>> moved("e2e_p99", -0.2), moved("requests_per_s", -0.2)
    (-0.2, 0.25)
    """
    return 1 / (1 + change) - 1 if is_rate(metric) else change


def moved_bounds(metric: str, bounds: Bounds) -> Bounds:
    """Return the interval of a metric's change for that of a score, the lower end first.

    >>> moved_bounds("e2e_p99", (-0.5, -0.2)), moved_bounds("requests_per_s", (-0.5, -0.2))
    ((-0.5, -0.2), (0.25, 1.0))
    """
    if not is_rate(metric) or bounds == (None, None):
        return bounds
    low, high = (None if end is None or end <= -1 else moved(metric, end) for end in bounds)
    # A score without end is of a rate that falls to nothing.
    return -1.0 if high is None else high, low


def named(metric: str) -> str:
    """Return a metric as sentences name it: what SLOs leave in words, others as they are.

    >>> named(WORST_SLACK), named("e2e_p99")
    ('the share of its tightest bound that is used', 'e2e_p99')
    """
    return "the share of its tightest bound that is used" if metric == WORST_SLACK else metric


def is_rate(metric: str) -> bool:
    """Return whether more of a metric is better, so that its score is its inverse."""
    return metric.endswith("_per_s") or metric == Objective.CAPACITY


class Tier(StrEnum):
    """How good a configuration can be at all; comparisons stay within one tier."""

    GOOD = "0 good"
    NOT_SUSTAINED = "1 not sustained"
    BREAKS_SLO = "2 breaks an SLO"
    CUT = "3 cut short"
    FAILED = "4 failed"


# What is judged by something else than what is optimised, by what.
_OTHER_TIERS = {Tier.NOT_SUSTAINED: RATE, Tier.BREAKS_SLO: WORST_SLACK}


@dataclass(frozen=True, slots=True)
class Score:
    """A place in the order of configurations: tier first, then the smaller value.

    `metric` names what value is made of; a rate stands as its inverse, so that less is better
    throughout and ratios of values are ratios of the metric. `others` are the values by which
    the other tiers are judged, for the race between replays of different tiers; what is
    optimised is always among them, without end where there is none of it. `slo_used` is
    how much of its tightest SLO is used up and `load_used` how much of what the engine can
    sustain, 1 is all of it; None where that does not count.
    """

    tier: Tier
    value: float
    metric: str
    others: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    slo_used: float | None = field(default=None, compare=False)
    load_used: float | None = field(default=None, compare=False)

    def value_of(self, metric: str) -> float | None:
        """Return the value by a metric of its own or of another tier, None if unknown."""
        return self.value if metric == self.metric else dict(self.others).get(metric)

    @property
    def is_whole(self) -> bool:
        """Whether the replay ran to its end, and completed anything."""
        return self.tier not in (Tier.CUT, Tier.FAILED)

    def value_in(self, tier: Tier) -> float:
        """Return the value by which it would be judged in a tier, without end if unknown."""
        if tier is self.tier:
            return self.value
        value = self.value_of(_OTHER_TIERS.get(tier, self.own_metric))
        return math.inf if value is None else value

    def over(self, other: Score, tier: Tier = Tier.GOOD) -> float | None:
        """Return how many times as much it costs as another by what is judged in a tier.

        None where one of them has no such value, or none with an end.
        """
        ours, theirs = self.value_in(tier), other.value_in(tier)
        return ours / theirs if 0 < ours < math.inf and 0 < theirs < math.inf else None

    def log_over(self, other: Score) -> float:
        """Return the logarithm of `over` by what the objective optimises, NaN without one."""
        ratio = self.over(other)
        return math.nan if ratio is None else math.log(ratio)

    @property
    def own_metric(self) -> str:
        """The metric that the objective optimises."""
        if self.tier is Tier.GOOD:
            return self.metric
        names = [name for name, _ in self.others]
        own = (name for name in names if name not in (RATE, WORST_SLACK))
        return next(own, RATE if RATE in names else self.metric)

    def times(self, times: float) -> Score:
        """Return the score of a setting whose every latency is so many times as long.

        Where that is of another tier it is judged by what counts there.
        """
        if not self.is_whole:
            return self
        tier = self.tier_at(times)
        metric = self.metric if tier is self.tier else _OTHER_TIERS.get(tier, self.own_metric)
        values = {self.metric: self.value, **dict(self.others)}
        values = {name: value * times for name, value in values.items()}
        return replace(
            self,
            tier=tier,
            value=values.pop(metric),
            metric=metric,
            others=tuple(values.items()),
            slo_used=None if self.slo_used is None else self.slo_used * times,
            load_used=None if self.load_used is None else self.load_used * times,
        )

    def tier_at(self, times: float) -> Tier:
        """Return the tier of a setting that is so many times as slow as was predicted."""
        has_bounds = self.slo_used is not None or self.load_used is not None
        if not (self.is_whole and has_bounds):
            return self.tier
        if self.slo_used is not None and self.slo_used * times > 1:
            return Tier.BREAKS_SLO
        if self.load_used is not None and self.load_used * times > 1:
            return Tier.NOT_SUSTAINED
        return Tier.GOOD

    def could_beat(self, other: Score, wrong_ratio: float) -> bool:
        """Return whether this may be the better one where both may be wrong by so much.

        In the value and in every bound: what lies just beyond a bound may meet it, and what
        lies just within may not.
        """
        mine, its = self.tier_at(1 / (1 + wrong_ratio)), other.tier_at(1 + wrong_ratio)
        if mine is not its:
            return mine < its
        if self.value_in(mine) > other.value_in(mine) * (1 + wrong_ratio):
            return False
        if mine is not Tier.NOT_SUSTAINED or self.value_in(mine) < other.value_in(mine):
            return True
        # At no better a rate it must have a chance by its tail.
        return self.value_in(Tier.GOOD) <= other.value_in(Tier.GOOD) * (1 + wrong_ratio)

    def clearly_worse_than(self, other: Score, tolerance_ratio: float) -> bool:
        """Return whether the other wins by more than the tolerance.

        Where neither sustains the load, by its rate; of about the same rate by its tail.
        """
        if self.tier is not other.tier:
            return self.tier > other.tier
        if self.tier is Tier.NOT_SUSTAINED:
            tie_ratio = max(tolerance_ratio, RATE_TIE_RATIO)
            if not self.value <= other.value * (1 + tie_ratio):
                return True
            if other.value > self.value * (1 + tie_ratio):
                return False
            return self.value_in(Tier.GOOD) > other.value_in(Tier.GOOD) * (1 + tolerance_ratio)
        return self.value > other.value * (1.0 + tolerance_ratio)

    @property
    def order(self) -> tuple[str, float]:
        """Return what to sort by."""
        return (str(self.tier), self.value)


@dataclass(frozen=True, slots=True)
class Scoring:
    """The objective together with the SLOs and the tail quantile that the window carries.

    Raises: UsageError for goodput without an SLO on TTFT, TPOT or E2E.
    """

    objective: Objective
    slos: tuple[Slo, ...]
    tail: str

    def __post_init__(self) -> None:
        """Refuse an objective that has nothing to count."""
        if self.objective is Objective.CAPACITY and not self.slos:
            raise UsageError(
                "--objective capacity needs at least one --slo that the load must meet",
                "add for example --slo ttft_p99=500ms --slo tpot_p99=50ms",
            )
        if self.objective is Objective.GOODPUT and not any(s.is_per_request for s in self.slos):
            raise UsageError(
                "--objective goodput needs at least one --slo on ttft, tpot or e2e",
                "add for example --slo ttft_p99=500ms --slo tpot_p99=50ms",
            )

    @property
    def statistics(self) -> Mapping[str, Collection[str]]:
        """The statistics of each latency by which a measurement is placed in the order."""
        found = {"e2e_s": {self._statistic}}
        for slo in self.slos:
            found.setdefault(slo.metric, set()).add(slo.statistic)
        return found

    @property
    def has_no_tail(self) -> bool:
        """Whether the median stands for the tail that is asked, as requests are too few."""
        return self.objective is Objective.BALANCED and self.tail == "p50"

    def score(self, m: Measurement) -> Score:
        """Place a measurement in the order; it has at least `statistics`."""
        if m.cut_reason is not None:
            return Score(Tier.CUT, math.inf, "cut short")
        if m.completed == 0 or m.requests_per_s <= 0:
            return Score(Tier.FAILED, math.inf, "no request completed")
        placed, values = self._place(m), self._own_value(m)
        if self.objective is not Objective.CAPACITY:
            values.insert(0, (RATE, 1 / m.requests_per_s))
        if self.slos:
            values.append((WORST_SLACK, self._slo_used(m)))
        others = tuple((name, value) for name, value in values if name != placed.metric)
        is_bound = self.objective not in (Objective.CAPACITY, Objective.GOODPUT)
        return replace(
            placed,
            others=others,
            slo_used=self._slo_used(m) if self.slos and is_bound else None,
            load_used=_load_used(m) if self.objective is Objective.BALANCED else None,
        )

    def _place(self, m: Measurement) -> Score:
        if self.objective is Objective.CAPACITY:
            return self._score_capacity(m)
        if self.objective is Objective.GOODPUT:
            (metric, value), *_ = self._own_value(m)
            if math.isfinite(value):
                return Score(Tier.GOOD, value, metric)
            return Score(Tier.BREAKS_SLO, self._slo_used(m), WORST_SLACK)
        return self._score_within_slos(m)

    def _score_capacity(self, m: Measurement) -> Score:
        """Place by the largest load, or at a given load by how much of its SLO is used up."""
        for metric, value in self._own_value(m):
            if math.isfinite(value):
                return Score(Tier.GOOD, value, metric)
        used = self._slo_used(m)
        if used > 1:
            return Score(Tier.BREAKS_SLO, used, WORST_SLACK)
        # Within its SLOs though it cannot last: an edge, not a breach.
        return Score(Tier.GOOD if m.is_sustained else Tier.NOT_SUSTAINED, used, WORST_SLACK)

    def _score_within_slos(self, m: Measurement) -> Score:
        """Place a whole measurement by its SLOs first, then by rate or latency."""
        if self._worst_slack(m) > 0:
            return Score(Tier.BREAKS_SLO, self._slo_used(m), WORST_SLACK)
        (metric, value), *_ = self._own_value(m)
        keeps_up = m.is_sustained or self.objective is not Objective.BALANCED
        if not (keeps_up and math.isfinite(value)):
            return Score(Tier.NOT_SUSTAINED, 1 / m.requests_per_s, RATE)
        return Score(Tier.GOOD, value, metric)

    @property
    def _statistic(self) -> str:
        return "p50" if self.objective is Objective.LATENCY else self.tail

    def _own_value(self, m: Measurement) -> list[tuple[str, float]]:
        """Return the value by what the objective optimises, in any tier, without end if none.

        Nothing where only a load is known that is given, and a capacity is asked for.
        """
        match self.objective:
            case Objective.THROUGHPUT:
                return [(RATE, 1 / m.requests_per_s)]
            case Objective.GOODPUT:
                return [("goodput_per_s", 1 / m.goodput_per_s if m.goodput_per_s else math.inf)]
            case Objective.CAPACITY if m.capacity is None:
                return []
            case Objective.CAPACITY:
                return [("capacity", 1 / m.capacity if m.capacity else math.inf)]
            case _:
                value_s = m.latency("e2e_s", self._statistic)
                return [(f"e2e_{self._statistic}", value_s or math.inf)]

    def _slo_used(self, m: Measurement) -> float:
        """Return how much of its tightest SLO a measurement uses up: 1 is all of it."""
        return max(1 + self._worst_slack(m), 1e-9)

    def _worst_slack(self, m: Measurement) -> float:
        """Return the largest slack; an SLO on what the traffic has nothing of has none."""
        slacks = (slo.slack_ratio(m) for slo in self.slos)
        return max((slack for slack in slacks if slack is not None), default=-math.inf)

    def cut_rule(self, best: Score | None, requests: int) -> CutRule:
        """Return when a replay of so many requests is certain to lose to the best so far.

        Exact for quantiles: nearest rank leaves n - ceil(q n) requests above; one more and
        the quantile lies above the bound whatever follows.
        """
        if best is None or not math.isfinite(best.value):
            return CutRule()
        if best.metric == RATE:
            return CutRule(max_clock_s=HOPELESS_RATIO * requests * best.value)
        if best.metric.startswith("e2e_"):
            q = QUANTILES[best.metric.removeprefix("e2e_")]
            allowed = requests - math.ceil(q * requests - 1e-9)
            return CutRule(late_s=HOPELESS_RATIO * best.value, allowed_late=allowed)
        return CutRule()


def recorded_slacks(slos: Iterable[Slo], measurement: Mapping[str, Any]) -> dict[str, float]:
    """Return each SLO's slack in a recorded measurement, feasible at or below zero.

    Raises: KeyError, TypeError if it is none.
    """
    values_s = {slo: recorded_s(slo, measurement) for slo in slos}
    return {
        slo.name: 0.0 if value_s is None else value_s / slo.bound_s - 1.0
        for slo, value_s in values_s.items()
    }


def broken_in(slos: Iterable[Slo], measurement: Mapping[str, Any]) -> list[str]:
    """Name the SLOs that do not hold in a recorded measurement, with what was measured."""
    messages = []
    for slo in slos:
        value_s = recorded_s(slo, measurement)
        if value_s == math.inf:
            lost = measurement[slo.metric]["lost"]
            messages.append(f"{slo.name} has no end: {lost} requests were never answered")
        elif value_s is not None and value_s > slo.bound_s:
            messages.append(f"{slo.name} {short(value_s)} s exceeds {slo.bound_s:g} s")
    return messages


def recorded_s(slo: Slo, measurement: Mapping[str, Any]) -> float | None:
    """Return what an SLO bounds, without end where that is of lost requests; None of none."""
    spread = measurement[slo.metric]
    value_s: float | None = spread[slo.statistic]
    is_endless = spread.get("lost") and (value_s is None or slo.statistic == "mean")
    return math.inf if is_endless else value_s


def _load_used(m: Measurement) -> float | None:
    """Return how much of what the engine can sustain the load takes, above 1 if too much.

    None of a load that is as much as the engine takes, as a closed loop's. Where a queue grew
    or requests timed out though there was room, it is clearly too much.
    """
    used = m.utilisation
    if m.is_sustained:
        return used
    return used if used is not None and used > 1 else 1 + MISSED_LOAD


def make_scoring(objective: Objective, slos: Sequence[Slo], requests: int) -> Scoring:
    """Return the scoring for a window of so many requests.

    Raises: TooFewSamplesError if the window cannot carry an SLO's quantile; UsageError if the
        objective lacks its SLO.
    """
    for slo in slos:
        if slo.is_per_request:
            slo.check_carried_by(requests)
    return Scoring(objective, tuple(slos), tail_statistic(requests))
