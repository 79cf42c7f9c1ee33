"""More, less and other traffic of the same kind: whole sessions of a trace, copied and drawn.

Answers what more or less load of the same kind is, and what other traffic of the same kind is.
What sessions share stays shared, and what one has alone its copy has of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from tuner.errors import TooFewSamplesError, UsageError
from tuner.files import free_bytes
from tuner.stats import Floats, Ints, short
from tuner.traffic.prefixes import GOLDEN, HashIds, mixed
from tuner.traffic.traces import Remark, RemarkKind, Trace, Turns, rows_of

# Copies lie this far from each other, or evenly in a trace too short for it: ours, longer than
# bursts and answers last, and short against the hours over which traffic changes.
SHIFT_S = 60.0
# Copies of what are copies already lie so much nearer, or some would meet: the golden section,
# multiples of which come near no whole number.
SECTION = (5**0.5 - 1) / 2
# Sessions are taken out in the order of one shuffle, so that a larger load holds a smaller one.
SEED = 0
# As many may go on from one prompt as one session: ours, an answer asked for anew, or another
# question after it.
MOST_FOLLOWERS = 2
# What whole sessions come to is told as what was asked for if it is this near: ours, half of
# what loads are resolved to. Further off than a tenth it is a caveat: ours, as a difference
# that changes what is answered.
CLOSE, MISSED = 0.01, 0.1
# Bytes of memory that copies take while they are made, for each request and each id of a block:
# ours, 168 and 50 were measured on 2 million named requests, and of 20 ids each.
REQUEST_BYTES, ID_BYTES = 170, 50


def at_load(trace: Trace, load: float) -> Trace:
    """Return the trace at `load` times its arrivals, over the same time.

    More is copies of whole sessions laid over each other, shifted in time; what would pass the
    end comes at the beginning, as if recording had begun in its midst. A part of a copy, and
    anything below 1, keeps whole sessions at random. Prefixes that several sessions share stay
    shared; what only one session has, its copy has of its own, or it would find all of itself
    in the cache. A recorded number in flight is multiplied. More of a part is more of what it
    is a part of: a few sessions copied often have no bursts but their own.

    What leads in to a window goes round apart from it, so that a peak is so many times itself.
    A turn of a copy that goes on from the lead-in comes when it is due, as after a cut.

    Sessions are whole, and so are requests in flight: what they come to is remarked.

    Raises: UsageError if load is not above 0, or if so much of the trace has no room in memory.
    """
    if not (math.isfinite(load) and load > 0):
        raise UsageError(f"load must be a number above 0, got {load}", "1 is as recorded")
    if math.isclose(load, 1.0):
        return trace
    if trace.recorded is not None:
        return at_load(trace.recorded, trace.load / trace.recorded.load * load)
    _check_room(trace, load)
    try:
        scaled = _scaled(trace, load)
    except MemoryError as error:
        raise _no_room(trace, load, "more than there is memory for") from error
    asked, found = trace.load * load, trace.load * _amount(scaled) / _amount(trace)
    is_close = math.isclose(found, asked, rel_tol=CLOSE)
    return replace(
        scaled,
        notes=trace.notes.with_remark(_remark(trace, asked, asked if is_close else found)),
        load=asked if is_close or load < 1 else found,
        recorded=trace if load < 1 else None,
    )


def multiple_of(traces: Sequence[Trace]) -> float:
    """Return how many times what was recorded the traces are together.

    As was asked for, or what whole sessions came to where that is something else.
    """
    found = [_multiple(trace) for trace in traces]
    if len(set(found)) == 1:
        return found[0]
    amounts = np.array([_amount(trace) for trace in traces])
    return float(amounts.sum() / (amounts / found).sum())


def _multiple(trace: Trace) -> float:
    whole = trace.recorded
    if whole is None:
        return trace.load
    found = whole.load * _amount(trace) / _amount(whole)
    return trace.load if math.isclose(found, trace.load, rel_tol=CLOSE) else found


def _amount(trace: Trace) -> float:
    """Return how much a trace asks for: its requests, or the mean of those in flight."""
    flow = trace.concurrency
    return float(trace.measured) if flow is None else flow.mean or 1.0


def _remark(trace: Trace, asked: float, found: float) -> Remark:
    """Return the remark on what a load came to, of so much that was asked for."""
    said = "times the recorded load, in the same time"
    if found == asked:
        return Remark(f"{asked:g} {said}")
    said = f"{short(found)} {said}"
    if math.isclose(found, asked, rel_tol=MISSED):
        return Remark(f"{said} ({asked:g} was asked for)")
    what = "sessions" if trace.concurrency is None else "requests in flight"
    return Remark(
        f"{said}, where {asked:g} was asked for: whole {what} come no closer",
        RemarkKind.LOAD_MISSED,
    )


def _check_room(trace: Trace, load: float) -> None:
    """Refuse copies for which there is no memory. Raises: UsageError."""
    if load <= 1:
        return
    ids = 0 if trace.hashes is None else trace.hashes.ids.size
    needed, free = load * (REQUEST_BYTES * len(trace) + ID_BYTES * ids), free_bytes()
    if needed > free:
        sizes = f"which takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        raise _no_room(trace, load, sizes)


def _no_room(trace: Trace, load: float, sizes: str) -> UsageError:
    count = load * len(trace)
    return UsageError(
        f"{load:g} times {trace.source} is {count:,.0f} requests, {sizes}",
        "choose a smaller load, or cut the trace: tune trace slice --window",
    )


def _scaled(trace: Trace, load: float) -> Trace:
    """Return the rows of a load, and what is in flight; the load and notes as they were."""
    flow = None if trace.concurrency is None else trace.concurrency.scaled(load)
    # Of requests in flight as many rows as are in flight: who has one less has no more to send.
    times = load if flow is None else flow.mean / _amount(trace)
    copies = _Copies.of(trace, sessions_of(trace))
    whole = math.floor(times)
    parts = [np.arange(len(trace))] * whole
    part = copies.some(times - whole, least=0 if whole else 1)
    if part.size or not whole:
        parts.append(part)
    due_s = [_shifted(trace, rows, place, len(parts)) for place, rows in enumerate(parts)]
    return replace(copies.joined(parts, due_s), concurrency=flow)


# A stretch that is drawn holds so many requests, of which there are at most so many: ours, a
# median's worth, and enough of them for an interval that is not mostly Student's factor.
MIN_PER_STRETCH, MAX_STRETCHES = 40, 16
# Fewer stretches tell nothing of how traffic varies, nor do stretches in which fewer sessions
# begin on average, for each comes whole: ours.
MIN_STRETCHES, MIN_SESSIONS = 4, 4
# Draws in which no session begins are drawn again, and all others hold so much more for it: the
# most of it is ours, a fifth of what settings that lose the same may differ by.
MOST_EMPTY = 0.01


class Resampler:
    """Draws other traffic of the same kind: stretches of a trace in another order.

    Stretches begin anywhere, go round at the end, and come with the sessions that begin in
    them, whole. `stretches` is how many make a trace. Of a part the whole is drawn, and a part
    taken of that.

    What is drawn is what is measured, after the lead-in as it was: the lead-in of a peak is not
    of its kind, and other traffic begins as warm as the recorded. Turns of a session that began
    in the lead-in are a session of their own, which finds there what it had by then.

    Raises: TooFewSamplesError if the trace measures fewer requests or sessions than
        MIN_STRETCHES of them need, if these begin so close together that many draws would hold
        none of them, or if it has no arrivals.
    Source: circular block bootstrap, Politis and Romano (1992), of time and not of requests.
    """

    def __init__(self, trace: Trace) -> None:
        whole = trace.recorded or trace
        self._share, trace = trace.load / whole.load, whole
        self._led_in, due_s = trace.led_in, trace.due_s[trace.led_in :]
        if trace.measured < MIN_STRETCHES * MIN_PER_STRETCH or trace.concurrency is not None:
            raise _too_few(f"{MIN_STRETCHES * MIN_PER_STRETCH} arrivals, got {due_s.size}")
        # Who asked, and what was measured, is of no other traffic.
        bare = replace(trace, request_ids=None, e2e_s=None, ttft_s=None)
        self._copies = _Copies.of(_parted(bare), _sessions_apart(bare))
        first = self._copies.sessions[self._led_in :] - self._led_in
        sessions = np.unique(first)
        most = min(trace.measured // MIN_PER_STRETCH, sessions.size // MIN_SESSIONS)
        self.stretches = min(MAX_STRETCHES, most)
        self._period_s = _period_s(due_s)
        # When each request is due, and when the first of its session is, round the circle.
        self._first_s = float(due_s[0])
        self._due_s = due_s - self._first_s
        self._begins_s = self._due_s[first]
        self._check_sessions(self._due_s[sessions])
        self._order = np.argsort(self._begins_s, kind="stable")
        self._ordered_s = self._begins_s[self._order]

    def _check_sessions(self, begins_s: Floats) -> None:
        """Refuse too few sessions, or such that begin together. Raises: TooFewSamplesError."""
        need = MIN_STRETCHES * MIN_SESSIONS
        if self.stretches < MIN_STRETCHES:
            raise _too_few(f"{need} sessions or single requests, got {begins_s.size}")
        length_s = self._period_s / self.stretches
        gaps_s = np.diff(begins_s, append=begins_s[0] + self._period_s)
        # A stretch is empty that begins in a gap so long before its end.
        empty_s = float(np.maximum(gaps_s - length_s, 0.0).sum())
        if not self._period_s or (empty_s / self._period_s) ** self.stretches > MOST_EMPTY:
            share = 1 - empty_s / self._period_s if self._period_s else 0.0
            raise _too_few(
                f"sessions that begin all the time, got {begins_s.size}, of which {share:.0%} "
                f"of all stretches of {short(length_s)} s hold one"
            )

    def draw(self, rng: np.random.Generator) -> Trace:
        """Return a trace as long as the original, which begins when that does.

        What passes its end comes at the beginning, as if recording had begun in its midst. An
        hour in which nothing happens is drawn again.
        """
        while True:
            parts, due_s = self._drawn(rng)
            if any(rows.size for rows in parts):
                break
        # With the first stretch, so that all of its ids stay as they were.
        parts[0] = np.concatenate([np.arange(self._led_in), parts[0]])
        due_s[0] = np.concatenate([self._copies.trace.due_s[: self._led_in], due_s[0]])
        return at_load(self._copies.joined(parts, due_s), self._share)

    def _drawn(self, rng: np.random.Generator) -> tuple[list[Ints], list[Floats]]:
        """Return the requests of stretches that are drawn, and when they are due."""
        period_s, length_s = self._period_s, self._period_s / self.stretches
        parts, due_s = [], []
        for place, start_s in enumerate(rng.uniform(0.0, period_s, self.stretches)):
            rows = self._begun(start_s, start_s + length_s)
            begun_s = (self._begins_s[rows] - start_s) % period_s
            later_s = self._due_s[rows] - self._begins_s[rows]
            parts.append(rows + self._led_in)
            due_s.append(self._first_s + (place * length_s + begun_s + later_s) % period_s)
        return parts, due_s

    def _begun(self, start_s: float, end_s: float) -> Ints:
        """Return the rows, ascending, of sessions that begin in a stretch of the circle.

        They are counted from the first that is measured.
        """
        period_s = self._period_s
        ends_s = (start_s, end_s, start_s - period_s, end_s - period_s)
        low, high, wrapped, last = np.searchsorted(self._ordered_s, ends_s).tolist()
        rows = np.concatenate([self._order[wrapped:last], self._order[low:high]])
        rows.sort()
        return rows


def _too_few(what: str) -> TooFewSamplesError:
    return TooFewSamplesError(f"other traffic of the kind is drawn from {what}")


def sessions_of(trace: Trace) -> Ints:
    """Return for each request the first one of its session.

    By the trace's turns. Without any, a request that goes on from the whole of another's prompt
    belongs to it, if no third one had that prompt and not many go on from it: what many have in
    common is a template, of which one prompt may hold nothing more.

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
    itself = np.arange(n)
    followers = np.bincount(before[before != itself], minlength=n)
    apart: Ints = np.where(followers[before] > MOST_FOLLOWERS, itself, before)
    return apart


def _parted(trace: Trace) -> Trace:
    """Return the trace, in which no turn that is measured waits for one of the lead-in."""
    turns, first = trace.turns, trace.led_in
    if turns is None or not first:
        return trace
    goes_on = (turns.after < first) & trace.is_measured
    return replace(trace, turns=turns.freed(goes_on))


def _sessions_apart(trace: Trace) -> Ints:
    """Return for each request the first of its session on its side of the lead-in's end.

    Shapes: [n], row numbers.
    """
    if not trace.led_in:
        return sessions_of(trace)
    parts = np.split(np.arange(len(trace)), [trace.led_in])
    return np.concatenate([rows[sessions_of(trace.slice_rows(rows))] for rows in parts])


def _period_s(due_s: Floats) -> float:
    """Return for how long requests come, a mean gap after the last of them included."""
    return float(due_s[-1] - due_s[0]) * due_s.size / max(due_s.size - 1, 1)


def _shifted(trace: Trace, rows: Ints, place: int, copies: int) -> Floats:
    """Return when the rows of one copy are due: later by its place, and round at the end.

    Of requests in flight by as many rows as come in that time, and between two of them: they
    stay as dense as what is in flight asks for.
    """
    if trace.concurrency is not None:
        n, period_s = len(trace), _period_s(trace.due_s)
        later = round(n * _apart_s(trace, period_s, copies) / period_s) if period_s > 0 else 0
        places = (rows + place * (later + 1 / copies)) % n
        due_s: Floats = np.interp(places, np.arange(n), trace.due_s)
        return due_s
    before_s, due_s = np.split(trace.due_s, [trace.led_in])
    sides = [(before_s, trace.lead_in_s)] if trace.led_in else []
    if trace.measured:
        sides.append((due_s, math.inf))
    shifted = [_went_round(trace, side_s, place, copies, end_s) for side_s, end_s in sides]
    return np.concatenate(shifted)[rows]


def _apart_s(trace: Trace, period_s: float, copies: int) -> float:
    """Return how far from each other so many copies of a trace lie."""
    return min(SHIFT_S, period_s / copies) * (SECTION if trace.load > 1 else 1.0)


def _went_round(trace: Trace, due_s: Floats, place: int, copies: int, end_s: float) -> Floats:
    """Return due times of a copy of a trace, later by its place, and all before an end."""
    first_s = float(due_s[0])
    period_s = min(_period_s(due_s), end_s - first_s)
    shift_s = place * _apart_s(trace, period_s, copies)
    if period_s <= 0 or shift_s <= 0:
        return due_s
    shifted = first_s + (due_s - first_s + shift_s) % period_s
    before_end: Floats = np.minimum(shifted, np.nextafter(end_s, 0.0))
    return before_end


@dataclass(frozen=True, slots=True)
class _Copies:
    """A trace of which parts are laid over each other.

    Shapes: sessions is [n], the first row of each request's session; is_private is [ids], of
        what only one session has.
    """

    trace: Trace
    sessions: Ints
    is_private: Ints

    @classmethod
    def of(cls, trace: Trace, sessions: Ints) -> Self:
        """Return a trace with its sessions."""
        hashes = trace.hashes
        if hashes is None:
            return cls(trace, sessions, np.empty(0, dtype=np.int64))
        names, places = np.unique(hashes.ids, return_inverse=True)
        owner = np.repeat(sessions, hashes.counts)
        first, last = np.full(names.size, len(hashes)), np.full(names.size, -1)
        np.minimum.at(first, places, owner)
        np.maximum.at(last, places, owner)
        return cls(trace, sessions, (first == last)[places].astype(np.int64))

    def some(self, share: float, least: int) -> Ints:
        """Return the rows of sessions that come closest to a share of what is measured.

        The first of one shuffle, at least so many, of which the first is measured.
        """
        sessions, trace = self.sessions, self.trace
        is_measured = trace.is_measured
        shuffled = np.random.default_rng(SEED).permutation(np.unique(sessions))
        sizes = np.bincount(sessions[is_measured], minlength=len(trace))
        shuffled = np.roll(shuffled, -int(np.argmax(sizes[shuffled] > 0)))
        so_far = np.cumsum(np.append(0, sizes[shuffled]))[least:]
        closest = so_far[np.argmin(np.abs(so_far - share * trace.measured))]
        # Of sessions that are of the lead-in alone as large a share.
        low, beyond = np.searchsorted(so_far, [closest, closest + 1]).tolist()
        count = least + min(max(round(share * shuffled.size) - least, low), beyond - 1)
        return np.flatnonzero(np.isin(sessions, shuffled[:count]))

    def joined(self, parts: Sequence[Ints], copies_s: Sequence[Floats]) -> Trace:
        """Return the rows of all parts, due when their copies say, in due order."""
        trace = self.trace
        rows, due_s = np.concatenate(parts), np.concatenate(copies_s)
        number = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        order = np.argsort(due_s, kind="stable")
        rows, due_s, number = rows[order], due_s[order], number[order]
        bare = replace(trace, hashes=None, turns=None, request_ids=None, recorded=None)
        return replace(
            bare,
            due_s=due_s,
            hashes=self._own_hashes(rows, number),
            turns=_turns_of_copies(trace.turns, rows, number, due_s, trace.led_in),
            request_ids=_names(trace.request_ids, rows, number),
            **rows_of(bare, rows, due_s),
        )

    def _own_hashes(self, rows: Ints, number: Ints) -> HashIds | None:
        """Return the ids of all copies, those of one session alone made its copy's own."""
        hashes = self.trace.hashes
        if hashes is None:
            return None
        taken = hashes.take(rows)
        own = HashIds(hashes.offsets, self.is_private, hashes.block_size).take(rows)
        copy = np.repeat(number, taken.counts).astype(np.uint64)
        # By all ids too, so that a copy of copies has nothing that one of them has alone.
        salt = mixed(hashes.ids.astype(np.uint64).sum(keepdims=True))
        fresh = mixed(taken.ids.astype(np.uint64) + copy * GOLDEN + salt) >> np.uint64(1)
        ids = np.where((own.ids == 1) & (copy > 0), fresh.astype(np.int64), taken.ids)
        return HashIds(taken.offsets, ids, hashes.block_size)


def _turns_of_copies(
    turns: Turns | None, rows: Ints, number: Ints, due_s: Floats, led_in: int
) -> Turns | None:
    """Return the turns within each copy; the request that now comes first waits for none.

    Nor does one that is measured for one of the lead-in, but as it was recorded.
    """
    if turns is None:
        return None
    place = np.full((int(number.max()) + 1, len(turns)), -1, dtype=np.int64)
    place[number, rows] = np.arange(rows.size)
    after = turns.after[rows]
    after[(number > 0) & (rows >= led_in) & (after < led_in)] = -1
    waits = after >= 0
    after[waits] = place[number[waits], after[waits]]
    copied = Turns(after, np.where(after >= 0, turns.pause_s[rows], 0.0))
    return copied.freed(due_s[after] > due_s)


def _names(names: tuple[str, ...] | None, rows: Ints, number: Ints) -> tuple[str, ...] | None:
    """Return the requests' ids; those of copies say which copy."""
    if names is None:
        return None
    pairs = zip(rows.tolist(), number.tolist(), strict=True)
    return tuple(f"{names[row]}#{copy + 1}" if copy else names[row] for row, copy in pairs)
