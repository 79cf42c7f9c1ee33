"""Which prompts hold the answer before them, and how far.

In a session the next turn's prompt begins with the turn before and its answer, which the engine
has in its prefix cache as it generated it. Recorded are lengths and hash ids alone: where the
ids of two prompts say that they differ, or the same block stands where no such answer is, the
ids are believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.stats import Bools, Ints
from tuner.traffic.prefixes import HashIds, places_of
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True, eq=False)
class HeldAnswers:
    """For each request the turn before it, and how far its prompt is that turn with its answer.

    The first `held[row]` tokens of a prompt are those of `before[row]` and then its answer.
    `reached[row]` is how many tokens of a turn and its answer others hold, 0 for none.

    Shapes: all [n]; before is -1 and held 0 where there is no such turn.
    Units: tokens.
    """

    before: Ints
    held: Ints
    reached: Ints

    def parts(self, row: int, end: int) -> list[tuple[int, int, int]]:
        """Return whose tokens the first `end` of a prompt and its answer are.

        As request, first token and end, in order; each made without the others.
        """
        found = []
        while end > 0:
            begin = min(end, int(self.held[row]))
            if begin < end:
                found.append((row, begin, end))
            row, end = int(self.before[row]), begin
        return found[::-1]


def held_answers(trace: Trace) -> HeldAnswers | None:
    """Return which prompts hold the answers that they wait for; None if no prompt does.

    A prompt does if it is at least as long as the turn before with its answer, its ids begin
    with that turn's, and its blocks there stand in no prompt of another past. Of two next turns
    whose ids differ within the answer, the first one holds it.
    """
    turns, prompts = trace.turns, trace.prompt_tokens
    if turns is None or not turns.waiting:
        return None
    rows = np.flatnonzero(turns.after >= 0)
    past = turns.after[rows]
    whole = prompts[past] + trace.output_tokens[past]
    ends = np.where(prompts[rows] >= whole, whole, 0)
    if trace.hashes is not None and trace.hashes.ids.size:
        ends = _as_hashed(trace.hashes, prompts, rows, past, ends)
    held, before = np.zeros(len(trace), np.int64), np.full(len(trace), -1, np.int64)
    held[rows] = ends
    before[rows[ends > 0]] = past[ends > 0]
    reached = np.zeros(len(trace), np.int64)
    np.maximum.at(reached, past, ends)
    if not (held[rows] > prompts[past]).any():
        return None
    return HeldAnswers(before, held, reached)


def _as_hashed(hashes: HashIds, prompts: Ints, rows: Ints, past: Ints, wholes: Ints) -> Ints:
    """Return how far each of the rows holds the turn before it, as the hash ids have it.

    Shapes: rows, past, wholes and the result are [waiting].
    """
    size, counts = hashes.block_size, hashes.counts
    full = np.minimum(prompts[past] // size, counts[past])
    common = np.minimum(_leading(hashes, rows, past), full)
    is_hashed = counts[rows] > 0
    goes_on = (wholes > 0) & ((common == np.minimum(full, counts[rows])) | ~is_hashed)
    # From its first block of its own, each prompt says what stands there: an answer or not.
    first = np.zeros(len(prompts), np.int64)
    first[rows] = common
    answered_by = np.full(len(prompts), -1, np.int64)
    answered_by[rows[goes_on]] = past[goes_on]
    until = np.zeros(len(prompts), np.int64)
    until[rows] = np.where(goes_on, np.minimum(-(-wholes // size), counts[rows]), 0)
    whole = np.zeros(len(prompts), np.int64)
    whole[rows] = wholes
    fits = _agreed(hashes, first, answered_by, until, whole)
    ends = np.minimum(wholes, np.where(fits[rows] < until[rows], fits[rows] * size, wholes))
    same = np.minimum(common * size, np.minimum(prompts[rows], prompts[past]))
    return np.where(goes_on, np.maximum(ends, same), same)


def _leading(hashes: HashIds, rows: Ints, past: Ints) -> Ints:
    """Return how many leading ids each row shares with the one before it."""
    counts = np.minimum(hashes.counts[rows], hashes.counts[past])
    of, place = places_of(counts)
    here = hashes.ids[hashes.offsets[rows][of] + place]
    there = hashes.ids[hashes.offsets[past][of] + place]
    leading = counts.copy()
    np.minimum.at(leading, of[here != there], place[here != there])
    return leading


def _agreed(hashes: HashIds, first: Ints, author: Ints, until: Ints, whole: Ints) -> Ints:
    """Return for each row its first block that is not agreed to hold its author's answer.

    Shapes: all [n]; blocks from `first` on are a row's own, those before `until` its author's.
    """
    of, place = places_of(hashes.counts)
    is_own = place >= first[of]
    of, place = of[is_own], place[is_own]
    ids = hashes.ids[hashes.offsets[of] + place]
    by = np.where(place < until[of], author[of], -1)
    is_agreed = _alone(ids, by) & _alone(ids, place) & (by >= 0)
    # A block that lies in the answer whole is one block, whoever goes on with it.
    inside = is_agreed & ((place + 1) * hashes.block_size <= whole[of])
    keys = by[inside] * (int(place.max(initial=0)) + 1) + place[inside]
    is_agreed[inside] = ids[inside] == _first_of(keys, ids[inside])
    agreed = until.copy()
    broken = ~is_agreed & (place < until[of])
    np.minimum.at(agreed, of[broken], place[broken])
    return agreed


def _alone(groups: Ints, values: Ints) -> Bools:
    """Mark the members of groups whose values are all the same."""
    differs = values != _first_of(groups, values)
    return ~np.isin(groups, groups[differs])


def _first_of(keys: Ints, values: Ints) -> Ints:
    """Return for each member the value of its key's first member."""
    if not keys.size:
        return values
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    return values[first[group]]
