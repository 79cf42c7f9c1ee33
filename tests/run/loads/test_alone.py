"""SLOs that requests break even alone in the engine: known, and no lower load is advised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.gate_parts import LIMITS, PREDICTOR, a_workload
from support.run_parts import ToyPredictor, a_profile, a_space
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.run.loads.alone import Hopeless, hopeless, with_widest


def found(*slos: str, settings: tuple[EngineLimits, ...] = (LIMITS,)) -> Hopeless | None:
    workload = a_workload(*slos)
    return hopeless(PREDICTOR, settings, workload.pieces, workload.slos)


def slowly_and_alone(slo_metric: str, statistic: str) -> float:
    """Return what requests take that come so slowly that no two ever meet."""
    (piece,) = a_workload("e2e_p95=1s").pieces
    slow = replace(piece, due_s=100 * piece.due_s)
    measured = PREDICTOR.measure([slow], LIMITS, ReplayPlan())
    assert isinstance(measured, Measurement)
    return measured.latency(slo_metric, statistic) or 0.0


def test_what_a_request_takes_alone_is_what_it_takes_where_no_two_meet() -> None:
    told = found("ttft_p95=1ms", "e2e_p50=1ms", "tpot_p50=1h")
    assert told is not None
    assert [slo.name for slo, _ in told.reached_s] == ["ttft_p95", "e2e_p50"]
    for slo, reached_s in told.reached_s:
        assert reached_s == pytest.approx(slowly_and_alone(slo.metric, slo.statistic), rel=0.01)
    assert "ttft_p95" in told.text
    assert told.hint.startswith("no load is low enough: relax ttft_p95 and e2e_p50, shorten")
    assert "prompts and answers" in told.hint


def test_slos_that_only_break_under_load_are_left_to_less_load() -> None:
    alone_s, wrong = slowly_and_alone("ttft_s", "p95"), PREDICTOR.wrong_ratio
    assert found(f"ttft_p95={1.1 * alone_s:.6f}s") is None
    assert found(f"ttft_p95={alone_s / (1 + wrong / 2):.6f}s") is None
    assert found(f"ttft_p95={alone_s / (1 + wrong) / 1.1:.6f}s") is not None


def test_a_setting_at_which_requests_are_in_time_alone_leaves_hope() -> None:
    slow, fast = EngineLimits(8, 32), EngineLimits(8, 512)
    bounds = [found("ttft_p95=1ms", settings=(one,)) for one in (slow, fast)]
    slow_s, fast_s = (told.reached_s[0][1] for told in bounds if told is not None)
    between = f"ttft_p95={(slow_s + fast_s) / 2:.6f}s"
    assert fast_s < slow_s
    assert found(between, settings=(slow,)) is not None
    assert found(between, settings=(slow, fast)) is None


def test_of_what_cannot_be_predicted_nothing_is_told() -> None:
    workload = a_workload("ttft_p95=1ms")
    asked = ToyPredictor(a_profile())
    assert hopeless(asked, [LIMITS], workload.pieces, workload.slos) is None
    assert not asked.asked
    assert hopeless(PREDICTOR, [LIMITS], workload.pieces, ()) is None
    long = replace(
        workload.pieces[0], prompt_tokens=workload.pieces[0].prompt_tokens + 100_000_000
    )
    assert hopeless(PREDICTOR, [LIMITS], [long], workload.slos) is None


def test_the_widest_budget_is_looked_at_too() -> None:
    space = a_space(LIMITS)
    limits, wide = with_widest(LIMITS, space)
    assert limits == LIMITS
    assert wide.max_num_seqs == LIMITS.max_num_seqs
    assert wide.max_num_batched_tokens == space.ceiling.max_num_batched_tokens
