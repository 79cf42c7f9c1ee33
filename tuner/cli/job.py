"""The main job's options, read and found good before any engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.cli.emit import check_ending
from tuner.cli.inputs import check_named, reading_of
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation, without_lost
from tuner.emit.registry import checked_writer
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import parse_engine_args
from tuner.errors import UsageError
from tuner.replay.arrivals import ClockKind, Sessions
from tuner.run.options import DEFAULT_BUDGET_S, TuningOptions
from tuner.run.session import Method
from tuner.run.tune import PreparedRun, prepare
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER
from tuner.traffic.traces import LoadModel, TooLong


@dataclass(frozen=True, slots=True)
class Job:
    """A run that can begin, and what is to be written when it has ended."""

    run: PreparedRun
    output: str | None
    chosen: Format


def read_job(options: Mapping[str, Any], arguments: Sequence[str]) -> Job:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    run = prepare(tuning_options(options, arguments))
    output, chosen = options["output"], Format(options["emit_format"])
    if output and not Path(output).resolve().parent.is_dir():
        raise UsageError(f"-o {output}: its folder does not exist", "make it, or name another")
    check_ending(chosen, output)
    _check_format(chosen, run)
    return Job(run, output, chosen)


def tuning_options(options: Mapping[str, Any], arguments: Sequence[str] = ()) -> TuningOptions:
    """Return what the command's options ask for. Raises: UsageError."""
    load_model = options["load_model"]
    check_named(options["trace"])
    return TuningOptions(
        trace=tuple(options["trace"]),
        config=options["config"] or None,
        model=options["model"],
        engine_args=parse_engine_args(options["engine_args"]),
        slos=options["slo"],
        objective=Objective(options["objective"]),
        budget_s=options["budget"] or DEFAULT_BUDGET_S,
        window=options["window"],
        load=options["load"],
        load_model=LoadModel(load_model) if load_model else None,
        concurrency=options["concurrency"],
        sessions=Sessions(options["sessions"]),
        clock=ClockKind(options["clock"]),
        request_timeout_s=options["request_timeout"],
        too_long=TooLong(options["too_long"]),
        ladder=options["max_num_seqs"] or DEFAULT_LADDER,
        method=Method(options["method"]),
        profile=options["profile"] or None,
        is_forced=options["force_profile"],
        jobs=options["jobs"],
        storage=options["storage"],
        run_dir=options["resume"] or options["run_dir"] or None,
        is_resumed=bool(options["resume"]),
        seed=options["seed"],
        reading=reading_of(options),
        arguments=arguments,
    )


def _check_format(chosen: Format, run: PreparedRun) -> None:
    """Refuse now what could not be written in the end. Raises: UsageError."""
    if chosen is Format.VLLM_EXACT and run.options.method is Method.SHADOW:
        raise UsageError(
            "--format vllm-exact repeats a measured point, and --method shadow measures none",
            "leave --format out",
        )
    values, lost = without_lost(run.engine.deployed_values)
    checked_writer(chosen, Recommendation(values, EngineLimits(1, 1), lost=lost))
