"""`tune worker`: its options made into a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tuner.cli.console import say
from tuner.cli.options import Params, path_of
from tuner.engine.protocol import EngineSource
from tuner.run.worker import work


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Which run is helped.

    `storage` is the Optuna storage of the run. `files` are the run's trace on this machine and
    `config` its configuration, none where they lie at the same place.
    """

    storage: str
    run_dir: Path
    files: tuple[str, ...]
    config: Path | None

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says."""
        return cls(
            storage=params["storage"],
            run_dir=Path(params["run_dir"]),
            files=tuple(params["trace"]),
            config=path_of(params["config"]),
        )


def run_worker(options: WorkerOptions, source: EngineSource | None = None) -> int:
    """Work for the run until it is over. Raises: TunerError, KeyboardInterrupt.

    The engine is the installed vLLM's matter unless a source is given.
    """
    done = work(options.run_dir, options.storage, options.files, say, source, options.config)
    say(f"{done} rounds were replayed here")
    return 0
