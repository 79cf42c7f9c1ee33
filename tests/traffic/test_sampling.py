"""What is drawn agrees with the aggregates it is drawn from, and with nothing else."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tuner.replay.arrivals import ClosedArrivals
from tuner.traffic.concurrency import Concurrency
from tuner.traffic.sampling import (
    Histogram,
    arrivals_within,
    draw_by_group,
    requests_in_flight,
    shape_of,
    shuffled_rounds,
)

BOUNDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
LOWS = np.array([1.0, *(bound + 1.0 for bound in BOUNDS)])
HIGHS = np.array([*map(float, BOUNDS), np.inf])


def binned(lengths: NDArray[np.int64], total: float | None = None) -> Histogram:
    """Return the histogram that vLLM would keep of these lengths."""
    places = np.searchsorted(BOUNDS, lengths, side="left")
    counts = np.bincount(places, minlength=len(LOWS)).astype(np.float64)
    return Histogram(LOWS, HIGHS, counts, float(lengths.sum()) if total is None else total)


lengths_below_the_last_bound = st.lists(st.integers(1, 5000), min_size=1, max_size=60).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(lengths_below_the_last_bound, st.integers(1, 2000), st.integers(0, 5))
def test_draws_keep_each_ranges_share_and_the_mean(
    lengths: NDArray[np.int64], n: int, seed: int
) -> None:
    histogram = binned(lengths)
    shape = shape_of(histogram)
    assert shape.mean == pytest.approx(lengths.mean(), rel=0.04)
    drawn = shape.draw(n, np.random.default_rng(seed))
    shares = binned(drawn).counts / n
    assert np.abs(shares - histogram.counts / len(lengths)).max() <= 1 / n + 1e-9
    # Even draws miss the mean by at most a range of their values in n, and by rounding.
    assert abs(drawn.mean() - shape.mean) <= lengths.max() * 2.5 / n + 3 / np.sqrt(n)


def test_the_mean_is_met_wherever_it_lies_within_the_ranges() -> None:
    counts = np.array([0.0] * 9 + [100.0, 50.0, 0.0, 0.0])
    lowest, highest = 100 * 501 + 50 * 1001, 100 * 1000 + 50 * 2000
    for share in (0.1, 0.5, 0.9):
        total = lowest + share * (highest - lowest)
        shape = shape_of(Histogram(LOWS, HIGHS, counts, total))
        assert shape.mean * 150 == pytest.approx(total, rel=1e-6)
    unknown = shape_of(Histogram(LOWS, HIGHS, counts, float("nan")))
    assert lowest < unknown.mean * 150 < highest


def test_quantiles_of_a_known_distribution_come_back_from_its_histogram() -> None:
    rng = np.random.default_rng(7)
    true = np.clip(np.rint(rng.lognormal(5.5, 0.9, 20_000)), 1, 4999).astype(np.int64)
    drawn = shape_of(binned(true)).draw(20_000, rng)
    assert drawn.mean() == pytest.approx(true.mean(), rel=0.003)
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(drawn, q) == pytest.approx(np.quantile(true, q), rel=0.1)


def test_the_open_range_ends_at_the_next_bound_unless_the_sum_reaches_beyond() -> None:
    rng = np.random.default_rng(3)
    true = rng.integers(5001, 8193, 5000)
    drawn = shape_of(binned(true)).draw(5000, rng)
    assert drawn.min() > 5000
    assert drawn.max() <= 10_000
    assert drawn.mean() == pytest.approx(true.mean(), rel=0.002)
    far = np.full(100, 40_000)
    assert shape_of(binned(far)).draw(100, rng).mean() == pytest.approx(40_000, rel=0.01)


def test_a_histogram_without_values_has_no_shape() -> None:
    with pytest.raises(ValueError, match="without values"):
        shape_of(Histogram(LOWS, HIGHS, np.zeros(len(LOWS)), 0.0))


def test_the_seed_alone_decides_what_is_drawn() -> None:
    shapes = [shape_of(binned(np.array([30, 700, 700]))), shape_of(binned(np.array([4000])))]
    groups = np.array([0, 1, 0, 1, 0])
    first, again, other = (
        draw_by_group(shapes, groups, np.random.default_rng(seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert min(first[1], first[3]) > 2000 >= max(first[0], first[2], first[4])


def test_arrivals_keep_each_windows_count_and_are_a_poisson_process_within() -> None:
    starts_s = np.arange(0, 3000, 30).astype(np.float64)
    counts = np.full(100, 150)
    rng = np.random.default_rng(11)
    times_s, windows = arrivals_within(starts_s, starts_s + 30.0, counts, rng)
    assert np.histogram(times_s, [*starts_s, 3000.0])[0].tolist() == counts.tolist()
    assert (times_s // 30).astype(int).tolist() == windows.tolist()
    gaps_s = np.diff(np.sort(times_s))
    # The CV of 15,000 exponential gaps strays from 1 by 0.025 once in a thousand seeds.
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.025)


flows = st.lists(
    st.tuples(st.floats(0.5, 50), st.integers(0, 9)), min_size=2, max_size=12
).filter(lambda readings: any(level for _, level in readings[:-1]))


@pytest.mark.slow
@given(flows, st.floats(0.05, 5))
def test_as_many_requests_are_drawn_as_a_closed_loop_starts(
    readings: list[tuple[float, int]], life_s: float
) -> None:
    times_s = np.concatenate([[0.0], np.cumsum([lasting for lasting, _ in readings])[:-1]])
    flow = Concurrency(times_s, np.array([level for _, level in readings], dtype=np.int64))
    due_s, at = requests_in_flight(flow, np.full(len(times_s), life_s))
    assert np.all(np.diff(due_s) >= 0)
    assert np.all((times_s[at] <= due_s) & (flow.in_flight[at] > 0))
    last = int(np.flatnonzero(flow.in_flight[:-1])[-1]) + 1
    started = closed_loop(flow, life_s, float(times_s[last]))
    # A request that outlives a fall of the recording keeps one more from being due elsewhere.
    falls = int(np.maximum(-np.diff(flow.in_flight), 0).sum())
    assert -flow.in_flight[-1] - 1 <= started - len(due_s) <= falls + flow.in_flight.max()


def closed_loop(flow: Concurrency, life_s: float, end_s: float) -> int:
    """Return how many requests that live as long start before an instant."""
    arrivals = ClosedArrivals(flow.times_s.tolist(), flow.in_flight.tolist(), 1_000_000)
    ends: list[float] = []
    now_s, started = 0.0, 0
    while now_s < end_s:
        due_s = arrivals.next_due_s(now_s, len(ends))
        if due_s is not None and (not ends or due_s < ends[0]):
            now_s = max(now_s, due_s)
            if now_s < end_s:
                heapq.heappush(ends, now_s + life_s)
                arrivals.pop(now_s)
                started += 1
        elif ends:
            now_s = heapq.heappop(ends)
        else:
            break
    return started


def test_rows_are_taken_equally_often() -> None:
    rows = shuffled_rounds(5, 13, np.random.default_rng(2))
    assert sorted(np.bincount(rows).tolist()) == [2, 2, 3, 3, 3]
