"""Predictions for new traffic from a profile's shadows: a re-tune without an engine.

One set of shadow processes serves many pieces of traffic; each ranking has a study of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tuner.engine.limits import EngineLimits
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, Failure
from tuner.run.directory import RunDir
from tuner.run.forecast import Forecast
from tuner.run.journal import Journal
from tuner.run.listener import NullListener
from tuner.run.shadow_search import Ranking
from tuner.run.state import RunState
from tuner.search.budget import Aim
from tuner.search.objective import Scoring
from tuner.search.space import SearchSpace
from tuner.search.trials import Observation
from tuner.shadow.calibration import error_ratio
from tuner.shadow.pool import ReplayTask, ShadowPool
from tuner.shadow.profiles import Profile
from tuner.shadow.source import ShadowSource
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window

ReplayOutcome = Measurement | Failure


@dataclass(frozen=True, slots=True)
class Ranked:
    """What the shadows predicted for a piece of traffic, the parts replayed, the scoring."""

    observations: tuple[Observation, ...]
    scoring: Scoring
    parts: tuple[Window, ...]


@dataclass(slots=True)
class Retune:
    """One profile's shadows and the settings that they may try."""

    space: SearchSpace
    runner: EngineRunner
    shadows: ShadowPool
    run_dir: RunDir
    _rankings: int = 0

    @property
    def wrong_ratio(self) -> float:
        """The profile's error: how wrong the shadows typically are."""
        return error_ratio(self.shadows.profile)

    def rank(self, trace: Trace, aim: Aim, parts: tuple[Window, ...] = ()) -> Ranked:
        """Predict the whole space on the traffic, or on the given parts of it.

        Raises: ShadowError, TooFewSamplesError, UsageError.
        """
        self._rankings += 1
        journal = Journal(self.run_dir.storage_url, f"traffic {self._rankings}")
        try:
            run = RunState(
                trace, self.space, aim, self.runner, journal, self.run_dir, NullListener()
            )
            run.begin()
            forecast = Forecast(trace, aim, self.shadows, 0, parts)
            forecast.choose_parts(self.space, aim.budget.total_s)
            observations = Ranking(run, forecast).rank()
            return Ranked(tuple(observations), forecast.goal, forecast.parts)
        finally:
            journal.close()

    def replay(
        self, pieces: Sequence[Trace], settings: Sequence[EngineLimits], aim: Aim
    ) -> dict[EngineLimits, list[ReplayOutcome]]:
        """Predict each setting on each piece by itself.

        Raises: ShadowError, UsageError.
        """
        names = [f"piece {i}" for i in range(len(pieces))]
        for name, piece in zip(names, pieces, strict=True):
            self.shadows.use(name, piece)
        tasks = [
            ReplayTask((n,), limits, aim.plan, aim.slos) for limits in settings for n in names
        ]
        outcomes = iter(self.shadows.run(tasks))
        return {limits: [next(outcomes) for _ in names] for limits in settings}

    def logs(
        self, pieces: Sequence[Trace], limits: EngineLimits, aim: Aim
    ) -> list[ReplayLog] | None:
        """Return the log of the setting's replay of each piece, None if one failed.

        Raises: EngineError if the shadow cannot be started.
        """
        names = [f"whole {i}" for i in range(len(pieces))]
        for name, piece in zip(names, pieces, strict=True):
            self.runner.use(name, piece)
        logs: list[ReplayLog] = []
        outcome = self.runner.measure(names, limits, aim.plan, aim.slos, on_log=logs.append)
        return None if isinstance(outcome, Failure) else logs


@contextmanager
def shadow_process(
    profile: Profile, *, is_forced: bool
) -> Iterator[tuple[EngineProcess, RunDir]]:
    """Yield a process for a shadow of the profile, and a temporary run directory."""
    with tempfile.TemporaryDirectory(prefix="tune-") as folder:
        run_dir = RunDir(Path(folder), resume=False)
        try:
            source = ShadowSource(profile, is_forced=is_forced)
            with EngineProcess(source, run_dir.engine_log) as process:
                yield process, run_dir
        finally:
            run_dir.close()


@contextmanager
def retuning(
    process: EngineProcess,
    run_dir: RunDir,
    profile: Profile,
    space: SearchSpace,
    *,
    jobs: int,
    seed: int,
    is_forced: bool,
) -> Iterator[Retune]:
    """Yield shadows of the profile, the process's own among them; they end with it."""
    runner = EngineRunner(process, {}, space.ceiling, seed)
    log = run_dir.shadow_log
    with ShadowPool(profile, space.ceiling, jobs, log, seed, is_forced=is_forced) as shadows:
        shadows.adopt(runner)
        shadows.start_all()
        yield Retune(space, runner, shadows, run_dir)
