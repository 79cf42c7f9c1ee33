"""Whole runs of one case on the real engine, their answers held to an exhaustive live grid.

    python tests/benchmarks/whole_runs.py TRACE [--config FILE] [--load 1] [--window peak:10s]
        [--current 8/512] [--caps 4,8,16,32] [--budget 120] [--runs 10] [--rounds 3]
        [-o results.json]
    python tests/benchmarks/whole_runs.py --again results.json

Each run is the whole of `tune` on the window, with a seed of its own. Then one engine replays
the window at every setting of the grid that the runs searched, and at each that was answered,
once a round, in an order that is shuffled anew. The settings are held to each other by the
objective's latency at the quantile that a run decides by: p50 where there are few requests.

The best of a grid of noisy replays looks better than it is. So the best is chosen by some of
the rounds and both it and the answer are judged by the others, each round once among these:
that is the loss. What a single round's best would lose, judged alike, stands beside it where
there are three rounds. A told gain is held to the answer over the current setting: over all
rounds, and the least and greatest of a round, which is how well the live one is known.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from truth_figures import at_limits, limits_of

from support.planted_judged import Said
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.serve_config import read_config
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.run.context import Workload
from tuner.run.options import TuningOptions
from tuner.run.tune import tune
from tuner.search.budget import Aim
from tuner.search.objective import Objective, Tier
from tuner.search.space import search_space
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import read_profile
from tuner.traffic.formats import read_trace
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import parse_window

AIM = Aim(Objective.BALANCED, (), ReplayPlan(), None)

Values = Mapping[EngineLimits, Sequence[float]]
"""What each setting cost in each round, in seconds."""


def run_once(
    window: Trace,
    values: Mapping[str, object],
    args: argparse.Namespace,
    seed: int,
    folder: Path,
) -> dict[str, Any]:
    """Tune and return what was said."""
    options = TuningOptions(
        trace=window,
        config=at_limits(values, limits_of(args.current)),
        window="all",
        budget_s=args.budget,
        ladder=[int(cap) for cap in args.caps.split(",")],
        seed=seed,
        run_dir=folder,
    )
    began_s = time.monotonic()
    result = tune(options)
    said = Said.of(result)
    took_s = time.monotonic() - began_s
    advice = result.recommendation
    odds = None if advice is None else advice.odds
    print(
        f"seed {seed}: {said.verdict} {said.limits}, gain {said.gain} "
        f"({said.gain_low} … {said.gain_high}), {said.rounds} rounds, {took_s:.0f} s",
        flush=True,
    )
    return {**asdict(said), "limits": str(said.limits), "took_s": took_s, "odds": repr(odds)}


def the_grid(window: Trace, args: argparse.Namespace, folder: Path) -> list[EngineLimits]:
    """Return what a run may try on the grid, by the profile that it made."""
    current = limits_of(args.current)
    facts = ProfiledEngine(read_profile(folder / "profile.yaml"), is_forced=True).facts({})
    caps = tuple(int(cap) for cap in args.caps.split(","))
    return search_space(facts, window, caps, current).grid()


def live_grid(
    window: Trace, values: Mapping[str, object], settings: Sequence[EngineLimits], rounds: int
) -> dict[EngineLimits, list[float]]:
    """Replay the window at every setting, once a round; return the costs."""
    workload = Workload.of_whole(window, AIM)
    ceiling = settings[0]
    for limits in settings:
        ceiling = ceiling.covering(limits)
    costs: dict[EngineLimits, list[float]] = {limits: [] for limits in settings}
    order = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(LiveSource(), Path(folder) / "live.log") as host,
    ):
        host.start(values, ceiling)
        host.load("window", window, 0)
        host.replay("window", settings[0], ReplayPlan())  # whatever is done a first time
        for number in range(rounds):
            turn = [*settings]
            order.shuffle(turn)
            for limits in turn:
                measured = measure([host.replay("window", limits, ReplayPlan())])
                cost = workload.score(measured).value_in(Tier.GOOD)
                costs[limits].append(cost)
                print(f"  round {number + 1}, {limits}: {cost:.4g} s", flush=True)
    return costs


def middle(costs: Sequence[float], rounds: Sequence[int]) -> float:
    """Return the geometric mean of some rounds."""
    return math.exp(mean(math.log(costs[k]) for k in rounds))


def losses(costs: Values, answer: EngineLimits | None) -> list[float]:
    """Return what an answer loses, judged by each round, the best chosen by the others.

    Without an answer, that of the best of one round, the one before.
    """
    rounds = range(len(next(iter(costs.values()))))
    found = []
    for judge in rounds:
        others = [k for k in rounds if k != judge]
        best = min(costs, key=lambda s: middle(costs[s], others))
        before = others[(judge - 1) % len(others)]
        chosen = answer or min(costs, key=lambda s: costs[s][before])
        found.append(costs[chosen][judge] / costs[best][judge] - 1)
    return found


def told(
    runs: Sequence[Mapping[str, Any]], costs: Values, current: EngineLimits
) -> dict[str, Any]:
    """Print and return what the answers came to."""
    every = range(len(costs[current]))
    typical = {limits: middle(found, every) for limits, found in costs.items()}
    best = min(typical, key=lambda s: typical[s])
    runs = [run for run in runs if run["limits"] != "None"]
    answers = [limits_of(run["limits"]) for run in runs]
    lost = {limits: mean(losses(costs, limits)) for limits in set(answers)}
    single = mean(losses(costs, None)) if len(every) > 2 else math.nan
    spread = median(max(found) / min(found) - 1 for found in costs.values())
    print(
        f"{len(costs)} settings, {len(every)} rounds: best {best} {typical[best]:.4g} s, "
        f"current {current} {typical[current]:.4g} s; a setting's rounds differ by "
        f"{spread:.1%} (median)"
    )
    for limits, n in Counter(answers).most_common():
        print(
            f"  {n} of {len(runs)} answered {limits}: {typical[limits]:.4g} s, loss "
            f"{lost[limits]:+.1%}"
        )
    each = [lost[limits] for limits in answers]
    keeps = mean(losses(costs, current))
    print(
        f"loss of the answers {mean(each):+.1%} in the mean, {max(each):+.1%} at most; of the "
        f"current setting {keeps:+.1%}"
        + ("" if math.isnan(single) else f"; of the best of a single round {single:+.1%}")
    )
    covered, off = 0, []
    for run, limits in zip(runs, answers, strict=True):
        if run["gain"] is None or run["gain_low"] is None:
            continue
        true = typical[limits] / typical[current] - 1
        off.append(run["gain"] - true)
        covered += run["gain_low"] <= true <= run["gain_high"]
    if off:
        print(
            f"told gain less the live one {mean(off):+.1%} in the mean; the live one within the"
            f" told interval {covered} of {len(off)}"
        )
    for limits in dict.fromkeys(answers):
        rounds = [costs[limits][k] / costs[current][k] - 1 for k in every]
        print(f"  {limits} live by the round: {min(rounds):+.1%} to {max(rounds):+.1%}")
    return {
        "best": str(best),
        "losses": each,
        "loss_of_a_single_round": None if math.isnan(single) else single,
        "loss_of_current": keeps,
        "told_off": off,
        "covered": covered,
        "spread_of_rounds": spread,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--window", default="peak:10s")
    parser.add_argument("--current", default="8/512")
    parser.add_argument("--caps", default="4,8,16,32")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", type=Path, help="results to sum up anew")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be 2 at least: some choose the best, the others judge")
    if args.again:
        kept = json.loads(args.again.read_text())
        costs = {limits_of(text): found for text, found in kept["costs_s"].items()}
        told(kept["runs"], costs, limits_of(kept["current"]))
        return
    whole = at_load(read_trace(Path(args.trace)), args.load)
    window = parse_window(args.window).resolve(whole).of(whole)
    values = read_config(args.config) if args.config else demo_engine_args()
    print(f"{len(window)} requests in {window.duration_s:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(seed) for seed in range(args.runs)]
        runs = [run_once(window, values, args, k, place) for k, place in enumerate(places)]
        settings = the_grid(window, args, places[0])
    current = limits_of(args.current)
    answers = [limits_of(run["limits"]) for run in runs if run["limits"] != "None"]
    settings = list(dict.fromkeys([*settings, current, *answers]))
    costs = live_grid(window, values, settings, args.rounds)
    found = told(runs, costs, current)
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "requests": len(window),
            "current": args.current,
            "figures": found,
            "costs_s": {str(limits): each for limits, each in costs.items()},
            "runs": runs,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
