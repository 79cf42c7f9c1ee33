"""The hours of day in a recording with a calendar clock, over all of its dates.

Answers which stretches of a trace belong to 09:00, and which of their requests are enough to
replay. What serves an hour best is left to `day_plan`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.errors import UsageError
from tuner.traffic.traces import ClockOrigin, Trace
from tuner.traffic.windows import Window, whole

HOUR_S: Final = 3600.0
HOURS: Final = 24

LEAST_REQUESTS: Final = 40
"""Ours: an hour with fewer cannot carry more than a median, and any configuration serves it."""

MOST_REQUESTS: Final = 20_000
"""Ours: of an hour of day with more, the middle of each of its hours is replayed."""

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
            f"{trace.source} does not tell the time of day: its clock is not the calendar's",
            "--by hour wants arrivals with date and time, as recorded by tune's middleware or "
            "read from Prometheus",
        )
    begin_s = trace.zero_s + offset_s
    end_s = whole(trace).end_s
    first, last = math.floor(begin_s / HOUR_S), math.floor((begin_s + end_s) / HOUR_S)
    found: dict[int, list[tuple[int, Window, int]]] = defaultdict(list)
    for number in range(first, last + 1):
        start_s, stop_s = number * HOUR_S - begin_s, (number + 1) * HOUR_S - begin_s
        if stop_s <= 0:
            continue
        window = Window(max(start_s, 0.0), min(stop_s, end_s))
        count = _count(trace, window)
        if count >= LEAST_REQUESTS:
            found[number % HOURS].append((number // HOURS, window, count))
    return [_hour(trace, hour, found[hour]) for hour in sorted(found)]


def _hour(trace: Trace, hour: int, held: Sequence[tuple[int, Window, int]]) -> Hour:
    """Put an hour of day together; of one with too many requests the middle is kept."""
    requests = sum(count for _, _, count in held)
    share = min(1.0, MOST_REQUESTS / requests)
    kept = [(date, _middle(window, share)) for date, window, _ in held]
    kept = [(date, part) for date, part in kept if _count(trace, part) >= LEAST_REQUESTS]
    if not kept:
        kept = [(date, window) for date, window, _ in held]
    dates, parts = zip(*kept, strict=True)
    return Hour(hour, parts, dates, requests)


def _count(trace: Trace, window: Window) -> int:
    low, high = np.searchsorted(trace.due_s, (window.start_s, window.end_s))
    return int(high - low)


def _middle(window: Window, share: float) -> Window:
    spare_s = window.length_s * (1 - share) / 2
    return window if share >= 1 else Window(window.start_s + spare_s, window.end_s - spare_s)


def clock_spans(hours: Sequence[int]) -> str:
    """Name hours of day, neighbours together.

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
