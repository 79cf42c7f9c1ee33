"""A gain is told stretch by stretch, and only beyond the traffic's chance and the shadow's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic import a_log

from tuner.gains import Gain, by_stretch, gain_over
from tuner.metrics import Measurement, measure
from tuner.objective import Goal, Objective
from tuner.slo import parse_slo
from tuner.stats import Estimate
from tuner.timeline import Outcome

LATENCY = Goal(Objective.LATENCY, (), "p50")


def lasting(seconds: float) -> Measurement:
    """Return the measurement of forty requests that all take so long."""
    lives = [(float(due), (due + seconds,), Outcome.COMPLETED) for due in range(40)]
    return measure([a_log(lives)])


@given(st.lists(st.floats(0.1, 9.0), min_size=8, max_size=200), st.integers(1, 8))
def test_stretches_hold_every_request_once_in_due_order(
    lasting_s: list[float], stretches: int
) -> None:
    lives = [(float(i), (i + s,), Outcome.COMPLETED) for i, s in enumerate(lasting_s)]
    parts = by_stretch(a_log(lives), stretches, ())
    assert sum(part.completed for part in parts) == len(lasting_s)
    means = [latency for part in parts if (latency := part.latency("e2e_s", "mean"))]
    expected = [float(np.mean(part)) for part in np.array_split(lasting_s, stretches)]
    assert means == pytest.approx(expected)


def test_a_steady_gain_has_the_shadows_error_as_its_interval() -> None:
    old, new = [lasting(2.0)] * 6, [lasting(1.5)] * 6
    found = gain_over(old, new, LATENCY, wrong_ratio=0.1)
    assert found is not None
    assert found.metric == "e2e_p50"
    assert found.value == pytest.approx(0.25)
    assert found.interval == pytest.approx((1 - 0.75 * 1.1, 1 - 0.75 / 1.1))
    assert found.pays
    unsure = gain_over(old, new, LATENCY, wrong_ratio=0.4)
    assert unsure is not None
    assert not unsure.pays


def test_a_gain_in_half_of_the_stretches_is_none() -> None:
    new = [lasting(s) for s in (1.0, 2.9, 1.1, 3.0, 0.9, 2.8)]
    found = gain_over([lasting(2.0)] * 6, new, LATENCY, wrong_ratio=0.03)
    assert found is not None
    assert not found.pays


def test_a_broken_slo_is_compared_by_the_tail_that_both_have() -> None:
    goal = Goal(Objective.LATENCY, (parse_slo("e2e_p50=1.8s"),), "p50")
    found = gain_over([lasting(2.0)] * 3, [lasting(1.7)] * 3, goal, wrong_ratio=0.5)
    assert found is not None
    assert found.metric == "e2e_p50"
    assert found.interval[0] < 0
    assert found.is_tier_better
    assert found.pays


def test_a_rate_that_rises_is_a_gain() -> None:
    gain = Gain("requests_per_s", Estimate(0.5, 0.4, 0.8, 8), is_tier_better=False)
    assert gain.value == pytest.approx(1.0)
    assert gain.interval == pytest.approx((0.25, 1.5))
    assert gain.text == "requests_per_s rises by 100.0% (25.0% … 150.0%)"


def test_a_replay_that_was_cut_short_is_not_compared() -> None:
    cut = measure([a_log([(0.0, (1.0,), Outcome.COMPLETED)], cut_reason="time")])
    assert gain_over([cut, lasting(1.0)], [lasting(1.0)] * 2, LATENCY, 0.03) is None
