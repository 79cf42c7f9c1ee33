"""Predict a whole space from a profile, and hold what was predicted to what was measured live.

Every setting of the grid is predicted on the whole workload, then larger caps while the largest
binds and may be the best, then those halfway between the best and its neighbours. How sure that
is, is found by `drawing`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.run.context import Workload
from tuner.run.trial_runner import judged
from tuner.search.ladder import REFINE_RATIO
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.search.trials import (
    Observation,
    Phase,
    Trial,
    leader,
    measured_and_predicted,
    race_records,
)
from tuner.shadow import simulator
from tuner.shadow.predictor import Predictor
from tuner.traffic.resample import multiple_of
from tuner.traffic.traces import LoadModel, Trace

# Who is further than this from what is thought best could not be the best: ours.
FAR = 1.0
# Rounds of looking between the best cap and its neighbours: ours; each halves the gap.
REFINEMENTS = 2
# Live and predicted disagree if they differ by more than this many times the stated error,
# which is a median: ours.
DISAGREEMENT = 3.0

# How closely a replay's own speed is found: ours, a tenth of what two replays differ by, and
# after so many passes half of it, near overload.
SPEED_RATIO, FAR_RATIO, SPEED_PASSES, _SMALL = 0.002, 0.01, 8, 1e-6

# Threads that replay, where there are as many cores: ours. Half of a short replay holds
# Python's lock; on two idle cores 600 of them took two threads 1.0 s, three 1.4 and six 1.6 s.
THREADS = 4

Outcome = Measurement | Failure


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a profile says of a space: each setting's outcome on the workload."""

    workload: Workload
    outcomes: Mapping[EngineLimits, Outcome] = field(default_factory=dict)

    def recorded(self, prediction: int = 0) -> list[Trial]:
        """Return the records of the predictions, numbered from 0 on."""
        return [
            judged(number, limits, Phase.SHADOW, outcome, self.workload, prediction=prediction)
            for number, (limits, outcome) in enumerate(self.outcomes.items())
        ]

    @property
    def observations(self) -> list[Observation]:
        """What a search needs to know of each."""
        return [trial.observation for trial in self.recorded()]


@dataclass(frozen=True, slots=True)
class Foretold:
    """What was predicted of a run's space, as engines are deployed, and by what.

    `witnesses` are decided beside those that race: they show that one of these is out.
    """

    predictor: Predictor
    predictions: Predictions
    witnesses: tuple[EngineLimits, ...] = ()

    def more(self, settings: Sequence[EngineLimits]) -> Foretold:
        """Return it with further settings. Raises: ShadowError, UsageError."""
        wanted = (*settings, *self.witnesses)
        found = predict_more(self.predictor.as_deployed(), self.predictions, wanted)
        return replace(self, predictions=found)


def predict(predictor: Predictor, space: SearchSpace, workload: Workload) -> Predictions:
    """Predict the grid, what is past its edge while that may win, and what is beside the best.

    Where capacity is the objective each is predicted at the largest load at which its SLOs
    hold, so that none lies between others.

    Raises: ShadowError, UsageError.
    """
    settings = [space.current, *space.grid()]
    found = predict_more(predictor, Predictions(workload), settings)
    while more := _past_the_edge(found.observations, space):
        found = predict_more(predictor, found, more)
    is_capacity = workload.scoring.objective is Objective.CAPACITY
    for _ in range(0 if is_capacity else REFINEMENTS):
        found = predict_more(predictor, found, _between(found.observations, space))
    return found


def predict_more(
    predictor: Predictor, found: Predictions, settings: Sequence[EngineLimits]
) -> Predictions:
    """Return what was found, and what is predicted of further settings on the same workload.

    Raises: ShadowError, UsageError.
    """
    workload = found.workload
    is_capacity = workload.scoring.objective is Objective.CAPACITY
    ask = predictor.measure_capacity if is_capacity else predictor.measure

    def outcome(limits: EngineLimits) -> Outcome:
        return ask(workload.pieces, limits, workload.plan, workload.slos)

    new = [limits for limits in dict.fromkeys(settings) if limits not in found.outcomes]
    # The first one lays the traffic out for all; vLLM's own scheduler is asked by one thread.
    first = len(new) if predictor.doubt else 1
    outcomes = [outcome(limits) for limits in new[:first]]
    outcomes += at_once(predictor, workload, outcome, new[first:])
    return replace(found, outcomes={**found.outcomes, **dict(zip(new, outcomes, strict=True))})


_Place = TypeVar("_Place")
_Found = TypeVar("_Found")


def at_once(
    predictor: Predictor,
    workload: Workload,
    replay: Callable[[_Place], _Found],
    places: Sequence[_Place],
) -> list[_Found]:
    """Return what a replay of the workload brings at each place.

    As many run at once as there are cores for, and memory.
    """
    room = min(simulator.room_for(piece, predictor.profile.shape) for piece in workload.pieces)
    threads = min(THREADS, len(os.sched_getaffinity(0)), room)
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(replay, places))


def _past_the_edge(seen: Sequence[Observation], space: SearchSpace) -> list[EngineLimits]:
    """Return settings of a larger cap where the largest binds and is not far from the best."""
    best, largest = leader(seen), max(o.limits.max_num_seqs for o in seen)
    may_win = (
        not o.cap_never_bound and o.score.could_beat(best.score, FAR)
        for o in seen
        if best is not None and o.limits.max_num_seqs == largest
    )
    return space.past(largest) if any(may_win) else []


def _between(seen: Sequence[Observation], space: SearchSpace) -> list[EngineLimits]:
    """Return the settings halfway between the best and its neighbours."""
    best = leader(seen)
    if best is None:
        return []
    cap, budget = best.limits.max_num_seqs, best.limits.max_num_batched_tokens
    caps = sorted(
        {
            o.limits.max_num_seqs
            for o in seen
            if o.limits == space.at(o.limits.max_num_seqs, budget)
        }
    )
    at = caps.index(cap)
    around = [caps[i] for i in (at - 1, at + 1) if 0 <= i < len(caps)]
    wanted = [
        space.at((cap + other) // 2, budget)
        for other in around
        if abs(other - cap) > max(1, REFINE_RATIO * cap)
    ]
    return [limits for limits in wanted if limits.within(space.ceiling)]


Differences = Mapping[tuple[EngineLimits, str], tuple[float, float]]
"""What was measured live and what was predicted of the same requests, by setting and metric."""


def cross_check(
    predicted: Mapping[EngineLimits, Measurement], trials: Sequence[Trial]
) -> dict[tuple[EngineLimits, str], tuple[float, float]]:
    """Return what the race measured beside what was predicted of its own requests."""
    found: dict[tuple[EngineLimits, str], tuple[float, float]] = {}
    for limits, prediction in predicted.items():
        live = list(race_records(trials, limits).values())
        pairs = measured_and_predicted(live, prediction.as_json())
        found |= {(limits, metric): pair for metric, pair in pairs.items()}
    return found


def at_own_speed(
    predictor: Predictor, workload: Workload, limits: EngineLimits, step_s: float
) -> Measurement | None:
    """Return what is predicted of a replay whose steps took step_s in the mean.

    Slower steps hold more requests each, so that the speed is searched for; device and host are
    taken to be as much slower. None where nothing can be predicted of it, or at no speed.

    Raises: ShadowError, UsageError.
    """
    profile, log_times, growth, last = predictor.profile, 0.0, 1.0, (0.0, 0.0)
    for number in range(SPEED_PASSES):
        model = profile.step_model.slower(math.exp(log_times))
        scaled = predictor.of(replace(profile, step_model=model))
        outcome = scaled.measure(workload.pieces, limits, workload.plan, workload.slos)
        if isinstance(outcome, Failure) or outcome.busy_s <= 0 or step_s <= 0:
            return None
        off = math.log(step_s * outcome.steps / outcome.busy_s)
        is_last = number == SPEED_PASSES - 1
        if abs(off) < (FAR_RATIO if is_last else SPEED_RATIO):
            return outcome
        if number and abs(log_times - last[0]) > _SMALL:
            # How much longer a mean step takes where each of a kind does: seldom less, at most
            # a few times as much, where a queue fills.
            growth = min(max((last[1] - off) / (log_times - last[0]), 0.5), 4.0)
        last = log_times, off
        log_times += off / growth
    return None


def capacity_per_s(
    predictor: Predictor, workload: Workload, limits: EngineLimits
) -> float | None:
    """Return how many requests a second hold within the bounds; 0 where they hold at no load.

    None where the setting fails, or no load is a rate: in a closed loop, and where all requests
    come at one instant.

    Raises: ShadowError, UsageError.
    """
    pieces = workload.pieces
    if workload.plan.load_model is LoadModel.CLOSED or not offered_per_s(pieces):
        return None
    outcome = predictor.measure_capacity(pieces, limits, workload.plan, workload.slos)
    return None if isinstance(outcome, Failure) else per_s(workload, outcome.capacity or 0.0)


def per_s(workload: Workload, load: float) -> float:
    """Return how many requests a second come at a multiple of the recorded load."""
    return load * recorded_per_s(workload.pieces)


def recorded_per_s(pieces: Sequence[Trace]) -> float:
    """Return how many requests a second come at the recorded load, whatever theirs is."""
    return offered_per_s(pieces) / multiple_of(pieces)


def offered_per_s(pieces: Sequence[Trace]) -> float:
    """Return how many requests a second come in all the pieces, after their lead-ins.

    0 where all of a piece come at one instant: that is no rate.
    """
    came_s = sum(float(piece.due_s[-1] - piece.due_s[-piece.measured]) for piece in pieces)
    return sum(piece.measured for piece in pieces) / came_s if came_s > 0 else 0.0
