"""A run's time is divided so that it fits, and its space holds what can matter."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traffic import a_trace, steady
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts
from tuner.errors import UsageError
from tuner.replay.plan import ReplayPlan
from tuner.search.budget import (
    LIFETIMES,
    MIN_BUDGET_S,
    MIN_REPLAYS,
    MIN_REQUESTS,
    REPLAYS,
    Aim,
    Budget,
    choose_windows,
    outlook,
    shorter_window,
    window_text,
)
from tuner.search.objective import Objective
from tuner.search.space import MOST_PREDICTED_SEQS, PAST_LADDER, search_space
from tuner.traffic.traces import LoadModel
from tuner.traffic.windows import Window, whole

CURRENT = EngineLimits(64, 2048)
FACTS = EngineFacts(CURRENT, 4096, chunks_prefill=True, vllm_version="0", device="toy")


@pytest.mark.parametrize(
    ("load_model", "asked", "optimised"),
    [
        (LoadModel.OPEN, Objective.BALANCED, Objective.BALANCED),
        (LoadModel.CLOSED, Objective.BALANCED, Objective.THROUGHPUT),
        (LoadModel.CLOSED, Objective.LATENCY, Objective.LATENCY),
    ],
)
def test_without_a_load_to_sustain_balanced_is_most_requests_per_second(
    load_model: LoadModel, asked: Objective, optimised: Objective
) -> None:
    assert Aim(asked, (), ReplayPlan(load_model), None).objective is optimised


def test_a_budget_that_cannot_hold_one_trial_is_refused() -> None:
    assert Budget(MIN_BUDGET_S).pilot_s == 1.0
    with pytest.raises(UsageError, match=r"19\.9s is too short for one trial, at least 20 s"):
        Budget(MIN_BUDGET_S - 0.1)


def test_the_pilot_takes_a_small_share_of_the_budget_and_never_long() -> None:
    assert Budget(300).pilot_s == pytest.approx(6.0)
    assert Budget(36_000).pilot_s == 15.0


def test_the_ceiling_holds_the_current_limits_and_room_past_the_ladder() -> None:
    trace = steady(200, per_s=10, prompt=100)
    small = search_space(FACTS, trace, (1, 2, 4), CURRENT)
    assert small.ceiling.max_num_seqs == 64
    large = search_space(FACTS, trace, (8, 2, 32, 8), CURRENT)
    assert large.ladder == (2, 8, 32)
    assert large.ceiling.max_num_seqs == 32 * PAST_LADDER
    assert large.ceiling.max_num_batched_tokens >= max(large.budgets)


def test_what_is_predicted_alone_begins_as_wide_and_has_more_room_for_caps() -> None:
    trace = steady(200, per_s=10, prompt=100)
    started = search_space(FACTS, trace, (1, 2, 4), CURRENT)
    alone = search_space(FACTS, trace, (1, 2, 4), CURRENT, may_grow=True)
    assert alone.ceiling.max_num_seqs == MOST_PREDICTED_SEQS
    assert alone.grid() == started.grid()
    assert {limits.max_num_seqs for limits in alone.past(64)} == {128}
    assert not started.past(64)
    lowered = alone.below(EngineLimits(16, 1024))
    assert lowered.whatever_wins.max_num_seqs == 16
    assert not alone.past(MOST_PREDICTED_SEQS)


def test_token_budgets_end_at_what_the_busiest_second_or_longest_prompt_can_use() -> None:
    quiet = a_trace([0.0, 5.0, 10.0], prompt=[10, 200, 10])
    assert search_space(FACTS, quiet, (4,), CURRENT).budgets == (512, 1024)
    burst = a_trace([0.0] * 50, prompt=200)
    assert search_space(FACTS, burst, (4,), CURRENT).budgets[-1] == 16384


def test_without_chunked_prefill_no_budget_is_below_the_models_length() -> None:
    facts = EngineFacts(CURRENT, 4096, chunks_prefill=False, vllm_version="0", device="toy")
    space = search_space(facts, steady(50, per_s=1), (1, 4), CURRENT)
    assert min(space.budgets) >= 4096
    assert space.at(4, 512).max_num_batched_tokens == 4096


def test_a_trace_that_fits_is_replayed_whole() -> None:
    trace = steady(600, per_s=1)
    assert choose_windows(trace, wall_ratio=0.001, left_s=1800) == (whole(trace),)
    assert window_text((whole(trace),), trace).startswith("the whole trace, ")


def test_a_long_trace_gets_its_busiest_and_a_typical_stretch() -> None:
    rng = np.random.default_rng(0)
    due_s = np.sort(np.concatenate([rng.uniform(0, 7200, 7200), rng.uniform(3000, 3100, 900)]))
    trace = a_trace(due_s.tolist(), prompt=20, output=20)
    windows = choose_windows(trace, wall_ratio=0.1, left_s=1800)
    busy, usual = windows
    assert busy.start_s < 3050 < busy.end_s
    assert not busy.overlaps(usual)
    text = window_text(windows, trace)
    assert text.startswith("busiest ")
    assert " and typical " in text
    assert f", after {sum(w.lead_in_s for w in windows):.2g} s to warm up)" in text


@given(
    cost=st.floats(0.001, 10),
    left_s=st.floats(30, 7200),
    per_s=st.sampled_from([0.5, 5.0]),
)
def test_the_windows_fit_the_time_unless_too_few_requests_would_be_left(
    cost: float, left_s: float, per_s: float
) -> None:
    trace = steady(2000, per_s=per_s)
    shortest_s = MIN_REQUESTS / len(trace) * trace.duration_s
    if MIN_REPLAYS * cost * shortest_s > left_s:
        with pytest.raises(UsageError, match="the budget leaves"):
            choose_windows(trace, cost, left_s)
        return
    windows = choose_windows(trace, cost, left_s)
    length_s = sum(w.length_s + w.lead_in_s for w in windows)
    least_s = MIN_REQUESTS / len(trace) * trace.duration_s * (1 + 1 / LIFETIMES)
    allowed_s = max(left_s / REPLAYS / cost, least_s)
    assert length_s <= allowed_s * 1.01 or windows == (whole(trace),)
    assert all(0 <= w.start_s < w.end_s for w in windows)
    # They start warm, as far as the trace goes back.
    assert all(
        w.lead_in_s == pytest.approx(min(w.start_s, w.length_s / LIFETIMES)) for w in windows
    )
    assert sum(w.of(trace).measured for w in windows) > 0


@given(cost=st.floats(0.001, 2), left_s=st.floats(30, 7200), least=st.integers(40, 200))
def test_windows_hold_as_many_requests_as_are_asked_for(
    cost: float, left_s: float, least: int
) -> None:
    trace = steady(2000, per_s=0.5)
    with suppress(UsageError):
        windows = choose_windows(trace, cost, left_s, least=least)
        assert sum(w.of(trace).measured for w in windows) >= least


def test_a_window_that_does_not_fit_gives_way_to_its_busiest_stretch() -> None:
    quiet, busy = np.arange(0, 100, 1.0), np.arange(60, 70, 0.2)
    trace = a_trace(np.sort(np.concatenate([quiet, busy])).tolist())
    window = Window(20.0, 90.0)
    lengths = []
    while (shorter := shorter_window(trace, (window,), 0.7)) is not None:
        assert window.start_s <= shorter.start_s < shorter.end_s <= window.end_s
        assert shorter.of(trace).measured >= MIN_REQUESTS
        assert shorter.lead_in_s == pytest.approx(shorter.length_s / LIFETIMES)
        window = shorter
        lengths.append(window.length_s)
    assert lengths == sorted(lengths, reverse=True)
    assert 60 <= window.start_s < window.end_s <= 71
    at_once = a_trace([5.0] * 80)
    assert shorter_window(at_once, (whole(at_once),), 0.7) is None


@given(
    tick_s=st.floats(0.01, 100.0),
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=40),
    begin=st.floats(0.0, 0.9),
    ratio=st.sampled_from([0.3, 0.7, 0.9]),
)
def test_of_a_clock_that_ticks_whole_bursts_stay_or_nothing_does(
    tick_s: float, counts: list[int], begin: float, ratio: float
) -> None:
    """What a window holds is due at other instants once they are counted from its begin."""
    due_s = np.repeat(np.arange(len(counts)) * tick_s, counts)
    if due_s.size < 2:
        return
    trace = a_trace(due_s)
    last_s = float(due_s[-1])
    window = Window(begin * last_s, float(np.nextafter(last_s, np.inf)))
    while (shorter := shorter_window(trace, (window,), ratio, least=1)) is not None:
        inside = shorter.with_lead_in(0.0)
        assert len(inside.of(trace)) >= 1
        assert inside.length_s < window.length_s
        window = inside


@pytest.mark.parametrize(
    ("replay_s", "words"),
    [
        (0.0, "8 rounds of two settings and cold engines fit"),
        (5e-324, "8 rounds of two settings and cold engines fit"),
        (5.0, "8 rounds of two settings and cold engines fit"),
        (30.0, "2 rounds of two settings fit, cold engines may not; --budget 7m holds both"),
        (154.0, "a stretch of it will race; --budget 31m would race all of it"),
    ],
)
def test_what_the_time_can_answer_is_reported_with_the_option_that_helps(
    replay_s: float, words: str
) -> None:
    shown = outlook(Budget(240), 226.0, 0.3, replay_s, cold_s=30.0)
    assert words in shown
    assert "calibrating takes up to 72 s of the 226 s left" in shown


def test_that_the_time_is_spent_is_said_without_a_negative_time() -> None:
    shown = outlook(Budget(60), -3.0, 0.3, 5.0, cold_s=30.0)
    assert shown == (
        "outlook: the time of 60 s is spent before calibrating; --budget 4m holds that, a race "
        "and cold engines"
    )


def test_one_window_is_named_by_its_ends() -> None:
    trace = steady(100, per_s=1)
    assert "10 s to 30 s (20 of " in window_text((Window(10, 30),), trace)
