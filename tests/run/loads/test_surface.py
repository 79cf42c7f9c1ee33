"""A surface holds what the predictor says, the same settings at each load, and the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.surface_parts import CURRENT, LOADS, PREDICTOR, SPACE, TRACE, a_surface
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import Failure, holds
from tuner.run.loads.surface import Reached, Surface
from tuner.search.objective import WORST_SLACK


@pytest.fixture(scope="module")
def surface() -> Surface:
    return a_surface()


def measured(limits: EngineLimits, load: float, surface: Surface) -> Measurement:
    outcome = PREDICTOR.measure([TRACE], limits, ReplayPlan(load=load), surface.workload.slos)
    assert isinstance(outcome, Measurement)
    return outcome


def test_every_setting_of_the_grid_is_there_at_every_load_as_predicted(
    surface: Surface,
) -> None:
    assert [at.load for at in surface.loads] == list(LOADS)
    assert {CURRENT, *SPACE.grid()} <= set(surface.settings)
    for at in surface.loads:
        for limits in surface.settings:
            expected, reached = measured(limits, at.load, surface), at.reached(limits)
            assert reached.value("e2e_p95") == expected.latency("e2e_s", "p95")
            assert reached.value("requests_per_s") == expected.requests_per_s
            assert reached.is_sustained is expected.is_sustained
            assert reached.holds is holds(expected, surface.workload.slos)


def test_what_is_best_at_one_load_is_tried_at_all_with_every_budget(surface: Surface) -> None:
    caps = {at.decision.best.max_num_seqs for at in surface.loads}
    assert caps - set(SPACE.caps()), "a best cap between those of the ladder"
    tried = {
        (limits.max_num_seqs, limits.max_num_batched_tokens) for limits in surface.settings
    }
    assert {(cap, budget) for cap in caps for budget in SPACE.budgets} <= tried


def test_no_setting_holds_with_a_clearly_smaller_tail_than_the_best(surface: Surface) -> None:
    for at in surface.loads[:-1]:
        tails = [
            tail
            for limits in surface.settings
            if (reached := at.reached(limits)).holds
            and (tail := reached.value("e2e_p95")) is not None
        ]
        assert (at.best.value("e2e_p95") or 0.0) <= min(tails) * 1.03


def test_more_load_ends_the_current_configuration_first_and_then_the_best(
    surface: Surface,
) -> None:
    current = [at.reached(CURRENT).fault for at in surface.loads]
    assert current[0] == ""
    assert current[1:] == ["not sustained, breaks ttft_p95"] * 2
    assert [at.best.holds for at in surface.loads] == [True, True, False]


def test_json_says_for_each_load_what_both_reach(surface: Surface) -> None:
    half, whole, _ = surface.as_json()["loads"]
    assert half["at_current"]["slos_met"] is half["at_current"]["sustained"] is True
    told, expected = whole["at_current"], measured(CURRENT, 1.0, surface)
    assert (told["sustained"], told["slos_met"]) == (False, False)
    assert told["slos_broken"] == ["ttft_p95=1s"]
    assert told["e2e_s"]["p95"] == expected.latency("e2e_s", "p95")
    assert told["requests_per_s"] == expected.requests_per_s
    assert whole["at_best"]["max_num_seqs"] == whole["best"].max_num_seqs
    assert whole["change_pays"]


def test_without_an_slo_none_is_said_to_be_met() -> None:
    alone = a_surface((1.0,), slos=()).as_json()["loads"][0]
    assert alone["at_best"]["slos_met"] is None
    assert alone["at_best"]["sustained"]


def test_a_replay_that_failed_has_a_cause_and_no_figure(surface: Surface) -> None:
    failed = Reached.of(CURRENT, Failure("no blocks are left"), surface.workload.slos)
    assert (failed.holds, failed.fault) == (False, "failed")
    assert failed.value("e2e_p95") is None
    told = failed.as_json("p95")
    assert (told["cause"], told["requests_per_s"]) == ("no blocks are left", None)


def test_one_metric_is_told_of_a_load_with_its_values_and_their_ratio(
    surface: Surface,
) -> None:
    """Where the share of an SLO decides, though the best setting meets all of them."""
    at = surface.loads[1]
    by_slo = replace(at, decision=replace(at.decision, metric=WORST_SLACK))
    for one in (at, by_slo):
        told, metric = one.as_json(CURRENT, surface.tail), one.decision.metric
        assert told["metric"] == metric
        assert told["value"] == one.score(one.decision.best).value_of(metric)
        assert told["current_value"] == one.score(CURRENT).value_of(metric)
        assert told["current_value"] > told["value"] > 0
    assert by_slo.why.startswith("by the share of its tightest bound that is used: ")
