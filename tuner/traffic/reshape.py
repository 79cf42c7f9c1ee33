"""Traces made of traces: merged, spread within a coarse clock, thinned to a replica, scaled.

Answers when each of several recordings starts on a common clock, how the ticks of a quantised
clock become instants, which requests reach one replica of many, what more or less load of the
same kind is, and what other traffic of the same kind is. Hash ids of different scope, and the
turns of sessions, stay apart throughout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from heapq import heappop, heappush
from typing import Self

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.errors import TooFewSamplesError, TraceError, UsageError
from tuner.traffic.prefixes import GOLDEN, HashIds, mixed, offsets_of
from tuner.traffic.traces import ClockOrigin, ReadNotes, Trace, Turns


def merge(traces: Sequence[Trace], starts_s: Sequence[float] | None = None) -> Trace:
    """Return all requests of several traces, in due order.

    Traces whose clock is the calendar, or one that they share, keep their distance in time.
    Others start together, or at `starts_s` [traces] on the common clock.

    Raises: TraceError if there is none, if one records requests in flight in place of
        arrivals, or if hash blocks differ in size.
    """
    if not traces:
        raise TraceError("there is no trace to merge", "name at least one file")
    if len(traces) == 1:
        return traces[0]
    for trace in traces:
        if trace.concurrency is not None:
            raise TraceError(
                f"{trace.source} records requests in flight, which cannot be merged",
                "replay it alone with --load-model closed",
            )
    starts, zero_s = (list(starts_s), 0.0) if starts_s is not None else _starts(traces)
    due_s = np.concatenate([t.due_s + s for t, s in zip(traces, starts, strict=True)])
    order = np.argsort(due_s, kind="stable")
    hashes, turns = _hashes(traces), _turns(traces)
    origins = {trace.origin for trace in traces}
    return Trace(
        due_s=due_s[order] - due_s[order[0]],
        prompt_tokens=np.concatenate([t.prompt_tokens for t in traces])[order],
        output_tokens=np.concatenate([t.output_tokens for t in traces])[order],
        hashes=hashes.take(order) if hashes is not None else None,
        e2e_s=_latencies(traces, lambda t: t.e2e_s, order),
        ttft_s=_latencies(traces, lambda t: t.ttft_s, order),
        turns=turns.take(order) if turns is not None else None,
        request_ids=_request_ids(traces, order),
        priorities=_priorities(traces, order),
        source=f"{traces[0].source} and {len(traces) - 1} more",
        format="+".join(sorted({trace.format for trace in traces})),
        sha256=hashlib.sha256("".join(t.sha256 for t in traces).encode()).hexdigest(),
        notes=reduce(ReadNotes.and_those_of, [trace.notes for trace in traces]),
        origin=origins.pop() if len(origins) == 1 else ClockOrigin.OWN,
        zero_s=zero_s + float(due_s[order[0]]),
        hash_scope=_scope(traces),
    )


def have_one_clock(traces: Sequence[Trace]) -> bool:
    """Return whether the traces' own clocks tell when each of them starts."""
    origins = {trace.origin for trace in traces}
    return len(origins) == 1 and ClockOrigin.OWN not in origins


def _starts(traces: Sequence[Trace]) -> tuple[list[float], float]:
    """Return when each trace starts, and what the common clock showed at 0."""
    if not have_one_clock(traces):
        return [0.0] * len(traces), 0.0
    first_s = min(trace.zero_s for trace in traces)
    return [trace.zero_s - first_s for trace in traces], first_s


def _hashes(traces: Sequence[Trace]) -> HashIds | None:
    """Join the ids; those of different scopes are renumbered, so that they stay different."""
    known = [trace.hashes for trace in traces if trace.hashes is not None]
    if not known:
        return None
    sizes = sorted({hashes.block_size for hashes in known})
    if len(sizes) > 1:
        raise TraceError(
            f"hash blocks differ in size ({', '.join(map(str, sizes))} tokens): which prompts "
            "share a prefix across the files is not known",
            "merge traces of one block size, or drop hash_ids from one of them",
        )
    counts = [
        np.zeros(len(t), dtype=np.int64) if t.hashes is None else t.hashes.counts
        for t in traces
    ]
    ids = np.concatenate([hashes.ids for hashes in known])
    scopes = [trace.hash_scope for trace in traces if trace.hashes is not None]
    if len(set(scopes)) > 1:
        ids = _kept_apart(ids, np.repeat(scopes, [hashes.ids.size for hashes in known]))
    return HashIds(offsets_of(np.concatenate(counts)), ids, sizes[0])


def _kept_apart(ids: Ints, scopes: npt.NDArray[np.str_]) -> Ints:
    """Return dense numbers that differ wherever id or scope does; ids may be any 64 bits."""
    apart, used = np.empty_like(ids), 0
    for scope in np.unique(scopes):
        mine = scopes == scope
        names, places = np.unique(ids[mine], return_inverse=True)
        apart[mine] = places + used
        used += len(names)
    return apart


def _scope(traces: Sequence[Trace]) -> str:
    """Return the scope of the joined ids: the common one, or a new one of all together."""
    scopes = sorted({trace.hash_scope for trace in traces if trace.hashes is not None})
    if len(scopes) < 2:
        return scopes[0] if scopes else ""
    return hashlib.sha256(" ".join(scopes).encode()).hexdigest()


def _turns(traces: Sequence[Trace]) -> Turns | None:
    if all(trace.turns is None for trace in traces):
        return None
    after, pause_s, rows = [], [], 0
    for trace in traces:
        if trace.turns is None:
            after.append(np.full(len(trace), -1, dtype=np.int64))
            pause_s.append(np.zeros(len(trace)))
        else:
            after.append(np.where(trace.turns.after >= 0, trace.turns.after + rows, -1))
            pause_s.append(trace.turns.pause_s)
        rows += len(trace)
    return Turns(np.concatenate(after), np.concatenate(pause_s))


def _latencies(
    traces: Sequence[Trace], of: Callable[[Trace], Floats | None], order: Ints
) -> Floats | None:
    columns = [of(trace) for trace in traces]
    if all(column is None for column in columns):
        return None
    filled = [
        np.full(len(trace), np.nan) if column is None else column
        for trace, column in zip(traces, columns, strict=True)
    ]
    joined: Floats = np.concatenate(filled)[order]
    return joined


def _request_ids(traces: Sequence[Trace], order: Ints) -> tuple[str, ...] | None:
    if all(trace.request_ids is None for trace in traces):
        return None
    names = [name for t in traces for name in (t.request_ids or ("",) * len(t))]
    return tuple(names[i] for i in order.tolist())


def _priorities(traces: Sequence[Trace], order: Ints) -> Ints | None:
    columns = [trace.priorities for trace in traces]
    if all(column is None for column in columns):
        return None
    filled = [
        np.zeros(len(trace), dtype=np.int64) if column is None else column
        for trace, column in zip(traces, columns, strict=True)
    ]
    joined: Ints = np.concatenate(filled)[order]
    return joined


MANY_ROWS = 50
"""Ours: below it, equal lengths and shared instants happen by chance or by hand."""

_TICK_S = 0.010
"""Ours: a coarser clock delays a request by more than a decode step; a finer one does not."""

_TIED_RATIO = 0.1
"""Ours: one request in ten shares its instant with another."""

_ON_TICK_RATIO = 0.95
"""Ours: leaves room for late rows; gaps of a free clock are near a multiple 4 % of the time."""

_TICK_TOLERANCE = 0.02
"""Ours: Mooncake's 3 s clock strays by 3 ms, a twentieth of this."""


def tied_ratio(due_s: Floats) -> float:
    """Return the share of requests that share their instant with an earlier one."""
    return 1 - (int(np.count_nonzero(np.diff(due_s))) + 1) / len(due_s)


def clock_tick_s(due_s: Floats) -> float | None:
    """Return the tick of a quantised clock, or None for a fine one.

    Such a clock shows many shared instants, and gaps that are whole ticks.
    """
    gaps = np.diff(due_s)
    steps = gaps[gaps > 0]
    if len(due_s) < MANY_ROWS or tied_ratio(due_s) < _TIED_RATIO or steps.size < 2:
        return None
    tick_s = float(np.quantile(steps, 0.05))
    if tick_s < _TICK_S:
        return None
    ticks = steps / tick_s
    if (np.abs(ticks - np.round(ticks)) <= _TICK_TOLERANCE).mean() < _ON_TICK_RATIO:
        return None
    return float(np.median(steps[np.round(ticks) == 1]))


def spread(trace: Trace, seed: int) -> Trace:
    """Return the trace with every request moved by less than a tick of its clock, at random.

    Recorded latencies and turns stay. The choice is remarked on.

    Raises: TraceError if the clock is not quantised.
    """
    tick_s = clock_tick_s(trace.due_s)
    if tick_s is None:
        raise TraceError(
            f"{trace.source}: the clock shows no coarse ticks, there is nothing to spread",
            "leave --spread out",
        )
    moved_s = trace.due_s + np.random.default_rng(seed).uniform(0.0, tick_s, len(trace))
    order = np.argsort(moved_s, kind="stable")
    message = f"arrivals were spread over the clock's ticks of {tick_s:.3g} s, seed {seed}"
    spread_out = trace.slice_rows(order)
    due_s = moved_s[order]
    return replace(
        spread_out,
        due_s=due_s - due_s[0],
        zero_s=trace.zero_s + float(due_s[0]),
        notes=trace.notes.with_remark(message),
    )


# The share of a prompt that has to lie in a replica's cache to be sent there, and how many
# requests busier it may be: the defaults of SGLang's cache-aware router.
CACHED_SHARE = 0.5
MAX_BUSIER = 32


class Router(StrEnum):
    """How requests are dealt out among replicas."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    PREFIX = "prefix"


def thin(
    trace: Trace, replicas: int, router: Router, replica: int, seconds_per_output_token: float
) -> Trace:
    """Return the requests that reach one of the replicas; the first is 0.

    Least loaded is the replica with the fewest requests in flight, by recorded latencies or
    else by so many seconds per output token. The prefix router sends a request to the replica
    that holds most of its prompt, if that is at least half of it and the replica is not much
    busier than the least loaded, and otherwise to that one; caches are taken as unbounded.

    Raises: UsageError if the numbers make no sense; TraceError if no request reaches the
        replica, or the prefix router meets a trace without hash ids.
    """
    if replicas < 1 or not 0 <= replica < replicas:
        raise UsageError(
            f"replica {replica} of {replicas} does not exist",
            f"replicas are counted from 0 to {replicas - 1}",
        )
    if trace.concurrency is not None:
        raise TraceError(
            f"{trace.source} records requests in flight, which routers do not deal out",
            "scale it by the share of one replica: --load",
        )
    places = _places(trace, replicas, router, seconds_per_output_token)
    rows = np.flatnonzero(places == replica)
    if not rows.size:
        raise TraceError(
            f"{trace.source}: none of {len(trace)} requests reaches replica {replica}",
            "choose fewer replicas",
        )
    message = f"thinned to replica {replica} of {replicas} behind a {router} router"
    reason = "sent to other replicas"
    notes = trace.notes.with_remark(message).with_dropped(reason, len(trace) - rows.size)
    return replace(trace.slice_rows(rows), notes=notes)


def _places(trace: Trace, replicas: int, router: Router, pace_s: float) -> Ints:
    """Return which replica each request reaches."""
    if router is Router.ROUND_ROBIN:
        return np.arange(len(trace), dtype=np.int64) % replicas
    lives_s: Floats = trace.output_tokens * np.float64(pace_s)
    if trace.e2e_s is not None:
        lives_s = np.where(np.isnan(trace.e2e_s), lives_s, trace.e2e_s)
    load = _Load(replicas)
    caches = _Caches(trace, replicas) if router is Router.PREFIX else None
    places = np.empty(len(trace), dtype=np.int64)
    for row, (due_s, life_s) in enumerate(
        zip(trace.due_s.tolist(), lives_s.tolist(), strict=True)
    ):
        load.finish_until(due_s)
        place = load.least()
        if caches is not None:
            best = caches.best(row)
            if best is not None and load.in_flight[best] <= load.in_flight[place] + MAX_BUSIER:
                place = best
            caches.keep(row, place)
        load.send(place, due_s + life_s)
        places[row] = place
    return places


class _Load:
    """How many requests each replica has in flight."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = [0] * replicas
        self._ends: list[tuple[float, int]] = []
        self._turn = 0

    def finish_until(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, place = heappop(self._ends)
            self.in_flight[place] -= 1

    def least(self) -> int:
        """Return the least loaded replica; among equals they take turns."""
        n = len(self.in_flight)
        order: Iterator[int] = ((self._turn + i) % n for i in range(n))
        return min(order, key=self.in_flight.__getitem__)

    def send(self, place: int, end_s: float) -> None:
        self.in_flight[place] += 1
        self._turn = (place + 1) % len(self.in_flight)
        heappush(self._ends, (end_s, place))


class _Caches:
    """Which blocks each replica has seen; equal ids stand for equal prefixes."""

    def __init__(self, trace: Trace, replicas: int) -> None:
        if trace.hashes is None:
            raise TraceError(
                f"{trace.source} has no hash ids, which the prefix router goes by",
                "choose --router round-robin or least-loaded",
            )
        self._hashes, self._prompt = trace.hashes, trace.prompt_tokens
        self._seen: list[set[int]] = [set() for _ in range(replicas)]

    def best(self, row: int) -> int | None:
        """Return the replica with most of the prompt, if that is enough of it."""
        ids = self._hashes.row(row)
        if not ids:
            return None
        held = [self._leading(ids, seen) for seen in self._seen]
        place = max(range(len(held)), key=held.__getitem__)
        tokens = held[place] * self._hashes.block_size
        return place if tokens >= CACHED_SHARE * self._prompt[row] else None

    @staticmethod
    def _leading(ids: tuple[int, ...], seen: set[int]) -> int:
        return next((i for i, block in enumerate(ids) if block not in seen), len(ids))

    def keep(self, row: int, place: int) -> None:
        self._seen[place].update(self._hashes.row(row))


# Copies lie this far from each other, or evenly in a trace too short for it: ours, longer than
# bursts and answers last, and short against the hours over which traffic changes.
SHIFT_S = 60.0
# Sessions are taken out in the order of one shuffle, so that a larger load holds a smaller one.
SEED = 0


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
    copies = _Copies.of(trace)
    whole = math.floor(load)
    parts = [np.arange(len(trace))] * whole
    part = _some_of(copies.sessions, load - whole)
    if part.size or not whole:
        parts.append(part)
    due_s = [_shifted(trace, rows, place, len(parts)) for place, rows in enumerate(parts)]
    return replace(
        copies.joined(parts, due_s),
        notes=trace.notes.with_remark(f"{load:g} times the recorded load, in the same time"),
        load=trace.load * load,
    )


# A stretch that is drawn holds so many requests, of which there are at most so many: ours, a
# median's worth, and enough of them for an interval that is not mostly Student's factor.
MIN_PER_STRETCH, MAX_STRETCHES = 40, 16
# Fewer stretches tell nothing of how traffic varies: ours.
MIN_STRETCHES = 4


class Resampler:
    """Draws other traffic of the same kind: stretches of a trace in another order.

    Stretches begin anywhere, go round at the end, and come with the sessions that begin in
    them, whole. `stretches` is how many make a trace.

    Raises: TooFewSamplesError if the trace holds fewer requests than MIN_STRETCHES of them
        need, or has no arrivals.
    Source: circular block bootstrap, Politis and Romano (1992), of time and not of requests.
    """

    def __init__(self, trace: Trace) -> None:
        self.stretches = min(MAX_STRETCHES, len(trace) // MIN_PER_STRETCH)
        if self.stretches < MIN_STRETCHES or trace.concurrency or trace.duration_s <= 0:
            need = MIN_STRETCHES * MIN_PER_STRETCH
            raise TooFewSamplesError(
                f"other traffic of the kind is drawn from {need} arrivals, got {len(trace)}"
            )
        self._copies = _Copies.of(trace)
        self._period_s = _period_s(trace)
        # When each request is due, and when the first of its session is, round the circle.
        self._due_s = trace.due_s - float(trace.due_s[0])
        self._begins_s = self._due_s[self._copies.sessions]

    def draw(self, rng: np.random.Generator) -> Trace:
        """Return a trace as long as the original.

        What passes its end comes at the beginning, as if recording had begun in its midst. An
        hour in which nothing happens tells nothing, and is drawn again.
        """
        parts, due_s = self._drawn(rng)
        while not sum(rows.size for rows in parts):
            parts, due_s = self._drawn(rng)
        return self._copies.joined(parts, due_s)

    def _drawn(self, rng: np.random.Generator) -> tuple[list[Ints], list[Floats]]:
        """Return the requests of stretches that are drawn, and when they are due."""
        period_s, length_s = self._period_s, self._period_s / self.stretches
        parts, due_s = [], []
        for place, start_s in enumerate(rng.uniform(0.0, period_s, self.stretches)):
            begun_s = (self._begins_s - start_s) % period_s
            rows = np.flatnonzero(begun_s < length_s)
            later_s = self._due_s[rows] - self._begins_s[rows]
            parts.append(rows)
            due_s.append((place * length_s + begun_s[rows] + later_s) % period_s)
        return parts, due_s


def sessions_of(trace: Trace) -> Ints:
    """Return for each request the first one of its session.

    By the trace's turns. Without any, a request that goes on from the whole of another's prompt
    belongs to it, if no third one had that prompt.

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


def _period_s(trace: Trace) -> float:
    """Return for how long a trace lasts, a mean gap after its last request included."""
    return trace.duration_s * len(trace) / max(len(trace) - 1, 1)


def _shifted(trace: Trace, rows: Ints, place: int, copies: int) -> Floats:
    """Return when the rows of one copy are due: later by its place, and round at the end."""
    due_s, first_s, period_s = trace.due_s, float(trace.due_s[0]), _period_s(trace)
    shift_s = place * min(SHIFT_S, period_s / copies)
    if period_s <= 0 or shift_s <= 0:
        return due_s[rows]
    shifted: Floats = first_s + (due_s[rows] - first_s + shift_s) % period_s
    return shifted


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
    def of(cls, trace: Trace) -> Self:
        """Return a trace with its sessions."""
        sessions, hashes = sessions_of(trace), trace.hashes
        if hashes is None:
            return cls(trace, sessions, np.empty(0, dtype=np.int64))
        names, places = np.unique(hashes.ids, return_inverse=True)
        owner = np.repeat(sessions, hashes.counts)
        first, last = np.full(names.size, len(hashes)), np.full(names.size, -1)
        np.minimum.at(first, places, owner)
        np.maximum.at(last, places, owner)
        return cls(trace, sessions, (first == last)[places].astype(np.int64))

    def joined(self, parts: Sequence[Ints], copies_s: Sequence[Floats]) -> Trace:
        """Return the rows of all parts, due when their copies say, in due order."""
        trace = self.trace
        rows, due_s = np.concatenate(parts), np.concatenate(copies_s)
        number = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        order = np.argsort(due_s, kind="stable")
        rows, due_s, number = rows[order], due_s[order], number[order]
        return replace(
            trace,
            due_s=due_s,
            prompt_tokens=trace.prompt_tokens[rows],
            output_tokens=trace.output_tokens[rows],
            hashes=self._own_hashes(rows, number),
            e2e_s=None if trace.e2e_s is None else trace.e2e_s[rows],
            ttft_s=None if trace.ttft_s is None else trace.ttft_s[rows],
            turns=_turns_of_copies(trace.turns, rows, number, due_s),
            request_ids=_names(trace.request_ids, rows, number),
            priorities=None if trace.priorities is None else trace.priorities[rows],
        )

    def _own_hashes(self, rows: Ints, number: Ints) -> HashIds | None:
        """Return the ids of all copies, those of one session alone made its copy's own."""
        hashes = self.trace.hashes
        if hashes is None:
            return None
        taken = hashes.take(rows)
        own = HashIds(hashes.offsets, self.is_private, hashes.block_size).take(rows)
        copy = np.repeat(number, taken.counts).astype(np.uint64)
        fresh = mixed(taken.ids.astype(np.uint64) + copy * GOLDEN) >> np.uint64(1)
        ids = np.where((own.ids == 1) & (copy > 0), fresh.astype(np.int64), taken.ids)
        return HashIds(taken.offsets, ids, hashes.block_size)


def _turns_of_copies(
    turns: Turns | None, rows: Ints, number: Ints, due_s: Floats
) -> Turns | None:
    """Return the turns within each copy; the request that now comes first waits for none."""
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


def _names(names: tuple[str, ...] | None, rows: Ints, number: Ints) -> tuple[str, ...] | None:
    """Return the requests' ids; those of copies say which copy."""
    if names is None:
        return None
    pairs = zip(rows.tolist(), number.tolist(), strict=True)
    return tuple(f"{names[row]}#{copy + 1}" if copy else names[row] for row, copy in pairs)
