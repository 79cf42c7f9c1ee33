"""What "better" means: objectives, SLO feasibility, and when a replay can no longer win.

Turns a measurement into a score that orders configurations. Which configurations to measure
is left to `search`, and whether a difference is real to `confirm`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tuner import stats
from tuner.errors import TooFewSamplesError, UsageError
from tuner.metrics import Measurement
from tuner.replay_plan import CutRule
from tuner.slo import QUANTILES, Slo

# A configuration is hopeless once it is certain to be half as bad again as the best so far:
# ours, well beyond the noise of a single replay.
HOPELESS_RATIO = 1.5
WORST_SLACK = "worst SLO slack"


class Objective(StrEnum):
    """What is optimised among configurations that meet every SLO."""

    BALANCED = "balanced"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    GOODPUT = "goodput"
    CAPACITY = "capacity"


class Tier(StrEnum):
    """How good a configuration can be at all; comparisons stay within one tier."""

    GOOD = "0 good"
    NOT_SUSTAINED = "1 not sustained"
    BREAKS_SLO = "2 breaks an SLO"
    CUT = "3 cut short"
    FAILED = "4 failed"


@dataclass(frozen=True, slots=True)
class Score:
    """A place in the order of configurations: tier first, then the smaller value.

    `metric` names what value is made of; a rate stands as its inverse, so that less is better
    throughout and ratios of values are ratios of the metric. `others` are the values by which
    the other tiers are judged, for the race between replays of different tiers.
    """

    tier: Tier
    value: float
    metric: str
    others: tuple[tuple[str, float], ...] = field(default=(), compare=False)

    def value_of(self, metric: str) -> float | None:
        """Return the value by a metric of its own or of another tier, None if unknown."""
        return self.value if metric == self.metric else dict(self.others).get(metric)

    def clearly_worse_than(self, other: Score, tolerance_ratio: float) -> bool:
        """Tell whether the other wins by more than the tolerance."""
        if self.tier is not other.tier:
            return self.tier > other.tier
        return self.value > other.value * (1.0 + tolerance_ratio)

    @property
    def order(self) -> tuple[str, float]:
        """Return what to sort by."""
        return (str(self.tier), self.value)


@dataclass(frozen=True, slots=True)
class Goal:
    """The objective together with the SLOs and the tail quantile that the window carries.

    Raises: UsageError for goodput without an SLO on TTFT, TPOT or E2E.
    """

    objective: Objective
    slos: tuple[Slo, ...]
    tail: str

    def __post_init__(self) -> None:
        """Refuse an objective that has nothing to count."""
        per_request = [slo for slo in self.slos if slo.metric in ("ttft_s", "tpot_s", "e2e_s")]
        if self.objective is Objective.CAPACITY and not self.slos:
            raise UsageError(
                "--objective capacity asks how much load the SLOs bear and needs at least one",
                "add for example --slo ttft_p99=500ms --slo tpot_p99=50ms",
            )
        if self.objective is Objective.GOODPUT and not per_request:
            raise UsageError(
                "--objective goodput counts requests within SLOs and needs at least one",
                "add for example --slo ttft_p99=500ms --slo tpot_p99=50ms",
            )

    def score(self, m: Measurement) -> Score:
        """Place a measurement in the order."""
        if m.cut_reason is not None:
            return Score(Tier.CUT, math.inf, "cut short")
        if m.completed == 0 or m.requests_per_s <= 0:
            return Score(Tier.FAILED, math.inf, "no request completed")
        placed = self._place(m)
        values = [("requests_per_s", 1 / m.requests_per_s), *self._own_value(m)]
        if self.slos:
            values.append((WORST_SLACK, self._slo_used(m)))
        others = tuple((name, value) for name, value in values if name != placed.metric)
        return replace(placed, others=others)

    def _place(self, m: Measurement) -> Score:
        """Place a whole measurement in the order."""
        if self.objective is Objective.CAPACITY:
            return self._score_capacity(m)
        if self.objective is Objective.GOODPUT:
            for metric, value in self._own_value(m):
                return Score(Tier.GOOD, value, metric)
            return Score(Tier.BREAKS_SLO, self._slo_used(m), WORST_SLACK)
        return self._score_within_slos(m)

    def _score_capacity(self, m: Measurement) -> Score:
        """Place by the largest load, or at a given load by how much of its SLO is used up."""
        for metric, value in self._own_value(m):
            return Score(Tier.GOOD, value, metric)
        used = self._slo_used(m)
        tier = Tier.GOOD if used <= 1 and m.is_sustained else Tier.BREAKS_SLO
        return Score(tier, used, WORST_SLACK)

    def _score_within_slos(self, m: Measurement) -> Score:
        """Place a whole measurement by its SLOs first, then by rate or latency."""
        if self._worst_slack(m) > 0:
            return Score(Tier.BREAKS_SLO, self._slo_used(m), WORST_SLACK)
        if self.objective is Objective.BALANCED and not m.is_sustained:
            return Score(Tier.NOT_SUSTAINED, 1 / m.requests_per_s, "requests_per_s")
        metric, value = next(iter(self._own_value(m)), (f"e2e_{self._statistic}", math.inf))
        return Score(Tier.GOOD, value, metric)

    @property
    def _statistic(self) -> str:
        return "p50" if self.objective is Objective.LATENCY else self.tail

    def _own_value(self, m: Measurement) -> list[tuple[str, float]]:
        """Return the value by what the objective optimises, in any tier; none if unknown."""
        match self.objective:
            case Objective.THROUGHPUT:
                return [("requests_per_s", 1 / m.requests_per_s)]
            case Objective.GOODPUT:
                return [("goodput_per_s", 1 / m.goodput_per_s)] if m.goodput_per_s else []
            case Objective.CAPACITY:
                return [("capacity", 1 / m.capacity)] if m.capacity else []
            case _:
                value_s = m.latency("e2e_s", self._statistic)
                return [(f"e2e_{self._statistic}", value_s)] if value_s else []

    def _slo_used(self, m: Measurement) -> float:
        """Return how much of its tightest SLO a measurement uses up: 1 is all of it."""
        return max(1 + self._worst_slack(m), 1e-9)

    def _worst_slack(self, m: Measurement) -> float:
        return max((self._slack(slo, m) for slo in self.slos), default=-math.inf)

    @staticmethod
    def _slack(slo: Slo, m: Measurement) -> float:
        slack = slo.slack_ratio(m)
        return 0.0 if slack is None else slack

    def slacks(self, m: Measurement) -> dict[str, float]:
        """Return each SLO's slack, as Optuna takes constraints: feasible at or below zero."""
        return {slo.name: self._slack(slo, m) for slo in self.slos}

    def broken_in(self, measurement: Mapping[str, Any]) -> list[str]:
        """Name the SLOs that do not hold in a recorded measurement, with what was measured."""
        said = []
        for slo in self.slos:
            value_s = measurement[slo.metric][slo.statistic]
            if value_s is not None and value_s > slo.bound_s:
                said.append(f"{slo.name} {value_s:.3g} s exceeds {slo.bound_s:g} s")
        return said

    def cut_rule(self, best: Score | None, requests: int) -> CutRule:
        """Return when a replay of so many requests is certain to lose to the best so far.

        Exact for quantiles: nearest rank leaves n - ceil(q n) requests above; one more and
        the quantile lies above the bound whatever follows.
        """
        if best is None or not math.isfinite(best.value):
            return CutRule()
        if best.metric == "requests_per_s":
            return CutRule(max_clock_s=HOPELESS_RATIO * requests * best.value)
        if best.metric.startswith("e2e_"):
            q = QUANTILES[best.metric.removeprefix("e2e_")]
            allowed = requests - math.ceil(q * requests - 1e-9)
            return CutRule(late_s=HOPELESS_RATIO * best.value, allowed_late=allowed)
        return CutRule()


def tail_statistic(requests: int) -> str:
    """Return the highest quantile that leaves ten of the requests beyond it.

    Raises: TooFewSamplesError below twenty requests, where not even the median does.

    >>> tail_statistic(1000), tail_statistic(300), tail_statistic(150)
    ('p99', 'p95', 'p90')
    """
    for name in ("p99", "p95", "p90", "p50"):
        if stats.carries_quantile(requests, QUANTILES[name]):
            return name
    raise TooFewSamplesError(
        f"{requests} requests are too few to tell configurations apart, at least 20 are needed",
        "widen --window or record more traffic",
    )


def parse_goal(objective: Objective, slos: Sequence[Slo], requests: int) -> Goal:
    """Put the goal together for a window of so many requests.

    Raises: TooFewSamplesError if the window cannot carry an SLO's quantile; UsageError if the
        objective lacks its SLO.
    """
    for slo in slos:
        if slo.metric not in ("itl_s", "decode_step_s"):
            slo.check_carried_by(requests)
    return Goal(objective, tuple(slos), tail_statistic(requests))
