"""How fast an engine's steps are, and how sure that is: a step model with its uncertainty.

A step model's coefficients explain most of what was measured. What is left is explained by a
smooth factor of what is in a batch, and by the machine's mood, which differs from moment to
moment and from minute to minute: on all of a step, and on the part that grows with the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from tuner.engine.shape import Graphs
from tuner.engine.steps import StepColumns
from tuner.errors import UsageError
from tuner.shadow.step_model import SCALARS, TERMS, Factors, StepModel, places
from tuner.stats import Floats

# How much a start of the engine moves its speed: ours, in logarithms.
START = 0.01
# How far the steps of a setting are off what is learnt of all, in logarithms, as far as its
# batches are no other's: ours. On planted machines 1 % between two settings in the middle of 20
# cases.
SETTING = 0.007
# The same of step times that were derived from published tables: ours. By it the true gains on
# machines as far off as 14 published systems are lie within their interval of 90 % a little too
# often, and on an H200 that was not restless too (tests/benchmarks).
DERIVED_SETTING = 0.04
# So many knots of sequences and of tokens reach beyond any batch. What takes less of the time
# than this does not count among what settings visit: ours.
_KNOTS, _SELDOM = 32, 1e-4
# Digits of a factor: ours, so that a profile's file stays small.
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """What measurements leave open of a step model, as directions in which it may be off.

    A model that is as possible as the stated one is off by a sum of the directions, each times
    a standard normal number, in the logarithms of `TERMS` and then of the factors, row by row.
    `directions` are the numbers, half-precision floats, little-endian, one direction of `width`
    numbers after the other. `start` is the standard deviation of the logarithm of the speed of
    a start at another time, `setting` that of a setting beside what is learnt of all.

    Raises: UsageError if the numbers are no whole directions, or one is not finite.
    """

    directions: bytes = b""
    width: int = len(TERMS) + Factors().table.size
    start: float = START
    setting: float = SETTING

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.width <= len(TERMS) or len(self.directions) % (2 * self.width):
            raise UsageError(f"directions must hold {self.width} half-precision floats each")
        if not (np.isfinite(self.table).all() and math.isfinite(self.start + self.setting)):
            raise UsageError("directions must be finite")

    @classmethod
    def of(cls, table: Floats) -> Self:
        """Return the uncertainty in some directions. Shapes: [directions, width]."""
        return cls(table.astype("<f2").tobytes(), table.shape[1])

    def after(self, had: float, more: float) -> Self:
        """Return what is left open once more was measured than it had been learnt from.

        What measurements leave open shrinks as the root of them; that a start has a speed of
        its own no measurement of another start tells.

        >>> round(Uncertainty(start=0.05).after(1.0, 3.0).start, 4)
        0.0265
        """
        left = had / (had + more)
        own = min(self.start, START)
        start = math.sqrt(own**2 + left * (self.start**2 - own**2))
        nearer = self.of(math.sqrt(left) * self.table)
        return replace(self, directions=nearer.directions, start=start)

    @property
    def table(self) -> Floats:
        """The directions. Shapes: [directions, width]."""
        numbers = np.frombuffer(self.directions, dtype="<f2")
        return numbers.reshape(-1, self.width).astype(np.float64)

    def moved(self, model: StepModel, numbers: Floats) -> StepModel:
        """Return the model that is off by so many deviations: start, directions, then host.

        As possible as the stated one, where the numbers are drawn from the normal distribution.

        Shapes: numbers is [1 + directions + 1].
        """
        times, table = math.exp(self.start * float(numbers[0])), self.table
        launches = math.exp(model.host.spread * float(numbers[-1]))
        model = replace(model, host=model.host.scaled(launches))
        if not len(table):
            return model.scaled(times)
        off = numbers[1:-1] @ table
        terms, factors = np.split(off, [len(TERMS)])
        return changed(model, terms, factors.reshape(model.factors.table.shape)).scaled(times)


def changed(model: StepModel, terms: Floats, factors: Floats) -> StepModel:
    """Return the model with the logarithms of its terms and factors moved."""
    *times, of_tokens = np.exp(terms).tolist()
    named = zip(SCALARS, times, strict=True)
    scalars: dict[str, Any] = {name: getattr(model, name) * t for name, t in named}
    table = (model.factors.table * np.exp(factors)).round(DIGITS)
    return replace(
        model,
        token_slopes_s=tuple(s * of_tokens for s in model.token_slopes_s),
        factors=Factors(tuple(map(tuple, table.tolist()))),
        **scalars,
    )


@dataclass(frozen=True, slots=True)
class MoodSpreads:
    """How far apart like steps are, as standard deviations of logarithms.

    Those of a segment of SEGMENT_S, of its part that grows with the batch, of the slow mood, of
    which moments are the less alike the further apart they are, and of like steps of a segment.
    """

    segment: float
    grows: float
    slow: float
    like_steps: float

    @property
    def between_moments(self) -> float:
        """By how much like steps of large batches differ from one moment to another."""
        return math.hypot(self.segment, self.grows, self.slow)


@dataclass(frozen=True, slots=True)
class Speed:
    """A step model and what is uncertain of it; `mood` says how restless the machine was."""

    model: StepModel
    uncertainty: Uncertainty
    mood: MoodSpreads


@dataclass(frozen=True, slots=True)
class Visited:
    """Which batches steps were of, as the model sees them: like ones taken together.

    `design` says what each kind's logarithm of time moves by with `TERMS` and factors,
    `seconds` what all of a kind take, `grows` the share of it that grows with the batch.

    Shapes: [kinds], design [kinds, TERMS + knots].
    """

    design: Floats
    seconds: Floats
    grows: Floats

    @classmethod
    def of(cls, model: StepModel, steps: StepColumns) -> Self:
        """Return the kinds of the steps that have a batch; times are the model's."""
        seqs, tokens = steps.decode_seqs, steps.prefill_tokens
        has_batch = seqs + tokens > 0
        took_s = (model.predict_s(steps) * steps.repeats)[has_batch]
        parts_s = model.parts_s(steps)[has_batch]
        shares = parts_s / parts_s.sum(axis=1, keepdims=True)
        table = np.column_stack([seqs[has_batch], tokens[has_batch], shares])
        half_doublings = np.round(2 * doublings(table[:, :2])).astype(np.int64)
        _, kind = np.unique(half_doublings @ np.array([1000, 1]), return_inverse=True)
        kind = kind.ravel()
        seconds = np.bincount(kind, took_s).astype(np.float64)
        means: Floats = np.column_stack(
            [np.bincount(kind, took_s * column) for column in table.T]
        ).astype(np.float64)
        means = means / seconds[:, None]
        shape = (len(model.factors.rows), len(model.factors.rows[0]))
        weights = knot_weights(means[:, 0], means[:, 1], shape)
        grows: Floats = np.asarray(1.0 - means[:, 2], dtype=np.float64)
        return cls(np.column_stack([means[:, 2:], weights]), seconds, grows)

    @property
    def mean(self) -> Floats:
        """What the logarithm of all their time moves by. Shapes: [TERMS + knots]."""
        found: Floats = self.seconds @ self.design / self.seconds.sum()
        return found


def visits(steps: StepColumns, graphs: Graphs) -> Floats:
    """Return the root of the share of the time that batches about each pair of knots take.

    What two settings visit is alike as far as the product of both is 1. Where anything is
    captured a batch that a graph serves is of another kind than one that is launched eagerly.

    Shapes: [2 x pairs of knots], of length 1.
    Source: Bhattacharyya, On a measure of divergence between two statistical populations,
        Bull. Calcutta Math. Soc. 35 (1943).
    """
    seqs, tokens = steps.decode_seqs, steps.prefill_tokens
    took_s = np.where(steps.has_batch, steps.duration_s, 0.0)
    _, has_graph = graphs.padded_along(seqs + tokens, tokens > 0)
    kind = _KNOTS * _KNOTS * has_graph
    time_s = np.zeros(2 * _KNOTS * _KNOTS)
    (i, down), (j, across) = places(seqs), places(tokens)
    for k, row in ((i, 1.0 - down), (i + 1, down)):
        for m, column in ((j, 1.0 - across), (j + 1, across)):
            time_s += np.bincount(kind + _KNOTS * k + m, took_s * row * column, time_s.size)
    shares = time_s / max(float(time_s.sum()), 1e-30)
    roots: Floats = np.sqrt(np.where(shares < _SELDOM, 0.0, shares))
    return roots / max(float(np.linalg.norm(roots)), 1e-30)


def doublings(x: Floats) -> Floats:
    """Return where x lies in doublings: 0 where it is 0, and 1 + log2 x.

    >>> doublings(np.array([0.0, 1.0, 8.0])).tolist()
    [0.0, 1.0, 4.0]
    """
    found: Floats = np.where(x >= 1, 1.0 + np.log2(np.maximum(x, 1.0)), 0.0)
    return found


def knot_weights(seqs: Floats, tokens: Floats, shape: tuple[int, int]) -> Floats:
    """Return how much each knot counts at each place. Shapes: [places, knots]."""
    weights = np.zeros((len(seqs), shape[0], shape[1]))
    at = np.arange(len(seqs))
    (i, down), (j, across) = places(seqs), places(tokens)
    for k, row in ((i, 1.0 - down), (i + 1, down)):
        for m, column in ((j, 1.0 - across), (j + 1, across)):
            weights[at, np.minimum(k, shape[0] - 1), np.minimum(m, shape[1] - 1)] += (
                row * column
            )
    return weights.reshape(len(seqs), -1)
