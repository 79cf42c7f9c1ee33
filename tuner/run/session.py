"""One run from facts to recommendation: calibrate, foretell, race, confirm, decide.

Ties the stages together. Reading options and printing are left to `cli` and `console`, which
hear of everything through a Listener.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, ShadowError
from tuner.replay.loop import ReplayLog
from tuner.replay.process import EngineStart
from tuner.replay.series import TimelineRecord, timeline_record
from tuner.run.capacity import CapacityResult, confirm_capacity, predict_capacity
from tuner.run.forecast import Forecast
from tuner.run.live_search import search_live, searched
from tuner.run.race import Cold, confirm_cold, race
from tuner.run.shadow_search import Ranking, ShadowSearch
from tuner.run.state import RunState
from tuner.run.time_plan import fitting, reserve_s
from tuner.search.ladder import at_edge, disturbed
from tuner.search.race import (
    MIN_AGREED,
    RaceDecision,
    RaceRun,
    RaceVerdict,
    decide_predicted,
    paired,
    whole_rounds,
)
from tuner.search.trials import Observation, Trial
from tuner.shadow.calibration import error_ratio
from tuner.shadow.pool import ReplayTask, ShadowPool
from tuner.traffic.windows import whole

# The share of the budget that the forecast may take: ours, the rest is for capacities.
FORECAST_SHARE = 0.8


@dataclass(slots=True)
class ShadowSession:
    """A run on shadows alone."""

    run_state: RunState
    shadows: ShadowPool
    is_forced: bool = False
    capacity: CapacityResult | None = None
    _ranking: Ranking | None = None

    def run(self) -> RaceDecision:
        """Foretell the whole space and decide by it.

        Raises: ShadowError, UsageError, TooFewSamplesError.
        """
        run = self.run_state
        run.begin()
        began_s = time.monotonic()
        self.shadows.start_all()
        run.bench.ensure_started()
        forecast = Forecast(run.trace, run.aim, self.shadows, 0)
        forecast.choose_parts(run.space, FORECAST_SHARE * run.aim.budget.total_s)
        run.windows = forecast.parts
        run.use_windows()
        run.on_parts(forecast.parts, 0)
        self._ranking = Ranking(run, forecast)
        seen = self._ranking.rank()
        run.walls_s["shadow"] = time.monotonic() - began_s
        run.listener.note(
            f"the shadow ranked {len(run.space.grid())} settings with {len(seen)} replays"
        )
        wrong_ratio = error_ratio(self.shadows.profile)
        decision = decide_predicted(seen, run.space.present, wrong_ratio)
        if run.aim.slos:
            self.capacity = predict_capacity(run, forecast, decision)
        self._keep_timelines(forecast, dict.fromkeys([decision.shown, run.space.present]))
        run.journal.set_state("done")
        return decision

    def _keep_timelines(self, forecast: Forecast, settings: Iterable[EngineLimits]) -> None:
        """Replay settings once more for what they look like over time."""
        run, plan = self.run_state, replace(self.run_state.aim.plan, keep_steps=True)
        found: dict[EngineLimits, list[TimelineRecord]] = {limits: [] for limits in settings}

        def keep(limits: EngineLimits, log: ReplayLog) -> None:
            found[limits].append(timeline_record(log))

        self.shadows.run(
            [
                ReplayTask(
                    forecast.names, limits, plan, run.aim.slos, on_log=partial(keep, limits)
                )
                for limits in found
            ]
        )
        for limits, windows in found.items():
            if windows:
                run.keep_timelines(limits, "shadow", windows)

    def close(self) -> None:
        """End the shadows' processes."""
        self.shadows.close()

    def doubts(self, decision: RaceDecision) -> list[Caveat]:
        """Return the caveats of the run, in a fixed order."""
        run = self.run_state
        found = {*run.caveats, Caveat.SHADOW_ONLY}
        history = self._ranking.seen() if self._ranking is not None else []
        if at_edge(decision.winner, history):
            found.add(Caveat.AT_SPACE_EDGE)
        if run.windows != (whole(run.trace),):
            found.add(Caveat.WINDOWED)
        if self.is_forced:
            found.add(Caveat.PROFILE_FORCED)
        if decision.verdict is RaceVerdict.KEEP and decision.best != run.space.present:
            found.add(Caveat.WITHIN_NOISE)
        return [caveat for caveat in Caveat if caveat in found]

    def findings(self) -> dict[str, Any]:
        """Return what stands in the result beside the decision."""
        return {
            "profile": profile_facts(self.shadows),
            "cold": None,
            "capacity": None if self.capacity is None else self.capacity.as_json(),
        }


def profile_facts(shadows: ShadowPool) -> dict[str, Any]:
    """Return where a prediction comes from, for the result."""
    profile = shadows.profile
    return {
        "made_at": profile.made_at,
        "device": profile.shape.device,
        "vllm_version": profile.shape.vllm_version,
        "calibrated_on": list(profile.calibrated_on),
        "error_ratio": error_ratio(profile),
    }


class Method(StrEnum):
    """How a run searches."""

    AUTO = "auto"
    LIVE = "live"
    SHADOW = "shadow"


class AnySession(Protocol):
    """A run as the command sees it, with or without an engine."""

    @property
    def run_state(self) -> RunState:
        """What the stages share."""

    def run(self) -> RaceDecision:
        """Run to the decision. Raises: TunerError."""

    def doubts(self, decision: RaceDecision) -> list[Caveat]:
        """Return the caveats of the whole run."""

    def findings(self) -> dict[str, Any]:
        """Return what stands in the result beside the decision: cold, capacity, profile."""

    def close(self) -> None:
        """End whatever runs beside the engine."""


@dataclass(slots=True)
class Session:
    """A run with a live engine; with `is_live` the shadow ranks nothing and only learns."""

    run_state: RunState
    shadow: ShadowSearch | None = None
    is_live: bool = False
    cold: Cold | None = None
    capacity: CapacityResult | None = None

    def run(self) -> RaceDecision:
        """Search, race and confirm; every trial is on disk before the next begins.

        Raises: EngineError when the engine cannot be kept alive; TooFewSamplesError when the
            window cannot carry what was asked.
        """
        run = self.run_state
        run.begin()
        started = run.bench.ensure_started()
        run.listener.note(
            f"engine started in {started.start_s:.1f} s, warmed up in {started.warm_up_s:.1f} s"
        )
        run.walls_s["start"] = started.start_s + started.warm_up_s
        ranks = self.shadow is not None and not self.is_live
        field = self.shadow.finalists(started) if self.shadow is not None and ranks else None
        if field is None:
            field = search_live(run, self._learner(started))
            decision = race(run, field, reserve_s(run, field))
            if self.shadow is not None:
                self.shadow.keep_profile()
        else:
            decision = self._race_with_shadow(field)
        decision, self.cold = confirm_cold(run, decision)
        if self.shadow is not None:
            for limits, blocks in run.bench.cold_blocks.items():
                self.shadow.learn_start(limits, blocks)
        forecast = None if self.shadow is None else self.shadow.forecast
        if run.aim.slos and forecast is not None and run.left_s > 0:
            self.capacity = predict_capacity(run, forecast, decision)
            self.capacity = confirm_capacity(run, forecast, decision.winner, self.capacity)
        run.journal.set_state("done")
        return decision

    def _learner(
        self, started: EngineStart
    ) -> Callable[[EngineLimits, ReplayLog], None] | None:
        """Return who hears of the live search's steps, None where there can be no shadow."""
        if self.shadow is None:
            return None
        try:
            self.shadow.lessons.begin(started)
        except ShadowError as reason:
            self.run_state.listener.note(f"no profile is kept: {reason.message}")
            return None
        return self.shadow.lessons.learn

    def _race_with_shadow(self, field: list[EngineLimits]) -> RaceDecision:
        """Race; where live and shadow disagree, recalibrate once and let more of them race."""
        run, shadow = self.run_state, self.shadow
        if shadow is None:
            return race(run, field, reserve_s(run, field))
        if not shadow.can_race:
            run.caveats.add(Caveat.BUDGET_SPENT)
        if len(field) < 2 or not shadow.can_race:
            return shadow.decision()
        reserved_s = reserve_s(run, field)
        race(run, field, reserved_s, shadow.lessons.learn, until_round=1)
        differ = shadow.disagreement(field)
        if differ:
            run.listener.note(f"live and shadow disagree: {differ}; recalibrating once")
            more = shadow.recalibrate()
            if more is not None:
                field = fitting(run, list(dict.fromkeys([*field[:-1], *more])))
                reserved_s = reserve_s(run, field)
            if shadow.disagreement(field):
                run.caveats.add(Caveat.SHADOW_DISAGREES)
        decision = race(run, field, reserved_s)
        runs = run.journal.race_runs()
        if decision.is_thin and whole_rounds(runs, field) < MIN_AGREED:
            return self._without_a_race(shadow.decision(), runs)
        return decision

    def _without_a_race(self, predicted: RaceDecision, runs: Sequence[RaceRun]) -> RaceDecision:
        """Return what was predicted, unless the little that was raced speaks against it."""
        present = self.run_state.space.present
        ours, theirs = paired(runs, predicted.winner, present)
        if any(a.clearly_worse_than(b, 0.0) for a, b in zip(ours, theirs, strict=True)):
            why = "the only round that there was time for speaks against what was predicted"
            return replace(predicted, verdict=RaceVerdict.KEEP, winner=present, why=why)
        return predicted

    def close(self) -> None:
        """End whatever runs beside the engine."""
        if self.shadow is not None:
            self.shadow.close()

    def findings(self) -> dict[str, Any]:
        """Return what stands in the result beside the decision."""
        shadow, cold = self.shadow, self.cold
        forecast = None if shadow is None else shadow.forecast
        return {
            "cold": None if cold is None else cold.as_json(),
            "capacity": None if self.capacity is None else self.capacity.as_json(),
            "profile": None if forecast is None else profile_facts(forecast.shadows),
            "compared": {} if shadow is None else shadow.compared,
            "predicted": {}
            if shadow is None
            else {limits: m.as_json() for limits, m in shadow.predicted.items()},
        }

    def doubts(self, decision: RaceDecision) -> list[Caveat]:
        """Return the caveats of the whole run, in a fixed order."""
        run = self.run_state
        found = set(run.caveats)
        mine = self._trials_of(decision.winner)
        said = [Caveat(c) for t in mine for c in (t.measurement or {})["caveats"]]
        # One disturbed replay of many does not speak for all of them.
        found.update(caveat for caveat in said if 2 * said.count(caveat) >= len(mine))
        is_kept = decision.verdict is RaceVerdict.KEEP
        if is_kept and decision.best != run.space.present and not decision.is_thin:
            found.add(Caveat.WITHIN_NOISE)
        if decision.is_predicted:
            found.add(Caveat.NOT_RACED)
        history = searched(run) or self._foretold()
        if disturbed(searched(run)):
            found.add(Caveat.NOISY_MACHINE)
        if at_edge(decision.winner, history):
            found.add(Caveat.AT_SPACE_EDGE)
        if run.bench.restarts_per_config:
            found.add(Caveat.RESTARTED_PER_CONFIG)
        if run.windows != (whole(run.trace),):
            found.add(Caveat.WINDOWED)
        is_change = decision.verdict is RaceVerdict.CHANGE
        if is_change and self.cold is None and not run.bench.restarts_per_config:
            found.add(Caveat.NOT_CONFIRMED_COLD)
        return [caveat for caveat in Caveat if caveat in found]

    def _foretold(self) -> list[Observation]:
        if self.shadow is None or self.shadow.forecast is None:
            return []
        return Ranking(self.run_state, self.shadow.forecast).seen()

    def _trials_of(self, limits: EngineLimits) -> Sequence[Trial]:
        return [
            t
            for t in self.run_state.journal.records()
            if t.measurement and t.phase.is_on_windows and t.limits == limits
        ]
