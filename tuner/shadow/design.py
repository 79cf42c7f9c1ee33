"""What to measure next of an engine's steps: short blocks from the middle of the traffic.

A block begins with the requests that run at an instant of a predicted replay, and goes on for a
few steps. Which blocks tell most, for their time, of how two settings differ follows from what
is uncertain of the step model and from the batches that each is predicted to make.

Source: I-optimal designs, Atkinson, Donev & Tobias, Optimum Experimental Designs, with SAS,
    chapter 10; measurements one after the other, chapter 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Self

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.replay.timeline import Timelines
from tuner.shadow.speed import MoodSpreads, Uncertainty, Visited
from tuner.stats import Floats, Ints
from tuner.traffic.traces import Trace

# Least seconds that a block is taken to cost, for what is done between blocks: ours.
LEAST_S = 0.2
# How much the speed of a setting matters beside how two of them differ: ours. It decides on
# bounds alone, and the machine's mood is in it.
LEVEL = 0.25


@dataclass(frozen=True, slots=True)
class Block:
    """Requests of a trace that are replayed for a moment at some limits.

    `rows` are theirs in the trace at `load` times its arrivals, in the order in which they are
    sent, at `due_s`.
    """

    limits: EngineLimits
    rows: tuple[int, ...]
    due_s: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    load: float = 1.0

    @classmethod
    def burst(
        cls, limits: EngineLimits, trace: Trace, rows: Ints, steps: int, share: float
    ) -> Self:
        """Return requests that come all at once, answered for some steps.

        Their prompts are cut to a share of what they are.
        """
        prompts = np.maximum(1, np.round(share * trace.prompt_tokens[rows])).astype(np.int64)
        return cls._at_once(limits, trace, rows, prompts, steps)

    @classmethod
    def _at_once(
        cls, limits: EngineLimits, trace: Trace, rows: Ints, prompts: Ints, steps: int
    ) -> Self:
        """Return requests that come at once and answer for some steps when the last is in.

        Until then those before it answer as well; what they have by then is taken off their
        prompts, unless these are hashed.
        """
        behind = prompts[::-1].cumsum()[::-1] - prompts
        meanwhile = -(-behind // limits.max_num_batched_tokens)
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        if trace.hashes is None:
            prompts = np.maximum(1, prompts - meanwhile)
        outputs = np.clip(steps + meanwhile, 1, np.maximum(1, longest - prompts))
        due_s = (0.0,) * len(rows)
        at, asked, answers = (tuple(x.tolist()) for x in (rows, prompts, outputs))
        return cls(limits, at, due_s, asked, answers)

    @classmethod
    def at(
        cls, limits: EngineLimits, trace: Trace, timelines: Timelines, at_s: float, steps: int
    ) -> Self | None:
        """Return the requests that run at an instant of a replay, None where none does.

        Who has part of the answer comes with it as part of the prompt, unless prompts are
        hashed.
        """
        first_s, last_s = timelines.first_s, timelines.last_s
        rows = np.flatnonzero((first_s <= at_s) & (last_s > at_s))
        if not rows.size:
            return None
        asked = trace.output_tokens[rows]
        passed = (at_s - first_s[rows]) / np.maximum(last_s[rows] - first_s[rows], 1e-9)
        done = 1 + np.floor((asked - 1) * np.minimum(passed, 1.0)).astype(np.int64)
        prompts = trace.prompt_tokens[rows] + (done if trace.hashes is None else 0)
        return cls._at_once(limits, trace, rows, prompts, steps)

    def followed(
        self,
        trace: Trace,
        timelines: Timelines,
        at_s: float,
        after_s: float,
        length_s: float,
        steps: int,
    ) -> Self:
        """Return the block with what waits at its instant, and what is sent in a time after it.

        It comes `after_s` the beginning, when those that run are in, and is answered for some
        steps, in which no more is computed than these hold.
        """
        sent_s = timelines.sent_s
        rows = np.flatnonzero((sent_s < at_s + length_s) & ~(timelines.first_s <= at_s))
        rows = rows[np.argsort(sent_s[rows], kind="stable")]
        fits = trace.prompt_tokens[rows].cumsum() <= steps * self.limits.max_num_batched_tokens
        rows = rows[: max(1, int(fits.sum()))]
        due_s = after_s + np.maximum(sent_s[rows] - at_s, 0.0)
        outputs = np.minimum(trace.output_tokens[rows], steps)
        return replace(
            self,
            rows=(*self.rows, *rows.tolist()),
            due_s=(*self.due_s, *due_s.tolist()),
            prompt_tokens=(*self.prompt_tokens, *trace.prompt_tokens[rows].tolist()),
            output_tokens=(*self.output_tokens, *outputs.tolist()),
        )

    def of(self, trace: Trace) -> Trace:
        """Return the requests as a trace of their own, of the trace at the block's load."""
        rows, prompts = np.array(self.rows), np.array(self.prompt_tokens)
        is_whole = bool((prompts == trace.prompt_tokens[rows]).all())
        return Trace(
            due_s=np.array(self.due_s, dtype=np.float64),
            prompt_tokens=prompts,
            output_tokens=np.array(self.output_tokens),
            hashes=trace.hashes.take(rows) if trace.hashes is not None and is_whole else None,
            hash_scope=trace.hash_scope,
            source=trace.source,
        )


def wanted(settings: Sequence[Visited]) -> Floats:
    """Return what is to be known: how the logarithms of two settings' times differ, and each.

    Each for itself counts LEVEL of what a difference does.

    Shapes: [pairs + settings, TERMS + knots].
    """
    means = [one.mean for one in settings]
    differences = [a - b for a, b in combinations(means, 2)]
    return np.array([*differences, *(LEVEL * mean for mean in means)])


def spreads(uncertainty: Uncertainty, wanted: Floats) -> Floats:
    """Return the standard deviations of what is wanted. Shapes: [wanted]."""
    found: Floats = np.linalg.norm(wanted @ uncertainty.table.T, axis=1)
    return found


def choose(
    uncertainty: Uncertainty,
    mood: MoodSpreads,
    wanted: Floats,
    blocks: Sequence[Visited],
    time_s: float,
) -> list[int]:
    """Return which blocks tell most of what is wanted in the time, one at least.

    One after the other: each takes most off the variances for its seconds, after those before
    it, and each once, since no model says all that two blocks differ by.

    Units: seconds as predicted.
    """
    table, left_s = uncertainty.table, time_s
    chosen: list[int] = []
    # Independent standard normal numbers say how far off the model is in each direction.
    covariance, turned = np.eye(len(table)), wanted @ table.T
    seen = [(b.design @ table.T, _errors(b, mood)) for b in blocks]
    costs_s = np.array([max(float(b.seconds.sum()), LEAST_S) for b in blocks])
    while len(chosen) < len(blocks) and (not chosen or left_s > 0):
        learnt = [_learnt(covariance, *one) for one in seen]
        gains = np.array([float(((turned @ root) ** 2).sum()) for root in learnt]) / costs_s
        gains[chosen] = -1.0
        best = int(np.argmax(gains))
        chosen.append(best)
        covariance = covariance - learnt[best] @ learnt[best].T
        left_s -= costs_s[best]
    return chosen


def _errors(block: Visited, mood: MoodSpreads) -> Floats:
    """Return the covariance of what a block's kinds of batches are measured off by."""
    common = mood.segment**2 + mood.slow**2
    errors = common + mood.grows**2 * np.outer(block.grows, block.grows)
    found: Floats = errors + (mood.like_steps**2 + 1e-8) * np.eye(len(block.grows))
    return found


def _learnt(covariance: Floats, design: Floats, errors: Floats) -> Floats:
    """Return a root of what measuring takes off a covariance. Shapes: [directions, kinds]."""
    moved = covariance @ design.T
    root = np.linalg.cholesky(design @ moved + errors)
    found: Floats = np.linalg.solve(root, moved.T).T
    return found


def instants_s(
    steps_end_s: Floats, busy_s: Floats, count: int, rng: np.random.Generator
) -> list[float]:
    """Return random instants of a replay, one in each of equal shares of its busy time."""
    if not len(busy_s):
        return []
    reached = np.cumsum(busy_s) / busy_s.sum()
    at = np.searchsorted(reached, (np.arange(count) + rng.random(count)) / count)
    middle = steps_end_s - busy_s / 2
    return [float(x) for x in middle[np.minimum(at, len(middle) - 1)] if math.isfinite(x)]
