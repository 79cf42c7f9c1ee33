"""Draws decide: who surely keeps the bounds, who loses least, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.optional import not_none
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.search.choice import Choice, is_likely_out, witnesses
from tuner.search.draws import Draws, Learnable, drawn_of
from tuner.search.effects import Effects
from tuner.search.judging import COST, SLO, TIE_LOSS
from tuner.search.objective import RATE, WORST_SLACK, Score, Tier
from tuner.search.race import RaceDecision, RaceRun, RaceVerdict
from tuner.search.replayed import draws_of_replays
from tuner.stats import Floats

CURRENT, OTHER, THIRD = EngineLimits(16, 2048), EngineLimits(8, 1024), EngineLimits(4, 512)
FAILED = Score(Tier.FAILED, math.inf, "out of memory")
DRAWS = 400


def score(value: float, *, slo: float | None = None, load: float | None = 0.5) -> Score:
    """Return the score of a setting with such a tail, so much of its SLO and load used up."""
    values = {"e2e_p99": value, RATE: 1.0} | ({} if slo is None else {WORST_SLACK: slo})
    tier, metric = Tier.GOOD, "e2e_p99"
    if slo is not None and slo > 1:
        tier, metric = Tier.BREAKS_SLO, WORST_SLACK
    elif load is not None and load > 1:
        tier, metric = Tier.NOT_SUSTAINED, RATE
    return Score(tier, values.pop(metric), metric, tuple(values.items()), slo, load)


def draws(*point: Score, error: float = 0.05, common: float = 0.2, seed: int = 0) -> Draws:
    """Return draws that scatter by an error of each setting's own and by one that all share."""
    rng = np.random.default_rng(seed)
    shared = np.exp(rng.normal(0.0, common, DRAWS))
    own = np.exp(rng.normal(0.0, error, (DRAWS, len(point))))
    settings = (CURRENT, OTHER, THIRD)[: len(point)]
    here = drawn_of(point) * (own * shared[:, None])[:, :, None]
    return Draws.of(settings, point, here)


def decided(
    *point: Score, error: float = 0.05, common: float = 0.2, seed: int = 0
) -> RaceDecision:
    """Return what such draws decide."""
    return Choice(draws(*point, error=error, common=common, seed=seed), CURRENT).decide()


def test_a_sure_gain_is_a_change_with_its_interval_about_what_was_predicted() -> None:
    found = decided(score(2.0), score(1.6))
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert found.gain is not None
    assert found.odds is not None
    assert found.gain.value == pytest.approx(0.8)
    # What all settings share cancels; the errors of two remain.
    assert found.gain.low == pytest.approx(0.8 * math.exp(-1.645 * 0.05 * 2**0.5), rel=0.03)
    assert found.gain.high == pytest.approx(0.8 * math.exp(1.645 * 0.05 * 2**0.5), rel=0.03)
    assert found.odds.p_better > 0.99
    assert found.odds.p_slo is None
    assert found.odds.loss == pytest.approx(0.25, abs=0.05)


def test_of_settings_that_finish_the_same_rate_the_smallest_is_among_those_in_contention() -> (
    None
):
    """By chance of the draws any of them is the likeliest, and has decodes as slow as it is."""
    settings = [EngineLimits(cap, 2048) for cap in (16, 256, 128, 96, 64, 48)]
    rates = (20.0, 30.0, 30.0, 30.0, 29.9, 25.0)
    point = [Score(Tier.GOOD, 1 / per_s, RATE) for per_s in rates]
    own = np.exp(np.random.default_rng(3).normal(0.0, 0.01, (DRAWS, len(point), 1)))
    found = Draws.of(settings, point, drawn_of(point) * own)
    assert settings[4] in Choice(found, settings[0]).contenders(most=2)
    assert (
        Choice(found.among(Choice(found, settings[0]).contenders(most=2)), settings[0])
        .decide()
        .winner
        == (settings[4])
    )


def test_that_slos_are_met_on_other_hours_too_has_a_probability_of_its_own() -> None:
    """Of what would be recommended, or else of the current one that is kept."""
    for slo, other, verdict in ((0.5, 0.9, RaceVerdict.CHANGE), (0.9, 0.5, RaceVerdict.KEEP)):
        point = [score(2.0, slo=slo), score(1.0 if slo < other else 3.0, slo=other)]
        rng = np.random.default_rng(1)
        calm, busy = (np.exp(rng.normal(0.0, sd, (DRAWS, 2, 1))) for sd in (0.01, 0.3))
        drawn = drawn_of(point) * busy

        def others(some: Sequence[EngineLimits], drawn: Floats = drawn) -> Floats:
            return drawn[:, [(CURRENT, OTHER).index(limits) for limits in some]]

        found = Draws.of((CURRENT, OTHER), point, drawn_of(point) * calm, others, 16)
        odds = not_none(Choice(found, CURRENT).decide().odds)
        assert Choice(found, CURRENT).decide().verdict is verdict
        assert odds.p_slo == 1.0
        assert odds.p_slo_elsewhere == pytest.approx(0.63, abs=0.06)
        assert f"P(SLOs met) 1.00 (other hours {odds.p_slo_elsewhere:.2f})" in odds.text


def test_a_gain_that_loses_a_little_on_most_other_hours_has_to_be_one_in_the_mean() -> None:
    """As near overload, where a queue that one of the two builds up costs several times more.

    On 45 of 100 other hours the gain is such that all of them have what was predicted.
    """
    told = []
    for value, slo in ((1.9, None), (1.99, None), (1.9, 0.5)):
        point = [score(2.0, slo=slo), score(value, slo=slo)]
        drawn = drawn_of([point[0], point[0]])[None].repeat(DRAWS, axis=0)
        is_small = np.arange(DRAWS) % 20 < 11
        gain = (math.log(value / 2.0) - 0.55 * 0.05) / 0.45
        drawn[:, 1, COST] *= np.exp(np.where(is_small, 0.05, gain))
        # Beside that it may meet the SLOs less often there.
        drawn[::7, 1, SLO] *= 3.0

        def others(some: Sequence[EngineLimits], drawn: Floats = drawn) -> Floats:
            return drawn[:, [(CURRENT, OTHER).index(limits) for limits in some]]

        here = drawn_of(point)[None].repeat(DRAWS, axis=0)
        found = Choice(Draws.of((CURRENT, OTHER), point, here, others, 1000), CURRENT).decide()
        odds = not_none(found.odds)
        assert (odds.p_better, odds.p_elsewhere < 0.5) == (1.0, True)
        told.append((found.verdict, odds.cost_elsewhere, odds.text))
    (change, cost, text), (small, more, _), (breaks, unknown, other) = told
    assert (change, small, breaks) == (RaceVerdict.CHANGE, RaceVerdict.KEEP, RaceVerdict.KEEP)
    assert unknown is None
    assert cost == pytest.approx(0.956, abs=0.01)
    assert more == pytest.approx(0.997, abs=0.01)
    assert "P(better) 1.00 (other hours 0.45, 0.96 times the cost in the mean)" in text
    assert "times the cost" not in other


def test_a_few_draws_that_are_far_off_do_not_move_the_gain_out_of_its_interval() -> None:
    """As near overload, where a model a little slower has a tail many times as long."""
    point = [score(2.0), score(1.6)]
    drawn = [drawn_of([score(2.0), score(1.6 if n % 25 else 1e9)]) for n in range(DRAWS)]
    _, found = Draws.of((CURRENT, OTHER), point, np.array(drawn)).ratios(
        OTHER, CURRENT, "e2e_p95"
    )
    assert found is not None
    assert found.value == found.low == found.high == pytest.approx(0.8)


def test_a_ratio_is_of_the_metric_that_was_decided_by() -> None:
    """Though by the pair alone nobody would surely keep the SLOs."""
    found = draws(score(2.0, slo=0.99), score(1.0, slo=0.98), error=0.001, common=0.05)
    for metric, ratio in (("e2e_p99", 0.5), (WORST_SLACK, 0.98 / 0.99)):
        elsewhere, here = found.ratios(OTHER, CURRENT, metric)
        assert elsewhere is not None
        assert [elsewhere.value, not_none(here).value] == pytest.approx(
            [ratio, ratio], rel=0.001
        )


def test_a_gain_that_may_be_none_keeps_the_current_one_and_says_how_likely_it_is() -> None:
    found = decided(score(2.0), score(1.95))
    assert (found.verdict, found.winner, found.best) == (RaceVerdict.KEEP, CURRENT, OTHER)
    assert found.odds is not None
    assert 0.5 < found.odds.p_better < 0.9
    assert f"{found.odds.p_better:.2f}" in found.why


def test_what_is_as_good_goes_to_the_current_one_and_then_to_the_smallest() -> None:
    near = 2.0 * (1 - TIE_LOSS / 2)
    same = decided(score(2.0), score(near), error=1e-4)
    assert (same.verdict, same.best) == (RaceVerdict.KEEP, CURRENT)
    among = decided(score(3.0), score(2.0), score(2.0 * 1.005), error=1e-4)
    assert (among.verdict, among.winner) == (RaceVerdict.CHANGE, THIRD)


def test_of_those_that_are_as_good_one_that_is_surely_better_is_not_missed() -> None:
    """The smallest loses no more in the mean, but may be worse than the current one."""
    rng = np.random.default_rng(0)
    here = np.ones((DRAWS, 3, 3)) * [[[2.0, 0.5, 0.5], [1.94, 0.5, 0.5], [1.95, 0.5, 0.5]]]
    here[:, 2, 0] *= np.exp(rng.normal(0.0, 0.03, DRAWS))
    point = [score(2.0), score(1.94), score(1.95)]
    found = Choice(Draws.of((CURRENT, OTHER, THIRD), point, here), CURRENT).decide()
    small = Choice(Draws.of((CURRENT, THIRD), point[::2], here[:, ::2]), CURRENT).decide()
    assert small.verdict is RaceVerdict.KEEP
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert THIRD in found.tied


def test_of_each_setting_it_is_told_what_it_costs_and_how_probably_it_is_right() -> None:
    tail = [score(t, slo=u) for t, u in ((2.0, 0.5), (1.6, 0.5), (1.0, 1.5))]
    found = decided(*tail)
    assert [one.limits for one in found.standings] == [OTHER, CURRENT, THIRD]
    best, kept, broken = found.standings
    assert best.p_best is not None
    assert best.p_best + not_none(kept.p_best) == pytest.approx(1.0)
    assert best.p_best > 0.99
    assert not_none(best.loss) < 0.01 < not_none(kept.loss) == pytest.approx(0.25, abs=0.05)
    # What it costs by itself: what all share does not cancel.
    low, *_, high = best.quantiles
    assert high / low == pytest.approx(math.exp(2 * 1.645 * math.hypot(0.2, 0.05)), rel=0.1)
    assert (broken.p_best, broken.loss) == (None, None)
    assert not_none(broken.p_slo) < 0.1
    assert decided(FAILED, score(5.0)).standings[0].limits == OTHER


def test_a_bound_that_may_break_is_left_for_one_that_surely_holds_at_any_price() -> None:
    found = decided(score(1.0, slo=0.99), score(3.0, slo=0.6), common=0.01)
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert not_none(found.odds).p_slo == 1.0
    # The current one may hold as well, and is better then.
    shaky = decided(score(1.0, slo=0.8), score(3.0, slo=0.6), common=0.01)
    assert shaky.winner == CURRENT


def test_of_those_that_break_the_slos_alike_it_is_what_is_optimised_that_decides() -> None:
    found = decided(score(2.0, slo=1.5), score(1.5, slo=1.5), error=0.01)
    assert (found.verdict, found.winner, found.metric) == (RaceVerdict.CHANGE, OTHER, "e2e_p99")
    assert not_none(not_none(found.odds).p_slo) < 0.1


def test_where_nothing_sustains_the_load_the_slos_still_count() -> None:
    """Both are overloaded, and the one with the shorter tail breaks its SLO."""
    found = decided(score(20.0, slo=2.0, load=1.4), score(21.0, slo=0.5, load=1.5))
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert found.odds is not None
    assert found.odds.meets_more
    assert found.why.startswith("meets the SLOs with probability 0.9, which the")
    assert found.odds.p_better > 0.9


def test_a_load_that_is_missed_for_good_is_not_kept_for_an_slo_that_may_be_missed() -> None:
    """The current one keeps the SLO and its queue grows; another likely keeps both."""
    now = score(11.0, slo=0.95, load=1.12)
    found = decided(now, score(4.0, slo=0.99, load=0.9), error=0.01, common=0.01)
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert not_none(not_none(found.odds).p_slo) < 0.9
    # Who bears the load is no reason to give up an SLO that it breaks by more than that.
    far, near = (
        decided(now, score(4.0, slo=slo, load=0.9), error=0.01, common=0.01)
        for slo in (1.2, 1.04)
    )
    assert (far.verdict, near.verdict) == (RaceVerdict.KEEP, RaceVerdict.CHANGE)


def test_of_bounds_only_those_are_named_that_are_kept() -> None:
    """The current one breaks both; the other bears the load and still breaks the SLO."""
    found = decided(score(20.0, slo=4.0, load=1.4), score(3.0, slo=1.5, load=0.5))
    assert found.winner == OTHER
    assert found.why.startswith("sustains the load with probability 0.9, which the")
    both = decided(score(20.0, slo=4.0, load=1.4), score(3.0, slo=0.5, load=0.5))
    assert both.why.startswith("keeps the SLOs and the load with")


def test_who_may_be_recommended_contends_before_who_is_better_and_may_not() -> None:
    settings = (CURRENT, OTHER, THIRD, EngineLimits(32, 2048))
    point = [score(v, slo=u) for v, u in ((5.0, 0.5), (2.0, 0.8), (3.0, 0.7), (1.0, 1.5))]
    found = Draws.of(settings, point, np.repeat(drawn_of(point)[None], DRAWS, axis=0))
    inside = Choice(found, CURRENT).contenders(3, share=0.0)
    assert inside == [OTHER, THIRD, settings[3], CURRENT]


def test_with_a_margin_only_those_contend_that_keep_their_slos_with_room_to_spare() -> None:
    found = draws(
        *(score(v, slo=u) for v, u in ((3.0, 0.5), (1.0, 0.96), (2.0, 0.8))), common=0
    )
    assert Choice(found, CURRENT, 0.5).contenders(1) == [OTHER, CURRENT]
    assert Choice(found.with_margin(1.1), CURRENT, 0.9).contenders(1) == [THIRD, CURRENT]


def test_where_every_slo_breaks_it_is_the_setting_that_breaks_it_least() -> None:
    found = decided(score(1.0, slo=3.0), score(2.0, slo=1.5))
    assert (found.winner, found.metric) == (OTHER, WORST_SLACK)
    assert not_none(not_none(found.odds).p_slo) < 0.2


@pytest.mark.parametrize(
    ("slack", "winner"),
    [(0.98, THIRD), (1.02, THIRD), (1.4, THIRD), (1.6, OTHER), (3.0, OTHER)],
)
def test_no_slo_that_is_just_missed_is_worth_a_queue_that_grows_for_good(
    slack: float, winner: EngineLimits
) -> None:
    """A small cap keeps the time of each token short, and answers ever fewer of who asks."""
    small, wide = score(30.0, slo=0.8, load=1.5), score(5.0, slo=slack, load=0.6)
    now = score(5.1, slo=1.1 * slack, load=0.5)
    found = decided(now, small, wide, error=0.01, common=0.05)
    assert found.winner == winner
    none = decided(score(40.0, slo=1.2, load=1.9), small, common=0.05)
    assert none.winner == OTHER


def test_whose_queue_grows_for_good_is_nobody_who_could_yet_be_the_best() -> None:
    """Among fewer it would be back: nothing speaks against it without who bears the load."""
    small, wide = score(30.0, slo=0.8, load=2.5), score(5.0, slo=1.5, load=0.8)
    found = draws(score(5.1, slo=1.6, load=1.02), small, wide, error=0.01, common=0.1)
    assert Choice(found, CURRENT).contenders(share=0.0) == [THIRD, CURRENT]
    assert Choice(found.among([OTHER, CURRENT]), CURRENT).decide().winner == OTHER


@given(st.integers(0, 2**32 - 1))
def test_a_witness_is_one_of_the_others_and_shows_that_somebody_is_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = [EngineLimits(n + 1, 512) for n in range(5)]
    here = np.exp(rng.normal(rng.normal(0.0, 0.3, (1, 5, 3)), 0.1, (20, 5, 3)))
    found = Draws.of(limits, [score(1.0, slo=1.0)] * 5, here)
    kept = limits[:3]
    seen = witnesses(found, kept)
    lost, shown = is_likely_out(here)[:3], is_likely_out(found.among(kept).here)
    assert not set(seen) & set(kept)
    assert len(seen) == (lost & ~shown).any()


@given(
    slacks=st.tuples(*[st.sampled_from([0.9, 1.0, 1.1])] * 3),
    loads=st.tuples(*[st.sampled_from([0.9, 1.0, 1.1])] * 3),
    confidence=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)
def test_somebody_is_always_left(
    slacks: Sequence[float], loads: Sequence[float], confidence: float
) -> None:
    points = [score(2.0, slo=u, load=w) for u, w in zip(slacks, loads, strict=True)]
    found = draws(*points, common=0.1)
    assert Choice(found, CURRENT, confidence).decide().winner in found.settings
    assert Choice(found, CURRENT, confidence).contenders()[-1] == CURRENT


@pytest.mark.parametrize("confidence", [0.0, 0.5, 1.0])
def test_somebody_is_left_where_each_bears_the_load_in_half_of_the_draws(
    confidence: float,
) -> None:
    """And where most draws say of each that another bears more."""
    settings = [EngineLimits(cap, 2048) for cap in (16, 8, 4, 2)]
    loads = [np.roll([0.8, 0.9, 1.1, 1.1], first) for first in range(4)]
    here = np.stack([np.ones((4, 4)), np.full((4, 4), 0.5), np.array(loads)], axis=-1)
    found = Draws.of(settings, [score(1.0, slo=0.5)] * 4, here)
    assert Choice(found, CURRENT, confidence).decide().winner in settings
    assert Choice(found, CURRENT, confidence).contenders()[-1] == CURRENT


def test_where_nothing_sustains_the_load_the_shorter_tail_wins() -> None:
    found = decided(score(30.0, load=3.0), score(9.0, load=1.5))
    assert (found.winner, found.metric) == (OTHER, "e2e_p99")
    assert (not_none(found.odds).p_sustained or 0.0) < 0.1
    meets = decided(score(30.0, load=3.0), score(40.0, load=0.7))
    assert meets.winner == OTHER


def test_a_current_one_that_fails_is_left_without_a_gain_to_quote() -> None:
    found = decided(FAILED, score(5.0))
    assert (found.verdict, found.winner, found.gain) == (RaceVerdict.CHANGE, OTHER, None)


def test_when_nothing_survives_it_says_so() -> None:
    with pytest.raises(NoFeasibleConfigError, match="no configuration survived"):
        decided(FAILED, FAILED)


def replays(limits: EngineLimits, *scores: Score) -> list[RaceRun]:
    """Return the replays of a setting, one a round."""
    return [RaceRun(limits, number, one) for number, one in enumerate(scores, 1)]


@given(st.integers(0, 50))
def test_one_that_fails_in_the_end_still_tells_of_the_rounds_it_was_in(seed: int) -> None:
    """Else who raced beside it alone would be as unknown as before it was replayed."""
    rng = np.random.default_rng(seed)
    moods = np.exp(rng.normal(0.0, 0.05, 6))

    def of(limits: EngineLimits, value: float, *rounds: int) -> list[RaceRun]:
        near = np.exp(rng.normal(0.0, 0.002, len(moods)))
        return [RaceRun(limits, n, score(value * moods[n - 1] * near[n - 1])) for n in rounds]

    runs = [
        *of(CURRENT, 2.0, 1, 2, 3),
        *of(OTHER, 1.7, 4, 5, 6),
        *of(THIRD, 1.8, *range(1, 6)),
        RaceRun(THIRD, 6, FAILED),
        RaceRun(CURRENT, 6, score(2.0 * moods[5])),
    ]
    found = Choice(draws_of_replays([OTHER, CURRENT, THIRD], runs, DRAWS), CURRENT).decide()
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert THIRD not in found.tied


@pytest.mark.parametrize("tail", [math.inf, 1.0])
@given(used=st.floats(0.05, 0.9), rounds=st.integers(1, 4), often=st.integers(1, 4))
def test_who_loses_requests_live_surely_breaks_the_slo_that_has_no_end(
    tail: float, used: float, rounds: int, often: int
) -> None:
    """However fast it answers the others, and however much room the current one has."""
    kept, lost = score(2.0, slo=used), score(tail, slo=math.inf)
    whole = score(1.0, slo=used)
    ours = [lost if n < often else whole for n in range(rounds)]
    runs = [*replays(OTHER, *ours), *replays(CURRENT, *[kept] * rounds)]
    found = draws_of_replays([OTHER, CURRENT], runs, DRAWS)
    assert (found.here[:, 0, SLO] > 1).all()
    decided = Choice(found, CURRENT).decide()
    assert (decided.winner, decided.metric) == (CURRENT, "e2e_p99")
    back = Choice(draws_of_replays([CURRENT, OTHER], runs, DRAWS), OTHER).decide()
    assert (back.winner, back.metric) == (CURRENT, "e2e_p99")


@given(slower=st.floats(0.5, 2.0), seed=st.integers(0, 50))
def test_a_round_that_an_interruption_split_counts_for_nothing(
    slower: float, seed: int
) -> None:
    """Else who raced in both halves would be told to gain what the machine became slower."""
    rng = np.random.default_rng(seed)

    def run(limits: EngineLimits, number: int, attempt: str, times: float = 1.0) -> RaceRun:
        cost = score(2.0 * times * math.exp(rng.normal(0.0, 0.01)), slo=0.5)
        return RaceRun(limits, number, cost, attempt)

    first = [run(limits, 1, "before") for limits in (OTHER, CURRENT)]
    again = [run(limits, 2, "after", slower) for limits in (CURRENT, OTHER)]
    split = [run(OTHER, 2, "before"), *again]
    told, whole = (
        draws_of_replays([OTHER, CURRENT], [*first, *rest], DRAWS) for rest in (split, again)
    )
    assert np.array_equal(told.here, whole.here)


def test_where_everybody_loses_requests_live_the_rate_decides() -> None:
    def lost(per_s: float) -> Score:
        return Score(Tier.NOT_SUSTAINED, 1 / per_s, RATE, (("e2e_p99", math.inf),), None, 0.5)

    runs = [*replays(OTHER, *[lost(13.0)] * 3), *replays(CURRENT, *[lost(10.0)] * 3)]
    found = Choice(draws_of_replays([OTHER, CURRENT], runs, DRAWS), CURRENT).decide()
    assert (found.winner, found.metric) == (OTHER, RATE)


def test_few_stretches_spread_wider_than_what_was_drawn_of_them() -> None:
    point, rng = [score(2.0), score(1.6)], np.random.default_rng(1)
    drawn = drawn_of(point) * np.exp(rng.normal(0, 0.1, (DRAWS, 1, 1)))

    def others(some: Sequence[EngineLimits]) -> Floats:
        found: Floats = drawn[:, : len(some)]
        return found

    spreads = [
        np.log(
            Draws.of((CURRENT, OTHER), point, drawn, others, n).elsewhere([CURRENT])[:, 0, COST]
        ).std()
        for n in (None, 4, 16)
    ]
    assert spreads[1] > 1.5 * spreads[0]
    assert spreads[0] < spreads[2] < 1.2 * spreads[0]


@given(st.floats(0.3, 3.0), st.floats(0.3, 3.0), st.integers(0, 50))
def test_a_change_is_always_better_by_what_was_predicted(
    current: float, other: float, seed: int
) -> None:
    found = decided(score(current), score(other), seed=seed)
    assert (found.verdict is RaceVerdict.CHANGE) == (found.winner == OTHER)
    if found.verdict is RaceVerdict.CHANGE:
        assert other < current


def test_over_many_errors_a_change_is_wrong_as_rarely_as_it_says() -> None:
    """Two settings that are truly the same, predicted with the error that is stated."""
    wrong, sure = 0, 0.9
    for seed in range(300):
        rng = np.random.default_rng(seed)
        seen = np.exp(rng.normal(0.0, 0.05, 2))
        decided = draws(score(float(seen[0])), score(float(seen[1])), seed=seed)
        wrong += Choice(decided, CURRENT, sure).decide().verdict is RaceVerdict.CHANGE
    assert 0.04 < wrong / 300 < 0.16


@pytest.mark.parametrize(
    ("open_sd", "noise", "share"), [(0.1, 1e-6, 1.0), (0.1, 0.1, 0.7), (0.001, 1e-6, 0.0)]
)
def test_a_round_saves_of_what_may_be_lost_what_replays_would_tell(
    open_sd: float, noise: float, share: float
) -> None:
    """All of it where they tell everything, none where what is open is open for ever."""
    rng, point = np.random.default_rng(1), [score(9.0), score(1.0), score(1.0)]
    off = rng.normal(0.0, open_sd, (DRAWS, 3))
    rest = rng.normal(0.0, math.sqrt(max(0.01 - open_sd**2, 0.0)), (DRAWS, 3))
    here = drawn_of(point) * np.exp(off + rest)[:, :, None]
    told = (Learnable(Effects(np.zeros(3), open_sd * np.eye(3), noise, math.inf), off),)
    found = Draws.of((CURRENT, OTHER, THIRD), point, here, learnable=told)
    saved = Choice(found, CURRENT).saved_by_a_round((OTHER, THIRD))
    assert saved / Choice(found, CURRENT).regret == pytest.approx(share, abs=0.15)


def test_nothing_is_told_of_a_load_that_no_setting_is_judged_by() -> None:
    """As under `throughput`, where it would be sustained by the hopelessly overloaded."""
    point = score(2.0, load=None), score(1.6, load=None), FAILED
    found = decided(*point)
    assert found.odds is not None
    assert found.odds.p_sustained is None
    assert "sustained" not in found.odds.text
    assert found.odds.text.startswith("P(better) 1.00, keeping loses 2")
    assert {standing.p_sustained for standing in found.standings} == {None}
    alone = decided(score(2.0, load=None))
    assert not_none(alone.odds).text == ""


def test_a_load_that_is_just_missed_is_no_reason_to_take_a_longer_tail() -> None:
    """Both may bear it, and the current one a little less probably; its tail is shorter."""
    point = score(2.0, load=0.98), score(2.3, load=0.96)
    found = decided(*point, error=0.005, common=0.03)
    now, other = sorted(found.standings, key=lambda s: s.limits != CURRENT)
    assert 0.5 < (now.p_sustained or 0.0) < 0.85
    assert (other.p_sustained or 0.0) > 0.88
    assert (found.verdict, found.best) == (RaceVerdict.KEEP, CURRENT)
    # At a tail that is no longer, bearing the load is worth a restart.
    point = score(2.0, load=1.04), score(2.02, load=0.9)
    found = decided(*point, error=0.005, common=0.03)
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, OTHER)
    assert found.odds is not None
    assert found.odds.meets_more
    assert found.why.startswith("sustains the load with probability 0.9, which the current")
    assert found.odds.loss == pytest.approx(0.08, abs=0.03)


@given(load=st.floats(1.01, 3.0), tail=st.floats(1.2, 4.0))
def test_who_surely_misses_a_load_that_another_bears_is_never_recommended(
    load: float, tail: float
) -> None:
    point = score(tail, load=0.8), score(1.0, load=1.1 * load)
    found = decided(*point, error=0.005, common=0.01)
    assert found.winner == CURRENT


def test_a_keep_says_how_probably_which_other_setting_is_better_and_what_keeping_loses() -> (
    None
):
    point = [score(2.0, slo=0.5), score(2.6, slo=0.5), score(2.02, slo=0.5)]
    found = decided(*point, error=0.02, common=0.01)
    assert (found.verdict, found.best) == (RaceVerdict.KEEP, CURRENT)
    odds = not_none(found.odds)
    assert odds.rival == THIRD
    # One that is 1 % worse, where both scatter by 2 %.
    assert odds.p_better == pytest.approx(0.36, abs=0.07)
    own = next(one for one in found.standings if one.limits == CURRENT)
    assert odds.loss == own.loss == pytest.approx(0.007, abs=0.002)
    assert f"P(4/512 better) {odds.p_better:.2f}" in odds.text
    assert "of the current one P(SLOs met) 1.00" in odds.text
    assert f"keeping loses {odds.loss:.1%}" in odds.text
    # Where no other traffic can be drawn there is one probability, not two.
    assert "other hours" not in odds.text


def test_one_that_may_break_a_bound_is_not_said_to_be_no_better() -> None:
    """It is faster by far, and just does not surely keep its SLO."""
    for used, why in (
        (0.95, "nothing that surely keeps its bounds is better by 1% in the mean"),
        (None, "nothing is better by 1% in the mean"),
    ):
        cost = 1.5 if used else 2.5
        point = score(2.0, slo=used and 0.5), score(cost, slo=used)
        found = decided(*point, error=0.01, common=0.1)
        assert (found.winner, found.best, found.why) == (CURRENT, CURRENT, why)


def test_of_a_setting_that_is_alone_no_odds_against_itself_are_told() -> None:
    odds = not_none(decided(score(2.0)).odds)
    assert odds.text == "P(load sustained) 1.00, beside no other setting"
