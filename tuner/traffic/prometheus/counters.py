"""What engines did between scrapes: requests that came, that finished, and were in flight.

Answers what follows from counters that restart, skip a beat or vanish for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tuner.stats import Bools, Floats, Ints
from tuner.traffic.prometheus.client import Span
from tuner.traffic.prometheus.readings import EngineReadings, LengthReadings
from tuner.traffic.sampling import Histogram

GAP_STEPS = 2.5
"""Ours: one missed scrape is usual and two happen; past that the stretch is unknown."""

MOST_AT_ONCE = 1.1
"""Ours: where one engine takes the place of another both are there for a while."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthRises:
    """How many lengths fell into each range between scrapes, and what they add up to.

    Shapes: rows [w], the places in the span where the windows with these bounds end;
        bounds [b], the upper ends; counts [w, b]; totals [w], nan where unknown.
    """

    rows: Ints
    bounds: tuple[float, ...]
    counts: Floats
    totals: Floats


@dataclass(frozen=True, slots=True, eq=False)
class EngineWindows:
    """What one engine did between one scrape and the next.

    `arrived` is 0 in gaps; `missed` is what came in all gaps. `restarts` counts how often
    the counters began anew. `has_gauges`: arrivals could be separated from finishes. Each
    window is in one of `prompt`, and in one of `output`, which differ in their bounds.

    Shapes: all [w], w >= 1; rows are the places in the span where the windows end.
    Units: Unix seconds.
    """

    rows: Ints
    starts_s: Floats
    ends_s: Floats
    is_gap: Bools
    finished: Floats
    arrived: Ints
    prompt: tuple[LengthRises, ...]
    output: tuple[LengthRises, ...]
    missed: int
    restarts: int
    has_gauges: bool


def windows_of(engine: EngineReadings, step_s: float) -> EngineWindows:
    """Return what an engine did between its scrapes.

    A counter that drops began anew with the process, and its new value counts from 0; all
    counters of an engine begin anew together. Requests come when those finished and those in
    flight, added up, rise. A fall is one that was given up and is in no counter, and is taken
    off the next arrivals, so that the number of requests stays that of the counters.
    """
    counters = [engine.finished, *engine.prompt.upto.T, *engine.output.upto.T]
    is_restart: Bools = np.any(np.diff(np.column_stack(counters), axis=0) < 0, axis=1)
    lasting_s = np.diff(engine.scraped_s)
    is_gap = lasting_s > GAP_STEPS * max(step_s, usual(lasting_s))
    in_flight = engine.in_flight
    begun = engine.finished if in_flight is None else engine.finished + in_flight
    came = rises(begun, is_restart)
    missed = max(0, round(float(came[is_gap].sum())))
    came[is_gap] = 0.0
    return EngineWindows(
        rows=engine.rows[1:],
        starts_s=engine.scraped_s[:-1],
        ends_s=engine.scraped_s[1:],
        is_gap=is_gap,
        finished=rises(engine.finished, is_restart),
        arrived=arrivals(came),
        prompt=_length_rises(engine.rows[1:], engine.prompt, is_restart),
        output=_length_rises(engine.rows[1:], engine.output, is_restart),
        missed=missed,
        restarts=int(is_restart.sum()),
        has_gauges=in_flight is not None,
    )


def usual(lasting: Floats | Ints) -> float:
    """Return how long it usually is from scrape to scrape, even where half of them are late."""
    return float(np.quantile(lasting, 0.25))


def rises(values: Floats, is_restart: Bools) -> Floats:
    """Return what counters rose by between readings; after a restart they count from 0.

    Shapes: values is [m] or [m, b], is_restart [m - 1], the result one row shorter than values.

    >>> rises(np.array([3.0, 5.0, 1.0]), np.array([False, True])).tolist()
    [2.0, 1.0]
    """
    anew = is_restart if values.ndim == 1 else is_restart[:, None]
    steps: Floats = np.where(anew, values[1:], np.diff(values, axis=0))
    return steps


def arrivals(came: Floats) -> Ints:
    """Return whole numbers of arrivals, none below 0, that add up as the given ones do.

    A window below 0 is made up for by those after it.

    >>> arrivals(np.array([2.0, -1.0, 3.0])).tolist()
    [2, 0, 2]
    """
    upto = np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(came)]))
    return np.diff(np.rint(upto).astype(np.int64))


def _length_rises(
    rows: Ints, lengths: LengthReadings, is_restart: Bools
) -> tuple[LengthRises, ...]:
    """Return the rises of windows that end at these rows, those of the same bounds together.

    A window has the bounds of both its readings, after a restart those of the second.
    """
    rose, totals = rises(lengths.upto, is_restart), rises(lengths.totals, is_restart)
    # More than there are in all was counted by a process before, and not yet forgotten.
    known = lengths.upto <= lengths.upto[:, -1:]
    sets, set_of = np.unique(
        known[1:] & (known[:-1] | is_restart[:, None]), axis=0, return_inverse=True
    )
    found = []
    for number, has in enumerate(sets):
        mine = np.flatnonzero(set_of.reshape(-1) == number)
        counts = np.maximum(np.diff(rose[mine][:, has], axis=1, prepend=0.0), 0.0)
        bounds = tuple(np.array(lengths.bounds)[has].tolist())
        found.append(LengthRises(rows[mine], bounds, counts, totals[mine]))
    return tuple(found)


def uncovered_s(starts_s: Floats, ends_s: Floats) -> float:
    """Return how long none of some stretches lasts, from the first start to the last end.

    >>> uncovered_s(np.array([0.0, 5.0]), np.array([2.0, 6.0]))
    3.0
    """
    order = np.argsort(starts_s, kind="stable")
    reached = np.maximum.accumulate(ends_s[order])
    holes = starts_s[order][1:] - reached[:-1]
    return float(np.maximum(holes, 0.0).sum())


def at_once(starts_s: Floats, ends_s: Floats) -> float:
    """Return how many of some engines there were at once, in the mean while any was there.

    >>> at_once(np.array([0.0, 0.0, 5.0]), np.array([10.0, 5.0, 10.0]))
    2.0
    """
    any_s = ends_s.max() - starts_s.min() - uncovered_s(starts_s, ends_s) if ends_s.size else 0
    return float((ends_s - starts_s).sum() / any_s) if any_s > 0 else 0.0


def stretches(counts: Floats, least: float) -> Ints:
    """Return a number for each row, such that each number's counts add up to `least` or more.

    All rows have one number where even all of them do not.

    >>> stretches(np.array([1.0, 1.0, 5.0, 1.0]), 2).tolist()
    [0, 0, 1, 1]
    """
    numbers = np.zeros(len(counts), dtype=np.int64)
    number, sum_so_far = 0, 0.0
    for row, count in enumerate(counts.tolist()):
        numbers[row] = number
        sum_so_far += count
        if sum_so_far >= least:
            number, sum_so_far = number + 1, 0.0
    # What is left over is too little to stand alone.
    numbers[numbers == number] = max(number - 1, 0)
    return numbers


def pooled(
    engines: Sequence[EngineWindows],
    lengths_of: Callable[[EngineWindows], Sequence[LengthRises]],
    stretch_of: Ints,
) -> list[Histogram]:
    """Return the histogram of each stretch over all engines, whose ranges may differ.

    Shapes: stretch_of is [span.points], ascending from 0.
    """
    k = int(stretch_of.max()) + 1
    totals = np.zeros(k)
    by_bounds: dict[tuple[float, ...], Floats] = {}
    for found in chain.from_iterable(map(lengths_of, engines)):
        at = stretch_of[found.rows]
        counts = by_bounds.setdefault(found.bounds, np.zeros((k, len(found.bounds))))
        np.add.at(counts, at, found.counts)
        np.add.at(totals, at, found.totals)
    highs = np.concatenate([np.floor(bounds) for bounds in by_bounds])
    lows = np.concatenate(
        [np.concatenate([[1.0], np.floor(bounds[:-1]) + 1]) for bounds in by_bounds]
    )
    joined = np.concatenate(list(by_bounds.values()), axis=1)
    return [
        Histogram(lows, highs, counts, float(total))
        for counts, total in zip(joined, totals, strict=True)
    ]


def levels_in_flight(engines: Sequence[EngineReadings], span: Span) -> tuple[Floats, Bools]:
    """Return how many requests were in flight at each instant, and where that is known.

    An engine's last reading holds until the next one, but not beyond a gap: then it is taken
    to be gone.

    Shapes: both [span.points].
    """
    levels = np.zeros(span.points)
    is_known = np.zeros(span.points, dtype=np.bool_)
    places = np.arange(span.points)
    for engine in engines:
        if engine.in_flight is None:
            continue
        at = np.searchsorted(engine.rows, places, side="right") - 1
        age = places - engine.rows[np.maximum(at, 0)]
        reach = GAP_STEPS * max(1.0, usual(np.diff(engine.rows)))
        is_held = (at >= 0) & (age <= reach)
        levels += np.where(is_held, engine.in_flight[np.maximum(at, 0)], 0.0)
        is_known |= is_held
    return levels, is_known
