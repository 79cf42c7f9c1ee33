"""Runs for tests: a RunState over the toy, and shadows that answer from the toy in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.toy import ToyCosts, ToyEngine, ToySource
from support.traffic import replay_toy
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError
from tuner.replay.loop import Progress
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, Failure
from tuner.replay.slo import Slo
from tuner.run.directory import RunDir
from tuner.run.journal import Journal
from tuner.run.listener import NullListener
from tuner.run.state import RunState
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.search.trials import Phase, Trial
from tuner.shadow.pool import Done, ReplayTask, ShadowPool
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.step_model import FitError, StepModel
from tuner.traffic.traces import Trace
from tuner.traffic.windows import whole

CEILING = EngineLimits(128, 8192)


@dataclass(slots=True)
class Heard(NullListener):
    """A listener that remembers what was noted and which trials began."""

    notes: list[str] = field(default_factory=list)
    begun: list[EngineLimits] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Hear a sentence."""
        self.notes.append(text)

    def trial_started(self, number: int, limits: EngineLimits, phase: Phase) -> None:  # noqa: ARG002
        """Hear that a replay begins."""
        self.begun.append(limits)

    def progress(self, progress: Progress) -> None:
        """Ignore how far a replay is."""

    def trial_ended(self, trial: Trial, left_s: float) -> None:
        """Ignore that a replay ended."""


class ToyShadows(ShadowPool):
    """Shadows without processes: every task is replayed on a fresh toy, here and at once."""

    def __init__(self, source: ToySource, profile: Profile, log_path: Path) -> None:
        super().__init__(profile, CEILING, 1, log_path, seed=0)
        self._toy = source
        self.asked: list[EngineLimits] = []

    def start_all(self) -> None:
        """Start nothing: there are no processes."""

    def drain(
        self, next_task: Callable[[], ReplayTask | None], is_over: Callable[[], bool]
    ) -> Iterator[Done]:
        """Replay what there is to do, and see that nothing is left."""
        while (task := next_task()) is not None:
            self.asked.append(task.limits)
            yield task, self._replayed(task)
        assert is_over()

    def _replayed(self, task: ReplayTask) -> Measurement | Failure:
        try:
            logs = [
                replay_toy(self._traces[name], task.limits, self._toy, task.plan)
                for name in task.names
            ]
        except EngineError as error:
            return Failure(error.message)
        for log in logs:
            if task.on_log is not None:
                task.on_log(log)
        return measure(logs, task.slos)


def a_space(
    present: EngineLimits, ladder: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
) -> SearchSpace:
    """Return a space with three token budgets below the ceiling."""
    return SearchSpace(present, ladder, (512, 1024, 2048), CEILING)


def a_profile(
    wrong_ratio: float = 0.05, costs: ToyCosts | None = None, **changed: object
) -> Profile:
    """Return the profile of a toy; `changed` are fields of the profile."""
    used = costs or ToyCosts()
    values: dict[str, Any] = {
        "shape": ToyEngine(ToySource(), CEILING).shape(),
        "kv_starts": (KvStart(CEILING, 1_000_000),),
        "step_model": StepModel.linear(used.base_s, used.per_seq_s, used.per_prefill_token_s),
        "fit": FitError(1000, 0.01, 0.01, 0.02, 0.0),
        "metric_error_ratio": wrong_ratio,
        "made_at": "2026-01-31T12:00:00Z",
        "calibrated_on": ("16/2048",),
        "present_limits": EngineLimits(16, 2048),
        "serve_values": {"model": "toy"},
    }
    return Profile(**values | changed)


@contextmanager
def a_run(
    folder: Path,
    trace: Trace,
    space: SearchSpace,
    source: ToySource | None = None,
    slos: tuple[Slo, ...] = (),
    budget_s: float = 300.0,
) -> Iterator[RunState]:
    """Yield a run in progress on a toy: the whole trace is its window, nothing is measured."""
    run_dir = RunDir(folder / "run", resume=False)
    journal = Journal(run_dir.storage_url, "study")
    aim = Aim(Objective.BALANCED, slos, ReplayPlan(), Budget(budget_s), None)
    try:
        with EngineProcess(source or ToySource(), folder / "engine.log") as host:
            bench = EngineRunner(host, {}, space.ceiling, seed=0)
            run = RunState(trace, space, aim, bench, journal, run_dir, Heard())
            run.begin()
            run.windows = (whole(trace),)
            run.use_windows()
            yield run
    finally:
        journal.close()
        run_dir.close()
