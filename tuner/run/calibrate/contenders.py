"""Who could be the best by what is known of an engine, and what more blocks could tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import EngineError, NoFeasibleConfigError, ShadowError
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.run.context import TRACE, RunContext, Workload
from tuner.run.drawing import Contention, Drawing
from tuner.run.predict import predict
from tuner.run.rounds import predicted_part
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.shadow.predictor import Predictor
from tuner.shadow.speed import Visited
from tuner.shadow.step_model import StepModel
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import busiest, busy_part, whole

# How many settings are looked at beside the current one, found by how many draws: ours, it is
# asked anew after every few seconds of blocks.
CONTENDERS, BLOCK_DRAWS = 4, 20
# How much traffic vLLM's own scheduler is asked about in the time, in seconds: ours.
ASKED_S = 60.0
# On so many requests it is asked who could bear most: ours, each load is a replay.
LOADED_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Contender:
    """A setting's predicted replay at a multiple of the load, and the batches in it."""

    limits: EngineLimits
    log: ReplayLog
    steps: StepColumns
    visited: Visited
    load: float

    @classmethod
    def of(cls, limits: EngineLimits, model: StepModel, log: ReplayLog, load: float) -> Self:
        """Return what is made of a log with its steps."""
        steps = kept_steps(log)
        return cls(limits, log, steps, Visited.of(model, steps), load)


@dataclass(frozen=True, slots=True)
class Contended:
    """Replays of who could be the best, predicted, and what choosing now is expected to lose.

    `open_loss` is the part of that which blocks can save. Both are without end where nobody
    knows.
    """

    replays: Sequence[Contender] = ()
    loss: float = math.inf
    open_loss: float = math.inf


class Contenders:
    """Says again and again who could be the best, by what is known by then.

    `trace` is the traffic that blocks are of. Where it is told how much settings bear
    (`tells_capacity`) fuller batches are looked at too, as more load makes them.
    """

    def __init__(self, context: RunContext, *, tells_capacity: bool = False) -> None:
        aim = context.aim
        self.context, self.trace = context, predicted_part(context.trace, aim)
        self.tells_capacity = aim.plan.bears_loads and (
            tells_capacity or aim.objective is Objective.CAPACITY
        )
        self._few = (
            busy_part(self.trace, LOADED_REQUESTS) if self.tells_capacity else self.trace
        )
        self._loads: dict[EngineLimits, float] = {}
        self._loaded: dict[float, Trace] = {}

    def of(self, predictor: Predictor) -> Contended:
        """Return those that could be the best, and the current; what choosing now loses.

        Raises: ShadowError, UsageError.
        """
        context = self.context
        space = context.space
        if predictor.doubt and context.is_shared:
            return Contended()  # workers know the rows of the whole trace alone
        if predictor.doubt:
            self.trace = busiest(self.trace, ASKED_S).of(self.trace)
            more = calibration_settings(space, space.ceiling.max_num_seqs / 2)
            settings = [space.current, space.ceiling, *more]
            return Contended(self._predicted(predictor, dict.fromkeys(settings, 1.0)))
        deployed, current = predictor.as_deployed(), space.current
        predicted = predict(deployed, space, self._decided_on(deployed))
        if not isinstance(predicted.outcomes[current], Measurement):
            return Contended()
        try:
            drawing = Drawing(deployed, predicted)
            found = drawing.contend(current, CONTENDERS, BLOCK_DRAWS, context.aim.confidence)
        except NoFeasibleConfigError:
            return Contended()  # what all of them break is told once they are predicted
        replays = self._chosen(predictor, deployed, [*found.settings, current])
        return Contended(replays, found.loss, self._open_loss(drawing, deployed, found))

    def _chosen(
        self, predictor: Predictor, deployed: Predictor, settings: Sequence[EngineLimits]
    ) -> list[Contender]:
        """Return the predicted replays that blocks are chosen for, the current one's last.

        Raises: ShadowError, UsageError.
        """
        space = self.context.space
        if self.context.aim.objective is Objective.CAPACITY:
            return self._predicted(predictor, self._borne(deployed, settings))
        found = self._predicted(predictor, dict.fromkeys(settings, 1.0))
        if self.tells_capacity:
            budgets = (x.max_num_batched_tokens for x in (settings[0], space.current))
            fullest = [space.at(space.ceiling.max_num_seqs, budget) for budget in budgets]
            found += self._predicted(predictor, self._borne(deployed, fullest))
        return found

    def _open_loss(self, drawing: Drawing, deployed: Predictor, found: Contention) -> float:
        """Return what of the loss of choosing now is for what blocks have not told yet.

        What is each setting's own, and each start's, they never tell.

        Raises: NoFeasibleConfigError, ShadowError, UsageError.
        """
        profile, context = deployed.profile, self.context
        if profile.uncertainty is None:
            return found.loss
        told = replace(profile, uncertainty=profile.uncertainty.after(1.0, math.inf))
        settings = [*found.settings, *found.witnesses, context.space.current]
        now, then = (
            context.choice(one.draws(settings, BLOCK_DRAWS, is_here=True)).regret
            for one in (drawing, Drawing(deployed.of(told), drawing.predictions))
        )
        return max(0.0, now - then)

    def _decided_on(self, deployed: Predictor) -> Workload:
        """Return what is predicted to see who could be the best: all, at the recorded load.

        A capacity takes a dozen replays each: who could have the largest is asked of fewer
        requests, at the load that the setting with the largest batches bears.
        """
        context = self.context
        if context.aim.objective is not Objective.CAPACITY:
            return Workload.of_whole(context.trace, context.aim)
        aim, ceiling = replace(context.aim, objective=Objective.BALANCED), context.space.ceiling
        plan = replace(aim.plan, load=self._borne(deployed, [ceiling])[ceiling])
        few = self._few
        return Workload.of(TRACE, few, (whole(few),), replace(aim, plan=plan, window=None))

    def _borne(
        self, deployed: Predictor, settings: Iterable[EngineLimits]
    ) -> dict[EngineLimits, float]:
        """Return how much load settings bear, by the first model that was asked.

        As multiples of what is predicted; 1 of one that bears less, or fails.
        """
        aim, found = self.context.aim, {}
        for limits in dict.fromkeys(settings):
            if limits not in self._loads:
                outcome = deployed.measure_capacity([self._few], limits, aim.plan, aim.slos)
                borne = outcome.capacity if isinstance(outcome, Measurement) else None
                self._loads[limits] = max(1.0, (borne or 0.0) / self.trace.load)
            found[limits] = self._loads[limits]
        return found

    def at(self, load: float) -> Trace:
        """Return what is predicted, at a multiple of its load."""
        if load == 1.0:
            return self.trace
        if load not in self._loaded:
            self._loaded[load] = at_load(self.trace, load)
        return self._loaded[load]

    def _predicted(
        self, predictor: Predictor, loads: Mapping[EngineLimits, float]
    ) -> list[Contender]:
        """Return the predicted replays of settings, each at a multiple of the load.

        Raises: ShadowError, UsageError.
        """
        plan = replace(self.context.aim.plan, keep_steps=True)
        found = []
        for limits, load in loads.items():
            try:
                log = predictor.replay(self.at(load), limits, plan)
            except EngineError:
                continue  # its own replay will tell
            found.append(Contender.of(limits, predictor.step_model_at(limits), log, load))
        return found


def kept_steps(log: ReplayLog) -> StepColumns:
    """Return the steps of a replay that was asked to keep them."""
    if log.kept_steps is None:
        raise ShadowError("the predicted replay kept no steps")
    return log.kept_steps


def calibration_settings(space: SearchSpace, most_running: float) -> list[EngineLimits]:
    """Return what to replay live after the current limits and the ceiling.

    The ceiling shows the fullest batches and the largest prefills that the traffic makes, with
    `most_running` requests at once. Half as many with a small token budget show what lies
    below, and prefills in pieces beside decodes; a low cap shows small batches and long queues.

    Source: ours. Live on the demo model, ten settings: with half of what ran as the middle cap,
        six that were not calibrated on came out 4.7 % off in the mean, with a seventh 6.0 %.
    """
    low = next((cap for cap in space.ladder if cap > 1), space.ladder[0])
    half = max(1, int(most_running) // 2)
    middle = max(low, 1 << (half.bit_length() - 1))
    found = [space.at(middle, min(space.budgets)), space.at(low, max(space.budgets))]
    known = (space.current, space.ceiling)
    return list(dict.fromkeys(s for s in found if s.within(space.ceiling) and s not in known))
