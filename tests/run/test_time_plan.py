"""As many race as the time holds, and the cold engines are kept time for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.optional import not_none
from support.run_parts import ToyPredictor, ToyRun, a_profile, a_run, a_space
from support.toy import ToySource
from support.traffic import replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.run.options import TuningOptions
from tuner.run.start import aim_of
from tuner.run.time_plan import (
    MIN_ROUNDS,
    RacePlan,
    cold_cost_s,
    fitting,
    plan_race,
    reserve_s,
    tell_short_windows,
)
from tuner.search.budget import warmed
from tuner.search.trials import Phase
from tuner.traffic.traces import LoadModel
from tuner.traffic.windows import Window, WindowChoice, WindowKind, whole

CURRENT, BEST, SECOND, THIRD = (EngineLimits(cap, 2048) for cap in (16, 9, 10, 12))
FIELD = [BEST, SECOND, THIRD, CURRENT]
TRACE = steady(60, per_s=14.0, prompt=110, output=35)


def planned(run: ToyRun, left_s: float, *replays_s: float) -> RacePlan:
    """Return a race whose replays are predicted to take so long, with so much time left."""
    run.context.stopwatch.total_s += left_s - run.context.left_s
    replayed = measure([replay_toy(TRACE, CURRENT)])
    predicted = {
        limits: replace(replayed, busy_s=took_s)
        for limits, took_s in zip(FIELD, replays_s, strict=True)
    }
    return run.plan(*FIELD, predicted=predicted)


def planned_on(
    run: ToyRun, windows: tuple[Window, ...], life_s: float = math.inf
) -> RacePlan | None:
    """Return the race of two on windows, where a request lives so long."""
    predictor, context = ToyPredictor(a_profile()), run.context
    return plan_race(context, predictor, context.aim, [BEST, CURRENT], windows, life_s)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ToyRun]:
    with a_run(tmp_path, TRACE, a_space(CURRENT), ToySource()) as run:
        yield run


@pytest.mark.parametrize(
    ("left_s", "field"),
    [
        # Two rounds of 10 + 10 + 10 + 30 s, and 10 + 30 s on cold engines that start at once.
        *((161.0, FIELD), (159.0, [BEST, SECOND, CURRENT]), (139.0, [BEST, CURRENT])),
        # Somebody races against the current one, however little time there is.
        (5.0, [BEST, CURRENT]),
    ],
)
def test_as_many_race_as_two_rounds_fit_into_the_time(
    run: ToyRun, left_s: float, field: list[EngineLimits]
) -> None:
    plan = planned(run, left_s, 10.0, 10.0, 10.0, 30.0)
    assert list(fitting(run.runner, plan).settings) == field


def test_a_round_comes_before_the_cold_engines_or_two_where_nothing_is_predicted(
    run: ToyRun,
) -> None:
    plan = replace(planned(run, 81.0, 10.0, 10.0, 10.0, 30.0), settings=(BEST, CURRENT))
    assert reserve_s(run.runner, plan) == cold_cost_s(run.runner, plan, (BEST, CURRENT)) == 40.0
    planned(run, 79.0, 10.0, 10.0, 10.0, 30.0)
    assert reserve_s(run.runner, plan) == 0.0
    run.trial(BEST, Phase.RACE, 1)
    live = replace(plan, predicted={})
    round_s = sum(live.replay_s(limits) for limits in live.settings)
    cold_s = cold_cost_s(run.runner, live, (BEST, CURRENT))
    for rounds, kept_s in ((1.5, 0.0), (90.0, cold_s)):
        planned(run, cold_s + rounds * round_s, 10.0, 10.0, 10.0, 30.0)
        assert reserve_s(run.runner, live) == pytest.approx(kept_s)


def test_what_a_replay_took_counts_more_than_what_was_predicted(run: ToyRun) -> None:
    plan = planned(run, 100.0, 7.0, 7.0, 7.0, 7.0)
    assert plan.replay_s(BEST) == 7.0
    record = run.trial(BEST, Phase.RACE, 1)
    assert plan.replay_s(BEST) == (record.measurement or {})["wall_s"] < 7.0
    assert plan.replay_s(SECOND) == 7.0
    # Nothing is known of this one but what others took.
    assert plan.replay_s(EngineLimits(1, 512)) == plan.usual_s


@pytest.mark.slow
@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=4), st.floats(0, 2000), st.data())
def test_more_time_never_means_fewer_who_race(
    tmp_path_factory: pytest.TempPathFactory,
    replays_s: list[float],
    left_s: float,
    data: st.DataObject,
) -> None:
    more_s = data.draw(st.floats(left_s, 4000))
    with a_run(tmp_path_factory.mktemp("r"), TRACE, a_space(CURRENT), ToySource()) as run:
        few = fitting(run.runner, planned(run, left_s, *replays_s)).settings
        many = fitting(run.runner, planned(run, more_s, *replays_s)).settings
    assert many[: len(few) - 1] == few[:-1]
    assert few[-1] == many[-1] == CURRENT
    if len(few) > 2:
        assert MIN_ROUNDS * sum(replays_s[FIELD.index(s)] for s in few) <= left_s


def test_a_race_that_does_not_fit_is_cut_to_a_stretch_that_does(run: ToyRun) -> None:
    """Two rounds of the whole trace take some seconds on the toy's clock."""
    context, wanted = run.context, run.workload.windows
    whole_plan = not_none(planned_on(run, wanted))
    assert whole_plan.workload.windows == wanted
    took_s = sum(m.busy_s for m in whole_plan.predicted.values())
    context.stopwatch.total_s += 2.0 * took_s - context.left_s
    shorter = not_none(planned_on(run, wanted, 0.0))
    assert shorter.workload.requests < run.workload.requests
    assert 2 * sum(m.busy_s for m in shorter.predicted.values()) < context.left_s
    # How long that is beside the life of a request, where it is not all there is.
    assert whole_plan.lives is None
    (window,) = shorter.workload.windows
    current = shorter.predicted[CURRENT].latency("e2e_s", "p50")
    assert not_none(shorter.lives) == (window.length_s, current)
    # Where nothing is predicted, beside how long it was measured.
    live = replace(shorter, predicted={})
    assert live.lives is None
    measured = not_none(run.trial(CURRENT, Phase.CURRENT).measurement)
    assert not_none(live.lives) == (window.length_s, measured["e2e_s"]["p50"])
    context.stopwatch.total_s = 0.0
    assert planned_on(run, wanted) is None


def test_a_window_that_holds_less_than_three_lives_is_told_of(run: ToyRun) -> None:
    measured = not_none(run.trial(CURRENT, Phase.CURRENT).measurement)
    life_s = measured["e2e_s"]["p50"]
    for lives, is_told in ((3.1, False), (2.9, True)):
        window = Window(0.0, lives * life_s)
        workload = replace(run.workload, windows=(window,))
        tell_short_windows(replace(run.plan(BEST, CURRENT), workload=workload))
        assert (Caveat.SHORT_WINDOW in run.context.caveats) == is_told


def test_in_a_closed_loop_a_window_lasts_as_long_as_its_requests_take(run: ToyRun) -> None:
    """Not as long as they took to come when they were recorded."""
    measured = not_none(run.trial(CURRENT, Phase.CURRENT).measurement)
    closed = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=8)
    workload = replace(run.workload, windows=(Window(0.0, 1.0),), plan=closed)
    plan = replace(run.plan(BEST, CURRENT), workload=workload)
    assert plan.lives == (measured["virtual_duration_s"], measured["e2e_s"]["p50"])


def test_a_race_holds_as_many_requests_as_its_slos_need_or_none_is_run(tmp_path: Path) -> None:
    """A p99 needs a hundred; without the time for them the prediction stands."""
    trace = steady(400, per_s=14.0, prompt=110, output=35)
    slos = (Slo.parse("e2e_p99=60s"),)
    seen = []
    with a_run(tmp_path, trace, a_space(CURRENT), ToySource(), slos) as run:
        context, wanted = run.context, (whole(trace),)
        all_of_it = not_none(planned_on(run, wanted, 0.0))
        took_s = sum(m.busy_s for m in all_of_it.predicted.values())
        for share in (3.0, 2.0, 1.5, 1.0, 0.5, 0.1):
            context.stopwatch.total_s += share * took_s - context.left_s
            plan = planned_on(run, wanted, 0.0)
            seen.append(0 if plan is None else plan.workload.requests)
    assert all(count == 0 or count >= 100 for count in seen)
    assert seen[-1] == 0 < seen[0]
    assert any(100 <= count < 400 for count in seen)


def test_what_comes_before_a_window_is_replayed_for_as_long_as_a_request_lives(
    run: ToyRun,
) -> None:
    """It is not measured, and takes its part of the time."""
    middle = whole(run.context.trace).end_s / 2
    wanted = (warmed(Window(0.6 * middle, 2.0 * middle)),)
    bare = (wanted[0].with_lead_in(0.0),)
    long = not_none(planned_on(run, wanted))
    short = not_none(planned_on(run, wanted, 0.1 * middle))
    plan = not_none(planned_on(run, bare))
    assert long.workload.windows == wanted
    assert short.workload.windows[0].lead_in_s == pytest.approx(0.1 * middle)
    for warm in (long, short):
        assert warm.workload.requests == plan.workload.requests
        assert warm.workload.scoring == plan.workload.scoring
        (piece,) = warm.workload.pieces
        assert len(piece) > piece.measured == plan.workload.requests
    assert long.replay_s(CURRENT) > 1.2 * plan.replay_s(CURRENT)


def test_a_closed_loop_replays_nothing_before_a_window(run: ToyRun) -> None:
    """How many requests come within a time there is the engine's speed."""
    trace, closed = run.context.trace, LoadModel.CLOSED
    chosen = WindowChoice(WindowKind.PEAK, trace.duration_s / 3)
    options = TuningOptions(trace, window=chosen, load_model=closed, concurrency=8)
    wanted = not_none(aim_of(options, trace).window)
    assert wanted.start_s > 0
    assert wanted.lead_in_s == 0
    assert aim_of(TuningOptions(trace, window=chosen), trace).window == warmed(wanted)
    aim = replace(run.context.aim, plan=ReplayPlan(load_model=closed, concurrency=8))
    predictor, windows = ToyPredictor(a_profile()), (warmed(wanted),)
    raced = not_none(plan_race(run.context, predictor, aim, [BEST, CURRENT], windows, math.inf))
    assert raced.workload.windows == (wanted,)
