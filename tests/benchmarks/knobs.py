"""What knobs cost to search, and whether they do on vLLM what is predicted of them.

    python tests/benchmarks/knobs.py space TRACE [--profile NAME] [--runs 3] [-o results.json]
    python tests/benchmarks/knobs.py live TRACE --profile FILE [--config FILE]
        [--window peak:1.2s] [--limits 8/2048] [--kv 0.025,0.04] [--rounds 3] [--replays 3]
        [--starts results.json] [-o results.json]

`space` repeats TRACE until it lasts an hour, predicts the grid of limits and then all knobs
beside the best, and tells of how many combinations, by how many predictions, in how much of
the processor's time. Every other combination is then predicted too on a minute of the hour, to
see by how much the best of all is better than what was found.

`live` starts vLLM once a round with each of: nothing changed, prefix caching the other way, KV
caches of other sizes, a threshold for long prompts, and nothing changed once more; each in its
own process, in turns, the order reversed every other round. Each replays the window --replays
times. Told is what each costs over nothing changed (the mean of its two starts), live and by
the profile on the same requests, with the 90 % interval of the prediction; that of the last
shows by how much two starts of one configuration differ. Beside it stands by how much live is
off the prediction at the speed that its own steps had, which is what the simulator answers for,
and that speed over the profile's.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.serve_config import read_config
from tuner.engine.shape import EngineShape
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing, compare_engines
from tuner.run.knobs.advice import advise
from tuner.run.knobs.known import KNOBS, Change, Place, kv_times
from tuner.run.knobs.records import KnobAdvice
from tuner.run.predict import Predictions, at_own_speed, predict, predict_more
from tuner.search.budget import Aim
from tuner.search.objective import Objective, Tier
from tuner.search.space import SearchSpace, search_space
from tuner.search.trials import leader
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile, read_profile
from tuner.traffic.formats import read_trace
from tuner.traffic.traces import TooLong, Trace
from tuner.traffic.windows import Window, parse_window, whole

CAPS = (4, 8, 12, *range(16, 128, 8), *range(128, 257, 16))
AIM = Aim(Objective.BALANCED, (), ReplayPlan(), None)
# The tokens of the threshold that is tried.
THRESHOLD = 256


def an_hour(trace: Trace, seconds: float = 3600.0) -> Trace:
    """Return the trace, repeated until it lasts so long; sessions and ids are left out."""
    times, length_s = max(1, round(seconds / trace.duration_s)), trace.duration_s + 1.0
    return replace(
        trace,
        due_s=np.concatenate([trace.due_s + k * length_s for k in range(times)]),
        prompt_tokens=np.tile(trace.prompt_tokens, times),
        output_tokens=np.tile(trace.output_tokens, times),
        e2e_s=None,
        ttft_s=None,
        request_ids=None,
        hashes=None,
        turns=None,
        priorities=None,
    )


def workload_of(trace: Trace) -> Workload:
    return Workload.of("traffic", trace, (whole(trace),), AIM)


Searched = tuple[Predictor, SearchSpace, EngineLimits, KnobAdvice]


def space_once(profile: Profile, trace: Trace) -> tuple[dict[str, Any], Searched]:
    """Return what a search of limits and knobs found, and what it cost."""
    facts = ProfiledEngine(profile, is_forced=True).facts({})
    space = search_space(facts, trace, CAPS, facts.current_limits)
    predictor, workload = Predictor(profile), workload_of(trace)
    began_s, wall_s = time.process_time(), time.perf_counter()
    found = predict(predictor, space, workload)
    grid_s = time.process_time() - began_s
    best = leader(found.observations)
    limits = space.current if best is None else best.limits
    advice = advise(predictor, found, limits, space, [*KNOBS])
    if advice is None:
        raise SystemExit("there is no knob")
    return {
        "requests": len(trace),
        "settings": len(found.outcomes),
        "combinations": advice.space,
        "predicted": advice.predicted,
        "grid_cpu_s": grid_s,
        "cpu_s": time.process_time() - began_s,
        "wall_s": time.perf_counter() - wall_s,
        "lines": advice.lines,
    }, (predictor, space, limits, advice)


def missed(trace: Trace, searched: Searched) -> float:
    """Return by how much the best of all combinations is better than what was found.

    On a minute of the hour; only what is set of the knobs, at every setting of the grid.
    """
    predictor, space, limits, advice = searched
    settings, chosen = advice.settings, advice.limits
    part = Window(0.0, 60.0).of(trace)
    place = Place(predictor, limits, [part])
    values: list[Sequence[Change | None]] = []
    for knob in KNOBS.values():
        changes = knob.changes(place)
        if not knob.advice_only and not isinstance(changes, str):
            values.append([None, *changes])
    costs, found = [], math.inf
    for combination in itertools.product(*values):
        changed = predictor
        turned = [change for change in combination if change is not None]
        for change in turned:
            changed = change.engine(changed)
        keys = {key: value for change in turned for key, value in change.values.items()}
        nothing = Predictions(workload_of(part))
        whole_grid = predict_more(changed, nothing, [*space.grid(), chosen])
        for at, outcome in whole_grid.outcomes.items():
            score = whole_grid.workload.score(outcome)
            cost = score.value if score.tier is Tier.GOOD else math.inf
            costs.append(cost)
            if at == chosen and keys == settings:
                found = cost
    return found / min(costs) - 1


def run_space(args: argparse.Namespace) -> dict[str, Any]:
    """Search several times on one core and tell the middle of them."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    profile = read_profile(Path(args.profile))
    trace = an_hour(read_trace(Path(args.trace))).limit_lengths(
        profile.shape.max_model_len, TooLong.CLIP
    )
    made = [space_once(profile, trace) for _ in range(args.runs)]
    runs = [found for found, _ in made]
    off = missed(trace, made[0][1])
    cpu_s = [one["cpu_s"] for one in runs]
    first = runs[0]
    print("\n".join(first["lines"]))
    print(
        f"{first['requests']:,} requests, {first['combinations']:,} combinations by "
        f"{first['predicted'] + first['settings']:,} predictions: {median(cpu_s):.1f} s of one "
        f"core ({min(cpu_s):.1f} to {max(cpu_s):.1f}, n {len(cpu_s)}), of which the grid "
        f"{median(one['grid_cpu_s'] for one in runs):.1f} s; the best of all combinations is "
        f"{off:.2%} better on a minute of it"
    )
    return {"runs": runs, "missed_ratio": off}


def kinds(
    predictor: Predictor, limits: EngineLimits, piece: Trace, kv_sizes: Sequence[float]
) -> dict[str, Change]:
    """Return what is tried live, by name."""
    place = Place(predictor, limits, [piece])
    caching = KNOBS["prefix-caching"].changes(place)
    thresholds = KNOBS["long-prefill"].changes(place)
    at = next(
        change
        for change in thresholds
        if not isinstance(change, str)
        and change.values["long-prefill-token-threshold"] == THRESHOLD
    )
    if isinstance(caching, str):
        raise SystemExit(caching)
    tried = {f"prefix caching {caching[0].text}": caching[0]}
    tried |= {f"KV cache {ratio:g} x": kv_times(place, ratio) for ratio in kv_sizes}
    return {**tried, f"threshold {THRESHOLD}": at}


def foretold(
    predictor: Predictor, workload: Workload, limits: EngineLimits, changes: Sequence[Change]
) -> list[tuple[float, float, float]]:
    """Return what each costs over nothing changed, with the interval that `tune` tells."""
    made = []
    nothing = Predictions(workload)
    drawn = []
    for one in (predictor, *(change.engine(predictor) for change in changes)):
        found = predict_more(one, nothing, [limits])
        score = workload.score(found.outcomes[limits])
        draws = Drawing(one, found).draws([limits], FEW_DRAWS)
        drawn.append((score.value_in(Tier.GOOD), draws))
    for value, draws in drawn[1:]:
        _, _, gain = compare_engines(draws, drawn[0][1], predictor.seed)
        low, high = (None, None) if gain is None else (gain.low, gain.high)
        made.append((value / drawn[0][0], low or math.nan, high or math.nan))
    return made


@dataclass(frozen=True)
class Start:
    """What a cold engine came to: the cost by the objective, and a step's mean, in seconds."""

    cost: float
    step_s: float


NOTHING, AGAIN = "nothing", "nothing, again"


def run_live(args: argparse.Namespace) -> dict[str, Any]:
    """Start vLLM with each, in turns, and tell live beside predicted."""
    profile = read_profile(Path(args.profile))
    values = read_config(Path(args.config)) if args.config else profile.serve_values
    seqs, tokens = map(int, args.limits.split("/"))
    limits = EngineLimits(seqs, tokens)
    whole_trace = read_trace(Path(args.trace))
    piece = parse_window(args.window).resolve(whole_trace).of(whole_trace)
    workload, predictor = workload_of(piece), Predictor(profile)
    tried = kinds(predictor, limits, piece, [float(x) for x in args.kv.split(",")])
    tried[AGAIN] = Change("nothing", {}, lambda engine: engine)
    told = foretold(predictor, workload, limits, [*tried.values()])
    settings = {NOTHING: {}, **{name: change.values for name, change in tried.items()}}
    starts: dict[str, list[Start]] = {name: [] for name in settings}
    rows = []
    if args.starts:
        kept = json.loads(Path(args.starts).read_text())["starts"]
        starts = {name: [Start(**one) for one in kept[name]] for name in settings}
    for number in range(1 if args.starts else args.rounds):
        order = [] if args.starts else [*settings][:: 1 if number % 2 == 0 else -1]
        for name in order:
            began_s = time.perf_counter()
            made = started(values, limits, workload, settings[name], args.replays)
            starts[name].append(made)
            print(
                f"round {number + 1}, {name}: {made.cost:.4g} s, a step {made.step_s * 1e3:.4g}"
                f" ms, {time.perf_counter() - began_s:.0f} s in all",
                flush=True,
            )
        own = {
            name: off_at_own_speed(change.engine(predictor), workload, limits, starts[name])
            for name, change in tried.items()
        }
        rows = told_beside(starts, tried, told, own)
    print(f"{len(piece)} requests, {workload.scoring.tail}, n {len(starts[NOTHING])}")
    return {
        "rows": rows,
        "starts": {name: [asdict(one) for one in made] for name, made in starts.items()},
        "shape": shown(profile.shape),
    }


def off_at_own_speed(
    predictor: Predictor, workload: Workload, limits: EngineLimits, starts: Sequence[Start]
) -> list[tuple[float, float]]:
    """Return what each start cost over what is predicted at its speed, and that speed."""
    found = []
    plain = predictor.measure(workload.pieces, limits, workload.plan)
    if not isinstance(plain, Measurement):
        return []
    for start in (start for start in starts if math.isfinite(start.cost)):
        one = at_own_speed(predictor, workload, limits, start.step_s)
        if one is not None:
            cost = workload.score(one).value_in(Tier.GOOD)
            found.append((start.cost / cost, start.step_s * plain.steps / plain.busy_s))
    return found


def told_beside(
    starts: Mapping[str, Sequence[Start]],
    tried: Mapping[str, Change],
    told: Sequence[tuple[float, float, float]],
    own: Mapping[str, Sequence[tuple[float, float]]],
) -> list[dict[str, Any]]:
    """Print what is known of each so far, live and predicted, and return it."""
    rows = []
    pairs = zip(starts[NOTHING], starts[AGAIN], strict=True)
    unchanged = [math.sqrt(a.cost * b.cost) for a, b in pairs]
    for name, (ratio, low, high) in zip(tried, told, strict=True):
        against = [one.cost for one in starts[NOTHING]] if name == AGAIN else unchanged
        live = [a.cost / b for a, b in zip(starts[name], against, strict=True)]
        mean = math.exp(sum(map(math.log, live)) / len(live))
        is_within = low <= mean <= high
        rows.append(
            {
                "knob": name,
                "live": live,
                "predicted": ratio,
                "interval": [low, high],
                "off_at_own_speed": [off for off, _ in own[name]],
                "speed": [speed for _, speed in own[name]],
            }
        )
        at_own = ", ".join(f"{off - 1:+.1%} at {speed:.2f}" for off, speed in own[name])
        print(
            f"{name:22} live {mean - 1:+7.1%} ({min(live) - 1:+.1%} to {max(live) - 1:+.1%})  "
            f"predicted {ratio - 1:+7.1%} ({low - 1:+.1%} to {high - 1:+.1%})  "
            f"off {mean / ratio - 1:+.1%}{'' if is_within else ', outside'}; at its own "
            f"speed off {at_own}"
        )
    return rows


def shown(shape: EngineShape) -> dict[str, Any]:
    return {"device": shape.device, "vllm": shape.vllm_version, "model": shape.model}


def started(
    values: Mapping[str, object],
    limits: EngineLimits,
    workload: Workload,
    changes: Mapping[str, object],
    replays: int,
) -> Start:
    """Return what a cold engine reaches by the objective over so many replays."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(LiveSource(), Path(folder) / "engine.log") as host,
    ):
        engine = EngineRunner(host, values, limits, seed=0)
        for name, piece in zip(workload.names, workload.pieces, strict=True):
            engine.use(name, piece)
        names, plan = workload.names * replays, workload.plan
        with engine.cold(limits, changes) as failure:
            outcome = failure or engine.measure(names, limits, plan, ())
    if not isinstance(outcome, Measurement):
        return Start(math.inf, math.nan)
    cost = workload.score(outcome).value_in(Tier.GOOD)
    return Start(cost, outcome.busy_s / max(outcome.steps, 1))


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["space", "live"])
    parser.add_argument("trace")
    parser.add_argument("--profile", default="meta-llama-3.1-8b.1xh100_sxm")
    parser.add_argument("--config")
    parser.add_argument("--window", default="peak:1.2s")
    parser.add_argument("--limits", default="8/2048")
    parser.add_argument(
        "--kv", default="0.025,0.04", help="times as many KV blocks as there are"
    )
    parser.add_argument("--starts", help="results of before, to be told anew")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    found = run_space(args) if args.part == "space" else run_live(args)
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
