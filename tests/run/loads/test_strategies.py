"""Static batches and their rivals: what each strategy does to the same requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.toy import ToyCosts, ToySource
from support.traffic import a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.arrivals import StaticBatches
from tuner.replay.plan import ReplayPlan
from tuner.run.loads.strategies import strategies, uniform
from tuner.traffic.traces import LoadModel

ROOM = EngineLimits(64, 4096)
# Steps of a tenth of a second whatever is in them.
EVEN = ToySource(ToyCosts(base_s=0.1, per_seq_s=0.0, per_prefill_token_s=0.0))


def in_batches(size: int, wait_s: float) -> ReplayPlan:
    return ReplayPlan(batches=StaticBatches(size, wait_s))


def test_a_batch_goes_when_it_is_full_and_waits_for_its_slowest_answer() -> None:
    trace = a_trace([0, 1, 1.5, 1.6], output=[2, 10, 2, 2])
    line = replay_toy(trace, ROOM, EVEN, in_batches(2, 60.0)).timelines
    # The second request fills the batch at 1 s; its ten tokens end at 2 s.
    assert line.sent_s.tolist() == pytest.approx([1, 1, 2, 2])
    assert line.due_s.tolist() == [0, 1, 1.5, 1.6]  # waiting for the batch is latency
    assert line.ttft_s[0] == pytest.approx(1.1)


def test_a_batch_that_does_not_fill_goes_after_the_wait() -> None:
    trace = a_trace([0, 5], output=2)
    line = replay_toy(trace, ROOM, EVEN, in_batches(8, 0.5)).timelines
    assert line.sent_s.tolist() == pytest.approx([0.5, 5.5])


@pytest.mark.slow
@given(st.integers(1, 9), st.floats(0, 2), st.integers(0, 3))
def test_static_batches_lose_no_request_and_never_exceed_their_size(
    size: int, wait_s: float, seed: int
) -> None:
    trace = steady(60, 8.0, seed=seed)
    line = replay_toy(trace, ROOM, EVEN, in_batches(size, wait_s)).timelines
    assert len(line.e2e_s) == 60
    starts, counts = np.unique(line.sent_s, return_counts=True)
    assert counts.max() <= size
    ends = [line.last_s[line.sent_s == start].max() for start in starts]
    assert all(a <= b + 1e-9 for a, b in zip(ends, starts[1:], strict=False))


def test_a_closed_loop_has_no_arrivals_to_gather() -> None:
    with pytest.raises(UsageError, match="static batches"):
        ReplayPlan(load_model=LoadModel.CLOSED, batches=StaticBatches(4, 1.0))


def test_continuous_batching_beats_its_rivals_on_uneven_lengths() -> None:
    trace = steady(300, 6.0, output=60)
    asked = strategies(ROOM, EngineLimits(48, 4096), [StaticBatches(8, 0.5)])
    median = []
    for strategy in asked:
        log = replay_toy(trace, strategy.limits, EVEN, strategy.plan(ReplayPlan()))
        median.append(float(np.median(log.timelines.e2e_s)))
    alone, static, default, tuned = median
    assert alone > static > default
    assert tuned <= default * 1.01


def test_uniform_lengths_keep_the_work_and_lose_the_tail() -> None:
    trace = steady(500, 5.0)
    flat = uniform(trace)
    assert flat.due_s.tolist() == trace.due_s.tolist()
    assert set(flat.output_tokens.tolist()) == {round(float(trace.output_tokens.mean()))}
