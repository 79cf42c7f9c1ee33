"""Runs of whatever can be asked for, on planted machines of every kind and in every mood.

Each is drawn from a number: few requests, bursts that come at once, SLOs that nothing meets,
budgets that hold nothing. On virtual time it takes seconds.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from support.planted import PlantedSource
from support.planted_machine import MACHINES, MOODS
from support.virtual_time import on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.replay.slo import Slo
from tuner.run.options import Method, TuningOptions
from tuner.run.tune import tune
from tuner.search.objective import Objective
from tuner.traffic.traces import LoadModel, Trace, Turns

# The metric of an SLO, and between how many milliseconds it is drawn.
SLOS = {
    "ttft_p90": (50, 5000),
    "e2e_p95": (200, 60_000),
    "tpot_p50": (5, 200),
    "e2e_p50": (100, 30_000),
    "itl_p99": (10, 500),
}


def traffic(rng: np.random.Generator) -> Trace:
    """Return at least 20 requests: spread, all at once, on whole seconds or in far bursts."""
    n = int(rng.choice([20, 24, 40, 60, 120, 300]))
    per_s = float(np.exp(rng.uniform(np.log(0.2), np.log(30.0))))
    spread_s = np.cumsum(rng.exponential(1 / per_s, n))
    ways = (
        spread_s,
        np.zeros(n),
        np.floor(spread_s),
        np.cumsum(np.where(rng.random(n) < 0.1, 30.0, 0.01)),
    )
    due_s = ways[int(rng.integers(len(ways)))]
    prompt, output = (
        np.exp(rng.uniform(0.0, np.log(most), n)).astype(np.int64) for most in (3000.0, 400.0)
    )
    turns = None
    if rng.random() < 0.3:
        after = np.where(rng.random(n) < 0.6, np.arange(n) - 1, -1)
        turns = Turns(after, np.abs(rng.normal(0.0, 2.0, n)))
    e2e_s = np.float64(0.02) * output + 0.1 if rng.random() < 0.3 else None
    return Trace(due_s - due_s[0], prompt, output, e2e_s=e2e_s, turns=turns)


def asked(seed: int, run_dir: Path) -> tuple[TuningOptions, PlantedSource]:
    """Return what is asked of a run, and the machine that it is asked of."""
    rng, trace = random.Random(seed), traffic(np.random.default_rng(seed))
    current = EngineLimits(rng.choice([1, 4, 16, 64, 256]), rng.choice([512, 2048, 8192]))
    machine, mood = MACHINES[rng.choice(list(MACHINES))], MOODS[rng.choice(list(MOODS))]
    source = PlantedSource.of(machine, current, rng.choice([600, 2000, 8000]), mood, seed)
    bounds = [name for name in SLOS if rng.random() < 0.3]
    slos = tuple(
        Slo.parse(f"{name}={int(np.exp(rng.uniform(*np.log(SLOS[name]))))}ms")
        for name in bounds
    )
    method = rng.choice([Method.AUTO, Method.AUTO, Method.CALIBRATED, Method.LIVE])
    needing = {Objective.GOODPUT, Objective.CAPACITY}
    objectives = [one for one in Objective if slos or one not in needing]
    if method is Method.LIVE:
        objectives = [one for one in objectives if one is not Objective.CAPACITY]
    more: dict[str, Any] = {}
    if rng.random() < 0.2:
        more["window"] = rng.choice(["all", "peak:5s", "typical:10s", "0s:5s"])
    if rng.random() < 0.15:
        more |= {"load_model": LoadModel.CLOSED, "concurrency": rng.choice([1, 4, 32])}
    if rng.random() < 0.2 and method is not Method.LIVE:
        more["knobs"] = ("long-prefill",)
    options = TuningOptions(
        trace=trace,
        config={
            "model": "planted",
            "max-num-seqs": current.max_num_seqs,
            "max-num-batched-tokens": current.max_num_batched_tokens,
        },
        slos=slos,
        objective=rng.choice(objectives),
        budget_s=rng.choice([40.0, 120.0, 300.0, 600.0]),
        ladder=rng.choice([(8, 32), (1, 2, 4, 8, 16, 32), (4,), (64, 256)]),
        method=method,
        confidence=rng.choice([0.5, 0.9, 0.99]),
        load=rng.choice([1.0, 1.0, 0.3, 2.5]),
        run_dir=run_dir,
        **more,
    )
    return options, source


def run_asked(seed: int, run_dir: Path) -> None:
    """Run what is asked. Raises: TunerError, as where nothing meets the SLOs."""
    options, source = asked(seed, run_dir)
    with on_virtual_time(source.clock):
        tune(options, source=source)
