"""The shadow's ranking of a space finds what replaying all of it would, with few replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.run_parts import CEILING, ToyShadows, a_profile, a_run, a_space
from support.toy import ToySource
from support.toy_tune import CROWDED
from support.traffic import a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.runner import Failure
from tuner.replay.timeline import Outcome
from tuner.run.forecast import PROBE_S, Forecast
from tuner.run.shadow_search import Ranking
from tuner.run.state import RunState
from tuner.search.ladder import same_schedule
from tuner.search.objective import Objective, Scoring, Tier
from tuner.search.race import RaceVerdict, decide_predicted
from tuner.search.space import SearchSpace
from tuner.search.trials import TIE_RATIO, leader
from tuner.shadow.pool import ReplayTask
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window, whole

PRESENT = EngineLimits(16, 2048)
TRACE = steady(240, per_s=14.0, prompt=110, output=35)
GOAL = Scoring(Objective.BALANCED, (), "p95")


@contextmanager
def forecast_on(
    folder: Path, trace: Trace, space: SearchSpace, source: ToySource, generation: int = 0
) -> Iterator[tuple[RunState, Forecast, ToyShadows]]:
    """Yield a forecast of a run, both on the same toy."""
    shadows = ToyShadows(source, a_profile(), folder / "shadow.log")
    with a_run(folder, trace, space, source) as run:
        forecast = Forecast(trace, run.aim, shadows, generation)
        forecast.choose_parts(space, time_s=600.0)
        shadows.asked.clear()
        yield run, forecast, shadows


def bursts_of(size: int) -> Trace:
    """Return twenty bursts of so many equal requests, each over before the next."""
    return a_trace(np.repeat(np.arange(20) * 3.0, size), prompt=50, output=20)


def value_at(limits: EngineLimits, source: ToySource, trace: Trace) -> float:
    """Return what the objective makes of a replay on a fresh toy, infinite where overloaded."""
    score = GOAL.score(measure([replay_toy(trace, limits, source)]))
    return score.value if score.tier is Tier.GOOD else float("inf")


def test_the_grid_is_every_cap_past_the_ladder_times_every_budget() -> None:
    found = a_space(PRESENT, (4, 16, 48)).grid()
    expected = {
        EngineLimits(cap, budget) for cap in (4, 16, 48, 96) for budget in (512, 1024, 2048)
    }
    assert set(found) == expected
    assert len(found) == len(expected)


def test_the_grid_holds_the_present_budget_and_stays_within_the_ceiling() -> None:
    space = SearchSpace(EngineLimits(16, 3000), (64, 128), (64, 512), CEILING)
    found = space.grid()
    assert EngineLimits(64, 3000) in found
    # A budget below the cap is no setting of vLLM: it is raised to it.
    assert EngineLimits(128, 128) in found
    assert all(limits.within(CEILING) for limits in found)


def test_it_finds_the_best_of_all_with_far_fewer_replays_than_there_are_settings(
    tmp_path: Path,
) -> None:
    source, space = ToySource(CROWDED), a_space(PRESENT)
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, shadows):
        seen = Ranking(run, forecast).rank()
        records = run.journal.records()
    best = leader(seen)
    assert best is not None
    on_grid = [value_at(limits, source, TRACE) for limits in space.grid()]
    assert best.score.value == pytest.approx(value_at(best.limits, source, TRACE))
    assert best.score.value <= min(on_grid) * (1 + TIE_RATIO)
    assert len(shadows.asked) <= len(space.grid()) * 0.6
    assert len(set(shadows.asked)) == len(shadows.asked)
    assert PRESENT in shadows.asked
    assert {record.engine for record in records} == {"shadow"}
    assert len(records) == len(shadows.asked) == len(seen)


def test_what_is_skipped_would_have_made_the_same_batches(tmp_path: Path) -> None:
    """What was not replayed is at most as good as the leader says."""
    source, space = ToySource(), a_space(PRESENT)
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, shadows):
        seen = Ranking(run, forecast).rank()
    known = sorted(o.score.value for o in seen if o.score.tier is Tier.GOOD)
    skipped = set(space.grid()) - set(shadows.asked)
    assert skipped
    for limits in skipped:
        value = value_at(limits, source, TRACE)
        assert value == float("inf") or any(v == pytest.approx(value) for v in known)


def test_what_lies_between_the_best_and_its_neighbours_is_looked_at(tmp_path: Path) -> None:
    """The toy likes a cap of 11; of the ladder 8 is best, and 16 is the next above it."""
    source, space = ToySource(CROWDED), a_space(PRESENT)
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, _):
        best = leader(Ranking(run, forecast).rank())
    values = [value_at(EngineLimits(cap, 2048), source, TRACE) for cap in range(1, 33)]
    assert best is not None
    # Refining stops at caps a fifth apart, on this curve 4 %; the leader may tie within 3 %.
    assert best.score.value <= min(values) * 1.07


def smallest_of_the_best(trace: Trace, tail: str, settings: list[EngineLimits]) -> EngineLimits:
    """Return the smallest setting that ties with the best, by replays of them all."""
    goal = Scoring(Objective.BALANCED, (), tail)
    values = {
        limits: goal.score(measure([replay_toy(trace, limits)])).value for limits in settings
    }
    best = min(values.values())
    return min(limits for limits, v in values.items() if v <= best * (1 + TIE_RATIO))


def test_the_ladder_is_whole_and_what_else_is_hopeless_is_cut_short(tmp_path: Path) -> None:
    """Small caps lose by far: each is shown once, at the present budget, to the end."""
    source = ToySource(replace(CROWDED, flood_tokens=100, flood_s=0.001))
    space = a_space(EngineLimits(16, 512))
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, _):
        seen = Ranking(run, forecast).rank()
        records = run.journal.records()
    whole = [o for o in seen if o.is_whole]
    assert all(same_schedule(whole, limits) for limits in space.rungs())
    assert {o.limits.max_num_seqs for o in whole} >= {1, 2, 4, 8}
    cut = [r for r in records if r.tier is Tier.CUT]
    assert cut
    assert all(r.max_num_batched_tokens != 512 for r in cut)
    best = leader(seen)
    assert best is not None
    for record in cut:
        limits = record.limits
        # What it would have come to, had it gone on.
        assert value_at(limits, source, TRACE) > best.score.value


def test_ties_go_to_the_smallest_limits(tmp_path: Path) -> None:
    """Eight requests at a time: what has room for them is the same, whatever it is."""
    trace, space = bursts_of(8), a_space(EngineLimits(1, 2048))
    with forecast_on(tmp_path, trace, space, ToySource()) as (run, forecast, shadows):
        best = leader(Ranking(run, forecast).rank())
    assert best is not None
    assert best.limits == smallest_of_the_best(trace, forecast.goal.tail, space.grid())
    assert best.limits == EngineLimits(8, 512)
    assert len(shadows.asked) < len(space.grid()) / 2


def test_a_smaller_cap_with_room_to_spare_goes_before_the_largest(tmp_path: Path) -> None:
    """Six requests at a time: of the grid 8 has room for them, and 6 lies beside it."""
    trace, space = bursts_of(6), a_space(EngineLimits(1, 2048))
    with forecast_on(tmp_path, trace, space, ToySource()) as (run, forecast, _):
        best = leader(Ranking(run, forecast).rank())
    assert best is not None
    assert best.limits == EngineLimits(6, 512)
    assert smallest_of_the_best(trace, forecast.goal.tail, space.grid()) == EngineLimits(8, 512)


def test_what_is_as_good_as_the_present_one_does_not_replace_it(tmp_path: Path) -> None:
    """No cap binds at one request in two seconds, the present one of 16 as little as others."""
    trace, space = steady(60, per_s=0.5, prompt=50, output=20), a_space(PRESENT)
    with forecast_on(tmp_path, trace, space, ToySource()) as (run, forecast, _):
        seen = Ranking(run, forecast).rank()
    assert decide_predicted(seen, PRESENT, 0.03).verdict is RaceVerdict.KEEP


def test_a_setting_that_fails_is_an_outcome_and_the_others_are_ranked(tmp_path: Path) -> None:
    source, space = ToySource(no_memory_above=16), a_space(EngineLimits(8, 2048))
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, _):
        seen = Ranking(run, forecast).rank()
        records = run.journal.records()
    failed = {o.limits.max_num_seqs for o in seen if o.score.tier is Tier.FAILED}
    assert failed
    assert min(failed) > 16
    causes = [r.cause for r in records if r.tier is Tier.FAILED]
    assert all("no memory for" in cause for cause in causes)
    best = leader(seen)
    assert best is not None
    assert best.limits.max_num_seqs <= 16


def test_ranking_again_with_the_same_profile_replays_nothing_anew(tmp_path: Path) -> None:
    source, space = ToySource(CROWDED), a_space(PRESENT)
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, shadows):
        first = Ranking(run, forecast).rank()
        shadows.asked.clear()
        assert Ranking(run, forecast).rank() == first
        assert shadows.asked == []


def test_another_profile_foretells_everything_anew(tmp_path: Path) -> None:
    source, space = ToySource(CROWDED), a_space(PRESENT)
    with forecast_on(tmp_path, TRACE, space, source) as (run, forecast, shadows):
        first = Ranking(run, forecast).rank()
        asked = list(shadows.asked)
        later = Forecast(TRACE, run.aim, shadows, 1, forecast.parts)
        later.load_parts()
        shadows.asked.clear()
        second = Ranking(run, later).rank()
        assert shadows.asked == asked
        assert {o.race_round for o in second} == {1}
        assert {o.number for o in first}.isdisjoint(o.number for o in second)
        assert Ranking(run, forecast).seen() == first


def test_everything_is_replayed_where_time_allows(tmp_path: Path) -> None:
    with forecast_on(tmp_path, TRACE, a_space(PRESENT), ToySource()) as (run, forecast, _):
        assert forecast.parts == (whole(TRACE),)
        (found,) = forecast.predict([PRESENT])
        assert isinstance(found, Measurement)
        assert found.offered == found.completed == len(TRACE)
        # A question is no trial.
        assert run.journal.observations() == []


def _begun(log: ReplayLog) -> ReplayLog:
    """Return what a replay had done after two seconds and a tenth of all of its work."""
    lines, steps = log.timelines, log.steps
    begun = np.arange(len(lines)) < len(lines) // 10
    lines = replace(
        lines,
        output_tokens=np.where(begun, lines.output_tokens, 0),
        outcome=np.full(len(lines), int(Outcome.ABORTED)),
    )
    early = replace(
        steps, prefill_tokens=steps.prefill_tokens // 10, duration_s=steps.duration_s / 10
    )
    return replace(log, timelines=lines, steps=early, wall_s=2.0, cut_reason="time")


def test_a_glance_tells_how_much_of_a_long_trace_there_is_time_for(tmp_path: Path) -> None:
    """A tenth of the work in two seconds: twenty for all, of which there are five.

    Not one request had ended by then.
    """

    class Slow(ToyShadows):
        def _replayed(self, task: ReplayTask) -> Measurement | Failure:
            assert task.plan.cut.max_wall_s == PROBE_S
            logs: list[ReplayLog] = []
            found = super()._replayed(replace(task, on_log=logs.append))
            assert task.on_log is not None
            task.on_log(_begun(logs[0]))
            return found

    trace, space = steady(1200, per_s=1.0, prompt=20, output=5), a_space(PRESENT)
    shadows = Slow(ToySource(), a_profile(), tmp_path / "shadow.log")
    with a_run(tmp_path, trace, space) as run:
        forecast = Forecast(trace, run.aim, shadows, 0)
        forecast.choose_parts(space, time_s=5.0 * (len(space.grid()) + 8))
        told_s = sum(part.length_s for part in forecast.parts)
        assert told_s == pytest.approx(trace.duration_s / 4, rel=0.02)
        ample = Forecast(trace, run.aim, shadows, 0)
        ample.choose_parts(space, time_s=30.0 * (len(space.grid()) + 8))
        assert ample.parts == (whole(trace),)


def test_a_window_that_was_asked_for_is_what_is_replayed(tmp_path: Path) -> None:
    window = Window(2.0, 9.0)
    shadows = ToyShadows(ToySource(), a_profile(), tmp_path / "shadow.log")
    with a_run(tmp_path, TRACE, a_space(PRESENT)) as run:
        run.aim = replace(run.aim, window=window)
        forecast = Forecast(TRACE, run.aim, shadows, 0)
        forecast.choose_parts(run.space, time_s=600.0)
        assert forecast.parts == (window,)
        assert shadows.asked == []
        Ranking(run, forecast).rank()
        offered = {(r.measurement or {})["offered"] for r in run.journal.records()}
    assert offered == {int(((TRACE.due_s >= 2.0) & (TRACE.due_s < 9.0)).sum())}
