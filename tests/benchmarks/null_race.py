"""How often a race without predictions tells settings apart, alike ones and others.

    python tests/benchmarks/null_race.py [--races 20] [--window 1] [-o FILE]
    python tests/benchmarks/null_race.py --drawn 200 [--noise 0.06] [-o FILE]

The first is really live: one engine with the demo model replays one window of
traces/translation.jsonl, and every race has two entries of the same limits under two names. The
second draws what replays show, of settings whose truth is known: rounds share a mood (Student's
t with 4 degrees of freedom, a scale of 5 %), and each replay has noise (5 degrees, a standard
deviation of --noise). Races run by the race's own rules until these end them. Prints how many
changed, what the answers lose, and how far told gains are off.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.run.drawing import DRAWS, FEW_DRAWS
from tuner.run.live_search import MIN_ROUNDS_LIVE
from tuner.run.race import is_settled, who_replays
from tuner.search.choice import Choice
from tuner.search.objective import Objective, Score, Tier, make_scoring
from tuner.search.race import MAX_ROUNDS, RaceDecision, RaceRun, RaceVerdict, missing_in
from tuner.search.replayed import draws_of_replays
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.windows import busiest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = EngineLimits(16, 2048)
# What the race calls the same limits the second time.
TWIN = EngineLimits(17, 2048)
# What a drawn replay takes of the engine: as on the demo model's window, seconds.
REPLAY_S = 1.5
MOOD = 0.05

Replay = Callable[[EngineLimits], tuple[Score, float]]
"""Replays a setting; returns what it showed, and the seconds that took."""

# The true effects of rivals and, last, of the current setting, in logarithms.
POPULATIONS: dict[str, Callable[[np.random.Generator], Sequence[float]]] = {
    "one that is alike": lambda _: [0.0, 0.0],
    "three that are alike": lambda _: [0.0] * 4,
    "one that gains 5 %": lambda _: [math.log(0.95), 0.0],
    "three, one of them gains 5 %": lambda _: [math.log(0.95), 0.0, 0.0, 0.0],
    "three, apart by 5 % (normal)": lambda rng: rng.normal(0.0, 0.05, 4).tolist(),
}


def race(names: Sequence[EngineLimits], replay: Replay) -> tuple[RaceDecision, list[RaceRun]]:
    """Run one race, of which the last setting is the current one, as `tuner.run.race` does."""
    current, runs, inside = names[-1], list[RaceRun](), list(names)
    number = 0
    while number < MAX_ROUNDS:
        number += 1
        spent_s = 0.0
        for name in missing_in(runs, number, inside):
            score, took_s = replay(name)
            runs.append(RaceRun(name, number, score))
            spent_s += took_s
        per_replay_s = spent_s / len(inside)
        few = Choice(draws_of_replays(names, runs, FEW_DRAWS), current)
        inside = few.contenders()
        if number >= MIN_ROUNDS_LIVE and all(
            is_settled(choice, inside, per_replay_s * len(inside))
            for choice in (few, Choice(draws_of_replays(names, runs, DRAWS), current))
        ):
            break
        each_s = dict.fromkeys(inside, per_replay_s)
        inside = who_replays(few, inside, each_s.__getitem__, least=2)
    return Choice(draws_of_replays(names, runs, DRAWS), current).decide(number), runs


@dataclass(frozen=True, slots=True)
class Drawn:
    """One race of drawn replays. Gains are shares of the current setting's value."""

    is_change: bool
    rounds: int
    loss: float
    true_gain: float = 0.0
    told_gain: float = 0.0
    is_held: bool = False


def drawn_race(effects: Sequence[float], noise: float, rng: np.random.Generator) -> Drawn:
    """Race settings of known effects."""
    names = [EngineLimits(LIMITS.max_num_seqs + i, 2048) for i in range(len(effects))]
    moods = MOOD * rng.standard_t(4, MAX_ROUNDS)
    replayed: Counter[EngineLimits] = Counter()

    def replay(limits: EngineLimits) -> tuple[Score, float]:
        mood, replayed[limits] = moods[replayed[limits]], replayed[limits] + 1
        own = noise * math.sqrt(3 / 5) * rng.standard_t(5)
        value = math.exp(effects[names.index(limits)] + mood + own)
        return Score(Tier.GOOD, value, "e2e_p95", load_used=0.5), REPLAY_S

    decided, _ = race(names, replay)
    mine = effects[names.index(decided.winner)]
    loss, is_change = math.expm1(mine - min(effects)), decided.verdict is RaceVerdict.CHANGE
    if not is_change or decided.gain is None:
        return Drawn(is_change, decided.rounds, loss)
    true, told = math.expm1(mine - effects[-1]), decided.gain
    is_held = told.low is not None and told.low - 1 <= true <= (told.high or math.inf) - 1
    return Drawn(is_change, decided.rounds, loss, true, told.value - 1, is_held)


def drawn_races(count: int, noise: float) -> dict[str, Any]:
    """Race each population so often, print a line of each and return all."""
    races: dict[str, list[Drawn]] = {}
    for name, of in POPULATIONS.items():
        rng = np.random.default_rng(0)
        races[name] = found = [drawn_race(of(rng), noise, rng) for _ in range(count)]
        told = [race for race in found if race.told_gain]
        off = [100 * (r.told_gain - r.true_gain) for r in told]
        print(
            f"{name}: {sum(r.is_change for r in found)} of {count} changed, loss"
            f" {fmean(r.loss for r in found):.2%}, {fmean(r.rounds for r in found):.1f} rounds,"
            f" told gain less the true one {fmean(off) if off else 0:+.1f} points, within the"
            f" interval {sum(r.is_held for r in told)} of {len(told)}",
            flush=True,
        )
    return {
        "noise": noise,
        "races": {n: [asdict(r) for r in all_] for n, all_ in races.items()},
    }


def live_races(count: int, window_s: float) -> dict[str, Any]:
    """Race two names of the same limits on a live engine, print what it told and return it."""
    whole = read_trace(ROOT / "traces" / "translation.jsonl", None, ReadOptions())
    window = busiest(whole, window_s).of(whole)
    goal = make_scoring(Objective.LATENCY, (), len(window))
    races = []
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(LiveSource(), Path(folder) / "live.log") as host,
    ):
        info = host.start(demo_engine_args(), TWIN).info
        host.load("window", window, 0)

        def replay(_: EngineLimits) -> tuple[Score, float]:
            measured = measure([host.replay("window", LIMITS, ReplayPlan())])
            return goal.score(measured), measured.wall_s

        replay(LIMITS)
        for _ in range(count):
            decided, runs = race([TWIN, LIMITS], replay)
            is_change = decided.verdict is RaceVerdict.CHANGE
            values_s = [run.score.value for run in runs]
            races.append(
                {"separated": is_change, "rounds": decided.rounds, "values_s": values_s}
            )
            ended = "told apart" if is_change else "a tie"
            print(f"race {len(races)}: {ended} after {decided.rounds} rounds", flush=True)
    _print_spread(races)
    return {"device": info.device, "vllm": info.vllm_version, "races": races}


def _print_spread(races: Sequence[dict[str, Any]]) -> None:
    """Say how many were told apart and how far replays were from each other."""
    values = [value for found in races for value in found["values_s"]]
    middle, wrong = median(values), sum(found["separated"] for found in races)
    spread = f"{min(values) / middle - 1:+.1%} … {max(values) / middle - 1:+.1%}"
    off = median(abs(value / middle - 1) for value in values)
    print(
        f"{wrong} of {len(races)} races told identical configurations apart; single replays"
        f" {spread} around their median, the middle one {off:.1%} off it (n {len(values)});"
        f" rounds {dict(Counter(found['rounds'] for found in races))}"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--window", type=float, default=1.0)
    parser.add_argument("--drawn", type=int)
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = (
        drawn_races(args.drawn, args.noise)
        if args.drawn
        else live_races(args.races, args.window)
    )
    result = {
        "command": " ".join(["null_race.py", *sys.argv[1:]]),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
