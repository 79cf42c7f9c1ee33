"""Races tell what is really better from what only looks so; their error rates are stated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.engine.limits import EngineLimits
from tuner.search.objective import Score, Tier
from tuner.search.race import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    RaceDecision,
    RacePredictions,
    RaceRun,
    RaceVerdict,
    compare_pair,
    decide,
    next_run,
    paired,
    ratio,
    ratios,
    survivors,
)

SMALL, MIDDLE, LARGE = (EngineLimits(cap, 2048) for cap in (4, 8, 16))
CURRENT = EngineLimits(12, 2048)
RACES = 400


def good(value: float) -> Score:
    return Score(Tier.GOOD, value, "e2e_p95")


def runs_of(values: Mapping[EngineLimits, Sequence[float | Score]]) -> list[RaceRun]:
    """Return rounds from 1 on; a number stands for a good score."""
    return [
        RaceRun(limits, number, score if isinstance(score, Score) else good(score))
        for limits, scores in values.items()
        for number, score in enumerate(scores, start=1)
    ]


def raced(
    truth: Mapping[EngineLimits, float],
    seed: int,
    noise_ratio: float = 0.02,
    drift_ratio: float = 0.1,
) -> tuple[RaceDecision, list[RaceRun]]:
    """Race to the end: each run has its own noise, and each round a drift that all share."""
    rng = np.random.default_rng(seed)
    drifts = np.exp(drift_ratio * rng.standard_normal(MAX_ROUNDS + 1))
    field, runs = list(truth), list[RaceRun]()
    while (following := next_run(runs, field, field[-1])) is not None:
        number, limits = following
        noise = math.exp(noise_ratio * rng.standard_normal())
        runs.append(RaceRun(limits, number, good(truth[limits] * drifts[number] * noise)))
    return decide(runs, field, field[-1]), runs


def verdicts(
    truth: Mapping[EngineLimits, float], noise_ratio: float = 0.02
) -> Counter[RaceVerdict]:
    return Counter(raced(truth, seed, noise_ratio)[0].verdict for seed in range(RACES))


@pytest.mark.parametrize("noise_ratio", [0.005, 0.02, 0.1])
def test_two_equal_configurations_are_kept_as_they_are(noise_ratio: float) -> None:
    """Seeds 0 to 399; asked for are at most 5 % false changes, about 2 % are made."""
    seen = verdicts({SMALL: 1.0, CURRENT: 1.0}, noise_ratio)
    assert seen[RaceVerdict.KEEP] >= 0.95 * RACES


def test_among_four_equal_ones_none_is_preferred_more_often() -> None:
    """Seeds 0 to 99: choosing the luckiest of three does not raise the rate above 5 %."""
    truth = {SMALL: 1.0, MIDDLE: 1.0, LARGE: 1.0, CURRENT: 1.0}
    changed = sum(raced(truth, seed)[0].verdict is RaceVerdict.CHANGE for seed in range(100))
    assert changed <= 5


def test_a_tenth_better_is_found() -> None:
    """Seeds 0 to 399 with 2 % noise: found in at least 95 %, in all of them as it is."""
    seen = verdicts({SMALL: 0.9, CURRENT: 1.0})
    assert seen[RaceVerdict.CHANGE] >= 0.95 * RACES


def test_the_shared_drift_of_a_round_does_not_hide_a_gain() -> None:
    found, runs = raced({SMALL: 0.9, CURRENT: 1.0}, seed=0, drift_ratio=1.0)
    assert found.verdict is RaceVerdict.CHANGE
    assert found.gain is not None
    assert found.gain.low is not None
    assert found.gain.high is not None
    assert found.gain.low < 0.9 < found.gain.high < 1
    assert found.gain.n == found.rounds == max(run.round for run in runs)


def test_a_gain_that_is_certain_but_too_small_to_matter_changes_nothing() -> None:
    found, runs = raced({SMALL: 0.99, CURRENT: 1.0}, seed=0, noise_ratio=0.0005)
    assert compare_pair(runs, SMALL, CURRENT) == -1
    assert found.verdict is RaceVerdict.KEEP
    assert found.winner == CURRENT
    assert found.best == SMALL
    assert "less than 2%" in found.why
    assert found.rounds == MIN_ROUNDS


def test_a_tie_among_the_better_goes_to_the_smaller() -> None:
    truth = {LARGE: 0.80, MIDDLE: 0.801, SMALL: 0.9, CURRENT: 1.0}
    found, _ = raced(truth, seed=0, noise_ratio=0.002)
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, MIDDLE)
    assert found.best in (MIDDLE, LARGE)
    assert set(found.tied) == {MIDDLE, LARGE}


def test_a_tie_for_want_of_evidence_is_no_reason_to_take_what_measured_worse() -> None:
    """The smaller one looks 6 % worse, within a noise of 10 %: it ties, and is not taken."""
    runs = runs_of(
        {
            SMALL: [1.15, 1.0, 1.16, 0.95, 1.06],
            LARGE: [1.0, 1.05, 0.98, 1.02, 0.97],
            CURRENT: [2.0] * 5,
        }
    )
    found = decide(runs, [SMALL, LARGE, CURRENT], CURRENT)
    assert found.tied == (SMALL, LARGE)
    assert found.winner == found.best == LARGE


def test_equals_race_no_further_once_the_current_one_is_out() -> None:
    """Seeds 0 to 99 of three near ones: 27 replays to the last round, mostly 12."""
    for near in (1.0, 1.01):
        equals = {SMALL: near, MIDDLE: near, LARGE: 1.0, CURRENT: 1.6}
        laps = [len(raced(equals, seed)[1]) for seed in range(100)]
        assert np.mean(laps) < 14
    differ = {SMALL: 1.1, MIDDLE: 1.1, LARGE: 1.0, CURRENT: 1.6}
    winners = Counter(raced(differ, seed)[0].winner for seed in range(100))
    assert winners[LARGE] >= 95


def test_a_race_among_the_better_goes_on_while_the_wrong_one_would_cost() -> None:
    """The better one so far may be worse by half a percent, or by far more than that."""
    field = [SMALL, LARGE, CURRENT]
    far = {CURRENT: [5.0, 5.01, 4.99], LARGE: [1.0, 1.0, 1.0]}
    quiet, noisy = [0.995, 1.01, 1.01], [2.2, 1.1, 1.3]
    assert next_run(runs_of({**far, SMALL: quiet}), field, CURRENT) is None
    following = next_run(runs_of({**far, SMALL: noisy}), field, CURRENT)
    assert following is not None
    assert following[0] == MIN_ROUNDS + 1
    assert following[1] != CURRENT


def test_equals_whose_tiers_come_and_go_race_no_further_either() -> None:
    """Each sustains the load in one round in which the other does not: nothing can tell."""
    held = [at_the_edge(30.0, is_sustained=place != 1) for place in range(3)]
    lost = [at_the_edge(30.1, is_sustained=place != 0) for place in range(3)]
    current = [at_the_edge(13.0 + 0.1 * place, is_sustained=False) for place in range(3)]
    runs = runs_of({SMALL: held, LARGE: lost, CURRENT: current})
    assert next_run(runs, [SMALL, LARGE, CURRENT], CURRENT) is None
    assert decide(runs, [SMALL, LARGE, CURRENT], CURRENT).winner == SMALL


def test_of_one_cap_the_smaller_budget_wins_a_tie() -> None:
    low, high = EngineLimits(8, 512), EngineLimits(8, 4096)
    found, _ = raced({high: 0.8, low: 0.8, CURRENT: 1.0}, seed=1, noise_ratio=0.002)
    assert found.winner == low


def test_the_current_one_may_be_the_best() -> None:
    found, _ = raced({SMALL: 1.2, CURRENT: 1.0}, seed=0)
    assert (found.verdict, found.winner, found.best) == (RaceVerdict.KEEP, CURRENT, CURRENT)
    assert found.gain is None
    assert "nothing that was tried is better" in found.why


def test_tiers_separate_only_when_all_rounds_agree() -> None:
    bad = Score(Tier.NOT_SUSTAINED, 0.1, "requests_per_s")
    always = runs_of({SMALL: [1.0, 1.0, 1.0], CURRENT: [bad, bad, bad]})
    assert compare_pair(always, SMALL, CURRENT) == -1
    assert compare_pair(always, CURRENT, SMALL) == 1
    once = runs_of({SMALL: [1.0, 1.0, bad], CURRENT: [bad, bad, bad]})
    assert compare_pair(once, SMALL, CURRENT) == 0
    assert ratio(once, SMALL, CURRENT) is None
    assert decide(always, [SMALL, CURRENT], CURRENT).verdict is RaceVerdict.CHANGE
    assert decide(once, [SMALL, CURRENT], CURRENT).verdict is RaceVerdict.KEEP


def at_the_edge(rate_per_s: float, *, is_sustained: bool, tail_s: float = 0.5) -> Score:
    """Return what a replay is worth that the queue may or may not have grown through."""
    rate, tail = ("requests_per_s", 1 / rate_per_s), ("e2e_p90", tail_s)
    if is_sustained:
        return Score(Tier.GOOD, tail[1], tail[0], (rate,))
    return Score(Tier.NOT_SUSTAINED, rate[1], rate[0], (tail,))


def test_a_tier_that_changes_from_round_to_round_hides_no_gain() -> None:
    """Now it sustains the load, now not, and always serves more than twice as much."""
    current = [at_the_edge(rate, is_sustained=False) for rate in (12.4, 12.6, 12.5, 12.5)]
    larger = [
        at_the_edge(rate, is_sustained=number % 2 == 0)
        for number, rate in enumerate((30.0, 29.0, 30.5, 29.5))
    ]
    runs = runs_of({LARGE: larger, CURRENT: current})
    assert compare_pair(runs, LARGE, CURRENT) == -1
    assert decide(runs, [LARGE, CURRENT], CURRENT).verdict is RaceVerdict.CHANGE
    against = [*larger[:3], at_the_edge(29.5, is_sustained=False)]
    once = [*current[:3], at_the_edge(12.5, is_sustained=True)]
    assert compare_pair(runs_of({LARGE: against, CURRENT: once}), LARGE, CURRENT) == 0


def test_one_look_drops_who_never_sustains_what_the_other_always_does() -> None:
    """By half as much again in every round, though three rounds leave a wide interval."""
    current = [at_the_edge(rate, is_sustained=False) for rate in (1.3, 1.9, 1.5)]
    larger = [at_the_edge(rate, is_sustained=True) for rate in (2.5, 2.4, 2.5)]
    gains = ratios(runs_of({LARGE: larger, CURRENT: current}), LARGE, CURRENT)
    assert gains
    assert all(gain.high is not None and gain.high >= 1 for gain in gains)
    for once, following in ((False, None), (True, (MIN_ROUNDS + 1, LARGE))):
        last = at_the_edge(1.5, is_sustained=once)
        runs = runs_of({LARGE: larger, CURRENT: [*current[:2], last]})
        assert next_run(runs, [LARGE, CURRENT], CURRENT) == following


def test_a_gain_in_the_tail_shows_where_both_serve_the_same_rate() -> None:
    """The current one sustains the load in two rounds of four, the larger one in all."""
    current = [
        at_the_edge(12.5, is_sustained=number % 2 == 0, tail_s=tail_s)
        for number, tail_s in enumerate((2.0, 2.1, 1.9, 2.0))
    ]
    larger = [at_the_edge(12.5, is_sustained=True, tail_s=s) for s in (1.0, 1.1, 0.9, 1.0)]
    runs = runs_of({LARGE: larger, CURRENT: current})
    assert compare_pair(runs, LARGE, CURRENT) == -1
    assert decide(runs, [LARGE, CURRENT], CURRENT).verdict is RaceVerdict.CHANGE
    slower = [
        at_the_edge(rate, is_sustained=True, tail_s=1.0) for rate in (9.9, 10.1, 10.0, 10.0)
    ]
    assert compare_pair(runs_of({LARGE: slower, CURRENT: current}), LARGE, CURRENT) == 0


def test_of_several_metrics_only_what_matters_counts() -> None:
    """Both break the load once; the rate differs surely, and by two in a thousand."""
    rates = {SMALL: 10.02, CURRENT: 10.0}
    tails = {SMALL: [1.1, 0.9, 1.05, 0.95], CURRENT: [1.0, 1.0, 1.0, 1.0]}
    scores = {
        limits: [
            at_the_edge(rates[limits], is_sustained=place != 1, tail_s=tail_s)
            for place, tail_s in enumerate(tails[limits])
        ]
        for limits in (SMALL, CURRENT)
    }
    runs = runs_of(scores)
    assert compare_pair(runs, SMALL, CURRENT) == 0
    assert decide(runs, [SMALL, CURRENT], CURRENT).verdict is RaceVerdict.KEEP


def test_who_wins_a_tie_is_better_than_the_current_one_by_what_matters() -> None:
    """The smaller one is as good as equal to both, the best is better by 2.4 %."""
    runs = runs_of({SMALL: [0.9900, 0.9901, 0.9899], LARGE: [0.976] * 3, CURRENT: [1.0] * 3})
    found = decide(runs, [SMALL, LARGE, CURRENT], CURRENT)
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, LARGE)


def test_equal_ones_at_the_edge_of_what_they_sustain_are_kept() -> None:
    """Seeds 0 to 399: at most 5 % of equals are told apart although their tiers come and go."""
    rng, shown = np.random.default_rng(0), 0
    for _ in range(RACES):
        runs = list[RaceRun]()
        while (following := next_run(runs, [SMALL, CURRENT], CURRENT)) is not None:
            rate = 10 * math.exp(0.1 * rng.standard_normal())
            tail_s = math.exp(0.3 * rng.standard_normal())
            is_sustained = bool(rng.random() < 0.5)
            score = at_the_edge(rate, is_sustained=is_sustained, tail_s=tail_s)
            runs.append(RaceRun(following[1], following[0], score))
        shown += compare_pair(runs, SMALL, CURRENT) != 0
    assert shown <= 0.05 * RACES


def test_a_change_by_tiers_alone_has_no_ratio_to_show() -> None:
    bad = Score(Tier.NOT_SUSTAINED, 0.1, "requests_per_s")
    runs = runs_of({SMALL: [1.0, 1.0, 1.0], CURRENT: [bad, bad, bad]})
    found = decide(runs, [SMALL, CURRENT], CURRENT)
    assert found.winner == SMALL
    assert found.gain is None


def test_failed_rounds_are_never_a_number() -> None:
    failed = Score(Tier.FAILED, math.inf, "failed")
    runs = runs_of({SMALL: [failed] * 3, CURRENT: [1.0] * 3})
    assert ratio(runs, SMALL, CURRENT) is None
    assert survivors(runs, [SMALL, CURRENT]) == [CURRENT]
    assert decide(runs, [SMALL, CURRENT], CURRENT).verdict is RaceVerdict.KEEP


CUT, FAILED = (Score(tier, math.inf, str(tier)) for tier in (Tier.CUT, Tier.FAILED))


@pytest.mark.parametrize("cut", [SMALL, CURRENT])
def test_a_round_that_the_clock_cut_short_takes_nothing_back(cut: EngineLimits) -> None:
    """Five rounds at 0.67 of the current value were proof; the sixth did not end."""
    five = {SMALL: [1.0, 1.01] * 2 + [1.0], CURRENT: [1.5, 1.51, 1.52, 1.5, 1.51]}
    proven = decide(runs_of(five), [SMALL, CURRENT], CURRENT)
    other = CURRENT if cut == SMALL else SMALL
    sixth: dict[EngineLimits, list[float | Score]] = {
        cut: [*five[cut], CUT],
        other: [*five[other], 1.2],
    }
    assert proven.verdict is RaceVerdict.CHANGE
    assert decide(runs_of(sixth), [SMALL, CURRENT], CURRENT) == proven


@pytest.mark.parametrize("failing", [SMALL, CURRENT])
def test_failing_in_some_rounds_speaks_against_who_failed(failing: EngineLimits) -> None:
    values = {SMALL: [1.0, 1.01, 1.0, 1.01], CURRENT: [1.5, 1.51, 1.52, 1.5]}
    rounds: dict[EngineLimits, list[float | Score]] = {x: [*v] for x, v in values.items()}
    rounds[failing][3] = FAILED
    runs = runs_of(rounds)
    found = decide(runs, [SMALL, CURRENT], CURRENT)
    assert found.winner == (CURRENT if failing == SMALL else SMALL)
    # What the whole rounds measured is told all the same.
    if found.winner == SMALL:
        assert found.gain is not None
        assert found.gain.value == pytest.approx(0.67, abs=0.01)
        assert found.gain.n == 3


def test_a_round_that_was_split_by_an_interruption_is_run_anew() -> None:
    """Its halves are hours apart and share nothing: the second process begins it again."""
    before = [RaceRun(limits, 1, good(1.0), "before") for limits in (SMALL, CURRENT)] + [
        RaceRun(CURRENT, 2, good(9.0), "before")
    ]
    field = [SMALL, CURRENT]
    assert next_run(before, field, CURRENT, "before") == (2, SMALL)
    runs = list(before)
    for _ in range(2):
        following = next_run(runs, field, CURRENT, "after")
        assert following is not None
        assert following[0] == 2
        runs.append(RaceRun(following[1], 2, good(1.0), "after"))
    assert {run.limits for run in runs if run.attempt == "after"} == set(field)
    assert paired(runs, SMALL, CURRENT)[1] == [good(1.0), good(1.0)]


def overloaded(rate_per_s: float, tail_s: float) -> Score:
    return at_the_edge(rate_per_s, is_sustained=False, tail_s=tail_s)


THRICE = RacePredictions({LARGE: overloaded(44.0, 2.9), CURRENT: overloaded(15.0, 9.5)}, 0.1)


def test_two_rounds_and_the_prediction_tell_a_factor_of_three() -> None:
    """The budget ended after two rounds of -74 % in the tail and thrice the rate."""
    rounds = {
        LARGE: [overloaded(45.0, 2.6), overloaded(44.0, 2.7)],
        CURRENT: [overloaded(15.3, 10.1), overloaded(15.1, 10.2)],
    }
    found = decide(runs_of(rounds), [LARGE, CURRENT], CURRENT, THRICE)
    assert (found.verdict, found.winner, found.rounds) == (RaceVerdict.CHANGE, LARGE, 2)
    assert found.gain is not None
    assert found.gain.low is not None
    assert found.gain.high is not None
    assert found.gain.low < found.gain.value < found.gain.high < 1
    assert found.tied == (LARGE,)
    # Rounds alone, without a prediction, are too few.
    alone = decide(runs_of(rounds), [LARGE, CURRENT], CURRENT)
    assert (alone.verdict, alone.is_thin, alone.tied) == (RaceVerdict.KEEP, True, (LARGE,))


@pytest.mark.parametrize(
    ("second", "predictions"),
    [
        # One round says the contrary.
        (overloaded(15.0, 10.3), THRICE),
        # The prediction sees no difference, or says that it may be wrong by as much.
        (
            overloaded(44.0, 2.7),
            RacePredictions({LARGE: overloaded(15, 9), CURRENT: overloaded(15, 9)}, 0.1),
        ),
        (overloaded(44.0, 2.7), RacePredictions(THRICE.scores, 2.0)),
        (FAILED, THRICE),
    ],
)
def test_what_does_not_agree_is_not_told_from_two_rounds(
    second: Score, predictions: RacePredictions
) -> None:
    rounds = {
        LARGE: [overloaded(45.0, 2.6), second],
        CURRENT: [overloaded(15.3, 10.1), overloaded(15.1, 10.2)],
    }
    found = decide(runs_of(rounds), [LARGE, CURRENT], CURRENT, predictions)
    assert found.verdict is RaceVerdict.KEEP
    assert found.is_thin


def test_a_right_prediction_of_equals_makes_no_change_from_two_rounds() -> None:
    """Seeds 0 to 399 with 10 % noise: two rounds of equals are never called a change."""
    equal = RacePredictions({SMALL: good(1.0), CURRENT: good(1.0)}, 0.05)
    rng, changed = np.random.default_rng(0), 0
    for _ in range(RACES):
        first, second = np.exp(0.1 * rng.standard_normal((2, 2))).tolist()
        runs = runs_of({SMALL: first, CURRENT: second})
        changed += decide(runs, [SMALL, CURRENT], CURRENT, equal).verdict is RaceVerdict.CHANGE
    assert changed == 0


def test_two_that_never_sustain_the_load_at_the_same_rate_are_told_by_their_tails() -> None:
    rates, tails = (31.0, 30.8, 31.1), (4.3, 4.31, 4.29)
    small = [overloaded(r, t) for r, t in zip(rates, tails, strict=True)]
    large = [overloaded(r, 4.9) for r in (30.9, 31.0, 31.0)]
    runs = runs_of({SMALL: small, LARGE: large})
    assert compare_pair(runs, SMALL, LARGE) == -1
    faster = [overloaded(40.0, 4.9) for _ in rates]
    assert compare_pair(runs_of({SMALL: small, LARGE: faster}), SMALL, LARGE) == 1


@pytest.mark.parametrize("rounds", [1, MIN_ROUNDS - 1])
def test_too_few_rounds_separate_nothing_however_far_apart(rounds: int) -> None:
    runs = runs_of({SMALL: [1.0] * rounds, CURRENT: [9.0] * rounds})
    assert compare_pair(runs, SMALL, CURRENT) == 0
    found = decide(runs, [SMALL, CURRENT], CURRENT)
    assert found.verdict is RaceVerdict.KEEP
    assert "budget" in found.why


def test_without_a_single_run_the_current_one_is_kept() -> None:
    for field in ([SMALL, CURRENT], [CURRENT]):
        found = decide([], field, CURRENT)
        assert (found.verdict, found.winner, found.rounds) == (RaceVerdict.KEEP, CURRENT, 0)
        assert found.gain is None
        assert found.why


def test_nobody_races_alone() -> None:
    assert next_run([], [CURRENT], CURRENT) is None


def test_the_order_rotates_from_round_to_round() -> None:
    field = [SMALL, MIDDLE, CURRENT]
    _, runs = raced(dict.fromkeys(field, 1.0), seed=0)
    firsts = [
        next(run.limits for run in runs if run.round == number)
        for number in range(1, MIN_ROUNDS + 1)
    ]
    assert set(firsts) == set(field)
    for number in range(1, MIN_ROUNDS + 1):
        assert {run.limits for run in runs if run.round == number} == set(field)


def test_who_is_shown_to_be_worse_races_no_more() -> None:
    _, runs = raced({SMALL: 1.0, MIDDLE: 3.0, CURRENT: 1.0}, seed=0)
    laps = Counter(run.limits for run in runs)
    assert laps[MIDDLE] == MIN_ROUNDS < laps[SMALL] == laps[CURRENT]


def test_one_look_drops_only_who_is_worse_by_far() -> None:
    """Three rounds by themselves leave no doubt about either; the fourth takes it back."""
    field = [SMALL, MIDDLE, CURRENT]
    slower = {SMALL: [1.05, 1.0501, 1.0499], MIDDLE: [1.5, 1.5002, 1.4998], CURRENT: [1.0] * 3}
    runs = runs_of(slower)
    assert survivors(runs, field) == [CURRENT]
    again = [SMALL, CURRENT]
    assert {limits for _, limits in ahead(runs, field, 2)} == set(again)
    doubted = [*runs, *(RaceRun(limits, 4, good(1.0)) for limits in again)]
    assert survivors(doubted, field) == again
    agreed = [*runs, RaceRun(SMALL, 4, good(1.05)), RaceRun(CURRENT, 4, good(1.0))]
    assert next_run(agreed, field, CURRENT) is None


def ahead(
    runs: Sequence[RaceRun], field: Sequence[EngineLimits], count: int
) -> list[tuple[int, EngineLimits]]:
    """Return what is replayed next, so many times."""
    done, found = list(runs), list[tuple[int, EngineLimits]]()
    while len(found) < count and (following := next_run(done, field, CURRENT)) is not None:
        found.append(following)
        done.append(RaceRun(following[1], following[0], good(1.0)))
    return found


def test_a_race_goes_on_where_it_was_interrupted() -> None:
    truth = {SMALL: 1.0, MIDDLE: 1.0, CURRENT: 1.0}
    _, runs = raced(truth, seed=3)
    for done in range(len(runs)):
        following = next_run(runs[:done], list(truth), CURRENT)
        assert following == (runs[done].round, runs[done].limits)


@given(
    st.dictionaries(
        st.sampled_from([SMALL, MIDDLE, LARGE, CURRENT]),
        st.lists(
            st.builds(
                Score,
                st.sampled_from(Tier),
                st.floats(0.01, 100),
                st.sampled_from(["e2e_p95", "requests_per_s"]),
            ),
            max_size=MAX_ROUNDS,
        ),
    )
)
@settings(deadline=None, max_examples=150)
def test_any_set_of_runs_leads_to_a_decision_about_the_field(
    scores: dict[EngineLimits, list[Score]],
) -> None:
    field = [*(limits for limits in scores if limits != CURRENT), CURRENT]
    runs = runs_of(scores)
    found = decide(runs, field, CURRENT)
    assert {found.winner, found.best} <= set(field)
    assert (found.verdict is RaceVerdict.KEEP) == (found.winner == CURRENT)
    assert set(found.tied) <= set(field)
    for a in field:
        for b in field:
            assert compare_pair(runs, a, b) == -compare_pair(runs, b, a)
    following = next_run(runs, field, CURRENT)
    assert following is None or following[1] in field
