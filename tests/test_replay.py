"""A replay loses no request, counts from due times, and is cut only where all is decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leaping import LeapingSource
from toy import ToyCosts, ToyEngine, ToySource
from traffic import ToyPrompts, a_trace, kept, replay_toy, steady

from tuner.arrivals import ClockKind
from tuner.engine.protocol import EngineLimits, Prompt, Step
from tuner.errors import EngineError, ReplayError, TraceError, UsageError
from tuner.prompts import TokenPrompt
from tuner.replay import Progress, replay
from tuner.replay_plan import CutRule, ReplayPlan
from tuner.stats import quantile
from tuner.timeline import Outcome
from tuner.traces import LoadModel, Trace

LIMITS = EngineLimits(8, 256)
SLOW = ToySource(ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0))


def closed(n: int | None) -> ReplayPlan:
    return ReplayPlan(load_model=LoadModel.CLOSED, concurrency=n)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 25))
    column = st.lists(st.integers(1, 60), min_size=n, max_size=n)
    due_s = sorted(draw(st.lists(st.floats(0, 3), min_size=n, max_size=n)))
    e2e_s = draw(st.lists(st.floats(0.1, 2), min_size=n, max_size=n))
    return a_trace(due_s, draw(column), draw(column), e2e_s)


@st.composite
def plans(draw: st.DrawFn) -> ReplayPlan:
    model = draw(st.sampled_from(LoadModel))
    concurrency = draw(st.none() | st.integers(1, 9)) if model is LoadModel.CLOSED else None
    cut = CutRule(
        late_s=draw(st.none() | st.floats(0.01, 3)),
        allowed_late=draw(st.integers(0, 5)),
        max_clock_s=draw(st.none() | st.floats(0.01, 5)),
    )
    timeout_s = draw(st.none() | st.floats(0.01, 3))
    return ReplayPlan(load_model=model, concurrency=concurrency, timeout_s=timeout_s, cut=cut)


@given(trace=traces(), plan=plans(), cap=st.integers(1, 6), max_model_len=st.integers(20, 120))
@settings(deadline=None, max_examples=150)
def test_no_request_is_lost_whatever_becomes_of_it(
    trace: Trace, plan: ReplayPlan, cap: int, max_model_len: int
) -> None:
    source = ToySource(max_model_len=max_model_len)
    engine = source.start({}, EngineLimits(cap, 32))
    log = replay(engine, trace, ToyPrompts(trace), plan)
    line = log.timelines
    assert len(line) == len(trace) == sum(line.count(outcome) for outcome in Outcome)
    assert log.cut_reason is not None or line.count(Outcome.ABORTED) == 0
    assert not engine.has_work()
    done = line.completed
    assert line.output_tokens[done].tolist() == trace.output_tokens[done].tolist()
    too_long = trace.too_long(max_model_len)
    assert not (done & too_long).any()
    if log.cut_reason is None:
        assert line.count(Outcome.REFUSED) == too_long.sum()
    assert (line.send_lag_s >= 0).all()
    assert (line.first_s[done] > line.due_s[done]).all()
    assert (line.last_s[done] >= line.first_s[done]).all()
    if plan.timeout_s is not None and done.any():
        assert line.e2e_s.max() <= plan.timeout_s
    assert log.clock_s >= line.last_s[done].max(initial=0.0)


@given(trace=traces(), cap=st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_a_replay_repeats_itself(trace: Trace, cap: int) -> None:
    engine = ToySource().start({}, EngineLimits(cap, 32))
    first, second = (
        replay(engine, trace, ToyPrompts(trace), ReplayPlan()).timelines for _ in range(2)
    )
    assert first.last_s.tolist() == second.last_s.tolist()


def test_latency_counts_from_the_due_time_though_a_long_step_was_running() -> None:
    # The second is due in the midst of the first one's only step.
    log = replay_toy(a_trace([0.0, 0.03], output=1), LIMITS, SLOW)
    assert log.timelines.e2e_s.tolist() == pytest.approx([0.1, 0.17])
    assert log.timelines.send_lag_s.tolist() == pytest.approx([0.0, 0.07])


def test_hours_of_quiet_take_no_time() -> None:
    log = replay_toy(a_trace([0.0, 7200.0]), LIMITS)
    assert log.clock_s > 7200
    assert log.wall_s < 5
    assert log.steps.steps == 10
    assert log.arrivals_end_s == 7200.0


def test_requests_that_never_fit_are_refused_without_an_engine() -> None:
    log = replay_toy(a_trace([0.0, 1.0], prompt=9), LIMITS, ToySource(max_model_len=5))
    assert log.timelines.count(Outcome.REFUSED) == 2
    assert log.steps.steps == 0
    assert math.isnan(log.timelines.sent_s[0])


@given(trace=traces(), n=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_a_closed_loop_holds_its_number_until_requests_run_out(trace: Trace, n: int) -> None:
    plan = replace(closed(n), keep_steps=True)
    log = replay_toy(trace, EngineLimits(4, 64), plan=plan)
    line, steps = log.timelines, kept(log)
    in_flight = steps.running + steps.waiting
    starts_s = steps.end_s - steps.duration_s
    while_any_left = starts_s < line.due_s.max()
    assert (in_flight[while_any_left] == min(n, len(trace))).all()
    assert in_flight.max(initial=0) <= n
    assert (line.send_lag_s == 0).all()
    assert line.count(Outcome.COMPLETED) == len(trace)


def test_a_closed_loop_follows_the_recorded_number() -> None:
    # One in flight for ten seconds, three for ten more, then silence and two from 40 s on; as
    # the first three are still in flight then, there is no room for the others.
    trace = a_trace(
        [0.0, 10.0, 10.0, 40.0, 40.0], output=5000, e2e_s=[20.0, 10.0, 10.0, 5.0, 5.0]
    )
    source = ToySource(SLOW.costs, max_model_len=1_000_000)
    plan = replace(closed(None), cut=CutRule(max_clock_s=60.0))
    log = replay_toy(trace, LIMITS, source, plan)
    assert log.timelines.sent_s[:3].tolist() == pytest.approx([0.0, 10.0, 10.0], abs=0.11)
    assert np.isnan(log.timelines.sent_s[3:]).all()


def test_a_closed_loop_sends_all_of_a_recording_that_was_faster_than_this_engine() -> None:
    trace = a_trace([0.0, 0.1, 0.2], output=5, e2e_s=[0.01, 0.01, 0.01])
    log = replay_toy(trace, LIMITS, SLOW, closed(None))
    assert log.timelines.count(Outcome.COMPLETED) == 3
    assert log.steps.peaks["running"] == 1


def test_a_concurrency_that_was_not_recorded_is_refused_before_anything_runs() -> None:
    with pytest.raises(TraceError, match="e2e_s"):
        replay_toy(a_trace([0.0]), LIMITS, plan=closed(None))


def test_the_impatient_leave_whether_they_run_or_wait() -> None:
    trace = a_trace([0.0, 0.0, 0.05], output=[3, 30, 3])
    log = replay_toy(trace, EngineLimits(2, 64), SLOW, ReplayPlan(timeout_s=1.0))
    line = log.timelines
    assert line.outcome.tolist() == [Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.COMPLETED]
    assert line.output_tokens.tolist() == [3, 11, 3]
    queued = replay_toy(trace, EngineLimits(1, 64), SLOW, ReplayPlan(timeout_s=1.0)).timelines
    assert queued.outcome.tolist() == [
        Outcome.COMPLETED,
        Outcome.TIMED_OUT,
        Outcome.TIMED_OUT,
    ]
    assert queued.output_tokens[2] == 0


def test_who_left_makes_room_at_once() -> None:
    trace = a_trace([0.0, 0.9], output=[100, 3])
    line = replay_toy(trace, EngineLimits(1, 64), SLOW, ReplayPlan(timeout_s=1.0)).timelines
    assert line.outcome.tolist() == [Outcome.TIMED_OUT, Outcome.COMPLETED]
    assert line.last_s[1] == pytest.approx(1.4)


def test_an_answer_that_comes_after_its_client_left_is_not_completed() -> None:
    log = replay_toy(a_trace([0.0], output=1), LIMITS, SLOW, ReplayPlan(timeout_s=0.05))
    assert log.timelines.count(Outcome.TIMED_OUT) == 1


def test_patience_that_suffices_changes_nothing() -> None:
    trace = steady(100, 4.0)
    hurried = replay_toy(trace, LIMITS, plan=ReplayPlan(timeout_s=1e6))
    assert (
        hurried.timelines.last_s.tolist() == replay_toy(trace, LIMITS).timelines.last_s.tolist()
    )


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


def test_the_wall_clock_waits_for_real() -> None:
    trace = a_trace([0.0, 0.05, 0.1])
    log = replay_toy(trace, LIMITS, plan=ReplayPlan(clock=ClockKind.WALL))
    assert log.wall_s >= 0.1
    assert (log.timelines.sent_s >= trace.due_s).all()
    assert log.timelines.count(Outcome.COMPLETED) == 3
    assert log.clock_s <= log.wall_s


def test_the_prefix_cache_is_empty_at_the_start() -> None:
    engine = ToySource().start({}, LIMITS)
    trace = a_trace([0.0], prompt=64)
    for _ in range(2):
        log = replay(engine, trace, ToyPrompts(trace), ReplayPlan())
        assert log.steps.cached_tokens == 0


def test_an_engine_that_is_busy_is_not_replayed_on() -> None:
    engine = ToySource().start({}, LIMITS)
    engine.add(0, TokenPrompt([1]), 5)
    with pytest.raises(EngineError, match="idle"):
        replay(engine, a_trace([0.0]), ToyPrompts(a_trace([0.0])), ReplayPlan())


@dataclass
class Forgetful:
    """An engine that loses what it is given."""

    inner: ToyEngine

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Forget the request."""


def test_an_engine_that_loses_requests_makes_the_replay_void() -> None:
    engine = Forgetful(ToySource().start({}, LIMITS))
    trace = a_trace([0.0])
    with pytest.raises(ReplayError, match="no work"):
        replay(engine, trace, ToyPrompts(trace), ReplayPlan())  # type: ignore[arg-type]


class Lagging(ToyEngine):
    """An engine whose first turn completes no batch, as with asynchronous scheduling."""

    def step(self, horizon_s: float = 0.0) -> Step:
        """Return an empty turn before the first real one."""
        if not self.__dict__.setdefault("turned", False):
            self.__dict__["turned"] = True
            return Step(0.5, [], None, 0, 1, 0.0)
        return super().step(horizon_s)


def test_a_turn_without_a_batch_takes_its_time() -> None:
    engine = Lagging(SLOW, LIMITS)
    trace = a_trace([0.0], output=2)
    log = replay(engine, trace, ToyPrompts(trace), ReplayPlan(keep_steps=True))
    assert log.timelines.ttft_s.tolist() == pytest.approx([0.6])
    assert kept(log).decode_seqs.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ReplayPlan(concurrency=3), "closed"),
        (lambda: ReplayPlan(load_model=LoadModel.CLOSED, concurrency=0), "at least 1"),
        (lambda: ReplayPlan(timeout_s=0.0), "above 0"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(
    make: Callable[[], ReplayPlan], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_order_of_admission_is_the_traces() -> None:
    line = replay_toy(steady(60, 50.0), EngineLimits(1, 64)).timelines
    assert np.all(np.diff(line.first_s) > 0)


# Costs that no sum of round numbers equals, so that no step ends just when something is due.
UNROUND = ToyCosts(base_s=0.0101237, per_seq_s=0.00051713, per_prefill_token_s=0.000101931)


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
