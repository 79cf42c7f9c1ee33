"""The search with a shadow: learn a few settings live, foretell all, hand on the finalists.

Whatever makes the shadow unfit (an engine it cannot stand in for, too few steps, too large an
error) is told, and the live search takes over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, ShadowError, TooFewSamplesError, UsageError
from tuner.replay.arrivals import ClockKind
from tuner.replay.metrics import Measurement
from tuner.replay.process import EngineStart
from tuner.run.calibrate import CALIBRATION, Calibrator
from tuner.run.directory import PROFILE_FILE
from tuner.run.forecast import Forecast
from tuner.run.state import RunState
from tuner.run.time_plan import fitting, fly_pilot
from tuner.search.budget import RACE_REPLAYS, choose_windows, shorter_window, window_text
from tuner.search.ladder import FINALIST_RATIO, finalists, same_schedule
from tuner.search.objective import Objective, Tier
from tuner.search.race import MIN_AGREED, Forecasts, RaceDecision, decide_predicted
from tuner.search.space import SearchSpace
from tuner.search.trials import (
    TIE_RATIO,
    Observation,
    Phase,
    leader,
    measured_and_predicted,
    metric_error,
    race_records,
    relative_errors,
)
from tuner.shadow.calibration import check_rank_by, error_ratio
from tuner.shadow.pool import ReplayTask, ShadowPool, SpareProcesses
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.traffic.windows import Window, busiest

# Rounds of looking between the best cap and its neighbours: ours; each halves the gap.
REFINEMENTS = 2
# Settings that are asked about before what they say of others is looked at: ours, or as many as
# run beside each other.
MIN_AT_ONCE = 4
# Neighbours closer than this share of the cap are not told apart: as in `search`.
REFINE_RATIO = 0.2


@dataclass(slots=True)
class Ranking:
    """The forecast of one run's space."""

    run: RunState
    forecast: Forecast
    _told: set[str] = field(default_factory=set)

    def rank(self) -> list[Observation]:
        """Foretell the grid and what lies between its best and their neighbours.

        Larger limits come first: what never bound tells of every smaller one that would not
        have bound either, and a good one early lets what is hopeless be cut short soon. The
        ladder at the present token budget is replayed whole, also where it loses.
        """
        space = self.run.space
        settings = space.grid()
        if self.forecast.aim.objective is Objective.CAPACITY:
            # At another load for each, so that none can be told from another.
            return self._foretell(list(dict.fromkeys([space.present, *settings])))
        seen = self._foretell(list(dict.fromkeys([space.present, max(settings)])))
        at_once = max(MIN_AT_ONCE, self.forecast.shadows.jobs)
        rungs = sorted(space.rungs(), reverse=True)
        for first in range(0, len(rungs), at_once):
            few = [s for s in rungs[first : first + at_once] if not self._is_shown(seen, s)]
            seen = self._foretell(few, is_cut=False)
        while unknown := [s for s in settings if not same_schedule(seen, s)]:
            seen = self._foretell(_of_other_kinds(sorted(unknown, reverse=True))[:at_once])
        for _ in range(REFINEMENTS):
            best = _smallest_of_the_best(seen, settings)
            if best is None:
                break
            seen = self._foretell([best, *_between(seen, space, best)])
        return seen

    @staticmethod
    def _is_shown(seen: Sequence[Observation], limits: EngineLimits) -> bool:
        """Whether a whole replay tells of the limits; one that failed has nothing to tell."""
        told = [o for o in seen if o.is_whole or o.score.tier is Tier.FAILED]
        return any(o.limits == limits for o in told) or same_schedule(
            [o for o in told if o.is_whole], limits
        )

    def _foretell(
        self, settings: Sequence[EngineLimits], *, is_cut: bool = True
    ) -> list[Observation]:
        """Have all settings replayed, here or elsewhere, and return all that is known.

        What is certain to lose to the best of before is cut short, if it may be: small caps
        under load, whose queue never ends, would take the most time.
        """
        run, journal = self.run, self.run.journal
        best = leader(self.seen())
        cut = self.forecast.cut_rule(best.score if best is not None and is_cut else None)
        for limits in settings:
            journal.enqueue(limits, Phase.SHADOW, self.forecast.generation, cut)

        def next_task() -> ReplayTask | None:
            claimed = journal.claim(Phase.SHADOW)
            if claimed is None:
                return None
            number, limits = claimed
            run.listener.trial_started(number, limits, Phase.SHADOW)
            return self.forecast.task(limits, number, journal.cut_of(number))

        def is_over() -> bool:
            journal.give_back_stale()
            return journal.unfinished(Phase.SHADOW) == 0

        for task, outcome in self.forecast.shadows.drain(next_task, is_over):
            generation = self.forecast.generation
            run.keep(
                task.number, task.limits, Phase.SHADOW, outcome, self.forecast.goal, generation
            )
        # A worker may have been the last to finish.
        run.write_trials()
        for remark in self.forecast.shadows.remarks:
            if remark not in self._told:
                self._told.add(remark)
                run.listener.note(remark)
        return self.seen()

    def seen(self) -> list[Observation]:
        """Return what was foretold with the present profile."""
        return [
            o
            for o in self.run.journal.observations()
            if o.phase is Phase.SHADOW and o.race_round == self.forecast.generation
        ]


def _of_other_kinds(settings: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return the first of each cap and budget, so that none of them may tell of another."""
    chosen: list[EngineLimits] = []
    for limits in settings:
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        if all(seqs != c.max_num_seqs and tokens != c.max_num_batched_tokens for c in chosen):
            chosen.append(limits)
    return chosen


def _smallest_of_the_best(
    seen: Sequence[Observation], settings: Sequence[EngineLimits]
) -> EngineLimits | None:
    """Return the smallest setting that is as good as the best, None where nothing is whole.

    It may not have been replayed, where a larger one makes the same batches and told of it.
    """
    best = leader(seen)
    if best is None:
        return None
    good = [o for o in seen if not o.score.clearly_worse_than(best.score, TIE_RATIO)]
    like = (limits for limits in settings if same_schedule(good, limits))
    return min([best.limits, *like])


def _between(
    seen: Sequence[Observation], space: SearchSpace, best: EngineLimits
) -> list[EngineLimits]:
    """Return the settings halfway between the best and its neighbours that are not known."""
    budget, cap = best.max_num_batched_tokens, best.max_num_seqs
    # A setting that makes the same batches as one that was replayed is as good as known.
    others = {o.limits.max_num_seqs for o in seen}
    caps = sorted({cap, *(c for c in others if same_schedule(seen, space.at(c, budget)))})
    at = caps.index(cap)
    around = [caps[i] for i in (at - 1, at + 1) if 0 <= i < len(caps)]
    known = {o.limits for o in seen}
    wanted = [
        space.at((cap + other) // 2, budget)
        for other in around
        if abs(other - cap) > max(1, REFINE_RATIO * cap)
    ]
    return [
        limits
        for limits in wanted
        if limits not in known
        and limits.within(space.ceiling)
        # A larger one that makes the same batches is no better.
        and not (limits > best and same_schedule(seen, limits))
    ]


# The share of the budget that foretelling may take: ours.
FORECAST_SHARE = 0.20
# Live replays after the search: the race, and two on cold engines.
LIVE_REPLAYS = RACE_REPLAYS + 2
# Shadow and live disagree if they differ by more than this many times the stated error, which
# is a median: ours.
DISAGREEMENT = 3.0
# Two rounds have to fit into this share of the time that is left: ours, for a shadow that is
# wrong.
ROUNDS_SHARE = 0.8
# A window that does not fit is shortened to this share of it, again and again: ours.
SHORTER_RATIO = 0.7

MakeShadows = Callable[[Profile], ShadowPool]


@dataclass(slots=True)
class ShadowSearch:
    """Calibration and forecast of one run."""

    run: RunState
    make_shadows: MakeShadows
    lessons: Calibrator
    spares: SpareProcesses
    forecast: Forecast | None = None
    compared: dict[tuple[EngineLimits, str], tuple[float, float]] = field(default_factory=dict)
    """What was measured live and foretold of the same requests, by setting and metric."""
    predicted: dict[EngineLimits, Measurement] = field(default_factory=dict)
    """What was foretold of those that race, on the windows they race on."""
    can_race: bool = True
    """Whether the time holds two rounds of the best and the present one."""
    _rate: float | None = None
    _is_unfit: bool = False
    _kept: Profile | None = None
    _shadows: ShadowPool | None = None

    def finalists(self, started: EngineStart) -> list[EngineLimits] | None:
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
            self.can_race = self._choose_windows(field_)
            if not self.can_race and self._kept is not None:
                field_ = self._beside_a_pilot(field_, self._kept)
            if not self.can_race:
                return field_
        except (ShadowError, TooFewSamplesError) as unfit:
            run.caveats.add(Caveat.SHADOW_UNFIT)
            self._is_unfit = True
            run.listener.note(f"no shadow: {unfit.message}; searching live")
            self.close()
            return None
        return fitting(run, field_)

    def _taken_over(self, kept: Profile, started: EngineStart) -> Profile:
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
            ReplayTask((CALIBRATION,), limits, self.run.aim.plan)
            for limits in self.lessons.live
        ]
        pairs = zip(self.lessons.live.values(), shadows.run(tasks), strict=True)
        return metric_error(
            [relative_errors(m, f.as_json()) for m, f in pairs if isinstance(f, Measurement)]
        )

    def _speaking_for(self, profile: Profile) -> ShadowPool:
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
        near = max(error_ratio(profile), FINALIST_RATIO / 2)
        field_ = finalists(seen, run.space, near)
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

    def _choose_windows(self, field_: Sequence[EngineLimits]) -> bool:
        """Choose what races so that the time holds two rounds of the best and the present one.

        What was asked for, or what the time holds by what a replay costs; where the shadow says
        that even that takes too long, the busiest stretch of it that does not. Returns whether
        there is one: one with too few requests tells nothing.
        """
        run = self.run
        if not run.windows:
            run.windows = self._wanted_windows()
            wanted = run.windows
            while not self._holds_rounds(field_):
                shorter = shorter_window(run.trace, run.windows, SHORTER_RATIO)
                if shorter is None:
                    run.windows = ()
                    return False
                run.windows = (shorter,)
            if run.windows != wanted:
                run.listener.note(
                    f"two rounds of {window_text(wanted, run.trace)} do not fit into the time; "
                    f"racing {window_text(run.windows, run.trace)}"
                )
        run.use_windows()
        self._foresee(field_)
        return True

    def _beside_a_pilot(self, field_: list[EngineLimits], kept: Profile) -> list[EngineLimits]:
        """Ask the engine whether a given profile is right that there is no time to race.

        Where it is not, it is recalibrated with the pilot's steps, and the time looked at anew.
        """
        run = self.run
        fly_pilot(run, self.lessons.learn)
        calibration = self.lessons.calibration
        if calibration is None or not calibration.steps:
            return field_
        times = calibration.times_of(kept)
        if abs(1 / times - 1) <= DISAGREEMENT * error_ratio(kept):
            return field_
        run.listener.note(
            f"live and shadow disagree: steps of the pilot take {times:.2g} times what the "
            "profile says; recalibrating once"
        )
        more = self.recalibrate()
        if more is not None:
            field_ = more
            self.can_race = self._choose_windows(field_)
        return field_

    def _wanted_windows(self) -> tuple[Window, ...]:
        """Return the windows as asked for, or as much as the time is thought to hold."""
        run = self.run
        if run.aim.window is not None:
            return (run.aim.window,)
        rate = fly_pilot(run).wall_per_trace_s if self._rate is None else self._rate
        try:
            return choose_windows(run.trace, rate, run.left_s, LIVE_REPLAYS)
        except UsageError:
            # By the pilot nothing fits; the shadow knows better, and shortens what does not.
            return (busiest(run.trace, run.trace.duration_s),)

    def _holds_rounds(self, field_: Sequence[EngineLimits]) -> bool:
        """Whether the time holds two rounds of the first of the field and the present one."""
        pair = list(dict.fromkeys([field_[0], self.run.space.present]))
        took_s = [_duration_s(self.run, m) for m in self._replayed(pair).values()]
        rounds_s = MIN_AGREED * sum(took_s)
        return len(took_s) == len(pair) and rounds_s < ROUNDS_SHARE * self.run.left_s

    def _replayed(self, field_: Sequence[EngineLimits]) -> dict[EngineLimits, Measurement]:
        """Return what the shadow says of settings on the run's windows; not of who fails."""
        if self.forecast is None:
            return {}
        run, shadows = self.run, self.forecast.shadows
        for name, window in zip(run.names, run.windows, strict=True):
            shadows.use(name, window.of(run.trace))
        outcomes = self.forecast.predict(field_, run.names, run.aim.plan)
        shadows.settle()
        pairs = zip(field_, outcomes, strict=True)
        return {limits: m for limits, m in pairs if isinstance(m, Measurement)}

    def _foresee(self, field_: Sequence[EngineLimits]) -> dict[EngineLimits, Measurement]:
        """Foretell the race's own replays: what they will measure and how long they will take.

        Who fails in the shadow is left out.
        """
        if self.forecast is None:
            return {}
        run, foretold = self.run, self._replayed(field_)
        for limits, outcome in foretold.items():
            run.foreseen_s[limits] = _duration_s(run, outcome)
        self.predicted |= foretold
        scores = {limits: run.goal.score(m) for limits, m in self.predicted.items()}
        wrong_ratio = error_ratio(self.forecast.shadows.profile)
        run.forecasts = Forecasts(scores, wrong_ratio)
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
            pairs = measured_and_predicted(list(live.values()), outcome.as_json())
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

    def decision(self) -> RaceDecision:
        """Decide by what was foretold alone, where the time held no race.

        Raises: NoFeasibleConfigError if nothing could be foretold.
        """
        if self.forecast is None:
            raise ShadowError("nothing was foretold")
        run = self.run
        if not run.windows:
            run.windows = self.forecast.parts
            run.use_windows()
        seen = Ranking(run, self.forecast).seen()
        wrong_ratio = error_ratio(self.forecast.shadows.profile)
        return decide_predicted(seen, run.space.present, wrong_ratio)

    def close(self) -> None:
        """End the shadows' processes."""
        if self._shadows is not None:
            self._shadows.close()
            self._shadows = None
        self.spares.close()


def _duration_s(run: RunState, foretold: Measurement) -> float:
    """Return how long the live replay of what was foretold takes, in real time."""
    jumps = run.aim.plan.clock is ClockKind.VIRTUAL
    return foretold.busy_s if jumps else foretold.clock_s
