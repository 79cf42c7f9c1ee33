"""How true predictions are of an asynchronous engine whose host is slow to launch a batch.

    python tests/benchmarks/late_truth.py --trace azure_2023_conv.open.csv -o results.json
    python tests/benchmarks/late_truth.py --trace azure_2023_conv.open.csv --tune 16/2048 …

The engine is vLLM's own scheduler with a device and a host whose times are known. The device
computes one batch after the other, none before its launch has ended; the host launches the next
batch and then waits for the one on its way, as `EngineCore.step_with_batch_queue` does. What a
batch takes and what launching takes are of the order of an H200 with 7 billion weights
(results/gpu_h200): 4.6 ms and 18 us a token, 13 ms to launch a batch without a graph. Three
settings teach a step model, with noise of 2 %, and seven are foretold and compared with what
the engine then does, with and without knowing which steps the host noticed late.

With --tune the whole of `tune` runs on such an engine, on time that the engine alone moves,
once from each of the current settings, and once more with an engine that does not say which
steps were noticed late; what is told is held to all of the traffic, replayed without noise.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from truth_figures import limits_of

from support.planted import VirtualClock
from support.profile_parts import SHAPE
from support.virtual_time import on_virtual_time
from tuner.engine.compat import serve
from tuner.engine.compat.core import read_batch
from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch, EngineFacts, Step
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.run.listener import Listener
from tuner.run.options import TuningOptions
from tuner.run.tune import tune
from tuner.shadow.calibration import Calibration
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart
from tuner.shadow.reference import ReferenceEngine, _Sent
from tuner.shadow.step_model import StepModel
from tuner.traffic.formats import read_trace
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import busiest

CEILING, NUM_BLOCKS = EngineLimits(256, 8192), 120_000
BARE = replace(
    SHAPE,
    vllm_version="0.32.0",
    prefix_caching=False,
    max_model_len=32768,
    captured_sizes=(),
    scheduler={"policy": "fcfs", "enable_chunked_prefill": True},
)
LIKE_H200 = replace(BARE, captured_sizes=BARE.chosen_sizes(CEILING))
START = KvStart(CEILING, NUM_BLOCKS)
DEVICE = StepModel.linear(
    0.0046, 1.8e-5, 1.8e-5, decode_context_s=1.5e-8, prefill_context_s=8e-10, tidy_s=2e-4
)
FULL_S, MIXED_S, EAGER_S, EAGER_TOKEN_S = 0.002, 0.008, 0.013, 1e-6
LEARNT = ((16, 2048), (64, 1024), (128, 4096))
FORETOLD = ((256, 8192), (32, 2048), (192, 512), (32, 512), (8, 512), (16, 4096), (64, 1024))
METRICS = {
    "requests_per_s": lambda m: m.requests_per_s,
    "e2e_p50": lambda m: m.latency("e2e_s", "p50"),
    "e2e_p99": lambda m: m.latency("e2e_s", "p99"),
    "tpot_p50": lambda m: m.latency("tpot_s", "p50"),
    "tpot_p99": lambda m: m.latency("tpot_s", "p99"),
    "itl_p99": lambda m: m.latency("itl_s", "p99"),
    "ttft_p50": lambda m: m.latency("ttft_s", "p50"),
    "ttft_p99": lambda m: m.latency("ttft_s", "p99"),
}


class LaunchingEngine(ReferenceEngine):
    """vLLM's scheduler on a device and a host of which everything is known."""

    def __init__(
        self,
        limits: EngineLimits,
        noise: float,
        seed: int,
        *,
        ceiling: EngineLimits = CEILING,
        clock: VirtualClock | None = None,
        says_late: bool = True,
    ) -> None:
        captured = LIKE_H200.graphs_at(ceiling, [CEILING])
        shape = replace(LIKE_H200, captured_sizes=captured.sizes)
        super().__init__(shape, ceiling, NUM_BLOCKS, DEVICE)
        self._info = replace(
            self._info, kind="live", captured_sizes=captured.sizes, has_own_graphs=True
        )
        self.set_limits(limits)
        self._noise, self._clock = noise, clock or VirtualClock()
        self._says_late = says_late
        self._rng = np.random.default_rng(seed)
        self._now_s = self._done_s = 0.0
        self._ends_s: deque[float] = deque()

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits, with the graphs of an engine of its own."""
        super().set_limits(limits)
        self._graphs = LIKE_H200.graphs_at(limits, [CEILING])
        self.timer = replace(DEVICE, graphs=self._graphs)

    def _turn(self, core: SchedulerCore) -> Step:
        launched_s, is_late = self._now_s, False
        if core.has_requests():
            scheduled = core.schedule()
            batch = read_batch(scheduled)
            launched_s += self._launch_s(batch)
            is_late = bool(self._ends_s) and self._ends_s[0] < launched_s
            step = replace(self._timed(batch), launch_s=launched_s - self._now_s)
            took_s = step.duration_s * float(np.exp(self._rng.normal(0.0, self._noise)))
            self._done_s = max(max(self._done_s, self._now_s) + took_s, launched_s)
            self._sent.append(_Sent(scheduled, core.sampled(scheduled), step))
            self._ends_s.append(self._done_s)
            goes_on = batch is not None or core.has_requests()
            if len(self._sent) < core.queue_size and goes_on:
                took_s = self._until(launched_s)
                return Step(took_s, (), None, 0, 0, 0.0, is_late=self._says_late)
        done, ended_s = self._sent.popleft(), self._ends_s.popleft()
        took_s = self._until(max(ended_s, launched_s) + 1e-5)
        emitted = core.update(done.scheduled, done.output)
        is_late &= self._says_late
        return replace(done.step, duration_s=took_s, emitted=emitted, is_late=is_late)

    def _until(self, instant_s: float) -> float:
        took_s, self._now_s = instant_s - self._now_s, instant_s
        self._clock.pass_s(took_s)
        return took_s

    def _launch_s(self, batch: Batch | None) -> float:
        if batch is None:
            return DEVICE.tidy_s
        if batch.is_decode_only and batch.tokens <= max(self._graphs.sizes):
            return FULL_S
        if batch.tokens <= max(self._graphs.sizes):
            return MIXED_S
        return EAGER_S + EAGER_TOKEN_S * batch.prefill_tokens


@dataclass(frozen=True, slots=True, eq=False)
class LaunchingSource:
    """Starts such engines, each in 45 s."""

    current: EngineLimits
    says_late: bool
    clock: VirtualClock = field(default_factory=VirtualClock)

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Return what is known before a start: the current limits stand in the source."""
        _ = values
        return EngineFacts(self.current, BARE.max_model_len, True, BARE.vllm_version, "planted")

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> LaunchingEngine:
        """Start an engine, which takes its time."""
        _ = values
        self.clock.pass_s(45.0)
        return LaunchingEngine(
            ceiling, 0.02, 0, ceiling=ceiling, clock=self.clock, says_late=self.says_late
        )


class _Printer(Listener):
    def note(self, text: str) -> None:
        print(f"    {text}", flush=True)


def tuned(
    trace: Trace, current: EngineLimits, budget_s: float, *, says_late: bool
) -> dict[str, Any]:
    """Run `tune` from a current setting, and hold what it tells to the truth."""
    source = LaunchingSource(current, says_late)
    values: dict[str, object] = {
        "model": "planted",
        "max-num-seqs": current.max_num_seqs,
        "max-num-batched-tokens": current.max_num_batched_tokens,
    }
    with tempfile.TemporaryDirectory() as folder, on_virtual_time(source.clock):
        options = TuningOptions(
            trace=trace,
            config=values,
            budget_s=budget_s,
            ladder=(8, 16, 32),
            run_dir=Path(folder) / "run",
        )
        outcome = tune(options, _Printer(), source=cast("Any", source))
        result = msgspec.to_builtins(outcome)
    advice, (first, *_) = result["recommendation"], result["evidence"]
    winner = EngineLimits(advice["max_num_seqs"], advice["max_num_batched_tokens"])
    kind, _, quantile = first["metric"].rpartition("_")
    true = {
        limits: measure([replayed(trace, limits, 0.0)]).latency(f"{kind}_s", quantile)
        for limits in dict.fromkeys((current, winner))
    }
    found = {
        "says_late": says_late,
        "current": str(current),
        "winner": str(winner),
        "metric": first["metric"],
        "told": [first["before"], first["after"]],
        "true": [true[current], true[winner]],
        "told_gain": advice["gain_ratio"],
        "told_interval": advice["gain_interval"],
        "told_here": advice["gain_here_interval"],
        "true_gain": (true[winner] or 0.0) / (true[current] or 1.0) - 1,
        "cold": result["confirmed_cold"],
        "caveats": result["caveats"],
        "engine_s": source.clock.now_s,
    }
    print(json.dumps(found, indent=1))
    return found


def replayed(window: Trace, limits: EngineLimits, noise: float, seed: int = 0) -> ReplayLog:
    """Replay the window on such an engine."""
    engine = LaunchingEngine(limits, noise, seed)
    prompts = PromptSource(window, LIKE_H200.vocab_size)
    return replay(engine, window, prompts, ReplayPlan(keep_steps=True))


def foretold(window: Trace, *, knows_late: bool) -> dict[str, Measurement]:
    """Return what is foretold of settings by what others have taught."""
    calibration = Calibration(LIKE_H200, (START,), (), EngineLimits(*LEARNT[0]), {})
    for seed, setting in enumerate(LEARNT):
        limits = EngineLimits(*setting)
        steps: Any = replayed(window, limits, 0.02, seed).kept_steps
        if not knows_late:
            steps = replace(steps, is_late=np.zeros(len(steps)))
        calibration = calibration.and_steps(limits, [steps])
    predictor = Predictor(calibration.profile())
    found = {}
    for setting in FORETOLD:
        limits = EngineLimits(*setting)
        predicted = predictor.measure([window], limits, ReplayPlan())
        if isinstance(predicted, Measurement):
            found[str(limits)] = predicted
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--load", type=float, default=2.5)
    parser.add_argument("--window", type=float, default=12.0)
    parser.add_argument("--tune", nargs="+", default=[], metavar="SEQS/TOKENS")
    parser.add_argument("--length", type=float, default=120.0, help="seconds that are tuned on")
    parser.add_argument("--budget", type=float, default=600.0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    serve.prepare_environment()
    trace = at_load(read_trace(args.trace), args.load)
    if args.tune:
        part = trace.between(0.0, args.length)
        runs = [
            tuned(part, limits_of(text), args.budget, says_late=says_late)
            for says_late in (True, False)
            for text in args.tune
        ]
        if args.output:
            args.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        return
    window = busiest(trace, args.window).of(trace)
    true = {}
    for setting in FORETOLD:
        limits = EngineLimits(*setting)
        true[str(limits)] = measure([replayed(window, limits, 0.0)])
    result: dict[str, Any] = {"requests": len(window), "off": {}}
    for name, knows_late in (("told apart", True), ("taken as they seem", False)):
        off: dict[str, dict[str, float]] = {}
        for limits_text, predicted in foretold(window, knows_late=knows_late).items():
            off[limits_text] = {
                metric: of(predicted) / of(true[limits_text]) - 1  # type: ignore[no-untyped-call]
                for metric, of in METRICS.items()
            }
        result["off"][name] = off
        print(f"{name}:")
        for limits_text, one in off.items():
            print(f"  {limits_text:>9}", *(f"{metric} {x:+.1%}" for metric, x in one.items()))
        for metric in METRICS:
            all_off = [abs(one[metric]) for one in off.values()]
            print(f"  {metric:<15} {median(all_off):.1%} off in the median, {max(all_off):.1%}")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
