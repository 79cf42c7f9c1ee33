"""A replay is cut only where all is decided, and when its caller or real time says so."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import ToyCosts, ToySource
from support.traffic import ToyPrompts, a_trace, replay_toy, steady, warm_session
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import Progress, replay
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.timeline import Outcome
from tuner.stats import quantile

LIMITS = EngineLimits(8, 256)
SLOW = ToySource(ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0))


@given(
    seed=st.integers(0, 200),
    cap=st.integers(1, 8),
    q=st.sampled_from([0.5, 0.9, 0.95]),
    late_s=st.floats(0.1, 20),
    n=st.integers(20, 80),
)
@settings(deadline=None, max_examples=120)
def test_a_cut_is_certain_and_nothing_certain_is_missed(
    seed: int, cap: int, q: float, late_s: float, n: int
) -> None:
    trace = steady(n, 8.0, seed=seed)
    limits = EngineLimits(cap, 64)
    allowed = n - math.ceil(q * n - 1e-9)
    rule = CutRule(late_s=late_s, allowed_late=allowed)
    cut = replay_toy(trace, limits, plan=ReplayPlan(cut=rule)).cut_reason is not None
    e2e_s = replay_toy(trace, limits).timelines.e2e_s
    assert cut == (quantile(e2e_s, q).value > late_s)


@given(
    seed=st.integers(0, 200),
    late_s=st.floats(0.5, 5),
    timeout_s=st.floats(0.5, 8),
    max_model_len=st.integers(15, 60),
)
@settings(deadline=None, max_examples=60)
def test_a_cut_is_certain_though_clients_leave_and_requests_are_refused(
    seed: int, late_s: float, timeout_s: float, max_model_len: int
) -> None:
    trace = steady(60, 12.0, seed=seed)
    source, limits = ToySource(max_model_len=max_model_len), EngineLimits(2, 64)
    rule = CutRule(late_s=late_s, allowed_late=60 - math.ceil(0.9 * 60))
    cut = replay_toy(trace, limits, source, ReplayPlan(timeout_s=timeout_s, cut=rule))
    whole = replay_toy(trace, limits, source, ReplayPlan(timeout_s=timeout_s))
    if cut.cut_reason is not None:
        assert quantile(whole.timelines.e2e_s, 0.9).value > late_s


@pytest.mark.parametrize("cut", [CutRule(late_s=1.5, allowed_late=1), CutRule(max_clock_s=3.5)])
def test_a_turn_that_was_recorded_before_the_window_cuts_no_replay_of_it(cut: CutRule) -> None:
    """However late it is sent: it is not among those that are measured."""
    two_s = ToySource(ToyCosts(base_s=2.0, per_seq_s=0.0, per_prefill_token_s=0.0))
    log = replay_toy(warm_session(), EngineLimits(1, 64), two_s, ReplayPlan(cut=cut))
    assert log.cut_reason is None
    assert (log.timelines.due_s.tolist(), log.timelines.last_s.tolist()) == ([2.0], [5.0])


def test_the_silence_before_the_first_request_is_not_held_against_a_configuration() -> None:
    plan = ReplayPlan(cut=CutRule(max_clock_s=10.0))
    early, late = (a_trace([at_s + i / 4 for i in range(20)]) for at_s in (0.0, 100.0))
    assert replay_toy(early, LIMITS, plan=plan).cut_reason is None
    assert replay_toy(late, LIMITS, plan=plan).cut_reason is None
    assert replay_toy(late, EngineLimits(1, 64), SLOW, plan).cut_reason is None
    slower = ToySource(SLOW.costs.scaled(2))
    assert replay_toy(late, EngineLimits(1, 64), slower, plan).cut_reason is not None


def test_a_cut_leaves_the_engine_idle_and_the_rest_aborted() -> None:
    engine = SLOW.start({}, LIMITS)
    trace = a_trace([0.0] * 20, output=50)
    plan = ReplayPlan(cut=CutRule(max_clock_s=1.0))
    log = replay(engine, trace, ToyPrompts(trace), plan)
    assert log.cut_reason == "took longer than 1 s on the replay's clock"
    assert log.timelines.count(Outcome.ABORTED) == 20
    assert log.clock_s == pytest.approx(1.1)
    assert not engine.has_work()


def test_real_time_may_run_out_too() -> None:
    log = replay_toy(steady(2000, 5.0), LIMITS, plan=ReplayPlan(cut=CutRule(max_wall_s=1e-6)))
    assert log.cut_reason is not None
    assert log.steps.steps <= 1


def test_the_caller_hears_and_may_stop() -> None:
    heard: list[Progress] = []

    def listen(progress: Progress) -> bool:
        heard.append(progress)
        return False

    trace = steady(20_000, 5.0)
    engine = ToySource().start({}, LIMITS)
    log = replay(engine, trace, ToyPrompts(trace), ReplayPlan(), listen)
    assert log.cut_reason == "stopped by the caller"
    assert len(heard) == 1
    assert 0 < heard[0].ended <= heard[0].sent < heard[0].offered == 20_000
    assert not engine.has_work()
