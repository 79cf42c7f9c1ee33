"""A gain is told on the same requests, only beyond the traffic's chance and the shadow's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traffic import a_log
from tuner.arrays import Floats
from tuner.drift.gains import Gain, by_stretch, gain_over
from tuner.replay.loop import ReplayLog
from tuner.replay.slo import parse_slo
from tuner.replay.timeline import Outcome
from tuner.search.objective import Objective, Scoring
from tuner.stats import Estimate

LATENCY = Scoring(Objective.LATENCY, (), "p50")
TAIL = Scoring(Objective.BALANCED, (), "p90")
REQUESTS = 400


def taking(lasting_s: Floats) -> list[ReplayLog]:
    """Return a replay whose requests, one a second, took so long each."""
    lives = [(float(i), (i + s,), Outcome.COMPLETED) for i, s in enumerate(lasting_s.tolist())]
    return [a_log(lives)]


def lasting(seconds: float) -> list[ReplayLog]:
    return taking(np.full(REQUESTS, seconds))


def in_bursts(rng: np.random.Generator) -> Floats:
    """Return latencies that rise and fall together over twenty requests or so."""
    level = np.convolve(rng.normal(size=REQUESTS + 19), np.full(20, 20**-0.5), "valid")
    return np.exp(0.4 * level + 0.1 * rng.normal(size=REQUESTS))


@given(st.lists(st.floats(0.1, 9.0), min_size=8, max_size=200), st.integers(1, 8))
def test_stretches_hold_every_request_once_in_due_order(
    lasting_s: list[float], stretches: int
) -> None:
    parts = by_stretch(taking(np.array(lasting_s))[0], stretches, ())
    assert sum(part.completed for part in parts) == len(lasting_s)
    means = [latency for part in parts if (latency := part.latency("e2e_s", "mean"))]
    expected = [float(np.mean(part)) for part in np.array_split(lasting_s, stretches)]
    assert means == pytest.approx(expected)


def test_a_steady_gain_has_the_shadows_error_as_its_interval() -> None:
    found = gain_over(lasting(2.0), lasting(1.5), LATENCY, wrong_ratio=0.1)
    assert found is not None
    assert found.metric == "e2e_p50"
    assert found.value == pytest.approx(0.25)
    assert found.interval == pytest.approx((1 - 0.75 * 1.1, 1 - 0.75 / 1.1))
    assert found.pays
    unsure = gain_over(lasting(2.0), lasting(1.5), LATENCY, wrong_ratio=0.4)
    assert unsure is not None
    assert not unsure.pays


@pytest.mark.parametrize("goal", [LATENCY, TAIL])
def test_the_gain_is_that_of_the_whole_replay(goal: Scoring) -> None:
    rng = np.random.default_rng(0)
    old_s = in_bursts(rng)
    new_s = old_s * rng.uniform(0.5, 1.0, REQUESTS)
    found = gain_over(taking(old_s), taking(new_s), goal, wrong_ratio=0.03)
    assert found is not None
    q = {"e2e_p50": 0.5, "e2e_p90": 0.9}[found.metric]
    old, new = (np.quantile(s, q, method="inverted_cdf") for s in (old_s, new_s))
    assert found.value == pytest.approx(1 - new / old)


def test_chance_is_called_a_gain_seldom_and_a_gain_is_found() -> None:
    """Bursts hit both alike; what differs comes and goes with other bursts."""
    by_chance = found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        old_s, apart = in_bursts(rng), in_bursts(rng) ** 0.5
        none = gain_over(taking(old_s), taking(old_s * apart), TAIL, wrong_ratio=0.0)
        much = gain_over(taking(old_s), taking(0.6 * old_s * apart), TAIL, wrong_ratio=0.0)
        assert none is not None
        assert much is not None
        by_chance += none.pays
        found += much.pays
    # One side of a 95 % interval: 2.5 expected.
    assert by_chance <= 7
    assert found >= 95


def test_a_gain_in_half_of_the_bursts_is_none() -> None:
    factors = np.repeat([0.5, 1.45, 0.55, 1.5, 0.45, 1.4, 0.5, 1.5], REQUESTS // 8)
    found = gain_over(lasting(2.0), taking(2.0 * factors), LATENCY, wrong_ratio=0.03)
    assert found is not None
    assert not found.pays


def test_a_broken_slo_is_compared_by_the_tail_that_both_have() -> None:
    goal = Scoring(Objective.LATENCY, (parse_slo("e2e_p50=1.8s"),), "p50")
    found = gain_over(lasting(2.0), lasting(1.7), goal, wrong_ratio=0.5)
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


def test_a_rate_is_compared_stretch_by_stretch() -> None:
    goal = Scoring(Objective.THROUGHPUT, (), "p50")
    slow = [(float(i), (2.0 * i + 1.0,), Outcome.COMPLETED) for i in range(REQUESTS)]
    found = gain_over([a_log(slow)], lasting(0.5), goal, wrong_ratio=0.03)
    assert found is not None
    assert found.metric == "requests_per_s"
    assert found.pays


def test_losing_the_slowest_is_no_gain_and_answering_them_is_one() -> None:
    """A fifth gives up, and takes its latency along; the others are a third faster."""
    everybody = lasting(3.0)
    lives = [
        (float(i), (i + 2.0,), Outcome.COMPLETED)
        if i % 5
        else (float(i), (), Outcome.TIMED_OUT)
        for i in range(REQUESTS)
    ]
    some = [a_log(lives)]
    worse, better = (
        gain_over(a, b, TAIL, wrong_ratio=0.05)
        for a, b in ((everybody, some), (some, everybody))
    )
    assert worse is not None
    assert worse.metric == "requests_per_s"
    assert not worse.pays
    assert better is not None
    assert better.pays


def test_a_replay_that_was_cut_short_or_is_too_short_is_not_compared() -> None:
    cut = [a_log([(0.0, (1.0,), Outcome.COMPLETED)], cut_reason="time")]
    assert gain_over(cut, lasting(1.0), LATENCY, 0.03) is None
    assert gain_over(taking(np.ones(30)), taking(np.ones(30)), LATENCY, 0.03) is None
