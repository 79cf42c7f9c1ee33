"""`tune --trace …`: the main job, from its options to the file that it was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.cli.console import RunDisplay, say, show_outcome
from tuner.cli.emit import check_ending, holds_secrets
from tuner.cli.inputs import EngineOptions, TrafficOptions, check_folder, check_named
from tuner.cli.options import Params, path_of
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation, without_lost
from tuner.emit.registry import checked_writer, emit
from tuner.emit.sources import recommendation_of
from tuner.emit.target import Names
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineSource
from tuner.errors import UsageError
from tuner.files import write_atomic
from tuner.library import tune
from tuner.report.page import REPORT_FILE
from tuner.run.directory import TRIALS_FILE
from tuner.run.options import DEFAULT_BUDGET_S, TuningOptions
from tuner.run.result import RunResult
from tuner.run.session import Method
from tuner.run.tune import PreparedRun, prepare
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile


@dataclass(frozen=True, slots=True)
class Job:
    """A run that can begin, and what is to be written when it has ended."""

    run: PreparedRun
    output: Path | None
    chosen: Format


def read_job(params: Params, arguments: Sequence[str]) -> Job:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    run = prepare(tuning_options(params, arguments))
    output, chosen = path_of(params["output"]), Format(params["emit_format"])
    check_folder(output)
    check_ending(chosen, output)
    _check_format(chosen, run)
    return Job(run, output, chosen)


def tuning_options(params: Params, arguments: Sequence[str] = ()) -> TuningOptions:
    """Return what the command line asks for. Raises: UsageError."""
    check_named(params["trace"])
    traffic, engine = TrafficOptions.parse(params), EngineOptions.parse(params)
    return TuningOptions(
        trace=traffic.files,
        config=engine.config,
        model=engine.model,
        engine_args=engine.engine_args,
        slos=params["slo"],
        objective=Objective(params["objective"]),
        budget_s=params["budget"] or DEFAULT_BUDGET_S,
        window=traffic.window,
        load=traffic.load,
        load_model=traffic.load_model,
        concurrency=traffic.concurrency,
        sessions=traffic.sessions,
        clock=traffic.clock,
        request_timeout_s=traffic.request_timeout_s,
        too_long=traffic.too_long,
        ladder=params["max_num_seqs"] or DEFAULT_LADDER,
        method=Method(params["method"]),
        profile=path_of(params["profile"]),
        is_forced=params["force_profile"],
        storage=params["storage"],
        run_dir=path_of(params["resume"] or params["run_dir"]),
        is_resumed=bool(params["resume"]),
        seed=traffic.seed,
        reading=traffic.reading,
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


def run_job(
    job: Job,
    source: EngineSource | None = None,
    predictor_of: Callable[[Profile], Predictor] | None = None,
) -> int:
    """Run the main job and return the exit code. Raises: TunerError, KeyboardInterrupt.

    Where the engines come from, and what predicts, is the installed vLLM's matter unless given.
    """
    display = RunDisplay("p95", job.run.options.budget_s)
    try:
        with display:
            result = tune(job.run, display, source=source, predictor_of=predictor_of)
    except KeyboardInterrupt:
        _interrupted(job, display.result)
        raise
    _emit(job, result)
    return 0


def _interrupted(job: Job, result: RunResult | None) -> None:
    """Write the best so far, if there is any, and say how to go on."""
    if result is not None and result.feasible:
        _emit(job, result)
    if (job.run.run_path / TRIALS_FILE).exists():
        say(f"go on with: tune --resume {job.run.run_path}")


def _emit(job: Job, result: RunResult) -> None:
    """Write what was asked for to -o or standard output."""
    path, output = job.run.run_path, job.output
    evidence = f"evidence in {path}, to look at: {path / REPORT_FILE}"
    rec = recommendation_of(result, job.run.engine.deployed_values, path)
    text = emit(job.chosen, rec, Names(output.name if output else ""))
    if output is not None:
        write_atomic(output, text, secret=holds_secrets(job.chosen, rec))
        show_outcome(result, f"written to {output}; {evidence}")
    else:
        sys.stdout.write(text)
        show_outcome(result, evidence)
