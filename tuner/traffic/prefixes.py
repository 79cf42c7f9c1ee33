"""Prefix hash ids of a whole trace as two flat columns.

Answers which blocks a request's prompt consists of, and how much of it an unbounded prefix
cache would already hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.errors import TraceError
from tuner.stats import Bools, Ints


@dataclass(frozen=True, slots=True, eq=False)
class HashIds:
    """The block hash ids of every request, row after row.

    Ids are chained: equal ids stand for equal prompts up to and including their block. The
    last id of a row may stand for a partial block (stores that round up) or the last tokens
    may have no id (stores that round down). A row without ids means that none were recorded.

    Shapes: offsets is [n + 1], ascending from 0; ids is [offsets[-1]].
    Raises: ValueError if the shapes do not fit or block_size is below 1.

    >>> hashes = HashIds.from_rows([(7, 8), (), (7,)], block_size=16)
    >>> hashes.row(0), len(hashes), hashes.leading_hits().tolist()
    ((7, 8), 3, [0, 0, 1])
    """

    offsets: Ints
    ids: Ints
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.offsets.ndim != 1 or self.offsets.size < 1 or self.offsets[0] != 0:
            raise ValueError("offsets must be a column that starts at 0")
        if self.offsets[-1] != self.ids.size or np.any(np.diff(self.offsets) < 0):
            raise ValueError(f"offsets must ascend to {self.ids.size}, the number of ids")
        self.offsets.flags.writeable = False
        self.ids.flags.writeable = False

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[int]], block_size: int) -> HashIds:
        """Return the columns of rows given one by one; meant for small traces."""
        tuples = [tuple(row) for row in rows]
        ids = np.array([i for row in tuples for i in row], dtype=np.int64)
        return cls(offsets_of(np.array([len(row) for row in tuples])), ids, block_size)

    def __len__(self) -> int:
        return int(self.offsets.size) - 1

    @property
    def counts(self) -> Ints:
        """How many ids each row has."""
        return np.diff(self.offsets)

    def row(self, index: int) -> tuple[int, ...]:
        """Return the ids of one request, from the start of its prompt."""
        return tuple(self.row_array(index).tolist())

    def row_array(self, index: int) -> Ints:
        """Return the ids of one request as a read-only view."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: npt.NDArray[np.integer]) -> HashIds:
        """Return the given rows, in the given order."""
        return self._gather(self.offsets[:-1][indices], self.counts[indices])

    def cut(self, max_counts: Ints) -> HashIds:
        """Return all rows, each with no more than its given number of leading ids."""
        return self._gather(self.offsets[:-1], np.minimum(self.counts, max_counts))

    def _gather(self, starts: Ints, counts: Ints) -> HashIds:
        """Copy `counts` ids from each of `starts` without a loop over rows."""
        offsets = offsets_of(counts)
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        return HashIds(offsets, self.ids[source], self.block_size)

    def check_fits(self, prompt_tokens: Ints, source: str) -> None:
        """Refuse ids whose number neither rounds the prompt's blocks down nor up.

        Raises: TraceError that names the first such request.
        """
        misfits = np.flatnonzero(~counts_fit(self.counts, prompt_tokens, self.block_size))
        if misfits.size:
            row = int(misfits[0])
            count, tokens = int(self.counts[row]), int(prompt_tokens[row])
            reason = misfit_reason(count, tokens, self.block_size)
            raise TraceError(f"{source} request {row + 1}: {reason}", MISFIT_HINT)

    def leading_hits(self) -> Ints:
        """Return for each row how many leading blocks an earlier row already brought.

        This is the reuse of an unbounded cache that starts cold.
        """
        _, first, inverse = np.unique(self.ids, return_index=True, return_inverse=True)
        return self.leading(first[inverse] < np.repeat(self.offsets[:-1], self.counts))

    def leading(self, is_hit: Bools) -> Ints:
        """Return for each row how many of its ids are hits before the first that is none."""
        hits = np.zeros(len(self), dtype=np.int64)
        if not self.ids.size:
            return hits
        row, place = places_of(self.counts)
        filled = np.flatnonzero(self.counts)
        until = np.where(is_hit, self.counts[row], place)
        hits[filled] = np.minimum.reduceat(until, self.offsets[:-1][filled])
        return hits


MAX_SIZE = 1 << 31
"""Ours: a size of a block, or a number of rows, is below it."""
MISFIT_HINT = "set block_size to the one the ids were recorded with (Mooncake: 512)"


def offsets_of(counts: npt.NDArray[np.integer]) -> Ints:
    """Return row offsets [n + 1] from the number of ids of each row."""
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def places_of(counts: Ints) -> tuple[Ints, Ints]:
    """Return for each id, row after row, which row it is of, and at which place of it.

    >>> [column.tolist() for column in places_of(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - (np.cumsum(counts) - counts)[row]


def counts_fit(counts: Ints, prompt_tokens: Ints, block_size: int) -> Bools:
    """Return by row whether ids round the prompt's blocks down or up, or are absent."""
    floor = prompt_tokens // block_size
    extra = counts - floor
    is_whole = prompt_tokens % block_size == 0
    fits: Bools = (counts == 0) | (extra == 0) | ((extra == 1) & ~is_whole)
    return fits


def misfit_reason(count: int, prompt_tokens: int, block_size: int) -> str:
    """Return what number of ids was expected, and what we got."""
    floor, ceil = prompt_tokens // block_size, -(-prompt_tokens // block_size)
    expected = str(floor) if floor == ceil else f"{floor} or {ceil}"
    return (
        f"hash_ids must hold {expected} ids for {prompt_tokens} tokens in blocks of "
        f"{block_size}, got {count}"
    )


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words, so that neighbours have nothing in common.

    A new id meets an old one but by a chance of 2^-63 each. Multiples of GOLDEN make a stream.

    Source: the finaliser of SplitMix64, Steele, Lea and Flood (2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return scrambled
