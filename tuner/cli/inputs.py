"""Turn click's options into traces, engine configurations and replay plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.engine.serve_config import parse_engine_args
from tuner.errors import UsageError
from tuner.replay.arrivals import ClockKind, Sessions
from tuner.replay.plan import ReplayPlan
from tuner.run.inputs import (
    DEMO_NOTE,
    EngineChoice,
    Traffic,
    configured_engine,
    engine_of_profile,
    fit_lengths,
    plan_for,
    traffic_of,
)
from tuner.run.options import TraceReading
from tuner.shadow.profiles import Profile
from tuner.traffic.formats import ReadOptions, TimeUnit, read_traces
from tuner.traffic.traces import Aborted, LoadModel, Trace, ZeroOutput

__all__ = [
    "DEMO_NOTE",
    "EngineChoice",
    "Traffic",
    "check_named",
    "choose_engine",
    "fit_lengths",
    "profiled_engine",
    "read_named",
    "read_traffic",
    "reading_of",
    "replay_plan",
]


def read_options(options: Mapping[str, Any]) -> ReadOptions:
    """Return what the options say about rows. Raises: UsageError."""
    size = options["hash_block_size"]
    share = options["max_invalid"]
    if share is not None and not options["skip_invalid"]:
        raise UsageError(
            "--max-invalid says how many wrong rows may be skipped and needs --skip-invalid"
        )
    unit = options["time_unit"]
    usual = ReadOptions()
    return ReadOptions(
        zero_output=ZeroOutput(options["zero_output"]),
        only_model=options["only_model"],
        time_unit=TimeUnit(unit) if unit else None,
        hash_block_size=size,
        skip_invalid=options["skip_invalid"],
        max_invalid_ratio=usual.max_invalid_ratio if share is None else share / 100,
        seed=options["seed"],
        sample_s=options["sample"],
        aborted=Aborted(options["aborted"] or usual.aborted),
    )


def reading_of(options: Mapping[str, Any]) -> TraceReading:
    """Return how traces are read. Raises: UsageError."""
    return TraceReading(
        format=options["trace_format"],
        rows=read_options(options),
        is_spread=options["spread"],
        sessions_over_s=options["sessions_over"],
    )


def read_named(paths: Sequence[str], options: Mapping[str, Any]) -> Trace:
    """Return the trace in the named files together. Raises: TraceError, UsageError."""
    return read_traces(
        paths,
        options["trace_format"],
        read_options(options),
        spread_seed=options["seed"] if options["spread"] else None,
        sessions_over_s=options["sessions_over"],
    )


def read_traffic(options: Mapping[str, Any], largest_cap: int) -> Traffic:
    """Read, scale and describe the trace. Raises: TraceError, UsageError."""
    check_named(options["trace"])
    trace = read_named(options["trace"], options)
    return traffic_of(trace, options["load"], options["window"], largest_cap)


def check_named(paths: Sequence[str]) -> None:
    """Refuse a command that names no trace. Raises: UsageError."""
    if not paths:
        raise UsageError("--trace is missing", "name the recorded traffic: --trace prod.jsonl")


def choose_engine(options: Mapping[str, Any]) -> EngineChoice:
    """Put the engine's configuration together. Raises: UsageError."""
    given = parse_engine_args(options["engine_args"])
    return configured_engine(options["config"] or None, options["model"], given)


def profiled_engine(options: Mapping[str, Any], profile: Profile) -> EngineChoice:
    """Return the configuration that a profile was made with, changed by what was given.

    Raises: UsageError.
    """
    given = parse_engine_args(options["engine_args"])
    return engine_of_profile(profile, options["config"] or None, options["model"], given)


def replay_plan(options: Mapping[str, Any], trace: Trace) -> ReplayPlan:
    """Return how the trace is replayed. Raises: UsageError, TraceError."""
    asked = options["load_model"]
    return plan_for(
        trace,
        load_model=LoadModel(asked) if asked else None,
        concurrency=options["concurrency"],
        clock=ClockKind(options["clock"]),
        timeout_s=options["request_timeout"],
        sessions=Sessions(options["sessions"]),
    )
