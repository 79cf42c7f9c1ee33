"""As many race as the time holds, and the cold engines are kept time for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.run_parts import a_run, a_space
from support.toy import ToySource
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import CutRule
from tuner.run.state import RunState
from tuner.run.time_plan import cold_cost_s, fitting, reserve_s
from tuner.search.race import MIN_ROUNDS
from tuner.search.trials import Phase

PRESENT, BEST, SECOND, THIRD = (EngineLimits(cap, 2048) for cap in (16, 9, 10, 12))
FIELD = [BEST, SECOND, THIRD, PRESENT]
TRACE = steady(60, per_s=14.0, prompt=110, output=35)


def foreseen(run: RunState, left_s: float, *replays_s: float) -> None:
    """Let the shadow have foretold each of the field, with so much time left."""
    run.foreseen_s = dict(zip(FIELD, replays_s, strict=True))
    run._deadline_s += left_s - run.left_s


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunState]:
    with a_run(tmp_path, TRACE, a_space(PRESENT), ToySource()) as run:
        yield run


@pytest.mark.parametrize(
    ("left_s", "field"),
    [
        # Three rounds of 10 + 10 + 10 + 30 s, and 10 + 30 s on cold engines that start at once.
        *((221.0, FIELD), (219.0, [BEST, SECOND, PRESENT]), (189.0, [BEST, PRESENT])),
        # Somebody races against the present one, however little time there is.
        (5.0, [BEST, PRESENT]),
    ],
)
def test_as_many_race_as_three_rounds_fit_into_the_time(
    run: RunState, left_s: float, field: list[EngineLimits]
) -> None:
    foreseen(run, left_s, 10.0, 10.0, 10.0, 30.0)
    assert fitting(run, FIELD) == field


def test_three_rounds_come_before_the_cold_engines(run: RunState) -> None:
    field = [BEST, PRESENT]
    foreseen(run, 200.0, 10.0, 10.0, 10.0, 30.0)
    assert reserve_s(run, field) == cold_cost_s(run, BEST) == 40.0
    foreseen(run, 150.0, 10.0, 10.0, 10.0, 30.0)
    assert reserve_s(run, field) == 0.0


def test_what_a_replay_took_counts_more_than_what_was_foretold(run: RunState) -> None:
    foreseen(run, 100.0, 7.0, 7.0, 7.0, 7.0)
    assert run.replay_s(BEST) == 7.0
    run.trial(BEST, Phase.RACE, CutRule(), 1)
    (record,) = run.journal.records()
    assert run.replay_s(BEST) == (record.measurement or {})["wall_s"] < 7.0
    assert run.replay_s(SECOND) == 7.0
    # Nothing is known of this one but what others took.
    assert run.replay_s(EngineLimits(1, 512)) == run.usual_wall_s


@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=4), st.floats(0, 2000), st.data())
def test_more_time_never_means_fewer_who_race(
    tmp_path_factory: pytest.TempPathFactory,
    replays_s: list[float],
    left_s: float,
    data: st.DataObject,
) -> None:
    more_s = data.draw(st.floats(left_s, 4000))
    with a_run(tmp_path_factory.mktemp("r"), TRACE, a_space(PRESENT), ToySource()) as run:
        foreseen(run, left_s, *replays_s)
        few = fitting(run, FIELD)
        foreseen(run, more_s, *replays_s)
        many = fitting(run, FIELD)
    assert many[: len(few) - 1] == few[:-1]
    assert few[-1] == many[-1] == PRESENT
    if len(few) > 2:
        assert MIN_ROUNDS * sum(replays_s[FIELD.index(s)] for s in few) <= left_s
