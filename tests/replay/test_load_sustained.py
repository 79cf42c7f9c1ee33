"""Overload is seen, and what only looks like it is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import ToyCosts, ToySource
from support.traffic import a_log, a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.replay.load import is_sustained, utilisation
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome
from tuner.traffic.traces import LoadModel, Trace

DONE = Outcome.COMPLETED
SERVER = ToySource(ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0))
"""With a cap of one and one token for each: ten requests a second, whatever they are."""
ONE = EngineLimits(1, 64)


def kept_up(log: ReplayLog) -> bool:
    return log.is_closed_loop or is_sustained(log.timelines)


def poisson(n: int, per_s: float, seed: int) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / per_s, n)
    return [float(at_s) for at_s in np.cumsum(gaps)]


@pytest.mark.parametrize(("per_s", "n"), [(11.5, 100), (11.5, 1000), (100.0, 100)])
def test_steady_overload_is_seen(per_s: float, n: int) -> None:
    log = replay_toy(a_trace([i / per_s for i in range(n)], output=1), ONE, SERVER)
    assert not kept_up(log)


@pytest.mark.parametrize("per_s", [0.5, 10.0])
def test_evenly_spaced_requests_that_fit_are_sustained(per_s: float) -> None:
    log = replay_toy(a_trace([i / per_s for i in range(500)], output=1), ONE, SERVER)
    assert kept_up(log)


def test_a_stationary_queue_is_not_called_overload() -> None:
    """Seeds 0 to 49 at 0.7 of what the server can do: at most one false alarm among them."""
    traces = [a_trace(poisson(600, 7.0, seed), output=1) for seed in range(50)]
    alarms = sum(not kept_up(replay_toy(trace, ONE, SERVER)) for trace in traces)
    assert alarms <= 1


def test_random_overload_is_seen() -> None:
    """Seeds 0 to 49 at 1.3 times what the server can do: at most one is missed."""
    traces = [a_trace(poisson(600, 13.0, seed), output=1) for seed in range(50)]
    missed = sum(kept_up(replay_toy(trace, ONE, SERVER)) for trace in traces)
    assert missed <= 1


@pytest.mark.parametrize("burst_at_s", [0.0, 60.0])
def test_a_burst_that_is_being_worked_off_is_no_overload(burst_at_s: float) -> None:
    due_s = sorted([*(i / 4 for i in range(400)), *([burst_at_s] * 60)])
    assert kept_up(replay_toy(a_trace(due_s, output=1), ONE, SERVER))


def test_a_burst_larger_than_the_growth_that_is_allowed_may_be_worked_off_too() -> None:
    due_s = sorted([*(i / 4 for i in range(400)), *([55.0] * 200)])
    assert kept_up(replay_toy(a_trace(due_s, output=1), ONE, SERVER))


def test_a_steady_rise_is_overload_from_a_twentieth_of_the_requests_on() -> None:
    for growth, sustained in ((0.04, True), (0.06, False)):
        lives = [(float(i), [i / (1 - growth)], DONE) for i in range(1, 1000)]
        assert kept_up(a_log(lives)) == sustained


def test_an_engine_that_catches_up_only_after_the_arrivals_did_not_keep_up() -> None:
    log = replay_toy(a_trace([i / 15 for i in range(300)], output=1), ONE, SERVER)
    assert log.timelines.count(DONE) == 300
    assert not kept_up(log)


def test_giving_up_on_many_is_not_keeping_up() -> None:
    trace = a_trace([i / 20 for i in range(400)], output=1)
    log = replay_toy(trace, ONE, SERVER, ReplayPlan(timeout_s=0.5))
    assert log.timelines.count(Outcome.TIMED_OUT) > 100
    assert not kept_up(log)


def test_refused_requests_wait_for_nobody() -> None:
    lives = [(float(i), [i + 0.1], DONE) for i in range(100)]
    lives += [(100.0 + i, [], Outcome.REFUSED) for i in range(100)]
    assert kept_up(a_log(lives))


def test_what_never_answers_is_not_sustained() -> None:
    assert not kept_up(a_log([(float(i), [], Outcome.ABORTED) for i in range(50)]))


# A request of 60 prompt tokens and 100 answered ones takes 100 steps of 10 ms that it shares
# with as many as the cap lets in, and 53 ms of its own.
SHARED_S, OWN_S = 100 * 0.010, 99 * 0.0005 + 60 * 0.00005
BATCHING = ToySource(ToyCosts(0.010, 0.0005, 0.00005), max_model_len=100_000)


def even(per_s: float, length_s: float, tokens: int = 100) -> Trace:
    """Return arrivals at any instant that all ask for the same."""
    due_s = np.sort(np.random.default_rng(0).uniform(0, length_s, int(per_s * length_s)))
    return a_trace((due_s - due_s[0]).tolist(), 60, tokens)


@pytest.mark.parametrize(("length_s", "cap"), [(4.0, 16), (4.0, 1024), (30.0, 128)])
def test_no_cap_sustains_what_the_engine_cannot_do_however_short_the_window(
    length_s: float, cap: int
) -> None:
    """30/s are offered, 19/s possible: who admits everybody has no queue, and is late."""
    log = replay_toy(even(30.0, length_s), EngineLimits(cap, 8192), BATCHING)
    assert not kept_up(log)
    used = utilisation([log.timelines])
    assert used == pytest.approx(30.0 * (SHARED_S / cap + OWN_S), rel=0.05)
    assert measure([log]).load_text.endswith(f"overloaded {used:.2g} x")


@pytest.mark.parametrize(("cap", "share"), [(16, 0.8), (128, 0.5), (1024, 0.9)])
def test_what_the_engine_can_do_is_sustained_in_a_window_that_it_does_not_fill(
    cap: int, share: float
) -> None:
    per_s = share / (SHARED_S / cap + OWN_S)
    log = replay_toy(even(per_s, 30.0), EngineLimits(cap, 8192), BATCHING)
    assert utilisation([log.timelines]) == pytest.approx(share, rel=0.06)
    assert kept_up(log)


@pytest.mark.parametrize(("cap", "sustained"), [(64, False), (128, False), (1024, True)])
def test_long_answers_are_judged_in_a_window_that_is_shorter_than_they_live(
    cap: int, *, sustained: bool
) -> None:
    """2/s of 1,000 tokens at 20 ms and more each: for good some 400 run, here at most 40 do."""
    source = ToySource(ToyCosts(0.020, 0.0004, 0.00002), max_model_len=100_000)
    log = replay_toy(even(2.0, 20.0, tokens=1000), EngineLimits(cap, 8192), source)
    used = 2.0 * (1000 * 0.020 / cap + 999 * 0.0004)
    assert utilisation([log.timelines]) == pytest.approx(used, rel=0.1)
    assert kept_up(log) is sustained


def test_the_kv_cache_bounds_the_batch_that_work_is_shared_by() -> None:
    """Blocks for twelve requests of 160 tokens: no cap is worth more than those."""
    roomy, tight = (
        replay_toy(
            even(10.0, 20.0), EngineLimits(128, 8192), replace(BATCHING, num_blocks=blocks)
        )
        for blocks in (100_000, 120)
    )
    assert kept_up(roomy)
    assert not kept_up(tight)
    used = utilisation([tight.timelines])
    assert used is not None
    assert used > 1.1


def test_more_arrivals_in_the_second_half_are_no_overload() -> None:
    """A rise from 3/s to 7/s of 10/s: more are in flight, and nobody waits any longer."""
    due_s = [i / 3 for i in range(180)] + [60 + i / 7 for i in range(420)]
    assert kept_up(replay_toy(a_trace(due_s, output=1), ONE, SERVER))


def test_a_closed_loop_offers_what_the_engine_takes() -> None:
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=20)
    log = replay_toy(even(30.0, 10.0), EngineLimits(16, 8192), BATCHING, plan)
    assert utilisation([log.timelines]) is None
    assert kept_up(log)


@pytest.mark.parametrize("due_s", [[0.0], [1.0, 1.0, 1.0]])
def test_without_a_span_of_arrivals_nothing_can_grow(due_s: list[float]) -> None:
    assert kept_up(a_log([(at, [at + 9.0], DONE) for at in due_s]))


@given(seed=st.integers(0, 50), times=st.sampled_from([0.5, 4.0]), per_s=st.floats(3, 20))
@settings(deadline=None, max_examples=25)
def test_the_verdict_does_not_depend_on_the_unit_of_time(
    seed: int, times: float, per_s: float
) -> None:
    trace = steady(120, per_s, output=1, seed=seed)
    slowed = a_trace(trace.due_s * times, trace.prompt_tokens.tolist(), 1)
    source = ToySource(SERVER.costs.scaled(times))
    verdicts = [kept_up(replay_toy(trace, ONE, SERVER))]
    verdicts.append(kept_up(replay_toy(slowed, ONE, source)))
    assert verdicts[0] == verdicts[1]
