"""Sessions keep their order: a next turn waits for the answer, wherever the trace is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.toy import ToyCosts, ToySource
from support.traffic import a_trace, replay_toy
from tuner.engine.limits import EngineLimits
from tuner.replay.arrivals import Sessions
from tuner.replay.plan import ReplayPlan
from tuner.traffic.traces import Trace, Turns, pauses_of

ROOM = EngineLimits(64, 4096)


def with_turns(trace: Trace, after: list[int], pause_s: list[float]) -> Trace:
    return replace(trace, turns=Turns(np.array(after, dtype=np.int64), np.array(pause_s)))


@st.composite
def turns(draw: st.DrawFn) -> Turns:
    n = draw(st.integers(1, 30))
    after = [draw(st.integers(-1, row - 1)) for row in range(n)]
    pause_s = [draw(st.floats(0, 5)) if a >= 0 else 0.0 for a in after]
    return Turns(np.array(after, dtype=np.int64), np.array(pause_s))


def test_a_next_turn_goes_when_the_answer_is_read_however_slow_the_engine() -> None:
    trace = with_turns(a_trace([0, 1, 2], output=50), [-1, 0, 1], [0, 0.5, 2.0])
    for step_s in (0.001, 0.1):
        line = replay_toy(trace, ROOM, ToySource(ToyCosts(base_s=step_s))).timelines
        assert line.due_s[1] == pytest.approx(line.last_s[0] + 0.5)
        assert line.due_s[2] == pytest.approx(line.last_s[1] + 2.0)
        assert len(line.e2e_s) == 3


def test_recorded_sessions_go_when_they_were_recorded() -> None:
    trace = with_turns(a_trace([0, 1, 2], output=50), [-1, 0, 1], [0, 0.5, 2.0])
    line = replay_toy(trace, ROOM, plan=ReplayPlan(sessions=Sessions.RECORDED)).timelines
    assert line.due_s.tolist() == [0, 1, 2]


def test_the_turn_after_a_refused_request_still_goes() -> None:
    trace = with_turns(a_trace([0, 1], prompt=[100_000, 10]), [-1, 0], [0, 3.0])
    line = replay_toy(trace, ROOM).timelines
    assert line.due_s[1] == pytest.approx(3.0)
    assert len(line.e2e_s) == 1


@given(turns(), st.floats(0, 30), st.data())
def test_taking_rows_keeps_who_waits_for_whom_among_those_left(
    known: Turns, answer_s: float, data: st.DataObject
) -> None:
    """And each for so long that, where answers take as long as recorded, it comes as it did."""
    due_s = np.zeros(len(known))
    for row, before in enumerate(known.after.tolist()):
        due_s[row] = due_s[before] + answer_s + known.pause_s[row] if before >= 0 else 0.0
    rows = data.draw(st.lists(st.integers(0, len(known) - 1), unique=True, min_size=1))
    taken = known.take(np.array(rows), due_s)
    for new, old in enumerate(rows):
        before = int(known.after[old])
        while before >= 0 and before not in rows:
            before = int(known.after[before])
        if before >= 0:
            assert rows[taken.after[new]] == before
            assert taken.pause_s[new] == pytest.approx(due_s[old] - due_s[before] - answer_s)
        else:
            assert (taken.after[new], taken.pause_s[new]) == (-1, 0)


def test_a_window_begins_with_the_turns_whose_predecessors_it_lacks() -> None:
    trace = with_turns(a_trace([0, 10, 20]), [-1, 0, 1], [0, 4.0, 5.0])
    part = trace.between(5, 30)
    assert part.turns is not None
    assert part.turns.after.tolist() == [-1, 0]
    assert part.due_s.tolist() == [5, 15]


def test_a_pause_is_what_lay_between_an_answer_and_the_next_request() -> None:
    found = pauses_of(
        np.array([-1, 0, 0]), np.array([0.0, 5.0, 1.0]), np.array([2.0, np.nan, 1.0])
    )
    assert found.pause_s.tolist() == [0, 3.0, 0]


@pytest.mark.parametrize(
    ("after", "pause_s"), [([0], [0.0]), ([-2], [0.0]), ([-1, 5], [0.0, 0.0]), ([-1], [-1.0])]
)
def test_turns_that_cannot_be_are_refused(after: list[int], pause_s: list[float]) -> None:
    with pytest.raises(ValueError, match=r"itself|must"):
        Turns(np.array(after), np.array(pause_s))
