"""`tune replay`: measure one configuration and print it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.console import ReplayDisplay, say
from tuner.cli.inputs import choose_engine, profiled_engine, read_traffic, replay_plan
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineSource
from tuner.errors import Caveat, UsageError
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.slo import LATENCIES
from tuner.run.inputs import DEMO_NOTE, EngineChoice, Traffic, fit_lengths
from tuner.shadow.profiles import Profile, read_profile
from tuner.shadow.source import ShadowSource
from tuner.traffic.traces import LoadModel
from tuner.traffic.windows import whole

_STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def run_replay(options: Mapping[str, Any], source: EngineSource | None = None) -> int:
    """Replay the trace once and print the measurement. Raises: TunerError."""
    profile = _profile(options)
    engine = choose_engine(options) if profile is None else profiled_engine(options, profile)
    if profile is not None:
        source = source or ShadowSource(profile, is_forced=options["force_profile"])
    traffic = read_traffic(options, largest_cap=256)
    plan = replay_plan(options, traffic.trace)
    for line in traffic.lines:
        say(line)
    if engine.is_demo:
        say(DEMO_NOTE)
    log_path = Path(tempfile.mkdtemp(prefix="tune-replay-")) / "engine.log"
    with EngineProcess(source or LiveSource(), log_path) as host:
        kind, limits, measured = _measured(host, options, engine, traffic, plan)
    if options["as_json"]:
        content = {
            "engine": kind,
            "limits": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            },
            "load_model": str(plan.load_model),
            **measured.as_json(),
        }
        encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
        sys.stdout.write(encoded.decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(limits, measured)) + "\n")
    return 0


def _profile(options: Mapping[str, Any]) -> Profile | None:
    """Return the profile of a shadow replay. Raises: UsageError."""
    path, is_shadow = options["profile"], options["engine_kind"] == "shadow"
    if is_shadow and not path:
        raise UsageError(
            "--engine shadow needs --profile FILE",
            "every live run writes profile.yaml into its run directory",
        )
    if path and not is_shadow:
        raise UsageError("--profile is for --engine shadow", "add --engine shadow")
    return read_profile(Path(path)) if path else None


def _measured(
    host: EngineProcess,
    options: Mapping[str, Any],
    engine: EngineChoice,
    traffic: Traffic,
    plan: ReplayPlan,
) -> tuple[str, EngineLimits, Measurement]:
    """Start the engine at the asked limits and replay."""
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
    say(f"engine started in {started.start_s:.1f} s; its log is {host.log_path}")
    if started.info.remark:
        say(started.info.remark)
    host.load("trace", window.of(trace), options["seed"])
    with ReplayDisplay() as display:
        measured = measure([host.replay("trace", limits, plan, display.progress)])
    found = [
        (Caveat.SHADOW_ONLY, started.info.kind == "shadow"),
        (Caveat.PROFILE_FORCED, bool(options["force_profile"])),
        (Caveat.CLOSED_LOOP, plan.load_model is LoadModel.CLOSED),
        (Caveat.DEMO_MODEL, engine.is_demo),
        (Caveat.WINDOWED, window != whole(trace)),
        (Caveat.REQUESTS_CLIPPED, bool(trace.notes.clipped)),
        *((caveat, caveat is not Caveat.LOW_DEMAND) for caveat in sorted(traffic.caveats)),
    ]
    doubts = (*measured.caveats, *(caveat for caveat, holds in found if holds))
    return started.info.kind, limits, replace(measured, caveats=doubts)


def _lines(limits: EngineLimits, m: Measurement) -> list[str]:
    """Return the measurement for people."""
    hit = m.prefix_cache_hit_ratio
    usage = m.kv_usage
    rows = [
        ("max_num_seqs", f"{limits.max_num_seqs}"),
        ("max_num_batched_tokens", f"{limits.max_num_batched_tokens}"),
        ("requests offered", f"{m.offered} = {m.completed} completed + {m.refused} refused"),
        ("", f"+ {m.timed_out} timed out + {m.aborted} aborted ({m.lost_ratio:.1%} lost)"),
        *([("", f"+ {m.unfinished} unfinished at the recording's end")] * bool(m.unfinished)),
        ("throughput", f"{m.requests_per_s:.2f} requests/s"),
        ("", f"{m.output_tokens_per_s:.0f} output tokens/s"),
        *((name.removesuffix("_s"), _spread(m, name)) for name in LATENCIES),
        ("queue depth", f"mean {m.queue_depth.mean:.2f}, max {m.queue_depth.max:.0f}"),
        ("running", f"mean {m.running.mean:.2f}, max {m.running.max:.0f}"),
        ("gpu_cache_usage_perc", f"mean {usage.mean:.3f}, p99 {usage.p99:.3f}"),
        ("(kv_cache_usage_perc)", f"max {usage.max:.3f}"),
        ("preemptions", f"{m.preemptions}"),
        ("prefix-cache hits", "no prompt" if hit is None else f"{hit:.1%} of prompt tokens"),
        ("sustained", "yes" if m.is_sustained else "no"),
        ("utilisation", m.load_text or "cannot be told"),
        (
            "steps",
            f"{m.steps} in {m.clock_s:.2f} s of the replay's clock, {m.wall_s:.2f} s real",
        ),
    ]
    told = [f"{name:<23} {text}" for name, text in rows]
    return told + [f"caveat: {caveat.text}" for caveat in m.caveats]


def _spread(m: Measurement, name: str) -> str:
    """Return one latency's statistics in milliseconds."""
    spread = m.latencies[name]
    if spread is None:
        return "nothing measured"
    cells = (f"{stat} {spread.value(stat) * 1000:.1f}" for stat in _STATISTICS)
    return f"{'  '.join(cells)}  ms (n {spread.n})"
