"""The search with a shadow: learn a few settings live, foretell all, hand on the finalists.

Whatever makes the shadow unfit (an engine it cannot stand in for, too few steps, too large an
error) is told, and the live search takes over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tuner import search
from tuner.calibrate import (
    MOST_ROUNDS,
    Calibration,
    apart,
    beside,
    calibration_settings,
    check_rank_by,
    error_ratio,
    fit_error_ratio,
    is_steady,
    metric_error,
    replay_length_s,
)
from tuner.engine.protocol import EngineLimits
from tuner.errors import Caveat, ShadowError, TooFewSamplesError
from tuner.forecast import Forecast
from tuner.host import Started
from tuner.live_search import fitting, fly_pilot, plan_windows
from tuner.metrics import Measurement
from tuner.objective import Goal, Objective, Tier
from tuner.observation import Observation, Phase, leader
from tuner.plan import RACE_REPLAYS
from tuner.profiles import KvStart, Profile, read_profile, write_profile
from tuner.ranking import Ranking
from tuner.records import race_records
from tuner.replay import ReplayLog
from tuner.replay_plan import CutRule
from tuner.run_state import RunState
from tuner.rundir import PROFILE_FILE
from tuner.shadows import Shadows, Task
from tuner.windows import busiest

CALIBRATION = "calibration"
# The shares of the budget that calibrating and foretelling may take: ours. Calibrating mostly
# ends before.
CALIBRATION_SHARE, FORECAST_SHARE = 0.30, 0.20
# A calibration replay is cut at this many times the time it is planned to take, which the
# present configuration exceeds where it is overloaded: ours.
MOST_PRESENT, MOST_OTHERS = 4.0, 2.0
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
    serve_values: Mapping[str, object]
    forecast: Forecast | None = None
    _calibration: Calibration | None = None
    _live: dict[EngineLimits, list[Mapping[str, Any]]] = field(default_factory=dict)
    compared: dict[tuple[EngineLimits, str], tuple[float, float]] = field(default_factory=dict)
    """What was measured live and foretold of the same requests, by setting and metric."""
    _rate: float | None = None
    _shadows: Shadows | None = None

    def finalists(self, started: Started) -> list[EngineLimits] | None:
        """Return who races, or None where the shadow is unfit and the live search must do it.

        Raises: EngineError, UsageError.
        """
        run, kept = self.run, self.run.run_dir.path / PROFILE_FILE
        try:
            if kept.exists():
                # The run is resumed: its calibration is done.
                profile = read_profile(kept)
            else:
                self._calibrate(started)
                profile = self._checked_profile()
            check_rank_by(profile)
            field_ = self._foretell(profile, generation=0)
            plan_windows(run, self._rate, LIVE_REPLAYS)
        except (ShadowError, TooFewSamplesError) as unfit:
            run.caveats.add(Caveat.SHADOW_UNFIT)
            run.listener.note(f"no shadow: {unfit.message}; searching live")
            self.close()
            return None
        return fitting(run, field_)

    def _calibrate(self, started: Started) -> None:
        """Replay a few settings live, in rounds, and keep every step."""
        run, began_s = self.run, time.monotonic()
        self.begin_learning(started)
        pilot = fly_pilot(run)
        self._rate = pilot.wall_per_trace_s
        settings = [run.space.present, *calibration_settings(run.space)]
        share_s = CALIBRATION_SHARE * run.aim.budget.total_s
        each_s = share_s / len(settings)
        length_s = replay_length_s(run.trace, pilot, each_s)
        run.bench.use(CALIBRATION, busiest(run.trace, length_s).of(run.trace))
        run.listener.note(
            f"calibrating on {len(settings)} settings, {length_s:.3g} s of traffic, in turns"
        )
        planned_s = min(length_s * pilot.wall_per_trace_s, each_s)
        errors: list[float] = []
        for number in range(MOST_ROUNDS):
            turn = number % len(settings)
            for limits in (*settings[turn:], *settings[:turn]):
                # The low cap would take longest and teach no more than the others.
                is_present = limits == run.space.present
                self._teach(limits, (MOST_PRESENT if is_present else MOST_OTHERS) * planned_s)
            errors.extend(self._fit_error())
            took_s = time.monotonic() - began_s
            if is_steady(errors) or took_s * (number + 2) / (number + 1) > share_s:
                break
        run.walls_s["calibrate"] = time.monotonic() - began_s

    def _teach(self, limits: EngineLimits, most_s: float) -> None:
        """Replay the calibration's traffic at a setting, and learn from it."""
        record = self.run.trial(
            limits,
            Phase.CALIBRATE,
            CutRule(max_wall_s=most_s),
            on_log=partial(self.learn, limits),
            names=[CALIBRATION],
            goal=Goal(self.run.aim.objective, self.run.aim.slos, "p50"),
        )
        if record["measurement"] and not record["measurement"]["cut_reason"]:
            self._live.setdefault(limits, []).append(record["measurement"])

    def _fit_error(self) -> list[float]:
        """Return how wrong the steps so far leave the model, nothing while they are too few."""
        try:
            learnt = None if self._calibration is None else self._calibration.profile()
        except TooFewSamplesError:
            learnt = None
        return [] if learnt is None else [fit_error_ratio(learnt)]

    def begin_learning(self, started: Started) -> None:
        """Note what engine it is whose steps will be heard of. Raises: ShadowError."""
        if started.shape is None:
            raise ShadowError(started.no_shadow)
        self._calibration = Calibration(
            shape=started.shape,
            starts=(KvStart(started.info.ceiling, started.info.num_blocks),),
            steps=(),
            present=self.run.space.present,
            serve_values=self.serve_values,
        )

    def keep_profile(self) -> None:
        """Write what a live search has taught, unless one is there or it was too little."""
        path = self.run.run_dir.path / PROFILE_FILE
        if self._calibration is None or path.exists():
            return
        try:
            write_profile(path, self._calibration.profile())
        except TooFewSamplesError as reason:
            self.run.listener.note(f"no profile is kept: {reason.message}")

    def learn(self, limits: EngineLimits, log: ReplayLog) -> None:
        """Take in the steps of a live replay."""
        if self._calibration is not None and log.kept_steps is not None:
            self._calibration = self._calibration.and_steps(limits, [log.kept_steps])

    def learn_start(self, limits: EngineLimits, num_blocks: int) -> None:
        """Take in how many blocks a start at the limits had, and keep it in the profile."""
        if self._calibration is not None and self.forecast is not None:
            self._calibration = self._calibration.and_start(limits, num_blocks)
            known = self.forecast.shadows.profile
            self._write(replace(known, kv_starts=self._calibration.starts))

    def _checked_profile(self) -> Profile:
        """Fit a profile, compare its shadow with the calibration's replays, and keep it."""
        if self._calibration is None:
            raise ShadowError("nothing was calibrated")
        run, began_s = self.run, time.monotonic()
        profile = self._calibration.profile()
        shadows = self._speaking_for(profile)
        shadows.use(CALIBRATION, run.bench.trace(CALIBRATION))
        tasks = [Task((CALIBRATION,), limits, run.aim.plan) for limits in self._live]
        foretold = shadows.run(tasks)
        pairs = zip(self._live.values(), foretold, strict=True)
        differences = [apart(m, f.as_json()) for m, f in pairs if isinstance(f, Measurement)]
        profile = replace(profile, metric_error_ratio=metric_error(differences))
        self._write(profile)
        run.walls_s["fit"] = run.walls_s.get("fit", 0.0) + time.monotonic() - began_s
        run.listener.note(
            f"step model from {profile.fit.steps} steps, wrong by {error_ratio(profile):.1%}"
        )
        return profile

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

    def disagreement(self, field_: Sequence[EngineLimits]) -> str:
        """Say where live and shadow differ by more than the stated error; empty if nowhere.

        Compared on what raced: the same windows, live and foretold.
        """
        if self.forecast is None:
            return ""
        run, shadows = self.run, self.forecast.shadows
        for name, window in zip(run.names, run.windows, strict=True):
            shadows.use(name, window.of(run.trace))
        allowed = DISAGREEMENT * error_ratio(shadows.profile)
        foretold = self.forecast.predict(field_, run.names)
        said = []
        for limits, outcome in zip(field_, foretold, strict=True):
            live = race_records(run.journal.records(), limits)
            if not isinstance(outcome, Measurement) or not live:
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
        if self._calibration is None:
            run.listener.note("the steps went with the run that is resumed: no recalibration")
            return None
        if self.forecast is None or cost_s > run.left_s / 2:
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
