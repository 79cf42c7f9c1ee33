"""A re-tune on toys: what `check` and `calendar` ask, answered in process and at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.run_parts import ToyShadows, a_profile
from support.toy import ToyCosts, ToySource
from tuner.drift.retune import Retune
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.replay.slo import Slo
from tuner.run.directory import RunDir
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace

CEILING = EngineLimits(64, 8192)
AIM = Aim(Objective.BALANCED, (), ReplayPlan(), Budget(300.0), None)


def an_aim(objective: Objective = Objective.BALANCED, slos: tuple[Slo, ...] = ()) -> Aim:
    """Return an aim on the whole trace, with time enough."""
    return Aim(objective, slos, ReplayPlan(), Budget(300.0), None)


@contextmanager
def a_retune(
    folder: Path,
    present: EngineLimits,
    costs: ToyCosts | None = None,
    wrong_ratio: float = 0.03,
    ladder: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
) -> Iterator[tuple[Retune, ToyShadows]]:
    """Yield a re-tune whose shadows are toys of these costs, and the toys."""
    source = ToySource(costs=costs or ToyCosts())
    space = SearchSpace(present, ladder, (2048,), CEILING)
    run_dir = RunDir(folder / "retune", resume=False)
    profile = a_profile(wrong_ratio, costs)
    try:
        with EngineProcess(source, folder / "engine.log") as host:
            shadows = ToyShadows(source, profile, folder / "shadow.log")
            runner = EngineRunner(host, {}, CEILING, seed=0)
            yield Retune(space, runner, shadows, run_dir), shadows
    finally:
        run_dir.close()
