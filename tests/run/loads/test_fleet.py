"""The fewest replicas, on engines whose capacity is known: eight requests a second each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.fleet_parts import EIGHT, ENGINE, ONLY_EIGHT, STEPS, planted_fleet, poisson
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError, TooFewSamplesError
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.run.loads.fleet import plan_fleet
from tuner.run.loads.fleet_plan import FleetAim, FleetPlan
from tuner.search.space import SearchSpace
from tuner.shadow.predictor import Predictor
from tuner.traffic.prefixes import HashIds
from tuner.traffic.reshape import Router
from tuner.traffic.traces import Trace

AIM = FleetAim(
    (Slo.parse("e2e_p99=1.4s"),),
    Router.LEAST_LOADED,
    devices=2,
    gpu_hour_price=3.0,
    most=8,
    start_s=10.0,
    stretch_s=100.0,
)


def traffic(*rates: int) -> Trace:
    """Return requests at even distances, so many a second in each stretch of 100 s."""
    due_s = np.concatenate(
        [100.0 * i + np.arange(100 * rate) / rate for i, rate in enumerate(rates)]
    )
    return Trace(due_s, np.full(due_s.size, 4), np.full(due_s.size, 20))


def in_bursts(*bursts: tuple[float, int]) -> Trace:
    """Return requests that come within a second, so many from each instant on."""
    due_s = np.concatenate([at_s + np.arange(n) / n for at_s, n in bursts])
    return Trace(due_s, np.full(due_s.size, 4), np.full(due_s.size, 20))


def planned(
    trace: Trace, aim: FleetAim = AIM, *, caps: tuple[int, ...] = (8,), wrong_ratio: float = 0.0
) -> FleetPlan:
    ceiling = EngineLimits(max(caps), 2048)
    space = SearchSpace(EIGHT, caps, (2048,), ceiling)
    profile = replace(ENGINE, metric_error_ratio=wrong_ratio)
    return plan_fleet(Predictor(profile, ceiling), space, trace, ReplayPlan(), aim)


def test_a_fleet_has_as_many_replicas_as_its_busiest_stretch_needs() -> None:
    found = planned(traffic(6, 22, 6, 14))
    assert found.needed == {EIGHT: 3}
    fixed, by_stretch, scaled = found.ways
    assert (fixed.replicas, by_stretch.replicas) == (3, 3)
    assert [one.replicas for one in by_stretch.stretches] == [1, 3, 1, 2]
    assert fixed.gpu_hours == pytest.approx(2 * 3 * 401 / 3600, rel=0.01)
    assert fixed.cost == pytest.approx(3.0 * fixed.gpu_hours)
    assert [one.offered_per_s for one in fixed.stretches] == pytest.approx([6, 22, 6, 14], 0.01)
    assert not fixed.breaks
    assert not by_stretch.breaks
    # Two more are on for the second and its start, one for the last.
    assert by_stretch.gpu_hours == pytest.approx(2 * (401 + 2 * 110 + 111) / 3600, rel=0.02)
    assert by_stretch.slo_attainment_ratio == pytest.approx(1.0, abs=0.01)
    assert scaled.autoscaler is not None
    assert scaled.gpu_hours < fixed.gpu_hours or scaled.breaks


def test_a_trace_a_second_longer_than_its_stretches_has_no_stretch_of_one_request() -> None:
    fixed = planned(in_bursts(*((float(at_s), 6) for at_s in range(201)))).ways[0]
    assert [one.offered_per_s for one in fixed.stretches] == pytest.approx([6, 6], rel=0.02)
    assert fixed.slo_attainment_ratio == 1.0


def test_a_start_that_takes_longer_than_a_stretch_begins_before_the_trace() -> None:
    found = planned(traffic(6, 22, 6, 14), replace(AIM, start_s=120.0))
    _, by_stretch, _ = found.ways
    assert [one.replicas for one in by_stretch.stretches] == [3, 3, 2, 2]
    assert not by_stretch.breaks


def test_limits_that_need_fewer_replicas_are_found() -> None:
    found = planned(traffic(22), caps=(8, 16, 32))
    assert found.limits.max_num_seqs >= 16
    assert found.needed[EIGHT] == 3
    assert found.needed[found.limits] == 1
    assert [way.name for way in found.ways] == ["fixed"]


def test_limits_are_found_also_where_no_number_of_replicas_serves_the_current_ones() -> None:
    """All prompts begin alike, and the prefix router lets 32 wait for who has it."""
    trace = traffic(22)
    ids = [(1, 2)] * len(trace)
    alike = replace(
        trace, prompt_tokens=np.full(len(trace), 32), hashes=HashIds.from_rows(ids, 16)
    )
    aim = replace(AIM, router=Router.PREFIX)
    found = planned(alike, aim, caps=(2, 4, 8, 16, 32))
    assert found.needed == {EIGHT: None, EngineLimits(32, 2048): 1}


def test_a_stretch_whose_burst_is_worked_off_in_it_needs_no_more_replicas() -> None:
    trace = in_bursts((0.0, 80), (100.0, 60), (200.0, 60))
    found = planned(trace, replace(AIM, slos=(Slo.parse("e2e_p90=12s"),), most=64))
    assert found.needed == {EIGHT: 1}
    # What comes after the last is not known: there it counts as a load that goes on.
    assert [one.replicas for one in found.ways[1].stretches] == [1, 1, 8]


def test_a_stretch_that_no_number_serves_takes_no_more_replicas() -> None:
    trace = traffic(22, 4)
    output = np.where((trace.due_s > 100) & (np.arange(len(trace)) % 10 == 0), 60, 20)
    found = planned(replace(trace, output_tokens=output))
    for way in found.ways:
        assert [one.start_s for one in way.breaks] == [100.0]
    assert [way.replicas for way in found.ways[:2]] == [3, 3]


def test_a_stretch_is_judged_by_the_slos_that_its_requests_carry() -> None:
    """One of sixty takes too long: of so few that says nothing of the 99th percentile."""
    trace = in_bursts((0.0, 0), *((float(s), 22) for s in range(100)), (150.0, 30), (180.0, 30))
    output = np.where(np.arange(len(trace)) == len(trace) - 1, 60, 20)
    aim = replace(AIM, slos=(*AIM.slos, Slo.parse("e2e_p90=4s")), start_s=1.0)
    fixed, by_stretch, _ = planned(replace(trace, output_tokens=output), aim).ways
    assert not fixed.breaks
    assert [one.replicas for one in by_stretch.stretches] == [3, 1]


def test_a_queue_takes_one_more_replica_in_the_stretch_that_it_is_left_to() -> None:
    """Also where nothing comes in a stretch before."""
    trace = traffic(6, 0, 20, 6)
    late = Trace(np.full(150, 299.0), np.full(150, 4), np.full(150, 20))
    due_s = np.concatenate([trace.due_s, late.due_s])
    trace = Trace(np.sort(due_s), np.full(due_s.size, 4), np.full(due_s.size, 20))
    _, by_stretch, _ = planned(trace, replace(AIM, slos=(Slo.parse("e2e_p90=1.4s"),))).ways
    assert [one.replicas for one in by_stretch.stretches] == [1, 3, 2]
    assert not by_stretch.breaks


def test_a_machine_that_is_surely_slower_has_its_replicas_and_its_odds() -> None:
    """Of 15 requests a second two machines of 8 keep up, and of those 10 % slower three."""
    told = planned(traffic(15), wrong_ratio=0.2).odds
    # Two are enough unless steps take 16/15 as long: the stated error is 1.645 sqrt 2 of its
    # deviations, beyond 0.82 of which lies a fifth.
    assert told.replicas == 2
    assert told.p_kept == pytest.approx(0.8, abs=0.08)
    assert told.sure is not None
    assert told.sure[0] == 3
    slower = replace(ENGINE, step_model=STEPS.scaled(1.1), metric_error_ratio=0.0)
    found = plan_fleet(Predictor(slower, EIGHT), ONLY_EIGHT, traffic(15), ReplayPlan(), AIM)
    assert (found.odds.replicas, found.odds.p_kept) == (3, 1.0)
    assert [way.name for way in found.ways] == ["fixed"]


@pytest.mark.slow
def test_replicas_serve_what_comes_on_machines_as_wrong_as_stated_as_often_as_told() -> None:
    rng, aim = np.random.default_rng(3), replace(AIM, most=16)
    found = [planted_fleet(rng, poisson, aim, wrong_ratio=0.15, again=20) for _ in range(8)]
    told, true = (
        np.array([getattr(case, of) for case in found if case]) for of in ("told", "true")
    )
    assert len(told) == 8
    assert told.mean(axis=0) == pytest.approx(true.mean(axis=0), abs=0.07)
    assert told[:, 0].min() < 0.85
    assert true[:, 1].mean() >= 0.88


def test_a_fleet_that_is_surely_enough_is_a_way_of_its_own() -> None:
    found = planned(traffic(15, 6), wrong_ratio=0.2)
    assert [way.name for way in found.ways] == ["fixed", "by stretch", "autoscaled", "sure"]
    fixed, *_, sure = found.ways
    assert (fixed.replicas, sure.replicas) == (2, 3)
    assert sure.gpu_hours == pytest.approx(1.5 * fixed.gpu_hours, rel=0.01)
    few = planned(traffic(15), replace(AIM, most=2), wrong_ratio=0.2).odds
    assert few.sure is None
    assert "0.90 with none up to 2" in few.text(2)


def test_what_no_number_of_replicas_keeps_is_said() -> None:
    hasty = replace(AIM, slos=(Slo.parse("e2e_p99=900ms"),))
    with pytest.raises(
        NoFeasibleConfigError, match=r"up to 8 replicas do not keep e2e_p99=0\.9s"
    ) as error:
        planned(traffic(6), hasty)
    assert error.value.hint.startswith("no load is low enough: relax e2e_p99")
    few = replace(AIM, slos=(Slo.parse("e2e_p99=1100ms"),), most=1)
    with pytest.raises(NoFeasibleConfigError, match="do not keep") as error:
        planned(traffic(60), few)
    assert "allow more with --most-replicas" in error.value.hint
    with pytest.raises(TooFewSamplesError):
        planned(Trace(np.arange(20, dtype=np.float64), np.full(20, 4), np.full(20, 20)))
