"""A recording's calendar: its hours of day replayed in the shadow, and the plans that follow.

Each hour is ranked by itself; what won anywhere is then replayed in all hours, so that plans
compare like with like. Which plans there are is decided in `day_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.day_hours import Hour, clock_spans
from tuner.day_plan import DayPlan, DayPlans, Served, day_plans
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.retune import Outcome, Retune
from tuner.search.budget import Aim
from tuner.search.objective import Goal, Tier
from tuner.search.trials import leader
from tuner.stats import tail_statistic
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class Calendar:
    """What came out: the hours, the plans, and how they were judged."""

    hours: tuple[Hour, ...]
    plans: DayPlans
    metric: str
    present: EngineLimits
    wrong_ratio: float

    def as_json(self) -> dict[str, Any]:
        """Return the calendar for --json."""
        plans = {"fixed": self.plans.fixed, "two": self.plans.two, "hourly": self.plans.hourly}
        return {
            "engine": "shadow",
            "present": _limits(self.present),
            "error_ratio": self.wrong_ratio,
            "metric": self.metric,
            "hours": [
                {
                    "hour": hour.hour,
                    "requests": hour.requests,
                    "dates": len(hour.dates),
                    "best": _limits(self.plans.hourly.by_hour[row]),
                    "in_two": _limits(self.plans.two.by_hour[row]),
                }
                for row, hour in enumerate(self.hours)
            ],
            "plans": {name: self._plan(plan) for name, plan in plans.items()},
        }

    def _plan(self, plan: DayPlan) -> dict[str, Any]:
        gain = plan.gain
        return {
            "settings": [
                {**_limits(limits), "hours": plan.hours_of(self.hours, limits)}
                for limits in plan.settings
            ],
            "gain": None if gain is None else gain.value,
            "gain_interval": None if gain is None else [gain.low, gain.high],
            "hours_mended": plan.hours_mended,
            "pays": plan.pays,
        }

    def lines(self) -> list[str]:
        """Return the calendar for people."""
        told = [
            f"present {self.present} (max_num_seqs/max_num_batched_tokens); predicted, "
            f"wrong by {self.wrong_ratio:.0%} on what was measured",
            f"{'hour':<6} {'dates':>5} {'requests':>9}  {'best':>12}  {'with two':>12}",
        ]
        for row, hour in enumerate(self.hours):
            told.append(
                f"{hour.name:<6} {len(hour.dates):>5} {hour.requests:>9,}  "
                f"{self.plans.hourly.by_hour[row]!s:>12}  {self.plans.two.by_hour[row]!s:>12}"
            )
        told.append(f"one for all hours: {self.plans.fixed.by_hour[0]}")
        told.append(f"two: {self._told(self.plans.two)}")
        if self.plans.hourly.settings != self.plans.two.settings:
            told.append(f"the best of each hour: {self._told(self.plans.hourly)}")
        return told

    def _told(self, plan: DayPlan) -> str:
        if plan.gain is None:
            return "no pair is better than one for all hours beyond the shadow's error"
        low, high = plan.gain.low or 0.0, plan.gain.high or 0.0
        served = "; ".join(
            f"{limits} at {clock_spans(plan.hours_of(self.hours, limits))}"
            for limits in plan.settings
        )
        mended = f", {plan.hours_mended} hours mended" if plan.hours_mended else ""
        verdict = "switching pays" if plan.pays else "switching does not pay"
        return (
            f"{served}: {self.metric} {plan.gain.value:+.1%} better over the day "
            f"({low:+.1%} … {high:+.1%}){mended}: {verdict}"
        )


def calendar_of(
    trace: Trace,
    hours: tuple[Hour, ...],
    retune: Retune,
    aim: Aim,
    on_hour: Callable[[str], None],
) -> Calendar:
    """Return the calendar of a trace; on_hour hears a sentence after each hour.

    Raises: ShadowError, TooFewSamplesError, UsageError.
    """
    present = retune.space.present
    candidates = {present}
    for hour in hours:
        best = leader(retune.rank(trace, aim, hour.parts).seen)
        if best is not None:
            candidates.add(best.limits)
        on_hour(f"{hour.name}: best {best.limits if best is not None else 'none'}")
    pieces = [part.of(trace) for hour in hours for part in hour.parts]
    fewest = min(len(piece) for piece in pieces)
    slos = tuple(slo for slo in aim.slos if slo.needed_samples <= fewest)
    goal = Goal(aim.objective, slos or aim.slos, tail_statistic(fewest))
    found = retune.replay(pieces, sorted(candidates), aim)
    metric, table = served(found, goal)
    by_hour = {limits: _by_hour(row, hours) for limits, row in table.items()}
    plans = day_plans(hours, by_hour, retune.wrong_ratio)
    return Calendar(hours, plans, metric, present, retune.wrong_ratio)


def served(
    found: Mapping[EngineLimits, Sequence[Outcome]], goal: Goal
) -> tuple[str, dict[EngineLimits, list[Served]]]:
    """Return by which metric stretches are judged, and how each setting serves each of them.

    By the goal's own where it is the same for all; else by the tail of the latency, which a
    setting that keeps up and one that does not both have.
    """
    outcomes = [o for row in found.values() for o in row if isinstance(o, Measurement)]
    metrics = {goal.score(o).metric for o in outcomes}
    tail = f"e2e_{goal.tail}"
    metric = metrics.pop() if len(metrics) == 1 else tail

    def of(outcome: Measurement | Failure) -> Served:
        if isinstance(outcome, Failure):
            return Served(Tier.FAILED, 1.0)
        score = goal.score(outcome)
        latency_s = outcome.latency("e2e_s", goal.tail)
        value = score.value if metric != tail else latency_s or 1.0
        return Served(score.tier, value)

    return metric, {limits: [of(o) for o in row] for limits, row in found.items()}


def _by_hour(row: Sequence[Served], hours: Sequence[Hour]) -> list[list[Served]]:
    left = iter(row)
    return [[next(left) for _ in hour.parts] for hour in hours]


def _limits(limits: EngineLimits) -> dict[str, int]:
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }
