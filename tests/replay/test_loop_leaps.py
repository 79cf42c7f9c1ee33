"""Like steps that an engine takes at once leave the same replay as one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.leaping import LeapingSource
from support.replay_parts import plans, traces
from support.toy import ToyCosts, ToySource
from support.traffic import a_trace, kept, replay_toy
from tuner.engine.limits import EngineLimits
from tuner.replay.arrivals import ClockKind
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.traffic.traces import Trace

LIMITS = EngineLimits(8, 256)
SLOW = ToySource(ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0))
# Costs that no sum of round numbers equals, so that no step ends just when something is due.
UNROUND = ToyCosts(base_s=0.0101237, per_seq_s=0.00051713, per_prefill_token_s=0.000101931)
CUT_LATE = ReplayPlan(cut=CutRule(late_s=0.01, allowed_late=1))


@given(
    trace=traces(),
    plan=plans(),
    cap=st.integers(1, 6),
    num_blocks=st.sampled_from([10, 14, 1000]),
)
@settings(deadline=None, max_examples=200)
def test_like_steps_taken_at_once_change_nothing(
    trace: Trace, plan: ReplayPlan, cap: int, num_blocks: int
) -> None:
    limits = EngineLimits(cap, 32)
    singly, at_once = (
        replay_toy(trace, limits, make(UNROUND, num_blocks=num_blocks), plan)
        for make in (ToySource, LeapingSource)
    )
    a, b = singly.timelines, at_once.timelines
    assert singly.cut_reason == at_once.cut_reason
    assert a.outcome.tolist() == b.outcome.tolist()
    assert a.output_tokens.tolist() == b.output_tokens.tolist()
    for column in ("due_s", "sent_s", "first_s", "last_s"):
        expected = pytest.approx(getattr(a, column).tolist(), nan_ok=True)
        assert getattr(b, column).tolist() == expected
    assert at_once.clock_s == pytest.approx(singly.clock_s)
    assert b.gap_s.total_weight == a.gap_s.total_weight
    assert b.gap_s.values @ b.gap_s.weights == pytest.approx(a.gap_s.values @ a.gap_s.weights)
    one, many = singly.steps, at_once.steps
    for name in ("steps", "prefill_tokens", "preempted", "max_step_tokens"):
        assert getattr(one, name) == getattr(many, name)
    assert dict(many.peaks) == pytest.approx(dict(one.peaks))
    assert many.decode_steps.total_weight == one.decode_steps.total_weight
    for name, level in one.levels.items():
        if level.total_weight:
            mean = many.levels[name].mean().value
            assert mean == pytest.approx(level.mean().value)


def test_a_request_that_was_sent_too_late_ends_the_leap_as_it_ends_the_steps() -> None:
    """The second is due during the first step, which takes longer than it may wait."""
    trace = a_trace([0.0, 1e-9, 0.25], output=25)
    singly, at_once = (
        replay_toy(trace, EngineLimits(1, 32), make(UNROUND), CUT_LATE)
        for make in (ToySource, LeapingSource)
    )
    assert at_once.cut_reason == singly.cut_reason
    assert at_once.timelines.output_tokens.tolist() == singly.timelines.output_tokens.tolist()
    assert at_once.clock_s == pytest.approx(singly.clock_s)


def test_like_steps_are_taken_at_once_up_to_the_next_arrival_and_no_further() -> None:
    """Negative control of the test above: there are runs, and they end where they must."""
    plan, source = ReplayPlan(keep_steps=True), LeapingSource(SLOW.costs)
    steps = kept(replay_toy(a_trace([0.0], output=40), LIMITS, source, plan))
    assert steps.repeats.tolist() == [1, 39]
    steps = kept(replay_toy(a_trace([0.0, 1.05], output=40), LIMITS, source, plan))
    # A prefill and ten decodes until the second has come, which then prefills.
    assert steps.repeats.tolist() == [1, 10, 1, 28, 11]
    hurried = replace(plan, timeout_s=2.05)
    log = replay_toy(a_trace([0.0], output=40), LIMITS, source, hurried)
    assert log.timelines.output_tokens.tolist() == [21]
    assert log.clock_s == pytest.approx(2.1)


def test_nothing_is_taken_at_once_on_the_wall_clock() -> None:
    plan = ReplayPlan(clock=ClockKind.WALL, keep_steps=True)
    steps = kept(replay_toy(a_trace([0.0], output=40), LIMITS, LeapingSource(), plan))
    assert steps.repeats.tolist() == [1] * 40
