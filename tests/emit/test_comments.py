"""The comments above emitted values carry what was decided, and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.result_parts import (
    CHANGE,
    CURRENT,
    GIVEN,
    GOAL,
    INFO,
    MEASURED,
    WINNER,
    a_record,
    given,
    made,
)
from tuner.cli.displays import show_outcome
from tuner.emit.comments import comments
from tuner.emit.recommendation import facts_in, facts_of_run
from tuner.errors import Caveat
from tuner.replay.slo import Slo
from tuner.run.outcome import RunFindings, make_outcome
from tuner.run.records import ColdConfirmation
from tuner.run.result import RunResult
from tuner.search.judging import why_of
from tuner.search.objective import Score, Tier
from tuner.search.race import OTHER_TRAFFIC, UNFINISHED, Odds, RaceDecision, RaceVerdict
from tuner.search.trials import Phase, Trial
from tuner.stats import Estimate


def _told(result: RunResult) -> list[str]:
    assert result.recommendation is not None
    return comments(result, result.recommendation, "runs/x")


def test_comments_carry_what_a_reader_needs_years_later() -> None:
    lines = _told(made())
    text = "\n".join(lines)
    for words in (
        "1,234 requests of toy.jsonl (sha256 01234567…), the whole trace, 9 s",
        "vLLM 0.32.0",
        "against the current max-num-seqs 32, max-num-batched-tokens 4096:",
        "limited by: ",
        f"caveat: {Caveat.WINDOWED.text}",
        "objective balanced, no SLO was given",
    ):
        assert words in text
    assert lines[-1] == "evidence: runs/x"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "e2e_p95",
            "decided by e2e_p95: -20.0% (90% interval -25.0% … -15.0% over this)",
        ),
        ("e2e_p99", ""),
        (
            "capacity",
            "decided by capacity: +25.0% (90% interval +17.6% … +33.3% over this)",
        ),
        (
            "worst SLO slack",
            "decided by the share of its tightest bound that is used: -20.0% "
            "(90% interval -25.0% … -15.0% over this)",
        ),
    ],
)
def test_what_decided_is_told_where_no_row_has_it(metric: str, said: str) -> None:
    """Of a window too small for the tail, or by a rate that is not measured beside others."""
    odds = Odds(0.99, None, 1.0, 0.25, 0.98, basis="this")
    lines = _told(made(replace(CHANGE, metric=metric, odds=odds)))
    assert [line for line in lines if line.startswith("decided by")] == [said] * bool(said)


@pytest.mark.parametrize(("high", "is_told"), [(1.1, True), (0.9, False)])
def test_a_change_that_does_not_gain_for_sure_says_what_it_is_for(
    high: float, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    odds = Odds(1.0, None, 1.0, 0.5, 1.0, meets_more=True)
    why = why_of(odds, 0.9, is_same=False)
    found = made(replace(CHANGE, gain=Estimate(0.88, 0.8, high, 9), odds=odds, why=why))
    show_outcome(found, "")
    (head,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("change to"))
    said = "it sustains the load with probability 0.9, which the current one does not"
    assert head.endswith(f": {said}") is is_told
    assert (f"why: {said}" in _told(found)) is is_told


def test_where_a_capacity_decides_each_is_told_at_its_own_largest_load() -> None:
    capacity = replace(CHANGE, metric="capacity", rounds=0)
    found = made(capacity)
    (head,) = (x for x in _told(found) if x.startswith("against the"))
    assert head.endswith(", each at the largest load at which it keeps the SLOs:")
    assert not made(replace(capacity, metric="e2e_p95")).at_which_load
    assert not made(replace(capacity, rounds=3)).at_which_load


def test_keeping_what_one_has_is_said_first_of_all() -> None:
    kept = RaceDecision(
        RaceVerdict.KEEP, CURRENT, WINNER, (), None, 3, "the gain is within noise"
    )
    text = "\n".join(_told(made(kept)))
    assert "KEEP WHAT YOU HAVE: max-num-seqs 32" in text
    assert "the gain is within noise" in text
    assert "best that was found, 8/2048" in text


def test_a_winner_that_did_not_race_is_not_said_to_have_been_measured() -> None:
    raced = made()
    # Of the three rounds two were of the pair.
    assert raced.how_raced == "2 rounds in turns"
    assert "measured live, 2 rounds in turns" in "\n".join(_told(raced))
    rows = tuple(replace(row, rounds=0, change_interval=None) for row in raced.evidence)
    told = "\n".join(_told(replace(raced, evidence=rows)))
    assert "predicted, corrected by 3 rounds of others" in told
    assert "measured live" not in told


def test_levels_that_are_predicted_say_of_how_much() -> None:
    """Not to be taken for those of the few seconds that were replayed."""
    raced = made()
    made_of = raced.provenance
    trace = replace(made_of.trace, predicted_requests=9000, predicted="the whole trace, 60 s")
    rows = tuple(replace(row, rounds=0, change_interval=None) for row in raced.evidence)
    more = replace(raced, evidence=rows, provenance=replace(made_of, trace=trace))
    told = "\n".join(_told(more))
    assert (
        "on 9,000 requests of toy.jsonl (sha256 01234567…), the whole trace, 60 s; "
        "1,234 of them replayed, " in told
    )
    assert "predicted of the whole trace, 60 s, corrected by 3 rounds of others" in told


def test_a_stretch_that_raced_has_its_own_change_beside_its_levels() -> None:
    """What is thought of all of the trace stands by itself: no level there was replayed."""
    odds = Odds(0.99, None, 1.0, 0.25, 0.98, basis="this")
    decision = replace(CHANGE, metric="requests_per_s", odds=odds)
    slow = {**MEASURED, "requests_per_s": 0.5}
    score = Score(Tier.GOOD, 2.0, "requests_per_s")
    records = [
        Trial.of(0, limits, Phase.RACE, n, score, measured)
        for limits, measured in ((WINNER, MEASURED), (CURRENT, slow))
        for n in (1, 2)
    ]
    for more, row_is, gain_is in (
        ({}, "+25.0%", "requests_per_s +25.0%, interval +17.6% … +33.3%"),
        (
            {"predicted_requests": 9000, "predicted": "the whole trace, 60 s"},
            "+99.9%",
            "requests_per_s: +25.0% (90% interval +17.6% … +33.3% over this)",
        ),
    ):
        of = given(CURRENT, INFO, **more)
        found = make_outcome(decision, GOAL, records, [], RunFindings(), of, "complete")
        told = _told(found)
        (row,) = (line for line in told if line.startswith("  requests_per_s"))
        assert f"0.500/s -> 1.00/s   ({row_is}" in row
        assert found.recommendation is not None
        assert facts_of_run(found, found.recommendation, Path("x"))["gain"] == gain_is
        assert facts_in(told, WINNER)["gain"] == gain_is


def test_slos_are_named_and_what_they_bound_is_compared() -> None:
    """Also where the objective goes by another statistic: TPOT is told by its median else."""
    goal = replace(GOAL, slos=(Slo.parse("tpot_p99=50ms"),))
    records = [a_record(limits, round_=n) for limits in (WINNER, CURRENT) for n in (1, 2)]
    found = make_outcome(CHANGE, goal, records, [], RunFindings(), GIVEN, "complete")
    told = _told(found)
    assert "objective balanced, SLOs: tpot_p99=0.05s" in told
    assert [line.split()[0] for line in told].count("tpot_p99") == 1


def test_an_unfinished_run_says_whether_anything_was_raced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = replace(CHANGE, why=UNFINISHED, rounds=0, gain=None)
    raced = made(best, state="interrupted")
    rows = tuple(replace(row, rounds=0, change_interval=None) for row in raced.evidence)
    for result, left, how in (
        (raced, "it had yet to decide", "2 rounds in turns"),
        (
            replace(raced, evidence=rows),
            "not raced against the current values",
            "predicted, not raced",
        ),
    ):
        text = "\n".join(_told(result))
        assert f"interrupted: best so far, {left}" in text
        assert how in text
        show_outcome(result, "")
        told = capsys.readouterr().err
        assert f"interrupted: best so far, {left}" in told
        assert f"against the current configuration, {how}" in told


def test_cold_engines_that_showed_nothing_to_compare_confirm_nothing() -> None:
    told = {}
    for ratio in (0.8, None):
        scores = (None, None) if ratio is None else (0.4, 0.5)
        cold = ColdConfirmation(
            metric="e2e_p95",
            winner=scores[0],
            current=scores[1],
            ratio=ratio,
        )
        told[ratio] = "\n".join(_told(replace(made(), confirmed_cold=cold)))
    assert "confirmed on engines started cold: e2e_p95 -20.0% there" in told[0.8]
    assert "confirmed on engines started cold" not in told[None]


def test_the_gain_of_the_race_and_of_cold_engines_stand_beside_each_other() -> None:
    result = made()
    own = Score(Tier.GOOD, 2.0, "e2e_p99")
    cold = [
        Trial.of(9, limits, Phase.COLD, 0, own, MEASURED, "") for limits in (WINNER, CURRENT)
    ]
    shown = ColdConfirmation(metric="e2e_p99", winner=1.1, current=2.0, ratio=0.55)
    trials = (*result.trials, *cold)
    told = _told(replace(result, trials=trials, confirmed_cold=shown))
    kept = replace(CHANGE, verdict=RaceVerdict.KEEP, winner=CURRENT)
    refuted = "\n".join(_told(replace(made(kept), confirmed_cold=shown)))
    assert "tried on engines started cold" in refuted
    # Both of the race's measured 2 s; the row tells what is thought by all that is known.
    assert any("cold: e2e_p99 +0.0% in the race, -45.0% there" in line for line in told)


def test_what_is_predicted_has_both_of_its_intervals() -> None:
    """That on the recorded traffic in the row, and that over other traffic."""
    odds = Odds(0.99, None, 1.0, 0.25, 0.98, basis=OTHER_TRAFFIC)
    decision = replace(
        CHANGE,
        rounds=0,
        is_predicted=True,
        metric="e2e_p99",
        gain_here=Estimate(0.8, 0.78, 0.82, 200),
        odds=odds,
    )
    records = [
        Trial.of(n, limits, Phase.SHADOW, 0, Score(Tier.GOOD, 2.0, "e2e_p99"), MEASURED)
        for n, limits in enumerate((WINNER, CURRENT))
    ]
    result = make_outcome(decision, GOAL, records, [], RunFindings(), GIVEN, "complete")
    told = "\n".join(_told(result))
    assert "(-20.0%, predicted, interval -22.0% … -18.0%)" in told
    assert "expected of e2e_p99: -20.0% (90% interval -25.0% … -15.0% over other" in told


@pytest.mark.parametrize("rounds", [0, 3])
def test_the_device_is_read_back_whether_or_not_there_was_a_race(rounds: int) -> None:
    """A run that is interrupted before its race has one replay, of the current limits."""
    decision = replace(CHANGE, verdict=RaceVerdict.KEEP, rounds=rounds)
    records = [
        a_record(limits, round_=n) for limits in (CURRENT, WINNER) for n in range(rounds)
    ]
    records = records or [a_record(CURRENT, round_=1)]
    of = given(CURRENT, replace(INFO, device="CPU (2 cores, x86_64)"))
    found = make_outcome(decision, GOAL, records, [], RunFindings(), of, "interrupted")
    assert facts_in(_told(found), found.deployed)["device"] == "CPU (2 cores, x86_64)"
