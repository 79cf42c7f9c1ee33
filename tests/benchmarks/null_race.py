"""How often a race without predictions tells two identical configurations apart, really live.

    python tests/benchmarks/null_race.py [--races 20] [--window 1] [-o FILE]

One engine with the demo model replays one window of traces/translation.jsonl. Every race has
two entries of the same limits under two names and runs until the race's own rule ends it; a
race that separates the two is an error. Prints the errors and the spread of single replays.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.run.drawing import DRAWS
from tuner.run.live_search import MIN_ROUNDS_LIVE
from tuner.run.race import is_settled
from tuner.search.choice import Choice
from tuner.search.objective import Objective, make_scoring
from tuner.search.race import MAX_ROUNDS, RaceRun, RaceVerdict, missing_in
from tuner.search.replayed import draws_of_replays
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.windows import busiest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = EngineLimits(16, 2048)
# What the race calls the same limits the second time.
TWIN = EngineLimits(17, 2048)


def race(host: EngineProcess, requests: int) -> dict[str, Any]:
    """Run one race of the two names and return its outcome."""
    goal = make_scoring(Objective.LATENCY, (), requests)
    runs: list[RaceRun] = []
    for number in range(1, MAX_ROUNDS + 1):
        round_s = 0.0
        for name in missing_in(runs, number, [TWIN, LIMITS]):
            measured = measure([host.replay("window", LIMITS, ReplayPlan())])
            round_s += measured.wall_s
            runs.append(RaceRun(name, number, goal.score(measured)))
        choice = Choice(draws_of_replays([TWIN, LIMITS], runs, DRAWS), LIMITS)
        is_enough = number >= MIN_ROUNDS_LIVE
        if is_enough and is_settled(choice, [TWIN, LIMITS], round_s):
            break
    return {
        "separated": choice.decide().verdict is RaceVerdict.CHANGE,
        "rounds": max(run.round for run in runs),
        "values_s": [run.score.value for run in runs],
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--window", type=float, default=1.0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    whole = read_trace(ROOT / "traces" / "translation.jsonl", None, ReadOptions())
    window = busiest(whole, args.window).of(whole)
    races = []
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(LiveSource(), Path(folder) / "live.log") as host,
    ):
        started = host.start(demo_engine_args(), TWIN)
        host.load("window", window, 0)
        for number in range(args.races):
            races.append(race(host, len(window)))
            print(f"{number}: {races[-1]}", file=sys.stderr, flush=True)
    wrong = sum(found["separated"] for found in races)
    values = [value for found in races for value in found["values_s"]]
    middle = median(values)
    off = median(abs(value / middle - 1) for value in values)
    print(
        f"{len(window)} requests, {len(races)} races of two identical configurations: "
        f"{len(races) - wrong} ties, {wrong} told apart; rounds "
        f"{dict(Counter(found['rounds'] for found in races))}; a replay's value is "
        f"{off:.1%} off the median of all (median of {len(values)}, "
        f"{min(values) / middle - 1:+.0%} to {max(values) / middle - 1:+.0%})"
    )
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": started.info.device,
            "vllm": started.info.vllm_version,
            "races": races,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
