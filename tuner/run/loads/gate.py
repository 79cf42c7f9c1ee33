"""Which gate keeps goodput highest under overload, and who suffers from it.

Gates are replayed in the shadow, the same requests at each load. One gate has to serve all
loads, since nobody changes it when a burst comes: of those that were tried it is the one that
falls least behind the best at its worst load. Loads are judged by the requests within every
SLO per second in which requests came; who is turned away, or cut off, is not among them. What
comes before a window meets the gate too, and is not counted anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError, ShadowError, UsageError
from tuner.gate import GateLimits
from tuner.replay.metrics import Measurement, good_requests, measure
from tuner.replay.slo import Slo
from tuner.replay.timeline import Outcome
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing, Replays
from tuner.run.loads.alone import hopeless
from tuner.run.loads.fleet import fewest_replicas
from tuner.run.predict import Predictions, at_once, offered_per_s
from tuner.search.race import CONFIDENCE
from tuner.shadow.calibration import StatedError
from tuner.shadow.predictor import Predictor
from tuner.shadow.simulated import SimulatedEngine
from tuner.stats import Bools, Estimate, Floats

# What is tried of each, ours: requests in the engine and before the gate as multiples of
# max_num_seqs, time-outs as shares of the time that an SLO leaves, answers by their quantiles.
IN_FLIGHT: Final = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
QUEUED: Final = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
WAITS: Final = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)
LONGEST: Final = (0.75, 0.9, 0.95, 0.99)
# Rounds in which each is tried with the others held: ours, later ones seldom find more.
ROUNDS: Final = 3
# Gates within this share of each other are one: ours; the larger one turns fewer away then.
SAME: Final = 0.005
# More replicas than these are not simulated: ours, as many as a plan of a fleet tries.
MOST_SIMULATED: Final = 64
# The load at which is shown who suffers, or the largest below it.
SHOWN_LOAD: Final = 2.0


@dataclass(frozen=True, slots=True)
class GatedLoad:
    """What the gate does at one load, a multiple of the recorded arrivals.

    `elsewhere` is by how much the goodput is larger with the gate on other traffic: draws of
    traffic of the kind and of models that are as possible; `odds` is the share of draws in
    which it gains. So many `replicas` hold the load within the SLOs without a gate, None where
    none are known to.

    Units: goodput in requests per second in which requests came.
    """

    load: float
    before: Measurement
    gated: Measurement
    elsewhere: Estimate
    odds: float
    replicas: int | None

    @property
    def gained_per_s(self) -> float:
        """By how much the goodput of the replayed requests is larger with the gate."""
        return goodput_per_s(self.gated) - goodput_per_s(self.before)

    def as_json(self) -> dict[str, Any]:
        """Return the figures for --json."""
        names = ("offered", "completed", "refused", "turned_away", "truncated", "timed_out")
        both = {"without": self.before, "with_gate": self.gated}
        figures = {
            key: {
                **{name: getattr(m, name) for name in names},
                "goodput_per_s": goodput_per_s(m),
                "slo_attainment_ratio": m.slo_attainment_ratio,
            }
            for key, m in both.items()
        }
        return {
            "load": self.load,
            "offered_per_s": self.before.offered_per_s,
            **figures,
            "gained_per_s": self.gained_per_s,
            "gained_on_other_traffic_per_s": asdict(self.elsewhere),
            "probability_better": self.odds,
            "replicas": self.replicas,
        }


@dataclass(frozen=True, slots=True)
class Affected:
    """What becomes of the requests with prompts or answers of some lengths, as shares of them.

    Units: tokens, the first and the last included.
    """

    what: str
    first_tokens: int
    last_tokens: int
    requests: int
    good_before: float
    good: float
    turned_away: float
    truncated: float


@dataclass(frozen=True, slots=True)
class GateAnswer:
    """The gate for an engine at its limits, and what it does at each load.

    `affected` is told at `shown_load`. `capacity` is the largest load at which the SLOs hold
    without a gate, like every load a multiple of the recorded arrivals, and `in_flight` the
    mean number of requests in the engine then; None where they hold at none.
    """

    limits: EngineLimits
    gate: GateLimits
    slos: tuple[Slo, ...]
    error: StatedError
    loads: tuple[GatedLoad, ...]
    shown_load: float
    affected: tuple[Affected, ...]
    capacity: float | None
    in_flight: float | None

    @property
    def pays(self) -> bool:
        """Whether the gate is surely better at any of the loads."""
        return any(at.odds >= CONFIDENCE for at in self.loads)

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {
            "engine": "shadow",
            "limits": self.limits,
            "gate": asdict(self.gate),
            "slos": [str(slo) for slo in self.slos],
            **self.error.as_json(),
            "pays": self.pays,
            "loads": [at.as_json() for at in self.loads],
            "shown_load": self.shown_load,
            "affected": [asdict(group) for group in self.affected],
            "capacity": self.capacity,
            "in_flight_at_capacity": self.in_flight,
        }


def goodput_per_s(m: Measurement) -> float:
    """Return the requests within every SLO, per second in which requests came.

    With the last answer as the end, as elsewhere, a queue that is worked off would count twice
    against whoever has no gate.
    """
    return (m.slo_attainment_ratio or 0.0) * (m.offered_per_s or 0.0)


def find_gate(
    predictor: Predictor,
    limits: EngineLimits,
    workload: Workload,
    loads: Sequence[float],
    note: Callable[[str], None] = lambda _: None,
) -> GateAnswer:
    """Search for the gate of an engine at its limits, for a workload at each of the loads.

    The loads are multiples of that which the workload's pieces are at; those of the answer are
    of the recorded arrivals.

    Shapes: loads is [n], n >= 1, ascending.
    Raises: NoFeasibleConfigError if a gate would refuse everything; ShadowError where the
        simulator must not be relied on; UsageError if all requests come at one instant.
    """
    if not offered_per_s(workload.pieces):
        raise UsageError(
            "all requests come at one instant, and a gate is judged by seconds in which they "
            "came",
            "bound who is in the engine by max_num_seqs: tune plan says by which",
        )
    if predictor.doubt:
        raise ShadowError(
            f"a gate is searched for by the simulator alone, and {predictor.doubt}",
            "profile the engine with an option or a release of vLLM that it knows",
        )
    search = _Search(predictor, limits, workload, tuple(loads))
    gate = search.run()
    note(f"{len(search.goodput)} gates replayed at {len(loads)} loads")
    base = workload.pieces[0].load
    shown = max([load for load in loads if load * base <= SHOWN_LOAD], default=loads[0])
    most = predictor.measure_capacity(workload.pieces, limits, workload.plan, workload.slos)
    capacity = most.capacity if isinstance(most, Measurement) and most.capacity else None
    return GateAnswer(
        limits=limits,
        gate=gate,
        slos=workload.slos,
        error=predictor.error,
        loads=search.at_loads(gate, capacity),
        shown_load=shown * base,
        affected=tuple(search.affected(gate, shown)),
        capacity=capacity,
        in_flight=most.running.mean + most.queue_depth.mean
        if isinstance(most, Measurement) and capacity
        else None,
    )


@dataclass(frozen=True)
class _Search:
    """Gates replayed on the same requests; what each came to is kept."""

    predictor: Predictor
    limits: EngineLimits
    workload: Workload
    loads: tuple[float, ...]

    @cached_property
    def goodput(self) -> dict[GateLimits | None, Floats]:
        """Goodput at each load of every gate that was replayed, None being none."""
        return {}

    @cached_property
    def _recorded(self) -> Replays:
        return Replays(self.workload, self.workload.pieces)

    @cached_property
    def _engine(self) -> SimulatedEngine:
        return self.predictor.simulated(self.limits)

    def run(self) -> GateLimits:
        """Try each part of a gate in turn; return the best of all. Raises: as `find_gate`."""
        best = GateLimits(self.limits.max_num_seqs)
        self._try([None, best, GateLimits(1)])
        for _ in range(ROUNDS):
            began = best
            for name, values in self._ladders().items():
                self._try([replace(best, **{name: value}) for value in values])
                best = self._best()
            if best == began:
                break
        if not any(reached.any() for reached in self.goodput.values()):
            slos = ", ".join(map(str, self.workload.slos))
            message = f"a gate that keeps to {slos} would refuse everything: not one request is"
            alone = hopeless(
                self.predictor, [self.limits], self.workload.pieces, self.workload.slos
            )
            if alone is not None:
                raise NoFeasibleConfigError(f"{message} within them; {alone.text}", alone.hint)
            raise NoFeasibleConfigError(
                f"{message} within them, not even alone in the engine",
                "allow more time, or change the engine: tune plan says what others reach",
            )
        return best

    def _ladders(self) -> Mapping[str, Sequence[Any]]:
        cap = self.limits.max_num_seqs
        answers = np.concatenate([x.output_tokens[x.led_in :] for x in self.workload.pieces])
        longest = np.unique(np.quantile(answers, LONGEST).astype(np.int64)).tolist()
        bounds = [
            slo.bound_s for slo in self.workload.slos if slo.metric in ("ttft_s", "e2e_s")
        ]
        waits = [share * min(bounds) for share in WAITS] if bounds else []
        return {
            "max_in_flight": sorted({1, *(max(1, round(cap * k)) for k in IN_FLIGHT)}),
            "max_queued": sorted({round(cap * k) for k in QUEUED}),
            "queue_timeout_s": [None, *(float(f"{wait_s:.3g}") for wait_s in waits)],
            "max_output_tokens": [None, *(n for n in longest if n < answers.max())],
        }

    def _try(self, gates: Sequence[GateLimits | None]) -> None:
        new = [gate for gate in dict.fromkeys(gates) if gate not in self.goodput]

        def reached(place: tuple[GateLimits | None, float]) -> float:
            return goodput_per_s(self._measure(self._recorded, self._engine, *place))

        places = [(gate, load) for gate in new for load in self.loads]
        found = at_once(self.predictor, self.workload, reached, places)
        rows = np.reshape(found, (len(new), len(self.loads)))
        self.goodput.update(zip(new, rows, strict=True))

    def _measure(
        self, replays: Replays, engine: SimulatedEngine, gate: GateLimits | None, load: float
    ) -> Measurement:
        plan = replace(self.workload.plan, load=load, gate=gate)
        statistics = self.workload.scoring.statistics
        return measure(replays.logs(engine, self.limits, plan), self.workload.slos, statistics)

    def _best(self) -> GateLimits:
        """Return the gate that is least behind at its worst load, the widest of like ones."""
        top = np.maximum(np.max(list(self.goodput.values()), axis=0), 1e-12)
        worst = {
            gate: round(float((1 - reached / top).max()) / SAME)
            for gate, reached in self.goodput.items()
            if gate is not None
        }

        def order(gate: GateLimits) -> tuple[float, ...]:
            longest = gate.max_output_tokens or math.inf
            wait_s = gate.queue_timeout_s or math.inf
            return (worst[gate], -longest, -gate.max_queued, -wait_s, -gate.max_in_flight)

        return min(worst, key=order)

    def at_loads(self, gate: GateLimits, capacity: float | None) -> tuple[GatedLoad, ...]:
        """Return what a gate does at each load, and how sure that is by draws.

        `capacity` is what one replica bears.
        """
        drawing = Drawing(self.predictor, Predictions(self.workload))
        drawn = drawing.possible(self.limits, FEW_DRAWS)

        def drawn_gains(k: int) -> list[float]:
            return [
                goodput_per_s(self._measure(*drawn[k], gate, load))
                - goodput_per_s(self._measure(*drawn[k], None, load))
                for load in self.loads
            ]

        gains = np.array(at_once(self.predictor, self.workload, drawn_gains, range(FEW_DRAWS)))
        middles = np.median(gains, axis=0)  # where a gate does nothing that stays nothing
        gains = middles + drawing.wider * (gains - middles)
        shares = (0.5, 0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
        found_in_draws = np.quantile(gains, shares, axis=0)
        found, base = [], self.workload.pieces[0].load
        for i, load in enumerate(self.loads):
            before, gated = (
                self._measure(self._recorded, self._engine, g, load) for g in (None, gate)
            )
            middle, low, high = found_in_draws[:, i].tolist()
            elsewhere = Estimate(middle, low, high, FEW_DRAWS)
            odds = float((gains[:, i] > 0).mean())
            needed = self._replicas(load, capacity)
            found.append(GatedLoad(load * base, before, gated, elsewhere, odds, needed))
        return tuple(found)

    def _replicas(self, load: float, capacity: float | None) -> int | None:
        """Return how many replicas hold a load within the SLOs, None where none are known to.

        Behind a router, where they share bursts and each sees less of a prefix come again: it
        begins with as many as would if each had users of its own. Those are told where they
        are more than are simulated, or memory is too little for that.
        """
        if capacity is None:
            return None
        (piece,), slos = self.workload.pieces, self.workload.slos
        alone = math.ceil(load * piece.load / capacity)
        if alone == 1 or alone > MOST_SIMULATED:
            return alone
        plan, trace = replace(self.workload.plan, load=load), piece.all_measured()
        try:
            return fewest_replicas(
                self.predictor, trace, self.limits, plan, slos, alone, MOST_SIMULATED
            )
        except UsageError:
            return alone

    def affected(self, gate: GateLimits, load: float) -> Iterator[Affected]:
        """Tell what becomes of a third of the requests each, by prompt and by answer."""
        plan = replace(self.workload.plan, load=load)
        traces = [piece.trace for piece in self._recorded.traffic_at(plan)]
        traces = [trace.slice_rows(trace.is_measured) for trace in traces]
        before, _ = self._fates(None, load)
        good, outcome = self._fates(gate, load)
        for what in ("prompt", "answer"):
            column = "prompt_tokens" if what == "prompt" else "output_tokens"
            tokens = np.concatenate([getattr(trace, column) for trace in traces])
            for rows in np.array_split(np.argsort(tokens, kind="stable"), 3):
                if not rows.size:
                    continue
                yield Affected(
                    what,
                    int(tokens[rows].min()),
                    int(tokens[rows].max()),
                    int(rows.size),
                    float(before[rows].mean()),
                    float(good[rows].mean()),
                    float((outcome[rows] == int(Outcome.TURNED_AWAY)).mean()),
                    float((outcome[rows] == int(Outcome.TRUNCATED)).mean()),
                )

    def _fates(self, gate: GateLimits | None, load: float) -> tuple[Bools, Any]:
        """Mark the requests within their SLOs, and return how all of them ended."""
        plan = replace(self.workload.plan, load=load, gate=gate)
        lines = [x.timelines for x in self._recorded.logs(self._engine, self.limits, plan)]
        good = [good_requests(line, self.workload.slos) for line in lines]
        return np.concatenate(good), np.concatenate([line.outcome for line in lines])
