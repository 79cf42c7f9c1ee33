"""How well other settings of an engine are foretold whose host launches ahead.

    python tests/benchmarks/two_clocks.py [-o results.json]

On planted machines in no mood, whose truth is known: three settings teach the step model, six
others are predicted on 400 requests, once as learnt and once as if launching took no time.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.planted import PlantedSource
from support.planted_machine import MACHINES, MOODS
from support.virtual_time import on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.shadow.calibration import Calibration
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.shadow.step_model import NO_HOST, StepModel
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace

TAUGHT = ((16, 2048), (64, 1024), (128, 8192))
ASKED = ((8, 512), (16, 256), (32, 512), (32, 4096), (128, 2048), (256, 512))
PER_S = {"gpu-8b-async": 6.0, "gpu-70b-async": 2.0}
BLOCKS = 20_000
FIGURES = (("ttft_s", "p50"), ("tpot_s", "p50"), ("e2e_s", "p50"), ("e2e_s", "p99"))
PLAN = ReplayPlan()


def traffic(requests: int, per_s: float, seed: int) -> Trace:
    """Return requests with the lengths of a chat, some prompts ten times the median."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / per_s, requests))
    prompts = np.minimum(3000, np.ceil(rng.lognormal(6.3, 1.0, requests))).astype(np.int64)
    outputs = np.minimum(600, np.ceil(rng.lognormal(4.7, 0.7, requests))).astype(np.int64)
    return Trace(due_s - due_s[0], prompts, outputs)


def on_machine(name: str, limits: EngineLimits, trace: Trace) -> tuple[ReplayLog, EngineShape]:
    """Return what a machine makes of a trace."""
    source = PlantedSource.of(MACHINES[name], limits, BLOCKS, MOODS["none"], None)
    with on_virtual_time(source.clock):
        engine = source.start({}, limits)
        prompts = PromptSource(trace, engine.info.vocab_size)
        return replay(engine, trace, prompts, replace(PLAN, keep_steps=True)), engine.shape()


def learnt(name: str) -> StepModel:
    """Return the step model that three settings of a machine teach."""
    found: Calibration | None = None
    for number, limits in enumerate(TAUGHT):
        at = EngineLimits(*limits)
        log, shape = on_machine(name, at, traffic(150, PER_S[name], number))
        found = found or Calibration(shape, (), (), at, {})
        steps = [] if log.kept_steps is None else [log.kept_steps]
        found = found.and_start(at, BLOCKS).and_steps(at, steps)
    if found is None:
        raise ValueError("nothing was taught")
    return found.profile().step_model


def off(found: Measurement, true: Measurement) -> dict[str, float]:
    """Return by how much each figure is off."""
    rows = {}
    for latency, statistic in FIGURES:
        here_s, there_s = (one.latency(latency, statistic) for one in (found, true))
        rows[f"{latency[:-2]}_{statistic}"] = (here_s or 0.0) / (there_s or 1.0) - 1
    return rows


def predicted(name: str) -> Iterator[dict[str, Any]]:
    """Yield how far off each setting of a machine is, with what launching takes and without."""
    model, trace = learnt(name), traffic(400, PER_S[name], 99)
    for limits in ASKED:
        at = EngineLimits(*limits)
        log, shape = on_machine(name, at, trace)
        true, prepared, found = measure([log]), PreparedTrace(trace, PLAN), {}
        for host in (model.host, NO_HOST):
            own = replace(model, graphs=shape.graphs, host=host)
            engine = SimulatedEngine(shape, BLOCKS, own, at)
            found[host] = measure([simulate(engine, prepared, at, PLAN)])
        row: dict[str, Any] = {
            "machine": name,
            "limits": str(at),
            "host_bound_ratio": true.host_bound_ratio,
            "host_bound_ratio_predicted": found[model.host].host_bound_ratio,
            "off": off(found[model.host], true),
            "off_without": off(found[NO_HOST], true),
        }
        pairs = zip(row["off"].items(), row["off_without"].values(), strict=True)
        shown = ", ".join(f"{k} {v:+.1%} ({without:+.1%})" for (k, v), without in pairs)
        print(f"{name} {at}: host-bound {true.host_bound_ratio:.0%}; {shown}")
        yield row


def main() -> None:
    """Predict all settings of both machines and print how far off that is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    rows = [row for name in PER_S for row in predicted(name)]
    for words in ("off", "off_without"):
        sizes = {k: [abs(row[words][k]) for row in rows] for k in rows[0][words]}
        print(words, {k: f"{median(v):.1%}, {max(v):.1%} at most" for k, v in sizes.items()})
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
