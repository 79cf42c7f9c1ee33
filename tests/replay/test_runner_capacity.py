"""The capacity that was planted is found, in few questions, and none that was not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuner.replay.runner import LARGEST_LOAD, LOAD_RATIO, MIN_LOAD, loads_to_try

# Six doublings or halvings lead from 1 to either end, and six halvings of a factor two in
# logarithms lead below two percent.
MAX_QUESTIONS = 1 + 6 + 6

edges = st.floats(-5.99, 5.99).map(lambda power: 2.0**power)
starts = st.floats(-3.0, 3.0).map(lambda power: 2.0**power)


class Planted:
    """An engine that bears loads up to an edge, and remembers which it was asked about."""

    def __init__(self, edge: float) -> None:
        self.edge = edge
        self.asked: list[float] = []

    def __call__(self, load: float) -> bool:
        """Say whether the load is borne."""
        self.asked.append(load)
        return load <= self.edge


def capacity(
    holds: Callable[[float], bool], start: float = 1.0, near: float | None = None
) -> float | None:
    """Return the largest load at which `holds` is true, assuming it stays false once it is."""
    asked = loads_to_try(start, near)
    try:
        load = next(asked)
        while True:
            load = asked.send(holds(load))
    except StopIteration as found:
        borne: float | None = found.value
        return borne


@given(edges)
def test_the_planted_capacity_is_found_within_two_percent(edge: float) -> None:
    planted = Planted(edge)
    found = capacity(planted)
    assert found is not None
    beyond = min(load for load in planted.asked if load > edge)
    assert found <= edge < beyond <= found * (1 + LOAD_RATIO)
    assert len(planted.asked) <= MAX_QUESTIONS
    assert len(set(planted.asked)) == len(planted.asked)


@given(edges, starts)
def test_where_it_starts_changes_the_questions_and_not_the_answer(
    edge: float, start: float
) -> None:
    planted = Planted(edge)
    found = capacity(planted, start)
    assert planted.asked[0] == start
    if found is not None and found < LARGEST_LOAD:
        beyond = min(load for load in planted.asked if load > edge)
        assert found <= edge < beyond <= found * (1 + LOAD_RATIO)
    else:
        # The ends are reached in doubles of the start: at most one double beyond them.
        assert edge < 2 * MIN_LOAD or edge > LARGEST_LOAD / 2


def test_what_never_holds_has_no_capacity() -> None:
    planted = Planted(0.0)
    assert capacity(planted) is None
    assert planted.asked == [2.0**-power for power in range(7)]


def test_what_always_holds_has_no_end() -> None:
    planted = Planted(float("inf"))
    assert capacity(planted) == LARGEST_LOAD
    assert planted.asked == [2.0**power for power in range(7)]


@given(edges, starts, edges)
def test_a_hint_changes_the_questions_and_not_the_answer(
    edge: float, start: float, near: float
) -> None:
    """Draws begun near what a setting bears ask for the loads that others are asked for."""
    planted = Planted(edge)
    found, plain = capacity(planted, start, near), capacity(Planted(edge), start)
    doublings = 64 * np.log2(np.array(planted.asked) / start)
    assert np.allclose(doublings, doublings.round(), atol=1e-6)
    if found and plain and max(found, plain) < LARGEST_LOAD:
        assert plain / (1 + LOAD_RATIO) <= found <= plain * (1 + LOAD_RATIO)
    assert len(planted.asked) <= MAX_QUESTIONS + 8  # from one end to the other


@given(edges, st.floats(-0.2, 0.2))
def test_a_hint_that_is_about_right_saves_questions(edge: float, off: float) -> None:
    planted = Planted(edge)
    capacity(planted, near=edge * 2**off)
    assert len(planted.asked) <= 8
