"""How fast the simulator replays: tokens per second on one core, the reference beside it.

    python tests/benchmarks/simulator_speed.py TRACE [--shared TRACE] [--runs 9] [--week]
        [--fleet] [--before CHECKOUT] [-o results.json]

TRACE is repeated until it lasts an hour, prompts are cut at 6,000 tokens, limits are 32/2048.
Steps take a fixed time. With "windows" half of the layers look back 128 tokens, with "states"
three of four keep a state, found at the end of a block of 528 tokens; all others hold 16.
--shared names a trace with hash ids, which is replayed as it is. "preempted" has blocks for a
third of what is in use at most. --week adds 27 million requests in one replay, --fleet a day of
sixteen times the hour's traffic on sixteen replicas behind each router that needs no hash ids.
"reference" is vLLM's own scheduler asked at every step, for ten seconds,
where vLLM is installed. All variants run in turns in one process; the time is that of the
processor, of the replay alone and with its metrics.

--before names a checkout of the shadow that leapt with vLLM's Python scheduler (git worktree
add CHECKOUT a6405e2), which replays the same hour in turns with this one, of which the middle
of three replays counts; both by the wall clock, without metrics.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape, KvGroup
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.metrics import measure
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.shadow.fleet import Fleet, simulate_fleet
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.shadow.step_model import StepModel
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.prompts import PromptSource
from tuner.traffic.reshape import Router
from tuner.traffic.traces import TooLong, Trace

LIMITS = EngineLimits(32, 2048)
CLIP = 6000
BLOCKS = 100_000
WEEK = 27_000_000
REPLICAS = 16
PLAN = ReplayPlan()


_WINDOW: KvGroup = {"kind": "SlidingWindowSpec", "block_size": 16, "sliding_window": 128}
_STATE: KvGroup = {
    "kind": "MambaSpec",
    "block_size": 528,
    "mamba_cache_mode": "align",
    "num_speculative_blocks": 0,
    "prefix_cache_retention_interval": 0,
}
GROUPS: dict[str, tuple[KvGroup, ...]] = {
    "windows": (_WINDOW, {"kind": "FullAttentionSpec", "block_size": 16}),
    "states": (_STATE, _STATE, _STATE, {**_STATE, "kind": "FullAttentionSpec"}),
}
"""What a model's layers keep: every second looks back, or three of four keep a state."""


@dataclass(frozen=True)
class Variant:
    """A way to replay: on which traffic, with which engine."""

    workload: PreparedTrace
    engine: SimulatedEngine
    counts_prompts: bool = False

    def run(self) -> tuple[tuple[float, float], ReplayLog]:
        """Replay and measure once; return the processor's seconds of both, and the log."""
        began_s = time.process_time()
        log = simulate(self.engine, self.workload, LIMITS, PLAN)
        replayed_s = time.process_time() - began_s
        measure([log])
        return (replayed_s, time.process_time() - began_s), log

    def on_the_wall(self) -> tuple[float, ReplayLog]:
        """Replay once; return the seconds that passed, and the log."""
        began_s = time.perf_counter()
        log = simulate(self.engine, self.workload, LIMITS, PLAN)
        return time.perf_counter() - began_s, log

    def tokens(self, log: ReplayLog) -> int:
        """Return the tokens that count: answers, and prompts where a cache is looked into."""
        prompts = int(self.workload.trace.prompt_tokens.sum()) if self.counts_prompts else 0
        return int(log.timelines.output_tokens.sum()) + prompts


def engine_of(
    step_s: float,
    *,
    asynchronous: bool = False,
    caches: bool = False,
    blocks: int = BLOCKS,
    layers: str = "",
) -> SimulatedEngine:
    """Return an engine whose every batch takes the same time; `layers` are of GROUPS."""
    shape = EngineShape(
        model="none",
        device="none",
        dtype="none",
        vllm_version="none",
        parallelism={},
        vocab_size=32_000,
        max_model_len=1 << 20,
        block_size=16,
        kv_kind="full_attention",
        prefix_caching=caches,
        asynchronous=asynchronous,
        captured_sizes=(),
        scheduler={"scheduler_reserve_full_isl": False},
    )
    if layers:
        groups = GROUPS[layers]
        size = int(str(groups[0]["block_size"]))
        shape = replace(shape, kv_kind=layers, kv_groups=groups, block_size=size)
        shape = replace(shape, prefix_caching=caches or layers == "states")
        blocks *= len(groups)
    return SimulatedEngine(shape, blocks, StepModel.linear(step_s, 0.0, 0.0), LIMITS)


def hour_of(path: str) -> Trace:
    """Return a trace repeated until it lasts an hour, without hash ids."""
    trace = read_trace(Path(path), None, ReadOptions()).limit_lengths(CLIP, TooLong.CLIP)
    times = max(1, round(3600 / trace.duration_s))
    length_s = trace.duration_s + 1.0
    return Trace(
        due_s=np.concatenate([trace.due_s + k * length_s for k in range(times)]),
        prompt_tokens=np.tile(trace.prompt_tokens, times),
        output_tokens=np.tile(trace.output_tokens, times),
        source=trace.source,
    )


def variants_of(args: argparse.Namespace) -> dict[str, Variant]:
    """Return what is replayed, by name."""
    hour = PreparedTrace(hour_of(args.trace), PLAN)
    found: dict[str, Variant] = {}
    for step_s in (0.020, 0.003):
        for asynchronous in (False, True):
            name = f"{step_s * 1e3:.0f} ms{', asynchronous' if asynchronous else ''}"
            engine = engine_of(step_s, asynchronous=asynchronous)
            found[name] = Variant(hour, engine)
    for layers in GROUPS:
        for asynchronous in (False, True):
            name = f"20 ms, {layers}{', asynchronous' if asynchronous else ''}"
            engine = engine_of(0.020, asynchronous=asynchronous, layers=layers)
            found[name] = Variant(hour, engine)
    full = simulate(engine_of(0.020), hour, LIMITS, PLAN).steps.peaks["kv_usage_ratio"]
    longest = int((hour.trace.prompt_tokens + hour.trace.output_tokens).max()) // 16 + 2
    few = max(longest, int(full * BLOCKS / 3))
    for asynchronous in (False, True):
        name = f"20 ms, preempted{', asynchronous' if asynchronous else ''}"
        engine = engine_of(0.020, asynchronous=asynchronous, blocks=few)
        found[name] = Variant(hour, engine)
    if args.shared:
        shared = PreparedTrace(read_trace(Path(args.shared), None, ReadOptions()), PLAN)
        for asynchronous in (False, True):
            name = f"prefix cache{', asynchronous' if asynchronous else ''}"
            for layers in ("", *GROUPS):
                engine = engine_of(0.020, asynchronous=asynchronous, caches=True, layers=layers)
                ending = f", {layers}" if layers else ""
                found[name + ending] = Variant(shared, engine, counts_prompts=True)
    return found


def week_of(hour: Trace) -> PreparedTrace:
    """Return as many requests as a public week has."""
    times = WEEK // len(hour) + 1
    length_s = hour.duration_s + 1.0
    starts_s = np.repeat(np.arange(times) * length_s, len(hour))[:WEEK]
    trace = Trace(
        due_s=np.tile(hour.due_s, times)[:WEEK] + starts_s,
        prompt_tokens=np.tile(hour.prompt_tokens, times)[:WEEK],
        output_tokens=np.tile(hour.output_tokens, times)[:WEEK],
    )
    return PreparedTrace(trace, PLAN)


def reference_rate(variant: Variant) -> float:
    """Return the output tokens per second of vLLM's scheduler asked at every step."""
    from tuner.engine.compat import serve
    from tuner.shadow.reference import ReferenceEngine

    serve.prepare_environment()
    engine, trace = variant.engine, variant.workload.trace
    shape = replace(engine.shape, max_model_len=16_384)
    asked = ReferenceEngine(shape, LIMITS, engine.num_blocks, engine.step_model)
    prompts = PromptSource(trace, shape.vocab_size)
    plan = replace(PLAN, cut=CutRule(max_wall_s=10.0))
    began_s = time.process_time()
    log = replay(asked, trace, prompts, plan)
    return float(log.timelines.output_tokens.sum()) / (time.process_time() - began_s)


def report(
    name: str, variant: Variant, took_s: list[tuple[float, float]], log: ReplayLog
) -> dict[str, Any]:
    """Print and return what a variant came to."""
    tokens = variant.tokens(log)
    alone_s, all_s = zip(*took_s, strict=True)
    rates = sorted(tokens / one_s for one_s in alone_s)
    e2e_s = [float(np.quantile(log.timelines.e2e_s, q)) for q in (0.5, 0.99)]
    print(
        f"{name:<32} {median(rates) / 1e6:>8,.0f} million tokens/s "
        f"({rates[0] / 1e6:,.0f} … {rates[-1] / 1e6:,.0f}, n {len(rates)}), "
        f"{median(alone_s) * 1e3:,.1f} ms, with metrics {median(all_s) * 1e3:,.1f} ms, "
        f"{log.steps.steps:,} steps, {log.steps.preempted:,} preempted, "
        f"E2E p50, p99 {e2e_s[0]:.3f}, {e2e_s[1]:.3f} s",
        flush=True,
    )
    return {
        "tokens": tokens,
        "seconds": alone_s,
        "seconds_with_metrics": all_s,
        "steps": log.steps.steps,
        "preempted": log.steps.preempted,
        "requests": len(variant.workload.trace),
        "e2e_p50_p99_s": e2e_s,
    }


def measured_in_turns(variants: dict[str, Variant], runs: int) -> dict[str, Any]:
    """Run all variants in turns and report them."""
    logs = {name: variant.run()[1] for name, variant in variants.items()}
    took_s: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(runs):
        for name, variant in variants.items():
            took_s[name].append(variant.run()[0])
    return {name: report(name, v, took_s[name], logs[name]) for name, v in variants.items()}


def week(variant: Variant) -> dict[str, Any]:
    """Replay a week of requests once and report it, with the memory that it took."""
    whole = Variant(week_of(variant.workload.trace), variant.engine)
    took_s, log = whole.run()
    found = report("a week of 27 million requests", whole, [took_s], log)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"  {took_s[0]:.1f} s, {peak_gib:.1f} GiB at most, the trace included")
    return {**found, "peak_gib": peak_gib}


def fleet(variant: Variant) -> dict[str, Any]:
    """Replay a day on sixteen replicas and report what that takes."""
    hour, found = variant.workload.trace, {}
    starts_s = [3600.0 * h + 7.0 * k for h in range(24) for k in range(REPLICAS)]
    due_s = np.concatenate([hour.due_s + s for s in starts_s])
    order = np.argsort(due_s, kind="stable")
    trace = Trace(
        due_s=due_s[order],
        prompt_tokens=np.tile(hour.prompt_tokens, len(starts_s))[order],
        output_tokens=np.tile(hour.output_tokens, len(starts_s))[order],
    )
    day = PreparedTrace(trace, PLAN)
    for router in (Router.ROUND_ROBIN, Router.LEAST_LOADED):
        began_s = time.process_time()
        log = simulate_fleet(variant.engine, day, LIMITS, PLAN, Fleet(REPLICAS, router))
        took_s = time.process_time() - began_s
        steps = log.log.steps.steps
        print(
            f"a day of {len(trace):,} requests on {REPLICAS} replicas, {router}: "
            f"{took_s:.1f} s, {steps:,} steps",
            flush=True,
        )
        found[str(router)] = {"requests": len(trace), "seconds": took_s, "steps": steps}
    return found


def beside_before(
    variants: dict[str, Variant], checkout: Path, trace: Path, runs: int
) -> dict[str, Any]:
    """Replay by the shadow of another checkout and by this one, in turns."""
    script = checkout / "tests" / "benchmarks" / "shadow_speed.py"
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    for name in ("20 ms", "20 ms, asynchronous"):
        pairs = []
        for _ in range(runs):
            command = [sys.executable, str(script), str(trace), "--child", name]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=env, cwd=checkout
            )
            line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
            before = json.loads(line.removeprefix("RESULT "))
            ours_s, log = sorted((variants[name].on_the_wall() for _ in range(3)), key=_first)[
                1
            ]
            pairs.append((before["wall_s"], ours_s))
        ratios = sorted(old_s / ours_s for old_s, ours_s in pairs)
        now = [float(np.quantile(log.timelines.e2e_s, q)) for q in (0.5, 0.99)]
        print(
            f"{name}: {median(ratios):,.0f} times as fast as before ({ratios[0]:,.0f} … "
            f"{ratios[-1]:,.0f}, n {runs}), {median(p[0] for p in pairs):.1f} s then; steps "
            f"{before['steps']:,} and {log.steps.steps:,}, E2E p50, p99 {before['e2e_s']} "
            f"and {now} s"
        )
        found[name] = {"wall_s": pairs, "before": before, "e2e_p50_p99_s": now}
    return found


def _first(timed: tuple[float, ReplayLog]) -> float:
    return timed[0]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--shared")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--week", action="store_true")
    parser.add_argument("--fleet", action="store_true")
    parser.add_argument("--before", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    variants = variants_of(args)
    found = measured_in_turns(variants, args.runs)
    first = next(iter(variants.values()))
    stages: dict[str, Callable[[], Any]] = {}
    if importlib.util.find_spec("vllm"):
        stages["reference"] = lambda: reference_rate(first)
    if args.week:
        stages["week"] = lambda: week(first)
    if args.fleet:
        stages["fleet"] = lambda: fleet(first)
    if args.before:
        before, trace = args.before.resolve(), Path(args.trace).resolve()
        stages["before"] = lambda: beside_before(variants, before, trace, 3)
    more = {name: stage() for name, stage in stages.items()}
    if "reference" in more:
        print(f"reference, asked at every step: {more['reference']:,.0f} tokens/s")
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, one used",
            "variants": found,
            **more,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
