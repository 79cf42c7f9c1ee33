"""The traffic, the engine's configuration and the replay plan that a run's options stand for.

Everything here happens before an engine starts, so that bad input is refused at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tuner.engine.demo import demo_engine_args
from tuner.engine.serve_config import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    as_deployed,
    hyphenated,
    read_config,
)
from tuner.errors import Caveat, TraceError, UsageError
from tuner.redact import REDACTED
from tuner.replay.arrivals import ClockKind, Sessions, check_arrivals
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import START_TIMEOUT_S
from tuner.shadow.profiles import Profile
from tuner.traffic.describe import describe
from tuner.traffic.resample import at_load
from tuner.traffic.traces import LoadModel, TooLong, Trace
from tuner.traffic.windows import WindowChoice

DEMO_NOTE = (
    "no --model and no --config: measuring the bundled demo model, a small Qwen2-shaped one "
    "with random weights"
)

Config = str | Path | Mapping[str, object] | None
"""A `vllm serve --config` file, or its keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a trace is replayed.

    None stands for the load model and the concurrency that were recorded; without
    `request_timeout_s` clients wait forever. A live engine samples tokens as a server of the
    model would, or if `is_greedy` the likeliest. It may take `start_timeout_s` to start.

    Units: seconds.
    """

    load_model: LoadModel | None = None
    concurrency: int | None = None
    sessions: Sessions = Sessions.CAUSAL
    clock: ClockKind = ClockKind.VIRTUAL
    request_timeout_s: float | None = None
    too_long: TooLong = TooLong.REFUSE
    is_greedy: bool = False
    start_timeout_s: float = START_TIMEOUT_S

    def plan(self, trace: Trace) -> ReplayPlan:
        """Return how this trace is replayed; a recording of concurrency as a closed loop.

        Raises: UsageError, TraceError.
        """
        usual = LoadModel.OPEN if trace.concurrency is None else LoadModel.CLOSED
        plan = ReplayPlan(
            load_model=self.load_model or usual,
            concurrency=self.concurrency,
            clock=self.clock,
            timeout_s=self.request_timeout_s,
            sessions=self.sessions,
        )
        check_arrivals(trace, plan.load_model)
        if plan.load_model is LoadModel.CLOSED and plan.concurrency is None:
            trace.recorded_concurrency()
        return plan


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
        return {**as_deployed(self.values), **dict.fromkeys(self.lost, REDACTED)}

    @property
    def model(self) -> str:
        """Return the model's name, for messages and provenance."""
        return "the bundled demo model" if self.is_demo else str(self.values.get("model", "?"))


def traffic_of(
    trace: Trace,
    load: float,
    window: WindowChoice | None,
    largest_cap: int,
    concurrency: int | None,
) -> Traffic:
    """Return the trace at a load, described. Raises: TraceError, UsageError.

    `largest_cap` is the largest max_num_seqs of interest. Where a closed loop keeps a
    `concurrency` that was given, it is no matter how many the recording had in flight.
    """
    if load != 1:
        trace = at_load(trace, load)
    if window is not None:
        window.resolve(trace).of(trace)  # raises if no request is due in it
    described = describe(trace, largest_cap=largest_cap if concurrency is None else 0)
    caveats = frozenset(w.caveat for w in described.warnings if w.caveat is not None)
    return Traffic(trace, tuple(described.lines()), caveats)


def _config_values(config: Config) -> tuple[dict[str, object], str]:
    """Return a configuration's keys and values and what identifies it; empty for None."""
    if config is None:
        return {}, ""
    if isinstance(config, Mapping):
        values = {hyphenated(key): value for key, value in config.items()}
        encoded = msgspec.json.encode(values, order="deterministic")
        return values, hashlib.sha256(encoded).hexdigest()
    path = Path(config)
    values = read_config(path)
    return values, hashlib.sha256(path.read_bytes()).hexdigest()


def configured_engine(
    config: Config, model: str | None, engine_args: Mapping[str, object]
) -> EngineChoice:
    """Put the engine's configuration together. Raises: UsageError."""
    values, sha256 = _config_values(config)
    if model:
        values = {"model": model, **{k: v for k, v in values.items() if k != "model"}}
    is_demo = not model and config is None and "model" not in engine_args
    if is_demo:
        values = demo_engine_args()
    values |= engine_args
    check_model(values)
    names_limits = MAX_NUM_SEQS in values or MAX_NUM_BATCHED_TOKENS in values
    return EngineChoice(values, is_demo, names_limits, sha256)


def engine_of_profile(
    profile: Profile,
    config: Config = None,
    model: str | None = None,
    engine_args: Mapping[str, object] | None = None,
) -> EngineChoice:
    """Return the configuration that a profile was made with, changed by what was given.

    Raises: UsageError.
    """
    stored = profile.serve_values.items()
    values = {key: value for key, value in stored if value != REDACTED}
    hidden = [key for key, value in stored if value == REDACTED]
    sha256 = ""
    if config is not None:
        values, sha256 = _config_values(config)
        hidden = []
    if model:
        values["model"] = model
    values |= engine_args or {}
    names_limits = MAX_NUM_SEQS in values or MAX_NUM_BATCHED_TOKENS in values
    there = {hyphenated(key) for key in values}
    lost = tuple(key for key in hidden if hyphenated(key) not in there)
    return EngineChoice(
        values, is_demo=False, names_limits=names_limits, config_sha256=sha256, lost=lost
    )


def check_model(values: Mapping[str, object]) -> None:
    """Refuse a folder that is not there before vLLM takes it for a name on a hub.

    >>> check_model({"model": "s3://bucket/llama"})
    >>> check_model({"model": "./llama"})
    Traceback (most recent call last):
    tuner.errors.UsageError: model folder ./llama does not exist
    """
    model = str(values.get("model", ""))
    if not model:
        raise UsageError(
            "the configuration names no model", "add --model, or a line `model:` to --config"
        )
    if "://" in model:  # an address that vLLM loads from
        return
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises on ~nobody
    if looks_local and not folder.exists():
        raise UsageError(
            f"model folder {model} does not exist", "check --model, or `model:` in --config"
        )


def fit_lengths(trace: Trace, max_model_len: int, policy: str) -> tuple[Trace, str]:
    """Apply the policy for requests above max_model_len and say what it did.

    Raises: TraceError if no request is left that the engine takes.
    """
    too_long = trace.too_long(max_model_len)
    count = int(too_long.sum())
    if not count:
        return trace, ""
    message = f"{count} of {len(trace)} requests exceed max_model_len {max_model_len}"
    if count == len(trace) and policy != TooLong.CLIP:
        raise TraceError(
            f"{trace.source}: all {count} requests exceed max_model_len {max_model_len}",
            "raise max-model-len, or --too-long clip",
        )
    fitted = trace.limit_lengths(max_model_len, TooLong(policy))
    done = {"refuse": "will be refused", "clip": "were clipped", "drop": "were dropped"}
    return fitted, f"{message}: they {done[policy]} (--too-long {policy})"
