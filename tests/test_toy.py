"""The toy does what it says, before anything else is measured with it."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine_contract import answered, drain
from support.toy import CURRENT, ToyCosts, ToySource
from support.traffic import a_trace, kept, replay_toy
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome
from tuner.traffic.prompts import TokenPrompt

LIMITS = EngineLimits(4, 32)


def test_one_request_takes_what_the_formula_says() -> None:
    costs = ToyCosts(base_s=0.01, per_seq_s=0.002, per_prefill_token_s=0.0001)
    trace, plan = a_trace([3.0], prompt=70, output=5), ReplayPlan(keep_steps=True)
    log = replay_toy(trace, LIMITS, ToySource(costs), plan)
    line = log.timelines
    # Chunks of 32, 32 and 6 tokens, then four decodes.
    prefill_s, decode_s = 3 * 0.01 + 70 * 0.0001, 0.01 + 0.002
    assert line.ttft_s.tolist() == pytest.approx([prefill_s])
    assert line.tpot_s.tolist() == pytest.approx([decode_s])
    assert line.e2e_s.tolist() == pytest.approx([prefill_s + 4 * decode_s])
    assert kept(log).prefill_tokens.tolist() == [32, 32, 6, 0, 0, 0, 0]


def test_a_cap_of_one_is_a_single_server_queue() -> None:
    costs = ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0)
    log = replay_toy(a_trace([0.0, 0.05, 2.0], output=4), EngineLimits(1, 32), ToySource(costs))
    assert log.timelines.last_s.tolist() == pytest.approx([0.4, 0.8, 2.4])


def test_requests_that_fit_share_every_step() -> None:
    costs = ToyCosts(base_s=0.1, per_seq_s=0.01, per_prefill_token_s=0.0)
    log = replay_toy(a_trace([0.0] * 4, prompt=2, output=3), LIMITS, ToySource(costs))
    assert log.timelines.last_s.tolist() == pytest.approx([0.1 + 2 * 0.14] * 4)


def test_crowds_and_floods_cost_beyond_their_knees_only() -> None:
    costs = ToyCosts(1.0, 0.0, 0.0, knee=4, crowd_s=0.5, flood_tokens=100, flood_s=0.25)
    assert costs.seconds(4, 100) == 1.0
    assert costs.seconds(6, 100) == 1.0 + 0.5 * 4
    assert costs.seconds(4, 102) == 1.0 + 0.25 * 2
    assert costs.scaled(2).seconds(6, 102) == 2 * costs.seconds(6, 102)


def test_too_few_blocks_preempt_the_youngest_and_all_still_finish() -> None:
    source = ToySource(block_size=4, num_blocks=6)
    log = replay_toy(a_trace([0.0] * 3, prompt=4, output=12), LIMITS, source)
    assert log.steps.preempted > 0
    assert log.steps.peaks["kv_usage_ratio"] <= 1.0
    line = log.timelines
    assert line.output_tokens.tolist() == [12, 12, 12]
    assert line.last_s.tolist() == sorted(line.last_s.tolist())


def test_a_request_larger_than_all_blocks_is_an_error_and_no_endless_loop() -> None:
    source = ToySource(block_size=4, num_blocks=3)
    with pytest.raises(EngineError, match="larger than all"):
        replay_toy(a_trace([0.0], prompt=8, output=9), LIMITS, source)


def test_noise_repeats_with_its_seed_and_not_with_another() -> None:
    trace = a_trace([0.0, 0.1, 0.2], output=30)
    first, again, other = (
        replay_toy(trace, LIMITS, ToySource(noise_ratio=0.1, seed=seed)).clock_s
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_it_runs_out_of_memory_where_it_was_told_to() -> None:
    source = ToySource(no_memory_above=2)
    assert replay_toy(a_trace([0.0]), EngineLimits(2, 32), source).cut_reason is None
    with pytest.raises(EngineError, match="no memory for 4"):
        replay_toy(a_trace([0.0]), LIMITS, source)


def test_the_source_travels_between_processes() -> None:
    source = ToySource(ToyCosts(knee=3), noise_ratio=0.1)
    assert pickle.loads(pickle.dumps(source)) == source  # noqa: S301 - our own bytes
    assert source.facts({}).current_limits == CURRENT


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12
    ),
    cap=st.integers(1, 6),
    budget=st.integers(6, 40),
    num_blocks=st.sampled_from([18, 30, 1000]),
)
@settings(deadline=None, max_examples=60)
def test_whatever_the_limits_each_request_gets_its_tokens_in_its_place(
    requests: list[tuple[int, int]], cap: int, budget: int, num_blocks: int
) -> None:
    source = ToySource(block_size=4, num_blocks=num_blocks)
    engine = source.start({}, EngineLimits(cap, budget))
    for row, (prompt, output) in enumerate(requests):
        engine.add(row, TokenPrompt([row] * prompt), output)
    steps = drain(engine)
    assert answered(steps) == {row: output for row, (_, output) in enumerate(requests)}
    for step in steps:
        assert step.batch is not None
        assert 0 < step.batch.tokens <= budget
        assert step.running <= cap
        assert 0 <= step.kv_usage_ratio <= 1
    if not any(step.batch and step.batch.preempted for step in steps):
        prefilled = sum(step.batch.prefill_tokens for step in steps if step.batch)
        assert prefilled == sum(prompt for prompt, _ in requests)
    trace = a_trace([0.0] * len(requests), *map(list, zip(*requests, strict=True)))
    log = replay_toy(trace, EngineLimits(cap, budget), source)
    assert log.timelines.count(Outcome.COMPLETED) == len(requests)
