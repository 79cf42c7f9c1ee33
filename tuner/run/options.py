"""What a tuning run is asked for, checked as far as it can be without a file or an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from tuner.errors import UsageError
from tuner.replay.arrivals import ClockKind, Sessions
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import START_TIMEOUT_S
from tuner.replay.slo import Slo
from tuner.run.inputs import ReplaySettings
from tuner.run.knobs.known import knob_named
from tuner.run.variants.records import checked_variants
from tuner.search.budget import Budget
from tuner.search.objective import Objective, Scoring
from tuner.search.race import CONFIDENCE
from tuner.search.space import DEFAULT_LADDER
from tuner.shadow.profiles import Profile
from tuner.traffic.formats import ReadOptions, read_traces
from tuner.traffic.traces import LoadModel, TooLong, Trace
from tuner.traffic.windows import Window, WindowChoice, WindowKind, parse_window

DEFAULT_BUDGET_S = 1800.0

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Limits that are passed around as good for a purpose, and a share of the GPU's memory."""

    limits: EngineLimits
    memory_share: float

    def values(self, *, with_memory: bool) -> dict[str, object]:
        """Return it by vLLM's keys."""
        memory = {"gpu-memory-utilization": self.memory_share} if with_memory else {}
        return {
            MAX_NUM_SEQS: self.limits.max_num_seqs,
            MAX_NUM_BATCHED_TOKENS: self.limits.max_num_batched_tokens,
            **memory,
        }


STARTING_POINTS: Final[Mapping[str, StartingPoint]] = {
    "high-throughput": StartingPoint(EngineLimits(512, 65536), 0.92),
    "low-latency": StartingPoint(EngineLimits(64, 8192), 0.85),
}
"""What people start from who have measured nothing."""


class Method(StrEnum):
    """How a run searches."""

    AUTO = "auto"
    CALIBRATED = "calibrated"
    LIVE = "live"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class TraceReading:
    """How files of recorded traffic are read; None for what the files themselves say.

    With `is_spread` the arrivals of a coarse clock are spread evenly within its ticks, drawn
    with the seed of `rows`. Sessions without a common clock start within `sessions_over_s`.

    Units: seconds.
    """

    format: str | None = None
    rows: ReadOptions = field(default_factory=ReadOptions)
    is_spread: bool = False
    sessions_over_s: float | None = None

    def read(self, paths: Sequence[str | Path]) -> Trace:
        """Return the trace in all files and folders. Raises: TraceError, UsageError."""
        return read_traces(
            paths,
            self.format,
            self.rows,
            spread_seed=self.rows.seed if self.is_spread else None,
            sessions_over_s=self.sessions_over_s,
        )


@dataclass(frozen=True, slots=True)
class RunOptions(ReplaySettings):
    """What a run can be asked for, and its directory keeps; `TuningOptions` says what it means.

    `trace` is None where the directory cannot keep it.
    """

    trace: Trace | str | Path | Sequence[str | Path] | None
    config: str | Path | Mapping[str, object] | None = None
    model: str | None = None
    engine_args: Mapping[str, object] = field(default_factory=dict)
    slos: Sequence[Slo] = ()
    objective: Objective = Objective.BALANCED
    budget_s: float = DEFAULT_BUDGET_S
    window: WindowChoice | Window | str | None = None
    load: float = 1.0
    confidence: float = CONFIDENCE
    ladder: Sequence[int] = DEFAULT_LADDER
    knobs: Sequence[str] = ()
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    gpu_hour_price: float | None = None
    start: str | None = None
    method: Method = Method.AUTO
    profile: Profile | str | Path | None = None
    is_forced: bool = False
    storage: str | None = None
    seed: int = 0
    reading: TraceReading = field(default_factory=TraceReading)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TuningOptions(RunOptions):
    """Everything that a run can be asked for; the defaults are those of the command `tune`.

    `trace` is a trace or the files of one, which are read as `reading` says. `config` is the
    current configuration: the path of a `vllm serve --config` file, or its keys and values;
    `model` and `engine_args` go before it. Without any of the three the bundled demo model is
    measured. `window` is the part to replay, as `peak:300s`, `5m:10m` or `all`; None for what
    fits into the time. `load` is a multiple of the recorded arrival rate, `confidence` how
    probable it must be that a change is better and that SLOs are met, `ladder` the caps of
    max_num_seqs to climb, `knobs` what else may be turned, by the names of `tune explain`.
    `variants` are other configurations to compare, the keys that each sets by its name, and
    `gpu_hour_price` what an hour of a device costs there.
    `start` names limits that take the place of the configuration's own. `profile` is that of
    an earlier run: with it nothing has to be learnt of the engine, and with Method.SHADOW no
    engine is started. `run_dir` keeps the evidence,
    None for `runs/<time>`; with `is_resumed` the run that it holds goes on. `notes` are kept
    with the run for whoever resumes it, such as where a command writes its file.

    Units: seconds.
    Raises: UsageError if a value cannot be used, or two contradict each other.
    """

    trace: Trace | str | Path | Sequence[str | Path]
    run_dir: str | Path | None = None
    is_resumed: bool = False

    def __post_init__(self) -> None:
        """Bring values into one form and refuse what cannot be used."""
        chosen: dict[str, object] = {
            "objective": _member(Objective, self.objective, "objective"),
            "sessions": _member(Sessions, self.sessions, "sessions"),
            "clock": _member(ClockKind, self.clock, "clock"),
            "too_long": _member(TooLong, self.too_long, "too_long"),
            "method": _member(Method, self.method, "method"),
            "slos": tuple(_slo(slo) for slo in self.slos),
            "ladder": tuple(self.ladder),
            "knobs": tuple(dict.fromkeys(knob_named(name).name for name in self.knobs)),
            "variants": checked_variants(self.variants),
            "window": _window_choice(self.window),
        }
        if self.load_model is not None:
            chosen["load_model"] = _member(LoadModel, self.load_model, "load_model")
        for name, value in chosen.items():
            object.__setattr__(self, name, value)
        Budget(self.budget_s)
        # Whether it will be closed the trace says; either takes this concurrency and time-out.
        ReplayPlan(LoadModel.CLOSED, self.concurrency, timeout_s=self.request_timeout_s)
        self._check_numbers()
        Scoring(self.objective, tuple(self.slos), "p99")
        self._check_method()

    def _check_numbers(self) -> None:
        if not self.ladder or min(self.ladder) < 1:
            raise UsageError(
                f"--max-num-seqs must list caps of at least 1, got {list(self.ladder)}",
                "for example 1,2,4,8,16,32",
            )
        if not 0 < self.load < 1e6:
            raise UsageError(
                f"--load must be a multiple above 0, got {self.load:g}", "for example 1.5"
            )
        if not 0.5 <= self.confidence < 1:
            raise UsageError(
                f"--confidence must be at least 0.5 and below 1, got {self.confidence:g}",
                "for example 0.9",
            )
        if self.gpu_hour_price is not None and not 0 < self.gpu_hour_price < math.inf:
            raise UsageError(
                f"--gpu-hour-price must be above 0, got {self.gpu_hour_price:g}",
                "for example 2.5",
            )
        if self.gpu_hour_price is not None and not self.variants:
            raise UsageError(
                "--gpu-hour-price compares the cost of variants, and there is none",
                "add --variant NAME:KEY=VALUE, or leave the price out",
            )
        if self.start is not None and self.start not in STARTING_POINTS:
            raise UsageError(
                f"--start must be one of {', '.join(STARTING_POINTS)}, got {self.start!r}",
                "leave it out to start from your own configuration",
            )
        if self.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {self.seed}")
        if self.is_resumed and not self.run_dir:
            raise UsageError("a run that is resumed needs its run_dir", "name its directory")

    def _check_method(self) -> None:
        """Refuse a method that lacks what it needs, or is given what it has no use for."""
        if self.objective is Objective.CAPACITY and self.method is Method.LIVE:
            raise UsageError(
                "--objective capacity asks many loads of each setting and needs the shadow",
                "leave --method live out",
            )
        predicts = {"--knobs": self.knobs, "--variant": self.variants}
        for option in (name for name, is_asked in predicts.items() if is_asked):
            if self.method is Method.LIVE:
                raise UsageError(
                    f"{option} rests on predictions and needs the shadow",
                    "leave --method live out",
                )
        if self.method is Method.SHADOW and not self.profile:
            raise UsageError(
                "--method shadow needs --profile FILE",
                "every live run writes profile.yaml into its run directory",
            )
        is_for_engine = {
            "--greedy": self.is_greedy,
            "--clock wall": self.clock is ClockKind.WALL,
            "--start-timeout": self.start_timeout_s != START_TIMEOUT_S,
        }
        for option in (name for name, is_given in is_for_engine.items() if is_given):
            if self.method is Method.SHADOW:
                raise UsageError(
                    f"{option} is for a live engine, and --method shadow starts none",
                    f"leave {option} out",
                )
        if self.profile and self.method not in (Method.AUTO, Method.SHADOW):
            raise UsageError(
                f"--profile is for --method auto and shadow, got --method {self.method}",
                "a run on a live engine makes a profile of its own",
            )

    @property
    def window_choice(self) -> WindowChoice | None:
        """Return which part was chosen, None where none was."""
        return _window_choice(self.window)


def _member(kind: type[Choice], value: str, name: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise UsageError(f"{name} must be one of {known}, got {value!r}") from None


def _slo(given: object) -> Slo:
    """Return an SLO, or that of the text that `--slo` takes. Raises: UsageError."""
    return given if isinstance(given, Slo) else Slo.parse(str(given))


def _window_choice(window: WindowChoice | Window | str | None) -> WindowChoice | None:
    if isinstance(window, str):
        return parse_window(window)
    if isinstance(window, Window):
        return WindowChoice(WindowKind.SPAN, span=window)
    return window
