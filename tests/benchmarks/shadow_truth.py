"""How true the shadow is: calibrate on three settings, predict others, measure them live.

    python tests/benchmarks/shadow_truth.py --suite cpu --traces DIR -o results.json
    python tests/benchmarks/shadow_truth.py --suite gpu --traces DIR -o results.json
    python tests/benchmarks/shadow_truth.py --trace prod.jsonl --window 60 --value model=NAME

The suite gpu wants one CUDA device: a 7B-shaped model with random weights at the default
start-up of vLLM, so that memory profiling, captured graphs and asynchronous scheduling are in.

A scenario is a trace, a load, a window and a KV cache. All settings, those calibrated on among
them, are measured live --runs times, in turns in a shuffled order, so that the machine's drift
hits calibration and test alike and the noise of two identical live runs stands beside the
shadow's error. The settings are the whole grid: the regret is against the best of all of them.
Prints, for each metric, the median absolute error of the shadow and the median difference of
two live runs, and over all settings Kendall's tau and the regret of the shadow's choice, beside
those of a single live run that is judged by another. A choice's regret against an exhaustive
live grid is judged by live runs that neither of the two saw. --again FILE prints them of kept
results.
With --suite, DIR holds azure_2023_conv.open.csv, azure_2023_code.open.csv and
mooncake_conversation.open.jsonl.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from truth_figures import limits_of, show, summary

from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.search.trials import COMPARED, measured_and_predicted
from tuner.shadow.calibration import Calibration, error_ratio
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.resample import at_load
from tuner.traffic.traces import TooLong, Trace
from tuner.traffic.windows import busiest

CALIBRATED = ("2/2048", "8/512", "64/4096")
PREDICTED = ("4/2048", "6/1024", "12/2048", "16/256", "24/4096", "32/512")
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
    values: dict[str, str] = field(default_factory=dict)
    calibrated: tuple[str, ...] = CALIBRATED
    predicted: tuple[str, ...] = PREDICTED


GPU_CALIBRATED = ("256/8192", "8/2048", "64/1024")
GPU_PREDICTED = ("16/2048", "32/4096", "48/1024", "96/8192", "128/2048", "192/512")


def gpu_suite(folder: Path) -> list[Scenario]:
    """Return three real traces for a 7B-shaped model; the last has little KV cache."""
    values = {
        "model": str(Path(__file__).parents[2] / "examples" / "qwen2.5-7b-shape"),
        "load-format": "dummy",
        "skip-tokenizer-init": "true",
        "max-model-len": "16384",
    }
    tight = {**values, "kv-cache-memory-bytes": str(4 << 30)}
    conv = str(folder / "azure_2023_conv.open.csv")
    code = str(folder / "azure_2023_code.open.csv")
    moon = str(folder / "mooncake_conversation.open.jsonl")
    fixed = (GPU_CALIBRATED, GPU_PREDICTED)
    return [
        Scenario("conv", conv, 60, 6.0, 16000, 1, values, *fixed),
        Scenario("conv, KV tight", conv, 60, 6.0, 16000, 1, tight, *fixed),
        Scenario("code", code, 60, 3.0, 16000, 1, values, *fixed),
        Scenario("mooncake", moon, 60, 1.0, 16000, 1, values, *fixed),
    ]


def suite(folder: Path) -> list[Scenario]:
    """Return three real traces scaled to the demo model, with room in the KV cache and without.

    All lengths are a quarter of the recorded ones, hash blocks with them.
    """
    roomy = {"max-model-len": "4096"}
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


def run(scenario: Scenario, runs: int, folder: Path) -> dict[str, Any]:
    """Measure one scenario and return everything."""
    window = traffic(scenario)
    known = [limits_of(text) for text in scenario.calibrated]
    others = [limits_of(text) for text in scenario.predicted]
    ceiling = known[0]
    for limits in (*known, *others):
        ceiling = ceiling.covering(limits)
    is_demo = "model" not in scenario.values
    values = {**(demo_engine_args() if is_demo else {}), **scenario.values}
    print(f"\n{scenario.name}: {len(window)} requests in {window.duration_s:.0f} s", flush=True)
    walls: dict[str, float] = {}
    live: dict[EngineLimits, list[dict[str, Any]]] = {}
    with EngineProcess(LiveSource(), folder / "live.log") as host:
        began_s = time.monotonic()
        started = host.start(values, ceiling)
        walls["start"] = time.monotonic() - began_s
        if started.shape is None:
            sys.exit(f"no shadow: {started.no_shadow}")
        host.load("window", window, 0)
        start = KvStart(ceiling, started.info.num_blocks)
        learnt = Calibration(started.shape, (start,), (), known[0], {})
        began_s = time.monotonic()
        order = random.Random(0)
        for _ in range(runs):
            turn = [*known, *others]
            order.shuffle(turn)
            for limits in turn:
                log = host.replay("window", limits, ReplayPlan(keep_steps=limits in known))
                print(f"  {limits}: {log.wall_s:.1f} s", file=sys.stderr, flush=True)
                live.setdefault(limits, []).append(measure([log]).as_json())
                learnt = learnt.and_steps(limits, [log.kept_steps] if log.kept_steps else [])
        walls["live, each"] = (time.monotonic() - began_s) / max(1, runs * len(live))
        info = started.info
    began_s = time.monotonic()
    profile = learnt.profile()
    walls["fit"] = time.monotonic() - began_s
    shadow = predicted(profile, ceiling, window, list(live), walls)
    profile = checked(profile, known, live, shadow)
    result = {
        "scenario": {**asdict(scenario), "trace": Path(scenario.trace).name},
        "requests": len(window),
        "device": info.device,
        "vllm": info.vllm_version,
        "num_blocks": info.num_blocks,
        "fit": asdict(profile.fit),
        "error_ratio": error_ratio(profile),
        "walls_s": walls,
        "live": {str(limits): found for limits, found in live.items()},
        "shadow": {str(limits): found for limits, found in shadow.items()},
        "predicted": [str(limits) for limits in others],
    }
    show(result)
    return result


def predicted(
    profile: Profile,
    ceiling: EngineLimits,
    window: Trace,
    settings: list[EngineLimits],
    walls: dict[str, float],
) -> dict[EngineLimits, dict[str, Any]]:
    """Return what the profile predicts of the settings."""
    predictor = Predictor(profile, ceiling)
    predictor.measure([window], settings[0], ReplayPlan())
    began_s = time.monotonic()
    found = {limits: predictor.measure([window], limits, ReplayPlan()) for limits in settings}
    walls["shadow, each"] = (time.monotonic() - began_s) / len(settings)
    return {s: m.as_json() for s, m in found.items() if isinstance(m, Measurement)}


def checked(
    profile: Profile,
    known: list[EngineLimits],
    live: dict[EngineLimits, list[dict[str, Any]]],
    shadow: dict[EngineLimits, dict[str, Any]],
) -> Profile:
    """Return the profile with the error that the tool would state."""
    differences = [relative_errors(live[limits], shadow[limits]) for limits in known]
    return replace(profile, metric_error_ratio=metric_error(differences))


def relative_errors(
    live: Sequence[Mapping[str, Any]],
    shadow: Mapping[str, Any],
    metrics: Sequence[str] = COMPARED,
) -> dict[str, float]:
    """Return how far a shadow's metrics are from the live ones, relative and signed."""
    pairs = measured_and_predicted(live, shadow, metrics)
    return {metric: predicted / measured - 1 for metric, (measured, predicted) in pairs.items()}


def metric_error(differences: Sequence[Mapping[str, float]]) -> float | None:
    """Return the largest of the metrics' median absolute errors, None without a comparison."""
    by_metric: dict[str, list[float]] = {}
    for difference in differences:
        for metric, off in difference.items():
            by_metric.setdefault(metric, []).append(abs(off))
    return max((median(offs) for offs in by_metric.values()), default=None)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--suite", choices=["cpu", "gpu"])
    parser.add_argument("--traces", type=Path, help="folder of the suite's traces")
    parser.add_argument("--trace")
    parser.add_argument("--window", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--clip", type=int, default=8192)
    parser.add_argument("--value", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--calibrate", default=",".join(CALIBRATED))
    parser.add_argument("--settings", default=",".join(PREDICTED))
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
        whole = suite(args.traces) if args.suite == "cpu" else gpu_suite(args.traces)
        scenarios = [s for s in whole if args.only in s.name]
    else:
        values = dict(value.split("=", 1) for value in args.value)
        known, others = tuple(args.calibrate.split(",")), tuple(args.settings.split(","))
        name = Path(args.trace).stem
        scenarios = [
            Scenario(
                name, args.trace, args.window, args.load, args.clip, 1, values, known, others
            )
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
        "tuner": version("max-num-seqs-tuner"),
        "figures": figures,
        "scenarios": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
