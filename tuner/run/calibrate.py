"""Teach a run's step-time model: replay a few settings live, in rounds, and keep every step.

Which settings, for how long and when to stop is decided in `calibrate`; what is made of the
profile in `shadow_search`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.errors import ShadowError, TooFewSamplesError, UsageError
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule
from tuner.replay.process import EngineStart
from tuner.run.state import RunState
from tuner.run.time_plan import fly_pilot
from tuner.search.budget import MIN_REQUESTS, RACE_REPLAYS, Pilot, choose_windows, outlook
from tuner.search.objective import Scoring
from tuner.search.space import SearchSpace
from tuner.search.trials import Phase
from tuner.shadow.calibration import (
    LARGEST_ERROR_RATIO,
    MIN_ERROR_RATIO,
    Calibration,
    fit_error_ratio,
)
from tuner.shadow.profiles import KvStart, Profile
from tuner.traffic.traces import Trace
from tuner.traffic.windows import busiest

# The name of what is replayed.
CALIBRATION = "calibration"
# The share of the budget that calibrating may take: ours; mostly it ends before.
CALIBRATION_SHARE = 0.30
# The present limits, the ceiling, and two more: `calibration_settings`.
SETTINGS = 4
# The first round's replays are cut at this many times the time they are planned to take, which
# the present configuration exceeds where it is overloaded, and the low cap always: ours.
MAX_PRESENT, MAX_OTHERS, MAX_LOW = 4.0, 2.0, 1.0
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
    """What was learnt of an engine's steps; `calibration` is None before it was begun.

    `live` are the measurements of the calibration's whole replays, by setting.
    """

    run: RunState
    serve_values: Mapping[str, object]
    calibration: Calibration | None = None
    live: dict[EngineLimits, list[Mapping[str, Any]]] = field(default_factory=dict)

    def begin(self, started: EngineStart, kept: Profile | None = None) -> Calibration:
        """Note what engine it is whose steps will be heard of, and what a kept profile knows.

        Raises: ShadowError.
        """
        if started.shape is None:
            raise ShadowError(started.no_shadow)
        begun = Calibration(
            shape=started.shape,
            starts=(KvStart(started.info.ceiling, started.info.num_blocks),),
            steps=(),
            present=self.run.space.present,
            serve_values=self.serve_values,
        )
        for start in kept.kv_starts if kept is not None else ():
            if start.limits != started.info.ceiling:
                begun = begun.and_start(start.limits, start.num_blocks)
        self.calibration = begun
        return begun

    def learn(self, limits: EngineLimits, log: ReplayLog) -> None:
        """Take in the steps of a live replay."""
        if self.calibration is not None and log.kept_steps is not None:
            self.calibration = self.calibration.and_steps(limits, [log.kept_steps])

    def take(self, started: EngineStart) -> Pilot:
        """Replay a few settings live, in rounds, until another would teach no more.

        Raises: EngineError, ShadowError.
        """
        run, began_s = self.run, time.monotonic()
        self.begin(started)
        pilot = fly_pilot(run)
        run.listener.note(self._outlook(pilot))
        share_s = CALIBRATION_SHARE * run.aim.budget.total_s
        each_s = share_s / SETTINGS
        length_s = replay_length_s(run.trace, pilot, each_s)
        run.bench.use(CALIBRATION, busiest(run.trace, length_s).of(run.trace))
        run.listener.note(
            f"calibrating on {SETTINGS} settings, {length_s:.3g} s of traffic, in turns"
        )
        planned_s = min(length_s * pilot.wall_per_trace_s, each_s / 2)
        settings = self._first_round(planned_s)
        later_s = dict.fromkeys(settings, min(max(LATER_S, pilot.decode_s), planned_s))
        later_s[run.space.ceiling] = MAX_OTHERS * planned_s
        least_s = sum(min(most_s, planned_s) for most_s in later_s.values())
        errors = self._error()
        for number in range(1, MAX_ROUNDS):
            is_over = time.monotonic() - began_s + least_s > share_s
            # Where every change of limits is a start of its own, rounds cost too much.
            if is_steady(errors) or is_over or run.bench.restarts_per_config:
                break
            turn = number % len(settings)
            for limits in (*settings[turn:], *settings[:turn]):
                self._teach(limits, later_s[limits])
            errors.extend(self._error())
        run.walls_s["calibrate"] = time.monotonic() - began_s
        return pilot

    def _outlook(self, pilot: Pilot) -> str:
        """Say what the time that is left can answer."""
        run, bench = self.run, self.run.bench
        windows, trace = run.windows, run.trace
        if not windows and run.aim.window is not None:
            windows = (run.aim.window,)
        if not windows:
            left_s = run.left_s - CALIBRATION_SHARE * run.aim.budget.total_s
            least = (busiest(trace, trace.duration_s * MIN_REQUESTS / len(trace)),)
            try:
                windows = choose_windows(trace, pilot.wall_per_trace_s, left_s, RACE_REPLAYS)
            except UsageError:
                windows = least
        replay_s = sum(w.length_s for w in windows) * pilot.wall_per_trace_s
        cold_s = 2 * (bench.process_s + bench.start_s)
        return outlook(run.aim.budget, run.left_s, CALIBRATION_SHARE, replay_s, cold_s)

    def _first_round(self, planned_s: float) -> list[EngineLimits]:
        """Replay all settings; return them. Whole replays later show how true the model is.

        The low cap, which has the longest queue, soon has shown what it can.
        """
        space = self.run.space
        settings = list(dict.fromkeys([space.present, space.ceiling]))
        most_running = 0.0
        for limits in settings:
            times = MAX_PRESENT if limits == space.present else MAX_OTHERS
            most_running = max(most_running, self._teach(limits, times * planned_s))
        more = calibration_settings(space, most_running)
        for limits in more:
            self._teach(limits, (MAX_LOW if limits == min(more) else MAX_OTHERS) * planned_s)
        return [*settings, *more]

    def _teach(self, limits: EngineLimits, most_s: float) -> float:
        """Replay the calibration's traffic at a setting, learn from it; return how many ran."""
        record = self.run.trial(
            limits,
            Phase.CALIBRATE,
            CutRule(max_wall_s=most_s),
            on_log=partial(self.learn, limits),
            names=[CALIBRATION],
            goal=Scoring(self.run.aim.objective, self.run.aim.slos, "p50"),
        )
        measured = record.measurement
        if measured and not measured["cut_reason"]:
            self.live.setdefault(limits, []).append(measured)
        return float(measured["running"]["max"]) if measured else 0.0

    def _error(self) -> list[float]:
        """Return how wrong the steps so far leave the model, nothing while they are too few."""
        try:
            learnt = None if self.calibration is None else self.calibration.profile()
        except TooFewSamplesError:
            learnt = None
        return [] if learnt is None else [fit_error_ratio(learnt)]


def calibration_settings(space: SearchSpace, most_running: float) -> list[EngineLimits]:
    """Return what to replay live after the present limits and the ceiling.

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
    known = (space.present, space.ceiling)
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
