"""What the steps of live replays have taught of an engine so far, as a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import ShadowError, TooFewSamplesError
from tuner.replay.loop import ReplayLog
from tuner.replay.process import EngineStart
from tuner.run.rounds import Steps
from tuner.shadow.calibration import Calibration
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.speed import MoodSpreads, Speed


@dataclass(slots=True)
class Calibrator:
    """What live replays have shown of an engine's steps so far.

    `is_own` says whether this run has calibrated, not an earlier one. `keep` receives the steps
    of each replay, to put them on disk. `mood` is how restless the machine was by what was
    learnt last, None before.
    """

    calibration: Calibration
    is_own: bool = False
    keep: Callable[[EngineLimits, StepColumns], None] = lambda *_: None
    mood: MoodSpreads | None = None

    @classmethod
    def of(
        cls,
        started: EngineStart,
        current: EngineLimits,
        serve_values: Mapping[str, object],
        stored: Profile | None = None,
    ) -> Self:
        """Return one for an engine that was started, with the starts that a profile knows.

        Raises: ShadowError if nothing can be predicted of such an engine.
        """
        if started.shape is None:
            raise ShadowError(started.no_shadow)
        ceiling, blocks = started.info.ceiling, started.info.num_blocks
        calibration = Calibration(
            shape=started.shape,
            starts=(KvStart(ceiling, blocks),),
            steps=(),
            current=current,
            serve_values=serve_values,
            has_own_graphs=started.info.has_own_graphs,
        )
        if stored is None:
            return cls(calibration)
        # Estimates keep what they say of limits, at the level that an engine has shown.
        level = blocks / stored.num_blocks_at(ceiling) if stored.origin else 1.0
        for start in stored.kv_starts:
            if start.limits != ceiling:
                shown = max(1, round(level * start.num_blocks))
                calibration = calibration.and_start(start.limits, shown)
        return cls(calibration)

    def observe(self, limits: EngineLimits, log: ReplayLog) -> None:
        """Take in the steps of a live replay, and how many drafts they accepted."""
        self.observe_drafts(log)
        if log.kept_steps is not None:
            self.observe_steps(limits, log.kept_steps)

    def observe_drafts(self, log: ReplayLog) -> None:
        """Take in how many drafts the steps of a live replay accepted."""
        self.calibration = self.calibration.and_brought(log.brought)

    def observe_steps(self, limits: EngineLimits, columns: StepColumns) -> None:
        """Take in the steps of a replay on the run's own engine."""
        self.keep(limits, columns)
        self.calibration = self.calibration.and_steps(limits, [columns])

    def observe_elsewhere(self, steps: Steps) -> None:
        """Take in the steps of a worker's round, as long as they would have taken here.

        The worker's machine is of the same kind, and its speed a factor of its own; without
        enough steps of the run's own engine to tell that factor, they are left out.
        """
        if not steps:
            return
        try:
            theirs = replace(self.calibration, steps=tuple(steps))
            times = theirs.times_of(self.calibration.profile())
        except TooFewSamplesError:
            return
        for limits, columns in steps:
            here = replace(columns, duration_s=columns.duration_s / times)
            self.calibration = self.calibration.and_steps(limits, [here])

    def learn(self) -> tuple[Profile, Speed]:
        """Return the profile that the steps so far make, and what they leave open.

        Raises: TooFewSamplesError with too few steps.
        """
        found, speed = self.calibration.learn()
        self.mood = speed.mood
        return self.calibration.profile_of(found, speed), speed

    def profile(self) -> Profile:
        """Return the profile that the steps so far make. Raises: TooFewSamplesError."""
        return self.learn()[0]
