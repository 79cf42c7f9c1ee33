"""Levels weigh by the time they held, idle time included."""

from __future__ import annotations

import pytest

from support.toy import ToyCosts, ToySource
from support.traffic import a_log, a_trace, replay_toy
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import TimeWeighted, levels
from tuner.replay.timeline import Outcome

SOURCE = ToySource(ToyCosts(base_s=1.0, per_seq_s=0.0, per_prefill_token_s=0.0))
LIMITS = EngineLimits(1, 64)


def test_idle_time_counts_as_nothing() -> None:
    # Two seconds of work, six of quiet, two of work.
    log = replay_toy(a_trace([0.0, 8.0], output=2), LIMITS, SOURCE)
    assert levels([log], "running") == TimeWeighted(mean=0.4, p99=1.0, max=1.0)


def test_a_queue_is_weighed_by_how_long_it_stood() -> None:
    log = replay_toy(a_trace([0.0, 0.0, 0.0], output=2), LIMITS, SOURCE)
    assert levels([log], "waiting") == TimeWeighted(mean=1.0, p99=2.0, max=2.0)


def test_windows_are_pooled_by_their_time() -> None:
    busy = replay_toy(a_trace([0.0], output=2), LIMITS, SOURCE)
    quiet = replay_toy(a_trace([6.0], output=2), LIMITS, SOURCE)
    assert levels([busy, quiet], "running").mean == pytest.approx(4 / 10)


def test_where_no_time_passed_nothing_stood() -> None:
    assert levels([a_log([(0.0, [], Outcome.REFUSED)])], "running") == TimeWeighted(
        0.0, 0.0, 0.0
    )
