"""The statistics of the whole tool, each with its interval where the sample carries one.

Quantiles, means and paired ratios of samples; the same of weighted samples and of values that
held over time; a histogram of small memory that merges; errors of any statistic by drawing
blocks again. An `Estimate` holds value, interval and sample size together.

`Floats`, `Ints` and `Bools` are the array types that signatures name.

The two distributions that the standard library lacks, and the search for where a function is
lowest, are a few lines here: SciPy, which the tests hold them to, is 140 MB in every
installation and half a second of every start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from tuner.errors import TooFewSamplesError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
# Ten observations beyond a quantile before it is named a tail: ours, so that a p99 is not the
# maximum of a small sample under another name.
BEYOND_TAIL = 10
# Batches for a mean's interval: ours, 20 as Schmeiser (1982) found 10 to 30 to be enough.
MEAN_BATCHES = 20
CONFIDENCE = 0.95


def one_thread() -> AbstractContextManager[object]:
    """Return what keeps the process's linear algebra on one thread while it is held.

    Several make matrices of hundreds no faster, and wait for each other where other processes
    run: learning took five times as long on two cores beside a second one. No engine's process
    inherits it.
    """
    limits: AbstractContextManager[object] = threadpool_limits(1, "blas")
    return limits


def significant(value: float) -> str:
    """Write three significant digits, zeros too, without an exponent.

    >>> significant(0.02), significant(1234.5), significant(0)
    ('0.0200', '1,234', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def short(value: float, digits: int = 3) -> str:
    """Write so many significant digits, of a large number all before the point.

    >>> short(1.724, 2), short(99.6, 2), short(28134.2)
    ('1.7', '100', '28,134')
    """
    is_large = round(abs(value)) >= 10**digits if math.isfinite(value) else False
    return f"{value:,.0f}" if is_large else f"{value:.{digits}g}"


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
    """Return whether n samples hold at least ten observations beyond the quantile q.

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
    return quantiles(samples, {"": q})[""]


def quantiles(
    samples: Floats | Sequence[float], qs: Mapping[str, float]
) -> dict[str, Estimate]:
    """Return several quantiles of the same samples, each as `quantile` does, by their names.

    Shapes: samples is [n], in any order, n >= 1.
    Units: those of the samples; every q is a fraction in (0, 1).
    Raises: ValueError if a q is outside (0, 1); TooFewSamplesError if there is no sample.
    """
    n = len(samples)
    ranks: dict[str, tuple[int, int, int]] = {}
    for name, q in qs.items():
        if not 0.0 < q < 1.0:
            raise ValueError(f"a quantile lies in (0, 1), got {q}")
        if n == 0:
            raise TooFewSamplesError(f"no sample to take the {q:g} quantile of")
        low, high = order_interval(n, q)
        is_carried = carries_quantile(n, q) and low >= 1 and high <= n
        ranks[name] = (
            max(1, math.ceil(q * n - 1e-9)),
            *((low, high) if is_carried else (0, 0)),
        )
    if not ranks:
        return {}  # numpy takes no empty list of places
    wanted = sorted({rank - 1 for of in ranks.values() for rank in of if rank})
    values = np.partition(np.asarray(samples, dtype=np.float64), wanted)

    def estimate(rank: int, low: int, high: int) -> Estimate:
        first, last = (float(values[at - 1]) if at else None for at in (low, high))
        return Estimate(float(values[rank - 1]), first, last, n)

    return {name: estimate(*of) for name, of in ranks.items()}


# The settings of a search answer the same requests, so that n is the same again and again.
@lru_cache(maxsize=4096)
def order_interval(n: int, q: float) -> tuple[int, int]:
    """Return the ranks (from 1) of the two order statistics that enclose the quantile."""
    ks, below = _binomial(n, q)
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.searchsorted(below, (tail, 1.0 - tail))
    return int(ks[low]), int(ks[min(high, ks.size - 1)]) + 1


def _binomial(n: int, p: float) -> tuple[NDArray[np.int64], Floats]:
    """Return numbers of successes in n trials, and the probability of so many or fewer.

    Each probability follows from the one before, and all come to 1: what is left out beyond
    twelve standard deviations is below the rounding.

    Shapes: both [numbers].
    """
    reach = 12 * math.sqrt(n * p * (1 - p)) + 30
    ks = np.arange(max(0, int(n * p - reach)), min(n, int(n * p + reach)) + 1)
    rises = np.log((n - ks[:-1]) / ks[1:]) + math.log(p / (1 - p))
    logs = np.cumsum(np.append(0.0, rises))
    below: Floats = np.cumsum(np.exp(logs - logs.max()))
    return ks, below / below[-1]


@cache
def _gauss_legendre() -> tuple[Floats, Floats]:
    """Return points and weights of a rule; 64 are ours, exact to ten digits from df 1 on."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    return nodes, weights


# Beyond so many degrees of freedom t is normal to a millionth: ours, (z^2 + 1) / 4 df.
_NORMAL_DF = 1e6


@lru_cache(maxsize=4096)
def student_quantile(df: float, p: float) -> float:
    """Return the value below which Student's t lies with probability p; nan unless df > 0.

    With t = sqrt(df) sinh(s) the density is cosh(s) to the power of -df, smooth for every df,
    which Gauss and Legendre's rule integrates; Newton's method finds s from below, since the
    normal quantile is nearer to 0 and the integral concave.

    Source: substitution ours; rule, Abramowitz & Stegun (1964), 25.4.29.

    >>> round(student_quantile(9, 0.975), 4)
    2.2622
    """
    z = NormalDist().inv_cdf(p)
    if not df > 0 or p == 0.5:
        return 0.0 if df > 0 else math.nan
    if df > _NORMAL_DF:
        return z
    nodes, weights = _gauss_legendre()
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    wanted, s = abs(p - 0.5) / scale, math.asinh(abs(z) / math.sqrt(df))
    for _ in range(100):
        area = s / 2 * float(weights @ np.cosh(s / 2 * (nodes + 1)) ** -df)
        step = (wanted - area) * math.cosh(s) ** df
        s += step
        if abs(step) <= 1e-12 * s:
            break
    return math.copysign(math.sqrt(df) * math.sinh(s), z)


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
    ends = np.linspace(0, n, MEAN_BATCHES + 1).astype(np.int64)
    batches = np.add.reduceat(values, ends[:-1]) / np.diff(ends)
    half = _half_width(batches)
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
    half = _half_width(off) * batches / float(counts.sum())
    return Estimate(centre, centre - half, centre + half, n)


def _half_width(values: Floats) -> float:
    """Return half the width of Student's interval for the mean of values."""
    t = student_quantile(values.size - 1, 0.5 + CONFIDENCE / 2)
    return t * float(values.std(ddof=1)) / math.sqrt(values.size)


# Width of a bin relative to its value, at most: ours, a twentieth of a percent, far below what
# two replays of the same thing differ by.
BIN_RATIO = 2.0**-11
# A bin holds the doubles that are equal but for these last bits: of 52 bits behind the point
# the first eleven count.
BIN_SHIFT = 41


@dataclass(frozen=True, slots=True)
class WeightedSamples:
    """Samples with weights, ascending; each value stands for a bin and is its mean.

    Shapes: values and weights are [bins].
    Units: those of the samples; a weight is a count, or seconds for what holds over time.
    """

    values: Floats
    weights: Floats

    @property
    def total_weight(self) -> float:
        """All samples' weight together."""
        return float(self.weights.sum())

    def values_at(self, qs: Sequence[float]) -> list[float]:
        """Return the values below which the fractions qs of the weight lie.

        Raises: TooFewSamplesError if there is no weight.
        """
        reached = np.cumsum(self.weights)
        if reached.size == 0 or reached[-1] <= 0:
            raise TooFewSamplesError("no sample to take a quantile of")
        wanted = np.array(qs) * (reached[-1] * (1 - 1e-12))
        at = np.searchsorted(reached, wanted, side="left")
        found: list[float] = self.values[np.minimum(at, self.values.size - 1)].tolist()
        return found

    def value_at(self, q: float) -> float:
        """Return the value below which the fraction q of the weight lies.

        Raises: TooFewSamplesError if there is no weight.
        """
        return self.values_at([q])[0]

    def quantiles(self, qs: Mapping[str, float]) -> dict[str, Estimate]:
        """Return quantiles of counted samples with their distribution-free intervals, by name.

        Raises: TooFewSamplesError if there is no sample.
        Source: as `quantile`; exact to a bin.
        """
        n = round(self.total_weight)
        if n < 1:
            raise TooFewSamplesError("no sample to take a quantile of")
        ranks = {name: order_interval(n, q) for name, q in qs.items()}
        shares = [
            share for name, q in qs.items() for share in (q, *(r / n for r in ranks[name]))
        ]
        found = iter(self.values_at(np.clip(shares, 0, 1).tolist()))
        estimates = {}
        for name, q in qs.items():
            value, first, last = next(found), next(found), next(found)
            low, high = ranks[name]
            is_carried = carries_quantile(n, q) and low >= 1 and high <= n
            ends = (first, last) if is_carried else (None, None)
            estimates[name] = Estimate(value, ends[0], ends[1], n)
        return estimates

    def mean(self) -> Estimate:
        """Return the mean, which the bins keep exactly; its interval needs the order in time.

        Raises: TooFewSamplesError if there is no weight.
        """
        total = self.total_weight
        if total <= 0:
            raise TooFewSamplesError("no sample to take the mean of")
        return Estimate(float(self.values @ self.weights) / total, None, None, round(total))

    def above(self, bound: float) -> float:
        """Return the weight of the samples above a bound."""
        return float(self.weights[self.values > bound].sum())


class LogHistogram:
    """Counts samples into bins as they come; negative ones count as zero."""

    def __init__(self) -> None:
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._weights: Floats = np.empty(0)
        self._sums: Floats = np.empty(0)

    def add(self, values: Floats, weights: Floats | None = None) -> None:
        """Count samples, each once or with its weight.

        Shapes: values and weights are [n].
        """
        if values.size == 0:
            return
        weighed = np.ones(values.size) if weights is None else weights
        counted = np.where(values > 0, values, 0.0).astype(np.float64, copy=False)
        self._merge(counted.view(np.int64) >> BIN_SHIFT, weighed, counted * weighed)

    def add_counted(self, counted: WeightedSamples) -> None:
        """Count what another histogram has counted."""
        self.add(counted.values, counted.weights)

    def _merge(self, keys: NDArray[np.int64], weights: Floats, sums: Floats) -> None:
        merged, where = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        all_weights = np.concatenate([self._weights, weights])
        all_sums = np.concatenate([self._sums, sums])
        self._keys = merged
        self._weights, self._sums = np.zeros(merged.size), np.zeros(merged.size)
        np.add.at(self._weights, where, all_weights)
        np.add.at(self._sums, where, all_sums)

    def finish(self) -> WeightedSamples:
        """Return what was counted."""
        weighty = self._weights > 0
        weights = self._weights[weighty]
        return WeightedSamples(self._sums[weighty] / weights, weights)


def pooled(parts: Sequence[WeightedSamples]) -> WeightedSamples:
    """Return the samples of all parts together."""
    if len(parts) == 1:
        return parts[0]
    histogram = LogHistogram()
    for part in parts:
        histogram.add_counted(part)
    return histogram.finish()


def even_normals(rng: np.random.Generator, slices: int, size: int) -> Floats:
    """Return standard normal numbers that are spread evenly, in slices one after the other.

    One lies in each stratum of as many as there are, and of each slice one in each of as many
    as it has, in any order: so many draws say of what grows or falls with the number nearly all
    there is to say.

    Shapes: [slices * size].
    Source: Latin hypercube, McKay, Beckman & Conover (1979); in slices, Qian (2012).
    """
    cells = rng.permuted(np.tile(np.arange(slices), (size, 1)), axis=1)
    places = np.arange(size)[:, None] * slices + cells + rng.random(cells.shape)
    shares = rng.permuted(places, axis=0).T.ravel() / places.size
    return np.array([NormalDist().inv_cdf(share) for share in shares.tolist()])


RESAMPLES: Final = 1000
"""Ours: a standard error from a thousand draws is itself off by 2 %."""

Statistic = Callable[[Floats], Floats]
"""Takes how often each block counts [draws, blocks] and returns [draws] values."""


@dataclass(frozen=True, slots=True)
class Resampled:
    """A statistic with its standard error; nan where it has no value.

    `df` is one less than the runs that there are: the degrees of freedom of the error.
    """

    value: float
    error: float
    df: float


MIN_RUNS: Final = 8
"""Ours: of fewer runs a spread is a guess, whatever Student's factor makes of it."""


def run_lengths(blocks: int) -> list[int]:
    """Return how many neighbours are drawn together: the usual number, and the most.

    Source: the cube root of the sample, Hall, Horowitz and Jing (1995), for a variance.
    """
    usual = math.ceil(math.cbrt(blocks))
    return sorted({usual, max(usual, blocks // MIN_RUNS)})


def resampled(statistic: Statistic, blocks: int, rng: np.random.Generator) -> Resampled:
    """Return a statistic of so many blocks and its error by drawing runs of them again.

    The larger error of short, long and endless runs counts: where neighbours are alike for
    longer than a run, as those of one session are, it tells too small a one.
    """
    lengths = run_lengths(blocks)
    found = [_of_runs(statistic, blocks, length, rng) for length in lengths]
    if len(found) > 1:
        found.append(_of_endless_runs(found[0], found[1], lengths[1] / lengths[0]))
    return max(found, key=lambda one: one.error if math.isfinite(one.error) else -math.inf)


def _of_endless_runs(short: Resampled, long: Resampled, times: float) -> Resampled:
    """Return the error of runs without end, by that of short ones and of so many times as long.

    What a variance lacks is in inverse proportion to the length of runs.

    Source: Vats and Flegal (2022), lugsail lag windows.
    """
    variance = (times * long.error**2 - short.error**2) / (times - 1)
    return Resampled(long.value, math.sqrt(max(variance, 0.0)), long.df)


def _of_runs(
    statistic: Statistic, blocks: int, length: int, rng: np.random.Generator
) -> Resampled:
    """Return a statistic and its error from runs of one length.

    Runs go around the end, so that all blocks are drawn equally often.

    Source: circular block bootstrap, Politis and Romano (1992).
    """
    runs = blocks / length
    firsts = rng.integers(blocks, size=(RESAMPLES, math.ceil(runs)))
    drawn = (firsts[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1) % blocks
    flat = (drawn[:, :blocks] + np.arange(RESAMPLES)[:, None] * blocks).ravel()
    weights = np.bincount(flat, minlength=RESAMPLES * blocks).reshape(RESAMPLES, blocks)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(np.ones((1, blocks)))[0])
        values = statistic(weights.astype(np.float64))
    finite = values[np.isfinite(values)]
    if not math.isfinite(value) or finite.size < RESAMPLES / 2 or runs <= 1:
        return Resampled(math.nan, math.nan, math.nan)
    # Drawn runs vary about their own mean, which is nearer to them than the true one.
    error = float(finite.std()) * math.sqrt(runs / (runs - 1))
    return Resampled(value, error, runs - 1)


def difference(new: Resampled, old: Resampled, confidence: float) -> tuple[float, float, float]:
    """Return new minus old with the ends of its interval.

    Source: Welch (1947), for two samples of different spread.
    """
    variances = new.error**2, old.error**2
    error = math.sqrt(sum(variances))
    change = new.value - old.value
    if error <= 0:
        return change, change, change
    df = sum(variances) ** 2 / (variances[0] ** 2 / new.df + variances[1] ** 2 / old.df)
    half = student_quantile(df, 0.5 + confidence / 2) * error
    return change, change - half, change + half


def tail_statistic(requests: int) -> str:
    """Return the highest quantile that leaves ten of the requests beyond it.

    Raises: TooFewSamplesError below twenty requests, where not even the median does.

    >>> tail_statistic(1000), tail_statistic(300), tail_statistic(150)
    ('p99', 'p95', 'p90')
    """
    for name in ("p99", "p95", "p90", "p50"):
        if carries_quantile(requests, QUANTILES[name]):
            return name
    raise TooFewSamplesError(
        f"{requests} requests are too few to tell configurations apart, at least 20 are needed",
        "widen --window or record more traffic",
    )


def lowest(
    of: Callable[[Floats], float], corners: Floats, *, x_apart: float, y_apart: float, most: int
) -> Floats:
    """Return where a function is lowest, by a simplex that moves, stretches and shrinks.

    Until its corners and their values are no further apart than that, or the function was
    called `most` times.

    Shapes: corners is [n + 1, n].
    Source: Nelder and Mead (1965), in the form of Lagarias, Reeds, Wright and Wright (1998).
    """
    points, values = [*corners], [of(corner) for corner in corners]
    calls = len(values)

    def at(times: float) -> tuple[float, Floats]:
        """Return the value and the point so many times as far from the worst as the others."""
        nonlocal calls
        calls += 1
        point = np.mean(points[:-1], axis=0) * (1 + times) - times * points[-1]
        return of(point), point

    while calls < most:
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        is_small = np.abs(np.array(points) - points[0]).max() <= x_apart
        if is_small and values[-1] - values[0] <= y_apart:
            break
        tried = at(1.0)
        if tried[0] < values[0]:
            tried = min(tried, at(2.0), key=lambda one: one[0])
        elif tried[0] >= values[-2]:
            limit = min(tried[0], values[-1])
            tried = at(0.5 if tried[0] < values[-1] else -0.5)
            if tried[0] > limit:
                points[1:] = [points[0] + (point - points[0]) / 2 for point in points[1:]]
                values[1:] = [of(point) for point in points[1:]]
                calls += len(values) - 1
                continue
        values[-1], points[-1] = tried
    least: Floats = points[int(np.argmin(values))]
    return least
