"""Counters that restart or fall lose nothing that was counted and invent nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuner.traffic.prometheus.client import Span
from tuner.traffic.prometheus.counters import (
    arrivals,
    levels_in_flight,
    pooled,
    rises,
    stretches,
    uncovered_s,
    windows_of,
)
from tuner.traffic.prometheus.readings import EngineReadings, LengthReadings

processes = st.lists(
    st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=5
)


@given(processes)
def test_restarts_never_lower_a_count(lives: list[list[int]]) -> None:
    readings = np.concatenate([np.cumsum(steps) for steps in lives]).astype(np.float64)
    rose = rises(readings, np.diff(readings) < 0)
    assert np.all(rose >= 0)
    since_first = sum(map(sum, lives)) - lives[0][0]
    # A restart that overtakes the old count between scrapes cannot be told from a rise.
    assert rose.sum() <= since_first
    if all(after[0] < sum(before) for before, after in pairwise(lives)):
        assert rose.sum() == since_first


@given(st.lists(st.integers(-5, 20), min_size=1, max_size=40))
def test_arrivals_are_never_negative_and_never_lost(came: list[int]) -> None:
    found = arrivals(np.array(came, dtype=np.float64))
    upto = np.cumsum(came)
    assert found.min() >= 0
    assert np.all(np.cumsum(found) >= upto)
    assert found.sum() == max(0, int(upto.max()))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 100))
def test_stretches_hold_enough_and_are_laid_end_to_end(counts: list[int], least: int) -> None:
    numbers = stretches(np.array(counts, dtype=np.float64), least)
    assert set(np.diff(numbers).tolist()) <= {0, 1}
    held = np.bincount(numbers, weights=counts)
    assert held.min() >= least or len(held) == 1


def engine(
    scraped_s: list[float], finished: list[int], in_flight: list[int] | None
) -> EngineReadings:
    """Return an engine all of whose requests had 3 tokens in and out."""
    upto = np.array([[0.0, count, count] for count in finished])
    lengths = LengthReadings((2.0, 5.0, np.inf), upto, 3.0 * np.array(finished))
    return EngineReadings(
        rows=np.floor(np.array(scraped_s) / 10).astype(np.int64),
        scraped_s=np.array(scraped_s),
        finished=np.array(finished, dtype=np.float64),
        in_flight=None if in_flight is None else np.array(in_flight, dtype=np.float64),
        prompt=lengths,
        output=lengths,
    )


def test_a_request_arrives_when_it_is_in_flight_and_not_when_it_finishes() -> None:
    found = windows_of(engine([0, 10, 20, 30], [0, 0, 4, 5], [0, 5, 1, 0]), 10)
    assert found.arrived.tolist() == [5, 0, 0]
    assert found.finished.tolist() == [0, 4, 1]
    without = windows_of(engine([0, 10, 20, 30], [0, 0, 4, 5], None), 10)
    assert without.arrived.tolist() == [0, 4, 1]
    assert not without.has_gauges


def test_a_restart_counts_what_the_new_process_has_finished_and_holds() -> None:
    found = windows_of(engine([0, 10, 20], [50, 60, 2], [8, 8, 3]), 10)
    assert found.arrived.tolist() == [10, 5]
    assert found.prompt[0].counts.tolist() == [[0, 10, 0], [0, 2, 0]]
    assert found.prompt[0].totals.tolist() == [30, 6]
    assert found.restarts == 1


def test_a_restart_is_known_by_any_range_that_shrinks() -> None:
    before = engine([0, 10], [10, 12], None)
    before.output.upto[:] = [[10, 10, 10], [0, 12, 12]]
    assert windows_of(before, 10).arrived.tolist() == [12]


def test_an_engine_that_begins_anew_with_other_bounds_loses_neither_life() -> None:
    """As a server does that is started again with another max_model_len."""
    nan = np.nan
    before = engine([0, 10, 20, 30], [10, 15, 1, 4], None)
    upto = np.array([[0, nan, 10], [0, nan, 15], [0, 1, 1], [0, 2, 4]])
    lengths = LengthReadings((2.0, 5.0, np.inf), upto, 3.0 * before.finished)
    found = windows_of(replace(before, prompt=lengths), 10)
    assert found.arrived.tolist() == [5, 1, 3]
    assert found.restarts == 1
    joined = pooled([found], lambda engine: engine.prompt, np.array([0, 0, 1, 1]))
    assert [h.counts.sum() for h in joined] == [5, 4]
    assert [h.counts[h.highs == 5.0].sum() for h in joined] == [0, 2]
    assert [h.total for h in joined] == [15, 12]


def test_what_came_in_a_gap_is_missed_and_not_placed() -> None:
    found = windows_of(engine([0, 10, 20, 80, 90], [0, 1, 2, 30, 32], None), 10)
    assert found.arrived.tolist() == [1, 1, 0, 2]
    assert found.missed == 28
    # Slow scrapes are no gaps, however short the step.
    slow = windows_of(engine([0, 60, 120], [0, 6, 12], None), 10)
    assert slow.arrived.tolist() == [6, 6]


def test_an_engine_that_vanishes_holds_its_level_for_two_steps_and_then_has_none() -> None:
    span = Span(0, 100, 10)
    levels, is_known = levels_in_flight([engine([10, 20, 30], [0, 0, 0], [1, 4, 5])], span)
    assert levels.tolist() == [0, 1, 4, 5, 5, 5, 0, 0, 0, 0, 0]
    assert np.flatnonzero(is_known).tolist() == [1, 2, 3, 4, 5]


def test_a_hole_is_where_no_engine_has_data() -> None:
    starts_s, ends_s = np.array([0.0, 20.0, 5.0]), np.array([10.0, 30.0, 12.0])
    assert uncovered_s(starts_s, ends_s) == 8.0
