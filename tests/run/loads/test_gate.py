"""A gate keeps goodput under overload, costs nothing before, and says who pays for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.gate_parts import LIMITS, LOADS, PREDICTOR, a_gate, a_workload
from tuner.errors import NoFeasibleConfigError, UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.run.loads.gate import find_gate, goodput_per_s


def test_under_overload_a_gate_keeps_what_is_lost_without_and_costs_nothing_before() -> None:
    light, heavy = a_gate().loads
    assert [light.load, heavy.load] == list(LOADS)
    assert goodput_per_s(light.gated) > 0.99 * goodput_per_s(light.before)
    # Without a gate all wait for longer and longer.
    assert heavy.before.slo_attainment_ratio is not None
    assert heavy.before.slo_attainment_ratio < 0.3
    assert goodput_per_s(heavy.gated) > 1.5 * goodput_per_s(heavy.before)
    assert heavy.odds == 1.0
    assert heavy.elsewhere.low is not None
    assert 0 < heavy.elsewhere.low < heavy.elsewhere.value
    assert a_gate().pays


def test_what_is_told_of_a_gate_is_what_its_replay_brings() -> None:
    answer = a_gate()
    workload = a_workload("ttft_p95=1s")
    for at in answer.loads:
        plan = replace(workload.plan, load=at.load, gate=answer.gate)
        again = PREDICTOR.measure(workload.pieces, LIMITS, plan, workload.slos)
        assert isinstance(again, Measurement)
        assert again.turned_away == at.gated.turned_away
        assert goodput_per_s(again) == goodput_per_s(at.gated)
        plan = ReplayPlan(load=at.load)
        free = PREDICTOR.measure(workload.pieces, LIMITS, plan, workload.slos)
        assert isinstance(free, Measurement)
        assert goodput_per_s(free) == goodput_per_s(at.before)


def test_who_suffers_adds_up_to_who_was_turned_away() -> None:
    answer = a_gate()
    heavy = answer.loads[-1].gated
    for what in ("prompt", "answer"):
        groups = [group for group in answer.affected if group.what == what]
        assert len(groups) == 3
        assert sum(group.requests for group in groups) == heavy.offered
        away = sum(group.turned_away * group.requests for group in groups)
        assert round(away) == heavy.turned_away
        good = sum(group.good * group.requests for group in groups)
        assert good / heavy.offered == pytest.approx(heavy.slo_attainment_ratio)
        assert groups[0].last_tokens <= groups[1].first_tokens


def test_as_many_replicas_as_a_load_takes() -> None:
    answer = a_gate()
    assert answer.capacity is not None
    assert 0.5 < answer.capacity < 2.0
    assert answer.replicas(0.5) == 1
    assert answer.replicas(2.0) == 2
    assert (answer.in_flight or 0.0) > 0


def test_requests_that_all_come_at_one_instant_are_not_taken_for_refused_ones() -> None:
    workload = a_workload("ttft_p95=1s")
    (piece,) = workload.pieces
    at_once = replace(piece, due_s=np.zeros(len(piece)))
    with pytest.raises(UsageError, match="at one instant"):
        find_gate(PREDICTOR, LIMITS, replace(workload, pieces=(at_once,)), (1.0,))


def test_a_gate_that_would_refuse_everything_is_said() -> None:
    with pytest.raises(NoFeasibleConfigError, match="would refuse everything"):
        find_gate(PREDICTOR, LIMITS, a_workload("ttft_p95=1ms"), (1.0,))
