"""How fast the shadow replays: output tokens per second on one core, and times real time.

    python tests/benchmarks/shadow_speed.py TRACE [--hours 1] [--runs 5] [-o results.json]

TRACE is repeated until it lasts --hours. Steps take a fixed time, so that about the same number
of requests run whatever the machine; every variant is replayed in a process of its own, in
turns. "asked" lets vLLM's scheduler decide about every single step; the timelines must agree
with those of the same scheduling. No two prompts begin alike, so that the prefix cache, on
unless it says otherwise, need not be kept; "kept" keeps it all the same.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Variant:
    """A way to replay. `keeps` books the prefix cache although no two prompts begin alike."""

    step_s: float
    caches: bool = True
    keeps: bool = False
    asynchronous: bool = False
    asked: bool = False


VARIANTS = {
    "20 ms, no prefix cache": Variant(0.020, caches=False),
    "20 ms": Variant(0.020),
    "20 ms, prefix cache kept": Variant(0.020, keeps=True),
    "20 ms, asynchronous": Variant(0.020, asynchronous=True),
    "20 ms, asynchronous, prefix cache kept": Variant(0.020, keeps=True, asynchronous=True),
    "3 ms": Variant(0.003),
    "3 ms, prefix cache kept": Variant(0.003, keeps=True),
    "3 ms, asynchronous": Variant(0.003, asynchronous=True),
    "3 ms, asynchronous, prefix cache kept": Variant(0.003, keeps=True, asynchronous=True),
    "20 ms, asked": Variant(0.020, asked=True),
    "20 ms, asynchronous, asked": Variant(0.020, asynchronous=True, asked=True),
}
LIMITS = (32, 2048)
CLIP = 6000


@dataclass(frozen=True)
class Fixed:
    """A timer whose every batch takes the same time."""

    seconds: float
    tidy_s: float = 0.0

    def step_s(self, batch: object) -> float:
        """Return the fixed time."""
        del batch
        return self.seconds

    def decode_run_s(self, seqs: int, context_tokens: int) -> tuple[float, float]:
        """Return the fixed time, which does not grow."""
        del seqs, context_tokens
        return self.seconds, 0.0


def child(variant: str, path: str, hours: float, *, is_profiled: bool) -> dict[str, Any]:
    """Replay once and return what it took; imports vLLM."""
    from tuner.engine.compat import serve
    from tuner.engine.limits import EngineLimits
    from tuner.engine.shape import EngineShape
    from tuner.replay.loop import replay
    from tuner.replay.plan import ReplayPlan
    from tuner.shadow.engine import ShadowEngine
    from tuner.traffic.formats import ReadOptions, read_trace
    from tuner.traffic.prompts import PromptSource
    from tuner.traffic.traces import TooLong, Trace

    serve.prepare_environment()
    chosen = VARIANTS[variant]
    trace = read_trace(Path(path), None, ReadOptions()).limit_lengths(CLIP, TooLong.CLIP)
    times = max(1, round(hours * 3600 / trace.duration_s))
    length_s = trace.duration_s + 1.0
    long = Trace(
        due_s=np.concatenate([trace.due_s + k * length_s for k in range(times)]),
        prompt_tokens=np.tile(trace.prompt_tokens, times),
        output_tokens=np.tile(trace.output_tokens, times),
        source=trace.source,
    )
    shape = EngineShape(
        model="none",
        device="none",
        dtype="none",
        vllm_version="none",
        parallelism={},
        vocab_size=32_000,
        max_model_len=16_384,
        block_size=16,
        kv_kind="full_attention",
        prefix_caching=chosen.caches,
        asynchronous=chosen.asynchronous,
        captured_sizes=(),
        scheduler={},
    )
    timer = Fixed(chosen.step_s)
    engine = ShadowEngine(shape, EngineLimits(*LIMITS), 100_000, timer, fast=not chosen.asked)

    class Kept(PromptSource):
        may_share = True

    prompts = (Kept if chosen.keeps else PromptSource)(long, 32_000, 0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profiler = cProfile.Profile()
    if is_profiled:
        profiler.enable()
    began_s = time.perf_counter()
    log = replay(engine, long, prompts, ReplayPlan())
    wall_s = time.perf_counter() - began_s
    if is_profiled:
        profiler.disable()
    tokens = int(log.timelines.output_tokens.sum())
    e2e_s = log.timelines.e2e_s
    return {
        "requests": len(long),
        "output_tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "times_real": log.clock_s / wall_s,
        "steps": log.steps.steps,
        "running_mean": log.steps.levels["running"].mean().value,
        "grown_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024,
        "e2e_s": [float(np.quantile(e2e_s, q)) for q in (0.5, 0.99)],
        "spent": spent(profiler) if is_profiled else None,
    }


def spent(profiler: cProfile.Profile) -> dict[str, float]:
    """Return the share of the time in vLLM's files, ours, and the rest."""
    shares: dict[str, float] = {}
    stats: Any = pstats.Stats(profiler)
    for (file, _, _), (_, _, own_s, _, _) in stats.stats.items():
        where = next((part for part in ("vllm", "tuner") if f"/{part}/" in file), "rest")
        shares[where] = shares.get(where, 0.0) + own_s
    total = sum(shares.values())
    return {where: share / total for where, share in shares.items()}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.child:
        found = child(args.child, args.trace, args.hours, is_profiled=args.profile)
        print("RESULT " + json.dumps(found))
        return
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for _ in range(args.runs):
        for name, variant in VARIANTS.items():
            if not variant.asked or not measured[name]:
                measured[name].append(in_child(args, name))
                print(f"{name}: {measured[name][-1]['tokens_per_s']:,.0f} tokens/s", flush=True)
    profiled = in_child(args, next(iter(VARIANTS)), "--profile")
    for name, runs in measured.items():
        rates = [run["tokens_per_s"] for run in runs]
        first = runs[0]
        spread = f"{min(rates):,.0f} … {max(rates):,.0f}, n {len(rates)}"
        print(f"{name:<40} {median(rates):>10,.0f} tokens/s ({spread}),")
        print(
            f"  {median(r['times_real'] for r in runs):,.0f} x real time, "
            f"{median(r['wall_s'] for r in runs):.1f} s, {first['running_mean']:.1f} running, "
            f"E2E p50, p99 {first['e2e_s'][0]:.6f}, {first['e2e_s'][1]:.6f} s, "
            f"grew {first['grown_mib']:.0f} MiB"
        )
    print(f"spent, by cProfile: {profiled['spent']}")
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, one used",
            "spent": profiled["spent"],
            "runs": measured,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


def in_child(args: argparse.Namespace, name: str, *more: str) -> dict[str, Any]:
    """Replay in a fresh process on one core."""
    command = [sys.executable, __file__, args.trace, "--hours", str(args.hours)]
    done = subprocess.run(
        ["/usr/bin/taskset", "-c", "0", *command, "--child", name, *more],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


if __name__ == "__main__":
    main()
