"""What the time of a run holds: which windows are replayed, and who races on them.

What a replay takes is what it took before, or what is predicted of it. Two rounds come before
anything else, since one does not tell how far replays differ; the cold engines come before more
finalists, since what is deployed starts cold and finalists are much alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError, TooFewSamplesError, UsageError
from tuner.replay.arrivals import ClockKind
from tuner.replay.load import share_done
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.runner import Failure
from tuner.run.context import WINDOW, RunContext, Workload
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import (
    LIFETIMES,
    REPLAYS_UNPREDICTED,
    Aim,
    choose_windows,
    least_window,
    shorter_window,
    window_text,
)
from tuner.search.trials import Phase, read_metric
from tuner.shadow.predictor import Predictor
from tuner.traffic.traces import LoadModel
from tuner.traffic.windows import INSTANT_S, Window, busiest, whole

Observe = Callable[[EngineLimits, ReplayLog], None]
"""What receives the steps of a replay at the limits."""

# Rounds that the time should hold: ours, since two tell how far replays differ.
MIN_ROUNDS = 2
# The race waits for the cold engines if they take less than this share of what is left, and
# what tells anything at all fits besides: ours, since that a change shows on engines of its own
# is worth more than another round of what was predicted to be alike.
MAX_COLD_RATIO = 0.75
# Two rounds have to fit into this share of the time that is left: ours, for a prediction that
# is wrong.
ROUNDS_SHARE = 0.8
# A window that does not fit is shortened to this share of it, again and again: ours.
SHORTER_RATIO = 0.7


@dataclass(frozen=True, slots=True)
class RacePlan:
    """Who races, on what, and what was predicted of that.

    The current configuration comes last of the settings. Those of which nothing could be
    predicted are left out of `predicted`.
    """

    context: RunContext
    settings: tuple[EngineLimits, ...]
    workload: Workload
    predicted: Mapping[EngineLimits, Measurement] = field(default_factory=dict)

    @property
    def usual_s(self) -> float:
        """What a whole replay took so far, in the middle; 0 before the first."""
        return _middle([wall_s for _, wall_s in self._whole_replays()])

    def replay_s(self, limits: EngineLimits) -> float:
        """Return what a replay takes: as it did, as predicted, or as others do.

        Units: seconds, 0 where nothing is known.
        """
        mine = [wall_s for at, wall_s in self._whole_replays() if at == limits]
        predicted_s = 0.0
        if limits in self.predicted:
            predicted_s = duration_s(self.workload, self.predicted[limits])
        return _middle(mine) or predicted_s or self.usual_s

    @property
    def lives(self) -> tuple[float, float] | None:
        """How long its shortest window lasts, and the middle request at the current setting.

        As predicted, or as measured before the race; in a closed loop a window lasts as long
        as the engine takes for its requests. None where all of the trace races, or nothing is
        known.

        Units: seconds each.
        """
        context, windows = self.context, self.workload.windows
        predicted = self.predicted.get(context.space.current)
        if predicted is None:
            took_s, life_s = self._measured_life()
        else:
            took_s, life_s = predicted.clock_s, predicted.latency("e2e_s", "p50") or 0.0
        if not life_s or windows == (whole(context.trace),):
            return None
        if self.workload.plan.load_model is LoadModel.CLOSED:
            return took_s / len(windows), life_s
        return min(window.length_s for window in windows), life_s

    def _measured_life(self) -> tuple[float, float]:
        """Return how long a replay and its middle request took as it is now, 0 if unknown.

        By the clock of the replay. Units: seconds each.
        """
        mine = [
            (float(trial.measurement["virtual_duration_s"]), life_s)
            for trial in self.context.journal.records()
            if trial.is_whole and trial.measurement and trial.phase is Phase.CURRENT
            if (life_s := read_metric(trial.measurement, "e2e_p50"))
        ]
        return sorted(mine)[len(mine) // 2] if mine else (0.0, 0.0)

    def _whole_replays(self) -> Iterator[tuple[EngineLimits, float]]:
        """Yield the limits of each whole live replay, and how long it took."""
        for trial in self.context.journal.records():
            if trial.is_whole and trial.measurement and trial.phase.is_on_windows:
                yield trial.limits, float(trial.measurement["wall_s"])


def tell_short_windows(plan: RacePlan) -> None:
    """Say it where the windows that race are short beside the life of a request."""
    if plan.lives is None or plan.lives[0] >= LIFETIMES * plan.lives[1]:
        return
    window_s, life_s = plan.lives
    plan.context.listener.note(
        f"the window of {window_s:.0f} s lasts {window_s / life_s:.1f} times as long as "
        f"its middle request, {life_s:.1f} s; at least {LIFETIMES:g} times are wanted, "
        "give --budget or --window more"
    )
    plan.context.caveats.add(Caveat.SHORT_WINDOW)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def duration_s(workload: Workload, predicted: Measurement) -> float:
    """Return how long the live replay of what was predicted takes, in real time."""
    jumps = workload.plan.clock is ClockKind.VIRTUAL
    measured_s = predicted.busy_s if jumps else predicted.clock_s
    # What comes before a window is replayed with it.
    lead_in_s = sum(window.lead_in_s for window in workload.windows)
    return measured_s * (1 + lead_in_s / sum(w.length_s for w in workload.windows))


def cold_cost_s(runner: TrialRunner, plan: RacePlan, settings: Sequence[EngineLimits]) -> float:
    """Return what starting and replaying settings cold will take."""
    engine = runner.engine
    return sum(engine.cold_start_s(limits) + plan.replay_s(limits) for limits in settings)


def reserve_s(runner: TrialRunner, plan: RacePlan) -> float:
    """Return the time to keep for the cold engines, 0 where the time cannot bear them as well.

    Before the race; the settings begin with what is thought best.
    """
    pair = (plan.settings[0], runner.context.space.current)
    left_s, wanted_s = runner.context.left_s, cold_cost_s(runner, plan, pair)
    # One round tells something where all is predicted.
    rounds = 1 if plan.predicted else MIN_ROUNDS
    least_s = rounds * _round_s(plan, plan.settings)
    is_small = wanted_s < MAX_COLD_RATIO * left_s
    return wanted_s if is_small and wanted_s + least_s < left_s else 0.0


def fitting(runner: TrialRunner, plan: RacePlan) -> RacePlan:
    """Return who races: fewer where the time would not hold two rounds of all, and the cold.

    The last before the current one go first, and somebody always races against it.
    """
    settings = list(plan.settings)
    cold_s = cold_cost_s(runner, plan, (settings[0], runner.context.space.current))
    left_s = runner.context.left_s
    while len(settings) > 2 and MIN_ROUNDS * _round_s(plan, settings) + cold_s > left_s:
        del settings[-2]
    return replace(plan, settings=tuple(settings))


def _round_s(plan: RacePlan, settings: Sequence[EngineLimits]) -> float:
    return sum(plan.replay_s(limits) for limits in settings)


def fly_pilot(runner: TrialRunner, observe: Observe | None = None) -> float:
    """Return the real time that a second of the trace costs at the current limits.

    Counted by the work that was done when the pilot ended, not by who was answered in full.
    `observe` receives its steps.

    Raises: EngineError if the engine fails at them.
    """
    context, engine = runner.context, runner.engine
    trace, current = context.trace, context.space.current
    stretch = busiest(trace, min(trace.duration_s, 60.0) or 1.0)
    pilot = stretch.of(context.aim.plan.on(trace))
    engine.use("pilot", pilot)
    cut = CutRule(max_wall_s=context.budget.pilot_s)
    plan = replace(context.aim.plan, cut=cut, keep_steps=observe is not None)
    logs: list[ReplayLog] = []
    measured = engine.measure(["pilot"], current, plan, (), on_log=logs.append)
    if isinstance(measured, Failure):
        raise EngineError(
            f"the engine failed at the current configuration: {measured.cause}",
            "run it once with `tune replay` and look at the engine's log",
        )
    (log,) = logs
    if observe is not None:
        observe(current, log)
    done = share_done(pilot, log.timelines, log.steps) if measured.cut_reason else 1.0
    if done == 0:
        raise EngineError(
            f"the engine computed nothing in {measured.wall_s:.0f} s of the trace",
            "give --budget more, or look at the engine's log",
        )
    wall_ratio = measured.wall_s / (done * max(pilot.duration_s, INSTANT_S))
    context.listener.note(f"pilot: a second of the trace costs {wall_ratio:.2g} s here")
    return wall_ratio


def search_windows(runner: TrialRunner) -> tuple[Window, ...]:
    """Return the windows of a live search: as asked for, or what the time holds.

    Where it holds no search, the fewest requests that show anything, as far as it goes.

    Raises: EngineError.
    """
    context, trace = runner.context, runner.context.trace
    if context.aim.window is not None:
        return (context.aim.window,)
    wall_ratio, least = fly_pilot(runner), context.aim.least_requests
    try:
        return choose_windows(trace, wall_ratio, context.left_s, least, REPLAYS_UNPREDICTED)
    except UsageError as short:
        context.listener.note(f"{short.message}: little can be said in this time; {short.hint}")
        context.caveats.add(Caveat.BUDGET_SPENT)
        return (least_window(trace, least),)


def race_windows(context: RunContext, wall_ratio: float) -> tuple[Window, ...]:
    """Return as much of the trace as the time is thought to hold a race of.

    `wall_ratio` is what a second of it costs, by a pilot.
    """
    try:
        least = context.aim.least_requests
        return choose_windows(context.trace, wall_ratio, context.left_s, least)
    except UsageError:
        # By the pilot nothing fits; predictions know better, and what does not is shortened.
        return (busiest(context.trace, context.trace.duration_s),)


def plan_race(
    context: RunContext,
    predictor: Predictor,
    aim: Aim,
    settings: Sequence[EngineLimits],
    wanted: tuple[Window, ...],
    life_s: float,
) -> RacePlan | None:
    """Return the race on the wanted windows, or on the busiest stretch that the time holds.

    Of what comes before them as much is replayed as a request lives, `life_s`.

    None where it holds two rounds of the first of the settings and the current one on none: a
    window with too few requests tells nothing, of an SLO at least.

    Raises: ShadowError, UsageError.
    """
    pair = list(dict.fromkeys([settings[0], context.space.current]))
    windows = wanted
    while True:
        windows = tuple(window.led_in_by(life_s) for window in windows)
        try:
            workload = Workload.of(WINDOW, context.trace, windows, aim)
        except TooFewSamplesError:
            return None
        plan = race_on(context, predictor, pair, workload)
        if _holds_rounds(plan, pair):
            break
        least = aim.least_requests
        shorter = shorter_window(context.trace, windows, SHORTER_RATIO, least)
        if shorter is None:
            return None
        windows = (shorter,)
    if windows[0].length_s != wanted[0].length_s:
        context.listener.note(
            f"two rounds of {window_text(wanted, context.trace)} do not fit into the time; "
            f"racing {window_text(windows, context.trace)}"
        )
    return race_on(context, predictor, settings, workload, plan)


def race_on(
    context: RunContext,
    predictor: Predictor,
    settings: Sequence[EngineLimits],
    workload: Workload,
    known: RacePlan | None = None,
) -> RacePlan:
    """Return the race of settings on a workload, with what is predicted of it.

    What a plan `known` for the same workload holds is not predicted again.

    Raises: ShadowError, UsageError.
    """
    predicted = {} if known is None else dict(known.predicted)
    for limits in settings:
        if limits not in predicted:
            outcome = predictor.measure(workload.pieces, limits, workload.plan, workload.slos)
            if isinstance(outcome, Measurement):
                predicted[limits] = outcome
    return RacePlan(context, tuple(settings), workload, predicted)


def _holds_rounds(plan: RacePlan, pair: Sequence[EngineLimits]) -> bool:
    """Whether the time holds two rounds of the pair; not where nothing is predicted of one."""
    if not set(pair) <= set(plan.predicted):
        return False
    replays_s = [duration_s(plan.workload, plan.predicted[limits]) for limits in pair]
    return MIN_ROUNDS * sum(replays_s) < ROUNDS_SHARE * plan.context.left_s
