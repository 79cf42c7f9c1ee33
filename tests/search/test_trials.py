"""A record is read as it was written, and a decision rests on what was measured last."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tuner.engine.limits import EngineLimits
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial, decisive, race_records, ranked

LIMITS = EngineLimits(8, 1024)
GOOD = Score(Tier.GOOD, 2.0, "e2e_p99")
MEASURED: dict[str, Any] = {
    "running": {"mean": 3.5, "max": 7},
    "max_step_tokens": 321,
    "decode_step_s": {"p50": 0.012},
}


def a_record(
    number: int,
    phase: Phase,
    race_round: int = 0,
    limits: EngineLimits = LIMITS,
    score: Score = GOOD,
    measured: dict[str, Any] | None = MEASURED,
) -> Trial:
    return Trial.of(number, limits, phase, race_round, score, measured)


def numbers(records: list[Trial]) -> list[int]:
    return [record.number for record in records]


@pytest.mark.parametrize("slo_used", [None, 0.5, math.inf])
def test_what_is_read_is_what_was_written(slo_used: float | None) -> None:
    score = replace(GOOD, others=(("requests_per_s", 0.5),), slo_used=slo_used, load_used=0.9)
    trial = a_record(3, Phase.RACE, 2, score=score)
    again = msgspec.json.decode(msgspec.json.encode(trial), type=Trial)
    assert again == trial
    assert (again.score, again.score.others) == (score, score.others)
    assert (again.score.slo_used, again.score.load_used) == (slo_used, 0.9)


def test_a_trial_is_reduced_to_what_the_search_needs() -> None:
    seen = a_record(3, Phase.RACE, 2).observation
    assert (seen.limits, seen.phase) == (LIMITS, Phase.RACE)
    assert seen.score == GOOD
    assert (seen.peak_running, seen.peak_step_tokens, seen.decode_step_s) == (7, 321, 0.012)


@pytest.mark.parametrize("tier", [Tier.CUT, Tier.FAILED])
def test_what_has_no_value_is_written_without_one_and_read_as_the_worst(tier: Tier) -> None:
    record = a_record(0, Phase.LADDER, score=Score(tier, math.inf, "failed"), measured=None)
    assert record.value is None
    seen = record.observation
    assert seen.score.value == math.inf
    assert not seen.is_whole
    assert (seen.peak_running, seen.peak_step_tokens, seen.decode_step_s) == (0, 0, None)


def test_a_decision_rests_on_the_live_windows_where_there_are_any() -> None:
    records = [
        a_record(0, Phase.CALIBRATE),
        a_record(1, Phase.SHADOW),
        a_record(2, Phase.RACE, 1),
        a_record(3, Phase.COLD),
        a_record(4, Phase.CAPACITY),
        a_record(5, Phase.CURRENT),
    ]
    assert numbers(decisive(records)) == [2, 5]
    assert numbers(ranked(records)) == [5]


def test_without_live_windows_it_rests_on_what_was_predicted_last() -> None:
    records = [
        a_record(0, Phase.CALIBRATE),
        a_record(1, Phase.SHADOW, 0),
        replace(a_record(2, Phase.SHADOW), prediction=1),
        replace(a_record(3, Phase.SHADOW, 0, EngineLimits(4, 1024)), prediction=1),
        a_record(4, Phase.COLD),
    ]
    assert numbers(decisive(records)) == numbers(ranked(records)) == [2, 3]
    raced = [*records, a_record(5, Phase.RACE, 1)]
    assert numbers(decisive(raced)) == [5]
    # A race measures few settings: the whole space is still ranked by what was predicted.
    assert numbers(ranked(raced)) == [2, 3]


def test_without_either_there_is_nothing_to_rest_on() -> None:
    records = [a_record(0, Phase.CALIBRATE), a_record(1, Phase.COLD)]
    assert decisive(records) == ranked(records) == ranked([]) == []


def test_the_races_measurements_are_found_by_round() -> None:
    records = [
        a_record(0, Phase.RACE, 1),
        a_record(1, Phase.RACE, 1, EngineLimits(16, 1024)),
        a_record(2, Phase.RACE, 2, measured={**MEASURED, "steps": 9}),
        a_record(3, Phase.RACE, 3, measured=None),
        a_record(4, Phase.COLD, measured={"steps": 1}),
    ]
    found = race_records(records, LIMITS)
    assert found == {1: MEASURED, 2: {**MEASURED, "steps": 9}}
