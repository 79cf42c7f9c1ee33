"""A gate keeps goodput under overload, costs nothing before, and says who pays for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from support.gate_parts import LIMITS, LOADS, PREDICTOR, a_gate, a_workload
from support.optional import not_none
from tuner.errors import NoFeasibleConfigError, UsageError
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import holds
from tuner.run.drawing import FEW_DRAWS, Drawing
from tuner.run.loads.gate import GateAnswer, _Search, find_gate, goodput_per_s
from tuner.run.predict import Predictions
from tuner.shadow.fleet import Fleet, simulate_fleet
from tuner.shadow.prepared import PreparedTrace
from tuner.traffic.resample import at_load
from tuner.traffic.windows import Window


def test_under_overload_a_gate_keeps_what_is_lost_without_and_costs_nothing_before() -> None:
    light, heavy = a_gate().loads
    assert [light.load, heavy.load] == list(LOADS)
    assert goodput_per_s(light.gated) > 0.99 * goodput_per_s(light.before)
    # Without a gate all wait for longer and longer.
    assert heavy.before.slo_attainment_ratio is not None
    assert heavy.before.slo_attainment_ratio < 0.3
    assert goodput_per_s(heavy.gated) > 1.5 * goodput_per_s(heavy.before)
    assert heavy.odds == 1.0
    assert 0 < not_none(heavy.elsewhere.low) < heavy.elsewhere.value
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


WARM = Window(12.0, 24.0).with_lead_in(4.0)
"""A stretch of the traffic of 31 s, with the same rate before it."""


@cache
def a_warm_gate() -> GateAnswer:
    """Return the gate that is found for the stretch."""
    return find_gate(PREDICTOR, LIMITS, a_workload("ttft_p95=1s", window=WARM), (2.0,))


def test_what_leads_in_to_a_window_meets_the_gate_and_is_not_counted() -> None:
    workload = a_workload("ttft_p95=1s", window=WARM)
    (heavy,), (piece,) = a_warm_gate().loads, workload.pieces
    loaded = at_load(piece, 2.0)
    assert heavy.before.offered == heavy.gated.offered == loaded.measured < len(loaded)
    assert heavy.before.offered_per_s == pytest.approx(32.0, rel=0.15)
    bare = a_workload("ttft_p95=1s", window=WARM.with_lead_in(0.0))
    plan = replace(bare.plan, load=2.0)
    cold = PREDICTOR.measure(bare.pieces, LIMITS, plan, bare.slos)
    assert isinstance(cold, Measurement)
    # Whoever comes meets the queue that is there already.
    assert goodput_per_s(heavy.before) < 0.9 * goodput_per_s(cold)


def test_caps_on_answers_are_those_of_requests_that_are_measured() -> None:
    workload = a_workload("ttft_p95=1s", window=WARM)
    (piece,) = workload.pieces
    longer = np.where(piece.is_measured, piece.output_tokens, 300 + np.arange(len(piece)))
    led = replace(workload, pieces=(replace(piece, output_tokens=longer),))
    found = find_gate(PREDICTOR, LIMITS, led, (1.0,))
    longest = int(piece.output_tokens[piece.led_in :].max())
    assert (found.gate.max_output_tokens or 0) < longest


@pytest.mark.parametrize("answer_of", [a_gate, a_warm_gate])
def test_who_suffers_adds_up_to_who_was_turned_away(
    answer_of: Callable[[], GateAnswer],
) -> None:
    answer = answer_of()
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
    assert 0.5 < not_none(answer.capacity) < 2.0
    assert [at.replicas for at in answer.loads] == [1, 2]
    assert (answer.in_flight or 0.0) > 0


def test_replicas_share_the_bursts_that_are_too_much_for_one() -> None:
    workload = a_workload("ttft_p95=1s")
    (piece,) = workload.pieces
    second = np.floor(piece.due_s)
    # All requests of every fourth second come at once.
    due_s = np.sort(np.where(second % 4 == 0, second, piece.due_s))
    bursty = replace(workload, pieces=(replace(piece, due_s=due_s),))
    answer = find_gate(PREDICTOR, LIMITS, bursty, (6.0,))
    (at,), alone = answer.loads, 6.0 / (answer.capacity or 0.0)
    prepared = PreparedTrace(at_load(bursty.pieces[0], 6.0), bursty.plan)

    def keeps(replicas: int) -> bool:
        engine, fleet = PREDICTOR.simulated(LIMITS), Fleet(replicas)
        log = simulate_fleet(engine, prepared, LIMITS, bursty.plan, fleet).log
        return holds(measure([log], bursty.slos), bursty.slos)

    kept = [count for count in range(1, 20) if keeps(count)]
    assert at.replicas == min(kept) < alone


def test_replicas_that_do_not_hold_a_load_are_never_told() -> None:
    """Where one bears more alone than in a fleet, as by prefixes that it then sees more of."""
    workload = a_workload("ttft_p95=1s")
    search = _Search(PREDICTOR, LIMITS, workload, (6.0,))
    told = not_none(search._replicas(6.0, capacity=a_gate().capacity))
    assert search._replicas(6.0, capacity=3.0) == told > 2


def test_what_a_gate_gains_on_other_traffic_is_as_open_as_both_traffics_are() -> None:
    """The recorded lies as far from what is usual as draws from it, and what comes does too."""
    answer, workload = a_gate(), a_workload("ttft_p95=1s")
    drawing = Drawing(PREDICTOR, Predictions(workload))
    heavy = answer.loads[-1]
    plans = (ReplayPlan(load=heavy.load, gate=gate) for gate in (answer.gate, None))
    drawn = drawing.possible(LIMITS, FEW_DRAWS)
    gated, free = (
        np.array(
            [goodput_per_s(measure(r.logs(e, LIMITS, plan), workload.slos)) for r, e in drawn]
        )
        for plan in plans
    )
    low, high = np.quantile(gated - free, (0.05, 0.95)).tolist()
    assert heavy.elsewhere.low is not None
    assert not_none(heavy.elsewhere.high) - heavy.elsewhere.low > math.sqrt(2) * (high - low)
    assert heavy.elsewhere.value == pytest.approx(np.median(gated - free))


def test_requests_that_all_come_at_one_instant_are_not_taken_for_refused_ones() -> None:
    workload = a_workload("ttft_p95=1s")
    (piece,) = workload.pieces
    at_once = replace(piece, due_s=np.zeros(len(piece)))
    with pytest.raises(UsageError, match="at one instant"):
        find_gate(PREDICTOR, LIMITS, replace(workload, pieces=(at_once,)), (1.0,))


def test_a_gate_that_would_refuse_everything_is_said() -> None:
    with pytest.raises(NoFeasibleConfigError, match="would refuse everything"):
        find_gate(PREDICTOR, LIMITS, a_workload("ttft_p95=1ms"), (1.0,))
