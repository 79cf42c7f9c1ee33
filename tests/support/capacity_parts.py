"""A planted machine whose traffic never comes near what it bears, and what it truly bears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from support.planted import PlantedSource
from support.planted_machine import MACHINES, MOODS
from support.virtual_time import on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import replay
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import measure_capacity
from tuner.replay.slo import Slo
from tuner.run.options import Method, TuningOptions
from tuner.run.result import RunResult, read_result
from tuner.run.tune import tune
from tuner.search.objective import Objective
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace

CURRENT, CEILING = EngineLimits(8, 2048), EngineLimits(128, 16384)
SLOS = (Slo.parse("e2e_p50=2500ms"),)
REQUESTS, BUDGET_S = 200, 400.0


def a_source(seed: int | None, mood: str = "usual") -> PlantedSource:
    """Return the machine in a mood, or without a seed at the mean of it."""
    return PlantedSource.of(MACHINES["gpu-8b"], CURRENT, 8000, MOODS[mood], seed)


def a_trace() -> Trace:
    """Return 6 requests a second, of which some 15 run at once."""
    rng = np.random.default_rng(5)
    due_s = np.cumsum(rng.exponential(1 / 6.0, REQUESTS))
    due_s -= due_s[0]
    return Trace(due_s, rng.integers(50, 900, REQUESTS), rng.integers(20, 200, REQUESTS))


def truly(
    source: PlantedSource, limits: EngineLimits, values: Mapping[str, object] | None = None
) -> Measurement:
    """Return what a source's engine does at the recorded load, and how much it bears."""
    trace = a_trace()

    def at(load: float) -> Measurement:
        with on_virtual_time(source.clock):
            engine = source.start(values or {}, limits)
            engine.set_limits(limits)
            offered = at_load(trace, load)
            log = replay(engine, offered, PromptSource(offered, 1000, 16), ReplayPlan())
        return replace(measure([log], SLOS), load=load)

    held = measure_capacity(at, [trace], 1.0, SLOS)
    if not isinstance(held, Measurement) or not held.capacity:
        raise AssertionError(f"{limits} bears nothing: {held}")
    return replace(at(1.0), capacity=held.capacity)


def truly_borne(limits: EngineLimits, mood: str = "usual") -> float:
    """Return the multiple of the load that a setting bears in the mean of a machine's mood."""
    return truly(a_source(None, mood), limits).capacity or 0.0


def tuned_for_capacity(
    path: Path, seed: int, mood: str = "usual", objective: Objective = Objective.CAPACITY
) -> RunResult:
    """Tune the machine by predictions, for the largest load if for nothing else."""
    source = a_source(seed, mood)
    options = TuningOptions(
        trace=a_trace(),
        config={
            "model": "planted",
            "max-num-seqs": CURRENT.max_num_seqs,
            "max-num-batched-tokens": CURRENT.max_num_batched_tokens,
        },
        slos=SLOS,
        objective=objective,
        budget_s=BUDGET_S,
        ladder=(8, 32),
        run_dir=path,
        method=Method.CALIBRATED,
    )
    with on_virtual_time(source.clock):
        tune(options, source=source)
    return read_result(path)
