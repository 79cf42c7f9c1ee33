"""How far a statistic of blocks of time would have come out otherwise by chance.

Requests that come together are alike, and so are neighbouring blocks; so runs of neighbours are
drawn again, not blocks and not requests. Which statistic is asked is up to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import stdtrit

from tuner.arrays import Floats

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


LEAST_RUNS: Final = 8
"""Ours: of fewer runs a spread is a guess, whatever Student's factor makes of it."""


def run_lengths(blocks: int) -> list[int]:
    """Return how many neighbours are drawn together: the usual number, and twice as many.

    Source: the cube root of the sample, Hall, Horowitz and Jing (1995), for a variance. It
    supposes that blocks far apart are independent, which requests in flight for longer than a
    block are not.
    """
    usual = math.ceil(math.cbrt(blocks))
    return [length for length in (usual, 2 * usual) if blocks / length >= LEAST_RUNS] or [usual]


def resampled(statistic: Statistic, blocks: int, rng: np.random.Generator) -> Resampled:
    """Return a statistic of so many blocks and its error by drawing runs of them again.

    The larger error of short and long runs counts: where neighbours are alike for longer than
    a short run, it tells too small a one.
    """
    found = [_of_runs(statistic, blocks, length, rng) for length in run_lengths(blocks)]
    return max(found, key=lambda one: one.error if math.isfinite(one.error) else -math.inf)


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
    apart = new.value - old.value
    if error <= 0:
        return apart, apart, apart
    df = sum(variances) ** 2 / (variances[0] ** 2 / new.df + variances[1] ** 2 / old.df)
    half = float(stdtrit(df, 0.5 + confidence / 2)) * error
    return apart, apart - half, apart + half
