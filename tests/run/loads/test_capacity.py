"""How much load the SLOs bear: found on the toy, and said in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.odd_toys import LostSource
from support.optional import not_none
from support.run_parts import Heard, ToyPredictor, a_profile, a_run, a_space
from support.toy import ToyCosts, ToySource
from support.traffic import a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import holds
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.loads.capacity import (
    CapacityResult,
    confirm_capacity,
    draw_capacity,
    predict_capacity,
    tell_headroom,
)
from tuner.run.predict import Foretold, Predictions, predict, predict_more
from tuner.run.sessions.live import Session
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective, Score, Scoring, Tier
from tuner.search.race import Odds, RaceDecision, RaceVerdict
from tuner.search.trials import Phase
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace, Turns

TRACE = steady(240, per_s=6.0, prompt=110, output=35)
SLOS = (Slo.parse("e2e_p90=2s"),)
SMALL, LARGE = EngineLimits(2, 2048), EngineLimits(32, 2048)


def bears(limits: EngineLimits, load: float) -> bool:
    """Say by a replay of its own whether the SLOs hold at a load."""
    log = replay_toy(TRACE, limits, plan=ReplayPlan(load=load))
    return holds(measure([log]), SLOS)


def capacity_of(
    limits: EngineLimits, trace: Trace = TRACE, slos: tuple[Slo, ...] = SLOS
) -> Measurement:
    """Return what toys find."""
    found = ToyPredictor(a_profile()).measure_capacity([trace], limits, ReplayPlan(), slos)
    assert isinstance(found, Measurement)
    return found


@pytest.fixture(scope="module")
def capacities() -> dict[EngineLimits, float]:
    """Return what is found for a small and a large cap."""
    found = {}
    for limits in (SMALL, LARGE):
        measured = capacity_of(limits)
        assert measured.capacity == measured.load
        found[limits] = measured.capacity or 0.0
    return found


@pytest.mark.parametrize("limits", [SMALL, LARGE], ids=str)
def test_the_slos_hold_up_to_the_capacity_and_not_beyond(
    capacities: dict[EngineLimits, float], limits: EngineLimits
) -> None:
    load = capacities[limits]
    assert bears(limits, load)
    assert not bears(limits, 1.03 * load)


def test_more_room_bears_more_load(capacities: dict[EngineLimits, float]) -> None:
    assert capacities[LARGE] > 2 * capacities[SMALL]


def test_slos_that_hold_at_no_load_have_no_capacity() -> None:
    hopeless = (Slo.parse("e2e_p90=1ms"),)
    measured = capacity_of(LARGE, slos=hopeless)
    assert measured.capacity == 0.0
    assert Scoring(Objective.CAPACITY, hopeless, "p90").score(measured).tier is Tier.BREAKS_SLO


@pytest.mark.slow
def test_the_objective_capacity_ranks_by_it(
    tmp_path: Path, capacities: dict[EngineLimits, float]
) -> None:
    space = a_space(SMALL, (2, 8))
    with a_run(tmp_path, TRACE, space, slos=SLOS, objective=Objective.CAPACITY) as run:
        predicted = predict(ToyPredictor(a_profile()), space, run.workload)
    seen = {o.limits: o.score for o in predicted.observations}
    assert set(seen) == set(space.grid())
    assert seen[SMALL] == Score(Tier.GOOD, 1 / capacities[SMALL], "capacity")
    assert min(seen.values(), key=lambda s: s.order).value < seen[SMALL].value


@pytest.mark.slow
def test_where_nothing_meets_the_slos_it_is_the_nearest_whose_load_is_told(
    tmp_path: Path,
) -> None:
    odds = Odds(0.9, 0.1, None, 0.1, 0.9)
    kept = RaceDecision(RaceVerdict.KEEP, SMALL, LARGE, (LARGE,), None, 0, "", odds=odds)
    change = RaceDecision(RaceVerdict.CHANGE, LARGE, LARGE, (LARGE,), None, 0, "")
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS, budget_s=3600.0) as run:
        asked = (ToyPredictor(a_profile()), run.workload)
        of_nearest = predict_capacity(*asked, kept, SMALL)
        assert of_nearest == predict_capacity(*asked, change, SMALL)
        assert (of_nearest.winner or 0.0) > (of_nearest.current or 0.0) > 0.0
        met = replace(kept, odds=replace(odds, p_slo=0.9))
        found = predict_capacity(*asked, met, SMALL)
        assert found.winner == found.current


@pytest.mark.slow
def test_the_winner_is_replayed_live_at_the_load_it_is_said_to_bear(tmp_path: Path) -> None:
    predictor = ToyPredictor(a_profile())
    decision = RaceDecision(RaceVerdict.CHANGE, LARGE, LARGE, (LARGE,), None, 3, "better")
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS, budget_s=3600.0) as run:
        found = predict_capacity(predictor, run.workload, decision, SMALL)
        assert found.winner is not None
        assert found.winner > not_none(found.current)

        def confirmed(
            claim: CapacityResult, predictor: ToyPredictor = predictor
        ) -> bool | None:
            on = [run.workload]
            return confirm_capacity(run.runner, predictor, on, LARGE, claim).live

        assert confirmed(found) is True
        beyond = replace(found, winner=1.5 * found.winner)
        too_fast = ToyPredictor(a_profile(), toy=ToySource(ToyCosts(0.001, 0.0001, 0.00001)))
        assert confirmed(beyond, too_fast) is False
        # Nobody looks for longer than a tenth of the budget.
        run.runner.context = replace(run.context, budget=Budget(60.0))
        assert confirmed(found) is None
        tried = [r for r in run.context.journal.records() if r.phase is Phase.CAPACITY]
    assert [(r.measurement or {})["load"] for r in tried] == [found.winner, beyond.winner]


def test_what_was_predicted_of_the_load_stays_where_no_engine_is_left(tmp_path: Path) -> None:
    found = CapacityResult(1.7, 1.2, None)
    predictor = ToyPredictor(a_profile())
    with a_run(tmp_path, TRACE, a_space(SMALL), LostSource(), SLOS, 3600.0) as run:
        parts = (run.runner, predictor, [run.workload], LARGE, found)
        assert confirm_capacity(*parts) == found
        heard = run.context.listener
    assert isinstance(heard, Heard)
    assert "stays a prediction" in heard.notes[-1]
    assert "the device is lost" in heard.notes[-1]


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_a_race_offers_what_the_best_bears_of_the_recorded_load(
    load: float, tmp_path: Path
) -> None:
    """Whatever the multiple of it that the run was asked for."""
    trace = at_load(TRACE, load)
    goal = Objective.CAPACITY
    with a_run(tmp_path, trace, a_space(LARGE, (8,)), slos=SLOS, objective=goal) as run:
        predictor = ToyPredictor(a_profile())
        session = Session.of(run.runner, {}, lambda _: predictor)
        found = predict_more(predictor, Predictions(run.workload), [LARGE])
        session.search.foretold = Foretold(predictor, found)
        outcome, aim = found.outcomes[LARGE], session.search._race_aim
        assert isinstance(outcome, Measurement)
        assert aim.plan.load * trace.load == pytest.approx(outcome.capacity)


def test_a_replay_that_was_cut_says_nothing_of_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CapacityResult(0.2, 0.1, None)
    predictor = ToyPredictor(a_profile())
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS, budget_s=3600.0) as run:
        cut = measure([replay_toy(TRACE, LARGE)])
        cut = replace(cut, cut_reason="the time is over", is_sustained=False)
        monkeypatch.setattr(TrialRunner, "measure", lambda *_, **__: (cut, None))
        parts = (run.runner, predictor, [run.workload], LARGE, found)
        assert confirm_capacity(*parts).live is None
        heard = run.context.listener
    assert isinstance(heard, Heard)
    assert "the time is over" in heard.notes[-1]


def test_what_is_told_to_be_borne_is_borne_as_deployed(tmp_path: Path) -> None:
    """Not by the blocks that are left at the largest limits, where it is not tried either."""
    ceiling = a_space(SMALL).ceiling
    starts = (KvStart(ceiling, 60), KvStart(LARGE, 600))
    predictor = Predictor(a_profile(kv_starts=starts), ceiling)
    deployed = predictor.as_deployed().measure_capacity([TRACE], LARGE, ReplayPlan(), SLOS)
    there = predictor.measure_capacity([TRACE], LARGE, ReplayPlan(), SLOS)
    assert isinstance(deployed, Measurement)
    assert isinstance(there, Measurement)
    assert (deployed.capacity or 0.0) > 1.2 * (there.capacity or 0.0)
    decision = RaceDecision(RaceVerdict.CHANGE, LARGE, LARGE, (LARGE,), None, 3, "better")
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS, budget_s=3600.0) as run:
        session = Session.of(run.runner, {}, lambda _: predictor)
        session.search.foretold = Foretold(predictor, Predictions(run.workload))
        session._find_capacity(decision)
    found = not_none(session.found.capacity)
    assert (found.winner, found.confirmed_live) == (deployed.capacity, None)
    assert "not tried live: the engine that was measured on" in found.text


def never_idle_per_s(limits: EngineLimits, source: ToySource) -> float:
    """Return what the engine finishes a second in the midst of a long overload."""
    log = replay_toy(even(80.0, 60.0, seed=2), limits, source)
    ends_s = np.sort(log.timelines.last_s)
    first, last = int(0.2 * ends_s.size), int(0.8 * ends_s.size)
    return (last - first) / float(ends_s[last] - ends_s[first])


def even(per_s: float, length_s: float, seed: int) -> Trace:
    """Return arrivals at any instant, of prompts of 60 tokens and 50 to 150 answered ones."""
    rng = np.random.default_rng(seed)
    n = int(per_s * length_s)
    due_s = np.sort(rng.uniform(0, length_s, n))
    return a_trace((due_s - due_s[0]).tolist(), 60, rng.integers(50, 150, n).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("length_s", [4.0, 20.0, 60.0])
@pytest.mark.parametrize("cap", [16, 128])
def test_no_window_is_so_short_that_more_is_borne_than_can_be_finished(
    length_s: float, cap: int
) -> None:
    """Squeezed into less time, 4 s of 18/s held up to 60/s where 17/s can be finished."""
    source = ToySource(ToyCosts(0.010, 0.0005, 0.00005), max_model_len=100_000)
    limits, trace = EngineLimits(cap, 8192), even(18.0, length_s, seed=1)
    slos = (Slo.parse("ttft_p90=2s"),)
    predictor = ToyPredictor(a_profile(), toy=source)
    found = predictor.measure_capacity([trace], limits, ReplayPlan(), slos)
    assert isinstance(found, Measurement)
    most = never_idle_per_s(limits, source) / 18.0
    assert 0.7 * most < not_none(found.capacity) < 1.06 * most
    # A window of one life of a request shows no queue; the sentence then says so.
    assert found.spans_lives == (length_s > 4.0)


def test_the_capacity_of_one_session_is_how_often_it_is_there() -> None:
    after = np.where(np.arange(len(TRACE)) > 0, 0, -1)
    turns = Turns(after, np.where(after >= 0, TRACE.due_s, 0.0))
    found = capacity_of(LARGE, replace(TRACE, turns=turns)).capacity
    assert found in range(1, 6)


def test_of_a_batch_that_comes_at_once_a_multiple_is_borne() -> None:
    """It has no rate, by which the chance of other traffic could be taken out."""
    aim = Aim(Objective.CAPACITY, (Slo.parse("e2e_p90=9s"),), ReplayPlan(), None)
    workload = Workload.of_whole(a_trace([0.0] * 60, 50, 20), aim)
    low, high = not_none(draw_capacity(Predictor(a_profile()), workload, LARGE, 2.0))
    assert 0 < low <= 2.0 <= high < np.inf


def test_a_capacity_that_the_window_cannot_show_is_not_claimed() -> None:
    text = CapacityResult(0.9, 0.5, None, is_shown=False).text
    assert text.startswith("beyond what this window can show")
    assert "holds up to" not in text


@pytest.mark.parametrize(
    ("found", "is_told"),
    [
        (CapacityResult(5.0, 8.3, None), True),
        (CapacityResult(8.0, 8.3, None), False),
        (CapacityResult(8.3, 5.0, None), False),
        (CapacityResult(5.0, 8.3, None, is_shown=False), False),
        (CapacityResult(5.0, None, None), False),
    ],
)
def test_an_answer_that_bears_clearly_less_than_the_current_one_has_a_caveat_with_both(
    tmp_path: Path, found: CapacityResult, *, is_told: bool
) -> None:
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS) as run:
        tell_headroom(run.context, found)
        assert (Caveat.LESS_HEADROOM in run.context.caveats) is is_told
        if is_told:
            assert "up to 5 x" in run.context.caveat_texts[Caveat.LESS_HEADROOM]
            assert "8.3 x" in run.context.caveat_texts[Caveat.LESS_HEADROOM]


@pytest.mark.slow
def test_today_s_load_is_the_recorded_one_also_under_another_load() -> None:
    found = {load: capacity_of(LARGE, at_load(TRACE, load)).capacity for load in (1.0, 2.0)}
    assert found[2.0] == pytest.approx(found[1.0], rel=0.1)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            CapacityResult(1.7, 1.2, True),
            "holds up to 1.7 x today's load (the current one 1.2 x)",
        ),
        (CapacityResult(1.7, None, False), "but live it did not hold at that load"),
        (CapacityResult(None, None, None), "the SLOs hold at no load"),
    ],
)
def test_it_is_said_in_a_sentence(found: CapacityResult, words: str) -> None:
    assert words in found.text
