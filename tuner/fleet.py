"""The share of a fleet's traffic that reaches one of its replicas.

A trace recorded in front of N replicas has to be thinned before it is replayed against one.
Which requests reach a replica depends on the router; three common ones are imitated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.errors import TraceError, UsageError
from tuner.traces import Trace

# The share of a prompt that has to lie in a replica's cache to be sent there, and how many
# requests busier it may be: the defaults of SGLang's cache-aware router.
CACHED_SHARE = 0.5
MOST_BUSIER = 32


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
    told = f"thinned to replica {replica} of {replicas} behind a {router} router"
    reason = "sent to other replicas"
    notes = trace.notes.with_remark(told).with_dropped(reason, len(trace) - rows.size)
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
            if best is not None and load.in_flight[best] <= load.in_flight[place] + MOST_BUSIER:
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
