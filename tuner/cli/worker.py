"""`tune worker`: its options, and those of the run, made into a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import click

from tuner.cli.console import say
from tuner.cli.options import Params
from tuner.cli.resume import check_begun_here, with_tuning
from tuner.cli.tune import tuning_options
from tuner.engine.protocol import EngineSource
from tuner.run.tune import prepare
from tuner.run.worker import stored_run, work


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Which run is helped.

    `storage` is the Optuna storage of the run. `files` are the run's trace on this machine,
    none where it lies at the same place.
    """

    storage: str
    run_dir: Path
    files: tuple[str, ...]

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says."""
        return cls(
            storage=params["storage"],
            run_dir=Path(params["run_dir"]),
            files=tuple(params["trace"]),
        )


def run_worker(
    command: click.Command, options: WorkerOptions, source: EngineSource | None = None
) -> int:
    """Work for the run until it is over. Raises: TunerError, KeyboardInterrupt.

    `command` reads the command line with which the run was begun. The engine is the installed
    vLLM's matter unless a source is given.
    """
    arguments = [str(a) for a in stored_run(options.run_dir)["arguments"]]
    check_begun_here(arguments, options.run_dir)
    context = command.make_context("tune", arguments)
    requested = tuning_options(with_tuning(context.params), arguments)
    if options.files:
        requested = replace(requested, trace=options.files)
    done = work(prepare(requested), options.run_dir, options.storage, say, source)
    say(f"the run is over; {done} rounds were replayed here")
    return 0
