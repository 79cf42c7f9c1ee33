"""Statistics keep what their intervals promise; where there is chance, its rate is stated."""

from __future__ import annotations

import math
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import stdtrit
from scipy.stats import binom
from threadpoolctl import threadpool_info

from tuner.errors import TooFewSamplesError
from tuner.stats import (
    CONFIDENCE,
    Floats,
    carries_quantile,
    difference,
    lowest,
    mean,
    one_thread,
    order_interval,
    quantile,
    resampled,
    student_quantile,
)

values = st.floats(-1e6, 1e6, allow_nan=False)
fractions = st.floats(0.01, 0.99)


@given(st.lists(values, min_size=1, max_size=300), fractions)
def test_a_quantile_is_the_least_sample_that_covers_its_share(
    samples: list[float], q: float
) -> None:
    found = quantile(samples, q)
    assert found.value in samples
    covered = sum(x <= found.value for x in samples)
    assert covered >= q * len(samples) - 1e-6
    below = sum(x < found.value for x in samples)
    assert below < q * len(samples) + 1e-6
    assert found.n == len(samples)


@given(st.lists(values, min_size=1, max_size=60), fractions, st.randoms())
def test_the_order_of_requests_does_not_matter(
    samples: list[float],
    q: float,
    random: Random,
) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)
    assert quantile(shuffled, q) == quantile(samples, q)


@given(st.lists(values, min_size=20, max_size=400), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_an_interval_encloses_its_value_and_stands_only_where_the_tail_is_carried(
    samples: list[float], q: float
) -> None:
    found = quantile(samples, q)
    if found.low is not None and found.high is not None:
        assert found.low <= found.value <= found.high
        assert {found.low, found.high} <= set(samples)
    assert not found.has_interval or carries_quantile(len(samples), q)


@pytest.mark.parametrize(
    ("q", "least"), [(0.5, 20), (0.9, 100), (0.95, 200), (0.99, 1000), (0.999, 10_000)]
)
def test_ten_samples_must_lie_beyond_a_tail(q: float, least: int) -> None:
    assert carries_quantile(least, q)
    assert not carries_quantile(least - 1, q)
    ramp = np.arange(least, dtype=np.float64)
    assert quantile(ramp, q).has_interval
    assert not quantile(ramp[1:], q).has_interval


@pytest.mark.parametrize(("n", "q"), [(40, 0.5), (300, 0.95), (1200, 0.99)])
def test_a_quantiles_interval_covers_the_truth_as_often_as_it_says(n: int, q: float) -> None:
    """Seed 0, 2,000 samples: below 0.938 with probability 0.008 if coverage were just 0.95."""
    rng = np.random.default_rng(0)
    truth, hits = -math.log(1 - q), 0
    for _ in range(2000):
        found = quantile(rng.exponential(size=n), q)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= truth <= found.high
    assert hits / 2000 >= CONFIDENCE - 0.012


def test_a_means_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Seed 0, 1,000 means of 400 exponentials; skew costs batch means about a percent."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        found = mean(rng.exponential(size=400))
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.925 <= hits / 1000 <= 0.975


def test_a_mean_of_few_has_no_interval_and_a_mean_of_none_is_refused() -> None:
    assert mean([1.0, 2.0, 6.0]).value == 3.0
    assert not mean(np.ones(39)).has_interval
    assert mean(np.ones(40)).has_interval
    with pytest.raises(TooFewSamplesError):
        mean([])


def test_batch_means_are_wider_where_neighbours_share_a_queue() -> None:
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(size=2000))
    shuffled = rng.permutation(walk)
    queued, free = mean(walk), mean(shuffled)
    assert queued.value == pytest.approx(free.value)
    assert queued.high is not None
    assert free.high is not None
    assert queued.high - queued.value > 5 * (free.high - free.value)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 99.0, math.nan])
def test_a_quantile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile([1.0], q)


def test_no_samples_is_an_error_and_never_a_zero() -> None:
    with pytest.raises(TooFewSamplesError):
        quantile([], 0.5)


@given(st.floats(0.1, 1e7), st.floats(0.001, 0.999))
def test_students_quantile_is_scipys(df: float, p: float) -> None:
    """To ten digits up to 1,000 degrees of freedom, then to a hundred-thousandth."""
    rel = 1e-9 if df <= 1000 else 1e-5
    assert student_quantile(df, p) == pytest.approx(float(stdtrit(df, p)), rel=rel, abs=1e-9)


def test_without_a_degree_of_freedom_there_is_no_quantile() -> None:
    assert math.isnan(student_quantile(math.nan, 0.95))
    assert math.isnan(student_quantile(0.0, 0.95))
    assert student_quantile(math.inf, 0.975) == pytest.approx(1.959963985)


@given(st.integers(1, 10**8) | st.integers(1, 400), st.floats(0.001, 0.999))
def test_the_ends_of_a_quantiles_interval_are_those_of_scipys_binomial(
    n: int, q: float
) -> None:
    """Exact, but where the probability of an end is 2.5 % to ten digits."""
    tail = (1 - CONFIDENCE) / 2
    low, last = order_interval(n, q)
    high = last - 1
    for end, p in ((low, tail), (high, 1 - tail)):
        below, upto = binom.cdf([end - 1, end], n, q)
        assert upto >= p - 1e-10
        assert below < p + 1e-10


def test_linear_algebra_is_kept_on_one_thread_and_given_back() -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = threads()
    assert before
    with one_thread():
        assert set(threads()) == {1}
    assert threads() == before


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_a_function_is_lowest_where_scipys_simplex_finds_it(seed: int, n: int) -> None:
    """Move for move, so to 1e-9, on bowls that are rippled."""
    rng = np.random.default_rng(seed)
    slopes, centre = rng.normal(size=(n, n)), rng.normal(size=n)

    def bowl(x: Floats) -> float:
        off = slopes @ (x - centre)
        return float(off @ off + 0.1 * (x - centre) @ (x - centre) + 0.3 * np.sin(3 * x).sum())

    corners = np.vstack([np.zeros(n), 0.7 * np.eye(n)])
    options = {"initial_simplex": corners, "xatol": 1e-3, "fatol": 1e-3, "maxfev": 5000}
    wanted = minimize(bowl, corners[0], method="Nelder-Mead", options=options)
    assert wanted.success
    found = lowest(bowl, corners, x_apart=1e-3, y_apart=1e-3, most=5000)
    np.testing.assert_allclose(found, wanted.x, rtol=0, atol=1e-9)


def test_a_function_is_not_called_for_ever() -> None:
    calls = []

    def falls(x: Floats) -> float:
        calls.append(x)
        return float(x.sum())

    lowest(falls, np.vstack([np.zeros(2), np.eye(2)]), x_apart=1e-3, y_apart=1e-3, most=50)
    assert 50 <= len(calls) <= 52


def means_apart(blocks: int, alike_for: float, pairs: int) -> int:
    """Return in how many pairs of one kind the means differ beyond a 99.5 % interval.

    What is a block apart is alike by exp(-1 / alike_for), as where sessions last so long.
    """
    share, apart = math.exp(-1 / alike_for), 0
    for seed in range(pairs):
        rng = np.random.default_rng(seed)
        drawn = rng.standard_normal((2, blocks)) * math.sqrt(1 - share**2)
        drawn[:, 0] = rng.standard_normal(2)
        for block in range(1, blocks):
            drawn[:, block] += share * drawn[:, block - 1]

        def mean_of(weights: Floats, row: Floats) -> Floats:
            totals: Floats = weights @ row / weights.sum(axis=1)
            return totals

        old, new = (resampled(partial(mean_of, row=row), blocks, rng) for row in drawn)
        _, low, high = difference(new, old, 0.995)
        apart += low > 0 or high < 0
    return apart


@pytest.mark.parametrize(("blocks", "alike_for"), [(75, 0.1), (75, 8.0), (120, 8.0)])
def test_what_is_alike_for_a_while_is_not_taken_for_a_shift(
    blocks: int, alike_for: float
) -> None:
    # At a true rate of 1 % more than 6 of 150 are in one of a thousand sets of seeds.
    assert means_apart(blocks, alike_for, 150) <= 6
