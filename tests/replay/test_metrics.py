"""Known delays in, the same numbers out; nothing lost, and nothing made up where data lacks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.planted import VOCAB_SIZE, PlantedSource
from support.planted_machine import MACHINES, MOODS
from support.toy import ToyCosts, ToySource
from support.traffic import a_log, a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import replay
from tuner.replay.metrics import counted_distribution, distribution, measure
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.slo import LATENCIES, Slo
from tuner.replay.timeline import Outcome
from tuner.stats import QUANTILES, pooled, quantile
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import LoadModel

LIMITS = EngineLimits(8, 256)
DONE = Outcome.COMPLETED


def closed(n: int) -> ReplayPlan:
    return ReplayPlan(load_model=LoadModel.CLOSED, concurrency=n)


def test_known_instants_give_known_numbers() -> None:
    log = a_log(
        [
            (0.0, [1.0, 2.0, 3.0], DONE),
            (1.0, [3.0, 5.0], DONE),
            (2.0, [10.0], DONE),
            (3.0, [], Outcome.REFUSED),
            (4.0, [5.0], Outcome.TIMED_OUT),
        ]
    )
    m = measure([log], [Slo.parse("ttft_p50=2s"), Slo.parse("tpot_p50=1s")])
    assert (m.offered, m.completed, m.refused, m.timed_out, m.aborted) == (5, 3, 1, 1, 0)
    assert m.latency("ttft_s", "mean") == pytest.approx((1 + 2 + 8) / 3)
    assert m.latency("e2e_s", "p50") == 4.0
    # The one that timed out is slower than any other, however soon its first token came.
    assert m.latency("tpot_s", "p50") == 2.0
    assert m.latency("tpot_s", "p99") == m.latency("ttft_s", "p99") == math.inf
    assert m.as_json()["tpot_s"]["p99"] is None
    assert (m.as_json()["tpot_s"]["lost"], m.lost_ratio) == (1, 0.2)
    assert m.as_json()["tpot_s"]["n"] == 3
    assert m.as_json()["itl_s"]["n"] == 3
    # Ten seconds from the first due time to the last token; answers had six tokens.
    assert m.requests_per_s == pytest.approx(0.3)
    assert m.output_tokens_per_s == pytest.approx(0.6)
    assert m.goodput_per_s == pytest.approx(0.1)
    assert m.slo_attainment_ratio == pytest.approx(1 / 5)


def test_where_only_means_are_asked_for_there_are_means() -> None:
    log = a_log([(0.0, [1.0, 2.0, 4.0], DONE), (1.0, [4.0, 6.0], DONE)])
    asked = measure([log], statistics={key: {"mean"} for key in LATENCIES})
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert asked.latency(name, "mean") == measure([log]).latency(name, "mean") is not None


def test_a_rate_counts_from_the_first_due_time() -> None:
    early, late = (
        a_log([(at, [at + 1.0], DONE), (at + 1, [at + 2.0], DONE)]) for at in (0, 50)
    )
    assert measure([early]).requests_per_s == measure([late]).requests_per_s == 1.0


def test_windows_are_pooled_and_not_averaged() -> None:
    short = a_log([(0.0, [1.0], DONE)])
    long = a_log([(0.0, [3.0], DONE), (0.0, [3.0], DONE), (0.0, [9.0], DONE)])
    m = measure([short, long])
    assert m.offered == 4
    assert m.latency("e2e_s", "mean") == 4.0
    assert m.requests_per_s == pytest.approx(4 / 10)


def test_without_answers_there_are_no_latencies_and_they_are_not_zero() -> None:
    m = measure([a_log([(0.0, [], Outcome.REFUSED), (2.0, [], Outcome.REFUSED)])])
    assert all(m.latency(name, "p99") is None for name in LATENCIES)
    assert m.requests_per_s == 0.0
    assert m.prefix_cache_hit_ratio is None
    assert m.distorted_steps_ratio is None
    assert m.send_lag_p99_s is None
    assert Caveat.REQUESTS_REFUSED in m.caveats
    assert m.as_json()["e2e_s"]["p99"] is None
    assert m.as_json()["e2e_s"]["n"] == 0
    assert distribution(np.empty(0)) is None
    assert counted_distribution(pooled([])) is None


@given(st.lists(st.lists(st.floats(0.001, 3), min_size=1, max_size=40), min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_gaps_between_tokens_are_pooled_over_windows_and_exact_to_a_bin(
    windows: list[list[float]],
) -> None:
    logs, gaps = [], []
    for gaps_s in windows:
        token_s = np.cumsum([1.0, *gaps_s])
        gaps += np.diff(token_s).tolist()
        logs.append(a_log([(0.0, token_s.tolist(), DONE)]))
    itl_s = measure(logs).latencies["itl_s"]
    assert itl_s is not None
    assert itl_s.n == len(gaps)
    assert itl_s.mean.value == pytest.approx(float(np.mean(gaps)))
    assert not itl_s.mean.has_interval
    for name, q in QUANTILES.items():
        exact = quantile(gaps, q).value
        assert itl_s.value(name) == pytest.approx(exact, rel=6e-4)


def test_nothing_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        measure([])


def test_without_an_slo_there_is_no_goodput() -> None:
    m = measure([a_log([(0.0, [1.0], DONE)])])
    assert m.goodput_per_s is None
    assert m.slo_attainment_ratio is None


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 10)), min_size=1, max_size=30))
@settings(deadline=None)
def test_adding_a_slower_request_never_raises_goodput(
    requests: list[tuple[float, float]],
) -> None:
    slos = [Slo.parse("e2e_p50=5s")]
    lives = [(due_s, [due_s + e2e_s], DONE) for due_s, e2e_s in sorted(requests)]
    slower = [*lives, (lives[-1][0], [lives[-1][0] + 20.0], DONE)]
    before, after = measure([a_log(lives)], slos), measure([a_log(slower)], slos)
    assert before.slo_attainment_ratio is not None
    assert after.slo_attainment_ratio is not None
    assert after.slo_attainment_ratio <= before.slo_attainment_ratio
    assert (after.goodput_per_s or 0.0) <= (before.goodput_per_s or 0.0)


@given(st.integers(0, 5), st.sampled_from([0.25, 2.0, 4.0]))
@settings(deadline=None, max_examples=10)
def test_scaling_time_scales_latencies_and_nothing_else(seed: int, times: float) -> None:
    trace, costs = steady(60, per_s=8.0, seed=seed), ToyCosts()
    slowed = a_trace(
        trace.due_s * times, trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    )
    normal = measure([replay_toy(trace, LIMITS, ToySource(costs))])
    scaled = measure([replay_toy(slowed, LIMITS, ToySource(costs.scaled(times)))])
    for name in LATENCIES:
        for statistic in ("mean", "p50", "p99"):
            there, here = scaled.latency(name, statistic), normal.latency(name, statistic)
            assert there is not None
            assert here is not None
            is_binned = name in {"itl_s", "decode_step_s"} and statistic != "mean"
            assert there == pytest.approx(times * here, rel=6e-4 if is_binned else 1e-6)
    assert scaled.requests_per_s == pytest.approx(normal.requests_per_s / times)
    assert scaled.queue_depth == normal.queue_depth
    assert scaled.running == normal.running


@given(
    n=st.integers(1, 12),
    seed=st.integers(0, 100),
    cap=st.integers(1, 10),
)
@settings(deadline=None, max_examples=25)
def test_littles_law_holds_exactly_on_a_closed_loop(n: int, seed: int, cap: int) -> None:
    log = replay_toy(steady(80, 1.0, seed=seed), EngineLimits(cap, 64), plan=closed(n))
    m = measure([log])
    e2e_s = m.latency("e2e_s", "mean")
    assert e2e_s is not None
    in_flight = m.running.mean + m.queue_depth.mean
    assert in_flight == pytest.approx(m.requests_per_s * e2e_s)
    assert m.running.max == min(n, cap)
    assert m.running.max + m.queue_depth.max >= n


def test_littles_law_nearly_holds_on_an_open_loop_where_requests_come_between_steps() -> None:
    m = measure([replay_toy(steady(1500, 6.0), LIMITS)])
    e2e_s = m.latency("e2e_s", "mean")
    assert e2e_s is not None
    served = m.requests_per_s * e2e_s
    assert abs(m.running.mean + m.queue_depth.mean - served) / served < 0.05


def test_decode_steps_are_those_in_which_nothing_else_happened() -> None:
    costs = ToyCosts(base_s=0.01, per_seq_s=0.0, per_prefill_token_s=1.0)
    m = measure([replay_toy(a_trace([0.0, 30.0], output=4), LIMITS, ToySource(costs))])
    assert m.as_json()["decode_step_s"]["n"] == 6
    assert m.latency("decode_step_s", "p99") == pytest.approx(0.01)


def test_the_fullest_step_and_the_cap_are_seen() -> None:
    m = measure([replay_toy(a_trace([0.0] * 20, prompt=30), EngineLimits(4, 64))])
    assert m.max_step_tokens == 64
    assert m.running.max == 4
    # The first step holds two prompts and a part of a third.
    assert m.queue_depth.max == 20 - 3


def test_preemptions_and_blocks_are_counted() -> None:
    tight = ToySource(block_size=4, num_blocks=8)
    m = measure([replay_toy(a_trace([0.0] * 4, prompt=4, output=20), LIMITS, tight)])
    assert m.preemptions > 0
    assert Caveat.PREEMPTED in m.caveats
    assert 0.9 <= m.kv_usage.max <= 1.0
    roomy = measure([replay_toy(a_trace([0.0] * 4, prompt=4, output=20), LIMITS)])
    assert roomy.preemptions == 0
    assert Caveat.PREEMPTED not in roomy.caveats


def test_a_disturbed_machine_is_noticed_and_a_quiet_one_is_not() -> None:
    trace = steady(200, 3.0)
    quiet = measure([replay_toy(trace, LIMITS, ToySource(noise_ratio=0.02))])
    assert quiet.distorted_steps_ratio == 0.0
    assert Caveat.NOISY_MACHINE not in quiet.caveats
    noisy = measure([replay_toy(trace, LIMITS, ToySource(noise_ratio=0.4))])
    assert noisy.distorted_steps_ratio is not None
    # Lognormal: beyond 1.5 times the median lies 1 - Phi(ln 1.5 / 0.4) = 15.5 %.
    assert noisy.distorted_steps_ratio == pytest.approx(0.155, abs=0.03)
    assert Caveat.NOISY_MACHINE in noisy.caveats


@pytest.mark.parametrize(
    ("machine", "budget", "is_bound"),
    [
        ("gpu-8b-async", 200, True),  # the device takes 11 ms for a chunk, the host 15
        ("gpu-8b-async", 2048, False),  # the device takes 90 ms
        ("gpu-8b", 200, False),  # nothing is launched ahead
    ],
)
def test_it_is_said_where_the_host_is_slower_than_the_device(
    machine: str, budget: int, *, is_bound: bool
) -> None:
    limits = EngineLimits(8, budget)
    source = PlantedSource.of(MACHINES[machine], limits, 20_000, MOODS["calm"], 1)
    trace, plan = a_trace(np.linspace(0, 16, 40), prompt=3000, output=40), ReplayPlan()
    prompts = PromptSource(trace, VOCAB_SIZE)
    m = measure([replay(source.start({}, limits), trace, prompts, plan)])
    assert (m.host_bound_ratio > 0.4) is is_bound
    assert is_bound or m.host_bound_ratio < 0.05
    assert (Caveat.HOST_BOUND in m.caveats) is is_bound
    assert m.as_json()["host_bound_ratio"] == m.host_bound_ratio


def test_few_samples_are_said_and_enough_are_not() -> None:
    assert Caveat.FEW_SAMPLES in measure([replay_toy(steady(999, 4.0), LIMITS)]).caveats
    assert Caveat.FEW_SAMPLES not in measure([replay_toy(steady(1000, 4.0), LIMITS)]).caveats


def test_a_cut_replay_is_never_called_sustained() -> None:
    plan = ReplayPlan(cut=CutRule(max_clock_s=1.0))
    m = measure([replay_toy(steady(100, 3.0), LIMITS, plan=plan)])
    assert m.cut_reason is not None
    assert not m.is_sustained
    assert Caveat.CUT_SHORT in m.caveats
    assert Caveat.NOT_SUSTAINED not in m.caveats
    assert m.aborted == m.offered - m.completed > 0


def test_the_json_has_every_documented_key_and_only_numbers_that_json_knows() -> None:
    slos = [Slo.parse("ttft_p99=1s")]
    for logs in ([replay_toy(steady(50, 3.0), LIMITS)], [a_log([(0.0, [], Outcome.REFUSED)])]):
        said = measure(logs, slos).as_json()
        json.dumps(said, allow_nan=False)
        spreads = [said[name] for name in LATENCIES]
        assert all({"mean", "p50", "p90", "p95", "p99", "n"} <= set(s) for s in spreads)
        documented = (
            "offered completed refused timed_out aborted requests_per_s output_tokens_per_s "
            "queue_depth running gpu_cache_usage_perc preemptions prefix_cache_hit_ratio "
            "sustained caveats steps busy_s virtual_duration_s wall_s"
        )
        assert set(documented.split()) <= set(said)
        assert said["gpu_cache_usage_perc"] == said["kv_cache_usage_perc"]
        assert not any(isinstance(v, float) and math.isnan(v) for v in said.values())
