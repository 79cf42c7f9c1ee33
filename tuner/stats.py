"""Quantiles, means and paired comparisons, each with its interval.

An `Estimate` is the only way a statistic leaves this module: value, interval and sample size
together. What the numbers mean is left to `metrics`; what to do about them to `confirm`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, gammaln, stdtr, stdtrit

from tuner.arrays import Floats
from tuner.errors import TooFewSamplesError

# Ten observations beyond a quantile before it is named a tail: ours, so that a p99 is not the
# maximum of a small sample under another name.
BEYOND_TAIL = 10
# Batches for a mean's interval: ours, 20 as Schmeiser (1982) found 10 to 30 to be enough.
MEAN_BATCHES = 20
CONFIDENCE = 0.95
_LARGEST_LOG = math.log(sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic with its interval and sample size.

    `low` and `high` are None where the sample cannot carry an interval.

    Units: those of the samples.
    """

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether the sample carried an interval."""
        return self.low is not None and self.high is not None


def carries_quantile(n: int, q: float) -> bool:
    """Tell whether n samples hold at least ten observations beyond the quantile q.

    >>> carries_quantile(1000, 0.99), carries_quantile(999, 0.99)
    (True, False)
    """
    return n * (1.0 - q) >= BEYOND_TAIL - 1e-9


def quantile(samples: Floats | Sequence[float], q: float) -> Estimate:
    """Return the nearest-rank quantile with a distribution-free interval.

    The interval consists of two order statistics, chosen by the binomial distribution of how
    many samples lie below the quantile; it assumes exchangeable samples, so queueing bursts
    make it somewhat too narrow. Runs repeated in turns, not this interval, decide between
    configurations.

    Shapes: samples is [n], in any order, n >= 1.
    Units: those of the samples; q is a fraction in (0, 1).
    Raises: ValueError if q is outside (0, 1); TooFewSamplesError if there is no sample.
    Source: nearest rank, definition 1 of Hyndman & Fan (1996); interval, Conover,
        Practical Nonparametric Statistics, section 3.2.

    >>> quantile([0.001 * ms for ms in range(1, 1001)], 0.99).value
    0.99
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"a quantile lies in (0, 1), got {q}")
    values = np.sort(np.asarray(samples, dtype=np.float64))
    n = int(values.size)
    if n == 0:
        raise TooFewSamplesError(f"no sample to take the {q:g} quantile of")
    rank = max(1, math.ceil(q * n - 1e-9))
    low, high = order_interval(n, q)
    if not carries_quantile(n, q) or low < 1 or high > n:
        return Estimate(float(values[rank - 1]), None, None, n)
    return Estimate(float(values[rank - 1]), float(values[low - 1]), float(values[high - 1]), n)


def order_interval(n: int, q: float) -> tuple[int, int]:
    """Return the ranks (from 1) of the two order statistics that enclose the quantile."""
    tail = (1.0 - CONFIDENCE) / 2
    reach = 4 * math.sqrt(n * q * (1 - q)) + 2
    first, last = max(0, int(n * q - reach)), min(n, int(n * q + reach) + 1)
    ks = np.arange(first, last + 1)
    below = bdtr(ks, n, q)
    low = int(ks[np.searchsorted(below, tail, side="left")]) if below.size else 0
    high = int(ks[min(int(np.searchsorted(below, 1 - tail, side="left")), ks.size - 1)]) + 1
    return low, high


def mean(samples: Floats | Sequence[float]) -> Estimate:
    """Return the mean with an interval from batch means, in the order given.

    Neighbouring requests share a queue, so their latencies are not independent; means of
    consecutive batches nearly are.

    Shapes: samples is [n] in time order, n >= 1.
    Raises: TooFewSamplesError if there is no sample.
    Source: batch means, Law & Kelton, Simulation Modeling and Analysis, section 9.5.
    """
    values = np.asarray(samples, dtype=np.float64)
    n = int(values.size)
    if n == 0:
        raise TooFewSamplesError("no sample to take the mean of")
    centre = float(values.mean())
    if n < 2 * MEAN_BATCHES:
        return Estimate(centre, None, None, n)
    batches = np.array([part.mean() for part in np.array_split(values, MEAN_BATCHES)])
    half = _half_width(batches, CONFIDENCE)
    return Estimate(centre, centre - half, centre + half, n)


def mean_of_totals(totals: Floats, counts: Floats) -> Estimate:
    """Return the mean of samples of which only sums and numbers by stretch of time are known.

    Shapes: both [stretches] in time order; some sample was counted.
    Raises: TooFewSamplesError if none was.
    Source: batch means as in `mean`; ratio estimator, Cochran, Sampling Techniques, 6.4.

    >>> mean_of_totals(np.array([4.0, 6.0]), np.array([2.0, 2.0])).value
    2.5
    """
    n = round(float(counts.sum()))
    if n < 1:
        raise TooFewSamplesError("no sample to take the mean of")
    centre = float(totals.sum() / counts.sum())
    batches = min(MEAN_BATCHES, len(totals) // 2)
    if batches < 2:
        return Estimate(centre, None, None, n)
    parts = np.array_split(np.column_stack([totals, counts]), batches)
    by_batch = np.array([part.sum(axis=0) for part in parts])
    off = by_batch[:, 0] - centre * by_batch[:, 1]
    half = _half_width(off, CONFIDENCE) * batches / float(counts.sum())
    return Estimate(centre, centre - half, centre + half, n)


def _half_width(values: Floats, confidence: float) -> float:
    """Return half the width of Student's interval for the mean of values."""
    t = _t(values.size, confidence)
    return t * float(values.std(ddof=1)) / math.sqrt(values.size)


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return the ratio ours / theirs over runs made in turns, with Student's interval.

    Pairs share a round, so the machine's slow drift cancels; logarithms make the ratio
    symmetric (swapping the two inverts value and interval).

    Shapes: ours and theirs are [rounds], pair by pair, rounds >= 2, all above zero.
    Units: a ratio without unit.
    Raises: TooFewSamplesError below two pairs; ValueError if the lengths differ or a value is
        not above zero.
    Source: Student's t on log ratios, Fieller's problem avoided; Kalibera & Jones (2013).
    """
    if len(ours) != len(theirs):
        raise ValueError(f"pairs must match, got {len(ours)} and {len(theirs)} runs")
    if len(ours) < 2:
        raise TooFewSamplesError(f"a paired interval wants two rounds, got {len(ours)}")
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if bool((a <= 0).any()) or bool((b <= 0).any()):
        raise ValueError("a ratio wants values above zero")
    logs = np.log(a) - np.log(b)
    centre, half = float(logs.mean()), _half_width(logs, confidence)
    return Estimate(math.exp(centre), _exp(centre - half), _exp(centre + half), len(ours))


def would_hold_one(seen: Estimate, n: int, errors: float, confidence: float) -> bool:
    """Tell whether a ratio's interval would hold 1 after n pairs of the same spread.

    The ratio then is supposed to lie further from 1 than the one seen by so many of its
    standard errors. `seen` is from paired_ratio with the same confidence.
    """
    if seen.low is None or seen.high is None or seen.low <= 0:
        return False
    error = math.log(seen.value / seen.low) / _t(seen.n, confidence)
    reach = abs(math.log(seen.value)) + errors * error
    return reach < _t(n, confidence) * error * math.sqrt(seen.n / n)


def expected_loss(seen: Estimate, confidence: float) -> float:
    """Return what taking the first of a pair costs in expectation, as the ratio's logarithm.

    The mean of what the ratio lies above 1, and nothing where it lies below, when the true
    ratio is as uncertain as its interval says: near 0 where the first is surely no worse, and
    also where both are surely close. `seen` is from paired_ratio with the same confidence.

    Units: a logarithm, so that 0.01 is 1 %; without end where there is no interval or it is of
        two pairs.
    Source: expected opportunity cost, Chick & Inoue (2001), New two-stage and sequential
        procedures for selecting the best simulated system, with Student's t.
    """
    if seen.low is None or seen.low <= 0 or seen.n < 3:
        return math.inf
    centre, df = math.log(seen.value), seen.n - 1
    error = (centre - math.log(seen.low)) / _t(seen.n, confidence)
    if error == 0:
        return max(0.0, centre)
    x = centre / error
    log_density = float(gammaln((df + 1) / 2) - gammaln(df / 2)) - 0.5 * math.log(df * math.pi)
    density = math.exp(log_density - (df + 1) / 2 * math.log1p(x * x / df))
    return error * ((df + x * x) / (df - 1) * density + x * float(stdtr(df, x)))


def _t(n: int, confidence: float) -> float:
    """Return Student's quantile for the mean of n values."""
    return float(stdtrit(n - 1, 0.5 + confidence / 2))


def _exp(log: float) -> float:
    """Return the exponential, without end where two rounds say next to nothing."""
    return math.exp(log) if log < _LARGEST_LOG else math.inf


def time_weighted(values: Floats, durations_s: Floats) -> float:
    """Return the mean of values weighted by how long each held; 0 time is an error.

    Shapes: both are [n].
    Raises: TooFewSamplesError if no time passed.
    """
    total_s = float(durations_s.sum())
    if total_s <= 0:
        raise TooFewSamplesError("no time passed, so there is no time-weighted mean")
    return float((values * durations_s).sum() / total_s)


def time_weighted_quantile(values: Floats, durations_s: Floats, q: float) -> float:
    """Return the value below which the series stayed for the fraction q of the time.

    Shapes: both are [n], n >= 1.
    Raises: TooFewSamplesError if no time passed.
    """
    order = np.argsort(values, kind="stable")
    elapsed = np.cumsum(durations_s[order])
    if elapsed.size == 0 or elapsed[-1] <= 0:
        raise TooFewSamplesError("no time passed, so there is no time-weighted quantile")
    at = int(np.searchsorted(elapsed, q * elapsed[-1], side="left"))
    return float(values[order][min(at, values.size - 1)])
