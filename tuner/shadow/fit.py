"""Fit a step-time model to the steps of calibration replays.

Answers which coefficients explain what was measured, and how wrong models of this kind are on
steps that they have not seen. Whether that is small enough is judged where it is used.

Knots are chosen by leaving out steps, not configurations: without the largest configuration no
knot in its range can be learnt, so that would punish extrapolation and not the knot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tuner.arrays import Floats
from tuner.engine.steps import StepColumns, joined
from tuner.errors import TooFewSamplesError, UsageError
from tuner.shadow.step_model import FitError, Knots, StepModel, padded_column

# Fewer steps with a batch are refused: ours; ten for each of some twenty coefficients.
MIN_STEPS = 200
# Steps that a fit looks at, drawn at random: ours; ten percent of noise on 20,000 steps is
# 0.07 % of their mean. The scale and the errors are taken from all steps.
MAX_STEPS = 20_000
# Steps under a segment between two knots, and under the last one, which extrapolates: this
# many or this share of the steps on its axis, whichever is more (ours).
SEGMENT_STEPS, LAST_STEPS, LAST_RATIO = 50, 100, 0.05
# A knot is kept if it lowers the squared relative error of left-out steps by this share and by
# this many standard errors over the folds: ours. At ten percent of noise the share is a misfit
# of 0.45 %; three standard errors of ten folds happen by chance less than once in a hundred.
FOLDS, GAIN_RATIO, GAIN_ERRORS = 10, 0.002, 3.0
# A step was stretched by the machine if it took exp(4 s) times the prediction, s being the
# noise's standard deviation in logarithms, within 1.5 and 4: ours. Four deviations cut less
# than 0.1 % off the mean of lognormal noise of up to 30 %, where a fixed 1.5 would cut 6 %.
STALL_DEVIATIONS, MIN_STALL_RATIO, MAX_STALL_RATIO = 4.0, 1.5, 4.0
_PASSES, _SEED = 4, 0
# Columns that join a fit, for each that there is: ours, of which it takes about one. Rounding
# alone could have more of them come and go.
_JOINS = 20
# Rows of a block of a QR: ours; 20,000 rows took 5.9 ms at once and 2.2 ms in such blocks.
_BLOCK = 1024

_Pair = tuple[Knots, Knots]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fit:
    """A step-time model together with its error."""

    model: StepModel
    error: FitError


@dataclass(frozen=True, slots=True)
class _Rows:
    """Steps with a batch, in order of time, and the configuration of each."""

    steps: StepColumns
    config: NDArray[np.int64]

    def take(self, which: _Mask | NDArray[np.int64]) -> _Rows:
        columns = (getattr(self.steps, f.name)[which] for f in fields(self.steps))
        return _Rows(StepColumns(*columns), self.config[which])


def fit(configs: Sequence[StepColumns], captured_sizes: tuple[int, ...] = ()) -> Fit:
    """Return the step-time model of calibration replays, measured step by step.

    Least squares of relative errors with weights 1/predicted, since 1/measured would believe
    the steps that happened to be short; then scaled so that predicted and measured time have
    the same sum. Stretched steps are set aside. Steps without a batch give `tidy_s` alone.

    Raises: TooFewSamplesError with fewer than MIN_STEPS steps that have a batch; UsageError
        if a duration is not positive and finite.
    """
    rows, tidy_s = _gather(configs)
    model = replace(_learn(rows, captured_sizes), tidy_s=tidy_s)
    is_out = np.random.default_rng(_SEED).permutation(len(rows.steps)) % 5 == 0
    off, off_sum = _unseen(rows, is_out, captured_sizes)
    counts = np.bincount(rows.config)
    outs = (rows.config == c for c in np.flatnonzero(counts >= SEGMENT_STEPS))
    left_out = [o for o in outs if o.size - o.sum() >= MIN_STEPS]
    by_config = [_unseen(rows, out, captured_sizes)[1] for out in left_out]
    kept = _undistorted(rows, model.predict_s(rows.steps))
    error = FitError(
        steps=len(rows.steps),
        step_mape_ratio=off,
        heldout_steps_ratio=off_sum,
        heldout_config_ratio=max(by_config, default=None),
        distorted_ratio=float(1.0 - kept.mean()),
    )
    return Fit(model, error)


def _gather(configs: Sequence[StepColumns]) -> tuple[_Rows, float]:
    """Return the steps with a batch, and the median turn without one."""
    steps = joined([*configs])
    config = np.repeat(np.arange(len(configs)), np.array([len(c) for c in configs], np.int64))
    took_s = steps.duration_s
    has_batch = (steps.decode_seqs > 0) | (steps.prefill_tokens > 0)
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
    tidy_s = float(np.median(took_s[~has_batch])) if not has_batch.all() else 0.0
    return _Rows(steps, config).take(has_batch), tidy_s


def _unseen(rows: _Rows, is_out: _Mask, sizes: tuple[int, ...]) -> tuple[float, float]:
    """Return a step's median and the sum's relative error on the rows that are left out."""
    model, out = _learn(rows.take(~is_out), sizes), rows.take(is_out)
    out = out.take(_undistorted(out, model.predict_s(out.steps)))
    predicted_s, took_s = model.predict_s(out.steps), out.steps.duration_s
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


def _learn(rows: _Rows, sizes: tuple[int, ...]) -> StepModel:
    """Return the model with the knots that pay, scaled to the rows' undistorted sum."""
    every = np.random.default_rng(_SEED).permutation(len(rows.steps))
    part = rows.take(np.sort(every[:MAX_STEPS]))
    steps = part.steps
    alone = steps.prefill_tokens == 0
    decode = np.where(alone, padded_column(steps.decode_seqs, sizes), steps.decode_seqs)
    grid = _supported(decode), _supported(steps.prefill_tokens)
    fixed = (np.ones(len(steps)), 1.0 - alone)
    context = (steps.decode_context_tokens, steps.prefill_context_tokens)
    segments = (*_segments(decode, grid[0]), *_segments(steps.prefill_tokens, grid[1]))
    weighted = _settled(part, np.column_stack([*fixed, *context, *segments]))
    chosen = _chosen(grid, weighted)
    base_s, prefill_base_s, decode_context_s, prefill_context_s, *slopes_s = _solved(
        _factor(weighted), _merging(grid, chosen)
    ).tolist()
    n = len(chosen[0])
    model = StepModel(
        decode_knots=chosen[0],
        decode_slopes_s=tuple(slopes_s[:n]),
        prefill_knots=chosen[1],
        prefill_slopes_s=tuple(slopes_s[n:]),
        base_s=base_s,
        prefill_base_s=prefill_base_s,
        decode_context_s=decode_context_s,
        prefill_context_s=prefill_context_s,
        tidy_s=0.0,
        captured_sizes=sizes,
    )
    predicted_s = model.predict_s(rows.steps)
    kept = _undistorted(rows, predicted_s)
    return model.scaled(float(rows.steps.duration_s[kept].sum() / predicted_s[kept].sum()))


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


def _chosen(grid: _Pair, weighted: Floats) -> _Pair:
    """Return the knots that clearly pay on left-out steps, added one at a time.

    Left out are blocks of time: steps next to each other share the machine's mood.
    """
    fold = np.arange(len(weighted)) * 4 * FOLDS // len(weighted) % FOLDS
    tests = [_factor(weighted[fold == f]) for f in range(FOLDS)]
    trains = [_factor(np.vstack(tests[:f] + tests[f + 1 :])) for f in range(FOLDS)]
    whole = _factor(weighted)

    def missed(pair: _Pair, train: Floats, test: Floats) -> float:
        merging = _merging(grid, pair)
        off = test[:, :-1] @ merging @ _solved(train, merging) - test[:, -1]
        return float(off @ off)

    def scores(pair: _Pair) -> Floats:
        folds = zip(trains, tests, strict=True)
        return np.array([missed(pair, train, test) for train, test in folds])

    best: _Pair = ((0,), (0,))
    score = scores(best)
    while tried := [*_extended(grid, best)]:
        richer = min(tried, key=lambda pair: missed(pair, whole, whole))
        richer_score = scores(richer)
        gain = score - richer_score
        clearly = GAIN_ERRORS * gain.std(ddof=1) / math.sqrt(FOLDS)
        if gain.mean() <= clearly or gain.sum() <= GAIN_RATIO * score.sum():
            break
        best, score = richer, richer_score
    return best


def _extended(grid: _Pair, pair: _Pair) -> list[_Pair]:
    """Return the pairs with one knot of the grid more."""
    decode, prefill = pair
    more = [(tuple(sorted((*decode, k))), prefill) for k in grid[0] if k not in decode]
    return more + [(decode, tuple(sorted((*prefill, k)))) for k in grid[1] if k not in prefill]


def _merging(grid: _Pair, pair: _Pair) -> Floats:
    """Return which columns of the grid's design add up to each column of the pair's."""
    blocks = [np.eye(4)]
    for fine, coarse in zip(grid, pair, strict=True):
        home = np.searchsorted(coarse, fine, "right") - 1
        blocks.append((home[:, None] == np.arange(len(coarse))).astype(np.float64))
    whole = np.zeros((sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)))
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


def _supported(x: Floats) -> Knots:
    """Return the powers of two between which enough steps lie, after a first knot at 0.

    The last segment, which extends, is also at least half of what was seen.
    """
    x = np.sort(x[x > 0])
    least, knots, above = max(LAST_STEPS, LAST_RATIO * x.size), list[int](), x.size
    for exponent in reversed(range(int(x[-1] if x.size else 0).bit_length())):
        below = int(np.searchsorted(x, 2**exponent, "right"))
        spans = len(knots) > 0 or 2 ** (exponent + 1) <= x[-1]
        if spans and above - below >= least and below >= SEGMENT_STEPS:
            knots, above, least = [2**exponent, *knots], below, SEGMENT_STEPS
    return (0, *knots)


def _segments(x: Floats, knots: Knots) -> list[Floats]:
    """Return how much of x lies in each segment."""
    return [np.clip(x, a, b) - a for a, b in pairwise((*knots, math.inf))]
