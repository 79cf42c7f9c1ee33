"""Calibrate a run's step-time model: replay a few settings live, in rounds, keep every step.

Tried and given up: one round of long replays, which a machine that drifts over minutes makes as
wrong as the drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import ShadowError, TooFewSamplesError, UsageError
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule
from tuner.replay.process import EngineStart
from tuner.run.context import Workload
from tuner.run.journal import Round
from tuner.run.predict import at_own_speed
from tuner.run.rounds import STEPS, Steps, share_round, unpacked
from tuner.run.time_plan import fly_pilot
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import MIN_REQUESTS, RACE_REPLAYS, Pilot, choose_windows, outlook
from tuner.search.space import SearchSpace
from tuner.search.trials import Phase, metric_error, relative_errors
from tuner.shadow.calibration import (
    LARGEST_ERROR_RATIO,
    MIN_ERROR_RATIO,
    Calibration,
)
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window, busiest

# The share of the budget that calibrating may take: ours; mostly it ends before.
CALIBRATION_SHARE = 0.30
# The current limits, the ceiling, and two more: `calibration_settings`.
SETTINGS = 4
# The first round's replays are cut at this many times the time they are planned to take, which
# the current configuration exceeds where it is overloaded, and the low cap always: ours.
MAX_CURRENT, MAX_OTHERS, MAX_LOW = 4.0, 2.0, 1.0
# The first round's part of the calibration's time: ours, so that the least rounds fit.
FIRST_SHARE = 0.5
# Later rounds show the machine's mood and little else that is new but at the ceiling, whose
# batches fill late. All others are cut after this long, or once the middle request has decoded:
# ours. In half of the time that rounds of whole replays took, as many rounds then led to models
# that were as right about six settings that they had not seen.
LATER_S = 2.0
# Rounds of short replays, so that the machine's drift over minutes hits all settings alike. On
# a machine that drifts by 15 %, one round left a setting out that was 20 % off or more in three
# of ten cases, three rounds of the same replays in none: ours.
MIN_ROUNDS, MAX_ROUNDS = 3, 6
# How long a replay of a round should take at least, in real time, and how many times over a
# request should decode meanwhile: ours, a few hundred steps of batches as full as they get.
REPLAY_S, FILLS = 3.0, 3.0
# A round that takes less than this off the error was one too many: ours.
STEADY_RATIO = 0.9


@dataclass(slots=True)
class Calibrator:
    """What live replays have shown of an engine's steps so far.

    `whole` are the measurements of the calibration's whole replays, by setting, and `workload`
    is what they replayed, None where an earlier run has calibrated.
    """

    calibration: Calibration
    workload: Workload | None = None
    whole: dict[EngineLimits, list[Mapping[str, Any]]] = field(default_factory=dict)

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
        calibration = Calibration(
            shape=started.shape,
            starts=(KvStart(started.info.ceiling, started.info.num_blocks),),
            steps=(),
            current=current,
            serve_values=serve_values,
        )
        for start in stored.kv_starts if stored is not None else ():
            if start.limits != started.info.ceiling:
                calibration = calibration.and_start(start.limits, start.num_blocks)
        return cls(calibration)

    def observe(self, limits: EngineLimits, log: ReplayLog) -> None:
        """Take in the steps of a live replay."""
        if log.kept_steps is not None:
            self.observe_steps(limits, log.kept_steps)

    def observe_steps(self, limits: EngineLimits, columns: StepColumns) -> None:
        """Take in the steps of a replay on the run's own engine."""
        self.calibration = self.calibration.and_steps(limits, [columns])

    def observe_elsewhere(self, steps: Steps) -> None:
        """Take in the steps of a worker's round, as long as they would have taken here.

        The worker's machine is of the same kind, and its speed a factor of its own; without
        enough steps of the run's own engine to tell that factor, they are left out.
        """
        try:
            here = self.calibration.profile()
            theirs = replace(self.calibration, steps=tuple(steps))
            times = theirs.times_of(here)
        except TooFewSamplesError:
            return
        for limits, columns in steps:
            self.observe_steps(limits, replace(columns, duration_s=columns.duration_s / times))

    def errors(self) -> list[float]:
        """Return how wrong the steps so far leave a model, nothing while they are too few."""
        try:
            return [self.calibration.error_ratio()]
        except TooFewSamplesError:
            return []

    def profile(self, predictor_of: Callable[[Profile], Predictor]) -> Profile:
        """Fit a profile, and compare its predictions with the whole replays at their own speed.

        Raises: TooFewSamplesError with too few steps; ShadowError, UsageError.
        """
        profile = self.calibration.profile()
        if self.workload is None:
            return profile
        predictor, errors = predictor_of(profile), []
        for limits, replays in self.whole.items():
            for measured in replays:
                step_s = measured["busy_s"] / max(measured["steps"], 1)
                found = at_own_speed(predictor, self.workload, limits, step_s)
                if found is not None:
                    errors.append(relative_errors([measured], found.as_json()))
        return replace(profile, metric_error_ratio=metric_error(errors))


def calibrate(runner: TrialRunner, calibrator: Calibrator) -> Pilot:
    """Replay a few settings live, in rounds, until another would teach no more.

    Raises: EngineError.
    """
    context = runner.context
    with context.stopwatch.stage("calibrate"):
        pilot = fly_pilot(runner)
        context.listener.note(_outlook(runner, pilot))
        rounds = _Rounds.planned(runner, calibrator, pilot)
        context.listener.note(
            f"calibrating on {SETTINGS} settings, {rounds.length_s:.3g} s of traffic, in turns"
        )
        settings = rounds.first()
        rounds.repeat(settings, max(LATER_S, pilot.decode_s))
    return pilot


@dataclass(slots=True)
class _Rounds:
    """Rounds of calibration replays: all settings in turns, so that drift hits all alike.

    Units: seconds; `planned_s` is what a replay should take.
    """

    runner: TrialRunner
    calibrator: Calibrator
    workload: Workload
    share_s: float
    length_s: float
    planned_s: float
    began_s: float = field(default_factory=time.monotonic)
    _taken: set[int] = field(default_factory=set)

    @classmethod
    def planned(cls, runner: TrialRunner, calibrator: Calibrator, pilot: Pilot) -> Self:
        """Return rounds that fit into the calibration's share of the budget."""
        context = runner.context
        share_s = CALIBRATION_SHARE * context.budget.total_s
        length_s = replay_length_s(context.trace, pilot, share_s / SETTINGS)
        all_times = MAX_CURRENT + MAX_LOW + (SETTINGS - 2) * MAX_OTHERS
        planned_s = min(length_s * pilot.wall_per_trace_s, FIRST_SHARE * share_s / all_times)
        window = busiest(context.trace, length_s)
        workload = Workload.of_calibration(context.trace, (window,), context.aim)
        calibrator.workload = workload
        return cls(runner, calibrator, workload, share_s, length_s, planned_s)

    def first(self) -> list[EngineLimits]:
        """Replay all settings; return them. Whole replays later show how true the model is.

        The low cap, which has the longest queue, soon has shown what it can.
        """
        space = self.runner.context.space
        settings = list(dict.fromkeys([space.current, space.ceiling]))
        most_running = 0.0
        for limits in settings:
            times = MAX_CURRENT if limits == space.current else MAX_OTHERS
            most_running = max(most_running, self._replay(limits, times * self.planned_s))
        more = calibration_settings(space, most_running)
        for limits in more:
            times = MAX_LOW if limits == min(more) else MAX_OTHERS
            self._replay(limits, times * self.planned_s)
        return [*settings, *more]

    def repeat(self, settings: Sequence[EngineLimits], enough_s: float) -> None:
        """Replay the settings in turns until the error falls no more or the time is over."""
        most_s = dict.fromkeys(settings, min(enough_s, self.planned_s))
        most_s[self.runner.context.space.ceiling] = MAX_OTHERS * self.planned_s
        least_s = sum(min(one_s, self.planned_s) for one_s in most_s.values())
        errors = self.calibrator.errors()
        rounds = [self._round(number, most_s) for number in range(1, MAX_ROUNDS)]
        if self.runner.context.is_shared:
            self.runner.context.journal.offer(rounds)
        for one in rounds:
            is_over = time.monotonic() - self.began_s + least_s > self.share_s
            # Where every change of limits is a start of its own, rounds cost too much.
            if is_steady(errors) or is_over or self.runner.engine.restarts_per_config:
                break
            if not self._replay_round(one):
                break
            errors.extend(self.calibrator.errors())
        if self.runner.context.is_shared:
            self.runner.context.journal.withdraw(Phase.CALIBRATE)

    def _round(self, number: int, most_s: Mapping[EngineLimits, float]) -> Round:
        """Return a round of all settings, each of which begins one."""
        settings = list(most_s)
        turn = number % len(settings)
        settings = [*settings[turn:], *settings[:turn]]
        walls_s = tuple(most_s[limits] for limits in settings)
        windows, load = self.workload.windows, self.workload.plan.load
        return Round(Phase.CALIBRATE, number, tuple(settings), walls_s, windows, load)

    def _replay_round(self, one: Round) -> bool:
        """Replay a round, or where workers share them one that is left; tell if there was."""
        if not self.runner.context.is_shared:
            for limits, wall_s in zip(one.settings, one.max_wall_s, strict=True):
                self._replay(limits, wall_s)
            return True
        found = share_round(self.runner, self.workload, Phase.CALIBRATE)
        for limits, columns in found.steps if found is not None else ():
            self.calibrator.observe_steps(limits, columns)
        done = self.runner.context.journal.rounds(Phase.CALIBRATE)
        for number in sorted(done.keys() - self._taken):
            self.calibrator.observe_elsewhere(unpacked(done[number].get(STEPS, ())))
            self._taken.add(number)
        return found is not None

    def _replay(self, limits: EngineLimits, most_s: float) -> float:
        """Replay the traffic at a setting, observe its steps; return how many ran at once."""
        _, record = self.runner.measure(
            limits,
            Phase.CALIBRATE,
            self.workload,
            CutRule(max_wall_s=most_s),
            on_log=partial(self.calibrator.observe, limits),
        )
        measured = record.measurement
        if measured and not record.cut_reason:
            self.calibrator.whole.setdefault(limits, []).append(measured)
        return float(measured["running"]["max"]) if measured else 0.0


def _outlook(runner: TrialRunner, pilot: Pilot) -> str:
    """Say what the time that is left can answer."""
    context, engine = runner.context, runner.engine
    trace, aim = context.trace, context.aim
    if aim.window is not None:
        windows: tuple[Window, ...] = (aim.window,)
    else:
        left_s = context.left_s - CALIBRATION_SHARE * context.budget.total_s
        try:
            windows = choose_windows(trace, pilot.wall_per_trace_s, left_s, RACE_REPLAYS)
        except UsageError:
            windows = (busiest(trace, trace.duration_s * MIN_REQUESTS / len(trace)),)
    replay_s = sum(w.length_s for w in windows) * pilot.wall_per_trace_s
    cold_s = 2 * (engine.process_s + engine.start_s)
    return outlook(context.budget, context.left_s, CALIBRATION_SHARE, replay_s, cold_s)


def calibration_settings(space: SearchSpace, most_running: float) -> list[EngineLimits]:
    """Return what to replay live after the current limits and the ceiling.

    The ceiling shows the fullest batches and the largest prefills that the traffic makes, with
    `most_running` requests at once. Half as many with a small token budget show what lies
    below, and prefills in pieces beside decodes; a low cap shows small batches and long queues.

    Source: ours. Live on the demo model, ten settings: with half of what ran as the middle cap,
        six that were not calibrated on came out 4.7 % off in the mean, with a seventh 6.0 %.
    """
    low = next((cap for cap in space.ladder if cap > 1), space.ladder[0])
    half = max(1, int(most_running) // 2)
    middle = max(low, 1 << (half.bit_length() - 1))
    wanted = [space.at(middle, min(space.budgets)), space.at(low, max(space.budgets))]
    known = (space.current, space.ceiling)
    return list(dict.fromkeys(s for s in wanted if s.within(space.ceiling) and s not in known))


def replay_length_s(trace: Trace, pilot: Pilot, each_s: float) -> float:
    """Return how many seconds of the trace a calibration replays at every setting.

    Long enough that batches fill up and medians mean something; beyond that, more rounds teach
    more than longer ones. `each_s` is the real time for all replays of one setting.
    """
    wanted_s = max(REPLAY_S / pilot.wall_per_trace_s, FILLS * pilot.decode_s)
    enough_s = MIN_REQUESTS * trace.duration_s / max(len(trace), 1)
    most_s = each_s / MIN_ROUNDS / pilot.wall_per_trace_s
    length_s = max(min(wanted_s, most_s), enough_s)
    return min(length_s, max(trace.duration_s, 1e-3))


def is_steady(errors: Sequence[float]) -> bool:
    """Tell from the error after each round whether another is unlikely to teach more."""
    if len(errors) < MIN_ROUNDS or errors[-1] > LARGEST_ERROR_RATIO:
        return False
    return errors[-1] <= MIN_ERROR_RATIO or errors[-1] > STEADY_RATIO * min(errors[:-1])
