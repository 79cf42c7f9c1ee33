"""The search with a shadow: learn a few settings live, foretell all, hand on the finalists.

Whatever makes the shadow unfit (an engine it cannot stand in for, too few steps, too large an
error) is told, and the live search takes over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tuner import search
from tuner.arrivals import ClockKind
from tuner.calibrate import (
    apart,
    beside,
    check_rank_by,
    error_ratio,
    metric_error,
)
from tuner.child import Started
from tuner.engine.protocol import EngineLimits
from tuner.errors import Caveat, ShadowError, TooFewSamplesError
from tuner.forecast import Forecast
from tuner.lessons import CALIBRATION, Lessons
from tuner.live_search import plan_windows
from tuner.metrics import Measurement
from tuner.objective import Objective, Tier
from tuner.observation import Observation, leader
from tuner.plan import RACE_REPLAYS
from tuner.profiles import Profile, read_profile, write_profile
from tuner.race_time import fitting
from tuner.ranking import Ranking
from tuner.records import race_records
from tuner.run_state import RunState
from tuner.rundir import PROFILE_FILE
from tuner.shadows import Shadows, Task
from tuner.spares import Spares

# The share of the budget that foretelling may take: ours.
FORECAST_SHARE = 0.20
# Live replays after the search: the race, and two on cold engines.
LIVE_REPLAYS = RACE_REPLAYS + 2
# Shadow and live disagree if they differ by more than this many times the stated error, which
# is a median: ours.
DISAGREEMENT = 3.0

MakeShadows = Callable[[Profile], Shadows]


@dataclass(slots=True)
class ShadowSearch:
    """Calibration and forecast of one run."""

    run: RunState
    make_shadows: MakeShadows
    lessons: Lessons
    spares: Spares
    forecast: Forecast | None = None
    compared: dict[tuple[EngineLimits, str], tuple[float, float]] = field(default_factory=dict)
    """What was measured live and foretold of the same requests, by setting and metric."""
    _rate: float | None = None
    _is_unfit: bool = False
    _kept: Profile | None = None
    _shadows: Shadows | None = None

    def finalists(self, started: Started) -> list[EngineLimits] | None:
        """Return who races, or None where the shadow is unfit and the live search must do it.

        Raises: EngineError, UsageError.
        """
        run, kept = self.run, self.run.run_dir.path / PROFILE_FILE
        self.spares.settle()
        try:
            if kept.exists():
                # The run is resumed, or was given a profile: the calibration is done.
                profile = self._taken_over(read_profile(kept), started)
            else:
                self._rate = self.lessons.take(started).wall_per_trace_s
                profile = self._checked_profile()
            check_rank_by(profile)
            field_ = self._foretell(profile, generation=0)
            plan_windows(run, self._rate, LIVE_REPLAYS)
            self._foresee(field_)
        except (ShadowError, TooFewSamplesError) as unfit:
            run.caveats.add(Caveat.SHADOW_UNFIT)
            self._is_unfit = True
            run.listener.note(f"no shadow: {unfit.message}; searching live")
            self.close()
            return None
        return fitting(run, field_)

    def _taken_over(self, kept: Profile, started: Started) -> Profile:
        """Return a profile of before for the engine at hand, whose steps may yet correct it."""
        begun = self.lessons.begin(started, kept)
        profile = replace(
            kept,
            shape=begun.shape,
            kv_starts=begun.starts,
            present_limits=begun.present,
            serve_values=begun.serve_values,
        )
        # Workers elsewhere read it there.
        self._write(profile)
        self._kept = profile
        return profile

    def keep_profile(self) -> None:
        """Write what a live search has taught, if it was enough and no fit profile is there."""
        path = self.run.run_dir.path / PROFILE_FILE
        if self.lessons.calibration is None or (path.exists() and not self._is_unfit):
            return
        try:
            write_profile(path, self.lessons.calibration.profile())
        except TooFewSamplesError as reason:
            self.run.listener.note(f"no profile is kept: {reason.message}")

    def learn_start(self, limits: EngineLimits, num_blocks: int) -> None:
        """Take in how many blocks a start at the limits had, and keep it in the profile."""
        if self.lessons.calibration is not None and self.forecast is not None:
            self.lessons.calibration = self.lessons.calibration.and_start(limits, num_blocks)
            known = self.forecast.shadows.profile
            self._write(replace(known, kv_starts=self.lessons.calibration.starts))

    def _checked_profile(self) -> Profile:
        """Fit a profile, compare its shadow with the calibration's replays, and keep it.

        Where an earlier run has calibrated, its profile is corrected instead.
        """
        if self.lessons.calibration is None:
            raise ShadowError("nothing was calibrated")
        run, began_s = self.run, time.monotonic()
        if self._kept is not None:
            profile = self.lessons.calibration.corrected(self._kept)
        else:
            profile = self.lessons.calibration.profile()
            profile = replace(profile, metric_error_ratio=self._metric_error(profile))
        self._write(profile)
        run.walls_s["fit"] = run.walls_s.get("fit", 0.0) + time.monotonic() - began_s
        run.listener.note(
            f"step model from {profile.fit.steps} steps, wrong by {error_ratio(profile):.1%}"
        )
        return profile

    def _metric_error(self, profile: Profile) -> float | None:
        """Return how far the profile's shadow is off the calibration's whole replays."""
        shadows = self._speaking_for(profile)
        shadows.use(CALIBRATION, self.run.bench.trace(CALIBRATION))
        tasks = [
            Task((CALIBRATION,), limits, self.run.aim.plan) for limits in self.lessons.live
        ]
        pairs = zip(self.lessons.live.values(), shadows.run(tasks), strict=True)
        return metric_error(
            [apart(m, f.as_json()) for m, f in pairs if isinstance(f, Measurement)]
        )

    def _speaking_for(self, profile: Profile) -> Shadows:
        """Return the run's shadows with this profile; starting them takes an import of vLLM."""
        if self._shadows is None:
            self._shadows = self.make_shadows(profile)
        self._shadows.speak_for(profile)
        return self._shadows

    def _write(self, profile: Profile) -> None:
        write_profile(self.run.run_dir.path / PROFILE_FILE, profile)

    def _foretell(self, profile: Profile, generation: int) -> list[EngineLimits]:
        """Let the shadow rank the whole space and return who lies within its error."""
        run, began_s = self.run, time.monotonic()
        parts = () if self.forecast is None else self.forecast.parts
        shadows = self._speaking_for(profile)
        self.forecast = Forecast(run.trace, run.aim, shadows, generation, parts)
        self.forecast.choose_parts(run.space, FORECAST_SHARE * run.aim.budget.total_s)
        run.on_parts(self.forecast.parts, generation)
        seen = Ranking(run, self.forecast).rank()
        shadows.settle()
        run.walls_s["shadow"] = run.walls_s.get("shadow", 0.0) + time.monotonic() - began_s
        self._race_at_capacity(seen)
        near = max(error_ratio(profile), search.FINALIST_RATIO / 2)
        field_ = search.finalists(seen, run.space, near)
        run.listener.note(
            f"the shadow ranked {len(run.space.grid())} settings with {len(seen)} replays; "
            f"within {near:.0%} of its best: "
            f"{', '.join(map(str, field_[:-1])) or 'only the present one'}"
        )
        return field_

    def _race_at_capacity(self, seen: Sequence[Observation]) -> None:
        """Where capacity is the objective, let the race offer what the best can bear."""
        run, best = self.run, leader(seen)
        if run.aim.objective is Objective.CAPACITY and best is not None:
            load = 1 / best.score.value if best.score.tier is Tier.GOOD else 1.0
            run.aim = replace(run.aim, plan=replace(run.aim.plan, load=load))
            run.listener.note(f"racing at {load:.3g} x the recorded load")

    def _foresee(self, field_: Sequence[EngineLimits]) -> dict[EngineLimits, Measurement]:
        """Foretell the race's own replays: what they will measure and how long they will take.

        Who fails in the shadow is left out.
        """
        if self.forecast is None:
            return {}
        run, shadows = self.run, self.forecast.shadows
        for name, window in zip(run.names, run.windows, strict=True):
            shadows.use(name, window.of(run.trace))
        outcomes = self.forecast.predict(field_, run.names, run.aim.plan)
        shadows.settle()
        foretold = {
            limits: outcome
            for limits, outcome in zip(field_, outcomes, strict=True)
            if isinstance(outcome, Measurement)
        }
        jumps = run.aim.plan.clock is ClockKind.VIRTUAL
        for limits, outcome in foretold.items():
            run.foreseen_s[limits] = outcome.busy_s if jumps else outcome.clock_s
        return foretold

    def disagreement(self, field_: Sequence[EngineLimits]) -> str:
        """Say where live and shadow differ by more than the stated error; empty if nowhere.

        Compared on what raced: the same windows, live and foretold.
        """
        if self.forecast is None:
            return ""
        run = self.run
        allowed = DISAGREEMENT * error_ratio(self.forecast.shadows.profile)
        said = []
        for limits, outcome in self._foresee(field_).items():
            live = race_records(run.journal.records(), limits)
            if not live:
                continue
            pairs = beside(list(live.values()), outcome.as_json())
            for metric, (measured, predicted) in pairs.items():
                self.compared[limits, metric] = measured, predicted
                if abs(predicted / measured - 1) > allowed:
                    said.append(f"{metric} at {limits} by {predicted / measured - 1:+.0%}")
        return ", ".join(said)

    def recalibrate(self) -> list[EngineLimits] | None:
        """Fit anew with the race's steps, foretell anew, and return who should race as well."""
        run = self.run
        cost_s = run.walls_s.get("fit", 0.0) + run.walls_s.get("shadow", 0.0)
        if self.lessons.calibration is None or self.forecast is None or cost_s > run.left_s / 2:
            run.listener.note("there is no time to recalibrate")
            return None
        generation = self.forecast.generation + 1
        try:
            profile = self._checked_profile()
            check_rank_by(profile)
            return self._foretell(profile, generation)
        except (ShadowError, TooFewSamplesError) as unfit:
            self.run.listener.note(f"recalibrated, and unfit now: {unfit.message}")
            return None

    def close(self) -> None:
        """End the shadows' processes."""
        if self._shadows is not None:
            self._shadows.close()
            self._shadows = None
        self.spares.close()
