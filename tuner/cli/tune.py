"""`tune --trace …`: the main job as a command, which shows a run and writes what it found."""

from __future__ import annotations

import sys
from pathlib import Path

from tuner.cli.console import RunDisplay, say, show_outcome
from tuner.cli.emit import holds_secrets
from tuner.cli.job import Job
from tuner.emit.registry import emit
from tuner.emit.sources import recommendation_of
from tuner.emit.target import Names
from tuner.engine.protocol import EngineSource
from tuner.files import write_atomic
from tuner.library import tune
from tuner.report.page import REPORT_FILE
from tuner.run.directory import TRIALS_FILE
from tuner.run.result import RunResult
from tuner.shadow.pool import SpareProcesses


def run_job(
    job: Job, source: EngineSource | None = None, spares: SpareProcesses | None = None
) -> int:
    """Run the main job and return the exit code. Raises: TunerError, KeyboardInterrupt.

    Where the engines come from and who else can be a shadow is the installed vLLM's matter
    unless given.
    """
    display = RunDisplay("p95", job.run.options.budget_s)
    try:
        with display:
            result = tune(job.run, display, source=source, spares=spares)
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
    kept = f"evidence in {path}, to look at: {path / REPORT_FILE}"
    rec = recommendation_of(result, job.run.engine.deployed_values, path)
    text = emit(job.chosen, rec, Names(Path(output).name if output else ""))
    if output:
        write_atomic(Path(output), text, secret=holds_secrets(job.chosen, rec))
        show_outcome(result, f"written to {output}; {kept}")
    else:
        sys.stdout.write(text)
        show_outcome(result, kept)
