"""How many replicas serve a trace within its SLOs, at which limits, and what that costs.

The fewest replicas are found for each stretch of the trace, an hour by default, by simulating
the fleet behind its router; the limits are those that need the fewest in the busiest one, found
by what is best on a replica of a fleet that has one fewer than those so far. Three
ways to run them are then simulated over the whole trace: as many as the busiest stretch needs
all the time, a plan by stretches with replicas started ahead, and an autoscaler. How sure the
first is is drawn on the stretch that takes the most, and a fourth way is as many as surely do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError, TooFewSamplesError
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing
from tuner.run.loads.alone import hopeless, with_widest
from tuner.run.loads.fleet_plan import FleetAim, FleetOdds, FleetPlan, Stretch, Way
from tuner.run.predict import Predictions, at_once, predict
from tuner.search.budget import MIN_REQUESTS, Aim
from tuner.search.draws import MODEL_ALONE, around
from tuner.search.ladder import FINALISTS
from tuner.search.objective import Objective, Tier
from tuner.search.race import CONFIDENCE, OTHER_TRAFFIC
from tuner.search.space import SearchSpace
from tuner.shadow.fleet import MAX_PREFIX_REPLICAS, Autoscaler, Fleet, FleetLog, simulate_fleet
from tuner.shadow.predictor import Predictor
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine
from tuner.stats import short
from tuner.traffic.resample import at_load
from tuner.traffic.reshape import Router
from tuner.traffic.traces import Trace
from tuner.traffic.windows import whole

# How many limits are tried with one replica fewer, and how often a plan is mended: ours.
_MOST_TRIED, _MENDS = 12, 6
# What an autoscaler is told to fill a replica with, as shares of what is in flight on each
# where the fewest replicas serve the busiest stretch, the cheapest first: ours.
_TARGETS: Final = (2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4)
# A rest of a trace that is shorter than this share of a stretch, and has too few requests to be
# judged, belongs to the one before: a day is seldom recorded to the second. Ours.
_REST: Final = 0.1


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
        raise _none_keeps(sizer, with_widest(limits, space), busiest)
    note(f"{count} replicas at {limits} for the busiest stretch")
    by_stretch = sizer.needed(limits, count)
    ways = sizer.ways(limits, by_stretch, note)
    odds = _odds(sizer, limits, by_stretch, ways[0].replicas)
    if odds.sure is not None and odds.sure[0] != odds.replicas:
        ways = (*ways, sizer.fixed(limits, odds.sure[0], "sure")[0])
        note(f"sure: {odds.sure[0]} replicas, {short(ways[-1].gpu_hours)} GPU hours")
    return FleetPlan(limits, space.current, aim, needed, odds, predictor.error, ways)


def fewest_replicas(
    predictor: Predictor,
    trace: Trace,
    limits: EngineLimits,
    plan: ReplayPlan,
    slos: tuple[Slo, ...],
    first: int,
    most: int,
) -> int | None:
    """Return how many replicas keep the SLOs for a trace, None where up to `most` do not.

    Behind a router that goes by what each has in flight. `first` is the number to begin with.

    Raises: EngineError, ShadowError; UsageError where memory is too little.
    """
    aim = FleetAim(
        slos, Router.LEAST_LOADED, devices=1, most=most, stretch_s=trace.due_s[-1] + 1.0
    )
    return _Sizer(predictor.as_deployed(), trace, plan, aim).fewest(0, limits, first)


def _odds(
    sizer: _Sizer, limits: EngineLimits, needed: Sequence[int | None], told: int
) -> FleetOdds:
    """Return how surely so many serve the stretch that takes the most, and how many surely do.

    Of several that take as many the busiest.
    """
    busiest = sizer.busiest()
    stretch = max(range(len(needed)), key=lambda i: (needed[i] or 0, i == busiest))
    drawing = Drawing(sizer.predictor, Predictions(sizer.workload(sizer.part(stretch))))
    engines = drawing.engines(limits, FEW_DRAWS)
    p_kept: dict[int, float] = {}

    def is_sure(count: int) -> bool:
        p_kept[count] = sizer.p_kept(stretch, limits, count, drawing, engines)
        return p_kept[count] >= CONFIDENCE

    sure = told if is_sure(told) else sizer.least(is_sure, told, told + 1)
    return FleetOdds(
        told,
        p_kept[told],
        None if sure is None else (sure, p_kept[sure]),
        float(sizer.edges_s[stretch]),
        OTHER_TRAFFIC if drawing.stretches else MODEL_ALONE,
    )


def _none_keeps(
    sizer: _Sizer, settings: Sequence[EngineLimits], busiest: int
) -> NoFeasibleConfigError:
    """Say that no number of replicas keeps the SLOs, and what to do about it."""
    aim = sizer.aim
    slos = ", ".join(map(str, aim.slos))
    message = f"up to {aim.most} replicas do not keep {slos} in the busiest stretch"
    alone = hopeless(sizer.predictor, settings, [sizer.part(busiest)], aim.slos)
    if alone is not None:
        return NoFeasibleConfigError(f"{message}; {alone.text}", alone.hint)
    is_full = aim.router is Router.PREFIX and aim.most >= MAX_PREFIX_REPLICAS
    return NoFeasibleConfigError(
        message,
        "requests that are alone keep them: "
        + ("choose --router least-loaded" if is_full else "allow more with --most-replicas"),
    )


def _best_limits(
    sizer: _Sizer, space: SearchSpace, busiest: int, note: Callable[[str], None]
) -> tuple[EngineLimits, dict[EngineLimits, int | None]]:
    """Return the limits that need the fewest replicas, and what those before them need.

    Of those that serve well what a replica gets of one fewer than the fewest so far, the first
    that keeps the SLOs with so many is the next, until none does.
    """
    best, most = space.current, sizer.aim.most
    needed = {best: sizer.fewest(busiest, best)}
    while (count := needed[best] or most + 1) > 1:
        takes = count if count <= most else f"more than {most}"
        note(f"the busiest stretch takes {takes} replicas at {best}")
        serve = _serve_well(sizer, space, sizer.share(busiest, best, count - 1))
        better = (x for x in serve if x != best and sizer.keeps(busiest, x, count - 1))
        found = next(better, None)
        if found is None:
            break
        best, needed[found] = found, sizer.fewest(busiest, found, count - 1)
    return best, needed


def _serve_well(sizer: _Sizer, space: SearchSpace, share: Trace) -> list[EngineLimits]:
    """Return the limits that keep the SLOs on the share of a replica, else those nearest to it.

    The best first, and one of those that do the same.
    """
    seen = predict(sizer.predictor, space, sizer.workload(share)).observations
    order = {one.score.order: one for one in reversed(seen)}
    ranked = [order[key] for key in sorted(order)]
    good = sum(one.score.tier is Tier.GOOD for one in ranked)
    return [one.limits for one in ranked[: min(good, _MOST_TRIED) or FINALISTS]]


class _Sizer:
    def __init__(
        self, predictor: Predictor, trace: Trace, plan: ReplayPlan, aim: FleetAim
    ) -> None:
        self.predictor, self.plan, self.aim = predictor, replace(plan, load=1.0), aim
        self.trace = at_load(trace, plan.load)
        end_s = float(self.trace.due_s[-1]) + 1e-9
        full = math.floor(end_s / aim.stretch_s)
        rest_s = end_s - full * aim.stretch_s
        behind = len(self.trace) - np.searchsorted(self.trace.due_s, end_s - rest_s)
        is_short = full > 0 and rest_s < _REST * aim.stretch_s and behind < MIN_REQUESTS
        count = full if is_short else full + 1
        self.edges_s = np.linspace(0.0, count * aim.stretch_s, count + 1)
        self.edges_s[-1] = max(self.edges_s[-1], end_s)
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

    def share(self, stretch: int, limits: EngineLimits, replicas: int) -> Trace:
        """Return the requests of a stretch that the busiest of so many replicas gets."""
        part, fleet = self.part(stretch), Fleet(replicas, self.aim.router)
        places = self._simulate(self._prepare(stretch), limits, fleet).places
        tokens = np.bincount(places, part.prompt_tokens + part.output_tokens)
        return part.slice_rows(places == tokens.argmax()).shifted()

    def fewest(self, stretch: int, limits: EngineLimits, first: int = 1) -> int | None:
        """Return how many replicas keep the SLOs in a stretch, None where no number does.

        `first` is the number to begin with.
        """
        return self.least(lambda count: self.keeps(stretch, limits, count), 0, first)

    def least(self, keeps: Callable[[int], bool], low: int, first: int) -> int | None:
        """Return the least number above `low` that keeps the SLOs, None where none does.

        More replicas are taken to do no worse.
        """
        if low >= self.aim.most:
            return None
        high, step = min(self.aim.most, first), 1
        while not keeps(high):
            if high == self.aim.most:
                return None
            low, high, step = high, min(high + step, self.aim.most), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            if keeps(middle):
                high = middle
            else:
                low = middle
        return high

    def keeps(self, stretch: int, limits: EngineLimits, replicas: int) -> bool:
        """Whether so many keep the SLOs that a stretch can carry, and what comes in it.

        They do that if all of it is answered when the next stretch begins, in whatever bursts
        it came, or if it is sustained.
        """
        used, bears = self._judge(stretch, limits, replicas)
        return used <= 1 and bears

    def _judge(
        self,
        stretch: int,
        limits: EngineLimits,
        replicas: int,
        drawn: PreparedTrace | None = None,
        engine: SimulatedEngine | None = None,
    ) -> tuple[float, bool]:
        """Return how much of its tightest SLO is used in a stretch, and if all is borne.

        The traffic may be `drawn`, and the engine another that is as possible.
        """
        fleet = Fleet(replicas, self.aim.router)
        traffic = self._prepare(stretch) if drawn is None else drawn
        log = self._simulate(traffic, limits, fleet, engine).log
        measured = measure([log], self.aim.slos)
        rows, is_last = self.slices[stretch], stretch + 1 == len(self.slices)
        carried = self._carried(rows.stop - rows.start)
        used = max(((slo.slack_ratio(measured) or 0.0) + 1 for slo in carried), default=0.0)
        ends_s = float(self.edges_s[stretch + 1] - self.trace.due_s[rows.start])
        bears = measured.is_sustained or (not is_last and log.clock_s <= ends_s)
        return used if measured.completed else math.inf, bears

    def p_kept(
        self,
        stretch: int,
        limits: EngineLimits,
        replicas: int,
        drawing: Drawing,
        engines: Sequence[SimulatedEngine],
    ) -> float:
        """Return in which share of a stretch's draws so many keep the SLOs and bear the load.

        Resampled traffic is less bound together: only how it varies is taken from it.
        Raises: EngineError; UsageError where memory is too little.
        """
        workload = drawing.predictions.workload

        def judged(k: int) -> tuple[float, bool]:
            (drawn,) = drawing.other_traffic(k).traffic_at(workload.plan)
            return self._judge(stretch, limits, replicas, drawn, engines[k])

        found = at_once(self.predictor, workload, judged, range(FEW_DRAWS))
        used, bears = (np.array(column) for column in zip(*found, strict=True))
        at = np.array([[self._judge(stretch, limits, replicas)[0]]])
        moved = around(at, used[:, None, None], drawing.wider)[:, 0, 0]
        return float(((moved <= 1.0) & bears).mean())

    def workload(self, traffic: Trace) -> Workload:
        """Return traffic of a fleet as it is replayed and judged."""
        aim = Aim(Objective.LATENCY, self.aim.slos, self.plan, None)
        try:
            return Workload.of("traffic", traffic, (whole(traffic),), aim)
        except TooFewSamplesError:
            return Workload.of_piece(traffic, self.plan, aim)

    def _prepare(self, stretch: int) -> PreparedTrace:
        if stretch not in self._prepared:
            self._prepared[stretch] = PreparedTrace(self.part(stretch), self.plan)
        return self._prepared[stretch]

    def _simulate(
        self,
        prepared: PreparedTrace,
        limits: EngineLimits,
        fleet: Fleet,
        engine: SimulatedEngine | None = None,
    ) -> FleetLog:
        engine = engine or self.predictor.simulated(limits)
        return simulate_fleet(engine, prepared, limits, self.plan, fleet)

    def ways(
        self,
        limits: EngineLimits,
        needed: Sequence[int | None],
        note: Callable[[str], None],
    ) -> tuple[Way, ...]:
        """Simulate the ways to run a fleet over the whole trace.

        As many are on as each stretch needs, but for one that no number is enough for.
        """
        fixed, log = self._fixed(limits, needed)
        note(f"fixed: {fixed.replicas} replicas, {short(fixed.gpu_hours)} GPU hours")
        if len(self.slices) == 1:
            return (fixed,)
        most = fixed.replicas
        wanted = [most if n is None else n for n in needed]
        planned = self._planned(limits, most, wanted)
        note(f"by stretch: {short(planned.gpu_hours)} GPU hours")
        return fixed, planned, self._autoscaled(limits, needed, log)

    def needed(self, limits: EngineLimits, count: int) -> list[int | None]:
        """Return how many replicas each stretch needs by itself, None where none are enough.

        `count` is how many the busiest needs.
        """
        busiest = self.busiest()
        return [
            count
            if i == busiest
            else self.fewest(i, limits, count)
            if rows.stop - rows.start >= MIN_REQUESTS
            else 1
            for i, rows in enumerate(self.slices)
        ]

    @cached_property
    def _whole(self) -> PreparedTrace:
        return PreparedTrace(self.trace, self.plan)

    def fixed(
        self, limits: EngineLimits, count: int, name: str = "fixed"
    ) -> tuple[Way, FleetLog]:
        """Simulate a fleet of one size over the whole trace."""
        log = self._simulate(self._whole, limits, Fleet(count, self.aim.router))
        return self._way(name, log, [(0.0, count)]), log

    def _fixed(
        self, limits: EngineLimits, needed: Sequence[int | None]
    ) -> tuple[Way, FleetLog]:
        """Return a fleet of one size: of more where a stretch leaves a queue to the next."""
        tried: dict[int, tuple[Way, FleetLog]] = {}

        def keeps(count: int) -> bool:
            tried[count] = self.fixed(limits, count)
            return self._is_kept(tried[count][0], needed)

        first = max(count for count in needed if count is not None)
        return tried[self.least(keeps, first - 1, first) or first]

    def _short(self, way: Way) -> list[int]:
        """Return in which stretches an SLO does not hold."""
        busy = [i for i, rows in enumerate(self.slices) if rows.stop > rows.start]
        return [i for i, one in zip(busy, way.stretches, strict=True) if one.broken]

    def _is_kept(self, way: Way, needed: Sequence[int | None]) -> bool:
        return all(needed[i] is None for i in self._short(way))

    def _planned(self, limits: EngineLimits, most: int, needed: Sequence[int]) -> Way:
        """Return a plan by stretches, with one more where the one before leaves a queue."""
        wanted = list(needed)
        for _ in range(_MENDS):
            changes = self._changes(wanted)
            fleet = Fleet(most, self.aim.router, plan=changes, start_s=self.aim.start_s)
            log = self._simulate(self._whole, limits, fleet)
            way = self._way("by stretch", log, changes)
            short = self._short(way)
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
        self, limits: EngineLimits, needed: Sequence[int | None], fixed: FleetLog
    ) -> Way:
        """Return the cheapest autoscaler that keeps the SLOs, or else what keeps them best."""
        rows, most = self.slices[self.busiest()], fixed.on_s.size
        lines = fixed.log.timelines
        spent_s = np.nansum((lines.last_s - lines.due_s)[rows])
        each = max(1.0, float(spent_s) / self.aim.stretch_s / most)
        tried = []
        for share in _TARGETS:
            scaler = Autoscaler(max(1.0, share * each), needed[0] or most)
            fleet = Fleet(
                min(self.aim.most, 2 * most),
                self.aim.router,
                autoscaler=scaler,
                start_s=self.aim.start_s,
            )
            log = self._simulate(self._whole, limits, fleet)
            tried.append(self._way("autoscaled", log, (), scaler))
            if self._is_kept(tried[-1], needed):
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
                    _replicas_in(log, rows, changes, (start_s, end_s)),
                    measured.slo_attainment_ratio or 0.0,
                    self._broken(measured, count),
                )
            )
        return found

    def _carried(self, count: int) -> list[Slo]:
        return [slo for slo in self.aim.slos if slo.needed_samples <= count]

    def _broken(self, measured: Measurement, count: int) -> tuple[str, ...] | None:
        """Name what does not hold of those SLOs that so many requests can carry."""
        carried = self._carried(count)
        if not carried or count < MIN_REQUESTS:
            return None
        return tuple(slo.name for slo in carried if slo.is_broken_by(measured))


def _replicas_in(
    log: FleetLog,
    rows: slice,
    changes: Sequence[tuple[float, int]],
    span_s: tuple[float, float],
) -> float:
    """Return how many replicas were wanted in a stretch, or got requests where none says so."""
    if not changes:
        return float(np.unique(log.places[rows]).size)
    times_s = [at_s for at_s, _ in changes]
    at = np.searchsorted(times_s, 0.5 * sum(span_s), side="right") - 1
    return float(changes[int(at)][1])
