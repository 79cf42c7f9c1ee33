"""How long a batch takes, as a model with few coefficients that people can read.

The shadow engine asks it instead of the model runner. What is in a batch is the scheduler's
business; how the coefficients are found is in `step_fit`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tuner.arrays import Floats
from tuner.engine.protocol import Batch
from tuner.engine.shape import padded_tokens
from tuner.engine.steps import StepColumns
from tuner.errors import UsageError

SCALARS = ("base_s", "prefill_base_s", "decode_context_s", "prefill_context_s")

Knots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Curve:
    """A piecewise linear curve from zero, with its height at each knot."""

    knots: Knots
    slopes_s: tuple[float, ...]
    heights_s: tuple[float, ...]

    @classmethod
    def of(cls, axis: str, knots: Knots, slopes_s: tuple[float, ...]) -> _Curve:
        if len(knots) != len(slopes_s) or knots[:1] != (0,) or not _ascends(knots):
            want = "must ascend from 0 with one slope each"
            raise UsageError(f"{axis}_knots {want}, got {knots} and {len(slopes_s)} slopes")
        _check_seconds(f"{axis}_slopes_s", *slopes_s)
        rises = (s * (b - a) for s, (a, b) in zip(slopes_s, pairwise(knots), strict=False))
        return cls(knots, slopes_s, (0.0, *np.cumsum([*rises]).tolist()))

    def at(self, x: int) -> float:
        i = bisect_right(self.knots, x) - 1
        return self.heights_s[i] + self.slopes_s[i] * (x - self.knots[i])

    def along(self, x: Floats) -> Floats:
        i = np.searchsorted(self.knots, x, "right") - 1
        knots, slopes_s = np.asarray(self.knots), np.asarray(self.slopes_s)
        along_s: Floats = np.asarray(self.heights_s)[i] + slopes_s[i] * (x - knots[i])
        return along_s


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times as long a batch takes as the coefficients say, by what is in it.

    `rows` are by decoding sequences, their columns by prefilled tokens, both at 0, 1, 2, 4,
    8 and so on; linear between these knots, and as the last one beyond it. One factor of 1
    where the coefficients say it all.

    Raises: UsageError if rows are not of one length, or a factor is not positive and finite.
    """

    rows: tuple[tuple[float, ...], ...] = ((1.0,),)

    def __post_init__(self) -> None:
        """Check the factors."""
        if len({len(row) for row in self.rows}) != 1 or not self.rows[0]:
            raise UsageError("factors must be rows of one length, at least one factor each")
        wrong = [f for row in self.rows for f in row if not (math.isfinite(f) and f > 0)]
        if wrong:
            raise UsageError(f"factors must be finite and positive, got {wrong[0]}")

    @property
    def table(self) -> Floats:
        """The factors. Shapes: [rows, columns]."""
        return np.array(self.rows, dtype=np.float64)

    def at(self, decode_seqs: int, prefill_tokens: int) -> float:
        """Return the factor of a batch."""
        i, down = _place(decode_seqs)
        j, across = _place(prefill_tokens)
        here, below = (self.rows[min(k, len(self.rows) - 1)] for k in (i, i + 1))
        j, k = (min(k, len(here) - 1) for k in (j, j + 1))
        first = here[j] + (below[j] - here[j]) * down
        second = here[k] + (below[k] - here[k]) * down
        return first + (second - first) * across

    def along(self, decode_seqs: Floats, prefill_tokens: Floats) -> Floats:
        """Return the factor of each batch. Shapes: those that both broadcast to."""
        table = self.table
        i, down = places(decode_seqs)
        j, across = places(prefill_tokens)
        i, below = (np.minimum(k, table.shape[0] - 1) for k in (i, i + 1))
        j, right = (np.minimum(k, table.shape[1] - 1) for k in (j, j + 1))
        first = table[i, j] + (table[below, j] - table[i, j]) * down
        second = table[i, right] + (table[below, right] - table[i, right]) * down
        found: Floats = first + (second - first) * across
        return found


def _place(x: int) -> tuple[int, float]:
    """Return the knot below or at x, and how far it is to the next, as a share.

    >>> _place(0), _place(1), _place(6)
    ((0, 0.0), (1, 0.0), (3, 0.5))
    """
    i = x.bit_length()
    low, high = (1 << i) >> 1, 1 << i
    return i, (x - low) / (high - low)


def places(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return the knot of factors below or at each x, and how far it is to the next.

    Shapes: those of x. Units: the distance as a share of that between the knots.
    """
    i = np.where(x >= 1, np.frexp(x)[1], 0).astype(np.int64)
    high = np.ldexp(1.0, i)
    low = np.where(i > 0, high / 2, 0.0)
    return i, (x - low) / (high - low)


class _Curves:
    """Room for the two curves; a plain base, so that they are no fields of the model."""

    __slots__ = ("_decode", "_prefill")
    _decode: _Curve
    _prefill: _Curve


@dataclass(frozen=True, slots=True)
class StepModel(_Curves):
    """The seconds that a batch takes; no coefficient is negative, so more adds no less.

    Time grows piecewise linearly with the decoding sequences and with the prefilled tokens; the
    last segment extends. A batch that only decodes is padded to a captured size first; one that
    prefills is not, but never takes less than its decoding part alone. `factors` is what
    is left of the measured times, by what is in a batch. `tidy_s` is a turn that completes no
    batch.

    Units: knots in sequences and in tokens; slopes in seconds per sequence and per token;
        `decode_context_s` and `prefill_context_s` per token of context as Batch counts it.
    Raises: UsageError if knots do not ascend from 0 with a slope each, sizes do not ascend, or
        a coefficient is negative or not finite.
    """

    decode_knots: Knots
    decode_slopes_s: tuple[float, ...]
    prefill_knots: Knots
    prefill_slopes_s: tuple[float, ...]
    base_s: float
    prefill_base_s: float
    decode_context_s: float
    prefill_context_s: float
    tidy_s: float
    captured_sizes: tuple[int, ...]
    factors: Factors = Factors()

    @classmethod
    def linear(
        cls,
        base_s: float,
        decode_s: float,
        prefill_s: float,
        *,
        prefill_base_s: float = 0.0,
        decode_context_s: float = 0.0,
        prefill_context_s: float = 0.0,
        tidy_s: float = 0.0,
        captured_sizes: tuple[int, ...] = (),
    ) -> StepModel:
        """Return a model without knots: so many seconds for each sequence and each token.

        >>> StepModel.linear(1.0, 0.5, 0.0).step_s(Batch(3, 0, 0, 0, 0, 0, 0))
        2.5
        """
        return cls(
            *((0,), (decode_s,), (0,), (prefill_s,)),
            *(base_s, prefill_base_s, decode_context_s, prefill_context_s),
            *(tidy_s, captured_sizes),
        )

    def __post_init__(self) -> None:
        """Check the coefficients and keep both curves."""
        for axis in ("decode", "prefill"):
            knots, slopes_s = getattr(self, f"{axis}_knots"), getattr(self, f"{axis}_slopes_s")
            object.__setattr__(self, f"_{axis}", _Curve.of(axis, knots, slopes_s))
        for name in (*SCALARS, "tidy_s"):
            _check_seconds(name, getattr(self, name))
        if not _ascends((0, *self.captured_sizes)):
            raise UsageError(f"captured_sizes must ascend from 1, got {self.captured_sizes}")

    def __reduce__(self) -> tuple[type[StepModel], tuple[object, ...]]:
        """Travel as fields only, and be checked again on arrival."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def step_s(self, batch: Batch) -> float:
        """Return the seconds that the batch takes; an empty one is a turn to tidy up."""
        seqs, prefill = batch.decode_seqs, batch.prefill_tokens
        if not (seqs or prefill):
            return self.tidy_s
        work_s = self._decode.at(padded_tokens(seqs, self.captured_sizes)) if seqs else 0.0
        if prefill:
            prefill_s = self.prefill_base_s + self._prefill.at(prefill)
            work_s = max(work_s, self._decode.at(seqs) + prefill_s)
        context_s = self.decode_context_s * batch.decode_context_tokens
        context_s += self.prefill_context_s * batch.prefill_context_tokens
        return (self.base_s + work_s + context_s) * self.factors.at(seqs, prefill)

    def predict_s(self, steps: StepColumns) -> Floats:
        """Return what step_s says of the batch of every row; of a run, of its first step.

        Shapes: [rows].
        """
        seqs, prefill = steps.decode_seqs, steps.prefill_tokens
        alone_s = np.where(
            seqs > 0, self._decode.along(padded_column(seqs, self.captured_sizes)), 0
        )
        prefill_s = self.prefill_base_s + self._prefill.along(prefill)
        mixed_s = np.maximum(alone_s, self._decode.along(seqs) + prefill_s)
        context_s = self.decode_context_s * steps.decode_context_tokens
        context_s = context_s + self.prefill_context_s * steps.prefill_context_tokens
        took_s = self.base_s + np.where(prefill > 0, mixed_s, alone_s) + context_s
        took_s = took_s * self.factors.along(seqs, prefill)
        return np.where((seqs > 0) | (prefill > 0), took_s, self.tidy_s)

    def parts_s(self, steps: StepColumns) -> Floats:
        """Return what each coefficient adds to the batch of every row, without factors.

        The columns are the base, decoding sequences, the prefills' base and tokens, and the
        contexts of decodes and of prefills.

        Shapes: [rows, 6].
        """
        seqs, prefill = steps.decode_seqs, steps.prefill_tokens
        has_prefill = prefill > 0
        padded_s = self._decode.along(padded_column(seqs, self.captured_sizes))
        alone_s = np.where(seqs > 0, padded_s, 0.0)
        beside_s, prefill_s = self._decode.along(seqs), self._prefill.along(prefill)
        is_mixed = has_prefill & (beside_s + self.prefill_base_s + prefill_s >= alone_s)
        return np.column_stack(
            [
                np.full(len(steps), self.base_s),
                np.where(is_mixed, beside_s, alone_s),
                np.where(is_mixed, self.prefill_base_s, 0.0),
                np.where(is_mixed, prefill_s, 0.0),
                self.decode_context_s * steps.decode_context_tokens,
                self.prefill_context_s * steps.prefill_context_tokens,
            ]
        )

    def decode_tables(self, most_seqs: int) -> tuple[Floats, Floats]:
        """Return the seconds of 0 to most_seqs decoding sequences, alone and beside a prompt.

        Alone they are padded to a captured size; both without base and contexts.

        Shapes: both [most_seqs + 1].
        """
        seqs = np.arange(most_seqs + 1, dtype=np.float64)
        alone_s = self._decode.along(padded_column(seqs, self.captured_sizes))
        return np.where(seqs > 0, alone_s, 0.0), self._decode.along(seqs)

    def prefill_curve(self) -> Floats:
        """Return the curve of prefilled tokens: its knots, the seconds there, the slopes.

        Shapes: [3, knots].
        """
        curve = self._prefill
        return np.array([curve.knots, curve.heights_s, curve.slopes_s], dtype=np.float64)

    def scaled(self, ratio: float) -> StepModel:
        """Return the model of which every batch takes ratio times as long."""
        slopes_s = (self.decode_slopes_s, self.prefill_slopes_s)
        decode_s, prefill_s = (tuple(s * ratio for s in axis) for axis in slopes_s)
        scalars = {name: getattr(self, name) * ratio for name in SCALARS}
        return replace(self, decode_slopes_s=decode_s, prefill_slopes_s=prefill_s, **scalars)

    def served(self, added_s: float, prefill_ratio: float) -> StepModel:
        """Return the model whose every batch takes added_s longer, and prefill ratio times.

        A step cannot take less than nothing: what is taken away is at most the whole base.
        """
        return replace(
            self,
            base_s=max(0.0, self.base_s + added_s),
            prefill_slopes_s=tuple(s * prefill_ratio for s in self.prefill_slopes_s),
            prefill_base_s=self.prefill_base_s * prefill_ratio,
            prefill_context_s=self.prefill_context_s * prefill_ratio,
        )


@dataclass(frozen=True, slots=True)
class FitError:
    """How wrong models of this kind were on steps that they had not seen.

    `steps` have a batch; `distorted_ratio` is the share of them set aside as stretched by the
    machine, which the other figures leave out. On a random fifth: `step_mape_ratio` is the
    median absolute relative error of a step, `heldout_steps_ratio` that of their summed time.
    `heldout_config_ratio` is the largest error of the summed time of a configuration predicted
    from the others; None where none of SEGMENT_STEPS or more can be left out.
    """

    steps: int
    step_mape_ratio: float
    heldout_steps_ratio: float
    heldout_config_ratio: float | None
    distorted_ratio: float


def padded_column(tokens: Floats, sizes: tuple[int, ...]) -> Floats:
    """Return padded_tokens of each."""
    if not sizes:
        return tokens
    at = np.searchsorted(sizes, tokens, "left")
    captured = np.asarray(sizes, dtype=np.float64)[np.minimum(at, len(sizes) - 1)]
    return np.where(at < len(sizes), captured, tokens)


def _ascends(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def _check_seconds(name: str, *values_s: float) -> None:
    for value_s in values_s:
        if not (math.isfinite(value_s) and value_s >= 0.0):
            raise UsageError(f"{name} must be finite and not negative, got {value_s}")
