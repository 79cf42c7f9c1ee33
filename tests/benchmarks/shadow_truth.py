"""How true the shadow is: calibrate as `tune` does, predict settings, measure them live.

    python tests/benchmarks/shadow_truth.py --suite cpu --traces DIR -o results.json
    python tests/benchmarks/shadow_truth.py --suite uncut --traces DIR -o results.json
    python tests/benchmarks/shadow_truth.py --suite drafts --traces DIR -o results.json
    python tests/benchmarks/shadow_truth.py --trace prod.jsonl --window 60 --value model=NAME

The suite cpu cuts all lengths to a quarter, uncut takes them as recorded, drafts does so with
an engine that decodes speculatively. `gpu_campaign` runs scenarios for a CUDA device.

A scenario is a trace, a load, a window and a KV cache. A run of `tune` on the window is ended
as soon as it has a step model; then all settings are measured live --runs times on one engine,
in turns in a shuffled order, so that the noise of two identical live runs stands beside the
shadow's error. The settings are the whole grid: the regret is against the best of them. Prints,
for each metric, the median absolute error of the shadow, that of the shadow at the speed that
each live run had (the mood of the machine is in the first error and not in the second) and the
median difference of two live runs, and over all settings Kendall's tau and the regret of the
shadow's choice, beside those of a single live run that is judged by another. A choice's regret
against an exhaustive live grid is judged by live runs that neither of the two saw. --again FILE
prints them of kept results. With --suite, DIR holds azure_2023_conv.open.csv,
azure_2023_code.open.csv and mooncake_conversation.open.jsonl.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from truth_figures import at_limits, limits_of, show, summary

from support.drafting import DraftingSource, drafting_values
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.recorder.rows import own_version
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.run.context import Workload
from tuner.run.directory import STEPS_FILE
from tuner.run.listener import Listener
from tuner.run.options import TuningOptions
from tuner.run.predict import at_own_speed
from tuner.run.rounds import packed
from tuner.run.tune import tune
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.shadow.calibration import error_ratio
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile, read_profile
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.resample import at_load
from tuner.traffic.traces import TooLong, Trace
from tuner.traffic.windows import busiest

SETTINGS = (
    *("2/2048", "8/512", "64/4096"),
    *("4/2048", "6/1024", "12/2048", "16/256", "24/4096", "32/512"),
)
# What a run of `tune` may take that is ended once it has calibrated, and from where it begins.
BUDGET_S, CURRENT = 200.0, "8/512"
DEMO_BLOCK_BYTES = 393_216  # 128 tokens of the demo model


@dataclass(frozen=True)
class Scenario:
    """What is replayed on which engine."""

    name: str
    trace: str
    window_s: float
    load: float = 1.0
    clip: int = 8192
    shrink: int = 1
    values: dict[str, object] = field(default_factory=dict)
    settings: tuple[str, ...] = SETTINGS
    current: str = CURRENT
    accepted: tuple[float, ...] = ()

    @property
    def source(self) -> LiveSource:
        """Where its engines come from: of those that draft, with a sampler for CPUs."""
        return DraftingSource(rates=self.accepted) if self.accepted else LiveSource()


def drafts_suite(folder: Path) -> list[Scenario]:
    """Return two real traces with lengths as recorded on an engine that drafts three tokens.

    A head without training is believed as often as one of EAGLE-3 may be.
    """
    length = {"max-model-len": "16384"}
    conv = str(folder / "azure_2023_conv.open.csv")
    code = str(folder / "azure_2023_code.open.csv")
    values = {**drafting_values(Path(tempfile.mkdtemp()), 3), **length}
    often = (0.8, 0.5, 0.3)
    return [
        Scenario("conv, drafts", conv, 8, 1.0, 16000, 1, values, accepted=often),
        Scenario("code, drafts", code, 6, 0.1, 16000, 1, values, accepted=often),
    ]


def uncut_suite(folder: Path) -> list[Scenario]:
    """Return two real traces with lengths as recorded, at loads that the demo model bears.

    Mooncake's prompts are not among them: a replay of thirty takes two minutes on a CPU.
    """
    values: dict[str, object] = {"max-model-len": "16384"}
    conv = str(folder / "azure_2023_conv.open.csv")
    code = str(folder / "azure_2023_code.open.csv")
    return [
        Scenario("conv, uncut", conv, 6, 1.0, 16000, 1, values),
        Scenario("code, uncut", code, 6, 0.1, 16000, 1, values),
    ]


def suite(folder: Path) -> list[Scenario]:
    """Return three real traces scaled to the demo model, with room in the KV cache and without.

    All lengths are a quarter of the recorded ones, hash blocks with them.
    """
    roomy: dict[str, object] = {"max-model-len": "4096"}
    tight = {**roomy, "kv-cache-memory-bytes": str(DEMO_BLOCK_BYTES * 36)}
    conv = str(folder / "azure_2023_conv.open.csv")
    code = str(folder / "azure_2023_code.open.csv")
    moon = str(folder / "mooncake_conversation.open.jsonl")
    return [
        Scenario("conv", conv, 8, 4.0, 8192, 4, roomy),
        Scenario("conv, KV tight", conv, 8, 4.0, 8192, 4, tight),
        Scenario("code", code, 10, 0.4, 8192, 4, roomy),
        Scenario("code, KV tight", code, 10, 0.4, 8192, 4, tight),
        Scenario("mooncake", moon, 9, 2.0, 8192, 4, roomy),
        Scenario("mooncake, KV tight", moon, 9, 2.0, 8192, 4, tight),
    ]


def traffic(scenario: Scenario) -> Trace:
    """Return the scenario's window."""
    trace = read_trace(Path(scenario.trace), None, ReadOptions())
    trace = at_load(trace.limit_lengths(scenario.clip, TooLong.CLIP), scenario.load)
    trace = shrunk(trace, scenario.shrink)
    return busiest(trace, scenario.window_s).of(trace)


def shrunk(trace: Trace, times: int) -> Trace:
    """Return the trace with lengths, and hash blocks, so many times as short."""
    hashes = trace.hashes
    return Trace(
        due_s=trace.due_s,
        prompt_tokens=-(-trace.prompt_tokens // times),
        output_tokens=-(-trace.output_tokens // times),
        hashes=hashes and replace(hashes, block_size=hashes.block_size // times),
        source=trace.source,
    )


SUITES = {"cpu": suite, "uncut": uncut_suite, "drafts": drafts_suite}


class _FittedError(Exception):
    """Ends a run as soon as it has a step model."""


class _UntilFitted(Listener):
    def note(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)
        if text.startswith("step model from"):
            raise _FittedError


def calibrated(
    window: Trace,
    values: Mapping[str, object],
    folder: Path,
    budget_s: float = BUDGET_S,
    at: str = CURRENT,
    source: LiveSource | None = None,
) -> Profile:
    """Return the profile of a run of `tune` that is ended once it has calibrated."""
    options = TuningOptions(
        trace=window,
        config=at_limits(values, limits_of(at)),
        window="all",
        budget_s=budget_s,
        run_dir=folder,
    )
    with suppress(_FittedError):
        tune(options, _UntilFitted(), source=source)
    return read_profile(folder / "profile.yaml")


def run(
    scenario: Scenario,
    runs: int,
    folder: Path,
    budget_s: float = BUDGET_S,
    until_s: float = math.inf,
    learnt: Path | None = None,
) -> dict[str, Any]:
    """Measure one scenario and return everything.

    No further run begins that would not end before the monotonic clock says `until_s`. Where
    there is a profile at `learnt`, nothing is calibrated.
    """
    window = traffic(scenario)
    settings = [limits_of(text) for text in scenario.settings]
    ceiling = settings[0]
    for limits in settings:
        ceiling = ceiling.covering(limits)
    is_demo = "model" not in scenario.values
    values = {**(demo_engine_args() if is_demo else {}), **scenario.values}
    print(f"\n{scenario.name}: {len(window)} requests in {window.duration_s:.0f} s", flush=True)
    walls: dict[str, float] = {}
    began_s = time.monotonic()
    name = scenario.name.replace(" ", "_")
    if learnt is not None and learnt.exists():
        profile = read_profile(learnt)
    else:
        given = (window, values, folder / name, budget_s, scenario.current)
        profile = calibrated(*given, scenario.source)
    walls["start and calibrate"] = time.monotonic() - began_s
    live: dict[EngineLimits, list[Measurement]] = {limits: [] for limits in settings}
    with EngineProcess(scenario.source, folder / "live.log") as host:
        started = host.start(values, ceiling)
        host.load("window", window, 0)
        began_s, longest_s = time.monotonic(), 0.0
        order = random.Random(0)
        for _ in range(runs):
            turn = [*settings]
            order.shuffle(turn)
            for limits in turn:
                if any(live.values()) and time.monotonic() + longest_s > until_s:
                    break
                log = host.replay("window", limits, ReplayPlan(keep_steps=True))
                _keep_steps(folder / STEPS_FILE, limits, log)
                print(f"  {limits}: {log.wall_s:.1f} s", file=sys.stderr, flush=True)
                live[limits].append(measure([log]))
                longest_s = max(longest_s, log.wall_s)
        live = {limits: found for limits, found in live.items() if found}
        made = sum(map(len, live.values()))
        walls["live, each"] = (time.monotonic() - began_s) / max(1, made)
        info = started.info
    start = KvStart(ceiling, info.num_blocks)
    predictor = Predictor(replace(profile, kv_starts=(start,)), ceiling)
    workload = _workload(window)
    shadow, own = {}, {}
    for limits, found in live.items():
        predicted = predictor.measure([window], limits, ReplayPlan())
        if isinstance(predicted, Measurement):
            shadow[str(limits)] = predicted.as_json()
        steps_s = [m.busy_s / max(m.steps, 1) for m in found]
        each = [at_own_speed(predictor, workload, limits, step_s) for step_s in steps_s]
        own[str(limits)] = [None if one is None else one.as_json() for one in each]
    result = {
        "scenario": {**asdict(scenario), "trace": Path(scenario.trace).name},
        "requests": len(window),
        "device": info.device,
        "vllm": info.vllm_version,
        "num_blocks": info.num_blocks,
        "captured": [len(info.captured_sizes), max(info.captured_sizes, default=0)],
        "has_own_graphs": info.has_own_graphs,
        "asynchronous": info.asynchronous,
        "fit": msgspec.structs.asdict(profile.fit),
        "error_ratio": error_ratio(profile),
        "walls_s": walls,
        "live": {str(limits): [m.as_json() for m in found] for limits, found in live.items()},
        "shadow": shadow,
        "own_speed": own,
        "predicted": [str(limits) for limits in live],
    }
    show(result)
    return result


def _keep_steps(path: Path, limits: EngineLimits, log: ReplayLog) -> None:
    """Add a replay's steps to a file, so that more may be learnt from them later."""
    if log.kept_steps is not None:
        with path.open("a") as file:
            file.writelines(
                json.dumps(row) + "\n" for row in packed([(limits, log.kept_steps)])
            )


def _workload(window: Trace) -> Workload:
    """Return the window as a run of `tune` would predict it."""
    aim = Aim(Objective.BALANCED, (), ReplayPlan(), None)
    return Workload.of_piece(window, ReplayPlan(), aim)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--suite", choices=list(SUITES))
    parser.add_argument("--traces", type=Path, help="folder of the suite's traces")
    parser.add_argument("--trace")
    parser.add_argument("--window", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--clip", type=int, default=8192)
    parser.add_argument("--value", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--again", type=Path, metavar="FILE", help="results to sum up anew")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.again:
        kept = json.loads(args.again.read_text())
        kept["figures"] = summary(kept["scenarios"])
        (args.output or args.again).write_text(json.dumps(kept, indent=1) + "\n")
        return
    if args.suite:
        scenarios = [s for s in SUITES[args.suite](args.traces) if args.only in s.name]
    else:
        values: dict[str, object] = dict(value.split("=", 1) for value in args.value)
        name, settings = Path(args.trace).stem, tuple(args.settings.split(","))
        scenarios = [
            Scenario(name, args.trace, args.window, args.load, args.clip, 1, values, settings)
        ]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for scenario in scenarios:
            results.append(run(scenario, args.runs, Path(folder)))
            if args.output:
                write(args.output, results, {})
    figures = summary(results)
    if args.output:
        write(args.output, results, figures)


def write(path: Path, results: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Keep everything with the machine's description and the command."""
    content = {
        "command": " ".join(Path(word).name for word in sys.argv),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "tuner": own_version(),
        "figures": figures,
        "scenarios": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
