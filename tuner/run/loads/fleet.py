"""How many replicas serve a trace within its SLOs, at which limits, and what that costs.

The fewest replicas are found for each stretch of the trace, an hour by default, by simulating
the fleet behind its router; the limits are those that need the fewest in the busiest one. Three
ways to run them are then simulated over the whole trace: as many as the busiest stretch needs
all the time, a plan by stretches with replicas started ahead, and an autoscaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError, TooFewSamplesError
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import holds
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.loads.alone import hopeless, with_widest
from tuner.run.predict import predict
from tuner.search.budget import MIN_REQUESTS, Aim
from tuner.search.ladder import FINALISTS
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.shadow.calibration import StatedError
from tuner.shadow.fleet import Autoscaler, Fleet, FleetLog, simulate_fleet
from tuner.shadow.predictor import Predictor
from tuner.shadow.prepared import PreparedTrace
from tuner.stats import Floats
from tuner.traffic.resample import at_load
from tuner.traffic.reshape import Router
from tuner.traffic.traces import Trace
from tuner.traffic.windows import whole

# How often limits are chosen anew at what a replica then gets, and a plan is mended: ours.
_PASSES, _MENDS = 2, 6
# What an autoscaler is told to fill a replica with, as shares of what is in flight on each
# where the fewest replicas serve the busiest stretch, the cheapest first: ours.
_TARGETS: Final = (2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4)


@dataclass(frozen=True, slots=True)
class FleetAim:
    """What a fleet has to keep, what it is made of, and what that costs.

    `most` is the largest number of replicas that is tried, `devices` how many GPUs each takes.

    Units: seconds; the price is of a GPU for an hour, in whatever money.
    """

    slos: tuple[Slo, ...]
    router: Router
    devices: int
    gpu_hour_price: float | None = None
    most: int = 64
    start_s: float = 120.0
    stretch_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the trace on a fleet: what it offers, and what came of it.

    `replicas` is how many were wanted, or under an autoscaler how many got requests; `broken`
    names the SLOs that do not hold, None where too few requests came to judge by.
    """

    start_s: float
    offered_per_s: float
    replicas: float
    slo_attainment_ratio: float
    broken: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a fleet over the whole trace.

    Units: gpu_hours in hours of one GPU; cost in the money of the price, None without one.
    """

    name: str
    replicas: int
    gpu_hours: float
    cost: float | None
    slo_attainment_ratio: float
    autoscaler: Autoscaler | None
    stretches: tuple[Stretch, ...]

    @property
    def breaks(self) -> list[Stretch]:
        """The stretches in which an SLO does not hold."""
        return [one for one in self.stretches if one.broken]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fewest replicas at the best limits, and the ways to run them.

    `needed` says for each setting that was tried how many replicas the busiest stretch needs,
    None where no number is enough; `if_slower` how many it takes where steps take as much
    longer as the profile may be wrong.
    """

    limits: EngineLimits
    current: EngineLimits
    aim: FleetAim
    needed: dict[EngineLimits, int | None]
    if_slower: int | None
    error: StatedError
    ways: tuple[Way, ...]

    def as_json(self) -> dict[str, Any]:
        """Return for --json all that was found."""
        return {
            "engine": "shadow",
            "limits": self.limits,
            "current": self.current,
            "router": str(self.aim.router),
            "devices_per_replica": self.aim.devices,
            "gpu_hour_price": self.aim.gpu_hour_price,
            **self.error.as_json(),
            "replicas_if_slower": self.if_slower,
            "needed": [
                {"limits": limits, "replicas": count} for limits, count in self.needed.items()
            ],
            "ways": self.ways,
        }


def plan_fleet(
    predictor: Predictor,
    space: SearchSpace,
    trace: Trace,
    plan: ReplayPlan,
    aim: FleetAim,
    note: Callable[[str], None] = lambda _: None,
) -> FleetPlan:
    """Find the fewest replicas and the best limits for a trace, and simulate ways to run them.

    Raises: NoFeasibleConfigError if no number of replicas keeps the SLOs; EngineError,
        ShadowError, TooFewSamplesError, UsageError.
    """
    sizer = _Sizer(predictor.as_deployed(), trace, plan, aim)
    busiest = sizer.busiest()
    for slo in aim.slos:
        slo.check_carried_by(len(sizer.part(busiest)))
    limits, needed = _best_limits(sizer, space, busiest, note)
    count = needed[limits]
    if count is None:
        slos = ", ".join(map(str, aim.slos))
        message = f"up to {aim.most} replicas do not keep {slos} in the busiest stretch"
        settings = with_widest(limits, space)
        alone = hopeless(sizer.predictor, settings, [sizer.part(busiest)], aim.slos)
        if alone is not None:
            raise NoFeasibleConfigError(f"{message}; {alone.text}", alone.hint)
        raise NoFeasibleConfigError(
            message, "requests that are alone keep them: allow more with --most-replicas"
        )
    note(f"{count} replicas at {limits} for the busiest stretch")
    slower = _Sizer(_slower(sizer.predictor), trace, plan, aim)
    ways = sizer.ways(limits, count, note)
    return FleetPlan(
        limits,
        space.current,
        aim,
        needed,
        slower.fewest(busiest, limits, count),
        predictor.error,
        ways,
    )


def _slower(predictor: Predictor) -> Predictor:
    """Return an engine whose steps take longer by what the profile is typically wrong."""
    profile = predictor.profile
    model = profile.step_model.scaled(1.0 + predictor.wrong_ratio)
    return replace(predictor, profile=replace(profile, step_model=model))


def _best_limits(
    sizer: _Sizer, space: SearchSpace, busiest: int, note: Callable[[str], None]
) -> tuple[EngineLimits, dict[EngineLimits, int | None]]:
    """Return the limits that need the fewest replicas, of those that are best on a replica."""
    needed = {space.current: sizer.fewest(busiest, space.current)}
    best = space.current
    for _ in range(_PASSES):
        share = needed[best] or sizer.aim.most
        note(f"the busiest stretch takes {share} replicas at {best}")
        piece = sizer.part(busiest)
        piece = replace(piece.slice_rows(np.arange(0, len(piece), share)), turns=None)
        mine = Aim(Objective.LATENCY, sizer.aim.slos, sizer.plan, None)
        try:
            workload = Workload.of("traffic", piece, (whole(piece),), mine)
        except TooFewSamplesError:
            workload = Workload.of_piece(piece, sizer.plan, mine)
        seen = sorted(
            predict(sizer.predictor, space, workload).observations, key=lambda o: o.score.order
        )
        for one in seen[:FINALISTS]:
            if one.limits not in needed:
                needed[one.limits] = sizer.fewest(busiest, one.limits, needed[best])
        found = min(needed, key=lambda limits: needed[limits] or math.inf)
        if needed[found] == needed[best]:
            break
        best = found
    return best, needed


class _Sizer:
    """Fleets of one engine on the stretches of one trace."""

    def __init__(
        self, predictor: Predictor, trace: Trace, plan: ReplayPlan, aim: FleetAim
    ) -> None:
        self.predictor, self.plan, self.aim = predictor, replace(plan, load=1.0), aim
        self.trace = at_load(trace, plan.load)
        end_s = float(self.trace.due_s[-1]) + 1e-9
        count = max(1, math.ceil(end_s / aim.stretch_s))
        self.edges_s = np.linspace(0.0, count * aim.stretch_s, count + 1)
        edges = np.searchsorted(self.trace.due_s, self.edges_s)
        self.slices = [slice(a, b) for a, b in pairwise(edges.tolist())]
        self._prepared: dict[int, PreparedTrace] = {}

    def part(self, stretch: int) -> Trace:
        """Return the requests of a stretch that has some, from the first of them on."""
        rows = self.slices[stretch]
        part = self.trace.slice_rows(np.arange(rows.start, rows.stop))
        first_s = float(part.due_s[0])
        zero_s = self.trace.zero_s + first_s
        return replace(part, due_s=part.due_s - first_s, zero_s=zero_s)

    def busiest(self) -> int:
        """Return the stretch with the most tokens."""
        tokens = self.trace.prompt_tokens + self.trace.output_tokens
        return int(np.argmax([tokens[s].sum() for s in self.slices]))

    def fewest(
        self, stretch: int, limits: EngineLimits, at_most: int | None = None
    ) -> int | None:
        """Return how many replicas keep the SLOs in a stretch, None where no number does.

        More replicas are taken to do no worse. `at_most` is a number to begin with.
        """
        low, high = 0, min(self.aim.most, at_most or 1)
        while not self._keeps(stretch, limits, high):
            if high == self.aim.most:
                return None
            low, high = high, min(2 * high, self.aim.most)
        while high - low > 1:
            middle = (low + high) // 2
            if self._keeps(stretch, limits, middle):
                high = middle
            else:
                low = middle
        return high

    def _keeps(self, stretch: int, limits: EngineLimits, replicas: int) -> bool:
        if stretch not in self._prepared:
            self._prepared[stretch] = PreparedTrace(self.part(stretch), self.plan)
        fleet = Fleet(replicas, self.aim.router)
        log = self._simulate(self._prepared[stretch], limits, fleet)
        measured = measure([log.log], self.aim.slos)
        return holds(measured, self.aim.slos)

    def _simulate(
        self, prepared: PreparedTrace, limits: EngineLimits, fleet: Fleet
    ) -> FleetLog:
        engine = self.predictor.simulated(limits)
        return simulate_fleet(engine, prepared, limits, self.plan, fleet)

    def ways(
        self, limits: EngineLimits, count: int, note: Callable[[str], None]
    ) -> tuple[Way, ...]:
        """Simulate the ways to run a fleet of so many at most over the whole trace."""
        prepared = PreparedTrace(self.trace, self.plan)
        fixed, log = self._fixed(prepared, limits, count)
        note(f"fixed: {fixed.replicas} replicas, {fixed.gpu_hours:.3g} GPU hours")
        if len(self.slices) == 1:
            return (fixed,)
        most = fixed.replicas
        wanted = self._wanted(limits, most)
        planned = self._planned(prepared, limits, most, wanted)
        note(f"by stretch: {planned.gpu_hours:.3g} GPU hours")
        return fixed, planned, self._autoscaled(prepared, limits, most, wanted[0], log)

    def _wanted(self, limits: EngineLimits, most: int) -> list[int]:
        """Return how many replicas each stretch needs by itself."""
        counts = [
            (self.fewest(i, limits, most) or most) if b - a >= MIN_REQUESTS else 1
            for i, (a, b) in enumerate((s.start, s.stop) for s in self.slices)
        ]
        return [min(count, most) for count in counts]

    def _fixed(
        self, prepared: PreparedTrace, limits: EngineLimits, count: int
    ) -> tuple[Way, FleetLog]:
        """Return a fleet of one size, of more where another stretch needs them after all."""
        while True:
            log = self._simulate(prepared, limits, Fleet(count, self.aim.router))
            way = self._way("fixed", log, [(0.0, count)])
            if not way.breaks or count >= self.aim.most:
                return way, log
            count += 1

    def _planned(
        self, prepared: PreparedTrace, limits: EngineLimits, most: int, needed: Sequence[int]
    ) -> Way:
        """Return a plan by stretches, with one more where the one before leaves a queue."""
        wanted = list(needed)
        for _ in range(_MENDS):
            changes = self._changes(wanted)
            fleet = Fleet(most, self.aim.router, plan=changes, start_s=self.aim.start_s)
            log = self._simulate(prepared, limits, fleet)
            way = self._way("by stretch", log, changes)
            short = [i for i, one in enumerate(way.stretches) if one.broken]
            if all(wanted[i] == most for i in short):
                break
            for i in short:
                wanted[i] = min(wanted[i] + 1, most)
        return way

    def _changes(self, wanted: Sequence[int]) -> list[tuple[float, int]]:
        """Return when how many are wanted: more ahead by what a start takes, fewer in time.

        Those whose start began before the trace are there from its first request.
        """
        first, found = wanted[0], []
        for i in range(1, len(wanted)):
            ahead_s = self.aim.start_s if wanted[i] > wanted[i - 1] else 0.0
            at_s = float(self.edges_s[i]) - ahead_s
            if at_s < 0:
                first = max(first, wanted[i])
            else:
                found.append((at_s, wanted[i]))
        return [(0.0, first), *found]

    def _autoscaled(
        self,
        prepared: PreparedTrace,
        limits: EngineLimits,
        most: int,
        at_first: int,
        fixed: FleetLog,
    ) -> Way:
        """Return the cheapest autoscaler that keeps the SLOs, or else what keeps them best."""
        rows = self.slices[self.busiest()]
        lines = fixed.log.timelines
        spent_s = np.nansum((lines.last_s - lines.due_s)[rows])
        each = max(1.0, float(spent_s) / self.aim.stretch_s / most)
        tried = []
        for share in _TARGETS:
            scaler = Autoscaler(max(1.0, share * each), at_first)
            fleet = Fleet(
                min(self.aim.most, 2 * most),
                self.aim.router,
                autoscaler=scaler,
                start_s=self.aim.start_s,
            )
            log = self._simulate(prepared, limits, fleet)
            tried.append(self._way("autoscaled", log, (), scaler))
            if not tried[-1].breaks:
                break
        return min(tried, key=lambda way: (len(way.breaks), way.gpu_hours))

    def _way(
        self,
        name: str,
        log: FleetLog,
        changes: Sequence[tuple[float, int]],
        autoscaler: Autoscaler | None = None,
    ) -> Way:
        hours = float(log.on_s.sum()) * self.aim.devices / 3600.0
        price = self.aim.gpu_hour_price
        whole_log = measure([log.log], self.aim.slos)
        return Way(
            name,
            int((log.on_s > 0).sum()),
            hours,
            None if price is None else hours * price,
            whole_log.slo_attainment_ratio or 0.0,
            autoscaler,
            tuple(self._stretches(log, changes)),
        )

    def _stretches(self, log: FleetLog, changes: Sequence[tuple[float, int]]) -> list[Stretch]:
        found = []
        for i, rows in enumerate(self.slices):
            count = rows.stop - rows.start
            if not count:
                continue
            start_s, end_s = float(self.edges_s[i]), float(self.edges_s[i + 1])
            lines = log.log.timelines.rows(np.arange(rows.start, rows.stop))
            measured = measure([replace(log.log, timelines=lines)], self.aim.slos)
            found.append(
                Stretch(
                    start_s,
                    count / (min(end_s, float(self.trace.due_s[-1])) - start_s or 1.0),
                    _replicas_in(log, lines.due_s, changes, (start_s, end_s)),
                    measured.slo_attainment_ratio or 0.0,
                    self._broken(measured, count),
                )
            )
        return found

    def _broken(self, measured: Measurement, count: int) -> tuple[str, ...] | None:
        """Name what does not hold of those SLOs that so many requests can carry."""
        carried = [slo for slo in self.aim.slos if slo.needed_samples <= count]
        if not carried or count < MIN_REQUESTS:
            return None
        return tuple(slo.name for slo in carried if slo.is_broken_by(measured))


def _replicas_in(
    log: FleetLog,
    due_s: Floats,
    changes: Sequence[tuple[float, int]],
    span_s: tuple[float, float],
) -> float:
    """Return how many replicas were wanted in a stretch, or got requests where none says so."""
    if not changes:
        rows = np.searchsorted(log.log.timelines.due_s, (due_s[0], due_s[-1]))
        return float(np.unique(log.places[rows[0] : rows[1] + 1]).size)
    times_s = [at_s for at_s, _ in changes]
    at = np.searchsorted(times_s, 0.5 * sum(span_s), side="right") - 1
    return float(changes[int(at)][1])
