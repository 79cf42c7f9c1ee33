"""Fit a step-time model to the steps of calibration replays.

Answers which coefficients explain what was measured, and how wrong models of this kind are on
steps that they have not seen. Whether that is small enough is judged where it is used.

Knots are chosen by leaving out steps, not configurations: without the largest configuration no
knot in its range can be learnt, so that would punish extrapolation and not the knot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tuner.engine.shape import NO_GRAPHS, Graphs
from tuner.engine.steps import StepColumns, joined
from tuner.errors import TooFewSamplesError, UsageError
from tuner.shadow.step_model import NO_HOST, SCALARS, FitError, Host, Knots, StepModel, loads_of
from tuner.stats import Floats

# Fewer steps with a batch are refused: ours; ten for each of some twenty coefficients.
MIN_STEPS = 200
# Steps that a fit looks at, drawn at random: ours; ten percent of noise on 20,000 steps is
# 0.07 % of their mean. The scale and the errors are taken from all steps.
MAX_STEPS = 20_000
# Steps under a segment between two knots, and under the last one, which extrapolates: ours. No
# share of all, since nearly all steps of a replay only decode, and prompts take the time; few,
# since of what was recorded hardly any batch is between the decodes and the full ones.
SEGMENT_STEPS, LAST_STEPS = 10, 100
# Steps of a configuration that is left out to see how far off it is: ours.
CONFIG_STEPS = 50
# A knot is kept if it lowers the squared relative error of left-out steps by this share and by
# this many standard errors over the folds. At ten percent of noise the share is a misfit of
# 0.45 % (ours). One standard error, since folds are of different kinds of batches: a bend that
# took nine tenths of the error away was never three of them.
# Source: the one-standard-error rule, Breiman, Friedman, Olshen & Stone, Classification and
#     Regression Trees (1984), section 3.4.3.
FOLDS, GAIN_RATIO, GAIN_ERRORS = 10, 0.002, 1.0
# A step was stretched by the machine if it took exp(4 s) times the prediction, s being the
# noise's standard deviation in logarithms, within 1.5 and 4: ours. Four deviations cut less
# than 0.1 % off the mean of lognormal noise of up to 30 %, where a fixed 1.5 would cut 6 %.
STALL_DEVIATIONS, MIN_STALL_RATIO, MAX_STALL_RATIO = 4.0, 1.5, 4.0
# What every batch with a prompt takes, or without a graph, counts as an error of this share of
# it over a usual step: ours. Where all prompts fill the budget it cannot be told from what
# their tokens take, which is then the likelier; where it can, a hundredth is nothing.
CONSTANTS, DOUBTED = ("eager_s", "prefill_base_s"), 0.1
_PASSES, _SEED = 4, 0
# Columns that join a fit, for each that there is: ours, of which it takes about one. Rounding
# alone could have more of them come and go.
_JOINS = 20
# By how much more than a token of context a decode takes at most for one beside a prompt, and
# for one by which contexts are apart: ours. Fits of recorded runs of two GPUs have 0.96 and
# 1.08 of the first, 0 and 0.55 of the second. Whatever few batches seem to say, and is the
# fault of other terms, goes no further. Uneven contexts are dearer beside a prompt by no more
# than a token of context is.
MIXED_TIMES, SPREAD_TIMES = 1.5, 5.0
# Rows of a block of a QR: ours; 20,000 rows took 5.9 ms at once and 2.2 ms in such blocks.
_BLOCK = 1024

_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fit:
    """A step-time model together with its error."""

    model: StepModel
    error: FitError


@dataclass(frozen=True, slots=True)
class _Rows:
    """Steps with a batch, in order of time, the configuration of each, and its graphs."""

    steps: StepColumns
    config: NDArray[np.int64]
    graphs: tuple[Graphs, ...]

    def take(self, which: _Mask | NDArray[np.int64]) -> _Rows:
        return _Rows(self.steps.take(which), self.config[which], self.graphs)

    def alike(self) -> list[tuple[Graphs, NDArray[np.int64]]]:
        """Return the rows of each kind of graphs that there are."""
        by_kind: dict[Graphs, list[int]] = {}
        for number, graphs in enumerate(self.graphs):
            by_kind.setdefault(graphs, []).append(number)
        rows = {g: np.flatnonzero(np.isin(self.config, of)) for g, of in by_kind.items()}
        return [(graphs, which) for graphs, which in rows.items() if which.size]

    def loads(self) -> tuple[Floats, Floats]:
        """Return `loads_of` of all rows, each with its own graphs."""
        tokens = np.empty(len(self.steps))
        loads = np.empty((len(self.steps), len(SCALARS)))
        for graphs, which in self.alike():
            tokens[which], loads[which] = loads_of(self.take(which).steps, graphs)
        return tokens, loads

    def predicted_s(self, model: StepModel) -> Floats:
        """Return what a model says of all rows, each with its own graphs."""
        found_s = np.empty(len(self.steps))
        for graphs, which in self.alike():
            found_s[which] = replace(model, graphs=graphs).predict_s(self.take(which).steps)
        return found_s


def fit(
    configs: Sequence[StepColumns],
    graphs: Graphs = NO_GRAPHS,
    ran_with: Sequence[Graphs] | None = None,
) -> Fit:
    """Return the step-time model of calibration replays, measured step by step.

    `graphs` are the model's, and those that all replays ran with unless `ran_with` has others
    for each.

    Least squares of relative errors with weights 1/predicted, since 1/measured would believe
    the steps that happened to be short; then scaled so that predicted and measured time have
    the same sum. Stretched steps are set aside. Steps without a batch give `tidy_s` alone.

    Raises: TooFewSamplesError with fewer than MIN_STEPS steps that have a batch; UsageError
        if a duration is not positive and finite.
    """
    rows, tidy_s = _gather(configs, ran_with or [graphs] * len(configs))
    model = replace(_learn(rows, graphs), tidy_s=tidy_s)
    is_out = np.random.default_rng(_SEED).permutation(len(rows.steps)) % 5 == 0
    off, off_sum = _unseen(rows, is_out, graphs)
    counts = np.bincount(rows.config)
    outs = (rows.config == c for c in np.flatnonzero(counts >= CONFIG_STEPS))
    left_out = [o for o in outs if o.size - o.sum() >= MIN_STEPS]
    by_config = [_unseen(rows, out, graphs)[1] for out in left_out]
    kept = _undistorted(rows, rows.predicted_s(model))
    error = FitError(
        steps=len(rows.steps),
        step_mape_ratio=off,
        heldout_steps_ratio=off_sum,
        heldout_config_ratio=max(by_config, default=None),
        distorted_ratio=float(1.0 - kept.mean()),
    )
    return Fit(model, error)


def model_of(
    configs: Sequence[StepColumns], graphs: Graphs, ran_with: Sequence[Graphs]
) -> StepModel:
    """Return the model of `fit` alone, which is not asked how wrong it is.

    Raises: as `fit`.
    """
    rows, tidy_s = _gather(configs, ran_with)
    return replace(_learn(rows, graphs), tidy_s=tidy_s)


def host_of(configs: Sequence[StepColumns], ran_with: Sequence[Graphs]) -> Host:
    """Return what launching batches took the host, as far as it was measured.

    Least squares of relative errors, scaled to the sum of all; stalls are set aside.
    """
    known = [
        (c.take((c.launch_s > 0) & c.has_batch), g)
        for c, g in zip(configs, ran_with, strict=True)
    ]
    steps = joined([columns for columns, _ in known])
    if not len(steps):
        return NO_HOST
    loads = np.vstack(
        [
            Host.loads_of(c.decode_seqs, c.prefill_tokens, c.tokens, graphs)
            for c, graphs in known
        ]
    )
    took_s, kept = steps.launch_s, np.ones(len(steps), dtype=np.bool_)
    weights_s = found_s = took_s
    for _ in range(_PASSES):
        weighted = np.column_stack([loads, took_s])[kept] / weights_s[kept, None]
        each_s = _solved(_factor(weighted), np.eye(loads.shape[1]))
        found_s = loads @ each_s
        weights_s = np.maximum(found_s, 0.1 * float(np.median(took_s)))
        kept = took_s < MAX_STALL_RATIO * weights_s
    scale = float(took_s[kept].sum() / found_s[kept].sum())
    return Host(*(each_s * scale).tolist())


def _gather(configs: Sequence[StepColumns], ran_with: Sequence[Graphs]) -> tuple[_Rows, float]:
    """Return the steps with a batch, and the median turn without one."""
    steps = joined([*configs])
    config = np.repeat(np.arange(len(configs)), np.array([len(c) for c in configs], np.int64))
    took_s = steps.duration_s
    has_batch = steps.has_batch
    wrong = np.flatnonzero(~np.isfinite(took_s) | (took_s < 0) | (has_batch & (took_s == 0)))
    if wrong.size:
        row, which = wrong[0], config[wrong[0]]
        where = f"row {row - int((config < which).sum())} of calibration replay {which}"
        raise UsageError(
            f"{where}: duration_s must be positive and finite, got {took_s[row]:g}",
            "the steps were not measured with a monotonic clock; calibrate again",
        )
    if has_batch.sum() < MIN_STEPS:
        raise TooFewSamplesError(
            f"a step-time model wants {MIN_STEPS} steps with a batch, got {has_batch.sum()}",
            "calibrate for longer, or with more requests",
        )
    tidies = ~has_batch & (steps.is_late == 0)
    tidy_s = float(np.median(took_s[tidies])) if tidies.any() else 0.0
    return _Rows(steps, config, tuple(ran_with)).take(has_batch), tidy_s


def _unseen(rows: _Rows, is_out: _Mask, graphs: Graphs) -> tuple[float, float]:
    """Return a step's median and the sum's relative error on the rows that are left out."""
    model, out = _learn(rows.take(~is_out), graphs), rows.take(is_out)
    out = out.take(_undistorted(out, out.predicted_s(model)))
    predicted_s, took_s = out.predicted_s(model), out.steps.duration_s
    off = float(np.median(np.abs(predicted_s / took_s - 1.0)))
    return off, abs(float(predicted_s.sum() / took_s.sum()) - 1.0)


def _undistorted(rows: _Rows, predicted_s: Floats) -> _Mask:
    """Mark the steps that the machine did not stretch, each beside its own configuration's."""
    took_s = rows.steps.duration_s
    return undistorted(took_s, predicted_s, rows.steps.is_decode_only, rows.config)


def undistorted(
    took_s: Floats, predicted_s: Floats, alone: _Mask, of: NDArray[np.int64] | None = None
) -> _Mask:
    """Mark the steps that the machine did not stretch, by what was predicted of them.

    A replay that is slow throughout is not stretched, so that each, told by `of`, is compared
    with its own median; prefills may be noisier than decodes, so that steps that decode
    `alone` and others have their own thresholds.

    Shapes: [steps] each.
    """
    off = np.log(took_s / np.maximum(predicted_s, 0.1 * took_s.min(initial=math.inf)))
    groups = np.zeros(off.size, np.int64) if of is None else of
    for c in np.unique(groups):
        off[groups == c] -= np.median(off[groups == c])
    kept = np.ones(off.size, dtype=np.bool_)
    for kind in (alone, ~alone):
        if kind.any():
            deviations = STALL_DEVIATIONS * 1.4826 * float(np.median(np.abs(off[kind])))
            limit = max(deviations, math.log(MIN_STALL_RATIO))
            kept[kind] = off[kind] <= min(limit, math.log(MAX_STALL_RATIO))
    return kept


def times_as_long(took_s: Floats, predicted_s: Floats) -> float:
    """Return how many times as long steps took in all as was predicted, stalls included.

    A step counts no more than MAX_STALL_RATIO times what it should have taken: what is longer
    is no matter of speed. Shapes: [steps] each.
    """
    return float(np.minimum(took_s, MAX_STALL_RATIO * predicted_s).sum() / predicted_s.sum())


def _learn(rows: _Rows, graphs: Graphs) -> StepModel:
    """Return the model with the knots that pay, scaled to the rows' undistorted sum."""
    every = np.random.default_rng(_SEED).permutation(len(rows.steps))
    part = rows.take(np.sort(every[:MAX_STEPS]))
    tokens, loads = part.loads()
    # What no step has anything of stays 0: tied, it would look like its context.
    grid, tied = _supported(tokens), _tied() * loads.any(axis=0)
    weighted = _settled(part, np.column_stack([loads @ tied, *_segments(tokens, grid)]))
    doubt = _doubt(weighted.shape[1], float(np.median(part.steps.duration_s)))
    knots = _chosen(grid, weighted, doubt)
    scalars_s, slopes_s = np.split(
        _solved(np.vstack([_factor(weighted), doubt]), _merging(grid, knots)), [len(SCALARS)]
    )
    scalars = dict(zip(SCALARS, (tied @ scalars_s).tolist(), strict=True))
    model = StepModel(
        token_knots=knots,
        token_slopes_s=tuple(slopes_s.tolist()),
        tidy_s=0.0,
        graphs=graphs,
        **scalars,
    )
    predicted_s = rows.predicted_s(model)
    kept = _undistorted(rows, predicted_s)
    return model.scaled(float(rows.steps.duration_s[kept].sum() / predicted_s[kept].sum()))


def _tied() -> Floats:
    """Return what each fitted number adds to SCALARS, so that none is beyond its measure.

    Who is dearer beside a prompt, or where contexts are apart, is dear by its context too.
    """
    tied = np.eye(len(SCALARS))
    context, mixed, spread, both = map(
        SCALARS.index, ("decode_context_s", "mixed_context_s", "spread_s", "mixed_spread_s")
    )
    tied[context, mixed], tied[context, spread] = 1 / MIXED_TIMES, 1 / SPREAD_TIMES
    tied[:, both] += tied[:, spread] / MIXED_TIMES
    return tied


def _doubt(columns: int, usual_s: float) -> Floats:
    """Return rows of a design that hold CONSTANTS small beside a usual step."""
    rows = np.zeros((len(CONSTANTS), columns))
    rows[np.arange(len(CONSTANTS)), [SCALARS.index(c) for c in CONSTANTS]] = DOUBTED / usual_s
    return rows


def _settled(rows: _Rows, design: Floats) -> Floats:
    """Return the kept rows of [design, measured], each divided by the seconds predicted."""
    took_s = rows.steps.duration_s
    table = np.column_stack([design, took_s])
    weights_s, kept = took_s, np.ones(took_s.size, dtype=np.bool_)
    for _ in range(_PASSES):
        factor = _factor(table[kept] / weights_s[kept, None])
        predicted_s = design @ _solved(factor, np.eye(design.shape[1]))
        kept = _undistorted(rows, predicted_s)
        weights_s = np.maximum(predicted_s, 0.1 * took_s.min())
    weighted: Floats = table[kept] / weights_s[kept, None]
    return weighted


def _factor(table: Floats) -> Floats:
    """Return R of the table's QR: a few rows with the same least squares as all of them.

    Block by block, which is as exact, and stays in the processor's cache.

    Source: TSQR, Demmel, Grigori, Hoemmen and Langou (2012), section 3.
    """
    blocks, width = len(table) // _BLOCK, table.shape[1]
    if blocks > 1:
        whole = table[: blocks * _BLOCK].reshape(blocks, _BLOCK, width)
        factors = np.asarray(np.linalg.qr(whole, mode="r"))
        table = np.vstack([factors.reshape(-1, width), table[blocks * _BLOCK :]])
    return np.asarray(np.linalg.qr(table, mode="r"))


def _solved(factor: Floats, merging: Floats) -> Floats:
    """Return the non-negative coefficients of the columns once merged."""
    columns = factor[:, :-1] @ merging
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0.0] = 1.0
    found: Floats = non_negative(columns / norms, factor[:, -1]) / norms
    return found


def non_negative(columns: Floats, wanted: Floats) -> Floats:
    """Return the x of at least 0 with the least squares of columns @ x - wanted.

    Our own, since this was all that learning a profile needed SciPy for. Columns join one at a
    time, the one that lowers the squares fastest, and leave where they would be negative; what
    the rounding lets join and leave at once stays out.

    Shapes: columns is [rows, n] with norms of 0 or about 1, wanted is [rows].
    Source: Lawson and Hanson, Solving Least Squares Problems (1974), algorithm NNLS.
    """
    x, inside = np.zeros(columns.shape[1]), np.zeros(columns.shape[1], np.bool_)
    stays_out = np.zeros_like(inside)
    least = 1e-12 * float(np.linalg.norm(wanted))
    for _ in range(_JOINS * inside.size):
        pull = columns.T @ (wanted - columns @ x)
        pull[inside | stays_out] = -math.inf
        joins = int(np.argmax(pull))
        if not pull[joins] > least:
            break
        inside[joins] = True
        found = _free(columns, wanted, inside)
        stays_out[:] = False
        if found[joins] <= 0:
            inside[joins], stays_out[joins] = False, True
            continue
        while (wrong := np.flatnonzero(inside & (found <= 0))).size:
            shares = x[wrong] / (x[wrong] - found[wrong])
            x += shares.min() * (found - x)
            inside &= x > 0
            inside[wrong[np.argmin(shares)]] = False
            x[~inside] = 0.0
            found = _free(columns, wanted, inside)
        x = found
    return x


def _free(columns: Floats, wanted: Floats, inside: _Mask) -> Floats:
    """Return the least squares of some columns, 0 for the others."""
    found = np.zeros(inside.size)
    found[inside] = np.linalg.lstsq(columns[:, inside], wanted, rcond=None)[0]
    return found


def _chosen(grid: Knots, weighted: Floats, doubt: Floats) -> Knots:
    """Return the knots that clearly pay on left-out steps, added one at a time.

    `doubt` are rows beside those of the steps that each fit holds to.

    Left out are blocks of time: steps next to each other share the machine's mood.
    """
    fold = np.arange(len(weighted)) * 4 * FOLDS // len(weighted) % FOLDS
    tests = [_factor(weighted[fold == f]) for f in range(FOLDS)]
    trains = [_factor(np.vstack(tests[:f] + tests[f + 1 :] + [doubt])) for f in range(FOLDS)]
    whole = np.vstack([_factor(weighted), doubt])

    def missed(knots: Knots, train: Floats, test: Floats) -> float:
        merging = _merging(grid, knots)
        off = test[:, :-1] @ merging @ _solved(train, merging) - test[:, -1]
        return float(off @ off)

    def scores(knots: Knots) -> Floats:
        folds = zip(trains, tests, strict=True)
        return np.array([missed(knots, train, test) for train, test in folds])

    best: Knots = (0,)
    score = scores(best)
    while tried := [tuple(sorted((*best, k))) for k in grid if k not in best]:
        richer = min(tried, key=lambda knots: missed(knots, whole, whole))
        richer_score = scores(richer)
        gain = score - richer_score
        clearly = GAIN_ERRORS * gain.std(ddof=1) / math.sqrt(FOLDS)
        if gain.mean() <= clearly or gain.sum() <= GAIN_RATIO * score.sum():
            break
        best, score = richer, richer_score
    return best


def _merging(grid: Knots, knots: Knots) -> Floats:
    """Return which columns of the grid's design add up to each column of the knots'."""
    n = len(SCALARS)
    whole = np.zeros((n + len(grid), n + len(knots)))
    whole[:n, :n] = np.eye(n)
    home = np.searchsorted(knots, grid, "right") - 1
    whole[n:, n:] = home[:, None] == np.arange(len(knots))
    return whole


def _supported(x: Floats) -> Knots:
    """Return the powers of two between which enough steps lie, after a first knot at 0.

    Where hardly any do the knot is at the lower end of the gap, not at the upper one: what is
    between lies on a line then, and not on the flat of the smallest, which ends early.
    The last segment, which extends, is also at least half of what was seen.
    """
    x = np.sort(x[x > 0])
    knots, below = list[int](), 0
    for exponent in range(int(x[-1] if x.size else 0).bit_length()):
        upto = int(np.searchsorted(x, 2**exponent, "right"))
        if 2 ** (exponent + 1) > x[-1] or x.size - upto < LAST_STEPS:
            break
        if upto - below >= SEGMENT_STEPS:
            knots, below = [*knots, 2**exponent], upto
    return (0, *knots)


def _segments(x: Floats, knots: Knots) -> list[Floats]:
    """Return how much of x lies in each segment."""
    return [np.clip(x, a, b) - a for a, b in pairwise((*knots, math.inf))]
