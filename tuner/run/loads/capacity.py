"""How much load the answer bears: predicted, and confirmed live for the winner.

A line of every result with an SLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError, ReplayError
from tuner.replay.metrics import Measurement
from tuner.replay.runner import LARGEST_LOAD, MIN_LOAD, Failure, holds, measure_capacity
from tuner.run.context import RunContext, Workload
from tuner.run.drawing import Drawing, Replays
from tuner.run.predict import Predictions, at_once, recorded_per_s
from tuner.run.records import CapacityRecord
from tuner.run.time_plan import duration_s
from tuner.run.trial_runner import TrialRunner
from tuner.search.objective import Objective
from tuner.search.race import CONFIDENCE, RaceDecision
from tuner.search.trials import Phase
from tuner.shadow.predictor import Predictor
from tuner.shadow.simulated import SimulatedEngine
from tuner.stats import short

# Draws of what one setting bears: ours, for an interval.
LOAD_DRAWS = 24
# Between the outer quantiles of so few capacities lie five draws in six: so much further apart
# lie nine in ten of normal ones, and those further out are as far out as one stray draw.
FEW_WIDER = 1.2
# A live replay may take this many times what was predicted before it does not fit: ours.
COST_RATIO = 1.5
# The share of the budget that it may take where capacity is not what is optimised: ours.
ASIDE_SHARE = 0.1
# An answer that bears less than this share of what the current configuration does has a caveat:
# ours, twice how far a told capacity usually is off.
HEADROOM_KEPT = 0.9
_NOT_REPLAYED = (
    "how much load {limits} bears stays a prediction, it could not be replayed live: {cause}"
)
_NOT_THERE = ", not tried live: the engine that was measured on is predicted not to bear it"


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """The loads that winner and current configuration bear, as multiples of the recorded one.

    None where the SLOs hold at no load. `interval` is where the winner's lies, nine times in
    ten, on other traffic of the kind; None where it was not drawn. `is_shown` says whether what
    was replayed is long enough to show what becomes of a queue at the winner's load, `live`
    whether the SLOs held at it on the engine itself, None where nobody looked, and `can_look`
    whether they are predicted to hold on that engine, which may have other KV blocks than one
    that is started with the winner.
    """

    winner: float | None
    current: float | None
    live: bool | None
    is_shown: bool = True
    interval: tuple[float, float] | None = None
    can_look: bool = True

    @property
    def text(self) -> str:
        """Say it in a sentence.

        >>> CapacityResult(1.7, 1.2, None).text
        "holds up to 1.7 x today's load (the current one 1.2 x), predicted"
        >>> CapacityResult(1.7, 1.2, None, interval=(1.52, 1.88)).text
        "holds up to 1.7 x today's load, interval 1.5 … 1.9 (the current one 1.2 x), predicted"
        """
        if self.winner is None:
            return "the SLOs hold at no load, predicted"
        most = f"{short(self.winner, 2)} x"
        before = "none" if self.current is None else f"{short(self.current, 2)} x"
        judged = {
            None: "predicted" if self.can_look else f"predicted{_NOT_THERE}",
            True: "predicted and confirmed live",
            False: "predicted, but live it did not hold at that load",
        }[self.live]
        if not self.is_shown:
            return (
                f"beyond what this window can show: it is too short to see a queue grow; never "
                f"above {most} today's load (the current one {before}), {judged}"
            )
        holds = f"holds up to {most} today's load"
        if self.interval is not None:
            low, high = self.interval
            holds += f", interval {short(low, 2)} … {short(high, 2)}"
        return f"{holds} (the current one {before}), {judged}"

    @property
    def costs_headroom(self) -> bool:
        """Whether the winner bears clearly less than the current configuration does."""
        is_known = self.is_shown and self.winner is not None and self.current is not None
        return is_known and (self.winner or 0.0) < HEADROOM_KEPT * (self.current or 0.0)

    @property
    def record(self) -> CapacityRecord:
        """The loads for result.json."""
        return CapacityRecord(
            winner=self.winner,
            current=self.current,
            confirmed_live=self.live,
            is_shown=self.is_shown,
            text=self.text,
            interval=self.interval,
        )


def predict_capacity(
    predictor: Predictor, workload: Workload, decision: RaceDecision, current: EngineLimits
) -> CapacityResult:
    """Predict how much load who is told of and the current configuration bear.

    Raises: ShadowError, UsageError.
    """
    found: dict[EngineLimits, Measurement] = {}
    for limits in dict.fromkeys([decision.told, current]):
        outcome = predictor.measure_capacity(
            workload.pieces, limits, workload.plan, workload.slos
        )
        if isinstance(outcome, Measurement) and outcome.capacity:
            found[limits] = outcome
    best, before = found.get(decision.told), found.get(current)
    current_load = before.capacity if before is not None else None
    if best is None:
        return CapacityResult(None, current_load, None)
    is_shown, borne = _is_shown(best, workload.pieces[0].load), best.capacity or 0.0
    lies = draw_capacity(predictor, workload, decision.told, borne) if is_shown else None
    return CapacityResult(borne, current_load, None, is_shown=is_shown, interval=lies)


def draw_capacity(
    predictor: Predictor, workload: Workload, limits: EngineLimits, told: float, engine: int = 0
) -> tuple[float, float] | None:
    """Return between which loads lies what a setting bears, nine times in ten.

    That is of other traffic of the kind, as long as the recorded, and by models as possible as
    this one, in multiples of the recorded load; what is `told` of the recorded lies within it.
    Where no other traffic can be drawn it is of models alone. None where vLLM's own
    scheduler is asked, which takes too long.

    Raises: ShadowError, UsageError.
    """
    if predictor.doubt:
        return None
    drawing = Drawing(predictor, Predictions(workload), engine)
    found = _capacities(drawing, predictor, workload, limits)
    if not found:
        return None
    logs = np.log(np.maximum(found, MIN_LOAD))
    wide = np.exp(logs.mean() + FEW_WIDER * drawing.wider * (logs - logs.mean()))
    low, high = np.quantile(wide, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2]).tolist()
    return min(low, told), max(high, told)


def _capacities(
    drawing: Drawing, predictor: Predictor, workload: Workload, limits: EngineLimits
) -> list[float]:
    """Return how much each draw bears, as a multiple of the recorded load.

    That other traffic comes at another rate by chance is taken out; requests that all come at
    once have none. Where a setting fails, there is none.
    """
    possible = drawing.possible(limits, LOAD_DRAWS)
    usual_per_s = recorded_per_s(workload.pieces)

    def bears(drawn: tuple[Replays, SimulatedEngine]) -> float | None:
        replays, engine = drawn
        at = partial(replays.measure, engine, limits)
        found = measure_capacity(at, replays.traffic, workload.plan.load, workload.slos)
        if isinstance(found, Failure):
            return None
        rate = recorded_per_s(replays.traffic) / usual_per_s if usual_per_s else 1.0
        return (found.capacity or 0.0) * rate

    found = at_once(predictor, workload, bears, possible)
    return [load for load in found if load is not None]


def tell_headroom(context: RunContext, found: CapacityResult) -> None:
    """Add a caveat where the answer is paid for with load that it bears no more."""
    if found.costs_headroom:
        ours, theirs = (short(load or 0.0, 2) for load in (found.winner, found.current))
        context.caveats.add(Caveat.LESS_HEADROOM)
        context.caveat_texts[Caveat.LESS_HEADROOM] = (
            f"the answer bears up to {ours} x today's load, the current configuration "
            f"{theirs} x, predicted: where traffic grows, --objective capacity or a higher "
            "--load chooses for that"
        )


def _is_shown(at_most: Measurement, recorded: float) -> bool:
    """Whether a replay at its capacity was long enough, and the capacity an edge at all."""
    is_edge = (at_most.capacity or 0.0) < LARGEST_LOAD * recorded
    return is_edge and at_most.spans_lives


def confirm_capacity(
    runner: TrialRunner,
    predictor: Predictor,
    workloads: Sequence[Workload],
    winner: EngineLimits,
    found: CapacityResult,
) -> CapacityResult:
    """Replay live what was predicted, at the load the winner is said to bear, if time allows.

    The same requests, judged in the same way: the first of the workloads, on which the capacity
    was predicted, or the first of the others that time allows. Only where by `predictor`, which
    predicts the runner's engine, that load is held there too. Where capacity is not what is
    optimised, a part of the budget at most. Where the engine fails, what was predicted stays,
    and that is told.

    Raises: ShadowError, UsageError.
    """
    if found.winner is None:
        return found
    engine, context = runner.engine, runner.context
    start_s = 0.0 if engine.started is not None else engine.start_s
    is_aside = context.aim.objective is not Objective.CAPACITY
    left_s = context.left_s
    if is_aside:
        left_s = min(left_s, ASIDE_SHARE * context.budget.total_s)
    for workload in workloads:
        load = found.winner / workload.pieces[0].load
        plan = replace(workload.plan, load=load)
        predicted = predictor.measure(workload.pieces, winner, plan, workload.slos)
        if isinstance(predicted, Failure) or not holds(predicted, workload.slos):
            return replace(found, can_look=workload is not workloads[0])
        if left_s < start_s + COST_RATIO * duration_s(workload, predicted):
            continue
        at_load = replace(workload, plan=plan)
        try:
            outcome, _ = runner.measure(winner, Phase.CAPACITY, at_load, context.within_time)
        except (EngineError, ReplayError) as error:
            context.listener.note(_NOT_REPLAYED.format(limits=winner, cause=error.message))
            return found
        cause = outcome.cause if isinstance(outcome, Failure) else outcome.cut_reason
        if isinstance(outcome, Failure) or cause:
            context.listener.note(_NOT_REPLAYED.format(limits=winner, cause=cause))
            return found
        return replace(found, live=holds(outcome, workload.slos))
    return found
