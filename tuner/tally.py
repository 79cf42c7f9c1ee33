"""Samples counted into narrow bins, so that memory does not grow with how many there are.

A replay of a day brings out more gaps between tokens and more steps than anyone wants to
keep; their quantiles and means are all that is asked later. Statistics of plain samples, with
intervals from their order in time, are in `stats`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner import stats
from tuner.arrays import Floats
from tuner.errors import TooFewSamplesError
from tuner.stats import Estimate

# Width of a bin relative to its value: ours, a twentieth of a percent, far below what two
# replays of the same thing differ by.
BIN_RATIO = 0.0005
_LOG_WIDTH = math.log1p(BIN_RATIO)
# The key of the bin that holds zeros; no positive double comes near it.
_ZERO = -(1 << 40)


@dataclass(frozen=True, slots=True)
class Weighted:
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

    def value_at(self, q: float) -> float:
        """Return the value below which the fraction q of the weight lies.

        Raises: TooFewSamplesError if there is no weight.
        """
        reached = np.cumsum(self.weights)
        if reached.size == 0 or reached[-1] <= 0:
            raise TooFewSamplesError(f"no sample to take the {q:g} quantile of")
        at = int(np.searchsorted(reached, q * reached[-1] * (1 - 1e-12), side="left"))
        return float(self.values[min(at, self.values.size - 1)])

    def quantile(self, q: float) -> Estimate:
        """Return the quantile of counted samples with its distribution-free interval.

        Raises: TooFewSamplesError if there is no sample.
        Source: as `stats.quantile`; exact to a bin.
        """
        n = round(self.total_weight)
        value = self.value_at(q)
        low, high = stats.order_interval(n, q)
        if not stats.carries_quantile(n, q) or low < 1 or high > n:
            return Estimate(value, None, None, n)
        return Estimate(value, self.value_at(low / n), self.value_at(high / n), n)

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


EMPTY = Weighted(np.empty(0), np.empty(0))


class Tally:
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
        keys = np.full(values.size, _ZERO, dtype=np.int64)
        above = values > 0
        keys[above] = np.floor(np.log(values[above]) / _LOG_WIDTH).astype(np.int64)
        self._merge(keys, weighed, np.where(above, values, 0.0) * weighed)

    def add_counted(self, counted: Weighted) -> None:
        """Count what another tally has counted."""
        self.add(counted.values, counted.weights)

    def _merge(self, keys: NDArray[np.int64], weights: Floats, sums: Floats) -> None:
        kept, where = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        all_weights = np.concatenate([self._weights, weights])
        all_sums = np.concatenate([self._sums, sums])
        self._keys = kept
        self._weights, self._sums = np.zeros(kept.size), np.zeros(kept.size)
        np.add.at(self._weights, where, all_weights)
        np.add.at(self._sums, where, all_sums)

    def finish(self) -> Weighted:
        """Return what was counted."""
        weighty = self._weights > 0
        weights = self._weights[weighty]
        return Weighted(self._sums[weighty] / weights, weights)


def pooled(parts: Sequence[Weighted]) -> Weighted:
    """Return the samples of all parts together."""
    if len(parts) == 1:
        return parts[0]
    tally = Tally()
    for part in parts:
        tally.add_counted(part)
    return tally.finish()
