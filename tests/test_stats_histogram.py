"""What is counted into bins says what the samples themselves would have said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner import stats
from tuner.errors import TooFewSamplesError
from tuner.stats import BIN_RATIO, LogHistogram, WeightedSamples, pooled

# Rounding may put a sample that lies on an edge into the next bin.
ROUNDING = 1e-9
positive = st.floats(1e-9, 1e9)
# Many of a kind, some within one bin of each other, and zeros.
clustered = st.builds(
    lambda at, nudge: at * (1 + nudge * BIN_RATIO),
    st.sampled_from([0.01, 2.0]),
    st.floats(0, 3),
)
samples_of = st.lists(positive | clustered | st.just(0.0), min_size=1, max_size=200)
# With thousandths q * n is a whole number or farther from one than either rounding forgives.
usual = st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
fractions = usual | st.integers(1, 999).map(lambda k: k / 1000)


def counted(samples: list[float]) -> WeightedSamples:
    tally = LogHistogram()
    tally.add(np.array(samples))
    return tally.finish()


def within_a_bin(value: float) -> object:
    """Return what equals any number in a bin that holds the value."""
    return pytest.approx(value, rel=BIN_RATIO + ROUNDING, abs=0.0)


def same(a: WeightedSamples, b: WeightedSamples) -> None:
    """Check that two counts tell the same, up to rounding at the edges of bins."""
    assert a.total_weight == pytest.approx(b.total_weight, rel=1e-12)
    assert a.mean().value == pytest.approx(b.mean().value, rel=1e-12)
    for q in (0.01, 0.25, 0.5, 0.9, 0.99):
        assert a.value_at(q) == within_a_bin(b.value_at(q))


@given(samples_of, fractions)
@example([1.0, 1.0, 1.0004], 0.99)
@example([1.0, 2.0], 0.5)
@settings(deadline=None)
def test_a_quantile_lies_in_the_bin_of_the_nearest_rank(samples: list[float], q: float) -> None:
    oracle, found = stats.quantile(samples, q), counted(samples).quantiles({"": q})[""]
    assert found.value == within_a_bin(oracle.value)
    assert found.n == oracle.n
    assert found.has_interval == oracle.has_interval
    if oracle.low is not None and oracle.high is not None:
        assert found.low == within_a_bin(oracle.low)
        assert found.high == within_a_bin(oracle.high)


def test_samples_spread_over_a_bin_are_told_to_half_of_it() -> None:
    """Seed 0; 20 million per unit of value, so every bin is evenly filled."""
    samples = np.random.default_rng(0).uniform(1.0, 1.01, 200_000)
    tally = LogHistogram()
    tally.add(samples)
    found = tally.finish()
    for q in (0.05, 0.5, 0.95, 0.999):
        # A hundredth of a bin more: its mean is not exactly its middle.
        assert found.value_at(q) == pytest.approx(
            stats.quantile(samples, q).value, rel=0.51 * BIN_RATIO
        )


@given(samples_of, st.integers(2, 7))
@settings(deadline=None)
def test_quantiles_of_many_alike_have_the_interval_of_plain_samples(
    samples: list[float], times: int
) -> None:
    many = (samples * (1000 // len(samples) + 1)) * times
    oracle, found = stats.quantile(many, 0.95), counted(many).quantiles({"": 0.95})[""]
    assert found.low is not None
    assert found.high is not None
    assert found.low == within_a_bin(oracle.low or 0.0)
    assert found.high == within_a_bin(oracle.high or 0.0)


@given(samples_of)
@settings(deadline=None)
def test_the_mean_is_exact_and_has_no_interval(samples: list[float]) -> None:
    found = counted(samples).mean()
    assert found.value == pytest.approx(float(np.mean(samples)), rel=1e-12)
    assert not found.has_interval
    assert found.n == len(samples)


@given(st.lists(st.tuples(positive | st.just(0.0), st.integers(1, 9)), min_size=1, max_size=60))
@settings(deadline=None)
def test_a_weight_is_a_repetition(weighed: list[tuple[float, int]]) -> None:
    tally = LogHistogram()
    tally.add(np.array([v for v, _ in weighed]), np.array([float(w) for _, w in weighed]))
    same(tally.finish(), counted([v for v, w in weighed for _ in range(w)]))


@given(st.lists(samples_of, min_size=1, max_size=5), fractions)
@settings(deadline=None)
def test_parts_pooled_are_the_samples_counted_together(
    parts: list[list[float]], q: float
) -> None:
    everything = [value for part in parts for value in part]
    found = pooled([counted(part) for part in parts])
    same(found, counted(everything))
    assert found.value_at(q) == within_a_bin(stats.quantile(everything, q).value)
    piecemeal = LogHistogram()
    for part in parts:
        piecemeal.add(np.array(part))
    same(piecemeal.finish(), counted(everything))


@given(st.integers(1, 50), st.lists(positive, max_size=50))
@settings(deadline=None)
def test_zeros_are_kept_as_zeros(zeros: int, samples: list[float]) -> None:
    found = counted([*samples, *[0.0] * zeros])
    assert found.values[0] == 0.0
    assert found.weights[0] == zeros
    assert (found.values[1:] > 0).all()
    assert found.total_weight == zeros + len(samples)


def test_what_is_negative_counts_as_zero() -> None:
    found = counted([-1e-12, -5.0, 2.0])
    assert found.values.tolist() == [0.0, 2.0]
    assert found.weights.tolist() == [2.0, 1.0]


@given(samples_of, positive)
@settings(deadline=None)
def test_what_lies_above_a_bound_is_told_but_for_the_bin_of_the_bound(
    samples: list[float], bound: float
) -> None:
    edge = 1 + BIN_RATIO + ROUNDING
    above = counted(samples).above(bound)
    assert sum(x > bound * edge for x in samples) <= above
    assert above <= sum(x > bound / edge for x in samples)


def test_nothing_is_above_itself() -> None:
    assert counted([0.0, 0.0, 1.0]).above(0.0) == 1.0
    assert pooled([]).above(0.0) == 0.0


@given(samples_of)
@settings(deadline=None)
def test_values_ascend_and_every_one_has_weight(samples: list[float]) -> None:
    found = counted(samples)
    assert (np.diff(found.values) > 0).all()
    assert (found.weights > 0).all()


def test_its_size_does_not_grow_with_the_samples() -> None:
    """Seed 0; a decade holds 6,963 bins, whatever falls into it."""
    rng, tally = np.random.default_rng(0), LogHistogram()
    for _ in range(20):
        tally.add(rng.uniform(0.1, 1.0, 10_000))
    assert tally.finish().values.size <= 6963
    assert tally.finish().total_weight == 200_000


def test_without_samples_there_is_no_number() -> None:
    nothing = LogHistogram()
    nothing.add(np.empty(0))
    nothing.add(np.array([3.0]), np.array([0.0]))
    for empty in (nothing.finish(), pooled([]), pooled([nothing.finish()] * 2)):
        assert empty.total_weight == 0.0
        assert empty.values.size == 0
        with pytest.raises(TooFewSamplesError):
            empty.value_at(0.5)
        with pytest.raises(TooFewSamplesError):
            empty.quantiles({"p50": 0.5})
        with pytest.raises(TooFewSamplesError):
            empty.mean()
