"""What several commands are asked for alike, parsed once from click's parameters.

Each command's own options hold some of these; below them nothing sees click's parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from tuner.cli.console import say
from tuner.cli.options import Params, path_of
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import parse_engine_args
from tuner.errors import UsageError
from tuner.files import is_no_file
from tuner.replay.arrivals import ClockKind, Sessions
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import START_TIMEOUT_S
from tuner.run.inputs import (
    DEMO_NOTE,
    EngineChoice,
    ReplaySettings,
    Traffic,
    configured_engine,
    engine_of_profile,
    fit_lengths,
    traffic_of,
)
from tuner.run.options import TraceReading
from tuner.search.budget import asked_window
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import read_profile
from tuner.traffic.describe import LARGEST_CAP
from tuner.traffic.formats import ReadOptions, TimeUnit
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Aborted, LoadModel, RemarkKind, TooLong, Trace, ZeroOutput
from tuner.traffic.windows import Window, WindowChoice, whole

WHERE_PROFILES_ARE = "every live run writes profile.yaml into its run directory"


def reading_of(params: Params, aborted: Aborted = Aborted.DRAW) -> TraceReading:
    """Return how traces are read; `aborted` is what holds unless named. Raises: UsageError."""
    invalid_percent, unit = params["max_invalid"], params["time_unit"]
    if invalid_percent is not None and not params["skip_invalid"]:
        raise UsageError(
            "--max-invalid says how many wrong rows may be skipped and needs --skip-invalid"
        )
    if invalid_percent is not None and math.isnan(invalid_percent):
        raise UsageError("--max-invalid must be a percentage from 0 to 100, got nan")
    usual = ReadOptions().max_invalid_ratio
    rows = ReadOptions(
        zero_output=ZeroOutput(params["zero_output"]),
        only_model=params["only_model"],
        time_unit=TimeUnit(unit) if unit else None,
        hash_block_size=params["hash_block_size"],
        skip_invalid=params["skip_invalid"],
        max_invalid_ratio=usual if invalid_percent is None else invalid_percent / 100,
        seed=params["seed"],
        sample_s=params["sample"],
        aborted=Aborted(params["aborted"] or aborted),
        max_unpacked_bytes=params["max_unpacked"],
    )
    return TraceReading(
        format=params["trace_format"],
        rows=rows,
        is_spread=params["spread"],
        sessions_over_s=params["sessions_over"],
    )


def check_named(paths: Sequence[str]) -> None:
    """Refuse a command that names no trace. Raises: UsageError."""
    if not paths:
        raise UsageError("--trace is missing", "name the recorded traffic: --trace prod.jsonl")


def check_output(output: Path | None) -> None:
    """Refuse an -o that cannot be a file before anything is done for it. Raises: UsageError."""
    if output is None or is_no_file(output):
        return
    if output.is_dir():
        raise UsageError(f"-o {output}: that is a folder", "name a file in it")
    folder = output.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"-o {output}: its folder does not exist", "make it, or name another")
    # A file is put in the place of the old one; what is none, as a pipe, is written to.
    is_device = output.exists() and not output.is_file()
    if not os.access(output if is_device else folder, os.W_OK):
        raise UsageError(
            f"-o {output} cannot be written: nothing may be put there",
            "name a file in another folder, or see to the rights of this one",
        )


@dataclass(frozen=True, slots=True)
class TrafficOptions(ReplaySettings):
    """Which recorded traffic is replayed, and how.

    `files` are those of one trace, "-" being standard input. `load` is a multiple of the
    recorded arrivals. None stands for the command's own choice of a `window`.
    """

    files: tuple[str, ...]
    reading: TraceReading
    load: float
    window: WindowChoice | None

    @classmethod
    def parse(cls, params: Params, aborted: Aborted = Aborted.DRAW) -> Self:
        """Return what --trace and `traffic_options` say. Raises: UsageError."""
        load_model = params["load_model"]
        return cls(
            files=tuple(params["trace"]),
            reading=reading_of(params, aborted),
            load=params["load"],
            window=params["window"],
            load_model=LoadModel(load_model) if load_model else None,
            concurrency=params["concurrency"],
            sessions=Sessions(params["sessions"]),
            clock=ClockKind(params["clock"]),
            request_timeout_s=params["request_timeout"],
            too_long=TooLong(params["too_long"]),
            is_greedy=params.get("greedy", False),
            start_timeout_s=params.get("start_timeout", START_TIMEOUT_S),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `ReplaySettings`, for options that have them too."""
        return {field.name: getattr(self, field.name) for field in fields(ReplaySettings)}

    @property
    def seed(self) -> int:
        """The seed of everything that is drawn at random."""
        return self.reading.rows.seed

    def read(self, largest_cap: int = LARGEST_CAP) -> Traffic:
        """Return the trace at its load, described. Raises: TraceError, UsageError.

        `largest_cap` is the largest max_num_seqs of interest.
        """
        check_named(self.files)
        trace = self.reading.read(self.files)
        return traffic_of(trace, self.load, self.window, largest_cap, self.concurrency)

    def fitted(self, trace: Trace, max_model_len: int) -> Trace:
        """Return the trace with lengths that the engine takes, and say what was too long.

        Raises: TraceError if no request is left.
        """
        fitted, message = fit_lengths(trace, max_model_len, self.too_long)
        if message:
            say(message)
        return fitted

    def window_of(self, trace: Trace) -> Window:
        """Return the window that was chosen, else all of the trace. Raises: UsageError."""
        return whole(trace) if self.window is None else self.window.resolve(trace)

    def part_of(self, trace: Trace) -> Trace:
        """Return the part in the window. Raises: TraceError, UsageError if it holds none."""
        return trace if self.window is None else self.window.resolve(trace).of(trace)

    def warm_part_of(self, trace: Trace, plan: ReplayPlan) -> Trace:
        """Return the part in the window, and what comes before it, which is not measured.

        Raises: TraceError, UsageError if the window holds none.
        """
        window = asked_window(self.window, trace, plan)
        return trace if window is None else window.of(plan.on(trace))


def announce(traffic: Traffic, *, is_demo: bool = False) -> None:
    """Describe what is replayed, and say so if what takes it is the demo model."""
    for line in traffic.lines:
        say(line)
    if is_demo:
        say(DEMO_NOTE)


def say_missed(trace: Trace, loads: Iterable[float]) -> None:
    """Say which loads of a trace its whole sessions do not come to. Raises: UsageError."""
    for load in loads:
        at_said_load(trace, load)


def at_said_load(trace: Trace, load: float) -> Trace:
    """Return the trace at a load; say what its whole sessions come to if that is another.

    What its file says of a load before is of another one.

    Raises: UsageError.
    """
    scaled = at_load(trace, load)
    for remark in scaled.notes.remarks:
        if remark.kind is RemarkKind.LOAD_MISSED and remark not in trace.notes.remarks:
            say(remark.text)
    return scaled


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine's configuration: a file, and a model and keys that go before it."""

    config: Path | None
    model: str | None
    engine_args: Mapping[str, object]

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what --config and `engine_options` say. Raises: UsageError."""
        given = parse_engine_args(params["engine_args"])
        return cls(path_of(params["config"]), params["model"], given)

    def choose(self, shadow: ProfiledEngine | None = None) -> EngineChoice:
        """Return the configuration; of a shadow that of its profile, changed by what was named.

        Raises: UsageError.
        """
        if shadow is None:
            return configured_engine(self.config, self.model, self.engine_args)
        return engine_of_profile(shadow.profile, self.config, self.model, self.engine_args)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """One value of each limit; None where the configuration says it."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what `one_setting` says."""
        return cls(params["max_num_seqs"], params["max_num_batched_tokens"])

    def over(self, configured: EngineLimits) -> EngineLimits:
        """Return the configured limits, changed by what was named. Raises: UsageError."""
        return EngineLimits(
            self.max_num_seqs or configured.max_num_seqs,
            self.max_num_batched_tokens or configured.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class ShadowOptions:
    """Of which profile the shadow is, and whether one of another engine will do."""

    profile: Path
    is_forced: bool

    @classmethod
    def parse(cls, params: Params, missing: UsageError | None = None) -> Self:
        """Return what `SHADOW` says. Raises: UsageError, `missing` for no profile."""
        if not params["profile"]:
            hint = f"name a profile: {WHERE_PROFILES_ARE}"
            raise missing or UsageError("--profile is missing", hint)
        return cls(Path(params["profile"]), params["force_profile"])

    def load(self) -> ProfiledEngine:
        """Return the profile as what starts its shadow. Raises: UsageError."""
        return ProfiledEngine(read_profile(self.profile), is_forced=self.is_forced)
