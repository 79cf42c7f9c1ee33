"""A change is recommended only if it shows on engines started cold, and in time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support.odd_toys import FragileSource, LoggedSource
from support.optional import not_none
from support.race_parts import BETTER, CROWDED_TOY, CURRENT, TRACE, WORSE, known_ratio
from support.run_parts import ToyRun, a_run, a_space
from support.toy_tune import CROWDED
from support.traffic import replay_toy
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.metrics import measure
from tuner.replay.plan import CutRule
from tuner.replay.slo import Slo
from tuner.run.cold import (
    COLD_EFFECT,
    OF_WINDOW,
    SHARED,
    Cold,
    confirm_cold,
    start_all,
    unless_refuted,
    weighed,
)
from tuner.run.drawing import Deployed
from tuner.run.live_search import LiveEvidence
from tuner.run.race import race
from tuner.search.objective import Score, Tier
from tuner.search.race import Odds, RaceDecision, RaceVerdict
from tuner.search.trials import Phase
from tuner.stats import Estimate


def a_change(winner: EngineLimits, gain: float | None) -> RaceDecision:
    estimate = None if gain is None else Estimate(gain, gain * 0.98, gain * 1.02, 3)
    why = "better beyond noise"
    return RaceDecision(RaceVerdict.CHANGE, winner, winner, (winner,), estimate, 3, why)


def cold_of(
    run: ToyRun, decision: RaceDecision, deployed: Deployed | None = None
) -> tuple[RaceDecision, Cold | None]:
    """Start both cold, as at the end of a race of the winner."""
    plan = run.plan(decision.winner, CURRENT)
    return confirm_cold(run.runner, plan, decision, partial(_always, deployed))


def width(gain: Estimate) -> float:
    """Return how wide the interval of a gain is, in logarithms."""
    return math.log(not_none(gain.high) / not_none(gain.low))


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("known_sd", [0.02, 0.05])
def test_nine_in_ten_gains_lie_in_the_interval_that_cold_engines_leave(
    known_sd: float, shared: float
) -> None:
    """And are told more closely than before, however much of the error the window shares."""
    rng, n, noise = np.random.default_rng(0), 4000, 0.03
    score = Score(Tier.GOOD, 1.0, "e2e_p95")
    inside, off, off_before = [], [], []
    for cold_differs, error, other, own, chance in rng.normal(size=(n, 5)):
        differs, missed = COLD_EFFECT * cold_differs, known_sd * error
        on_window = shared * missed + math.sqrt(1 - shared**2) * known_sd * other + 0.02 * own
        known, expected, seen = -0.1 + missed, -0.1 + on_window, -0.1 + differs + noise * chance
        cold = weighed(
            Cold(score, score, 1.0),
            (known, known_sd),
            (expected, math.hypot(known_sd, OF_WINDOW), SHARED),
            (seen, noise),
        )
        low, high = (math.exp(known + sign * 1.645 * known_sd) for sign in (-1, 1))
        told = not_none(cold.moved(Estimate(math.exp(known), low, high, 1)))
        truth = -0.1 + differs
        inside.append(not_none(told.low) <= math.exp(truth) <= not_none(told.high))
        off.append(math.log(told.value) - truth)
        off_before.append(known - truth)
    assert 0.85 < np.mean(inside) < 0.97
    assert np.std(off) < 1.05 * np.std(off_before)


def test_a_winner_that_is_better_cold_too_stays(tmp_path: Path) -> None:
    gain = known_ratio(BETTER)
    assert gain < 0.95
    decision = a_change(BETTER, gain)
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        found, cold = cold_of(run, decision)
        records = run.context.journal.records()
        assert run.engine.starts == 3
        assert set(run.engine.cold_blocks) == {BETTER, CURRENT}
    # What cold engines show as it was known moves nothing, and leaves what they differ by open.
    before, after = decision.gain, found.gain
    assert before is not None
    assert after is not None
    assert after.value == pytest.approx(before.value)
    usual = math.hypot(width(before) / 2, 1.645 * COLD_EFFECT)
    assert width(before) / 2 < width(after) / 2 < 1.01 * usual
    assert replace(found, gain=decision.gain) == decision
    assert cold is not None
    assert cold.ratio == pytest.approx(gain, rel=1e-6)
    assert run.context.caveats == set()
    assert [(r.phase, r.engine, r.max_num_seqs) for r in records] == [
        ("cold", "live", BETTER.max_num_seqs),
        ("cold", "live", CURRENT.max_num_seqs),
    ]
    assert cold.record.winner == records[0].value
    assert cold.record.current == records[1].value
    assert run.context.stopwatch.stages_s["cold"] > 0


def test_cold_engines_move_what_a_race_alone_told_of_the_gain_towards_what_they_show(
    tmp_path: Path,
) -> None:
    """It told less than its replays showed, since some of that could be noise."""
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        decision = race(run.runner, LiveEvidence(run.plan(BETTER, CURRENT)))
        found, cold = cold_of(run, decision)
    before, after = not_none(decision.gain).value, not_none(found.gain).value
    assert not_none(not_none(cold).ratio) == pytest.approx(known_ratio(BETTER), rel=1e-6)
    assert known_ratio(BETTER) < after < before


def test_each_cold_engine_is_started_with_the_values_it_would_be_deployed_with(
    tmp_path: Path,
) -> None:
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        cold_of(run, a_change(BETTER, 0.9))
        # What raced is another engine than those two, and stays the one that is told of.
        assert run.engine.info is not None
        assert run.engine.info.ceiling == run.context.space.ceiling
        assert set(run.engine.cold_blocks) == {BETTER, CURRENT}
        # The next replay needs an engine that takes any limits again.
        assert run.engine.ensure_started().info.ceiling == run.context.space.ceiling


@pytest.mark.parametrize(
    ("predicted_as", "start_costs", "replays"),
    [(1.5, 5.0, 3), (1.5, 1.2, 2), (1.5, 0.1, 1), (1.0, 5.0, 1)],
)
def test_a_start_that_is_not_as_predicted_is_replayed_on_again_where_that_costs_little(
    tmp_path: Path, predicted_as: float, start_costs: float, replays: int
) -> None:
    """What a start costs is in replays."""
    gain, costs = known_ratio(BETTER), CROWDED_TOY.costs.scaled(predicted_as)
    predicted = {
        limits: measure([replay_toy(TRACE, limits, replace(CROWDED_TOY, costs=costs))])
        for limits in (BETTER, CURRENT)
    }
    replay_s = sum(found.busy_s for found in predicted.values()) / 2
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY, budget_s=1e4) as run:
        run.engine.ensure_started()
        run.engine.start_s, run.engine.warm_up_s = start_costs * replay_s, 0.0
        plan = run.plan(BETTER, CURRENT, predicted=predicted)
        _, cold = confirm_cold(run.runner, plan, a_change(BETTER, gain))
        records = run.context.journal.records()
    assert [(record.limits, record.race_round) for record in records[: 1 + replays]] == [
        *[(BETTER, 1)] * replays,
        (CURRENT, 1),
    ]
    assert cold is not None
    assert cold.starts == 1
    assert cold.ratio == pytest.approx(gain, rel=1e-6)


def test_a_replay_that_the_time_cut_takes_nothing_from_the_one_before(tmp_path: Path) -> None:
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        workload = run.plan(BETTER, CURRENT).workload
        for cut in (CutRule(), CutRule(max_clock_s=1e-9)):
            run.runner.measure(BETTER, Phase.COLD, workload, cut, 1)
        found, cold = cold_of(run, a_change(BETTER, known_ratio(BETTER)))
    assert found.verdict is RaceVerdict.CHANGE
    assert not_none(cold).ratio == pytest.approx(known_ratio(BETTER), rel=1e-6)
    assert Caveat.NOT_CONFIRMED_COLD not in run.context.caveats


@pytest.mark.parametrize("winner", [WORSE, CURRENT])
def test_a_winner_that_is_not_better_cold_is_not_recommended(
    tmp_path: Path, winner: EngineLimits
) -> None:
    assert known_ratio(winner) > 0.99
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        found, cold = cold_of(run, a_change(winner, 0.8))
    assert (found.verdict, found.winner, found.best) == (RaceVerdict.KEEP, CURRENT, winner)
    assert found.why == "the gain did not show on engines started cold"
    assert cold is not None


def _always(predicted: Deployed | None, winner: EngineLimits) -> Deployed | None:
    _ = winner
    return predicted


def test_who_keeps_bounds_that_the_current_one_breaks_need_not_be_faster_cold(
    tmp_path: Path,
) -> None:
    odds = Odds(0.99, 0.99, 1.0, 0.1, 0.99)
    slower = replace(a_change(WORSE, 1.3), odds=odds)
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        assert cold_of(run, slower)[0].verdict is RaceVerdict.KEEP
        kept = cold_of(run, replace(slower, odds=replace(odds, meets_more=True)))[0]
    assert (kept.verdict, kept.winner) == (RaceVerdict.CHANGE, WORSE)


@pytest.mark.slow
def test_cold_engines_are_held_to_what_is_predicted_of_engines_with_their_blocks(
    tmp_path: Path,
) -> None:
    """A window on which both are alike says nothing of the whole if that was to be expected."""
    seen = math.log(known_ratio(WORSE))
    for folder, ratio, off, verdict in (
        ("as predicted", 0.6, 0.0, RaceVerdict.CHANGE),
        ("nearly", 0.6, 0.03, RaceVerdict.CHANGE),
        ("no gain predicted", 1.05, 0.0, RaceVerdict.KEEP),
        ("far from predicted", 0.9, 0.5, RaceVerdict.KEEP),
        ("far from predicted, and yet a gain", 0.6, 0.4, RaceVerdict.CHANGE),
    ):
        (tmp_path / folder).mkdir()
        here = Estimate(ratio, ratio * 0.98, ratio * 1.02, 200)
        elsewhere = replace(here, value=ratio * 0.99, low=ratio * 0.95)
        sure = replace(a_change(WORSE, 0.8), odds=Odds(1.0, None, 1.0, 0.25, 1.0))
        with a_run(tmp_path / folder, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
            predicted = Deployed(elsewhere, here, seen - off)
            found, cold = cold_of(run, sure, predicted)
        assert found.verdict is verdict, folder
        assert cold is not None
        assert found.odds is not None
        if verdict is RaceVerdict.CHANGE:
            # No surer than they leave it.
            kept = 1.0 if off < 0.1 else not_none(cold.p_better)
            assert (found.odds.p_better, found.odds.p_elsewhere) == (kept, kept)
        assert found.gain_here is not None
        # The gain that is told is theirs, moved by what is known of engines started cold.
        moved = off if off >= 0.1 else 0.0
        for told, known in ((found.gain, elsewhere), (found.gain_here, here)):
            assert told is not None
            assert math.log(told.value / known.value) == pytest.approx(moved, abs=0.005)
            assert (width(told) > 2 * width(known)) is (off >= 0.1), folder
            assert (told.value == pytest.approx(known.value, rel=1e-6)) is (off == 0.0)
        # What is recommended by is the gain that is told.
        assert cold.log_gain == pytest.approx(math.log(found.gain_here.value))


@pytest.mark.slow
@pytest.mark.parametrize("is_predicted", [True, False])
def test_a_stretch_may_break_an_slo_cold_where_that_was_predicted(
    tmp_path: Path, *, is_predicted: bool
) -> None:
    """The winner, and not the current one, breaks on the window what it keeps on the whole."""
    slos, odds = (Slo.parse("ttft_p95=150ms"),), Odds(0.99, 0.99, 1.0, 0.1, 0.99)
    decision = replace(a_change(BETTER, known_ratio(BETTER)), odds=odds)
    log = replay_toy(TRACE, BETTER, CROWDED_TOY)
    found = {BETTER: measure([log], slos)} if is_predicted else {}
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY, slos) as run:
        plan = run.plan(BETTER, CURRENT, predicted=found)
        answer, cold = confirm_cold(run.runner, plan, decision)
    assert cold is not None
    assert (cold.winner.tier, cold.current.tier) == (Tier.BREAKS_SLO, Tier.GOOD)
    # Both are told by what is optimised, whatever bound one of them breaks.
    kept = cold.record
    assert kept.metric == cold.current.metric
    assert not_none(kept.winner) / not_none(kept.current) == pytest.approx(kept.ratio)
    assert answer.verdict is (RaceVerdict.CHANGE if is_predicted else RaceVerdict.KEEP)


@pytest.mark.slow
def test_a_cold_gain_that_differs_much_from_the_races_is_told(tmp_path: Path) -> None:
    gain = known_ratio(BETTER)
    for folder, claimed, shown in (("a", gain / 1.2, True), ("b", gain / 1.05, False)):
        (tmp_path / folder).mkdir()
        with a_run(tmp_path / folder, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
            found, _ = cold_of(run, a_change(BETTER, claimed))
        assert found.verdict is RaceVerdict.CHANGE
        assert (Caveat.COLD_DIFFERS in run.context.caveats) is shown


def test_without_time_nothing_is_started_and_that_is_told(tmp_path: Path) -> None:
    decision = a_change(BETTER, 0.8)
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        run.engine.start_s = 1e6
        assert cold_of(run, decision) == (decision, None)
        assert run.engine.starts == 1
        assert run.context.journal.records() == []
    assert run.context.caveats == {Caveat.NOT_CONFIRMED_COLD}


@pytest.mark.parametrize(("time_holds", "is_tried"), [(0.9, True), (0.7, False)])
def test_time_that_nearly_holds_cold_engines_is_spent_on_them(
    tmp_path: Path, time_holds: float, *, is_tried: bool
) -> None:
    """Nothing else is done with it, and what a start should take is on the safe side."""
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY, budget_s=1000.0) as run:
        run.engine.ensure_started()
        run.engine.start_s, run.engine.warm_up_s = 500.0 / time_holds, 0.0
        _, cold = cold_of(run, a_change(BETTER, known_ratio(BETTER)))
    assert (cold is not None) is is_tried
    assert (Caveat.NOT_CONFIRMED_COLD in run.context.caveats) is not is_tried


def test_what_is_kept_needs_no_confirmation(tmp_path: Path) -> None:
    kept = replace(a_change(BETTER, 0.99), verdict=RaceVerdict.KEEP, winner=CURRENT)
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        assert cold_of(run, kept) == (kept, None)
        assert run.engine.starts == 0
    assert run.context.caveats == set()


def test_an_engine_that_hides_its_limits_was_started_cold_all_along(tmp_path: Path) -> None:
    decision = a_change(BETTER, 0.8)
    source = replace(CROWDED_TOY, hides_limits=True)
    with a_run(tmp_path, TRACE, a_space(CURRENT), source) as run:
        run.engine.ensure_started(CURRENT)
        starts = run.engine.starts
        assert cold_of(run, decision) == (decision, None)
        assert run.engine.starts == starts


@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_winner_that_fails_cold_is_not_recommended(tmp_path: Path, *, dies: bool) -> None:
    source = FragileSource(CROWDED, fails_above=16, dies=dies)
    with a_run(tmp_path, TRACE, a_space(CURRENT), source) as run:
        run.trial(CURRENT, Phase.RACE, 1)
        found, cold = cold_of(run, a_change(WORSE, 0.8))
    assert (found.verdict, found.winner) == (RaceVerdict.KEEP, CURRENT)
    assert cold is not None
    assert cold.winner.tier is Tier.FAILED
    assert cold.ratio is None
    # What is kept was started with its values.
    assert Caveat.NOT_CONFIRMED_COLD not in run.context.caveats


@pytest.mark.slow
def test_a_winner_that_failed_cold_is_not_recommended_though_no_more_is_started(
    tmp_path: Path,
) -> None:
    decision, source = a_change(WORSE, 0.8), FragileSource(CROWDED, fails_above=16)
    with a_run(tmp_path, TRACE, a_space(CURRENT), source) as run:
        assert unless_refuted(run.context, decision) == decision
        start_all(run.runner, run.plan(WORSE, CURRENT), [CURRENT], 1)
        assert unless_refuted(run.context, decision) == decision
        start_all(run.runner, run.plan(WORSE, CURRENT), [WORSE], 1)
        found = unless_refuted(run.context, decision)
    assert (found.verdict, found.winner) == (RaceVerdict.KEEP, CURRENT)
    assert found.why.startswith("it failed when it was started cold: ")


def test_a_winner_that_fails_cold_is_no_better_for_the_current_one_failing_too(
    tmp_path: Path,
) -> None:
    source = FragileSource(CROWDED, fails_above=15)
    with a_run(tmp_path, TRACE, a_space(CURRENT), source) as run:
        found, cold = cold_of(run, a_change(WORSE, 0.8))
    assert (found.verdict, found.winner) == (RaceVerdict.KEEP, CURRENT)
    winner, current = (f"no memory for {caps} sequences" for caps in (24, 16))
    assert winner in found.why
    assert f"so did the current one, {CURRENT}" in found.why
    assert current in found.why
    assert not_none(cold).ratio is None
    assert run.context.caveats == {Caveat.NOT_CONFIRMED_COLD}


def logged(folder: Path, refuses: int = 0) -> LoggedSource:
    log = str(folder / "starts")
    return LoggedSource(CROWDED, log=log, refused=BETTER, refuses=refuses)


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [0, 1])
def test_every_cold_engine_starts_in_a_fresh_process_and_has_a_second_chance(
    tmp_path: Path, refuses: int
) -> None:
    with a_run(tmp_path, TRACE, a_space(CURRENT), logged(tmp_path, refuses)) as run:
        run.engine.ensure_started()
        found, _ = cold_of(run, a_change(BETTER, known_ratio(BETTER)))
    assert found.verdict is RaceVerdict.CHANGE
    starts = [line.split() for line in (tmp_path / "starts").read_text().splitlines()]
    assert [limits for limits, _ in starts[1:]] == [str(BETTER)] * (1 + refuses) + [
        str(CURRENT)
    ]
    assert len({pid for _, pid in starts}) == len(starts)


@pytest.mark.slow
def test_a_cold_start_that_fails_is_told_by_its_cause(tmp_path: Path) -> None:
    with a_run(tmp_path, TRACE, a_space(CURRENT), logged(tmp_path, refuses=2)) as run:
        run.engine.ensure_started()
        found, cold = cold_of(run, a_change(BETTER, 0.8))
    assert (found.verdict, found.winner) == (RaceVerdict.KEEP, CURRENT)
    assert found.why == "it failed when it was started cold: the device has 1 of 80 GiB free"
    assert cold is not None


@pytest.mark.slow
def test_a_current_one_that_fails_cold_leaves_a_comparison_that_json_can_hold(
    tmp_path: Path,
) -> None:
    source = FragileSource(CROWDED, fails_above=15)
    with a_run(tmp_path, TRACE, a_space(CURRENT), source) as run:
        found, cold = cold_of(run, a_change(BETTER, None))
        assert found.verdict is RaceVerdict.CHANGE
        assert run.context.caveats == {Caveat.NOT_CONFIRMED_COLD}
        assert cold is not None
        assert cold.ratio is None
        run.context.run_dir.write_json("cold.json", cold.record)
        written = (run.context.run_dir.path / "cold.json").read_text()
    json.loads(written, parse_constant=_refuse)


def _refuse(name: str) -> object:
    raise AssertionError(f"{name} is no JSON")
