"""Learn from measured steps how far a fitted step model is off, and what they leave open of it.

The factors of batches, the machine's moods and chance are one linear model of logarithms with
normal errors, so that its posterior is exact and any number of models can be drawn from it that
the measurements leave possible.

Source: linear mixed models, Pinheiro & Bates, Mixed-Effects Models in S and S-PLUS, chapter 2;
    a mood that wanders as an Ornstein-Uhlenbeck process, and variances by their marginal
    posterior mode (type-II maximum likelihood), Rasmussen & Williams, Gaussian Processes for
    Machine Learning, chapters 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tuner.engine.shape import Graphs
from tuner.engine.steps import StepColumns, joined
from tuner.shadow.fit import MAX_STALL_RATIO, times_as_long, undistorted
from tuner.shadow.speed import (
    START,
    MoodSpreads,
    Speed,
    Uncertainty,
    changed,
    doublings,
    knot_weights,
)
from tuner.shadow.step_model import TERMS, Factors, Host, StepModel
from tuner.stats import Floats, lowest, student_quantile

# Steps that follow each other within so many seconds share the machine's mood: ours, a burst of
# other work lasts longer. There are no more segments than this: ours, for the time it takes.
SEGMENT_S, MAX_SEGMENTS = 2.0, 128
# A slower mood stays much the same for so long, so that few minutes show little of how fast the
# machine is on other days; a span is short beside that: ours.
MOOD_S, SPAN_S = 90.0, 30.0
# How far a fitted coefficient may be off, in logarithms: ours. What is off by more shows in the
# factors. Base and tokens are in every batch; what the others add few batches tell apart.
PRIOR_TERM, PRIOR_OTHER = 0.1, 0.5
# How far apart launches of the host are from one span to the next before anything is measured:
# ours, in logarithms. On an H200 those without a graph took 11 ms in one minute and 14 to 22 in
# another, on a second one 16 to 20, then 23 to 26.
HOST_APART = 0.2
# Directions of uncertainty beyond so many are left out: ours, so that a profile's file stays
# small. They are ordered by what they change of batches that were seen, those that were not
# counting this much.
MAX_DIRECTIONS, UNSEEN = 96, 0.03
# Before anything is measured, the standard deviations of a factor, of the mood of a segment, of
# its part that grows with the batch, of the slow mood, and of like steps of a segment;
# last, over how many doublings of sequences or tokens a factor is much the same. Their medians
# in logarithms, and by how much each is uncertain: ours.
_PRIOR_SDS = np.log([0.04, 0.03, 0.02, 0.02, 0.01, 2.0])
_PRIOR_SPREADS = np.log([3.0, 3.0, 3.0, 3.0, 3.0, 1.5])
# The place of the slow mood's, and what it may be.
_SLOW = 3
_SLOW_SDS = np.geomspace(0.001, 0.3, 18)
# A segment as far off as nine in ten are not counts less: degrees of freedom of Student's t.
_FREEDOM = 4.0
# Standard deviations are learnt from about so many cells, of whole segments: ours, for time.
MAX_CELLS = 500
# Below this quantile lies the upper end of an interval that holds nine in ten.
_NINE_IN_TEN = 0.95
# Passes of Gauss and Newton, since a term's share depends on the terms.
_PASSES = 3


def learn(
    model: StepModel, replays: Sequence[StepColumns], ran_with: Sequence[Graphs] | None = None
) -> Speed:
    """Return the step model with factors, as far as the measurements ask for them.

    `model` has the coefficients that were fitted to the replays, and no factors of its own. All
    of them ran with its graphs unless `ran_with` has others for each.
    """
    graphs = ran_with or [model.graphs] * len(replays)
    steps, moved = _Steps.of(model, replays, graphs), np.zeros(len(TERMS))
    seen = _Cells.of(steps, moved)
    # A burst of other work is no slow mood: how far that wanders is learnt beside it.
    weights = _weights_of_segments(seen, _Posterior.of(seen, _PRIOR_SDS))
    log_sds = _settled(seen, weights)
    found = _Posterior.of(seen, log_sds, weights)
    for _ in range(_PASSES):
        moved = moved + found.mean[: len(TERMS)]
        seen = _Cells.of(steps, moved)
        weights = _weights_of_segments(seen, found)
        found = _Posterior.of(seen, log_sds, weights, moved)
    terms, factors = np.split(found.mean, [len(TERMS)])
    shape = seen.shape
    made = replace(model, factors=Factors(tuple((1.0,) * shape[1] for _ in range(shape[0]))))
    learnt = changed(made, moved + terms, factors.reshape(shape))
    uncertainty = replace(
        Uncertainty.of(found.directions(seen.design)),
        start=math.hypot(START, found.sds[_SLOW] * math.sqrt(_alike(seen.at_s).mean())),
    )
    learnt = learnt.scaled(_level(learnt, replays, graphs))
    return Speed(learnt, uncertainty, MoodSpreads(*found.sds[1:5]))


def _unseen_moods(spans: int) -> float:
    """Return how far the mean mood of so many spans may be off that of all time.

    As a multiple of how far spans were seen to be apart, which is the less the fewer there are,
    and beyond what is left open if they had nothing to do with each other, as the posterior has
    it. Spans are taken to have followed each other; of one as little is known as of two. How
    far they are apart is itself known from so few: it has the tails of Student's t, with as
    many degrees of freedom as spans, what is taken for granted before counting as one.

    >>> [round(_unseen_moods(spans), 2) for spans in (2, 4, 20, 1000)]
    [2.82, 1.56, 0.56, 0.07]
    """
    places = np.arange(max(spans, 2))
    count, apart = len(places), np.abs(np.subtract.outer(places, places))
    alike = float(np.exp(-apart * SPAN_S / MOOD_S).mean())
    apart_of_seen = (1 - 1 / count) / (1 - alike)
    tails = student_quantile(count, _NINE_IN_TEN) / NormalDist().inv_cdf(_NINE_IN_TEN)
    return tails * math.sqrt(alike * apart_of_seen - 1 / count)


def with_host(
    speed: Speed, host: Host, replays: Sequence[StepColumns], ran_with: Sequence[Graphs]
) -> Speed:
    """Return the speed with a host, and how far that may be off at another time.

    The longer the replays were that it was learnt from the less, and the more the further it
    was apart from one SPAN_S to the next.
    """
    off = _launches_off(host, replays, ran_with)
    if not off.size:
        return replace(speed, model=replace(speed.model, host=host))
    apart = math.sqrt((HOST_APART**2 + float(np.square(off - off.mean()).sum())) / off.size)
    spread = math.hypot(START, apart * _unseen_moods(off.size))
    return replace(speed, model=replace(speed.model, host=replace(host, spread=spread)))


def _launches_off(
    host: Host, replays: Sequence[StepColumns], ran_with: Sequence[Graphs]
) -> Floats:
    """Return how far off the host's launches were in each span, in logarithms."""
    expected_s = [
        Host.loads_of(steps.decode_seqs, steps.prefill_tokens, steps.tokens, graphs)
        @ host.each_s
        for steps, graphs in zip(replays, ran_with, strict=True)
    ]
    steps, wanted_s = joined([*replays]), np.concatenate([np.empty(0), *expected_s])
    kept = (steps.launch_s > 0) & steps.has_batch & (wanted_s > 0)
    kept &= steps.launch_s < MAX_STALL_RATIO * wanted_s
    span = (np.cumsum(steps.duration_s) / SPAN_S).astype(np.int64)[kept]
    took_s, wanted_s = (np.bincount(span, s[kept]) for s in (steps.launch_s, wanted_s))
    found: Floats = np.log(took_s[wanted_s > 0] / wanted_s[wanted_s > 0])
    return found


def _level(model: StepModel, replays: Sequence[StepColumns], graphs: Sequence[Graphs]) -> float:
    """Return how many times as long as the model says all steps took.

    How batches differ is learnt of each kind alike, however seldom it is, and of steps that
    were not stretched; how long a replay takes is a matter of all their time, with stalls and
    bursts of other work.
    """
    took_s, predicted_s = [], []
    for columns, ran_with in zip(replays, graphs, strict=True):
        each_s = replace(model, graphs=ran_with).predict_s(columns) * columns.repeats
        took_s.append(columns.duration_s[columns.has_batch])
        predicted_s.append(each_s[columns.has_batch])
    return times_as_long(np.concatenate(took_s), np.concatenate(predicted_s))


# What was measured, in cells of like batches.


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps to learn from: those with a batch that the machine did not stretch.

    The table's columns are the seconds, sequences, prefilled tokens, and each term's seconds;
    `at_s` is the middle of the segment that a step is of, in what replays took by then.

    Shapes: table is [steps, 3 + TERMS], at_s and segment are [steps].
    """

    table: Floats
    at_s: Floats
    segment: NDArray[np.int64]

    @classmethod
    def of(
        cls, model: StepModel, replays: Sequence[StepColumns], graphs: Sequence[Graphs]
    ) -> Self:
        """Return the steps of all replays, their terms as the model has them."""
        tables, at_s, of_segment, segments, before_s = [], [], [], 0, 0.0
        total_s = sum(float(columns.duration_s.sum()) for columns in replays)
        length_s = max(SEGMENT_S, total_s / MAX_SEGMENTS)
        for columns, ran_with in zip(replays, graphs, strict=True):
            each_s = columns.duration_s / columns.repeats
            batch = (columns.decode_seqs, columns.prefill_tokens)
            parts_s = replace(model, graphs=ran_with).parts_s(columns)
            table = np.column_stack([each_s, *batch, parts_s])
            kept = table[:, 1:3].sum(axis=1) > 0
            segment = (np.cumsum(columns.duration_s) / length_s).astype(np.int64)
            tables.append(table[kept])
            at_s.append(before_s + (segment[kept] + 0.5) * length_s)
            of_segment.append(segments + segment[kept])
            segments += int(segment.max(initial=-1)) + 1
            before_s += float(columns.duration_s.sum())
        steps = np.concatenate(tables)
        # Like steps tell what was stretched; the model may be far off for all of a kind.
        kinds = np.round(np.column_stack([doublings(steps[:, 1]), doublings(steps[:, 2])]))
        _, kind = np.unique(kinds, axis=0, return_inverse=True)
        predicted_s, alone = steps[:, 3:].sum(axis=1), steps[:, 2] == 0
        kept = undistorted(steps[:, 0], predicted_s, alone, kind.ravel())
        return cls(steps[kept], np.concatenate(at_s)[kept], np.concatenate(of_segment)[kept])


@dataclass(frozen=True, slots=True)
class _Cells:
    """Like steps of a segment taken together: how much longer they took than the model says.

    `design` are the shares of the model's terms and the weights of the factors' knots, `grows`
    the share of a step that grows with the batch, `step_variance` that of one step, over the
    steps in a cell; `at_s` is the middle of each segment.

    Shapes: [cells] each, but design, [cells, TERMS + knots], and at_s, [segments]; shape is
    that of the factors.
    """

    design: Floats
    off: Floats
    step_variance: Floats
    grows: Floats
    segment: NDArray[np.int64]
    at_s: Floats
    shape: tuple[int, int]

    @classmethod
    def of(cls, kept: _Steps, moved: Floats) -> Self:
        """Return the cells of all replays, by the model with its terms moved so far."""
        steps, segment = kept.table.copy(), kept.segment
        steps[:, 3:] *= np.exp(moved)
        kind = np.column_stack(
            [segment, *(np.round(2 * doublings(x)) for x in (steps[:, 1], steps[:, 2]))]
        )
        _, first, cell = np.unique(kind, axis=0, return_index=True, return_inverse=True)
        cell = cell.ravel()
        n = np.bincount(cell).astype(np.float64)
        parts = np.column_stack(
            [np.bincount(cell, steps[:, c]) / n for c in range(1, steps.shape[1])]
        )
        took_s = np.bincount(cell, steps[:, 0]) / n
        shape = (_knots(steps[:, 1]), _knots(steps[:, 2]))
        weights = knot_weights(parts[:, 0], parts[:, 1], shape)
        shares = parts[:, 2:] / parts[:, 2:].sum(axis=1, keepdims=True)
        off = np.log(took_s / parts[:, 2:].sum(axis=1))
        own = np.log(steps[:, 0] / steps[:, 3:].sum(axis=1)) - off[cell]
        variance = _robust_variance(own[n[cell] > 1])
        return cls(
            np.column_stack([shares, weights]),
            off,
            variance / n,
            1.0 - shares[:, 0],
            *_numbered(segment[first], kept.at_s[first]),
            shape,
        )

    def part(self, cells: int, weight: Floats) -> tuple[_Cells, Floats]:
        """Return the cells of every second segment, or third, and so on: about so many.

        Beside them stand the weights of their segments.
        """
        kept = self.segment % -(-len(self.off) // cells) == 0
        segment, at_s = _numbered(self.segment[kept], self.at_s[self.segment[kept]])
        part = _Cells(
            self.design[kept],
            self.off[kept],
            self.step_variance[kept],
            self.grows[kept],
            segment,
            at_s,
            self.shape,
        )
        return part, weight[np.unique(self.segment[kept])]


def _numbered(segment: NDArray[np.int64], at_s: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return the numbers of segments without gaps, and when each of them was."""
    _, first, number = np.unique(segment, return_index=True, return_inverse=True)
    return number.ravel(), at_s[first]


def _knots(x: Floats) -> int:
    """Return how many knots reach beyond the largest."""
    return int(x.max(initial=0)).bit_length() + 2


def _robust_variance(off: Floats) -> float:
    """Return the variance of a normal distribution with the same middle half."""
    if not off.size:
        return 0.02**2
    return float((1.4826 * np.median(np.abs(off - np.median(off)))) ** 2)


# The posterior.


@dataclass(frozen=True, slots=True)
class _Posterior:
    """The terms' and factors' changes as a normal distribution, given standard deviations.

    Shapes: mean is [TERMS + knots], precision [TERMS + knots, TERMS + knots].
    """

    mean: Floats
    precision: Floats
    log_likelihood: float
    sds: tuple[float, ...]

    @classmethod
    def of(
        cls,
        seen: _Cells,
        log_sds: Floats,
        weight: Floats | None = None,
        moved: Floats | None = None,
    ) -> Self:
        """Return the posterior; `weight` is by how much each segment's mood is believed.

        The model of the cells has its terms `moved` so far from the fitted ones.
        """
        sds = np.exp(log_sds)
        prior = _prior(seen.shape, float(sds[0]), float(sds[5]))
        precision, target = np.linalg.inv(prior), np.zeros(len(prior))
        if moved is not None:
            target -= precision[:, : len(TERMS)] @ moved
        noise = seen.step_variance + sds[4] ** 2 + 1e-8
        table = np.column_stack([seen.design, seen.off]) / np.sqrt(noise)[:, None]
        parts, covariance = _moods(seen, sds, weight)
        parts = parts / np.sqrt(noise)[:, None]
        # What the moods may have made of it is taken away by Woodbury's identity.
        told, mixed = parts.T @ table, np.eye(len(covariance)) + covariance @ (parts.T @ parts)
        gram = table.T @ table - told.T @ np.linalg.solve(mixed, covariance) @ told
        precision += gram[:-1, :-1]
        target += gram[:-1, -1]
        mean = np.asarray(np.linalg.solve(precision, target), dtype=np.float64)
        log_dets = [float(np.linalg.slogdet(m)[1]) for m in (mixed, precision, prior)]
        fit = 0.5 * float(target @ mean - gram[-1, -1] - np.log(noise).sum() - sum(log_dets))
        return cls(mean, precision.astype(np.float64), fit, tuple(sds.tolist()))

    def directions(self, design: Floats) -> Floats:
        """Return the directions of the covariance, those that change most of the design first.

        Shapes: [directions, TERMS + knots].
        """
        covariance = np.linalg.inv(self.precision)
        root = _root((covariance + covariance.T) / 2)
        visited = np.vstack([design, UNSEEN * np.eye(len(root))]) @ root
        _, _, turned = np.linalg.svd(visited, full_matrices=False)
        found: Floats = (root @ turned.T).T[:MAX_DIRECTIONS]
        return found


def _root(covariance: Floats) -> Floats:
    """Return the Cholesky factor of a covariance, which rounding may have left indefinite."""
    small = 1e-10 * float(np.trace(covariance)) * np.eye(len(covariance))
    return np.asarray(np.linalg.cholesky(covariance + small), dtype=np.float64)


def _prior(shape: tuple[int, int], sd: float, length: float) -> Floats:
    """Return the covariance of terms and factors before anything is measured.

    Factors of batches that only decode have nothing to do with those of others: one runs as a
    graph, the other does not.
    """
    rows, columns = np.divmod(np.arange(shape[0] * shape[1]), shape[1])
    apart = (rows[:, None] - rows) ** 2 + (columns[:, None] - columns) ** 2
    alike = np.exp(-0.5 * apart / length**2)
    alike *= (columns[:, None] == 0) == (columns == 0)
    size = len(TERMS) + len(rows)
    prior = np.zeros((size, size))
    is_everywhere = np.isin(TERMS, ("base_s", "token_slopes_s"))
    terms = np.where(is_everywhere, PRIOR_TERM, PRIOR_OTHER)
    prior[: len(TERMS), : len(TERMS)] = np.diag(terms**2)
    prior[len(TERMS) :, len(TERMS) :] = sd**2 * (alike + 1e-4 * np.eye(len(rows)))
    return prior


def _alike(at_s: Floats) -> Floats:
    """Return the correlations of the slow mood between times. Shapes: [times, times].

    It is an Ornstein-Uhlenbeck process of the length MOOD_S.
    """
    found: Floats = np.exp(-np.abs(np.subtract.outer(at_s, at_s)) / MOOD_S)
    return found


def _moods(seen: _Cells, sds: Floats, weight: Floats | None) -> tuple[Floats, Floats]:
    """Return which moods each cell has a part in, and their covariance.

    Those of all segments, and then those of their parts that grow with the batch. How far the
    slow mood's mean in all that was seen is off that of all time is not in it: that is the
    uncertainty of a start.

    Shapes: [cells, 2 x segments], [2 x segments, 2 x segments].
    """
    count, alike = len(seen.at_s), _alike(seen.at_s)
    alike = alike - alike.mean(axis=0) - alike.mean(axis=1, keepdims=True) + alike.mean()
    is_of = (seen.segment[:, None] == np.arange(count)).astype(np.float64)
    each = np.eye(count) if weight is None else np.diag(1.0 / weight)
    covariance = np.zeros((2 * count, 2 * count))
    covariance[:count, :count] = sds[1] ** 2 * each + sds[_SLOW] ** 2 * alike
    covariance[count:, count:] = sds[2] ** 2 * each
    return np.hstack([is_of, is_of * seen.grows[:, None]]), covariance


def _weights_of_segments(seen: _Cells, found: _Posterior) -> Floats:
    """Return by how much each segment's mood is believed: less where it is far off.

    That is, of what is thought of their spread, and of what the middle half of them shows.

    Shapes: [segments].
    """
    off, spread = seen.off - seen.design @ found.mean, sum(found.sds[i] ** 2 for i in (1, 2, 4))
    middles = np.array([np.median(off[seen.segment == i]) for i in range(len(seen.at_s))])
    is_near = np.abs(np.subtract.outer(seen.at_s, seen.at_s)) <= SPAN_S / 2
    usual = np.array([np.median(middles[near]) for near in is_near])
    q: Floats = np.square(middles - usual) / max(spread, _robust_variance(middles - usual))
    return np.minimum(1.0, (_FREEDOM + 1.0) / (_FREEDOM + q))


def _settled(seen: _Cells, weight: Floats) -> Floats:
    """Return the logarithms of the standard deviations that are most probable.

    `weight` is by how much each segment's mood is believed.
    """
    part, weight = seen.part(MAX_CELLS, weight)

    def cost(log_sds: Floats) -> float:
        prior = ((log_sds - _PRIOR_SDS) / _PRIOR_SPREADS) ** 2
        return 0.5 * float(prior.sum()) - _Posterior.of(part, log_sds, weight).log_likelihood

    steps = np.vstack([_PRIOR_SDS, _PRIOR_SDS + 0.7 * np.eye(len(_PRIOR_SDS))])
    found = lowest(cost, steps, x_apart=0.15, y_apart=0.2, most=150)
    # Few minutes hardly show how far the slow mood wanders: so not its most probable size.
    places = np.tile(found, (len(_SLOW_SDS), 1))
    places[:, _SLOW] = np.log(_SLOW_SDS)
    costs = np.array([cost(place) for place in places])
    odds = np.exp(costs.min() - costs)
    found[_SLOW] = 0.5 * math.log(float(odds @ np.square(_SLOW_SDS) / odds.sum()))
    return found
