"""Draw other traffic of the kind, and models as wrong as this one may be; predict on both.

Answers how sure a prediction is. Settings of one draw replay the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, TooFewSamplesError
from tuner.replay.metrics import Measurement, measure
from tuner.replay.runner import Failure, measure_capacity
from tuner.run.context import Workload
from tuner.run.predict import Predictions
from tuner.search.ladder import finalists
from tuner.search.objective import Objective, Score, Tier
from tuner.search.posterior import Draws
from tuner.search.race import RaceDecision
from tuner.search.space import SearchSpace
from tuner.shadow import simulator
from tuner.shadow.predictor import Predictor
from tuner.traffic.reshape import Resampler, at_load
from tuner.traffic.traces import LoadModel, Trace

# Draws: ours; an end of an interval of 90 % is then itself off by 3 % of its probability. Of a
# capacity, for which each draw takes a dozen replays, fewer.
DRAWS, CAPACITY_DRAWS = 200, 24
# The stated error counts as the interval of 90 % of a ratio of two settings: ours, since it is
# the largest of several medians, and what it has in common cancels. A setting has its share.
_OWN_ERRORS = 1.645 * math.sqrt(2)


def decide(predictor: Predictor, predictions: Predictions, space: SearchSpace) -> RaceDecision:
    """Decide among the settings that could be the best, by draws of what was predicted.

    Raises: NoFeasibleConfigError if every setting fails; ShadowError, UsageError.
    """
    settings = finalists(predictions.observations, space, predictor.wrong_ratio)
    return draw(predictor, predictions, settings).decide(space.current)


def draw(
    predictor: Predictor,
    predictions: Predictions,
    settings: Sequence[EngineLimits],
    draws: int = DRAWS,
) -> Draws:
    """Return draws of settings of which everything was predicted.

    Where vLLM's own scheduler is asked, which takes too long, and where the traffic is too
    little to draw from, only the model's error is drawn.

    Raises: ShadowError, UsageError.
    """
    workload = predictions.workload
    point = [_score(workload, predictions.outcomes[limits]) for limits in settings]
    error = math.log1p(predictor.wrong_ratio) / _OWN_ERRORS
    seeds = np.random.SeedSequence(predictor.seed).spawn(_count(workload, draws))
    if predictor.doubt:
        drawn = [_slower(point, np.random.default_rng(seed), error) for seed in seeds]
        return Draws.of(settings, point, drawn, None)
    resamplers = _resamplers(workload)
    one = partial(_drawn, predictor, workload, settings, resamplers, error)
    with ThreadPoolExecutor() as pool:
        drawn = list(pool.map(one, map(np.random.default_rng, seeds)))
    stretches = sum(r.stretches for r in resamplers if r is not None) or None
    return Draws.of(settings, point, drawn, stretches)


def _count(workload: Workload, draws: int) -> int:
    is_capacity = workload.scoring.objective is Objective.CAPACITY
    return min(draws, CAPACITY_DRAWS) if is_capacity else draws


def _resamplers(workload: Workload) -> list[Resampler | None]:
    """Return what draws other traffic of each piece, None where it cannot be drawn."""
    if workload.plan.load_model is LoadModel.CLOSED:
        return [None] * len(workload.pieces)
    try:
        return [Resampler(piece) for piece in workload.pieces]
    except TooFewSamplesError:
        return [None] * len(workload.pieces)


def _score(workload: Workload, outcome: Measurement | Failure) -> Score:
    if isinstance(outcome, Failure):
        return Score(Tier.FAILED, math.inf, outcome.cause)
    return workload.scoring.score(outcome)


def _slower(point: Sequence[Score], rng: np.random.Generator, error: float) -> list[Score]:
    """Return scores as they are where every setting is so much slower or faster."""
    return [
        score.times(float(t))
        for score, t in zip(point, np.exp(rng.normal(0.0, error, len(point))), strict=True)
    ]


def _drawn(
    predictor: Predictor,
    workload: Workload,
    settings: Sequence[EngineLimits],
    resamplers: Sequence[Resampler | None],
    error: float,
    rng: np.random.Generator,
) -> list[Score]:
    """Return the scores of the settings on one draw of the traffic, the same for all."""
    traffic = [
        piece if resampler is None else resampler.draw(rng)
        for piece, resampler in zip(workload.pieces, resamplers, strict=True)
    ]
    times = np.exp(rng.normal(0.0, error, len(settings)))
    replays = _Replays(workload, traffic)
    return [
        replays.score(_simulated(predictor, limits, float(t)), limits)
        for limits, t in zip(settings, times, strict=True)
    ]


def _simulated(
    predictor: Predictor, limits: EngineLimits, times: float
) -> simulator.SimulatedEngine:
    """Return the engine of a setting, every step of which takes so many times as long."""
    engine = predictor.simulated(limits)
    return replace(engine, step_model=engine.step_model.scaled(times))


class _Replays:
    """Replays of the pieces of one draw, laid out once for each load."""

    def __init__(self, workload: Workload, traffic: Sequence[Trace]) -> None:
        self._workload, self._traffic = workload, traffic
        self._laid_out: dict[float, list[simulator.Workload]] = {}

    def score(self, engine: simulator.SimulatedEngine, limits: EngineLimits) -> Score:
        """Return the score of a setting on the drawn traffic."""
        workload, load = self._workload, self._workload.plan.load
        at = partial(self._measure, engine, limits)
        if workload.scoring.objective is Objective.CAPACITY:
            return _score(workload, measure_capacity(at, load, workload.slos))
        return _score(workload, at(load))

    def _measure(
        self, engine: simulator.SimulatedEngine, limits: EngineLimits, load: float
    ) -> Measurement | Failure:
        plan = replace(self._workload.plan, load=load)
        if load not in self._laid_out:
            self._laid_out[load] = [
                simulator.Workload(at_load(piece, load), plan) for piece in self._traffic
            ]
        try:
            logs = [
                simulator.simulate(engine, piece, limits, plan)
                for piece in self._laid_out[load]
            ]
        except EngineError as error:
            return Failure(error.message)
        return replace(measure(logs, self._workload.slos), load=load * self._traffic[0].load)
