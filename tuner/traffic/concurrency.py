"""Requests in flight over time: as a recording of its own, and as it follows from latencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.stats import Floats, Ints

SECONDS_PER_OUTPUT_TOKEN = 0.020
"""Ours: 20 ms, a common decode pace of a loaded server, at which public traces are compared."""
MAX_IN_FLIGHT = 10_000_000
"""Ours: a thousand times the largest server; above it a column is another one, and the memory
of a description grows with it."""
# Arrivals that are looked at together: ours, some megabytes however long the trace.
CHUNK = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Concurrency:
    """How many requests were in flight from each instant on; the last value holds.

    Shapes: times_s and in_flight are [m], m >= 1, times ascending and distinct.
    Units: seconds from the start of the trace.
    Raises: ValueError if the columns differ in length, are empty or out of range.
    """

    times_s: Floats
    in_flight: Ints

    def __post_init__(self) -> None:
        if not len(self.times_s) or len(self.times_s) != len(self.in_flight):
            raise ValueError(
                "times_s and in_flight must have the same number of rows, 1 or more"
            )
        if not (np.isfinite(self.times_s).all() and self.times_s[0] >= 0):
            raise ValueError("times_s must be finite and at least 0")
        if np.any(np.diff(self.times_s) <= 0):
            raise ValueError("times_s must ascend")
        if self.in_flight.min() < 0:
            raise ValueError("in_flight must be at least 0")

    @property
    def mean(self) -> float:
        """How many were in flight on average, up to the last reading."""
        lasted_s = np.diff(self.times_s)
        if not lasted_s.size:
            return float(self.in_flight[0])
        return float(self.in_flight[:-1] @ lasted_s / lasted_s.sum())

    def between(self, start_s: float, end_s: float) -> Concurrency:
        """Return the stretch [start_s, end_s), counted from start_s.

        Where the recording goes on past end_s, a last value stands there, so that the stretch
        is known to last until then.
        """
        first = max(int(np.searchsorted(self.times_s, start_s, side="right")) - 1, 0)
        last = max(int(np.searchsorted(self.times_s, end_s, side="left")), first + 1)
        times_s = np.maximum(self.times_s[first:last] - start_s, 0.0)
        in_flight = self.in_flight[first:last]
        if last < len(self.times_s) and end_s - start_s > times_s[-1]:
            times_s = np.append(times_s, end_s - start_s)
            in_flight = np.append(in_flight, in_flight[-1])
        return Concurrency(times_s, in_flight)

    def scaled(self, load: float) -> Concurrency:
        """Return `load` times as many in flight, at least one wherever there was one."""
        scaled = np.rint(self.in_flight * load).astype(np.int64)
        return Concurrency(self.times_s, np.maximum(scaled, np.minimum(self.in_flight, 1)))


def in_flight_steps(due_s: Floats, e2e_s: Floats) -> tuple[Floats, Ints]:
    """Return the step function of requests in flight: times, and the count from each time on.

    Shapes: inputs are [n], due_s ascending; outputs are [m], times distinct, last count 0.

    >>> times, counts = in_flight_steps(np.array([0.0, 1.0]), np.array([3.0, 1.0]))
    >>> times.tolist(), counts.tolist()
    ([0.0, 1.0, 2.0, 3.0], [1, 2, 1, 0])
    """
    return _merged(due_s, np.sort(due_s + e2e_s), 0)


def _merged(due_s: Floats, ends_s: Floats, level: int) -> tuple[Floats, Ints]:
    """Merge sorted arrivals and ends into the level after each distinct instant."""
    events = np.concatenate([due_s, ends_s])
    order = np.argsort(events, kind="stable")
    levels = level + np.cumsum(np.where(order < len(due_s), 1, -1))
    times = events[order]
    is_last = np.append(times[1:] > times[:-1], True)
    return times[is_last], levels[is_last].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class InFlightShares:
    """How much of the time each number of requests was in flight, until the last arrival.

    Shapes: spent_s is [peak_until_then + 1].
    """

    spent_s: Floats
    peak: int


def in_flight_shares(due_s: Floats, e2e_s: Floats) -> InFlightShares:
    """Return the distribution of requests in flight over time; memory is the columns' alone.

    The last answers, after the last arrival, count for the peak only.

    Shapes: inputs are [n], due_s ascending.
    """
    ends_s = due_s + e2e_s
    ends_s.sort()
    spent_s, peak, level, ended, first = np.zeros(1), 0, 0, 0, 0
    while first < len(due_s):
        # A chunk holds all arrivals of its last instant.
        last_s = due_s[min(first + CHUNK, len(due_s)) - 1]
        beyond = int(np.searchsorted(due_s, last_s, side="right"))
        is_final = beyond == len(due_s)
        chunk = due_s[first:beyond]
        until_s = last_s if is_final else due_s[beyond]
        upto = int(np.searchsorted(ends_s, until_s, side="right" if is_final else "left"))
        times_s, levels = _merged(chunk, ends_s[ended:upto], level)
        # Between the last event here and the next chunk's first arrival the level stays.
        gaps_s = np.diff(np.append(times_s, until_s))
        spent = np.bincount(np.maximum(levels, 0), weights=gaps_s)
        size = max(len(spent), len(spent_s))
        spent_s = np.pad(spent_s, (0, size - len(spent_s)))
        spent_s[: len(spent)] += spent
        peak, level, ended = max(peak, int(levels.max())), int(levels[-1]), upto
        first = beyond
    return InFlightShares(spent_s, peak)
