"""Options of the main job, read and found good before any engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.cli.inputs import (
    EngineChoice,
    Traffic,
    choose_engine,
    read_traffic,
)
from tuner.cli.inputs import replay_plan as plan_of
from tuner.errors import UsageError
from tuner.objective import Goal, Objective
from tuner.plan import DEFAULT_LADDER, PAST_LADDER, Budget
from tuner.rundir import new_run_path

DEFAULT_BUDGET_S = 1800.0


@dataclass(frozen=True, slots=True)
class Job:
    """Options that were read and found good, before any engine starts."""

    options: Mapping[str, Any]
    arguments: tuple[str, ...]
    engine: EngineChoice
    traffic: Traffic
    budget: Budget
    ladder: tuple[int, ...]
    run_path: Path

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier run goes on."""
        return bool(self.options["resume"])


def read_job(options: Mapping[str, Any], arguments: Sequence[str]) -> Job:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    budget = Budget(options["budget"] or DEFAULT_BUDGET_S)
    ladder = options["max_num_seqs"] or DEFAULT_LADDER
    slos = tuple(options["slo"])
    Goal(Objective(options["objective"]), slos, "p99")
    engine = choose_engine(options)
    traffic = read_traffic(options, largest_cap=max(ladder) * PAST_LADDER)
    plan_of(options, traffic.trace)
    if options["output"] and not Path(options["output"]).resolve().parent.is_dir():
        raise UsageError(
            f"-o {options['output']}: its folder does not exist", "make it, or name another"
        )
    run_path = Path(options["resume"] or options["run_dir"] or new_run_path(Path("runs")))
    return Job(options, tuple(arguments), engine, traffic, budget, ladder, run_path)
