"""How long a batch takes, as a model with few coefficients that people can read.

The shadow engine asks it instead of the model runner. What is in a batch is the scheduler's
business; how the coefficients are found is in `fit`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tuner.engine.protocol import Batch
from tuner.engine.shape import NO_GRAPHS, Graphs
from tuner.engine.steps import StepColumns
from tuner.errors import UsageError
from tuner.stats import Floats

SCALARS = (
    "base_s",
    "seq_s",
    "eager_s",
    "prefill_base_s",
    "decode_context_s",
    "mixed_context_s",
    "spread_s",
    "mixed_spread_s",
    "prefill_context_s",
)
"""The coefficients that are one number each."""

Knots = tuple[int, ...]

# No figure of a profile can be negative or endless.
Natural = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1.7e308)]  # finite; ge refuses a NaN too


@dataclass(frozen=True, slots=True)
class _Curve:
    """A piecewise linear curve from zero, with its height at each knot."""

    knots: Knots
    slopes_s: tuple[float, ...]
    heights_s: tuple[float, ...]

    @classmethod
    def of(cls, knots: Knots, slopes_s: tuple[float, ...]) -> _Curve:
        if len(knots) != len(slopes_s) or knots[:1] != (0,) or not _ascends(knots):
            want = "must ascend from 0 with one slope each"
            raise UsageError(f"token_knots {want}, got {knots} and {len(slopes_s)} slopes")
        _check_seconds("token_slopes_s", *slopes_s)
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
    8 and so on; linear between these knots, and as the last one beyond it. Two factors of 1,
    without and with a prompt, where the coefficients say it all.

    Raises: UsageError if rows are not of one length, or a factor is not positive and finite.
    """

    rows: tuple[tuple[float, ...], ...] = ((1.0, 1.0),)

    def __post_init__(self) -> None:
        """Check the factors."""
        if len({len(row) for row in self.rows}) != 1 or len(self.rows[0]) < 2:
            raise UsageError("factors must be rows of one length, at least two factors each")
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


def _check_seconds(name: str, *values_s: float) -> None:
    for value_s in values_s:
        if not (math.isfinite(value_s) and value_s >= 0.0):
            raise UsageError(f"{name} must be finite and not negative, got {value_s}")


@dataclass(frozen=True, slots=True)
class Host:
    """What the host of an asynchronous engine takes to launch a batch, beside the device.

    `full_s` where all of it is one graph, `mixed_s` where a graph leaves the attention of a
    prompt out, `eager_s` where it is launched as it is; besides `seq_s` for each decoding
    sequence and `token_s` for each prefilled token. All 0 where the device alone takes time.
    `spread` is the standard deviation of the logarithm of all of them at another time.

    Units: seconds.
    Raises: UsageError if one is negative or not finite.
    """

    full_s: float = 0.0
    mixed_s: float = 0.0
    eager_s: float = 0.0
    seq_s: float = 0.0
    token_s: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        """Check the seconds."""
        for part in fields(self):
            _check_seconds(f"host.{part.name}", getattr(self, part.name))

    def launch_s(self, batch: Batch, graphs: Graphs) -> float:
        """Return the seconds that launching the batch takes; of an empty one none."""
        if not batch.tokens:
            return 0.0
        has_prompt = batch.prefill_tokens > 0
        if graphs.padded(batch.tokens, has_prompt=has_prompt) is None:
            kind_s = self.eager_s
        else:
            kind_s = self.mixed_s if has_prompt else self.full_s
        return kind_s + self.seq_s * batch.decode_seqs + self.token_s * batch.prefill_tokens

    @property
    def each_s(self) -> Floats:
        """The seconds, in the order of `loads_of`. Shapes: [5]."""
        return np.array([self.full_s, self.mixed_s, self.eager_s, self.seq_s, self.token_s])

    def scaled(self, ratio: float) -> Host:
        """Return the host that takes ratio times as long."""
        full_s, mixed_s, eager_s, seq_s, token_s = (self.each_s * ratio).tolist()
        return Host(full_s, mixed_s, eager_s, seq_s, token_s, self.spread)

    @staticmethod
    def loads_of(
        decode_seqs: Floats, prefill_tokens: Floats, tokens: Floats, graphs: Graphs
    ) -> Floats:
        """Return what each of the seconds is times, of batches of so many tokens in all.

        Shapes: [rows, 5].
        """
        has_prompt = prefill_tokens > 0
        _, has_graph = graphs.padded_along(tokens, has_prompt)
        kinds = (has_graph & ~has_prompt, has_graph & has_prompt, ~has_graph)
        return np.column_stack([*kinds, decode_seqs, prefill_tokens]).astype(np.float64)


NO_HOST = Host()


@dataclass(frozen=True, slots=True)
class StepModel:
    """The seconds that a batch takes; no coefficient is negative.

    Time grows piecewise linearly with all the tokens that are computed, decodes and prefills
    alike; the last segment extends. Where one of `graphs` was captured they are padded to its
    size; without one a batch takes `eager_s` longer, unless nothing is captured at all.
    Besides, `seq_s` counts for each decoding sequence, `prefill_base_s` for a prompt in the
    batch, `decode_context_s` for each token that decodes attend to and `mixed_context_s` for
    each beside a prompt, since one kernel then serves both; `spread_s` for each token by which
    their contexts are apart, since the longest is ready last, and `mixed_spread_s` for each
    beside a prompt; `prefill_context_s` for each token that prefilled ones attend to. `factors`
    is what is left of the measured times, by what is in a batch. `tidy_s` is a turn that
    completes no batch. Where a `host` launches the next batch meanwhile, all this is the
    device's time.

    Units: knots in tokens, slopes in seconds per token; contexts and spread as Batch has them.
    Raises: UsageError if knots do not ascend from 0 with a slope each, or a coefficient is
        negative or not finite.
    """

    token_knots: Knots
    token_slopes_s: tuple[float, ...]
    base_s: float
    seq_s: float
    eager_s: float
    prefill_base_s: float
    decode_context_s: float
    mixed_context_s: float
    spread_s: float
    mixed_spread_s: float
    prefill_context_s: float
    tidy_s: float
    graphs: Graphs = NO_GRAPHS
    factors: Factors = Factors()
    host: Host = NO_HOST
    _tokens: _Curve = field(init=False, repr=False, compare=False)

    @classmethod
    def linear(
        cls, base_s: float, decode_s: float, prefill_s: float, **others: float
    ) -> StepModel:
        """Return a model without knots: so many seconds for each sequence and each token.

        A decoding sequence takes no less than a prefilled token; `others` are further seconds.

        >>> StepModel.linear(1.0, 0.5, 0.0).step_s(Batch(3, 0, 0, 0, 0, 0, 0))
        2.5
        """
        none_s: dict[str, Any] = dict.fromkeys((*SCALARS, "tidy_s"), 0.0)
        given_s = {"base_s": base_s, "seq_s": decode_s - prefill_s, **others}
        return cls((0,), (prefill_s,), **none_s | given_s)

    def __post_init__(self) -> None:
        """Check the coefficients and keep the curve."""
        object.__setattr__(self, "_tokens", _Curve.of(self.token_knots, self.token_slopes_s))
        for name in (*SCALARS, "tidy_s"):
            _check_seconds(name, getattr(self, name))

    def step_s(self, batch: Batch) -> float:
        """Return the seconds that the batch takes; an empty one is a turn to tidy up."""
        seqs, prefill = batch.decode_seqs, batch.prefill_tokens
        if not (seqs or prefill):
            return self.tidy_s
        padded = self.graphs.padded(batch.tokens, has_prompt=prefill > 0)
        work_s = self._tokens.at(padded or batch.tokens) + self.seq_s * seqs
        if self.graphs.sizes and padded is None:
            work_s += self.eager_s
        decode_s, apart_s = self.decode_context_s, self.spread_s
        prefill_s = self.prefill_context_s * batch.prefill_context_tokens
        if prefill:
            decode_s += self.mixed_context_s
            apart_s += self.mixed_spread_s
            prefill_s += self.prefill_base_s
        context_s = decode_s * batch.decode_context_tokens
        context_s += apart_s * batch.decode_spread_tokens + prefill_s
        return (self.base_s + work_s + context_s) * self.factors.at(seqs, prefill)

    def launch_s(self, batch: Batch) -> float:
        """Return the seconds that launching the batch takes the host."""
        return self.host.launch_s(batch, self.graphs)

    def interval_s(self, batch: Batch) -> float:
        """Return the seconds from one such batch to the next, the larger of host and device."""
        return max(self.step_s(batch), self.launch_s(batch))

    def predict_s(self, steps: StepColumns) -> Floats:
        """Return what step_s says of the batch of every row; of a run, of its first step.

        Shapes: [rows].
        """
        seqs, prefill = steps.decode_seqs, steps.prefill_tokens
        took_s = self.parts_s(steps).sum(axis=1) * self.factors.along(seqs, prefill)
        return np.where((seqs > 0) | (prefill > 0), took_s, self.tidy_s)

    def parts_s(self, steps: StepColumns) -> Floats:
        """Return what each of TERMS adds to the batch of every row, without factors.

        Shapes: [rows, TERMS].
        """
        padded, loads = loads_of(steps, self.graphs)
        scalars = np.array([getattr(self, name) for name in SCALARS])
        return np.column_stack([loads * scalars, self._tokens.along(padded)])

    def tables(self, most_seqs: int, draft_tokens: int = 0) -> tuple[Floats, Floats]:
        """Return the seconds of decodes alone, and of tokens that a graph with a prompt serves.

        Of 0 to most_seqs decoding sequences, which verify so many drafts each, with all but
        base and contexts; of 0 tokens to the largest captured size by the tokens' curve alone,
        which is of 0 tokens where no graph serves prompts.

        Shapes: [most_seqs + 1] and [largest + 1].
        """
        seqs = np.arange(most_seqs + 1, dtype=np.float64)
        padded, has_graph = self.graphs.padded_along(seqs * (1 + draft_tokens), seqs < 0)
        is_eager = ~has_graph & bool(self.graphs.sizes)
        alone_s = self._tokens.along(padded) + self.seq_s * seqs + self.eager_s * is_eager
        largest = max(self.graphs.sizes, default=0) if self.graphs.has_mixed else 0
        tokens = np.arange(largest + 1, dtype=np.float64)
        return alone_s, self._tokens.along(self.graphs.padded_along(tokens, tokens > 0)[0])

    def token_curve(self) -> Floats:
        """Return the curve of tokens: its knots, the seconds there, the slopes.

        Shapes: [3, knots].
        """
        curve = self._tokens
        return np.array([curve.knots, curve.heights_s, curve.slopes_s], dtype=np.float64)

    def launches_s(self, most_seqs: int, draft_tokens: int = 0) -> Floats:
        """Return what launching 0 to most_seqs sequences takes the host that verify drafts.

        Shapes: [most_seqs + 1].
        """
        seqs = np.arange(most_seqs + 1, dtype=np.float64)
        loads = Host.loads_of(seqs, np.zeros(seqs.size), seqs * (1 + draft_tokens), self.graphs)
        found_s: Floats = loads @ self.host.each_s
        found_s[0] = 0.0
        return found_s

    def scaled(self, ratio: float) -> StepModel:
        """Return the model of which every batch takes the device ratio times as long."""
        scalars: dict[str, Any] = {name: getattr(self, name) * ratio for name in SCALARS}
        slopes_s = tuple(s * ratio for s in self.token_slopes_s)
        return replace(self, token_slopes_s=slopes_s, **scalars)

    def slower(self, ratio: float) -> StepModel:
        """Return the model of which device and host take ratio times as long."""
        return replace(self.scaled(ratio), host=self.host.scaled(ratio))

    def served(self, added_s: float, prefill_ratio: float) -> StepModel:
        """Return the model whose every batch takes added_s longer, with a prompt ratio times.

        A step cannot take less than nothing: what is taken away is at most the whole base.
        """
        rows = ((row[0], *(f * prefill_ratio for f in row[1:])) for row in self.factors.rows)
        base_s = max(0.0, self.base_s + added_s)
        return replace(self, base_s=base_s, factors=Factors(tuple(rows)))


TERMS = (*SCALARS, "token_slopes_s")
"""The coefficients that are uncertain each by itself, in the order of `parts_s`."""


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How wrong models of this kind were on steps that they had not seen.

    `steps` have a batch; `distorted_ratio` is the share of them set aside as stretched by the
    machine, which the other figures leave out. On a random fifth: `step_mape_ratio` is the
    median absolute relative error of a step, `heldout_steps_ratio` that of their summed time.
    `heldout_config_ratio` is the largest error of the summed time of a configuration predicted
    from the others; None where none of CONFIG_STEPS or more can be left out.
    """

    steps: Natural
    step_mape_ratio: Amount
    heldout_steps_ratio: Amount
    heldout_config_ratio: Amount | None
    distorted_ratio: Amount


def loads_of(steps: StepColumns, graphs: Graphs) -> tuple[Floats, Floats]:
    """Return the tokens that each row computes once padded, and what SCALARS are times.

    Shapes: [rows] and [rows, SCALARS].
    """
    seqs, prefill = steps.decode_seqs, steps.prefill_tokens
    has_prompt, context = prefill > 0, steps.decode_context_tokens
    spread = steps.decode_spread_tokens
    padded, has_graph = graphs.padded_along(steps.tokens, has_prompt)
    is_eager = ~has_graph & bool(graphs.sizes)
    loads = (
        np.ones(len(steps)),
        seqs,
        is_eager,
        has_prompt,
        context,
        context * has_prompt,
        spread,
        spread * has_prompt,
        steps.prefill_context_tokens,
    )
    return padded, np.column_stack(loads).astype(np.float64)


def _ascends(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
