"""Few settings teach a lot, and a shadow that is too wrong is not trusted."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.optional import not_none
from support.run_parts import a_profile, a_run, a_space
from support.toy import ToyCosts, ToyEngine, ToySource
from support.traffic import kept, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch, Step
from tuner.engine.steps import StepLog
from tuner.errors import ShadowError, TooFewSamplesError
from tuner.replay.plan import ReplayPlan
from tuner.run.calibrate.blocks import CALIBRATION_SHARE, Blocks, _outlook
from tuner.run.calibrate.calibrator import Calibrator
from tuner.run.calibrate.contenders import Contenders, calibration_settings
from tuner.run.context import Workload
from tuner.run.rounds import predicted_part
from tuner.run.time_plan import fly_pilot, race_windows
from tuner.search.budget import Aim, warmed
from tuner.search.objective import Objective
from tuner.search.space import TOKEN_BUDGETS, SearchSpace
from tuner.shadow.calibration import (
    LARGEST_ERROR_RATIO,
    MIN_ERROR_RATIO,
    Calibration,
    check_rank_by,
    error_ratio,
)
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.speed import Uncertainty
from tuner.shadow.step_model import FitError, StepModel
from tuner.traffic.resample import at_load
from tuner.traffic.traces import LoadModel
from tuner.traffic.windows import Window

CEILING = EngineLimits(512, 16384)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    ladder = draw(st.lists(st.integers(1, 128), min_size=1, max_size=8, unique=True))
    budgets = draw(st.lists(st.sampled_from(TOKEN_BUDGETS), min_size=1, unique=True))
    current = EngineLimits(draw(st.integers(1, 256)), draw(st.sampled_from(TOKEN_BUDGETS)))
    top = max(current.max_num_seqs, 4 * max(ladder))
    most = max(current.max_num_batched_tokens, *budgets, top)
    ceiling = EngineLimits(top, most)
    return SearchSpace(current, tuple(sorted(ladder)), tuple(sorted(budgets)), ceiling)


@given(spaces(), st.floats(0, 512))
def test_settings_are_few_distinct_startable_and_none_that_was_replayed(
    space: SearchSpace, running: float
) -> None:
    found = calibration_settings(space, running)
    assert len(set(found)) == len(found) <= 2
    assert not {space.current, space.ceiling} & {*found}
    for limits in found:
        assert limits.within(space.ceiling)
        assert limits.max_num_batched_tokens >= limits.max_num_seqs


@pytest.mark.parametrize("load", [1.0, 2.0])
def test_calibrating_on_a_window_of_thinned_traffic_is_on_its_lead_in_too(load: float) -> None:
    """More of it is more of what it is a part of; rows of a block are those of the replay."""
    thinned, window = at_load(steady(400, 4.0), 0.5), warmed(Window(40.0, 70.0))
    part = predicted_part(thinned, Aim(Objective.BALANCED, (), ReplayPlan(), window))
    loaded = at_load(part, load)
    assert loaded.measured == len(loaded)
    assert float(loaded.due_s[0]) < window.lead_in_s


def test_calibrating_keeps_as_many_in_flight_as_a_closed_loop_recorded(tmp_path: Path) -> None:
    """Also those who came before the window, or before what a pilot replays."""
    trace = replace(steady(600, per_s=6.0), e2e_s=np.full(600, 20.0))
    plan, window = ReplayPlan(LoadModel.CLOSED), Window(50.0, 60.0)
    aim = Aim(Objective.BALANCED, (), plan, window)
    _, of_window = Workload.of_whole(trace, aim).pieces[0].recorded_concurrency()
    _, in_flight = predicted_part(trace, aim).recorded_concurrency()
    np.testing.assert_array_equal(in_flight, of_window)
    with a_run(tmp_path, trace, a_space(EngineLimits(16, 2048))) as run:
        context = replace(run.context, aim=replace(aim, window=None))
        fly_pilot(replace(run.runner, context=context))
        _, in_flight = run.engine._traces["pilot"].recorded_concurrency()
    assert in_flight[0] > 100


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_steps_of_blocks_are_kept_whoever_may_share_them(
    tmp_path: Path, *, is_shared: bool
) -> None:
    current, kept = EngineLimits(16, 2048), set[EngineLimits]()
    trace = steady(200, per_s=6.0)
    with a_run(tmp_path, trace, a_space(current), is_shared=is_shared) as run:
        calibrator = Calibrator.of(run.engine.start_below(current), current, {})
        calibrator.keep = lambda limits, _: kept.add(limits)
        Blocks(run.runner, calibrator, Predictor)._first()
    assert kept == {limits for limits, _ in calibrator.calibration.steps}
    assert {current, run.context.space.ceiling} <= kept


@pytest.mark.parametrize(
    ("left_open", "share"),
    [(Uncertainty(setting=0.2), 0.0), (Uncertainty(start=0.5, setting=0.001), 1.0)],
)
def test_blocks_are_worth_what_they_can_tell_and_not_what_is_each_settings_own(
    tmp_path: Path, left_open: Uncertainty, share: float
) -> None:
    current = EngineLimits(4, 2048)
    with a_run(tmp_path, steady(400, per_s=9.0), a_space(current)) as run:
        predictor = Predictor(replace(a_profile(), uncertainty=left_open))
        found = Contenders(run.context).of(predictor)
    assert 0.1 < found.loss < math.inf
    assert found.open_loss == pytest.approx(share * found.loss, abs=0.1 * found.loss)


def test_the_outlook_is_of_the_windows_that_will_race(tmp_path: Path) -> None:
    rate, trace = 2.0, steady(2000, per_s=10.0)
    space = a_space(EngineLimits(16, 2048))
    with a_run(tmp_path, trace, space, budget_s=1000.0) as run:
        run.engine.ensure_started()
        said = _outlook(run.runner, rate)
        run.context.stopwatch.total_s -= CALIBRATION_SHARE * run.context.budget.total_s
        windows = race_windows(run.context, rate)
    replay_s = rate * sum(window.length_s + window.lead_in_s for window in windows)
    told = not_none(re.search(r"takes about ([0-9.]+) s", said))
    assert float(told[1]) == pytest.approx(replay_s, rel=0.02)


def test_settings_are_spread_over_caps_and_budgets() -> None:
    space = SearchSpace(
        EngineLimits(256, 2048), (1, 2, 4, 8, 16, 32), (512, 1024, 2048, 4096), CEILING
    )
    middle, low = calibration_settings(space, most_running=90.0)
    assert middle == EngineLimits(32, 512)
    assert low == EngineLimits(2, 4096)
    # Of little traffic, that lies between what ran and the lowest.
    assert calibration_settings(space, most_running=9.0)[0] == EngineLimits(4, 512)


def test_rounds_keep_the_machines_drift_from_looking_like_a_setting() -> None:
    """Planted: it slows down by a third while a round lasts, and is quick again in between.

    In one round the setting replayed last looks a third slower than the model; in as many
    rounds as there are settings, each of them first in turn, none does.
    """
    one, three = (
        taught_in_rounds(rounds, slowing_ratio=1.33).fit.heldout_config_ratio
        for rounds in (1, 3)
    )
    assert not_none(one) > 0.2
    assert not_none(three) < 0.1


def taught_in_rounds(rounds: int, slowing_ratio: float) -> Profile:
    """Return the profile of a machine that slows down within every round."""
    settings = [EngineLimits(32, 2048), EngineLimits(16, 1024), EngineLimits(8, 512)]
    trace, calibration = steady(200, per_s=40.0), a_calibration(ToySource())
    for number in range(rounds):
        turn = number % len(settings)
        for place, limits in enumerate((*settings[turn:], *settings[:turn])):
            steps = kept(replay_toy(trace, limits, ToySource(), ReplayPlan(keep_steps=True)))
            slow = slowing_ratio ** (place / (len(settings) - 1))
            slowed = replace(steps, duration_s=steps.duration_s * slow)
            calibration = calibration.and_steps(limits, [slowed])
    return calibration.profile()


def test_the_stated_error_is_that_of_the_metrics_and_else_of_the_steps() -> None:
    assert error_ratio(a_profile(0.07)) == 0.07
    assert error_ratio(a_profile(0.001)) == MIN_ERROR_RATIO
    without = replace(a_profile(), metric_error_ratio=None)
    by_config = replace(without, fit=FitError(100, 0.5, 0.11, 0.13, 0.0))
    assert error_ratio(by_config) == 0.13
    assert error_ratio(replace(by_config, fit=FitError(100, 0.5, 0.11, None, 0.0))) == 0.11


def test_a_shadow_that_is_too_wrong_ranks_nothing() -> None:
    check_rank_by(a_profile(LARGEST_ERROR_RATIO))
    with pytest.raises(ShadowError, match="wrong by 21% on what it was calibrated with"):
        check_rank_by(a_profile(0.21))


def a_calibration(source: ToySource) -> Calibration:
    shape = ToyEngine(source, CEILING).shape()
    starts = (KvStart(CEILING, 1000),)
    return Calibration(shape, starts, (), EngineLimits(16, 2048), {"model": "toy"})


def test_the_toys_costs_are_learnt_from_its_steps() -> None:
    """The toy's costs are linear, so a fit on two settings predicts any batch."""
    costs = ToyCosts()
    source, calibration = ToySource(costs), a_calibration(ToySource())
    for limits in (EngineLimits(32, 2048), EngineLimits(8, 512)):
        plan = ReplayPlan(keep_steps=True)
        trace = steady(300, per_s=40.0, prompt=100, output=20)
        steps = kept(replay_toy(trace, limits, source, plan))
        calibration = calibration.and_steps(limits, [steps])
    profile = calibration.profile()
    assert profile.calibrated_on == ("32/2048", "8/512")
    assert profile.current_limits == EngineLimits(16, 2048)
    for decodes, tokens in ((3, 0), (16, 0), (5, 200), (0, 100)):
        seqs = 1 if tokens else 0
        batch = Batch(decodes, tokens, seqs, decodes * 100, tokens * 50, 0, 0)
        expected = costs.seconds(decodes, tokens)
        assert profile.step_model.step_s(batch) == pytest.approx(expected, rel=0.05)


def test_a_start_is_kept_once() -> None:
    calibration = a_calibration(ToySource())
    more = calibration.and_start(EngineLimits(8, 512), 1200)
    assert more.starts == (KvStart(CEILING, 1000), KvStart(EngineLimits(8, 512), 1200))
    assert more.and_start(EngineLimits(8, 512), 1200) == more


def test_a_kept_profile_is_corrected_by_how_long_steps_take_now() -> None:
    """The machine that the profile was made on took twice as long."""
    calibration, limits = a_calibration(ToySource()), EngineLimits(8, 512)
    log = replay_toy(steady(300, per_s=40.0), limits, ToySource(), ReplayPlan(keep_steps=True))
    taught = calibration.and_steps(limits, [kept(log)])
    right = taught.profile()
    wrong = replace(right, step_model=right.step_model.scaled(2.0))
    found = taught.corrected(wrong)
    batch = Batch(5, 0, 0, 500, 0, 0, 0)
    expected = right.step_model.step_s(batch)
    assert found.step_model.step_s(batch) == pytest.approx(expected, rel=0.02)
    assert found.fit == wrong.fit
    with pytest.raises(TooFewSamplesError):
        calibration.corrected(wrong)


def test_prompts_into_an_idle_asynchronous_engine_take_what_launching_them_took() -> None:
    """Such a prompt's time is that of two turns, of which the first has no batch."""
    model, limits = StepModel.linear(0.006, 0.0001, 0.00002), EngineLimits(8, 2048)
    steps, launch_s = StepLog(keep=True), 0.012
    now_s, prompt = 0.0, Batch(0, 600, 1, 0, 600 * 601 // 2, 0, 0)
    for _ in range(40):
        left_s = model.step_s(prompt) - launch_s
        turns = [
            Step(launch_s, [], None, 0, 0, 0.0, is_late=True),
            Step(left_s, [], prompt, 1, 0, 0.0, launch_s),
        ]
        for context in range(600, 616):
            batch = Batch(1, 0, 0, context, 0, 0, 0)
            turns.append(Step(model.step_s(batch), [], batch, 1, 0, 0.0, 0.002))
        for step in turns:
            now_s += step.duration_s
            steps.append(step, now_s)
    seen = not_none(steps.finish()[1])
    calibration = a_calibration(ToySource()).and_steps(limits, [seen])
    profile = replace(a_profile(), step_model=model)
    assert calibration.times_of(profile) == pytest.approx(1.0)


def test_nothing_is_learnt_of_nothing() -> None:
    with pytest.raises(TooFewSamplesError):
        a_calibration(ToySource()).profile()
