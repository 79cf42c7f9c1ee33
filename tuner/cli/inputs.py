"""Turn options into traces, engine configurations and replay plans.

Everything here happens before an engine starts, so that bad input is told at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tuner.demo import demo_engine_args
from tuner.engine.serve_config import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    hyphenated,
    parse_engine_args,
    read_config,
)
from tuner.errors import Caveat, TraceError, UsageError
from tuner.redact import REDACTED
from tuner.replay.arrivals import ClockKind, Sessions, check_arrivals
from tuner.replay.plan import ReplayPlan
from tuner.shadow.profiles import Profile
from tuner.traffic.describe import describe
from tuner.traffic.formats import ReadOptions, TimeUnit, read_traces
from tuner.traffic.reshape import at_load
from tuner.traffic.traces import Aborted, LoadModel, TooLong, Trace, ZeroOutput

Command = TypeVar("Command", bound=Callable[..., Any])


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


def read_named(paths: Sequence[str], options: Mapping[str, Any]) -> Trace:
    """Return the trace in the named files together. Raises: TraceError, UsageError."""
    return read_traces(
        paths,
        options["trace_format"],
        read_options(options),
        spread_seed=options["seed"] if options["spread"] else None,
        sessions_over_s=options["sessions_over"],
    )


DEMO_NOTE = (
    "no --model and no --config: measuring the bundled demo model, a small Qwen2-shaped one "
    "with random weights"
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The trace as it will be replayed, and what reading it raised doubts about."""

    trace: Trace
    lines: tuple[str, ...]
    caveats: frozenset[Caveat]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine's configuration as the user gave it."""

    values: dict[str, object]
    is_demo: bool
    names_limits: bool
    config_sha256: str
    lost: tuple[str, ...] = ()
    """Keys of a profile's configuration whose secret it does not keep."""

    @property
    def deployed_values(self) -> dict[str, object]:
        """The configuration as it is deployed; what is lost is there, but hidden."""
        return {**self.values, **dict.fromkeys(self.lost, REDACTED)}

    @property
    def model(self) -> str:
        """Return the model's name, for messages and provenance."""
        return "the bundled demo model" if self.is_demo else str(self.values.get("model", "?"))


def read_traffic(options: Mapping[str, Any], largest_cap: int) -> Traffic:
    """Read, scale and describe the trace. Raises: TraceError, UsageError."""
    if not options["trace"]:
        raise UsageError("--trace is missing", "name the recorded traffic: --trace prod.jsonl")
    trace = read_named(options["trace"], options)
    if options["load"] != 1:
        trace = at_load(trace, options["load"])
    if options["window"]:
        options["window"].resolve(trace).of(trace)  # raises if no request is due in it
    described = describe(trace, largest_cap=largest_cap)
    caveats = frozenset(w.caveat for w in described.warnings if w.caveat is not None)
    return Traffic(trace, tuple(described.lines()), caveats)


def choose_engine(options: Mapping[str, Any]) -> EngineChoice:
    """Put the engine's configuration together. Raises: UsageError."""
    given = parse_engine_args(options["engine_args"])
    values: dict[str, object] = {}
    sha256 = ""
    if options["config"]:
        path = Path(options["config"])
        values = dict(read_config(path).values)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if options["model"]:
        values = {
            "model": options["model"],
            **{k: v for k, v in values.items() if k != "model"},
        }
    is_demo = not options["model"] and not options["config"] and "model" not in given
    if is_demo:
        values = demo_engine_args()
    values |= given
    check_model(values)
    names_limits = MAX_NUM_SEQS in values or MAX_NUM_BATCHED_TOKENS in values
    return EngineChoice(values, is_demo, names_limits, sha256)


def profiled_engine(options: Mapping[str, Any], profile: Profile) -> EngineChoice:
    """Return the configuration that a profile was made with, changed by what was given.

    Raises: UsageError.
    """
    given = parse_engine_args(options["engine_args"])
    kept = profile.serve_values.items()
    values = {key: value for key, value in kept if value != REDACTED}
    hidden = [key for key, value in kept if value == REDACTED]
    sha256 = ""
    if options["config"]:
        path = Path(options["config"])
        values, hidden = dict(read_config(path).values), []
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if options["model"]:
        values["model"] = options["model"]
    values |= given
    names_limits = MAX_NUM_SEQS in values or MAX_NUM_BATCHED_TOKENS in values
    there = {hyphenated(key) for key in values}
    lost = tuple(key for key in hidden if hyphenated(key) not in there)
    return EngineChoice(
        values, is_demo=False, names_limits=names_limits, config_sha256=sha256, lost=lost
    )


def check_model(values: Mapping[str, object]) -> None:
    """Refuse a folder that is not there before vLLM takes it for a name on a hub."""
    model = str(values.get("model", ""))
    if not model:
        raise UsageError(
            "the configuration names no model", "add --model, or a line `model:` to --config"
        )
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises on ~nobody
    if looks_local and not folder.exists():
        raise UsageError(
            f"model folder {model} does not exist", "check --model, or `model:` in --config"
        )


def replay_plan(options: Mapping[str, Any], trace: Trace) -> ReplayPlan:
    """Return how the trace is replayed. Raises: UsageError, TraceError."""
    usual = LoadModel.OPEN if trace.concurrency is None else LoadModel.CLOSED
    load_model = LoadModel(options["load_model"] or usual)
    plan = ReplayPlan(
        load_model=load_model,
        concurrency=options["concurrency"],
        clock=ClockKind(options["clock"]),
        timeout_s=options["request_timeout"],
        sessions=Sessions(options["sessions"]),
    )
    check_arrivals(trace, load_model)
    if load_model is LoadModel.CLOSED and plan.concurrency is None:
        trace.recorded_concurrency()
    return plan


def fit_lengths(trace: Trace, max_model_len: int, policy: str) -> tuple[Trace, str]:
    """Apply the policy for requests above max_model_len and say what it did.

    Raises: TraceError if no request is left that the engine takes.
    """
    too_long = trace.too_long(max_model_len)
    count = int(too_long.sum())
    if not count:
        return trace, ""
    told = f"{count} of {len(trace)} requests exceed max_model_len {max_model_len}"
    if count == len(trace) and policy != TooLong.CLIP:
        raise TraceError(
            f"{trace.source}: all {count} requests exceed max_model_len {max_model_len}",
            "raise max-model-len, or --too-long clip",
        )
    fitted = trace.limit_lengths(max_model_len, TooLong(policy))
    done = {"refuse": "will be refused", "clip": "were clipped", "drop": "were dropped"}
    return fitted, f"{told}: they {done[policy]} (--too-long {policy})"
