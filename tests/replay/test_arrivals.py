"""Requests go when they should, and the replay's seconds are the ones that were asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traffic import a_trace
from tuner.errors import UsageError
from tuner.replay.arrivals import (
    ClockKind,
    ClosedArrivals,
    OpenArrivals,
    ReplayClock,
    check_priorities,
)
from tuner.replay.plan import ReplayPlan
from tuner.traffic.traces import LoadModel


def test_open_arrivals_go_when_the_recording_says_whatever_is_in_flight() -> None:
    arrivals = OpenArrivals(a_trace([1.0, 1.0, 4.0]).due_s)
    heard = []
    while (due_s := arrivals.next_due_s(0.0, 99)) is not None:
        heard.append(due_s)
        arrivals.pop(0.0)
    assert heard == [1.0, 1.0, 4.0]


def test_closed_arrivals_wait_for_room() -> None:
    arrivals = ClosedArrivals([0.0], [2], 3)
    assert arrivals.next_due_s(0.0, 0) == 0.0
    assert arrivals.next_due_s(5.0, 1) == 5.0
    assert arrivals.next_due_s(5.0, 2) is None
    for _ in range(3):
        arrivals.pop(0.0)
    assert arrivals.next_due_s(9.0, 0) is None


def test_a_target_that_changes_is_followed() -> None:
    arrivals = ClosedArrivals([0.0, 10.0, 20.0, 30.0], [1, 3, 0, 2], 99)
    assert arrivals.next_due_s(0.0, 1) == 10.0
    assert arrivals.next_due_s(10.0, 1) == 10.0
    assert arrivals.next_due_s(15.0, 3) is None
    assert arrivals.next_due_s(20.0, 0) == 30.0
    assert arrivals.next_due_s(20.0, 1) == 30.0


def test_after_the_recordings_end_nothing_goes() -> None:
    arrivals = ClosedArrivals([0.0, 5.0, 10.0], [2, 0, 3], 99, end_s=20.0)
    assert arrivals.next_due_s(6.0, 0) == 10.0
    assert arrivals.next_due_s(19.0, 2) == 19.0
    assert arrivals.next_due_s(20.0, 0) is None
    silent = ClosedArrivals([0.0, 5.0], [2, 0], 99, end_s=20.0)
    assert silent.next_due_s(6.0, 1) is None
    assert silent.next_due_s(6.0, 0) == 20.0


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(0, 6),
    st.floats(0, 15),
)
def test_a_closed_loop_never_goes_back_in_time_nor_above_its_target(
    targets: list[int], in_flight: int, now_s: float
) -> None:
    end_s = float(len(targets))
    arrivals = ClosedArrivals([float(i) for i in range(len(targets))], targets, 5, end_s)
    due_s = arrivals.next_due_s(now_s, in_flight)
    if due_s is None:
        assert now_s >= end_s or in_flight >= max(targets[int(now_s) :], default=1)
    elif due_s == end_s:
        assert max(targets[int(now_s) :]) == in_flight == 0
    else:
        assert due_s >= now_s
        assert targets[int(due_s)] > in_flight


def test_the_load_model_chooses_and_a_given_number_beats_the_recorded_one() -> None:
    trace = a_trace([0.0, 1.0], e2e_s=[3.0, 3.0])
    assert isinstance(ReplayPlan().arrivals(trace), OpenArrivals)
    recorded = ReplayPlan(LoadModel.CLOSED).arrivals(trace)
    assert recorded.next_due_s(0.0, 1) == 1.0
    given_number = ReplayPlan(LoadModel.CLOSED, 2).arrivals(trace)
    assert given_number.next_due_s(0.0, 1) == 0.0


def test_virtual_seconds_add_up_and_idle_ones_are_jumped() -> None:
    clock = ReplayClock(ClockKind.VIRTUAL)
    clock.step(0.5)
    clock.idle_until(3600.0)
    clock.step(0.25)
    clock.idle_until(10.0)
    assert clock.now_s == 3600.25
    assert clock.wall_s < 10.0


def test_wall_seconds_pass_whatever_a_step_says() -> None:
    clock = ReplayClock(ClockKind.WALL)
    clock.step(1000.0)
    assert 0.0 < clock.now_s < 10.0
    due_s = clock.wall_s + 0.02
    clock.idle_until(due_s)
    assert due_s <= clock.now_s <= clock.wall_s


def test_priorities_are_refused_where_an_engine_serves_by_arrival() -> None:
    trace = replace(a_trace([0.0, 1.0]), priorities=np.array([0, -1]))
    with pytest.raises(UsageError, match="1 of 2 requests have a priority"):
        check_priorities(trace, has_priorities=False)
    check_priorities(trace, has_priorities=True)
    check_priorities(replace(trace, priorities=np.zeros(2, np.int64)), has_priorities=False)
