"""Runs for tests: a run in progress on a toy, and predictions that toys make in process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import text

from support.optional import not_none
from support.toy import ToyCosts, ToyEngine, ToySource
from support.traffic import replay_toy
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.replay.slo import Slo
from tuner.run.context import WINDOW, RunContext, Stopwatch, Workload
from tuner.run.directory import RunDir
from tuner.run.journal import Journal
from tuner.run.listener import Listener
from tuner.run.options import TuningOptions
from tuner.run.stored import RunRecord, StoredOptions
from tuner.run.time_plan import RacePlan
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.search.trials import Phase, Trial
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.step_model import FitError, StepModel
from tuner.traffic.traces import Trace
from tuner.traffic.windows import whole

CEILING = EngineLimits(128, 8192)


@dataclass(slots=True)
class Heard(Listener):
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


@dataclass(frozen=True, slots=True)
class ToyPredictor(Predictor):
    """Predictions by fresh toys; `asked` lists the settings that were predicted, in order."""

    toy: ToySource = field(default_factory=ToySource)
    asked: list[EngineLimits] = field(default_factory=list, compare=False)

    @property
    def doubt(self) -> str:
        """Say that nothing is simulated here, so that of draws only the error is drawn."""
        return "a toy is asked"

    def info(self, limits: EngineLimits) -> EngineInfo:
        """Return what is known of the toy."""
        return EngineInfo.of_shadow(self.profile.shape, limits, self.toy.num_blocks)

    def replay(self, trace: Trace, limits: EngineLimits, plan: ReplayPlan) -> ReplayLog:
        """Replay on a fresh toy. Raises: EngineError if it fails."""
        self.asked.append(limits)
        return replay_toy(trace, limits, self.toy, plan)


@dataclass(slots=True)
class ToyRun:
    """A run in progress on a toy, and what it replays."""

    runner: TrialRunner
    workload: Workload

    @property
    def context(self) -> RunContext:
        """What the run's stages are given."""
        return self.runner.context

    @property
    def engine(self) -> EngineRunner:
        """The toy's process."""
        return self.runner.engine

    def plan(
        self,
        *settings: EngineLimits,
        predicted: Mapping[EngineLimits, Measurement] | None = None,
    ) -> RacePlan:
        """Return a race of the settings."""
        return RacePlan(self.context, settings, self.workload, predicted or {})

    def trial(self, limits: EngineLimits, phase: Phase, race_round: int = 0) -> Trial:
        """Replay the workload whole."""
        return self.runner.measure(limits, phase, self.workload, CutRule(), race_round)[1]


def a_space(
    current: EngineLimits, ladder: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
) -> SearchSpace:
    """Return a space with three token budgets below the ceiling."""
    return SearchSpace(current, ladder, (512, 1024, 2048), CEILING)


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
        "current_limits": EngineLimits(16, 2048),
        "serve_values": {"model": "toy"},
    }
    return Profile(**values | changed)


def a_record(trace_sha256: str, trace: Trace | str = "t.jsonl", **changed: Any) -> RunRecord:
    """Return what a run of the toy is begun with; `changed` are options of it."""
    return RunRecord(
        study="study",
        options=StoredOptions.of(TuningOptions(trace, **changed)),
        trace_sha256=trace_sha256,
        config_sha256="",
        ceiling=CEILING,
        vllm_version="0.0",
        device="toy",
    )


@contextmanager
def a_run(
    folder: Path,
    trace: Trace,
    space: SearchSpace,
    source: ToySource | None = None,
    slos: tuple[Slo, ...] = (),
    budget_s: float = 300.0,
    objective: Objective = Objective.BALANCED,
    *,
    is_shared: bool = False,
) -> Iterator[ToyRun]:
    """Yield a run in progress on a toy that replays the whole trace; nothing is measured."""
    run_dir = RunDir(folder / "run", resume=False)
    journal = Journal(run_dir.storage_url, "study")
    aim = Aim(objective, slos, ReplayPlan(), None)
    try:
        with EngineProcess(source or ToySource(), folder / "engine.log") as host:
            engine = EngineRunner(host, {}, space.ceiling, seed=0)
            context = RunContext(
                trace,
                space,
                aim,
                Budget(budget_s),
                Stopwatch(budget_s),
                journal,
                run_dir,
                Heard(),
                a_record(trace.sha256),
                is_shared,
            )
            workload = Workload.of(WINDOW, trace, (whole(trace),), aim)
            yield ToyRun(TrialRunner(context, engine), workload)
    finally:
        journal.close()
        run_dir.close()


def go_silent(journal: Journal, number: int) -> None:
    """Make a claim look as after a long hang: its heart stands still and beat long ago."""
    not_none(journal._held[number][1]).stop()
    with journal._storage.engine.begin() as connection:
        beat = connection.execute(
            text(
                "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00' WHERE trial_id ="
                " (SELECT trial_id FROM trials WHERE number = :number AND study_id = :study)"
            ),
            {"number": number, "study": journal._study_id},
        )
    assert beat.rowcount == 1
