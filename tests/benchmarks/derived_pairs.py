"""Whether what a derived profile leaves open of pairs of settings holds what an H200 showed.

    tune trace convert azure_2023_conv.open.csv -o azure_2023_conv.open.jsonl
    python tests/benchmarks/derived_pairs.py azure_2023_conv.open.jsonl [--setting 0.04,0.09]

The live replays of a campaign's stages (results/gpu_h200) beside draws of the profile that is
derived for their engine, with its own number of KV blocks: by how much two settings differ.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import gpu_stages
import numpy as np
import shadow_truth
from truth_figures import limits_of

from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.run.context import Workload
from tuner.run.drawing import Drawing, Replays
from tuner.run.predict import Predictions, predict_more
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart
from tuner.shadow.speed import DERIVED_SETTING
from tuner.stats import Floats

STAGES = ("truth-qwen", "truth-kv", "truth-qwen.again")
METRICS = (("tpot_s", "p50"), ("e2e_s", "p50"), ("e2e_s", "p95"))
DRAWS = 200


def told(result: Mapping[str, Any], trace: str, setting: float) -> dict[str, Floats]:
    """Return logarithms of what each setting may do. Shapes: [DRAWS, METRICS] each."""
    profile, why = gpu_stages.derived_profile(result)
    if profile is None or profile.uncertainty is None:
        raise SystemExit(why)
    profile = replace(
        profile,
        kv_starts=(KvStart(profile.current_limits, result["num_blocks"]),),
        uncertainty=replace(profile.uncertainty, setting=setting),
    )
    scenario = {key: value for key, value in result["scenario"].items() if key != "trace"}
    scenario["settings"] = tuple(scenario["settings"])
    window = shadow_truth.traffic(shadow_truth.Scenario(trace=trace, **scenario))
    plan = ReplayPlan()
    workload = Workload.of_whole(window, Aim(Objective.LATENCY, (), plan, None))
    predictor, wanted = Predictor(profile).as_deployed(), [*map(limits_of, result["live"])]
    drawing = Drawing(predictor, predict_more(predictor, Predictions(workload), wanted))
    replays = Replays(workload, workload.pieces)
    return {
        str(limits): np.log(
            [_shown(measure(replays.logs(engine, limits, plan))) for engine in engines]
        )
        for limits in wanted
        for engines in [drawing.engines(limits, DRAWS)]
    }


def _shown(found: Measurement) -> list[float]:
    return [found.latency(*which) or np.nan for which in METRICS]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--setting", default=str(DERIVED_SETTING), help="logarithms, by comma")
    asked = parser.parse_args()
    folder = Path(__file__).parent / "results" / "gpu_h200"
    for stage in STAGES:
        result = json.loads((folder / f"{stage}.json").read_text())["result"]
        live = {
            name: np.log(np.median([[m[a][b] for a, b in METRICS] for m in of], axis=0))
            for name, of in result["live"].items()
        }
        for setting in map(float, asked.setting.split(",")):
            drawn, pairs = told(result, asked.trace, setting), [*combinations(live, 2)]
            apart = np.array([drawn[a] - drawn[b] for a, b in pairs])
            true = np.array([live[a] - live[b] for a, b in pairs])
            low, middle, high = np.quantile(apart, (0.05, 0.5, 0.95), axis=1)
            inside = ((low <= true) & (true <= high)).sum(axis=0)
            off = np.sqrt(np.mean(np.square((true - middle) / apart.std(axis=1)), axis=0))
            cells = [
                f"{a} {b} {n} of {len(pairs)} inside, {rms:.2f} of what is open (rms)"
                for (a, b), n, rms in zip(METRICS, inside, off, strict=True)
            ]
            print(f"{stage}, {setting:g}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
