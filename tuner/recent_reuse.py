"""Prefix reuse that does not grow with the recording: what came again within so many seconds.

`describe` tells the reuse of an unbounded cache that starts cold, which is larger the longer
one looks; here a prefix is forgotten after a lookback, so that traces of any length compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuner.arrays import Bools, Floats, Ints
from tuner.hashes import HashIds


def held_tokens(
    hashes: HashIds, due_s: Floats, prompt_tokens: Ints, lookbacks_s: Sequence[float]
) -> dict[float, Ints]:
    """Return by lookback the prompt tokens of each request whose prefix came so recently.

    Shapes: due_s, prompt_tokens and each result are [n], due_s ascending.

    >>> rows = HashIds.from_rows([(7, 8), (7, 9), (7, 8)], block_size=16)
    >>> held = held_tokens(rows, np.array([0.0, 1.0, 9.0]), np.full(3, 32), (4.0, 10.0))
    >>> held[4.0].tolist(), held[10.0].tolist()
    ([0, 16, 0], [0, 16, 32])
    """
    since_s = _since_last_s(hashes, due_s)
    return {
        lookback_s: np.minimum(
            _leading(hashes, since_s <= lookback_s) * hashes.block_size, prompt_tokens
        )
        for lookback_s in lookbacks_s
    }


def _since_last_s(hashes: HashIds, due_s: Floats) -> Floats:
    """Return for each id how long before its request an earlier one had it.

    Shapes: [ids]; inf where none had.
    """
    rows = np.repeat(np.arange(len(hashes)), hashes.counts)
    order = np.argsort(hashes.ids, kind="stable")
    ids, row = hashes.ids[order], rows[order]
    is_again = (ids[1:] == ids[:-1]) & (row[1:] > row[:-1])
    since_s = np.full(len(ids), np.inf)
    since_s[order[1:][is_again]] = (due_s[row[1:]] - due_s[row[:-1]])[is_again]
    return since_s


def _leading(hashes: HashIds, is_hit: Bools) -> Ints:
    """Return for each row how many of its ids are hits before the first that is none."""
    hits = np.zeros(len(hashes), dtype=np.int64)
    if not hashes.ids.size:
        return hits
    length = np.repeat(hashes.counts, hashes.counts)
    place = np.arange(hashes.ids.size) - np.repeat(hashes.offsets[:-1], hashes.counts)
    filled = np.flatnonzero(hashes.counts)
    until = np.where(is_hit, length, place)
    hits[filled] = np.minimum.reduceat(until, hashes.offsets[:-1][filled])
    return hits
