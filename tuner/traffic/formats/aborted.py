"""How long answers would have been whose clients left before they ended.

A recording holds what was served of them. If that counted as what was requested, an overloaded
server, whose users give up, would look like one with little to do.
"""

from __future__ import annotations

import numpy as np

from tuner.arrays import Bools, Ints

MIN_ALIKE = 30
"""Ours: so many longer answers to prompts of like length are drawn from alone; with fewer, all
longer answers are."""


def drawn_lengths(prompt: Ints, output: Ints, aborted: Bools, seed: int) -> Ints:
    """Return the output lengths, those of aborted answers drawn among the ones that went on.

    An answer cut after so many tokens is as long as one taken at random from all that had more,
    to prompts within the same power of two where there are enough of them. One of these may
    have been cut as well, later, and then stands for what was drawn for it. That an answer was
    cut says nothing of how long it would have been: the assumption is the estimator's. Where no
    answer went on, the length stays.

    Shapes: [n] all, and the result.
    Source: redistribution to the right, Efron (1967), The two sample problem with censored
        data; equal in expectation to Kaplan and Meier (1958).

    >>> cut = np.array([False, True, False])
    >>> drawn_lengths(np.array([9, 9, 9]), np.array([5, 7, 80]), cut, seed=0).tolist()
    [5, 80, 80]
    """
    rows = np.flatnonzero(aborted)
    draws = np.random.default_rng(seed).random(rows.size)
    everyone, longer = _longer(output, np.arange(output.size), rows)
    taken = np.where(longer > 0, everyone[(draws * longer).astype(np.int64)], rows)
    alike = np.log2(np.maximum(prompt, 1)).astype(np.int64)
    for one in np.unique(alike[rows]):
        mine = np.flatnonzero(alike[rows] == one)
        pool, longer = _longer(output, np.flatnonzero(alike == one), rows[mine])
        enough = longer >= MIN_ALIKE
        places = (draws[mine] * longer).astype(np.int64)[enough]
        taken[mine[enough]] = pool[places]
    source = np.arange(output.size)
    source[rows] = taken
    # A taken length may be that of a cut answer too, always a later one: follow until none is.
    while not np.array_equal(further := source[source], source):
        source = further
    lengths: Ints = output[source]
    return lengths


def _longer(output: Ints, pool: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the pool from the longest down, and how many of it lie above each of the rows."""
    down = pool[np.argsort(-output[pool], kind="stable")]
    above = np.searchsorted(-output[down], -output[rows], side="left")
    return down, above.astype(np.int64)
