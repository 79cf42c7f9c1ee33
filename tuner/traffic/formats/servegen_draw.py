"""Requests drawn from ServeGen's aggregates: how many a window holds, when, and how long.

Answers what one window looked like, given its rate, the distribution of its gaps and two
histograms of lengths.

A published rate is a count of requests divided by the window, so exactly that many are drawn:
the rate holds. The gaps have the published shape. Their published mean is kept where the
requests then fill a part of the window only, as of a client that came late or left early;
where they would not fit, the fit is wrong and the rate right, and they fill the whole window.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tuner.stats import Floats, Ints

_TINY = float(np.finfo(np.float64).tiny)


class Gaps(StrEnum):
    """How the gaps between arrivals are distributed, as the files spell it."""

    POISSON = ""
    GAMMA = "Gamma"
    WEIBULL = "Weibull"


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A stretch of time with its rate and its gaps, and the line that said so.

    Units: scale_s in seconds, shape a pure number; both count for Gamma and Weibull alone.
    """

    start_s: float
    length_s: float
    rate_per_s: float
    gaps: Gaps = Gaps.POISSON
    shape: float = 1.0
    scale_s: float = 0.0
    line: int = 0

    @property
    def end_s(self) -> float:
        """Where the next one may begin."""
        return self.start_s + self.length_s

    @property
    def expected(self) -> float:
        """How many requests the rate amounts to."""
        return self.rate_per_s * self.length_s

    @property
    def mean_gap_s(self) -> float:
        """The mean of the published distribution, or for Poisson what the rate says."""
        if self.gaps is Gaps.GAMMA:
            return self.shape * self.scale_s
        if self.gaps is Gaps.WEIBULL:
            return self.scale_s * math.gamma(1 + 1 / self.shape)
        return 1 / self.rate_per_s


@dataclass(frozen=True, slots=True, eq=False)
class LengthHistogram:
    """Token counts and how likely each is, summed up.

    Shapes: both [n], n >= 1; tokens ascend, cumulative ascends to 1.
    """

    tokens: Ints
    cumulative: Floats

    @classmethod
    def of(cls, tokens: Ints, mass: Floats) -> LengthHistogram:
        """Return the histogram of token counts in any order; what has no mass is left out."""
        possible = np.flatnonzero(mass > 0)
        order = possible[np.argsort(tokens[possible])]
        sums = np.cumsum(mass[order])
        return cls(tokens[order], sums / sums[-1])

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """Return n token counts."""
        return self.tokens[np.searchsorted(self.cumulative, rng.random(n), side="right")]


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The two histograms in force in a window, independent: no joint one is published."""

    prompt: LengthHistogram
    output: LengthHistogram


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The requests of one window, in order of arrival.

    Shapes: all [n], n perhaps 0.
    Units: seconds on the clock of the windows.
    """

    arrived_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints


def generator(seed: int, name: str, place: int) -> np.random.Generator:
    """Return the generator of the window at `place` in the file of that name.

    It depends on no other window, and the same window of two clients gives other numbers.
    """
    entropy = (seed % (1 << 64), zlib.crc32(os.fsencode(name)))
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(place,)))


def draw(window: RateWindow, lengths: Lengths, rng: np.random.Generator) -> Drawn:
    """Return the requests of one window."""
    arrived_s = _arrivals(window, rng)
    n = len(arrived_s)
    return Drawn(arrived_s, lengths.prompt.draw(rng, n), lengths.output.draw(rng, n))


def _arrivals(window: RateWindow, rng: np.random.Generator) -> Floats:
    """Return as many arrivals as the rate asks for; a fraction of one is drawn, too."""
    n = int(window.expected + rng.random())
    if not n:
        return np.zeros(0)
    # One gap more than requests, so that the last one is not always at the end.
    gaps = _unit_gaps(window, rng, n + 1)
    filled_s = min(window.length_s, (n + 1) * window.mean_gap_s)
    start_s = window.start_s + rng.random() * (window.length_s - filled_s)
    arrived_s = start_s + filled_s * (np.cumsum(gaps[:-1]) / gaps.sum())
    # Of wild gaps the last may be lost in rounding, and the window's end is not part of it.
    before_end: Floats = np.minimum(arrived_s, math.nextafter(window.end_s, -math.inf))
    return before_end


def _unit_gaps(window: RateWindow, rng: np.random.Generator, n: int) -> Floats:
    """Return n gaps above 0 of the window's shape and of any scale."""
    if window.gaps is Gaps.GAMMA:
        gaps = rng.standard_gamma(window.shape, n)
    elif window.gaps is Gaps.WEIBULL:
        gaps = rng.weibull(window.shape, n)
    else:
        gaps = rng.standard_exponential(n)
    # Wild bursts have gaps too small for a double; all of them at 0 could not be scaled.
    return gaps + _TINY


def busiest_stretch(windows: Sequence[RateWindow], length_s: float) -> tuple[float, float]:
    """Return from when to when the windows expect most requests within length_s.

    The earliest of equals. The expected count is linear between the windows' edges, so that
    the best stretch begins or ends at one.

    Shapes: windows ascend and do not overlap, one or more.
    """
    edges_s = np.array([edge for window in windows for edge in (window.start_s, window.end_s)])
    counts = np.repeat(np.cumsum([0.0, *(window.expected for window in windows)]), 2)[1:-1]
    first_s, last_s = float(edges_s[0]), float(edges_s[-1])
    latest_s = max(first_s, last_s - length_s)
    starts_s = np.unique(
        np.clip(np.concatenate([edges_s, edges_s - length_s]), first_s, latest_s)
    )
    held = np.interp(starts_s + length_s, edges_s, counts) - np.interp(
        starts_s, edges_s, counts
    )
    # Equal stretches differ in the last digits of these sums.
    best = int(np.flatnonzero(held >= held.max() * (1 - 1e-9))[0])
    start_s = float(starts_s[best])
    return start_s, min(start_s + length_s, last_s)
