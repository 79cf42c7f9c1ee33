"""What was predicted decides only beyond the shadow's own error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.search.objective import Score, Tier
from tuner.search.race import RaceVerdict, decide_predicted
from tuner.search.trials import TIE_RATIO, Observation, Phase, leader

PRESENT, OTHER = EngineLimits(16, 2048), EngineLimits(8, 1024)
WRONG_RATIO = 0.05

values = st.floats(0.1, 10.0)


def predicted(
    limits: EngineLimits, value: float, tier: Tier = Tier.GOOD, metric: str = "e2e_p99"
) -> Observation:
    whole = tier not in (Tier.CUT, Tier.FAILED)
    score = Score(tier, value if whole else math.inf, metric)
    return Observation(0, limits, Phase.SHADOW, score, limits.max_num_seqs, 100, 0.01)


def test_a_gain_beyond_the_error_is_a_change_with_the_error_as_its_interval() -> None:
    found = decide_predicted(
        [predicted(PRESENT, 2.0), predicted(OTHER, 1.6)], PRESENT, WRONG_RATIO
    )
    assert (found.verdict, found.winner, found.best) == (RaceVerdict.CHANGE, OTHER, OTHER)
    assert found.gain is not None
    assert found.gain.value == pytest.approx(0.8)
    assert (found.gain.low, found.gain.high) == pytest.approx((0.8 * 0.95, 0.8 * 1.05))
    assert found.rounds == 0


def test_a_gain_within_the_error_keeps_the_present_one_and_names_the_best() -> None:
    found = decide_predicted(
        [predicted(PRESENT, 2.0), predicted(OTHER, 1.92)], PRESENT, WRONG_RATIO
    )
    assert (found.verdict, found.winner, found.best) == (RaceVerdict.KEEP, PRESENT, OTHER)
    assert found.why == "the gain is within the shadow's error"
    assert found.gain is not None
    assert found.gain.value == pytest.approx(0.96)


def test_a_surer_shadow_decides_what_a_less_sure_one_leaves_open() -> None:
    seen = [predicted(PRESENT, 2.0), predicted(OTHER, 1.8)]
    verdicts = [decide_predicted(seen, PRESENT, wrong).verdict for wrong in (0.10, 0.12)]
    assert verdicts == [RaceVerdict.CHANGE, RaceVerdict.KEEP]


def test_nothing_better_keeps_the_present_one() -> None:
    found = decide_predicted(
        [predicted(PRESENT, 1.0), predicted(OTHER, 2.0)], PRESENT, WRONG_RATIO
    )
    assert (found.verdict, found.winner, found.best) == (RaceVerdict.KEEP, PRESENT, PRESENT)
    assert found.gain is None


@pytest.mark.parametrize("tier", [Tier.FAILED, Tier.CUT])
def test_a_present_one_that_fails_is_left_without_a_gain_to_quote(tier: Tier) -> None:
    seen = [predicted(PRESENT, 0.0, tier, "failed"), predicted(OTHER, 5.0)]
    found = decide_predicted(seen, PRESENT, WRONG_RATIO)
    assert (found.verdict, found.winner, found.gain) == (RaceVerdict.CHANGE, OTHER, None)


def test_a_present_one_that_breaks_an_slo_is_left_for_any_that_does_not() -> None:
    broken = predicted(PRESENT, 1.01, Tier.BREAKS_SLO, "worst SLO slack")
    found = decide_predicted([broken, predicted(OTHER, 9.0)], PRESENT, WRONG_RATIO)
    assert (found.verdict, found.winner, found.gain) == (RaceVerdict.CHANGE, OTHER, None)


def test_without_the_present_one_there_is_nothing_to_compare_with() -> None:
    found = decide_predicted([predicted(OTHER, 1.0)], PRESENT, WRONG_RATIO)
    assert (found.verdict, found.winner) == (RaceVerdict.KEEP, PRESENT)


def test_when_nothing_survives_it_says_so() -> None:
    failed = [predicted(limits, 0, Tier.FAILED, "failed") for limits in (PRESENT, OTHER)]
    for seen in ([], failed):
        with pytest.raises(NoFeasibleConfigError, match="no configuration survived"):
            decide_predicted(seen, PRESENT, WRONG_RATIO)


@given(values, st.lists(values, min_size=1, max_size=6), st.floats(0.03, 0.2))
def test_a_change_is_always_better_than_the_present_one_beyond_the_error(
    present: float, others: list[float], wrong: float
) -> None:
    seen = [predicted(PRESENT, present)]
    seen += [predicted(EngineLimits(1 + i, 512), value) for i, value in enumerate(others)]
    found = decide_predicted(seen, PRESENT, wrong)
    value_of = {o.limits: o.score.value for o in seen}
    assert value_of[found.best] <= min(value_of.values()) * (1 + TIE_RATIO)
    if found.verdict is RaceVerdict.CHANGE:
        assert value_of[found.winner] * (1 + wrong) < present
        assert found.gain is not None
        assert found.gain.value == pytest.approx(value_of[found.winner] / present)
    else:
        assert found.winner == PRESENT
        best = leader(seen)
        assert best is not None
        assert present <= best.score.value * (1 + wrong)
