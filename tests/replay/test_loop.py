"""A replay loses no request, counts from due times, and is cut only where all is decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import ToyCosts, ToyEngine, ToySource
from support.traffic import ToyPrompts, a_trace, kept, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Emitted, Prompt, Step
from tuner.errors import Caveat, EngineError, ReplayError, TraceError, UsageError
from tuner.gate import GateLimits
from tuner.replay.arrivals import ClockKind
from tuner.replay.loop import replay
from tuner.replay.metrics import measure
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.series import timeline_record
from tuner.replay.slo import Slo
from tuner.replay.timeline import Outcome
from tuner.traffic.concurrency import Concurrency
from tuner.traffic.prompts import TokenPrompt
from tuner.traffic.traces import LoadModel, Trace, Turns
from tuner.traffic.windows import Window

LIMITS = EngineLimits(8, 256)
SLOW = ToySource(ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0))


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


def closed(n: int | None) -> ReplayPlan:
    return ReplayPlan(load_model=LoadModel.CLOSED, concurrency=n)


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
        unfinished = line.outcome == Outcome.UNFINISHED
        assert line.count(Outcome.REFUSED) == (too_long & ~unfinished).sum()
        assert not unfinished.any() or (plan.load_model, plan.concurrency) == ("closed", None)
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


def test_requests_that_never_fit_are_refused_without_an_engine() -> None:
    log = replay_toy(a_trace([0.0, 1.0], prompt=9), LIMITS, ToySource(max_model_len=5))
    assert log.timelines.count(Outcome.REFUSED) == 2
    assert log.steps.steps == 0
    assert math.isnan(log.timelines.sent_s[0])


class FailingEngine(ToyEngine):
    """A toy that ends the second request in its first step, without a token."""

    def step(self) -> Step:
        """Take a turn."""
        step = super().step()
        others = [out for out in step.emitted if out.row != 1]
        if step.running < 2:
            return step
        self.abort([1])
        return replace(step, emitted=[*others, Emitted(1, 0, is_last=True)])


def test_a_request_that_the_engine_fails_is_lost_and_no_full_answer() -> None:
    """Its latencies were nan, which no SLO can break."""
    trace = a_trace([0.0, 0.0], output=5)
    log = replay(FailingEngine(ToySource(), LIMITS), trace, ToyPrompts(trace), ReplayPlan())
    assert log.timelines.outcome.tolist() == [Outcome.COMPLETED, Outcome.ABORTED]
    assert measure([log]).latency("ttft_s", "p99") == math.inf


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


def recorded(trace: Trace, limits: EngineLimits, source: ToySource) -> Trace:
    """Return the trace with the latencies that it had on such an engine."""
    line = replay_toy(trace, limits, source).timelines
    return replace(trace, e2e_s=line.last_s - line.due_s)


@pytest.mark.parametrize("times_as_slow", [1.0, 1.3])
def test_a_slower_engine_is_reported_at_so_much_less_and_no_more(times_as_slow: float) -> None:
    costs, limits = ToyCosts(per_prefill_token_s=0.00005), EngineLimits(64, 8192)
    trace = recorded(steady(1200, 10.0, prompt=60, output=100), limits, ToySource(costs))
    log = replay_toy(trace, limits, ToySource(costs.scaled(times_as_slow)), closed(None))
    m = measure([log])
    assert trace.e2e_s is not None
    ends_s = float((trace.due_s + trace.e2e_s).max())
    as_recorded_per_s = len(trace) / (ends_s - trace.due_s[0])
    assert m.requests_per_s == pytest.approx(as_recorded_per_s / times_as_slow, rel=0.03)
    assert log.clock_s == pytest.approx(ends_s, abs=0.1)
    assert m.unfinished == len(trace) - m.completed
    assert m.as_json()["unfinished"] == m.unfinished
    assert m.unfinished == pytest.approx(len(trace) * (1 - 1 / times_as_slow), abs=30)
    assert (Caveat.RECORDING_ENDED in m.caveats) is (times_as_slow > 1)
    assert Caveat.REQUESTS_RAN_OUT not in m.caveats
    assert m.aborted == 0
    if times_as_slow == 1:
        assert m.completed == len(trace)


def test_a_closed_loop_whose_requests_run_out_before_its_recording_says_so() -> None:
    costs, limits = ToyCosts(per_prefill_token_s=0.00005), EngineLimits(64, 8192)
    trace = recorded(steady(300, 10.0, prompt=60, output=100), limits, ToySource(costs))
    m = measure([replay_toy(trace, limits, ToySource(costs.scaled(0.7)), closed(None))])
    assert m.completed == len(trace)
    assert Caveat.REQUESTS_RAN_OUT in m.caveats


@pytest.mark.parametrize("end_s", [60.0, 30.0])
def test_a_recording_of_requests_in_flight_ends_with_its_last_reading(end_s: float) -> None:
    # Four in flight throughout; each takes a second, of which the trace knows nothing.
    flow = Concurrency(np.array([0.0, 60.0]), np.array([4, 4]))
    trace = replace(a_trace([i / 10 for i in range(600)], output=10), concurrency=flow)
    log = replay_toy(trace.between(0.0, end_s), LIMITS, SLOW, closed(None))
    assert log.clock_s == pytest.approx(end_s, abs=0.11)
    m = measure([log])
    assert m.requests_per_s == pytest.approx(4.0, rel=0.05)
    assert m.unfinished == m.offered - m.completed > 0


def test_what_the_end_of_the_recording_left_is_no_arrival_and_no_step_is_lost() -> None:
    trace = a_trace([0.0, 0.1, 0.2], output=5, e2e_s=[0.01, 0.01, 0.11])
    log = replay_toy(trace, LIMITS, SLOW, replace(closed(None), keep_steps=True))
    assert log.timelines.outcome.tolist() == [Outcome.UNFINISHED] * 3
    assert log.timelines.output_tokens.tolist() == [4, 0, 0]
    assert measure([log]).output_tokens_per_s == pytest.approx(10.0)
    assert sum(timeline_record(log).arrivals) == 1


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


def test_a_gate_lets_in_so_many_keeps_a_short_queue_and_turns_away_the_rest() -> None:
    # Each answer takes 1 s alone, a token every 0.1 s.
    trace = a_trace([0.0, 0.0, 0.0, 1.5], output=10)
    gate = GateLimits(max_in_flight=1, max_queued=1)
    log = replay_toy(trace, LIMITS, SLOW, ReplayPlan(gate=gate))
    line = log.timelines
    assert line.outcome.tolist() == [0, 0, Outcome.TURNED_AWAY, 0]
    assert line.last_s[[0, 1, 3]] == pytest.approx([1.0, 2.0, 3.0])
    # Who was turned away is later than anybody, and none of the goodput.
    measured = measure([log], [Slo.parse("e2e_p50=3s")])
    assert (measured.turned_away, measured.lost_ratio) == (1, 0.25)
    assert measured.slo_attainment_ratio == 0.75
    assert measured.latency("e2e_s", "p99") == math.inf


def test_who_waits_at_a_gate_for_too_long_is_turned_away_or_has_left() -> None:
    trace = a_trace([0.0, 0.0], output=10)
    gate = GateLimits(max_in_flight=1, max_queued=9, queue_timeout_s=0.55)
    for patience_s, ends in ((None, Outcome.TURNED_AWAY), (0.35, Outcome.TIMED_OUT)):
        plan = ReplayPlan(gate=gate, timeout_s=patience_s)
        line = replay_toy(trace, LIMITS, SLOW, plan).timelines
        assert line.outcome[1] == ends
        assert line.output_tokens[1] == 0


def test_a_gate_cuts_answers_off_and_none_of_them_is_good() -> None:
    plan = ReplayPlan(gate=GateLimits(max_in_flight=8, max_output_tokens=4))
    log = replay_toy(a_trace([0.0, 5.0], output=[4, 10]), LIMITS, SLOW, plan)
    assert log.timelines.outcome.tolist() == [0, Outcome.TRUNCATED]
    assert log.timelines.output_tokens.tolist() == [4, 4]
    assert measure([log], [Slo.parse("e2e_p50=9s")]).slo_attainment_ratio == 0.5


def test_a_gate_that_nobody_meets_changes_nothing() -> None:
    trace = steady(100, 4.0)
    plan = ReplayPlan(gate=GateLimits(max_in_flight=1000))
    gated, free = (replay_toy(trace, LIMITS, plan=p) for p in (plan, ReplayPlan()))
    assert gated.timelines.last_s.tolist() == free.timelines.last_s.tolist()


@pytest.mark.parametrize(
    "wrong", [{"max_in_flight": 0}, {"max_queued": -1}, {"queue_timeout_s": 0.0}]
)
def test_a_gate_that_would_refuse_everything_is_none(wrong: dict[str, float]) -> None:
    values: dict[str, Any] = {"max_in_flight": 1, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GateLimits(**values)


def test_a_gate_is_for_arrivals_that_do_not_wait() -> None:
    with pytest.raises(UsageError, match="a gate turns away arrivals"):
        replace(closed(3), gate=GateLimits(1))


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

    def step(self) -> Step:
        """Return an empty turn before the first real one."""
        if not self.__dict__.setdefault("turned", False):
            self.__dict__["turned"] = True
            return Step(0.5, [], None, 0, 1, 0.0)
        return super().step()


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


def test_a_lead_in_is_replayed_and_not_measured() -> None:
    """What comes after it meets the queue of before, on a clock that begins with it."""
    trace, limits = steady(60, per_s=30.0), EngineLimits(2, 256)
    whole = replay_toy(trace, limits, SLOW)
    window = Window(1.0, 99.0).with_lead_in(1.0)
    cut = replay_toy(window.of(trace), limits, SLOW, ReplayPlan(keep_steps=True))
    rows = trace.due_s >= 1.0
    assert len(cut.timelines) == rows.sum()
    np.testing.assert_allclose(cut.timelines.due_s, trace.due_s[rows] - 1.0)
    np.testing.assert_allclose(cut.timelines.e2e_s, whole.timelines.e2e_s[rows])
    alone = replay_toy(trace.between(1.0, 99.0), limits, SLOW)
    assert cut.timelines.e2e_s.mean() > 1.2 * alone.timelines.e2e_s.mean()
    # The steps are those from then on, and so are the gaps and the time.
    assert cut.clock_s == pytest.approx(whole.clock_s - 1.0)
    assert cut.steps.steps < whole.steps.steps
    assert kept(cut).end_s.min() > 0
    assert cut.timelines.gap_s.total_weight < whole.timelines.gap_s.total_weight
    assert measure([cut]).offered == rows.sum()


def test_a_queue_from_before_a_window_is_no_work_that_is_offered_in_it() -> None:
    """The prompts of the queue are computed in the window, and were offered before it."""
    source = ToySource(ToyCosts(base_s=0.01, per_seq_s=0.0, per_prefill_token_s=0.001))
    trace, limits = steady(120, per_s=12.0, prompt=100, output=2), EngineLimits(8, 256)
    window = Window(6.0, 99.0)
    bare = replay_toy(window.of(trace), limits, source)
    warm = replay_toy(window.with_lead_in(6.0).of(trace), limits, source)
    cold, used = measure([bare]).utilisation, measure([warm]).utilisation
    assert cold is not None
    assert used is not None
    assert warm.steps.prefill_tokens > 1.2 * bare.steps.prefill_tokens
    assert used == pytest.approx(cold, rel=0.06)


def test_turns_that_come_late_are_measured_at_every_setting_or_at_none() -> None:
    """Who was recorded before the window stays there, however slow the engine is."""
    trace, after = steady(60, per_s=30.0), np.arange(-6, 54)
    turns = Turns(np.maximum(after, -1), np.where(after >= 0, 0.1, 0.0))
    warm = replace(trace, turns=turns, lead_in_s=1.0)
    for cap in (1, 2, 8):
        found = replay_toy(warm, EngineLimits(cap, 256), SLOW)
        assert len(found.timelines) == warm.measured


def test_a_closed_loop_has_no_lead_in() -> None:
    with pytest.raises(UsageError, match="no two settings are measured on the same requests"):
        replay_toy(replace(steady(20, 10.0), lead_in_s=1.0), LIMITS, plan=closed(2))


def test_a_lead_in_that_leaves_nothing_is_reported() -> None:
    with pytest.raises(ReplayError, match="no request is due after the lead-in of 9 s"):
        replay_toy(replace(steady(20, 10.0), lead_in_s=9.0), LIMITS, ToySource())
