"""Another load is more or fewer users in the same time, and never the same ones in a hurry."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.traffic import a_trace, steady
from tuner.errors import Caveat, TooFewSamplesError, UsageError
from tuner.stats import Ints
from tuner.traffic.concurrency import Concurrency
from tuner.traffic.describe import describe, prefix_reuse_ratio
from tuner.traffic.prefixes import HashIds
from tuner.traffic.resample import Resampler, at_load, multiple_of, sessions_of
from tuner.traffic.traces import TooLong, Trace, Turns

SIZE = 16
SYSTEM = 7
"""The id of a first block that everybody's prompt begins with."""


def chats(sessions: int, turns: int, every_s: float = 5.0) -> Trace:
    """Return sessions whose turns wait for each other; all begin with the same block."""
    n = sessions * turns
    session, turn = np.arange(n) // turns, np.arange(n) % turns
    due_s = session * every_s + turn * 20.0
    order = np.argsort(due_s, kind="stable")
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    after = np.where(turn > 0, np.append(0, place[:-1]), -1)[order]
    rows = [
        (SYSTEM, *(1000 * (s + 1) + block for block in range(t + 1)))
        for s, t in zip(session[order].tolist(), turn[order].tolist(), strict=True)
    ]
    trace = a_trace(due_s[order], [SIZE * len(row) + 3 for row in rows], 20)
    hashes = HashIds.from_rows(rows, SIZE)
    return replace(trace, hashes=hashes, turns=Turns(after, np.where(after >= 0, 2.0, 0.0)))


@pytest.mark.parametrize("load", [0.0, -1.0, float("nan"), float("inf")])
def test_a_load_that_is_no_multiple_is_refused(load: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        at_load(steady(20, 1.0), load)


@given(st.floats(0.2, 5), st.integers(0, 20))
@settings(max_examples=40)
def test_the_time_stays_and_the_arrivals_are_multiplied(load: float, seed: int) -> None:
    trace = steady(200, per_s=3.0, seed=seed)
    scaled = at_load(trace, load)
    assert len(scaled) == pytest.approx(load * len(trace), abs=1)
    gap_s = trace.duration_s / len(trace)
    assert scaled.duration_s <= trace.duration_s + 2 * gap_s
    if load > 1:
        assert scaled.duration_s >= trace.duration_s - 2 * gap_s
    assert scaled.load == pytest.approx(load, rel=0.01)
    assert multiple_of([scaled]) == pytest.approx(len(scaled) / len(trace), rel=0.01)
    assert set(scaled.prompt_tokens) <= set(trace.prompt_tokens)


def test_what_arrives_in_any_minute_is_about_as_many_times_as_much() -> None:
    """A day's rise and fall stays where it was: copies lie a minute apart, not half a day."""
    rng = np.random.default_rng(0)
    at_s = np.sort(rng.beta(4, 4, 4000) * 14_400)
    scaled = at_load(a_trace(at_s), 3)
    edges = np.linspace(0, 14_400, 13)
    before, after = (np.histogram(t, edges)[0] for t in (at_s, scaled.due_s))
    busy = before > 100
    assert after[busy] / before[busy] == pytest.approx(3 * np.ones(busy.sum()), rel=0.15)


def test_a_larger_load_holds_whatever_a_smaller_one_does() -> None:
    trace = replace(steady(100, 2.0), request_ids=tuple(f"r{i}" for i in range(100)))
    names = [set(at_load(trace, load).request_ids or ()) for load in (0.3, 0.6, 1, 1.5, 2.2)]
    assert all(a <= b for a, b in pairwise(names))


def uneven() -> Trace:
    """Return forty sessions, of which the first has five in six of the requests."""
    after = np.where(np.arange(234) % 6 == 5, -1, 0)
    after[0] = -1
    return replace(
        a_trace([float(row) for row in range(234)]), turns=Turns(after, np.zeros(234))
    )


@pytest.mark.parametrize(("load", "caveat"), [(0.5, True), (1.5, True), (3, False)])
def test_a_load_says_what_whole_sessions_come_to(load: float, *, caveat: bool) -> None:
    trace = uneven()
    scaled = at_load(trace, load)
    found = len(scaled) / len(trace)
    # With the long session or without it, whichever comes closer.
    assert abs(found - load) < 0.43
    warnings = {w.code: w.text for w in describe(scaled).warnings}
    assert (Caveat.LOAD_MISSED in warnings) is caveat
    if caveat:
        assert f"{found:.3g} times the recorded load" in warnings[Caveat.LOAD_MISSED]
        assert f"where {load:g} was asked for" in warnings[Caveat.LOAD_MISSED]
    assert multiple_of([scaled]) == pytest.approx(found, rel=0.01)
    if load < 1:
        assert at_load(scaled, 1 / load) is trace


@pytest.mark.parametrize(("load", "copies"), [(1e-9, 1), (0.1, 1), (1.1, 1), (2.9, 3)])
def test_one_session_is_there_a_whole_number_of_times(load: float, copies: int) -> None:
    turns = Turns(np.arange(-1, 59), np.zeros(60))
    one = at_load(replace(a_trace([float(row) for row in range(60)]), turns=turns), load)
    assert len(one) == 60 * copies
    assert multiple_of([one]) == copies


def test_a_load_for_which_there_is_no_memory_is_refused_before_it_is_tried() -> None:
    with pytest.raises(
        UsageError, match=r"100,000,000,000 requests, .* GB of memory"
    ) as caught:
        at_load(steady(100_000, 10.0), 1e6)
    assert "smaller load" in (caught.value.hint or "")


@pytest.mark.parametrize("load", [0.5, 1.5, 4])
def test_requests_last_as_long_as_what_is_in_flight_at_a_load(load: float) -> None:
    """Rows are as dense as ever where they are sent, and share what they shared."""
    chat, flow = (
        chats(sessions=400, turns=3, every_s=1.0),
        Concurrency(np.array([0.0, 440.0]), np.array([8, 8])),
    )
    trace = replace(chat, concurrency=flow)
    scaled = at_load(trace, load)
    assert scaled.concurrency is not None
    assert scaled.concurrency.in_flight.tolist() == [8 * load] * 2
    assert len(scaled) == round(load * len(trace))
    counts = [np.histogram(t.due_s, np.linspace(0, 440, 9))[0] for t in (trace, scaled)]
    assert counts[1] == pytest.approx(load * counts[0], rel=0.3)
    assert prefix_reuse_ratio(scaled) == pytest.approx(prefix_reuse_ratio(trace) or 0, rel=0.03)
    if load < 1:
        assert at_load(scaled, 1 / load) is trace


@pytest.mark.parametrize("load", [0.5, 1.5, 3])
def test_sessions_stay_whole_and_in_order(load: float) -> None:
    trace = chats(sessions=20, turns=3)
    scaled = at_load(trace, load)
    assert scaled.turns is not None
    assert len(scaled) == round(load * 20) * 3
    waits = np.flatnonzero(scaled.turns.after >= 0)
    assert (scaled.due_s[scaled.turns.after[waits]] < scaled.due_s[waits]).all()
    assert (scaled.turns.pause_s[waits] == 2.0).all()
    # Only what now lies across the end waits for nobody.
    assert waits.size >= 2 * round(load * 20) - 3 * 20


@pytest.mark.parametrize("knows_turns", [True, False])
def test_shared_prefixes_stay_shared_and_a_session_s_own_become_its_copy_s_own(
    *, knows_turns: bool
) -> None:
    trace = chats(sessions=10, turns=3)
    if not knows_turns:
        trace = replace(trace, turns=None)
    assert np.unique(sessions_of(trace)).size == 10
    scaled = at_load(trace, 2)
    assert trace.hashes is not None
    assert scaled.hashes is not None
    for hashes, times in ((trace.hashes, 1), (scaled.hashes, 2)):
        assert (hashes.ids == SYSTEM).sum() == times * 30
        assert np.unique(hashes.ids).size == times * 30 + 1
    # An unbounded cache finds as much of each prompt as before.
    found, before = (
        (h.leading_hits().sum() + 1) / h.ids.size for h in (scaled.hashes, trace.hashes)
    )
    assert found == pytest.approx(before, rel=0.02)


def test_equal_prompts_of_strangers_are_no_session() -> None:
    rows = [(1, 2), (1, 2), (1, 2, 3)]
    trace = replace(
        a_trace([0.0, 1.0, 2.0], [33, 33, 49]), hashes=HashIds.from_rows(rows, SIZE)
    )
    assert sessions_of(trace).tolist() == [0, 1, 2]


def test_a_prompt_that_is_a_template_alone_makes_no_session_of_all_who_share_it() -> None:
    rows = [(1, 2), *((1, 2, 10 + n) for n in range(50)), (1, 2, 10, 99)]
    tokens = [33, *[49] * 50, 65]
    trace = replace(
        a_trace([float(n) for n in range(52)], tokens), hashes=HashIds.from_rows(rows, SIZE)
    )
    assert sessions_of(trace).tolist() == [*range(51), 1]
    assert len(at_load(trace, 0.5)) == pytest.approx(26, abs=2)


def test_the_load_of_a_load_is_their_product() -> None:
    assert at_load(at_load(steady(60, 2.0), 1.5), 2).load == 3.0


@pytest.mark.parametrize("span_s", [(0.0, 600.0), (150.0, 290.0)])
@pytest.mark.parametrize(("first", "second"), [(2.0, 2.0), (3.0, 1.5), (1.5, 4.0)])
def test_copies_of_copies_are_of_other_users_and_do_not_meet(
    first: float, second: float, span_s: tuple[float, float]
) -> None:
    """No two of them come at one instant, nor has one what another copy has alone."""
    trace = chats(sessions=100, turns=3)
    jittered_s = np.sort(trace.due_s + np.random.default_rng(0).uniform(0, 0.1, len(trace)))
    scaled = at_load(replace(trace, due_s=jittered_s), first).between(*span_s)
    again = at_load(scaled, second)
    assert (np.diff(again.due_s) > 1e-6).mean() > 0.99
    assert scaled.hashes is not None
    assert again.hashes is not None
    before, after = (np.unique(h.ids).size for h in (scaled.hashes, again.hashes))
    assert after == pytest.approx(second * before, rel=0.04)


def bursts() -> Trace:
    """Return eight requests a second with bursts of forty."""
    quiet_s = np.arange(0.0, 200.0, 0.125)
    return a_trace(np.sort(np.concatenate([quiet_s, np.repeat(np.arange(5, 200, 20.0), 40)])))


def busiest_second(trace: Trace) -> int:
    return int(np.histogram(trace.due_s, np.arange(0.0, 201.0))[0].max())


@pytest.mark.parametrize("part", [0.1, 0.3, 0.7])
def test_more_of_a_part_is_more_of_what_was_recorded(part: float) -> None:
    whole = bursts()
    thinned = at_load(whole, part)
    again = at_load(thinned, 1 / part)
    assert (again.due_s == whole.due_s).all()
    assert busiest_second(at_load(thinned, 1.5 / part)) == busiest_second(at_load(whole, 1.5))
    # So it is within a window, and of traffic drawn of the same kind.
    window = at_load(thinned.between(50.0, 120.0), 1 / part)
    assert (window.due_s == whole.between(50.0, 120.0).due_s).all()
    rng = np.random.default_rng(4)
    of_part, of_whole = Resampler(thinned).draw(rng), Resampler(whole).draw(rng)
    assert len(of_part) == pytest.approx(part * len(of_whole), rel=0.15)
    assert busiest_second(at_load(of_part, 1 / part)) >= 0.8 * busiest_second(of_whole)


@pytest.mark.parametrize("policy", [TooLong.CLIP, TooLong.DROP])
def test_lengths_are_limited_in_what_a_part_is_of_too(policy: TooLong) -> None:
    whole = a_trace([float(i) for i in range(100)], list(range(1, 101)), 10)
    part = at_load(whole, 0.5)
    again = at_load(part.limit_lengths(60, policy), 2)
    expected = whole.limit_lengths(60, policy)
    assert again.prompt_tokens.tolist() == expected.prompt_tokens.tolist()
    # Also where the part itself holds nothing that is too long.
    most = int((part.prompt_tokens + part.output_tokens).max())
    longer = replace(
        whole, prompt_tokens=np.where(np.arange(100) == 99, 500, whole.prompt_tokens)
    )
    few = replace(part, recorded=longer).limit_lengths(most, policy)
    again = at_load(few, 2)
    assert int((again.prompt_tokens + again.output_tokens).max()) <= most


def test_resampled_traffic_is_as_long_and_of_the_same_requests() -> None:
    trace = steady(800, per_s=4.0, seed=3)
    drawn = [Resampler(trace).draw(np.random.default_rng(seed)) for seed in range(30)]
    sizes = np.array([len(one) for one in drawn])
    assert sizes.std() > 0
    assert sizes.mean() == pytest.approx(len(trace), rel=0.03)
    period_s = trace.duration_s * len(trace) / (len(trace) - 1)
    for one in drawn:
        due_s = one.due_s - trace.due_s[0]
        assert 0 <= due_s[0] <= due_s[-1] <= period_s
        assert set(one.prompt_tokens) <= set(trace.prompt_tokens)


def test_resampled_sessions_stay_whole_and_come_from_other_users() -> None:
    trace = chats(200, 3)
    one = Resampler(trace).draw(np.random.default_rng(0))
    assert one.turns is not None
    assert one.hashes is not None
    # Two of three turns wait, but for those whose turn before went round the end.
    assert one.turns.waiting == pytest.approx(2 / 3 * len(one), rel=0.06)
    follows = np.flatnonzero(one.turns.after >= 0)
    for row in follows.tolist():
        before = one.hashes.row(int(one.turns.after[row]))
        assert one.hashes.row(row)[: len(before)] == before
    # A session that was drawn twice does not find itself in the cache.
    first = [one.hashes.row(row)[1] for row in np.flatnonzero(one.turns.after < 0).tolist()]
    starts = [one.hashes.row(row)[0] for row in range(len(one))]
    assert set(starts) == {SYSTEM}
    assert len(set(first)) > 0.95 * len(first)


def test_traffic_that_comes_in_waves_varies_more_than_a_steady_one() -> None:
    rng = np.random.default_rng(0)
    even_s = np.sort(rng.uniform(0, 1600, 1600))
    waves_s = np.sort(np.concatenate([rng.uniform(0, 400, 1300), rng.uniform(400, 1600, 300)]))
    spreads = []
    for due_s in (even_s, waves_s):
        resampler = Resampler(a_trace(due_s, 10, 20))
        sizes = [len(resampler.draw(np.random.default_rng(s))) for s in range(100)]
        spreads.append(float(np.std(sizes)))
    assert spreads[1] > 5 * spreads[0]


@pytest.mark.parametrize("requests", range(40, 50))
def test_the_smallest_load_of_a_warm_window_measures_something(requests: int) -> None:
    """One request is left, and half of those to choose from come before the window."""
    warm = replace(steady(requests, per_s=1.0), lead_in_s=requests / 2)
    one = at_load(warm, 1 / 64)
    assert len(one) == one.measured == 1


@pytest.mark.parametrize("load", [2, 3, 4.5])
def test_a_peak_at_another_load_is_so_many_times_itself(load: float) -> None:
    """And not mixed with the calm that leads in to it."""
    calm_s, peak_s = steady(90, per_s=1.0).due_s, 100.0 + steady(800, per_s=8.0, seed=1).due_s
    warm = replace(a_trace(np.concatenate([calm_s, peak_s]), 10, 20), lead_in_s=100.0)
    scaled = at_load(warm, load)
    assert scaled.measured == pytest.approx(load * warm.measured, rel=0.01)
    assert scaled.led_in == pytest.approx(load * warm.led_in, rel=0.1)
    if load == round(load):
        alone = at_load(warm.between(100.0, 1000.0), load)
        np.testing.assert_allclose(scaled.due_s[scaled.led_in :] - 100.0, alone.due_s)


def test_a_copy_s_turn_that_goes_on_from_a_lead_in_comes_when_it_is_due() -> None:
    warm = replace(chats(60, 4), lead_in_s=100.0)
    double = at_load(warm, 2)
    assert warm.turns is not None
    assert double.turns is not None

    def across(trace: Trace, after: Ints) -> int:
        return int((after[trace.led_in :] < trace.led_in)[after[trace.led_in :] >= 0].sum())

    assert across(double, double.turns.after) == across(warm, warm.turns.after) > 0
    assert double.measured == 2 * warm.measured


def test_other_traffic_of_a_window_after_a_silence_is_in_the_window() -> None:
    burst_s = 100.0 + steady(250, per_s=4.0, seed=1).due_s
    warm = replace(a_trace(burst_s, 10, 20), lead_in_s=100.0)
    resampler = Resampler(warm)
    for seed in range(20):
        drawn = resampler.draw(np.random.default_rng(seed))
        assert drawn.measured == len(drawn) > 100


def test_other_traffic_of_a_peak_is_of_the_peak_and_begins_as_warm() -> None:
    """One request a second before it, eight in it: what leads in is nobody's stretch."""
    calm_s, peak_s = steady(60, per_s=1.0).due_s, 100.0 + steady(800, per_s=8.0, seed=1).due_s
    warm = replace(a_trace(np.concatenate([calm_s, peak_s]), 10, 20), lead_in_s=100.0)
    bare = warm.between(100.0, 1000.0)
    sizes = []
    for seed in range(20):
        drawn = Resampler(warm).draw(np.random.default_rng(seed))
        np.testing.assert_array_equal(drawn.due_s[: drawn.led_in], calm_s)
        alone = Resampler(bare).draw(np.random.default_rng(seed))
        np.testing.assert_allclose(drawn.due_s[drawn.led_in :] - 100.0, alone.due_s)
        sizes.append(drawn.measured)
    assert np.mean(sizes) == pytest.approx(800, rel=0.03)


@pytest.mark.parametrize("knows_turns", [True, False])
def test_sessions_that_go_on_from_a_lead_in_find_there_what_they_had_by_then(
    *, knows_turns: bool
) -> None:
    trace = chats(250, 4)
    warm = replace(trace if knows_turns else replace(trace, turns=None), lead_in_s=100.0)
    assert warm.hashes is not None
    drawn = Resampler(warm).draw(np.random.default_rng(0))
    assert drawn.hashes is not None
    if drawn.turns is not None:
        after = drawn.turns.after[drawn.led_in :]
        assert not ((after >= 0) & (after < drawn.led_in)).any()
    before = set(warm.hashes.take(np.arange(warm.led_in)).ids.tolist()) - {SYSTEM}
    found = [
        len(before & set(one.hashes.take(np.arange(one.led_in, len(one))).ids.tolist()))
        for one in (warm, drawn)
        if one.hashes is not None
    ]
    assert found[0] > 10
    # Stretches that were not drawn hold some of them, and a draw holds some twice.
    assert found[1] > 0.3 * found[0]


def test_of_too_few_requests_after_a_lead_in_no_other_traffic_is_drawn() -> None:
    busy_s = np.append(steady(200, per_s=4.0, seed=1).due_s, 60.0)
    with pytest.raises(TooFewSamplesError, match="160 arrivals, got 1"):
        Resampler(replace(a_trace(busy_s, 10, 20), lead_in_s=59.9))


@pytest.mark.parametrize("requests", [1, 100])
def test_too_little_traffic_is_not_resampled(requests: int) -> None:
    with pytest.raises(TooFewSamplesError, match=f"160 arrivals, got {requests}"):
        Resampler(steady(requests, 1.0))


@pytest.mark.parametrize("sessions", [5, 15, 40])
def test_of_too_few_sessions_no_other_traffic_is_drawn(sessions: int) -> None:
    """Nor of such as all begin together, of which most stretches hold none."""
    with pytest.raises(TooFewSamplesError, match=rf"sessions .* got {sessions}"):
        Resampler(chats(sessions, turns=60, every_s=0.1))
