"""`tune replay`: measure one configuration and print it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.inputs import choose_engine, fit_lengths, read_traffic, replay_plan
from tuner.console import say
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineLimits
from tuner.host import Host
from tuner.metrics import Measurement, measure
from tuner.windows import whole


def run_replay(options: Mapping[str, Any]) -> int:
    """Replay the trace once and print the measurement. Raises: TunerError."""
    engine = choose_engine(options)
    traffic = read_traffic(options, largest_cap=256)
    plan = replay_plan(options, traffic.trace)
    if options["window"]:
        options["window"].resolve(traffic.trace).of(traffic.trace)
    for line in traffic.lines:
        say(line)
    if engine.is_demo:
        say(DEMO_NOTE)
    log_path = Path(tempfile.mkdtemp(prefix="tune-replay-")) / "engine.log"
    with Host(LiveSource(), log_path) as host:
        facts = host.facts(engine.values)
        trace, told = fit_lengths(traffic.trace, facts.max_model_len, options["too_long"])
        if told:
            say(told)
        limits = EngineLimits(
            options["max_num_seqs"] or facts.present_limits.max_num_seqs,
            options["max_num_batched_tokens"] or facts.present_limits.max_num_batched_tokens,
        )
        window = options["window"].resolve(trace) if options["window"] else whole(trace)
        started = host.start(engine.values, limits)
        say(f"engine started in {started.start_s:.1f} s; its log is {log_path}")
        host.load("trace", window.of(trace), options["seed"])
        measured = measure([host.replay("trace", limits, plan)])
    if options["as_json"]:
        content = {
            "engine": started.info.kind,
            "limits": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            },
            "load_model": str(plan.load_model),
            **measured.as_json(),
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
        sys.stdout.write("\n")
    else:
        sys.stdout.write("\n".join(_lines(limits, measured)) + "\n")
    return 0


DEMO_NOTE = (
    "no --model and no --config: measuring the bundled demo model, a small Qwen2-shaped one "
    "with random weights"
)


def _lines(limits: EngineLimits, m: Measurement) -> list[str]:
    """Return the measurement for people."""
    lines = [
        f"limits            max_num_seqs {limits.max_num_seqs}, "
        f"max_num_batched_tokens {limits.max_num_batched_tokens}",
        f"requests          {m.offered} offered = {m.completed} completed + "
        f"{m.refused} refused + {m.timed_out} timed out + {m.aborted} aborted",
        f"throughput        {m.requests_per_s:.2f} requests/s, "
        f"{m.output_tokens_per_s:.0f} output tokens/s",
    ]
    for name, spread in m.latencies.items():
        if spread is not None:
            cells = "  ".join(
                f"{stat} {spread.value(stat) * 1000:.1f}"
                for stat in ("mean", "p50", "p90", "p95", "p99")
            )
            lines.append(f"{name.removesuffix('_s'):<16}  {cells}  ms  (n {spread.n})")
    hit = m.prefix_cache_hit_ratio
    lines += [
        f"queue depth       mean {m.queue_depth.mean:.2f}, max {m.queue_depth.max:.0f}",
        f"running           mean {m.running.mean:.2f}, max {m.running.max:.0f}",
        f"gpu_cache_usage_perc (kv_cache_usage_perc)  mean {m.kv_usage.mean:.3f}, "
        f"p99 {m.kv_usage.p99:.3f}, max {m.kv_usage.max:.3f}",
        f"preemptions       {m.preemptions}",
        f"prefix-cache hits {'-' if hit is None else f'{hit:.1%}'}",
        f"sustained         {'yes' if m.is_sustained else 'no'}",
        f"steps             {m.steps} in {m.clock_s:.2f} s of the replay's clock, "
        f"{m.wall_s:.2f} s real",
    ]
    return lines + [f"caveat: {caveat.text}" for caveat in m.caveats]
