"""The result says what was decided, on what, and how far it may be trusted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.optional import not_none
from support.result_parts import CHANGE, CURRENT, GIVEN, GOAL, MEASURED, WINNER, made
from tuner.errors import Caveat, UsageError
from tuner.run.outcome import RunFindings, make_outcome
from tuner.run.records import OWN_RATIO, Restlessness
from tuner.run.result import RunResult, read_result
from tuner.search.objective import Score, Tier
from tuner.search.race import Odds, RaceVerdict
from tuner.search.trials import Phase, Trial
from tuner.shadow.speed import SETTING
from tuner.stats import Estimate

DEMO_RUN = Path(__file__).parents[2] / "examples" / "demo" / "run"


def test_a_change_is_quoted_with_its_gain_and_interval() -> None:
    advice = not_none(made().recommendation)
    assert (advice.limits, advice.shown) == (WINNER, WINNER)
    assert advice.is_change
    assert advice.gain_ratio == pytest.approx(-0.2)
    assert advice.gain_interval == pytest.approx((-0.25, -0.15))


def test_load_limits_and_cache_are_of_what_is_deployed_or_nearest() -> None:
    """Also where what one has is kept, and another one's gain is shown."""
    used = {WINNER: 0.5, CURRENT: 1.5}
    records = [
        Trial.of(0, limits, Phase.RACE, n, Score(Tier.GOOD, 2.0, "e2e_p99"), measured)
        for limits, load in used.items()
        for n in (1, 2)
        for measured in [{**MEASURED, "utilisation": load, "offered_per_s": 1.0}]
    ]
    kept = replace(CHANGE, verdict=RaceVerdict.KEEP, winner=CURRENT, why="too little")
    unmet = replace(kept, odds=Odds(0.5, 0.1, 1.0, 0.1, 0.5))
    for decision, load in ((kept, "overloaded 1.5 x"), (unmet, "utilisation 50%")):
        found = make_outcome(decision, GOAL, records, [], RunFindings(), GIVEN, "complete")
        assert found.load.endswith(load)
        assert ("the load, 1.5 x" in found.limited_by) is (decision is kept)
    assert not_none(found.nearest).limits == WINNER


def test_more_requests_a_second_are_a_gain_above_zero() -> None:
    """Though the score that decides is the rate's inverse, of which less is better."""
    result = made(replace(CHANGE, metric="requests_per_s"))
    (row,) = (row for row in result.evidence if row.metric == "requests_per_s")
    bounds = pytest.approx((1 / 0.85 - 1, 1 / 0.75 - 1))
    assert row.change_ratio == pytest.approx(0.25)
    assert row.change_interval == bounds
    assert result.gain is not None
    assert result.gain.value == pytest.approx(0.25)
    assert (result.gain.low, result.gain.high) == bounds


def test_what_is_written_is_what_is_read() -> None:
    result = made()
    content = json.loads(msgspec.json.encode(result))
    assert msgspec.convert(content, RunResult) == result
    assert content["baseline"] == {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "source": "configuration",
    }
    assert content["caveats"] == [{"id": "windowed", "text": Caveat.WINDOWED.text}]
    engine = content["provenance"]["engine"]
    assert engine["started_at_limits"]["max_num_seqs"] == 32
    assert engine["sampling"] == "tokens are sampled greedily"


def test_nothing_is_recommended_when_every_configuration_breaks_an_slo() -> None:
    outcome = made(tier=Tier.BREAKS_SLO)
    assert not outcome.feasible
    assert outcome.recommendation is None
    assert outcome.shown == CURRENT
    assert made(tier=Tier.NOT_SUSTAINED).feasible


def test_who_is_nearest_to_slos_that_nothing_meets_is_kept_with_its_probability() -> None:
    odds = Odds(0.9, 0.2, 1.0, 0.1, 0.9)
    outcome = made(replace(CHANGE, odds=odds))
    assert not outcome.feasible
    assert outcome.nearest is not None
    assert (outcome.nearest.limits, outcome.nearest.p_slo) == (WINNER, 0.2)
    assert made(replace(CHANGE, odds=replace(odds, p_slo=0.9))).nearest is None


def test_a_gain_without_an_interval_is_told_without_one() -> None:
    decision = replace(CHANGE, gain=Estimate(0.9, None, None, 1))
    open_ended, none = made(decision).recommendation, made(replace(CHANGE, gain=None))
    assert not_none(open_ended).gain_interval is None
    assert not_none(none.recommendation).gain_ratio is None


def kept(folder: Path, content: dict[str, Any]) -> Path:
    """Return a run directory that holds this result."""
    (folder / "result.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def demo() -> dict[str, Any]:
    """Return the result of a run that is kept with the examples."""
    content: dict[str, Any] = json.loads((DEMO_RUN / "result.json").read_text())
    return content


def test_a_kept_run_is_read_whole(demo: dict[str, Any]) -> None:
    again = json.loads(msgspec.json.encode(read_result(DEMO_RUN)))
    # It was made before there were any.
    whole = {**demo, "knobs": None, "starting_points": [], "variants": None, "clients": None}
    whole |= {"nearest": None, "restlessness": None}
    whole["capacity"] = {**demo["capacity"], "interval": None}
    odds = {**demo["recommendation"]["odds"], "rival": None, "is_alone": False}
    odds |= {"open_ratio": None, "p_slo_elsewhere": None, "cost_elsewhere": None}
    whole["recommendation"] = {**demo["recommendation"], "odds": odds}
    trace = {**demo["provenance"]["trace"], "predicted": "", "predicted_requests": 0}
    engine = {**demo["provenance"]["engine"], "sampling": ""}
    whole["provenance"] = {**demo["provenance"], "trace": trace, "engine": engine}
    assert again == whole
    assert list(again) == list(whole)


@pytest.mark.parametrize(
    ("place", "value", "shown"),
    [
        (("schema",), 1, "schema must be 2, got 1"),
        (("baseline", "max_num_seqs"), 0, "is damaged: max_num_seqs must be at least 1"),
        (("recommendation", "verdict"), "maybe", "is damaged: Invalid enum value 'maybe'"),
        (("trials", 0, "tier"), "5 odd", "is damaged: Invalid enum value '5 odd'"),
    ],
)
def test_a_result_that_no_run_wrote_is_refused(
    demo: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: object, shown: str
) -> None:
    where: Any = demo
    for key in place[:-1]:
        where = where[key]
    where[place[-1]] = value
    with pytest.raises(UsageError, match=shown) as refused:
        read_result(kept(tmp_path, demo))
    assert refused.value.hint


@pytest.mark.parametrize(
    ("open_ratio", "spent_s", "is_sure", "said"),
    [
        (None, 100.0, False, "differ by 6.0% between moments"),
        (0.008, 100.0, False, "and the ratio of the two best is known to within 0.8%"),
        (0.03, 60.0, False, "within 3.0%: about 4 min more would bring that below 2%"),
        (0.1, 60.0, False, "more time does not help, a machine that is left alone would"),
        (0.1, 60.0, True, "and the ratio of the two best is known to within 10.0%"),
    ],
)
def test_of_a_restless_machine_it_is_told_how_much_longer_would_help(
    open_ratio: float | None, spent_s: float, *, is_sure: bool, said: str
) -> None:
    assert pytest.approx(1.645 * math.sqrt(2) * SETTING, rel=0.01) == OWN_RATIO
    found = Restlessness.of(0.06, open_ratio, spent_s, is_sure=is_sure)
    assert found.text.endswith(said)
