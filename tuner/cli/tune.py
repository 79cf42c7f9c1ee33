"""`tune --trace …`: the main job, from its options to the file that it was asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tuner.cli.console import say
from tuner.cli.displays import RunDisplay, show_outcome
from tuner.cli.emit import check_ending, file_name, holds_secrets
from tuner.cli.inputs import EngineOptions, TrafficOptions, check_named, check_output
from tuner.cli.options import Params, given_in, path_of
from tuner.cli.values import LADDER, SLO
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation, without_lost
from tuner.emit.registry import checked_writer, emit
from tuner.emit.sources import recommendation_of
from tuner.emit.target import Names
from tuner.engine.demo import bundled
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineSource
from tuner.engine.serve_config import parse_engine_args, read_tuning
from tuner.errors import UsageError
from tuner.files import write_atomic
from tuner.library import tune
from tuner.report.page import REPORT_FILE
from tuner.run.directory import TRIALS_FILE, RunDir
from tuner.run.options import DEFAULT_BUDGET_S, Method, TuningOptions
from tuner.run.result import RunResult
from tuner.run.start import PreparedRun, prepare
from tuner.run.stored import read_record
from tuner.run.variants.records import parse_variants
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER

OUTPUT, FORMAT = "output", "emit_format"
_RETYPED = {
    **{name: name for name in ("trace", "config", "storage", "model")},
    "budget": "budget_s",
    "start_timeout": "start_timeout_s",
}
"""Which options may be typed anew with --resume, and the fields that they set. A model cannot
change, but a login in its address has to be given again."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run that can begin, and what is to be written when it has ended."""

    run: PreparedRun
    output: Path | None
    chosen: Format


def read_job(ctx: click.Context) -> Job:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    options = resumed(ctx) if ctx.params["resume"] else tuning_options(with_tuning(ctx.params))
    run = prepare(options)
    output, chosen = path_of(options.notes.get(OUTPUT)), options.notes.get(FORMAT, Format.VLLM)
    check_output(output)
    form = Format(chosen)
    check_ending(form, output)
    _check_format(form, run)
    return Job(run, output, form)


def tuning_options(params: Params) -> TuningOptions:
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
        budget_s=DEFAULT_BUDGET_S if params["budget"] is None else params["budget"],
        window=traffic.window,
        load=traffic.load,
        confidence=params["confidence"],
        **traffic.settings,
        ladder=params["max_num_seqs"] or DEFAULT_LADDER,
        knobs=params["knobs"],
        variants=parse_variants(params["variants"]),
        gpu_hour_price=params["gpu_hour_price"],
        start=params["start"],
        method=Method(params["method"]),
        profile=path_of(params["profile"]),
        is_forced=params["force_profile"],
        storage=params["storage"],
        run_dir=path_of(params["run_dir"]),
        seed=traffic.seed,
        reading=traffic.reading,
        notes=_notes(params),
    )


def _notes(params: Params) -> dict[str, str]:
    """Return what the command keeps with the run: where its file goes, and in which form."""
    return {name: str(params[name]) for name in (OUTPUT, FORMAT) if params.get(name)}


def resumed(ctx: click.Context) -> TuningOptions:
    """Return the options that --resume goes on with: the run's, and those typed anew.

    Raises: UsageError if the directory holds no run, an option cannot change, or the trace or a
        secret has to be given again.
    """
    typed = given_in(ctx)
    for option in ctx.command.params:
        if option.name in typed.keys() - {"resume", "engine_args", OUTPUT, FORMAT, *_RETYPED}:
            raise UsageError(
                f"{max(option.opts, key=len)} cannot change when a run is resumed",
                "only --budget, -o, --format, --storage and --start-timeout can; start a new "
                "run for the rest",
            )
    path = Path(typed["resume"])
    RunDir(path, resume=True).close()
    stored = read_record(path).options
    given = {field: typed[name] for name, field in _RETYPED.items() if name in typed}
    given["engine_args"] = parse_engine_args(typed.get("engine_args", ()))
    return stored.restored(path, {**given, "notes": {**stored.notes, **_notes(typed)}})


def with_tuning(params: Params) -> dict[str, Any]:
    """Fill what the command line leaves open: from the tuning profile, then by default.

    SLOs that are typed take the place of all of the profile's, which is said.
    """
    filled = dict(params)
    if params["tuning"]:
        tuning = read_tuning(_tuning_path(params["tuning"]))
        filled["objective"] = params["objective"] or tuning.objective
        slos = [SLO.convert(text, None, None) for text in tuning.slos]
        filled["slo"] = params["slo"] or tuple(slos)
        if left_out := [str(slo) for slo in slos if slo not in filled["slo"]]:
            say(f"--slo takes the place of those of --tuning: without {', '.join(left_out)}")
        if tuning.max_num_seqs and not params["max_num_seqs"]:
            filled["max_num_seqs"] = LADDER.convert(tuning.max_num_seqs, None, None)
    filled["objective"] = filled["objective"] or "balanced"
    return filled


def _tuning_path(name: str) -> Path:
    """Return the file of a tuning profile, by path or by the name of a bundled one."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    found = bundled("profiles") / f"{name}.yaml"
    if not found.is_file():
        found_there = bundled("profiles").glob("*.yaml")
        known = sorted(p.stem for p in found_there if "." not in p.stem)
        raise UsageError(
            f"--tuning {name} is not known, expected {' or '.join(known)} or a YAML file",
            "name one of them, or a path that ends in .yaml",
        )
    return found


def _check_format(chosen: Format, run: PreparedRun) -> None:
    """Refuse now what could not be written in the end. Raises: UsageError."""
    method = run.options.method
    if chosen is Format.VLLM_EXACT and method in (Method.SHADOW, Method.CALIBRATED):
        raise UsageError(
            f"--format vllm-exact repeats a measured point, and --method {method} measures "
            "none",
            "leave --format out",
        )
    values, lost = without_lost(run.engine.deployed_values)
    checked_writer(chosen, Recommendation(values, EngineLimits(1, 1), lost=lost))


def run_job(job: Job, source: EngineSource | None = None) -> int:
    """Run the main job and return the exit code. Raises: TunerError, KeyboardInterrupt.

    Where the engines come from is the installed vLLM's matter unless given.
    """
    display = RunDisplay(job.run.options.budget_s)
    try:
        with display:
            result = tune(job.run, display, source=source)
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
    """Write what was asked for to -o or standard output, and say what was found.

    Raises: UsageError if the file cannot be written, once the rest is said.
    """
    path, output = job.run.run_path, job.output
    evidence = f"evidence in {path}, to look at: {path / REPORT_FILE}"
    rec = recommendation_of(result, job.run.engine.deployed_values, path)
    text = emit(job.chosen, rec, Names(file_name(output)))
    if output is None:
        sys.stdout.write(text)
        show_outcome(result, evidence)
        return
    again = f"tune emit {path} --format {job.chosen} -o FILE writes it elsewhere"
    try:
        write_atomic(output, text, secret=holds_secrets(job.chosen, rec), hint=again)
    except UsageError:
        show_outcome(result, evidence)
        raise
    show_outcome(result, f"written to {output}; {evidence}")
