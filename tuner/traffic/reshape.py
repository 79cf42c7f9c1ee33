"""Traces made of traces: merged, spread within a coarse clock, thinned to a replica.

Answers when each of several recordings starts on a common clock, how the ticks of a quantised
clock become instants, and which requests reach one replica of many. Hash ids of different
scope, and the turns of sessions, stay apart throughout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import reduce
from heapq import heappop, heappush
from types import SimpleNamespace

import numpy as np

from tuner.errors import TraceError, UsageError
from tuner.stats import Floats, Ints
from tuner.traffic.prefixes import HashIds, offsets_of
from tuner.traffic.traces import (
    ARRAYS,
    ClockOrigin,
    ReadNotes,
    Remark,
    RemarkKind,
    Trace,
    Turns,
    joined,
    joined_texts,
    rows_of,
)


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
    sizes, missing = list(map(len, traces)), {"priorities": 0, "engines": -1}
    columns = SimpleNamespace(
        hashes=_hashes(traces),
        turns=_turns(traces, sizes),
        request_ids=joined_texts([trace.request_ids for trace in traces], sizes),
    )
    for name in ARRAYS:
        parts = [getattr(trace, name) for trace in traces]
        setattr(columns, name, joined(parts, sizes, missing.get(name, np.nan)))
    return Trace(
        due_s=due_s[order] - due_s[order[0]],
        source=f"{traces[0].source} and {len(traces) - 1} more",
        format="+".join(sorted({trace.format for trace in traces})),
        sha256=hashlib.sha256("".join(t.sha256 for t in traces).encode()).hexdigest(),
        notes=reduce(ReadNotes.and_those_of, [trace.notes for trace in traces]),
        origin=traces[0].origin if have_one_clock(traces) else ClockOrigin.OWN,
        zero_s=zero_s + float(due_s[order[0]]),
        hash_scope=_scope(traces),
        **rows_of(columns, order, due_s),
    )


def have_one_clock(traces: Sequence[Trace]) -> bool:
    """Return whether the traces' own clocks tell when each of them starts.

    The calendar is one for all; a clock that a data set shares is one for its format.
    """
    clocks = {
        (trace.origin, trace.format if trace.origin is ClockOrigin.SHARED else "")
        for trace in traces
    }
    return len(clocks) == 1 and traces[0].origin is not ClockOrigin.OWN


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
        ids = _kept_apart(ids, scopes, [hashes.ids.size for hashes in known])
    return HashIds(offsets_of(np.concatenate(counts)), ids, sizes[0])


def _kept_apart(ids: Ints, scopes: Sequence[str], counts: Sequence[int]) -> Ints:
    """Return dense numbers that differ wherever id or scope does; ids may be any 64 bits.

    The first `counts` ids are of the first scope, and so on; a scope may come again.
    """
    rows: dict[str, list[Ints]] = {}
    parts = np.split(np.arange(ids.size), np.cumsum(counts)[:-1])
    for scope, part in zip(scopes, parts, strict=True):
        rows.setdefault(scope, []).append(part)
    apart, used = np.empty_like(ids), 0
    for scope in sorted(rows):
        mine = np.concatenate(rows[scope])
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


def _turns(traces: Sequence[Trace], sizes: Sequence[int]) -> Turns | None:
    turns = [trace.turns for trace in traces]
    after = joined([one.after if one else None for one in turns], sizes, -1)
    pause_s = joined([one.pause_s if one else None for one in turns], sizes, 0.0)
    if after is None or pause_s is None:
        return None
    rows_before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Turns(np.where(after >= 0, after + rows_before, -1), pause_s)


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

    Recorded latencies and turns stay, and no turn comes before the one that it waits for. The
    choice is remarked on.

    Raises: TraceError if the clock is not quantised.
    """
    tick_s = clock_tick_s(trace.due_s)
    if tick_s is None:
        raise TraceError(
            f"{trace.source}: the clock shows no coarse ticks, there is nothing to spread",
            "leave --spread out",
        )
    moved_s = trace.due_s + np.random.default_rng(seed).uniform(0.0, tick_s, len(trace))
    if trace.turns is not None:
        moved_s = _behind(moved_s, trace.turns.after)
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


def _behind(due_s: Floats, after: Ints) -> Floats:
    """Return due times of which none is before that of the request it waits for.

    >>> _behind(np.array([1.0, 0.5, 0.2]), np.array([-1, 0, 1])).tolist()
    [1.0, 1.0, 1.0]
    """
    while True:
        later_s: Floats = np.where(after >= 0, np.maximum(due_s, due_s[after]), due_s)
        if np.array_equal(later_s, due_s):
            return due_s
        due_s = later_s


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
    if replicas > len(trace):
        raise UsageError(
            f"{replicas:,} replicas are more than the {len(trace):,} requests of "
            f"{trace.source}",
            "choose fewer replicas",
        )
    places = _places(trace, replicas, router, seconds_per_output_token)
    rows = np.flatnonzero(places == replica)
    if not rows.size:
        raise TraceError(
            f"{trace.source}: none of {len(trace)} requests reaches replica {replica}",
            "choose fewer replicas",
        )
    message = f"thinned to replica {replica} of {replicas} behind a {router} router"
    notes = _thinned(trace.notes, len(trace) - rows.size).with_remark(message)
    return replace(trace.slice_rows(rows), notes=notes)


def of_middle_engine(trace: Trace) -> Trace:
    """Return the requests of the engine with the middle load, where rows name several.

    Of an even number the busier of the two in the middle. Who was given up has no engine.
    """
    if trace.engines is None:
        return trace
    names, counts = np.unique(trace.engines[trace.engines >= 0], return_counts=True)
    if names.size < 2:
        return trace
    middle = np.argsort(counts, kind="stable")[names.size // 2]
    loads = counts[[counts.argmin(), counts.argmax()]] / counts[middle]
    remark = on_the_middle(float(names.size), f"engine_index {names[middle]}", *loads.tolist())
    mine = trace.engines == names[middle]
    notes = _thinned(trace.notes, len(trace) - int(mine.sum())).with_remark(remark)
    return replace(trace.slice_rows(mine), notes=notes, engines=None)


def on_the_middle(engines: float, name: str, low: float, high: float) -> Remark:
    """Return who of several engines stands for them, and between which multiples they lie."""
    return Remark(
        f"{engines:.3g} engines served at once: this is the one with the middle load, {name}; "
        f"they finished {low:.2g} to {high:.2g} times as many requests each",
        RemarkKind.MIDDLE_ENGINE,
    )


def _thinned(notes: ReadNotes, gone: int) -> ReadNotes:
    """Return the notes of a share: of answers cut short it has as many in a hundred."""
    others = (r for r in notes.remarks if r.kind is not RemarkKind.ENGINES_TOGETHER)
    notes = replace(notes, remarks=tuple(others))
    kept, aborted = notes.kept, notes.aborted
    aborted = round(aborted * (kept - gone) / kept) if kept > 0 else aborted
    return replace(notes.with_dropped("sent to other replicas", gone), aborted=aborted)


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
