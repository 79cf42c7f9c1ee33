"""A calendar: which configuration serves which hour of day best, and whether switching pays.

Cuts a recording with a calendar clock into its hours of day over all dates, predicts every
candidate on every stretch, and compares one configuration for the whole day with two and with
one for each hour.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import Any, Final

import numpy as np

from tuner.drift.retune import Retune
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS
from tuner.search.budget import MIN_REQUESTS, Aim
from tuner.search.choice import Choice, criterion
from tuner.search.draws import Draws
from tuner.search.judging import charged
from tuner.search.objective import Scoring
from tuner.search.race import CONFIDENCE
from tuner.search.trials import leader
from tuner.shadow.calibration import StatedError
from tuner.stats import Estimate, tail_statistic
from tuner.traffic.traces import ClockOrigin, Trace
from tuner.traffic.windows import Window, whole

HOUR_S: Final = 3600.0
HOURS: Final = 24

MIN_DRAWS: Final = 10
"""Ours: of each date at least; all dates of an hour together have FEW_DRAWS or more."""

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

    Hours of single dates with too few requests are left out. Each begins empty, as after the
    restart that switches configurations, and lasts for many lives of a request.

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
class DayPlan:
    """A configuration for each hour, and what it gains over one for the whole day.

    `gain` is 1 - value / value of the fixed one over a day, hours weighed by requests; its
    interval is over dates and draws. None where nothing is switched, or nothing compares.
    `hours_mended` are those that surely keep bounds which the fixed one does not.
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
        """Whether switching surely gains."""
        beyond = self.gain is not None and self.gain.low is not None and self.gain.low > 0
        return beyond or self.hours_mended > 0


@dataclass(frozen=True, slots=True)
class DayPlans:
    """One configuration for all hours, two, and one for each."""

    fixed: DayPlan
    two: DayPlan
    hourly: DayPlan


def day_plans(hours: Sequence[Hour], drawn: Sequence[Draws]) -> DayPlans:
    """Return the best plans of each kind.

    An hour switches only to what is surely better: else it is not worth a restart.

    Shapes: drawn is [hours], each with as many draws of every date, one date after the other.
    """
    settings = drawn[0].settings
    day = _Day(hours, drawn)
    fixed = min(settings, key=lambda limits: day.loss([limits] * len(hours)))

    def with_choice(
        among: Sequence[EngineLimits], base: EngineLimits
    ) -> tuple[EngineLimits, ...]:
        return tuple(_best(draws.among(among), base) for draws in drawn)

    pairs = [with_choice(pair, base) for pair in combinations(settings, 2) for base in pair]
    single = (fixed,) * len(hours)
    two = min([single, *pairs], key=day.loss)
    hourly = with_choice(settings, fixed)
    return DayPlans(*(day.plan(by_hour, fixed) for by_hour in (single, two, hourly)))


def _best(draws: Draws, base: EngineLimits) -> EngineLimits:
    """Return what surely serves an hour better than the base, or else that."""
    if not np.isfinite(draws.values).any():
        return base
    return Choice(draws, base).decide().winner


class _Day:
    """What was drawn of each hour: who surely keeps the bounds there, and what each costs."""

    def __init__(self, hours: Sequence[Hour], drawn: Sequence[Draws]) -> None:
        self._hours, self._settings = hours, drawn[0].settings
        self._holds, self._logs, self._charged = [], [], []
        for draws in drawn:
            holds, column, _ = criterion(draws)
            self._holds.append(holds)
            elsewhere = draws.elsewhere(self._settings)
            with np.errstate(divide="ignore"):
                self._logs.append(np.log(elsewhere[:, :, column]))
                self._charged.append(np.log(charged(elsewhere, column, holds)))

    def loss(self, by_hour: Sequence[EngineLimits]) -> tuple[float, float]:
        """Return what is to be small: hours in which bounds are not kept, then the costs.

        With what it costs in each not to sustain what another setting sustains.
        """
        missed = costs = 0.0
        for row, column, weight in self._rows(by_hour):
            missed += weight * (not self._holds[row][column])
            costs += weight * float(self._charged[row][:, column].mean())
        return missed, costs

    def plan(self, by_hour: tuple[EngineLimits, ...], fixed: EngineLimits) -> DayPlan:
        """Put a plan together with what it gains over a fixed setting."""
        before = self._settings.index(fixed)
        mended = sum(
            bool(self._holds[row][column] and not self._holds[row][before])
            for row, column, _ in self._rows(by_hour)
        )
        return DayPlan(by_hour, self._gain(by_hour, before), mended)

    def _gain(self, by_hour: Sequence[EngineLimits], before: int) -> Estimate | None:
        """Return the gain of a day that has every hour, over dates and draws of each."""
        if all(self._settings[before] == limits for limits in by_hour):
            return None
        days = max(len(hour.dates) for hour in self._hours)
        total, weights = 0.0, 0.0
        for row, column, weight in self._rows(by_hour):
            with np.errstate(invalid="ignore"):
                logs = self._logs[row][:, column] - self._logs[row][:, before]
            if not np.isfinite(logs).all():
                continue
            dates = len(self._hours[row].dates)
            of_dates = np.split(logs, dates)
            # A recording rarely begins at midnight: a day has every hour, of whichever date.
            total = total + weight * np.concatenate(
                [of_dates[day % dates] for day in range(days)]
            )
            weights += weight
        if not weights:
            return None
        ratios = np.exp(total / weights)
        ends = (0.5 - CONFIDENCE / 2, 0.5, 0.5 + CONFIDENCE / 2)
        high, value, low = (1 - np.quantile(ratios, ends)).tolist()
        return Estimate(value, low, high, len(ratios))

    def _rows(self, by_hour: Sequence[EngineLimits]) -> Iterator[tuple[int, int, float]]:
        """Return of each hour its number, the column of its setting, and a date's requests."""
        for row, (hour, limits) in enumerate(zip(self._hours, by_hour, strict=True)):
            yield row, self._settings.index(limits), hour.requests / len(hour.parts)


@dataclass(frozen=True, slots=True)
class Calendar:
    """The hours, the plans for them, and by which metric they were judged."""

    hours: tuple[Hour, ...]
    plans: DayPlans
    metric: str
    current: EngineLimits
    error: StatedError

    def as_json(self) -> dict[str, Any]:
        """Return the calendar for --json."""
        plans = {"fixed": self.plans.fixed, "two": self.plans.two, "hourly": self.plans.hourly}
        return {
            "engine": "shadow",
            "current": asdict(self.current),
            **self.error.as_json(),
            "metric": self.metric,
            "hours": [
                {
                    "hour": hour.hour,
                    "requests": hour.requests,
                    "dates": len(hour.dates),
                    "best": asdict(self.plans.hourly.by_hour[row]),
                    "in_two": asdict(self.plans.two.by_hour[row]),
                }
                for row, hour in enumerate(self.hours)
            ],
            "plans": {name: self._plan(plan) for name, plan in plans.items()},
        }

    def _plan(self, plan: DayPlan) -> dict[str, Any]:
        gain = plan.gain
        return {
            "settings": [
                {**asdict(limits), "hours": plan.hours_of(self.hours, limits)}
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
            f"{self.error.words()}",
            *self.error.lines(),
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
            return "no pair is surely better than one for all hours"
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


def _carried(slos: Sequence[Slo], requests: int) -> tuple[tuple[Slo, ...], tuple[Slo, ...]]:
    """Return the SLOs that so many requests can be judged by, and the others.

    All of them where that would leave none.
    """
    carried = tuple(slo for slo in slos if slo.needed_samples <= requests)
    if not carried:
        return tuple(slos), ()
    return carried, tuple(slo for slo in slos if slo not in carried)


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
    draws = max(MIN_DRAWS, math.ceil(FEW_DRAWS / max(len(hour.dates) for hour in hours)))
    draw = partial(retune.draw, settings=sorted(candidates), draws=draws)
    drawn = []
    for hour in hours:
        dates = [(part, part.of(trace)) for part in hour.parts]
        fewest = min(len(requests) for _, requests in dates)
        slos, left_out = _carried(aim.slos, fewest)
        if left_out:
            names = ", ".join(map(str, left_out))
            on_hour(f"{hour.name}: a date of it holds too few requests to judge by {names}")
        # A quiet night hour carries no p99, which is no reason to judge a day by medians.
        scoring = Scoring(aim.objective, slos, tail_statistic(fewest))
        of_dates = [
            draw(Workload("hour", (part,), (requests,), aim.plan, aim.slos, scoring))
            for part, requests in dates
        ]
        drawn.append(Draws.pooled(of_dates))
    metrics = " or ".join(dict.fromkeys(criterion(draws)[-1] for draws in drawn))
    return Calendar(hours, day_plans(hours, drawn), metrics, current, retune.predictor.error)
