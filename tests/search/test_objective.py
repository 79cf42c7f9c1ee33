"""What is better, what is infeasible, and what can no longer win."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import ToyCosts, ToySource
from support.traffic import a_log, a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, TooFewSamplesError, UsageError
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.slo import Slo
from tuner.replay.timeline import Outcome
from tuner.search.objective import (
    HOPELESS_RATIO,
    Objective,
    Score,
    Scoring,
    Tier,
    broken_in,
    make_scoring,
    recorded_slacks,
)
from tuner.search.trials import Phase, Trial
from tuner.stats import tail_statistic

ROOMY = EngineLimits(32, 512)
BALANCED = Scoring(Objective.BALANCED, (), "p90")


@cache
def measured(per_s: float = 2.0, cap: int = 32, n: int = 150, *slos: str) -> Measurement:
    log = replay_toy(steady(n, per_s), EngineLimits(cap, 512))
    return measure([log], [Slo.parse(slo) for slo in slos])


def goal(objective: Objective, *slos: str) -> Scoring:
    return Scoring(objective, tuple(Slo.parse(slo) for slo in slos), "p90")


def test_balanced_is_the_tail_where_the_load_is_sustained_and_the_rate_where_not() -> None:
    fine, swamped = measured(), measured(per_s=50.0, cap=1)
    assert BALANCED.score(fine) == Score(
        Tier.GOOD, fine.latency("e2e_s", "p90") or 0.0, "e2e_p90"
    )
    score = BALANCED.score(swamped)
    assert score == Score(Tier.NOT_SUSTAINED, 1 / swamped.requests_per_s, "requests_per_s")
    assert score.clearly_worse_than(BALANCED.score(fine), 10.0)


def test_the_other_objectives_take_what_their_names_say() -> None:
    m = measured(50.0, 4, 150, "ttft_p50=1s")
    good = m.goodput_per_s
    assert good
    assert goal(Objective.THROUGHPUT).score(m).value == pytest.approx(1 / m.requests_per_s)
    assert goal(Objective.LATENCY).score(m).value == m.latency("e2e_s", "p50")
    assert goal(Objective.GOODPUT, "ttft_p50=1s").score(m).value == pytest.approx(1 / good)


def test_a_broken_slo_outweighs_every_speed_and_the_nearest_leads_among_the_broken() -> None:
    fast, slow = measured(), measured(cap=1)
    strict = goal(Objective.BALANCED, "e2e_p90=1ms", "ttft_p50=1h")
    scores = [strict.score(m) for m in (fast, slow)]
    assert {score.tier for score in scores} == {Tier.BREAKS_SLO}
    assert scores[0].value < scores[1].value
    loose = goal(Objective.BALANCED, "e2e_p90=1h")
    assert loose.score(fast) == BALANCED.score(fast)
    slacks = recorded_slacks(strict.slos, fast.as_json())
    assert slacks["ttft_p50"] < 0 < slacks["e2e_p90"]


def test_an_slo_at_its_very_bound_holds() -> None:
    m = measure([a_log([(float(i), [i + 0.5], Outcome.COMPLETED) for i in range(40)])])
    exact = goal(Objective.LATENCY, "e2e_p90=500ms")
    assert recorded_slacks(exact.slos, m.as_json()) == {"e2e_p90": 0.0}
    assert exact.score(m).tier is Tier.GOOD


def test_a_time_out_does_not_mend_the_tail_of_who_timed_out() -> None:
    """At a cap of 18 the p99 of TTFT breaks; dropping the slowest 3 % must not hold it."""
    due_s = np.sort(np.random.default_rng(3).uniform(0, 120, 1116))
    lengths = np.random.default_rng(4).integers(50, 150, 1116).tolist()
    trace = a_trace((due_s - due_s[0]).tolist(), 60, lengths)
    source = ToySource(ToyCosts(0.010, 0.0005, 0.00005), max_model_len=100_000)
    strict = goal(Objective.BALANCED, "ttft_p99=2500ms")
    scores = {}
    for patience_s in (None, 4.5):
        plan = ReplayPlan(timeout_s=patience_s)
        m = measure([replay_toy(trace, EngineLimits(18, 8192), source, plan)], strict.slos)
        scores[patience_s] = strict.score(m)
    assert m.timed_out > 0.01 * m.offered
    assert m.lost_ratio == m.timed_out / m.offered
    assert m.latency("ttft_s", "p99") == m.latency("e2e_s", "p99") == math.inf
    assert Caveat.REQUESTS_LOST in m.caveats
    assert {score.tier for score in scores.values()} == {Tier.BREAKS_SLO}
    (said,) = broken_in(strict.slos, m.as_json())
    assert f"{m.timed_out} requests were never answered" in said
    assert recorded_slacks(strict.slos, m.as_json()) == {"ttft_p99": math.inf}


def test_an_slo_on_a_mean_breaks_where_somebody_was_never_answered() -> None:
    lives = [(float(i), [i + 0.1], Outcome.COMPLETED) for i in range(99)]
    m = measure([a_log([*lives, (99.0, [], Outcome.TIMED_OUT)])])
    assert m.latency("e2e_s", "mean") == pytest.approx(0.1)
    assert goal(Objective.LATENCY, "e2e_mean=1s").score(m).tier is Tier.BREAKS_SLO
    assert goal(Objective.LATENCY, "e2e_p90=1s").score(m).tier is Tier.GOOD


def test_an_slo_on_what_was_not_measured_breaks_nothing() -> None:
    m = measure([a_log([(float(i), [i + 0.5], Outcome.COMPLETED) for i in range(40)])])
    assert goal(Objective.LATENCY, "tpot_p90=1ms").score(m).tier is Tier.GOOD
    # Nor does it use anything up, of which noise would make a coin that is flipped.
    both = goal(Objective.LATENCY, "tpot_p90=1ms", "ttft_p90=10s").score(m)
    assert both.slo_used == pytest.approx(0.05)


def test_a_queue_that_grows_though_there_is_room_is_clearly_too_much() -> None:
    m = replace(measured(), is_sustained=False, utilisation=0.8)
    assert BALANCED.score(m).load_used == 1.1
    assert BALANCED.score(replace(m, utilisation=1.02)).load_used == 1.02


def test_no_request_within_the_slos_is_no_good_configuration() -> None:
    m = measured(2.0, 32, 150, "ttft_p50=1ms")
    assert m.goodput_per_s == 0.0
    assert goal(Objective.GOODPUT, "ttft_p50=1ms").score(m).tier is Tier.BREAKS_SLO


@pytest.mark.parametrize("slos", [("e2e_p90=1s",), ("e2e_p90=1h",), ()])
@pytest.mark.parametrize("objective", [Objective.BALANCED, Objective.LATENCY])
@pytest.mark.parametrize("per_s", [0.5, 2.0, 50.0])
@given(times=st.floats(0.01, 100.0))
def test_a_slower_one_is_judged_by_what_counts_where_it_then_stands(
    per_s: float, objective: Objective, slos: tuple[str, ...], times: float
) -> None:
    score = goal(objective, *slos).score(measured(per_s, 4, 150, *slos))
    slower = score.times(times)
    for tier in (Tier.GOOD, Tier.NOT_SUSTAINED, Tier.BREAKS_SLO):
        assert slower.value_in(tier) == pytest.approx(times * score.value_in(tier))
    assert slower.own_metric == score.own_metric


def test_what_completed_nothing_or_was_cut_has_no_value() -> None:
    nothing = measure([a_log([(0.0, [], Outcome.REFUSED), (1.0, [], Outcome.REFUSED)])])
    cut = measure([a_log([(0.0, [1.0], Outcome.COMPLETED)], cut_reason="too late")])
    for m, tier in ((nothing, Tier.FAILED), (cut, Tier.CUT)):
        score = BALANCED.score(m)
        assert score.tier is tier
        assert score.value == math.inf


def test_tiers_are_ordered_from_good_to_failed() -> None:
    ordered = [Tier.GOOD, Tier.NOT_SUSTAINED, Tier.BREAKS_SLO, Tier.CUT, Tier.FAILED]
    assert sorted(Tier) == ordered == list(Tier)
    for better, worse in pairwise(ordered):
        a, b = Score(better, 9.0, "x"), Score(worse, 1.0, "y")
        assert a.order < b.order
        assert b.clearly_worse_than(a, 0.5)
        assert not a.clearly_worse_than(b, 0.5)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0, 0.5))
def test_at_most_one_of_two_is_clearly_worse(a: float, b: float, tolerance: float) -> None:
    ours, theirs = Score(Tier.GOOD, a, "e2e_p99"), Score(Tier.GOOD, b, "e2e_p99")
    worse = ours.clearly_worse_than(theirs, tolerance)
    assert not (worse and theirs.clearly_worse_than(ours, tolerance))
    assert worse == (a > b * (1 + tolerance))


@pytest.mark.parametrize(
    ("requests", "tail"),
    [(20, "p50"), (99, "p50"), (100, "p90"), (199, "p90"), (200, "p95"), (1000, "p99")],
)
def test_the_tail_is_the_highest_that_ten_requests_lie_beyond(requests: int, tail: str) -> None:
    assert tail_statistic(requests) == tail


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(TooFewSamplesError, match="19 requests"):
        tail_statistic(19)
    with pytest.raises(TooFewSamplesError, match="at least 100"):
        make_scoring(Objective.BALANCED, [Slo.parse("ttft_p99=1s")], 99)


def test_a_goal_is_put_together_for_the_window() -> None:
    slos = [Slo.parse("itl_p99=1s"), Slo.parse("ttft_p50=1s")]
    assert make_scoring(Objective.LATENCY, slos, 250) == Scoring(
        Objective.LATENCY, tuple(slos), "p95"
    )


@pytest.mark.parametrize("slos", [(), ("itl_p99=1s", "decode_step_mean=1s")])
def test_goodput_wants_something_to_count(slos: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="at least one"):
        goal(Objective.GOODPUT, *slos)


def test_nothing_is_hopeless_without_a_good_one_to_lose_to() -> None:
    for best in (
        None,
        Score(Tier.FAILED, math.inf, "no request completed"),
        Score(Tier.BREAKS_SLO, 2.0, "worst SLO slack"),
        Score(Tier.GOOD, 0.5, "goodput_per_s"),
    ):
        assert BALANCED.cut_rule(best, 100) == CutRule()


@given(
    seed=st.integers(0, 100),
    cap=st.integers(1, 12),
    offset_s=st.sampled_from([0.0, 500.0]),
    objective=st.sampled_from([Objective.BALANCED, Objective.LATENCY, Objective.THROUGHPUT]),
    per_s=st.sampled_from([3.0, 8.0, 40.0]),
)
@settings(deadline=None, max_examples=40)
def test_whatever_is_cut_would_have_lost(
    seed: int, cap: int, offset_s: float, objective: Objective, per_s: float
) -> None:
    base = steady(120, per_s, seed=seed)
    trace = a_trace(
        base.due_s + offset_s, base.prompt_tokens.tolist(), base.output_tokens.tolist()
    )
    asked = goal(objective)
    best = asked.score(measure([replay_toy(trace, ROOMY)]))
    rule = asked.cut_rule(best, 120)
    limits = EngineLimits(cap, 64)
    cut = replay_toy(trace, limits, plan=ReplayPlan(cut=rule))
    whole = asked.score(measure([replay_toy(trace, limits)]))
    if cut.cut_reason is not None:
        assert whole.clearly_worse_than(best, HOPELESS_RATIO - 1 - 1e-9)


@pytest.mark.parametrize(
    ("tail", "requests", "allowed"), [("p99", 1000, 10), ("p90", 100, 10), ("p95", 219, 10)]
)
def test_as_many_may_be_late_as_lie_beyond_the_quantile(
    tail: str, requests: int, allowed: int
) -> None:
    best = Score(Tier.GOOD, 2.0, f"e2e_{tail}")
    rule = BALANCED.cut_rule(best, requests)
    assert rule == CutRule(late_s=HOPELESS_RATIO * 2.0, allowed_late=allowed)


def test_hopeless_replays_are_cut_early() -> None:
    """Negative control of the test above: the rule does bite."""
    trace = steady(200, 10.0)
    best = BALANCED.score(measure([replay_toy(trace, ROOMY)]))
    one = EngineLimits(1, 512)
    plan = ReplayPlan(cut=BALANCED.cut_rule(best, 200))
    cut, whole = replay_toy(trace, one, plan=plan), replay_toy(trace, one)
    assert cut.cut_reason is not None
    assert cut.steps.steps < 0.5 * whole.steps.steps


def test_a_hidden_server_that_is_twice_as_slow_is_seen_in_the_score() -> None:
    trace, costs = steady(150, 1.0), ToyCosts()
    normal, slow = (
        goal(Objective.LATENCY).score(measure([replay_toy(trace, ROOMY, ToySource(c))]))
        for c in (costs, costs.scaled(2))
    )
    assert slow.value / normal.value == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("objective", "none"),
    [
        (Objective.GOODPUT, {"goodput_per_s": 0.0}),
        (Objective.CAPACITY, {"capacity": 0.0}),
    ],
)
def test_who_has_nothing_of_what_is_optimised_is_the_worst_by_it(
    objective: Objective, none: dict[str, Any]
) -> None:
    """Also where a trial has kept the score, and though it answers more requests a second."""
    scoring = goal(objective, "ttft_p50=1s")
    some: dict[str, Any] = dict.fromkeys(none, 1e-6)
    measured_ones = [replace(measured(50.0, 4, 150, "ttft_p50=1s"), **x) for x in (none, some)]
    scores = [scoring.score(m) for m in measured_ones]
    trials = [Trial.of(0, ROOMY, Phase.RACE, 1, score, None) for score in scores]
    for worse, better in (scores, [trial.score for trial in trials]):
        assert worse.own_metric == better.own_metric == next(iter(none))
        assert worse.value_in(Tier.GOOD) == math.inf
        assert better.value_in(Tier.GOOD) == pytest.approx(1e6)


def test_at_a_given_load_capacities_compare_by_their_slos_on_either_side_of_the_bound() -> None:
    m = measured(2.0, 32, 150, "ttft_p50=1s")
    ttft_s = m.latency("ttft_s", "p50") or 0.0
    within, beyond = (
        goal(Objective.CAPACITY, f"ttft_p50={bound_s}s").score(m)
        for bound_s in (1.01 * ttft_s, 0.99 * ttft_s)
    )
    assert (within.tier, beyond.tier) == (Tier.GOOD, Tier.BREAKS_SLO)
    ratio = beyond.value_in(Tier.GOOD) / within.value_in(Tier.GOOD)
    assert ratio == pytest.approx(1.01 / 0.99, rel=1e-3)
