"""A calendar: which configuration serves which hour of day best, and whether switching pays.

Cuts a recording with a calendar clock into its hours of day over all dates, predicts every
candidate on every stretch, and compares one configuration for the whole day with two and with
one for each hour.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np

from tuner import stats
from tuner.drift.retune import ReplayOutcome, Retune
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.search.budget import Aim
from tuner.search.objective import Scoring, Tier
from tuner.search.trials import leader
from tuner.stats import Estimate, tail_statistic
from tuner.traffic.traces import ClockOrigin, Trace
from tuner.traffic.windows import Window, whole

HOUR_S: Final = 3600.0
HOURS: Final = 24

MIN_REQUESTS: Final = 40
"""Ours: an hour with fewer cannot carry more than a median, and any configuration serves it."""

_OFFSET = re.compile(r"(?:UTC)?([+-])(\d{1,2})(?::?([0-5]\d))?", re.ASCII)
_LARGEST_OFFSET_H = 14


@dataclass(frozen=True, slots=True)
class Hour:
    """An hour of day: its stretches of the trace, one for each date, and all its requests."""

    hour: int
    parts: tuple[Window, ...]
    dates: tuple[int, ...]
    requests: int

    @property
    def name(self) -> str:
        """The hour as a clock shows it."""
        return f"{self.hour:02d}:00"


def parse_offset(text: str) -> float:
    """Return the seconds that a clock is ahead of UTC.

    Raises: UsageError if it is no offset.

    >>> parse_offset("+05:30"), parse_offset("UTC-8"), parse_offset("UTC")
    (19800.0, -28800.0, 0.0)
    """
    if text.strip().upper() in ("UTC", "Z"):
        return 0.0
    match = _OFFSET.fullmatch(text.strip().upper())
    if match is None or int(match[2]) > _LARGEST_OFFSET_H:
        raise UsageError(
            f'--timezone must be an offset from UTC, got "{text}"',
            "for example +02:00, -8 or UTC; where summer time holds, the one of the trace",
        )
    seconds = int(match[2]) * HOUR_S + int(match[3] or 0) * 60.0
    return -seconds if match[1] == "-" else seconds


def hours_of(trace: Trace, offset_s: float = 0.0) -> list[Hour]:
    """Return the hours of day that the trace holds, with the stretches to replay.

    Hours of single dates with too few requests are left out.

    Raises: UsageError if the trace's clock is not the calendar's.
    """
    if trace.origin is not ClockOrigin.WALL:
        raise UsageError(
            f"{trace.source} has no time of day: its clock is not the calendar's",
            "--by hour needs arrivals with date and time, as recorded by tune's middleware or "
            "read from Prometheus",
        )
    begin_s = trace.zero_s + offset_s
    end_s = whole(trace).end_s
    first, last = math.floor(begin_s / HOUR_S), math.floor((begin_s + end_s) / HOUR_S)
    stretches: dict[int, list[tuple[int, Window, int]]] = defaultdict(list)
    for number in range(first, last + 1):
        start_s, stop_s = number * HOUR_S - begin_s, (number + 1) * HOUR_S - begin_s
        if stop_s <= 0:
            continue
        window = Window(max(start_s, 0.0), min(stop_s, end_s))
        count = _count(trace, window)
        if count >= MIN_REQUESTS:
            stretches[number % HOURS].append((number // HOURS, window, count))
    found = []
    for hour in sorted(stretches):
        dates, parts, counts = zip(*stretches[hour], strict=True)
        found.append(Hour(hour, parts, dates, sum(counts)))
    return found


def _count(trace: Trace, window: Window) -> int:
    low, high = np.searchsorted(trace.due_s, (window.start_s, window.end_s))
    return int(high - low)


def clock_spans(hours: Sequence[int]) -> str:
    """Return hours of day as text, neighbours together.

    >>> clock_spans([0, 1, 9, 10, 22, 23])
    '09-11 h, 22-02 h'
    """
    runs: list[list[int]] = []
    for hour in sorted(hours):
        if runs and runs[-1][1] == hour:
            runs[-1][1] = hour + 1
        else:
            runs.append([hour, hour + 1])
    if len(runs) > 1 and runs[0][0] == 0 and runs[-1][1] == HOURS:
        runs[-1][1] = runs.pop(0)[1]
    return ", ".join(f"{start:02d}-{end:02d} h" for start, end in runs)


@dataclass(frozen=True, slots=True)
class ServedHour:
    """How a configuration serves a stretch: which demands it meets, and a value, less better.

    The value is comparable between configurations at the same stretch.
    """

    tier: Tier
    value: float


Table = Mapping[EngineLimits, Sequence[Sequence[ServedHour]]]
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
    weights = np.array([sum(weight for weight, _ in gains) for gains in dates])
    means = np.array([sum(w * log for w, log in gains) for gains in dates]) / weights
    centre = float(means @ weights / weights.sum())
    half = wrong_log
    if len(dates) > 1:
        ratio = stats.paired_ratio(np.exp(means).tolist(), [1.0] * len(dates))
        high = ratio.high if ratio.high is not None else math.inf
        half = math.hypot(wrong_log, math.log(high / ratio.value))
    low, value, high = (1 - math.exp(centre + d) for d in (half, 0.0, -half))
    return Estimate(value, low, high, len(dates))


@dataclass(frozen=True, slots=True)
class Calendar:
    """The hours, the plans for them, and by which metric they were judged."""

    hours: tuple[Hour, ...]
    plans: DayPlans
    metric: str
    current: EngineLimits
    wrong_ratio: float

    def as_json(self) -> dict[str, Any]:
        """Return the calendar for --json."""
        plans = {"fixed": self.plans.fixed, "two": self.plans.two, "hourly": self.plans.hourly}
        return {
            "engine": "shadow",
            "current": _limits(self.current),
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
        lines = [
            f"current {self.current} (max_num_seqs/max_num_batched_tokens); predicted, "
            f"wrong by {self.wrong_ratio:.0%} on what was measured",
            f"{'hour':<6} {'dates':>5} {'requests':>9}  {'best':>12}  {'with two':>12}",
        ]
        for row, hour in enumerate(self.hours):
            lines.append(
                f"{hour.name:<6} {len(hour.dates):>5} {hour.requests:>9,}  "
                f"{self.plans.hourly.by_hour[row]!s:>12}  {self.plans.two.by_hour[row]!s:>12}"
            )
        lines.append(f"one for all hours: {self.plans.fixed.by_hour[0]}")
        lines.append(f"two: {self._text(self.plans.two)}")
        if self.plans.hourly.settings != self.plans.two.settings:
            lines.append(f"the best of each hour: {self._text(self.plans.hourly)}")
        return lines

    def _text(self, plan: DayPlan) -> str:
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
    """Return the calendar of a trace; on_hour receives a sentence after each hour.

    Raises: ShadowError, TooFewSamplesError, UsageError.
    """
    current = retune.space.current
    candidates = {current}
    for hour in hours:
        best = leader(retune.rank(trace, aim, hour.parts).observations)
        if best is not None:
            candidates.add(best.limits)
        on_hour(f"{hour.name}: best {best.limits if best is not None else 'none'}")
    pieces = [part.of(trace) for hour in hours for part in hour.parts]
    fewest = min(len(piece) for piece in pieces)
    slos = tuple(slo for slo in aim.slos if slo.needed_samples <= fewest)
    scoring = Scoring(aim.objective, slos or aim.slos, tail_statistic(fewest))
    outcomes = retune.replay(pieces, sorted(candidates), aim)
    metric, table = served(outcomes, scoring)
    by_hour = {limits: _by_hour(row, hours) for limits, row in table.items()}
    plans = day_plans(hours, by_hour, retune.wrong_ratio)
    return Calendar(hours, plans, metric, current, retune.wrong_ratio)


def served(
    replays: Mapping[EngineLimits, Sequence[ReplayOutcome]], scoring: Scoring
) -> tuple[str, dict[EngineLimits, list[ServedHour]]]:
    """Return by which metric stretches are judged, and how each setting serves each of them.

    By the scoring's own where it is the same for all; else by the tail of the latency, which
    settings have whether they keep up or not.
    """
    outcomes = [o for row in replays.values() for o in row if isinstance(o, Measurement)]
    metrics = {scoring.score(o).metric for o in outcomes}
    tail = f"e2e_{scoring.tail}"
    metric = metrics.pop() if len(metrics) == 1 else tail

    def of(outcome: Measurement | Failure) -> ServedHour:
        if isinstance(outcome, Failure):
            return ServedHour(Tier.FAILED, 1.0)
        score = scoring.score(outcome)
        latency_s = outcome.latency("e2e_s", scoring.tail)
        value = score.value if metric != tail else latency_s or 1.0
        return ServedHour(score.tier, value)

    return metric, {limits: [of(o) for o in row] for limits, row in replays.items()}


def _by_hour(row: Sequence[ServedHour], hours: Sequence[Hour]) -> list[list[ServedHour]]:
    left = iter(row)
    return [[next(left) for _ in hour.parts] for hour in hours]


def _limits(limits: EngineLimits) -> dict[str, int]:
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }
