"""A timeline keeps every count and every mean of a replay, in as few bins as asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import ToyCosts, ToySource
from support.traffic import a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import levels
from tuner.replay.plan import ReplayPlan
from tuner.replay.series import ReplayTimelines, SavedTimelines, timeline_record
from tuner.traffic.traces import Turns


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.floats(2.0, 60.0), st.integers(1, 40), st.integers(1, 600))
def test_a_timeline_keeps_every_count_and_every_mean(
    seed: int, per_s: float, cap: int, most_points: int
) -> None:
    source = ToySource(ToyCosts(), num_blocks=60)
    log = replay_toy(
        steady(60, per_s, prompt=40, seed=seed),
        EngineLimits(cap, 2048),
        source,
        ReplayPlan(keep_steps=True),
    )
    made = timeline_record(log, most_points)
    assert 1 <= len(made.running) <= most_points
    assert sum(made.arrivals) == len(log.timelines)
    assert sum(made.preemptions) == log.steps.preempted
    peak = log.steps.peaks["kv_usage_ratio"]
    assert max(made.kv_peak_ratio) == pytest.approx(peak, rel=1e-3)
    held_s = log.clock_s * levels([log], "running").mean
    assert sum(made.running) * made.bin_s == pytest.approx(held_s, rel=1e-3)
    pairs = zip(made.kv_usage_ratio, made.kv_peak_ratio, strict=True)
    assert all(usage <= peak for usage, peak in pairs)


def test_a_timeline_begins_with_its_window_also_where_a_turn_came_before() -> None:
    """The turn was recorded in it; this engine is faster than the recorded one."""
    turns = Turns(np.array([-1, 0, -1]), np.array([0.0, 0.5, 0.0]))
    warm = replace(a_trace([0.0, 5.0, 6.0]), turns=turns, lead_in_s=4.0)
    log = replay_toy(warm, EngineLimits(4, 64), plan=ReplayPlan(keep_steps=True))
    assert log.timelines.due_s[0] < -3.0
    made = timeline_record(log)
    assert made.start_s == 0.0
    assert sum(made.arrivals) == 2


def test_a_timeline_replaces_the_one_of_the_same_limits_and_engine() -> None:
    log = replay_toy(steady(20, 5.0), EngineLimits(4, 64), plan=ReplayPlan(keep_steps=True))
    record = timeline_record(log)
    saved = SavedTimelines()
    for engine, windows in (("live", [record]), ("shadow", [record]), ("live", [record] * 2)):
        saved = saved.with_replay(ReplayTimelines(engine, 4, 64, windows))
    assert {(r.engine, len(r.windows)) for r in saved.replays} == {("shadow", 1), ("live", 2)}


def test_a_replay_whose_steps_were_not_kept_has_no_timeline() -> None:
    with pytest.raises(ValueError, match="did not ask for its steps"):
        timeline_record(replay_toy(steady(5, 5.0), EngineLimits(4, 64)))
