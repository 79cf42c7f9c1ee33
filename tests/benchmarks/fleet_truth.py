"""How often as many replicas as are told serve what comes, beside the probability that is told.

    python tests/benchmarks/fleet_truth.py [--cases 40] [--again 25] [--wrong 0.15] [--bursty]
        [--slo e2e_p90=1.5s] [-o results.json]

Engines of eight requests a second; each case draws a rate, plans a fleet for one recording by a
profile, and tries it on new traffic of that rate on machines as wrong as the profile states.
Requests come independently for 100 s, or in bursts for ten minutes.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fleet_parts import bursty, planted_fleet, poisson
from tuner.replay.slo import Slo
from tuner.run.loads.fleet_plan import FleetAim
from tuner.traffic.reshape import Router


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--again", type=int, default=25)
    parser.add_argument("--wrong", type=float, default=0.15)
    parser.add_argument("--bursty", action="store_true")
    parser.add_argument("--slo", type=Slo.parse, default=Slo.parse("e2e_p90=1.5s"))
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    traffic, rng = bursty if asked.bursty else poisson, np.random.default_rng(7)
    aim = FleetAim((asked.slo,), Router.LEAST_LOADED, devices=1, most=24, stretch_s=1000.0)
    drawn = (
        planted_fleet(rng, traffic, aim, asked.wrong, asked.again) for _ in range(asked.cases)
    )
    found = [case for case in drawn if case is not None]
    for place, name in enumerate(("fewest", "sure")):
        told, true = (
            np.array([getattr(case, of)[place] for case in found]) for of in ("told", "true")
        )
        print(f"{name}: told {told.mean():.3f}, true {true.mean():.3f}, n {len(found)}")
    if asked.output is not None:
        asked.output.write_text(json.dumps([asdict(case) for case in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
