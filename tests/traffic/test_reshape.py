"""Traces spread, merged and thinned: what must not change does not, what is chosen is said."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traffic import a_trace, steady
from tuner.errors import TraceError, UsageError
from tuner.traffic.concurrency import Concurrency, in_flight_shares, in_flight_steps
from tuner.traffic.describe import describe
from tuner.traffic.prefixes import HashIds
from tuner.traffic.resample import at_load
from tuner.traffic.reshape import Router, clock_tick_s, merge, spread, thin
from tuner.traffic.traces import ClockOrigin, Trace, Turns

PACE_S = 0.02


def hashed(rows: list[list[int]], due_s: list[float], scope: str = "") -> Trace:
    trace = a_trace(due_s, prompt=[16 * len(row) for row in rows])
    return replace(trace, hashes=HashIds.from_rows(rows, 16), hash_scope=scope)


# --- spreading ------------------------------------------------------------------------


def ticking(tick_s: float, n: int = 3000, per_s: float = 4.0) -> Trace:
    """Return Poisson arrivals on a clock that rounds down."""
    trace = steady(n, per_s)
    return replace(trace, due_s=np.floor(trace.due_s / tick_s) * tick_s)


@given(st.sampled_from([1.0, 3.0, 10.0]), st.integers(0, 5))
def test_spreading_undoes_the_bursts_of_a_coarse_clock(tick_s: float, seed: int) -> None:
    trace = ticking(tick_s)
    assert clock_tick_s(trace.due_s) == pytest.approx(tick_s)
    burst, free = describe(trace).iat_cv, describe(spread(trace, seed)).iat_cv
    assert burst is not None
    assert free is not None
    assert burst > 1.5
    assert free == pytest.approx(1.0, abs=0.1)  # what it was before the clock rounded
    moved_s = spread(trace, seed)
    assert moved_s.due_s.tolist() == spread(trace, seed).due_s.tolist()
    assert abs(moved_s.duration_s - trace.duration_s) <= tick_s
    assert any(f"seed {seed}" in remark for remark in moved_s.notes.texts)


def test_a_fine_clock_is_not_spread() -> None:
    with pytest.raises(TraceError, match="no coarse ticks"):
        spread(steady(1000, 4.0), 0)


def test_spreading_leaves_no_turn_before_the_one_that_it_waits_for() -> None:
    trace = ticking(2.0, n=200)
    after = np.arange(200) - 1  # one session, many turns of which share an instant
    spread_out = spread(replace(trace, turns=Turns(after, np.zeros(200))), 0)
    assert spread_out.turns is not None
    assert spread_out.turns.after.tolist() == after.tolist()


# --- merging --------------------------------------------------------------------------


def test_recordings_with_the_calendars_clock_keep_their_distance() -> None:
    first = replace(a_trace([0, 10]), origin=ClockOrigin.WALL, zero_s=1_000.0)
    second = replace(a_trace([0, 1]), origin=ClockOrigin.WALL, zero_s=1_005.0)
    both = merge([second, first])
    assert both.due_s.tolist() == [0, 5, 6, 10]
    assert both.zero_s == 1_000.0


def test_recordings_without_a_common_clock_begin_together() -> None:
    assert merge([a_trace([0, 10]), a_trace([0, 1])]).due_s.tolist() == [0, 0, 1, 10]


def test_equal_ids_of_different_scope_stay_different_blocks() -> None:
    one, other = ([[7, 8]], [0.0]), ([[7, 9]], [1.0])
    shared = merge([hashed(*one), hashed(*other)])
    apart = merge([hashed(*one, "a"), hashed(*other, "b")])
    again = merge([hashed(*one, "a"), hashed(*other, "b"), hashed([[7]], [2.0], "a")])
    assert shared.hashes is not None
    assert apart.hashes is not None
    assert shared.hashes.leading_hits().tolist() == [0, 1]
    assert apart.hashes.leading_hits().tolist() == [0, 0]
    assert again.hashes is not None
    assert again.hashes.leading_hits().tolist() == [0, 0, 1]


def test_many_sessions_with_ids_of_their_own_take_the_memory_of_their_ids() -> None:
    rows = [list(range(1000))] * 20
    sessions = [hashed(rows, [0.0] * 20, f"{place:064x}") for place in range(5)]
    tracemalloc.start()
    both = merge(sessions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert both.hashes is not None
    assert np.unique(both.hashes.ids).size == 5000
    assert peak_bytes < 80 * both.hashes.ids.size  # ids themselves take 8 bytes each


def test_turns_and_latencies_travel_with_their_rows() -> None:
    first = replace(
        a_trace([0, 4], e2e_s=[1, 2]), turns=Turns(np.array([-1, 0]), np.array([0, 3.0]))
    )
    both = merge([a_trace([0, 1]), first], [0.0, 0.5])
    assert both.due_s.tolist() == [0, 0.5, 1, 4.5]
    assert both.turns is not None
    assert both.turns.after.tolist() == [-1, -1, -1, 1]
    assert both.e2e_s is not None
    assert np.nan_to_num(both.e2e_s, nan=-1).tolist() == [-1, 1, -1, 2]


def test_blocks_of_different_size_are_not_mixed() -> None:
    other = replace(a_trace([0], prompt=32), hashes=HashIds.from_rows([[1]], 32))
    with pytest.raises(TraceError, match="differ in size"):
        merge([hashed([[1]], [0.0]), other])


# --- a fleet --------------------------------------------------------------------------


@given(st.sampled_from(list(Router)), st.integers(1, 7))
def test_replicas_share_every_request_once(router: Router, replicas: int) -> None:
    trace = steady(200, 20.0)
    rows = [[i % 3, 100 + i] for i in range(200)]
    lengths = np.full(200, 32, dtype=np.int64)
    trace = replace(trace, prompt_tokens=lengths, hashes=HashIds.from_rows(rows, 16))
    names = tuple(str(i) for i in range(200))
    trace = replace(trace, request_ids=names)
    seen: list[str] = []
    for replica in range(replicas):
        try:
            seen.extend(thin(trace, replicas, router, replica, PACE_S).request_ids or ())
        except TraceError:
            continue  # a prefix router may leave one without work
    assert sorted(seen) == sorted(names)


def test_the_least_loaded_replica_gets_what_the_long_requests_leave() -> None:
    trace = a_trace([0, 1, 2, 3], output=[10_000, 1, 1, 1])
    assert len(thin(trace, 2, Router.LEAST_LOADED, 0, PACE_S)) == 1
    assert len(thin(trace, 2, Router.LEAST_LOADED, 1, PACE_S)) == 3


def test_the_prefix_router_keeps_a_conversation_on_one_replica() -> None:
    rows = [[i % 4, 10 + i % 4, 20 + i % 4] for i in range(40)]
    trace = hashed(rows, [float(i) for i in range(40)])
    share = thin(trace, 4, Router.PREFIX, 0, PACE_S)
    assert share.hashes is not None
    assert len({share.hashes.row(i) for i in range(len(share))}) == 1
    with pytest.raises(TraceError, match="no hash ids"):
        thin(a_trace([0, 1]), 2, Router.PREFIX, 0, PACE_S)


def test_a_replica_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="replica 2 of 2"):
        thin(a_trace([0, 1]), 2, Router.ROUND_ROBIN, 2, PACE_S)


# --- requests in flight ---------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=60))
def test_shares_of_time_agree_with_the_step_function(lives: list[tuple[float, float]]) -> None:
    lives.sort()
    due_s, e2e_s = (np.array(column) for column in zip(*lives, strict=True))
    times_s, counts = in_flight_steps(due_s, e2e_s)
    ends_s = np.minimum(times_s, due_s[-1])
    expected = np.bincount(counts[:-1], weights=np.diff(ends_s), minlength=counts.max() + 1)
    import tuner.traffic.concurrency as module

    whole, small = module.CHUNK, 7
    try:
        for module.CHUNK in (whole, small):
            found = in_flight_shares(due_s, e2e_s)
            size = max(expected.size, found.spent_s.size)
            padded = [np.pad(x, (0, size - x.size)) for x in (expected, found.spent_s)]
            assert padded[1] == pytest.approx(padded[0], abs=1e-9)
            assert found.peak == counts.max()
    finally:
        module.CHUNK = whole


def test_a_recording_of_requests_in_flight_says_what_it_is_and_scales() -> None:
    flow = Concurrency(np.array([0.0, 10.0, 20.0]), np.array([2, 6, 0]))
    trace = replace(a_trace([0, 5, 10, 15]), concurrency=flow)
    found = describe(trace)
    assert found.in_flight.peak == 6
    assert found.in_flight.mean == pytest.approx(4.0)
    assert "closed_loop" in {warning.code for warning in found.warnings}
    double = at_load(trace, 1.5).concurrency
    assert double is not None
    assert double.in_flight.tolist() == [3, 9, 0]
    part = trace.between(5, 12).concurrency
    assert part is not None
    assert (part.times_s.tolist(), part.in_flight.tolist()) == ([0, 5, 7], [2, 6, 6])
