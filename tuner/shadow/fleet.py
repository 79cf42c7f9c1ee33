"""A trace on many replicas behind a router, simulated all at once on the compiled scheduler.

Answers what becomes of every request when a router deals the whole traffic out, and for how
long each replica was on: of a fixed number, of one that follows a plan, or of one that grows
and shrinks with what is in flight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, UsageError
from tuner.files import free_bytes
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.shadow import routing as r
from tuner.shadow.compiled import warms_up
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.schedule import layout as s
from tuner.shadow.simulated import (
    SimulatedEngine,
    check_sizes,
    first_slots,
    keeps_each_block,
)
from tuner.shadow.simulator import Simulation, tiny_replay
from tuner.stats import Floats, Ints
from tuner.traffic.reshape import CACHED_SHARE, MAX_BUSIER, Router
from tuner.traffic.traces import LoadModel

_deal_out: Any = r.deal_out

_ROUTERS: Final = {
    Router.ROUND_ROBIN: r.ROUND_ROBIN,
    Router.LEAST_LOADED: r.LEAST_LOADED,
    Router.PREFIX: r.PREFIX,
}
# Replicas that the prefix router tells apart: the bits of a number.
MAX_PREFIX_REPLICAS: Final = 64
# Requests that are dealt out between two looks at the clock: ours.
_TURNS: Final = 1 << 14
# Bytes for each request and replica: its place in the replica's queue and its slot, and the
# heap of who is due (measured: what is never touched takes none).
_ROW_BYTES: Final = 28
# How often a plan is looked at: ours.
_PLAN_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """How a fleet follows its load, as Kubernetes' autoscaler does it.

    Every `every_s` as many replicas are wanted as hold what is in flight, `target` each; it
    shrinks to what was wanted at most in the last `hold_s`. The trace begins with `at_first`.

    Units: seconds.
    """

    target: float
    at_first: int = 1
    fewest: int = 1
    every_s: float = 15.0
    hold_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas behind a router.

    `replicas` is their largest number. With `plan`, instants of the trace and the replicas
    wanted from then on, the first at 0, or with an autoscaler, there are fewer at times: a
    start takes `start_s`, and whoever is no longer wanted answers what it has first.

    Units: seconds.
    Raises: UsageError for numbers that make no fleet.
    """

    replicas: int
    router: Router = Router.LEAST_LOADED
    plan: Sequence[tuple[float, int]] = ()
    autoscaler: Autoscaler | None = None
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UsageError(f"a fleet has a replica at least, got {self.replicas}")
        if self.router is Router.PREFIX and self.replicas > MAX_PREFIX_REPLICAS:
            raise UsageError(
                f"the prefix router tells {MAX_PREFIX_REPLICAS} replicas apart, "
                f"not {self.replicas}",
                "choose --router least-loaded",
            )
        wanted = [count for _, count in self.plan]
        if any(not 1 <= count <= self.replicas for count in wanted):
            raise UsageError(f"a plan wants 1 to {self.replicas} replicas, got {wanted}")

    @property
    def at_first(self) -> int:
        """How many replicas serve when the trace begins."""
        if self.autoscaler is not None:
            return self.autoscaler.at_first
        return self.plan[0][1] if self.plan else self.replicas


@dataclass(frozen=True, slots=True)
class FleetLog:
    """What became of a fleet's traffic: one replay's log of all requests.

    `log` counts the steps of all replicas together, and the work of a request as a share of
    what all of them can do. `on_s` is for how long each was on, from
    when it began to start; `places` says who got each request.

    Shapes: places [n], on_s [replicas].
    """

    log: ReplayLog
    places: Ints
    on_s: Floats


def simulate_fleet(
    engine: SimulatedEngine,
    prepared: PreparedTrace,
    limits: EngineLimits,
    plan: ReplayPlan,
    fleet: Fleet,
) -> FleetLog:
    """Replay a prepared trace on a fleet of simulated engines, and return every instant.

    Later turns of a session go where its first went. Router and replicas know nothing of what
    comes, and the router sees at once what is sent and answered.

    Raises: EngineError for a request that is larger than a KV cache, or when nothing can be
        scheduled; UsageError for what a router cannot deal out, and where memory is too little.
    """
    _check(prepared, plan, fleet)
    check_sizes(engine, prepared, limits)
    caches = keeps_each_block(engine, prepared)
    slots = first_slots(engine, prepared, limits)
    while True:
        replay = _FleetSimulation(engine, prepared, limits, plan, slots, fleet, caches=caches)
        status = replay.deal_out()
        if status == s.NEEDS_CACHE:
            caches = True
        elif status == s.NO_SLOT:
            slots = min(2 * slots, len(prepared.trace) + 1)
        else:
            return replay.fleet_log()


def _check(prepared: PreparedTrace, plan: ReplayPlan, fleet: Fleet) -> None:
    is_open = plan.load_model is LoadModel.OPEN and plan.batches is None
    if not is_open or prepared.trace.lead_in_s or plan.gate is not None:
        raise UsageError(
            "a router deals out requests as they arrive, the first included",
            "leave out --load-model closed, static batches, a lead-in and a gate",
        )
    if plan.keep_steps:
        raise UsageError(
            "a fleet keeps no steps", "replay one replica's share: tune trace thin"
        )
    if fleet.router is Router.PREFIX and prepared.trace.hashes is None:
        raise UsageError(
            f"{prepared.trace.source} has no hash ids, which the prefix router goes by",
            "choose --router round-robin or least-loaded",
        )
    _check_room(_ROW_BYTES * len(prepared.trace), prepared, fleet)


def _check_room(each: int, prepared: PreparedTrace, fleet: Fleet) -> None:
    """Refuse replicas that take more memory than is free, each so many bytes.

    Raises: UsageError.
    """
    needed, free = each * fleet.replicas, free_bytes()
    if needed > free:
        raise UsageError(
            f"{fleet.replicas} replicas and {len(prepared.trace):,} requests take "
            f"{needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free",
            "replay a part of the trace: --window, or a day of it",
        )


class _FleetSimulation(Simulation):
    """The arrays of all replicas; what becomes of requests stands where one replay has it."""

    def __init__(
        self,
        engine: SimulatedEngine,
        prepared: PreparedTrace,
        limits: EngineLimits,
        plan: ReplayPlan,
        slots: int,
        fleet: Fleet,
        *,
        caches: bool,
    ) -> None:
        began_s = time.perf_counter()
        super().__init__(engine, prepared, limits, plan, slots, began_s, caches=caches)
        n, count = len(prepared.trace), fleet.replicas
        self._g[s.ARRIVALS], self._g[s.READY] = s.CAUSAL, 0
        refs = np.zeros((count, s.REFERENCES, n), np.int32)
        refs[:, s.SLOT_OF] = -1
        own = [self._g, self._x, self._w, self._slots]
        own += [self._cache.pool, self._cache.keys, self._cache.tables, self._cache.heads]
        _check_room(sum(array.nbytes for array in own), prepared, fleet)
        g, x, w, sl, *cache = [np.repeat(array[None], count, axis=0) for array in own]
        self._many = r.Many(g, x, w, sl, refs, np.empty((count, n, 2)), *cache)
        self._common = r.Common(
            *(self._t, self._instants, self._answers, self._histograms, self._log),
            self._traffic(),
            self._with_links(fleet),
        )
        self._fleet = _router(prepared, fleet)

    def _traffic(self) -> s.Requests:
        """Return the traffic; a request that waits for none has nobody who waits for it."""
        w, n = self._prepared, len(self._prepared.trace)
        follows = w.follows if w.is_causal else np.zeros(n + 1, np.int64)
        follows.flags.writeable = False
        return self._requests(np.empty((0, 2)), follows)

    def _with_links(self, fleet: Fleet) -> s.Cache:
        """Return a new cache, with the beginnings of prompts if only the router needs them."""
        cache = self._cache
        if fleet.router is not Router.PREFIX or cache.starts.size:
            return cache
        links, starts, *_ = self._prepared.chains
        return cache._replace(links=links, starts=starts)

    def deal_out(self) -> int:
        """Deal out all requests and wait for their answers; return why that ended.

        Raises: EngineError.
        """
        while _deal_out(self._many, self._common, self._fleet, _TURNS):
            pass
        g = self._many.g
        for status in (s.NEEDS_CACHE, s.NO_SLOT):
            if (g[:, s.STATUS] == status).any():
                return status
        if (g[:, s.STATUS] == s.IS_STUCK).any() or (g[:, s.IN_FLIGHT] > 0).any():
            raise EngineError(
                "a replica has requests that it does not schedule",
                "a request may be larger than the KV cache",
            )
        return s.ENDED_WELL

    def fleet_log(self) -> FleetLog:
        """Return the finished replay; nothing can be asked of it afterwards."""
        x, fleet = self._many.x, self._fleet
        peaks = slice(s.FULLEST, s.PEAK_USED + 1)
        self._x[:] = x[0]
        self._x[s.STEPS_N :] = x[:, s.STEPS_N :].sum(axis=0)
        self._x[peaks] = x[:, peaks].max(axis=0)
        self._x[s.NOW] = end_s = x[:, s.NOW].max()
        is_on = fleet.states[:, r.STATE] != r.OFF
        on_s = fleet.times_s[:, r.BILLED_S]
        on_s = on_s + np.where(is_on, end_s - fleet.times_s[:, r.ON_S], 0.0)
        places, after = fleet.places, self._prepared.trace.turns
        if self._prepared.is_causal and after is not None:
            for row in np.flatnonzero(after.after >= 0).tolist():
                places[row] = places[after.after[row]]
        log, count = self.log(), len(self._many.x)
        lines = replace(log.timelines, work_s=log.timelines.work_s / count)
        return FleetLog(replace(log, timelines=lines), places.astype(np.int64), on_s)


def _router(prepared: PreparedTrace, fleet: Fleet) -> r.Fleet:
    """Return the router's own arrays before it has dealt out anything."""
    trace, scaler = prepared.trace, fleet.autoscaler
    integers, floats = np.zeros(r.FLEET_INTEGERS, np.int64), np.zeros(r.FLEET_FLOATS)
    integers[r.ROUTER], integers[r.REPLICAS] = _ROUTERS[fleet.router], fleet.replicas
    waits = prepared.is_causal and trace.turns is not None
    calls = np.flatnonzero(trace.turns.after < 0) if waits and trace.turns else None
    rows = np.arange(len(trace)) if calls is None else calls
    integers[r.CALLS] = rows.size
    integers[r.WANTED] = fleet.at_first
    integers[r.FEWEST] = 1 if scaler is None else scaler.fewest
    integers[r.PLANNED], integers[r.PLANS] = min(1, len(fleet.plan)), len(fleet.plan)
    integers[r.CACHED_SHARE] = round(100 * CACHED_SHARE)
    integers[r.MAX_BUSIER] = MAX_BUSIER
    is_fixed = scaler is None and not fleet.plan
    floats[r.LOOK] = math.inf if is_fixed else 0.0
    floats[r.EVERY_S] = _PLAN_EVERY_S if scaler is None else scaler.every_s
    floats[r.HOLD_S] = 0.0 if scaler is None else scaler.hold_s
    floats[r.TARGET] = math.inf if scaler is None else scaler.target
    floats[r.START_S] = fleet.start_s
    states = np.zeros((fleet.replicas, r.REPLICA_INTEGERS), np.int64)
    states[: fleet.at_first, r.STATE] = r.SERVES
    needed_s = np.full(fleet.replicas + 1, -math.inf)
    needed_s[: fleet.at_first + 1] = 0.0
    numbers = prepared.chains[3] if fleet.router is Router.PREFIX else 0
    return r.Fleet(
        integers,
        floats,
        states,
        np.zeros((fleet.replicas, r.REPLICA_FLOATS)),
        rows.astype(np.int64),
        np.full(len(trace), -1, np.int32),
        np.array([*fleet.plan, (math.inf, 0)], dtype=np.float64),
        np.zeros(max(1, numbers), np.uint64),
        needed_s,
    )


@warms_up
def _warm_up() -> None:
    """Have everything compiled."""
    engine, prepared, limits, plan = tiny_replay()
    simulate_fleet(engine, prepared, limits, plan, Fleet(2, Router.PREFIX))
