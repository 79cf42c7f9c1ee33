"""Seeded draws of requests where only counts, histograms or numbers in flight were recorded.

Answers which instants and lengths agree with such aggregates. Nothing here is a recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.stats import Floats, Ints
from tuner.traffic.concurrency import Concurrency

STEEPEST = 35.0
"""Ours: the mean of a range is then within 4 % of its edge, and nothing overflows."""

STEEPEST_SLOPE = 6.0
"""Ours: no public trace's lengths rise or fall faster; a range beside an empty one might."""

MAX_REQUESTS = 50_000_000
"""Ours: twice the largest public trace. Who is scraped may claim any number."""

MAX_TOKENS = 10_000_000
"""Ours: where an open range ends at the latest, ten times the longest context today."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How many values lay in each range of whole numbers, and what they add up to.

    Shapes: lows, highs and counts are [b], b >= 1; a range is low to high, both within it, and
        highs is inf for an open one.
    Units: total is the sum of all values, nan where it was not recorded.
    """

    lows: Floats
    highs: Floats
    counts: Floats
    total: float


@dataclass(frozen=True, slots=True, eq=False)
class LengthShape:
    """A distribution of token counts that agrees with a histogram.

    Within each range the density is a power of the length. The exponents follow how the ranges
    beside it are filled, and one number, added to all of them, makes the mean the recorded one.
    So every range keeps its share and the whole its sum. Lengths are drawn evenly over the
    distribution and not independently: n draws hold each range's share to within one, which
    leaves less chance in a short trace than independent draws would.

    Shapes: lows, highs, shares and powers are [b], highs finite, shares add up to 1.
    Units: powers are the exponents plus 1; 0 is even in the logarithm.
    """

    lows: Floats
    highs: Floats
    shares: Floats
    powers: Floats

    @property
    def mean(self) -> float:
        """The expected length."""
        return float(self.shares @ _means(self.lows, self.highs, self.powers))

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """Return n lengths in random order.

        Shapes: [n].
        """
        order = rng.permutation(n)
        upto = np.cumsum(self.shares)
        # One offset for all decides the ranges, so that each has its share; within them every
        # length has its own, so that they do not lean to one side together.
        comb = (order + rng.random()) / max(n, 1)
        which = np.minimum(np.searchsorted(upto, comb, side="right"), len(upto) - 1)
        places = (order + rng.random(n)) / max(n, 1)
        below = (upto - self.shares)[which]
        within = np.clip((places - below) / self.shares[which], 0.0, 1.0)
        low, high, power = self.lows[which], self.highs[which], self.powers[which]
        spread = np.log(high / low)
        is_even = power == 0.0
        some = np.where(is_even, 1.0, power)
        grown = np.log1p(within * np.expm1(some * spread)) / some
        exact = low * np.exp(np.where(is_even, within * spread, grown))
        # Up or down at random, so that whole lengths keep the mean of exact ones.
        whole = np.floor(exact + rng.random(n))
        lengths: Ints = np.clip(whole, low, high).astype(np.int64)
        return lengths


def shape_of(histogram: Histogram) -> LengthShape:
    """Return the distribution that a histogram's values are drawn from.

    Raises: ValueError if it holds no value.
    """
    filled = histogram.counts > 0
    counts, total = histogram.counts[filled], histogram.total
    if not counts.size:
        raise ValueError("a histogram without values has no shape")
    lows = np.maximum(histogram.lows[filled], 1.0)
    highs = _closed(lows, np.maximum(histogram.highs[filled], lows), counts, total)
    # Histograms of several engines may hold the same range more than once.
    ranges, place = np.unique(np.column_stack([lows, highs]), axis=0, return_inverse=True)
    counts = np.bincount(place.ravel(), weights=counts).astype(np.float64)
    lows, highs = ranges[:, 0], ranges[:, 1]
    powers = _powers(lows, highs, counts)

    def excess(tilt: float) -> float:
        return float(counts @ _means(lows, highs, powers + tilt)) - total

    tilt = 0.0
    if not math.isnan(total):
        # The mean rises with the tilt. Beyond these every range is at its edge, and so is it.
        low, high = -STEEPEST, STEEPEST
        while high - low > 1e-9:
            tilt = (low + high) / 2
            low, high = (tilt, high) if excess(tilt) < 0 else (low, tilt)
    return LengthShape(lows, highs, counts / counts.sum(), powers + tilt)


def _powers(lows: Floats, highs: Floats, counts: Floats) -> Floats:
    """Return the power of each range, as the densities of the ranges beside it rise or fall."""
    centres = np.log(lows * highs) / 2
    if len(lows) < 2 or not np.all(np.diff(centres) > 0):
        return np.zeros(len(lows))
    slopes = np.gradient(np.log(counts / (highs - lows + 1)), centres)
    powers: Floats = np.clip(slopes + 1, -STEEPEST_SLOPE, STEEPEST_SLOPE)
    return powers


def _closed(lows: Floats, highs: Floats, counts: Floats, total: float) -> Floats:
    """Return the upper ends with an open range closed.

    vLLM lays its bounds 1, 2, 5, 10, ... up to max_model_len, so that an open range ends before
    the next bound of that row; it is taken to end there, or higher if the sum says so.
    """
    is_open = np.isinf(highs)
    if not is_open.any():
        return highs
    closed = np.where(is_open, [_next_bound(low - 1) for low in lows], highs)
    if not math.isnan(total):
        inside = _means(lows, closed, np.zeros(len(lows)))
        rest = (total - float((counts * inside)[~is_open].sum())) / float(counts[is_open].sum())
        reach = np.where(rest >= closed, 2 * rest - lows, closed)
        closed = np.where(is_open, reach, highs)
    ends: Floats = np.clip(np.ceil(closed), lows, MAX_TOKENS)
    return ends


def _next_bound(bound: float) -> float:
    """Return the bound after this one in 1, 2, 5, 10, ...; twice it if it is none of them.

    >>> _next_bound(2000), _next_bound(5000), _next_bound(4096)
    (5000.0, 10000.0, 8192.0)
    """
    if bound < 1:
        return 1.0
    leading = bound / 10 ** math.floor(math.log10(bound))
    return bound * 2.5 if leading == 2.0 else bound * 2.0


def _means(lows: Floats, highs: Floats, powers: Floats) -> Floats:
    """Return the mean of each range under a density of length ** (power - 1)."""
    spread = np.log(highs / lows)
    upper, lower = _scaled(spread, powers + 1), _scaled(spread, powers)
    ratio = np.divide(upper, lower, out=np.ones_like(lows), where=spread > 0)
    means: Floats = lows * ratio
    return means


def _scaled(spread: Floats, powers: Floats) -> Floats:
    """Return (exp(power * spread) - 1) / power, and its limit at 0."""
    is_even = powers == 0.0
    some = np.where(is_even, 1.0, powers)
    scaled: Floats = np.where(is_even, spread, np.expm1(some * spread) / some)
    return scaled


def draw_by_group(
    shapes: Sequence[LengthShape], groups: Ints, rng: np.random.Generator
) -> Ints:
    """Return a length for each row from the distribution of its group.

    Shapes: groups is [n], indices into shapes; the result is [n].
    """
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(len(shapes) + 1))
    lengths = np.zeros(len(groups), dtype=np.int64)
    for group in np.unique(groups).tolist():
        rows = order[starts[group] : starts[group + 1]]
        lengths[rows] = shapes[group].draw(len(rows), rng)
    return lengths


def arrivals_within(
    starts_s: Floats, ends_s: Floats, counts: Ints, rng: np.random.Generator
) -> tuple[Floats, Ints]:
    """Return instants for each window's count, and the window that each is of.

    Instants are even at random within their window: what a Poisson process looks like once
    its count is known. The count itself is kept, not drawn.

    Shapes: inputs are [m], outputs [counts.sum()], windows in their order.
    """
    windows = np.repeat(np.arange(len(counts)), counts)
    lasting_s = (ends_s - starts_s)[windows]
    return starts_s[windows] + rng.random(len(windows)) * lasting_s, windows


def requests_in_flight(flow: Concurrency, seconds_each: Floats) -> tuple[Floats, Ints]:
    """Return when requests come that keep a recorded number in flight, and at which reading.

    By Little's law n requests in flight that live s seconds each make n / s of them a second;
    those still in flight at the end are added. An instant stands where that share of the work
    does, so that a stretch of the recording holds its share of the requests.

    Shapes: seconds_each is [m] as the readings are; outputs are [n], ascending from the first
        busy reading on.
    Raises: ValueError if nothing was ever in flight before the last reading.
    """
    lasting_s = np.diff(flow.times_s)
    work = flow.in_flight[:-1] * lasting_s / seconds_each[:-1]
    upto = np.concatenate([[0.0], np.cumsum(work)])
    if not upto[-1] > 0:
        raise ValueError("no request was in flight for any time")
    n = math.ceil(upto[-1]) + int(flow.in_flight[-1])
    wanted = np.arange(n) * (upto[-1] / n)
    readings = np.searchsorted(upto, wanted, side="right") - 1
    share = (wanted - upto[readings]) / work[readings]
    return flow.times_s[readings] + share * lasting_s[readings], readings.astype(np.int64)


def shuffled_rounds(rows: int, n: int, rng: np.random.Generator) -> Ints:
    """Return n rows at random, each as often as any other to within one.

    >>> sorted(shuffled_rounds(2, 4, np.random.default_rng(0)).tolist())
    [0, 0, 1, 1]
    """
    rounds = [rng.permutation(rows) for _ in range(-(-n // rows))]
    drawn: Ints = np.concatenate([*rounds, np.zeros(0, dtype=np.int64)])[:n]
    return drawn


def as_changes(flow: Concurrency) -> Concurrency:
    """Return a recording without readings that repeat the one before; the last one stays.

    >>> as_changes(Concurrency(np.arange(4.0), np.array([1, 1, 2, 2]))).times_s.tolist()
    [0.0, 2.0, 3.0]
    """
    is_kept = np.append(True, np.diff(flow.in_flight) != 0)
    is_kept[-1] = True
    return Concurrency(flow.times_s[is_kept], flow.in_flight[is_kept])
