"""Engines of a fleet whose capacity is known, and how often so many of them truly serve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from support.profile_parts import PROFILE, SHAPE
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Graphs
from tuner.replay.plan import ReplayPlan
from tuner.run.loads.fleet import fewest_replicas, plan_fleet
from tuner.run.loads.fleet_plan import FleetAim
from tuner.search.space import SearchSpace
from tuner.shadow.predictor import Predictor
from tuner.shadow.step_model import StepModel
from tuner.traffic.traces import Trace

# Twenty steps of 50 ms, whoever else is in the batch: eight requests a second.
STEPS = replace(StepModel.linear(0.05, 0.0, 0.0), graphs=Graphs((), has_mixed=False))
SYNCHRONOUS = replace(
    SHAPE,
    asynchronous=False,
    captured_sizes=(),
    prefix_caching=False,
    scheduler={"policy": "fcfs", "enable_chunked_prefill": True},
)
ENGINE = replace(PROFILE, shape=SYNCHRONOUS, step_model=STEPS, uncertainty=None)
EIGHT = EngineLimits(8, 2048)
ONLY_EIGHT = SearchSpace(EIGHT, (8,), (2048,), EIGHT)
BURST_S = 5.0

Traffic = Callable[[np.random.Generator, float], Trace]
"""Draws traffic of so many requests a second."""


def poisson(rng: np.random.Generator, per_s: float, lasting_s: float = 100.0) -> Trace:
    """Return requests of twenty tokens that come independently of each other."""
    n = rng.poisson(per_s * lasting_s)
    due_s = np.sort(rng.uniform(0.0, lasting_s, n))
    return Trace(due_s - due_s[0], np.full(n, 4), np.full(n, 20))


def bursty(rng: np.random.Generator, per_s: float, lasting_s: float = 600.0) -> Trace:
    """Return requests whose rate wanders by half of itself every five seconds."""
    starts_s = np.arange(0.0, lasting_s, BURST_S)
    counts = rng.poisson(per_s * BURST_S * rng.gamma(4.0, 0.25, starts_s.size))
    begun_s = np.repeat(starts_s, counts)
    due_s = np.sort(begun_s + rng.uniform(0.0, BURST_S, begun_s.size))
    return Trace(due_s - due_s[0], np.full(due_s.size, 4), rng.integers(4, 24, due_s.size))


@dataclass(frozen=True, slots=True)
class ToldFleet:
    """What was told of a fleet, and in how many of new recordings and machines it is so.

    First of the number that serves what was recorded, then of that which surely does.
    """

    replicas: tuple[int, int]
    told: tuple[float, float]
    true: tuple[float, float]


def planted_fleet(
    rng: np.random.Generator, traffic: Traffic, aim: FleetAim, wrong_ratio: float, again: int
) -> ToldFleet | None:
    """Plan a fleet for traffic at a rate that is drawn, and try it on what comes `again`.

    The machine is off by as much as the profile says. None where no number is sure.
    """
    per_s = rng.uniform(5.0, 50.0)
    stated = Predictor(replace(ENGINE, metric_error_ratio=wrong_ratio), EIGHT)
    odds = plan_fleet(stated, ONLY_EIGHT, traffic(rng, per_s), ReplayPlan(), aim).odds
    if odds.sure is None:
        return None
    # The stated error holds nine ratios of two settings in ten, whose errors are independent.
    deviation = math.log1p(wrong_ratio) / (1.645 * math.sqrt(2))

    def true(replicas: int) -> float:
        served = 0
        for _ in range(again):
            model = STEPS.scaled(math.exp(deviation * rng.standard_normal()))
            machine, comes = Predictor(replace(ENGINE, step_model=model)), traffic(rng, per_s)
            found = fewest_replicas(
                machine, comes, EIGHT, ReplayPlan(), aim.slos, replicas, replicas
            )
            served += found is not None
        return served / again

    fewest, p_sure = odds.sure
    return ToldFleet(
        (odds.replicas, fewest),
        (odds.p_kept, p_sure),
        (true(odds.replicas), true(fewest)),
    )
