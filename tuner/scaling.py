"""The same traffic, more or less of it, in the same time.

Answers what other loads of recorded traffic would have looked like: more users of the same
kind, not the same ones in a hurry, and no shorter a day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.errors import UsageError
from tuner.hashes import HashIds, offsets_of
from tuner.traces import Trace
from tuner.turns import Turns

# Copies lie this far from each other, or evenly in a trace too short for it: ours, longer than
# bursts and answers last, and short against the hours over which traffic changes.
SHIFT_S = 60.0
# Sessions are taken out in the order of one shuffle, so that a larger load holds a smaller one.
SEED = 0

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def at_load(trace: Trace, load: float) -> Trace:
    """Return the trace at `load` times its arrivals, over the same time.

    More is copies of whole sessions laid over each other, shifted in time; what would pass the
    end comes at the beginning, as if recording had begun in its midst. A part of a copy, and
    anything below 1, keeps whole sessions at random. Prefixes that several sessions share stay
    shared; what only one session has, its copy has of its own, or it would find all of itself
    in the cache. A recorded number in flight is multiplied.

    Raises: UsageError if load is not above 0.
    """
    if not (math.isfinite(load) and load > 0):
        raise UsageError(f"load must be a number above 0, got {load}", "1 is as recorded")
    if load == 1:
        return trace
    if trace.concurrency is not None:
        flow = trace.concurrency.scaled(load)
        return replace(trace, concurrency=flow, load=trace.load * load)
    sessions = sessions_of(trace)
    whole = math.floor(load)
    kept = [np.arange(len(trace))] * whole
    part = _some_of(sessions, load - whole)
    if part.size or not whole:
        kept.append(part)
    copies = [_shifted(trace, rows, place, len(kept)) for place, rows in enumerate(kept)]
    return _joined(trace, sessions, kept, copies, load)


def sessions_of(trace: Trace) -> Ints:
    """Return for each request the first one of its session.

    By the turns that the trace knows. Without any, who goes on from the whole of another's
    prompt belongs to it, if nobody else had that prompt.

    Shapes: [n], row numbers.
    """
    before = np.arange(len(trace))
    if trace.turns is not None:
        before = np.where(trace.turns.after >= 0, trace.turns.after, before)
    elif trace.hashes is not None:
        before = _continued(trace.hashes, trace.prompt_tokens)
    while True:
        first: Ints = before[before]
        if np.array_equal(first, before):
            return first
        before = first


def _continued(hashes: HashIds, prompt_tokens: Ints) -> Ints:
    """Return for each row the latest other one whose whole prompt it begins with, or itself."""
    n = len(hashes)
    full = np.minimum(prompt_tokens // hashes.block_size, hashes.counts)
    has_end = np.flatnonzero(full > 0)
    ends = hashes.ids[hashes.offsets[has_end] + full[has_end] - 1]
    names, first, counts = np.unique(ends, return_index=True, return_counts=True)
    alone = counts == 1
    names, owners = names[alone], has_end[first[alone]]
    before = np.arange(n)
    if not names.size:
        return before
    rows = np.repeat(before, hashes.counts)
    place = np.minimum(np.searchsorted(names, hashes.ids), names.size - 1)
    owner = np.where(names[place] == hashes.ids, owners[place], -1)
    is_earlier = (owner >= 0) & (owner < rows)
    # Blocks come in order, so the last that belongs to another wins.
    before[rows[is_earlier]] = owner[is_earlier]
    return before


def _some_of(sessions: Ints, share: float) -> Ints:
    """Return the rows of a share of the sessions; of any, at least one."""
    if share <= 0:
        return np.empty(0, dtype=np.int64)
    names = np.unique(sessions)
    shuffled = np.random.default_rng(SEED).permutation(names)
    chosen = shuffled[: max(1, round(share * names.size))]
    return np.flatnonzero(np.isin(sessions, chosen))


def _shifted(trace: Trace, rows: Ints, place: int, copies: int) -> Floats:
    """Return when the rows of one copy are due: later by its place, and round at the end."""
    due_s, first_s = trace.due_s, float(trace.due_s[0])
    period_s = trace.duration_s * len(trace) / max(len(trace) - 1, 1)
    shift_s = place * min(SHIFT_S, period_s / copies)
    if period_s <= 0 or shift_s <= 0:
        return due_s[rows]
    shifted: Floats = first_s + (due_s[rows] - first_s + shift_s) % period_s
    return shifted


def _joined(
    trace: Trace, sessions: Ints, kept: Sequence[Ints], copies: Sequence[Floats], load: float
) -> Trace:
    """Return all copies as one trace in due order."""
    rows, due_s = np.concatenate(kept), np.concatenate(copies)
    number = np.repeat(np.arange(len(kept)), [part.size for part in kept])
    order = np.argsort(due_s, kind="stable")
    rows, due_s, number = rows[order], due_s[order], number[order]
    return replace(
        trace,
        due_s=due_s,
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        hashes=_own_hashes(trace.hashes, sessions, rows, number),
        e2e_s=None if trace.e2e_s is None else trace.e2e_s[rows],
        ttft_s=None if trace.ttft_s is None else trace.ttft_s[rows],
        turns=_turns(trace.turns, rows, number, due_s),
        request_ids=_names(trace.request_ids, rows, number),
        notes=trace.notes.with_remark(f"{load:g} times the recorded load, in the same time"),
        load=trace.load * load,
    )


def _turns(turns: Turns | None, rows: Ints, number: Ints, due_s: Floats) -> Turns | None:
    """Return who waits for whom within each copy; who now comes first waits for nobody."""
    if turns is None:
        return None
    place = np.full((int(number.max()) + 1, len(turns)), -1, dtype=np.int64)
    place[number, rows] = np.arange(rows.size)
    after = turns.after[rows]
    waits = after >= 0
    after[waits] = place[number[waits], after[waits]]
    is_wrapped = (after >= 0) & (due_s[after] > due_s)
    after = np.where(is_wrapped, -1, after)
    return Turns(after, np.where(after >= 0, turns.pause_s[rows], 0.0))


def _own_hashes(
    hashes: HashIds | None, sessions: Ints, rows: Ints, number: Ints
) -> HashIds | None:
    """Return the ids of all copies, those of one session alone made its copy's own."""
    if hashes is None:
        return None
    names, places = np.unique(hashes.ids, return_inverse=True)
    owner = np.repeat(sessions, hashes.counts)
    first, last = np.full(names.size, len(hashes)), np.full(names.size, -1)
    np.minimum.at(first, places, owner)
    np.maximum.at(last, places, owner)
    is_private = (first == last)[places]
    taken = hashes.take(rows)
    own = HashIds(hashes.offsets, is_private.astype(np.int64), hashes.block_size).take(rows)
    copy = np.repeat(number, taken.counts).astype(np.uint64)
    fresh = _mixed(taken.ids.astype(np.uint64) + copy * _GOLDEN) >> np.uint64(1)
    ids = np.where((own.ids == 1) & (copy > 0), fresh.astype(np.int64), taken.ids)
    return HashIds(offsets_of(taken.counts), ids, hashes.block_size)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words, so that new ids meet no old one but by a chance of 2^-63 each.

    Source: the finaliser of SplitMix64, Steele, Lea and Flood (2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def _names(names: tuple[str, ...] | None, rows: Ints, number: Ints) -> tuple[str, ...] | None:
    """Return the requests' ids; those of copies say which copy."""
    if names is None:
        return None
    pairs = zip(rows.tolist(), number.tolist(), strict=True)
    return tuple(f"{names[row]}#{copy + 1}" if copy else names[row] for row, copy in pairs)
