"""A summary of steps says what all the steps would have said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import stats
from tuner.engine.protocol import Batch, Step
from tuner.engine.steps import LEVELS, StepColumns, StepLog, StepSummary
from tuner.stats import BIN_RATIO, WeightedSamples

QUANTILES = (0.01, 0.25, 0.5, 0.9, 0.99)


def decode(seqs: int, duration_s: float, *, waiting: int = 0, usage: float = 0.5) -> Step:
    batch = Batch(seqs, 0, 0, 100 * seqs, 0, 0, 0, 12.5 * seqs)
    return Step(duration_s, [], batch, seqs, waiting, usage)


def prefill(tokens: int, duration_s: float, cached: int = 0, preempted: int = 0) -> Step:
    batch = Batch(1, tokens, 1, 50, tokens * (tokens + 1) // 2, preempted, cached)
    return Step(duration_s, [], batch, 2, 3, 0.25)


def logged(
    steps: list[Step], *, keep: bool = False, predicted: bool = False
) -> tuple[StepSummary, StepColumns | None]:
    log, end_s = StepLog(keep=keep, predicted=predicted), 0.0
    for step in steps:
        end_s += step.duration_s
        log.append(step, end_s)
    return log.finish()


def summary(steps: list[Step]) -> StepSummary:
    return logged(steps)[0]


def same_counts(a: WeightedSamples, b: WeightedSamples) -> None:
    assert a.total_weight == pytest.approx(b.total_weight)
    if b.total_weight == 0:
        return
    assert a.mean().value == pytest.approx(b.mean().value)
    for q in QUANTILES:
        # Rounding may put a duration that lies on an edge into the next bin.
        assert a.value_at(q) == pytest.approx(b.value_at(q), rel=BIN_RATIO + 1e-9)


decodes = st.builds(
    decode,
    st.integers(1, 6),
    st.floats(1e-3, 1.0),
    waiting=st.integers(0, 9),
    usage=st.floats(0, 1),
)
prefills = st.builds(
    prefill, st.integers(1, 500), st.floats(1e-3, 1.0), st.integers(0, 64), st.integers(0, 2)
)


def test_known_steps_give_known_numbers() -> None:
    said = summary(
        [
            prefill(100, 2.0, cached=16, preempted=1),
            *[decode(4, 1.0, waiting=2, usage=0.75)] * 3,
            decode(5, 0.5),
            Step(0.5, [], None, 0, 1, 0.0),
        ]
    )
    assert (said.steps, said.prefill_tokens, said.cached_tokens) == (6, 100, 16)
    assert (said.preempted, said.max_step_tokens) == (1, 101)
    assert said.duration_s == 6.0
    assert said.decode_steps.values.tolist() == [0.5, 1.0]
    assert said.decode_steps.weights.tolist() == [1.0, 3.0]
    assert {n: w.total_weight for n, w in said.by_batch.items()} == {4: 3.0, 5: 1.0}
    assert dict(said.peaks) == {"running": 5, "waiting": 3, "kv_usage_ratio": 0.75}
    assert said.levels["running"].values.tolist() == pytest.approx([0, 2, 4, 5])
    assert said.levels["running"].weights.tolist() == pytest.approx([0.5, 2.0, 3.0, 0.5])
    assert said.levels["waiting"].mean().value == pytest.approx((2 * 3 + 3 * 2 + 0.5) / 6)


def test_more_steps_than_are_kept_at_once_are_summed_up_all_the_same() -> None:
    """Seed 0; 40,000 steps are three foldings, of which the last is not full."""
    rng, n = np.random.default_rng(0), 40_000
    seqs, waiting = rng.integers(1, 5, n), rng.integers(0, 50, n)
    duration_s, usage = rng.lognormal(-4, 0.5, n), rng.uniform(0, 0.9, n)
    usage[0], waiting[0] = 0.95, 77
    said, rows = logged(
        [
            decode(int(s), float(d), waiting=int(w), usage=float(u))
            for s, d, w, u in zip(seqs, duration_s, waiting, usage, strict=True)
        ],
        keep=True,
    )
    assert said.steps == said.decode_steps.total_weight == n
    assert said.duration_s == pytest.approx(duration_s.sum())
    assert said.max_step_tokens == 4
    assert said.peaks["waiting"] == 77
    assert said.peaks["kv_usage_ratio"] == 0.95
    oracles = {"running": seqs, "waiting": waiting, "kv_usage_ratio": usage}
    for name, values in oracles.items():
        mean = said.levels[name].mean().value
        assert mean == pytest.approx(np.average(values, weights=duration_s))
    for q in QUANTILES:
        exact = stats.quantile(duration_s, q).value
        assert said.decode_steps.value_at(q) == pytest.approx(exact, rel=BIN_RATIO + 1e-9)
        for cap in range(1, 5):
            like = stats.quantile(duration_s[seqs == cap], q).value
            assert said.by_batch[cap].value_at(q) == pytest.approx(like, rel=BIN_RATIO + 1e-9)
    assert rows is not None
    assert rows.duration_s.tolist() == duration_s.tolist()
    assert rows.waiting.tolist() == waiting.tolist()
    assert rows.end_s.tolist() == pytest.approx(np.cumsum(duration_s).tolist())


@given(st.lists(decodes | prefills, max_size=20))
@settings(deadline=None, max_examples=50)
def test_kept_columns_hold_every_row_as_it_was(steps: list[Step]) -> None:
    said, rows = logged(steps, keep=True)
    assert rows is not None
    assert len(rows) == len(steps)
    batches = [step.batch for step in steps if step.batch]
    assert rows.repeats.tolist() == [1] * len(steps)
    assert rows.duration_s.tolist() == [step.duration_s for step in steps]
    assert rows.end_s.tolist() == pytest.approx(np.cumsum(rows.duration_s).tolist())
    for name in (
        "decode_seqs",
        "prefill_tokens",
        "decode_context_tokens",
        "prefill_context_tokens",
        "decode_spread_tokens",
        "preempted",
        "cached_tokens",
    ):
        assert getattr(rows, name).tolist() == [getattr(batch, name) for batch in batches]
    for name in LEVELS:
        assert getattr(rows, name).tolist() == [getattr(step, name) for step in steps]
    assert rows.kv_peak_ratio.tolist() == rows.kv_usage_ratio.tolist()
    assert rows.is_decode_only.tolist() == [batch.is_decode_only for batch in batches]
    assert said.steps == rows.repeats.sum()


def test_steps_are_kept_only_where_asked_for() -> None:
    assert logged([decode(1, 0.1)])[1] is None
    assert logged([decode(1, 0.1)], keep=True)[1] is not None


def test_without_steps_there_is_nothing_and_no_share() -> None:
    said, rows = logged([], keep=True)
    assert said.steps == said.duration_s == said.decode_steps.total_weight == 0
    assert said.distorted() == (0, 0)
    assert set(said.peaks.values()) == {0.0}
    assert rows is not None
    assert len(rows) == 0


def test_a_stretched_step_is_one_that_took_half_as_long_again_as_its_like() -> None:
    like = [decode(4, 0.010)] * 15 + [decode(4, 0.014)] * 3 + [decode(4, 0.016)] * 2
    other = [decode(8, 0.020)] * 20
    assert summary(like).distorted() == (2, 20)
    # Twice as many sequences take longer, which is no disturbance.
    assert summary(like + other).distorted() == (2, 40)
    # A prefill among them is not compared.
    assert summary([*like, prefill(500, 9.0)]).distorted() == (2, 20)


def test_too_few_like_steps_are_not_compared() -> None:
    assert summary([decode(4, 0.01)] * 6 + [decode(4, 0.1)]).distorted() == (0, 0)
    assert summary([decode(4, 0.01)] * 7 + [decode(4, 0.1)]).distorted() == (1, 8)


def test_predicted_steps_are_never_called_disturbed() -> None:
    steps = [decode(4, 0.010)] * 15 + [decode(4, 0.1)] * 5
    said, _ = logged(steps, predicted=True)
    assert said.distorted() == (0, 0)
    same_counts(said.decode_steps, summary(steps).decode_steps)
