"""Predict a whole space from a profile, and compare what was predicted with what was measured.

Every setting of the grid is predicted on the whole workload, then those halfway between the
best and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.run.context import Workload
from tuner.run.trial_runner import judged
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
from tuner.shadow.predictor import Predictor

# Rounds of looking between the best cap and its neighbours: ours; each halves the gap.
REFINEMENTS = 2
# Neighbours closer than this share of the cap are not told apart: as in `search.ladder`.
REFINE_RATIO = 0.2
# Live and predicted disagree if they differ by more than this many times the stated error,
# which is a median: ours.
DISAGREEMENT = 3.0

Outcome = Measurement | Failure


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a profile says of a space: each setting's outcome on the workload."""

    workload: Workload
    wrong_ratio: float
    outcomes: Mapping[EngineLimits, Outcome]

    def trials(self, first_number: int = 0, prediction: int = 0) -> list[Trial]:
        """Return the records of the predictions, numbered from `first_number` on."""
        scoring = self.workload.scoring
        return [
            judged(number, limits, Phase.SHADOW, outcome, scoring, prediction=prediction)[0]
            for number, (limits, outcome) in enumerate(self.outcomes.items(), first_number)
        ]

    @property
    def observations(self) -> list[Observation]:
        """What a search needs to know of each."""
        return [trial.observation for trial in self.trials()]


def predict(predictor: Predictor, space: SearchSpace, workload: Workload) -> Predictions:
    """Predict the grid, and what lies between its best and their neighbours.

    Where capacity is the objective each is predicted at the largest load at which its SLOs
    hold, so that none lies between others.

    Raises: ShadowError, UsageError.
    """
    nothing = Predictions(workload, predictor.wrong_ratio, {})
    found = predict_more(predictor, nothing, [space.current, *space.grid()])
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
    outcomes = dict(found.outcomes)
    for limits in settings:
        if limits not in outcomes:
            outcomes[limits] = ask(workload.pieces, limits, workload.plan, workload.slos)
    return replace(found, outcomes=outcomes)


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


def disagreement(differences: Differences, wrong_ratio: float) -> str:
    """Say where live and predicted differ by more than the stated error; empty if nowhere."""
    return ", ".join(
        f"{metric} at {limits} by {predicted / measured - 1:+.0%}"
        for (limits, metric), (measured, predicted) in differences.items()
        if abs(predicted / measured - 1) > DISAGREEMENT * wrong_ratio
    )
