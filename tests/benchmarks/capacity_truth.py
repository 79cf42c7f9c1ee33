"""How far a told capacity is from the true one, on a planted machine in its moods.

    python tests/benchmarks/capacity_truth.py [--seeds 12] [--mood usual]
        [--objective capacity] [-o results.json]

The recorded traffic has some 15 requests in flight; what is borne within the SLO at the edge,
more than 100. Each run is by predictions from blocks on the machine in a mood of its own; the
truth is what the recommended limits bear at the machine's mean speed.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.capacity_parts import CEILING, truly_borne, tuned_for_capacity
from tuner.search.objective import Objective


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--mood", default="usual")
    parser.add_argument("--objective", type=Objective, default=Objective.CAPACITY)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    most = truly_borne(CEILING, asked.mood)
    runs = []
    for seed in range(asked.seeds):
        runs.append(one_run(seed, asked.mood, asked.objective))
        print(json.dumps(asdict(runs[-1])), flush=True)
    off = [abs(run.told / run.true - 1) for run in runs]
    print(
        f"told off by {median(off):.1%} in the median, {max(off):.1%} at most, n {len(off)}; "
        f"in the interval {sum(run.is_inside for run in runs)}; the limits bear "
        f"{median(run.true / most for run in runs):.1%} of what {CEILING} does"
    )
    if asked.output is not None:
        held = {"mood": asked.mood, "most": most, "runs": [asdict(run) for run in runs]}
        asked.output.write_text(json.dumps(held, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Told:
    """What a run told of its answer's capacity, and what is true; multiples of the load."""

    seed: int
    limits: str
    told: float
    interval: tuple[float, float] | None
    true: float

    @property
    def is_inside(self) -> bool:
        """Whether the truth is in the interval."""
        return self.interval is not None and self.interval[0] < self.true < self.interval[1]


def one_run(seed: int, mood: str, objective: Objective) -> Told:
    """Tune the machine in a mood of its own, and return what was told beside the truth."""
    with tempfile.TemporaryDirectory() as folder:
        result = tuned_for_capacity(Path(folder) / "run", seed, mood, objective)
    told, advice = result.capacity, result.recommendation
    if told is None or told.winner is None or advice is None:
        raise SystemExit(f"seed {seed}: the run told no capacity")
    true = truly_borne(advice.limits, mood)
    return Told(seed, str(advice.limits), told.winner, told.interval, true)


if __name__ == "__main__":
    main()
