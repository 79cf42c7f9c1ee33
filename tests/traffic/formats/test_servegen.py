"""Whether what is drawn from ServeGen's aggregates has their rates, gaps and lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.servegen_parts import (
    GAMMA,
    LANGUAGE,
    ONE,
    client,
    counts_within,
    drawn,
    message,
    traced,
)
from tuner.traffic.formats.columns import ReadOptions
from tuner.traffic.formats.servegen_draw import (
    Gaps,
    LengthHistogram,
    Lengths,
    RateWindow,
    busiest_stretch,
    draw,
)
from tuner.traffic.traces import ClockOrigin, ZeroOutput


def test_the_same_seed_draws_the_same_rows_and_another_one_others(tmp_path: Path) -> None:
    path = client(tmp_path, "0,2,1,Gamma,1,0.5\n600,3,2,Weibull,0.6,0.2\n1200,1,1,,0,0\n")
    first, again, other = drawn(path, seed=4), drawn(path, seed=4), drawn(path, seed=-5)
    assert first.arrived.tolist() == again.arrived.tolist()
    assert first.prompt_tokens.tolist() == again.prompt_tokens.tolist()
    assert first.output_tokens.tolist() == again.output_tokens.tolist()
    assert first.arrived.tolist() != other.arrived.tolist()
    assert first.origin is ClockOrigin.SHARED
    assert first.sampled_from == "ServeGen aggregates"
    assert first.remarks == ("arrivals and lengths were drawn with seed 4",)
    twin = drawn(client(tmp_path, path.read_text(), n=8), seed=4)
    assert twin.arrived.tolist() != first.arrived.tolist()


def test_a_window_is_drawn_without_regard_to_the_others(tmp_path: Path) -> None:
    rows = ["0,2,1,Gamma,1,0.5", "600,3,2,Weibull,0.6,0.2", "1200,1,1,,0,0"]
    before = drawn(client(tmp_path, "\n".join(rows)))
    rows[0] = "0,9,3,Weibull,0.4,0.1"
    rows[2] = "1200,0,0,,0,0"
    after = drawn(client(tmp_path, "\n".join(rows)))
    middles = []
    for columns in (before, after):
        is_in = (columns.arrived >= 600) & (columns.arrived < 1200)
        lengths = (columns.prompt_tokens[is_in], columns.output_tokens[is_in])
        middles.append([columns.arrived[is_in].tolist(), *(each.tolist() for each in lengths)])
    assert len(middles[0][0]) == 1800
    assert middles[0] == middles[1]


@given(
    st.sampled_from(Gaps),
    st.floats(0.0, 50.0),
    st.floats(0.05, 50.0),
    st.floats(1e-6, 1e4),
    st.integers(0, 100),
)
def test_every_window_holds_as_many_requests_as_its_rate_says(
    gaps: Gaps, rate_per_s: float, shape: float, scale_s: float, seed: int
) -> None:
    window = RateWindow(300.0, 600.0, rate_per_s, gaps, shape, scale_s)
    found = draw(window, Lengths(ONE, ONE), np.random.default_rng(seed))
    n = len(found.arrived_s)
    assert n in (int(window.expected), int(window.expected) + 1)
    assert np.all(np.diff(found.arrived_s) >= 0)
    assert counts_within(found.arrived_s, window.start_s, window.end_s) == n
    assert len(found.prompt_tokens) == len(found.output_tokens) == n


def test_gaps_too_small_for_a_double_still_give_arrivals_in_the_window() -> None:
    window = RateWindow(0.0, 10.0, 0.3, Gaps.GAMMA, shape=1e-5, scale_s=1e5)
    found = draw(window, Lengths(ONE, ONE), np.random.default_rng(0))
    assert counts_within(found.arrived_s, 0.0, 10.0) == 3


def test_equal_windows_are_drawn_apart_and_a_hole_between_them_is_idle(tmp_path: Path) -> None:
    rows = "".join(f"{start},1,1,Gamma,1,1\n" for start in (0, 600, 1200, 3000))
    found = drawn(client(tmp_path, rows))
    first, second = (found.arrived[start : start + 600] for start in (0, 600))
    assert not np.allclose(first, second - 600, atol=1)
    assert len(found.arrived) == 2400
    assert counts_within(found.arrived, 1800, 3000) == 0


def test_a_fraction_of_a_request_is_drawn_as_often_as_it_is_due() -> None:
    window = RateWindow(0.0, 10.0, 0.03)
    rng = np.random.default_rng(0)
    found = sum(len(draw(window, Lengths(ONE, ONE), rng).arrived_s) for _ in range(2000))
    # Four standard deviations of 2,000 draws of 0.3: seeded, so it fails once or never.
    assert abs(found - 600) < 4 * np.sqrt(2000 * 0.3 * 0.7)


@pytest.mark.parametrize(
    ("gaps", "shape", "scale_s", "cv"),
    [
        (Gaps.POISSON, 0.0, 0.0, 1.0),
        (Gaps.GAMMA, 4.0, 0.01, 0.5),
        (Gaps.GAMMA, 0.25, 0.16, 2.0),
        (Gaps.WEIBULL, 2.0, 0.04514, 0.5227),
        (Gaps.WEIBULL, 0.7, 0.0316, 1.462),
    ],
)
def test_gaps_have_the_spread_of_their_distribution(
    gaps: Gaps, shape: float, scale_s: float, cv: float
) -> None:
    window = RateWindow(0.0, 600.0, 25.0, gaps, shape, scale_s)
    found = draw(window, Lengths(ONE, ONE), np.random.default_rng(1))
    between_s = np.diff(found.arrived_s)
    assert len(found.arrived_s) == 15_000
    assert between_s.mean() == pytest.approx(0.04, rel=0.02)
    assert between_s.std() / between_s.mean() == pytest.approx(cv, rel=0.06)


def test_gaps_shorter_than_the_rate_allows_fill_a_part_of_the_window() -> None:
    window = RateWindow(0.0, 600.0, 0.5, Gaps.GAMMA, shape=2.0, scale_s=0.05)
    starts_s = []
    for seed in range(200):
        arrived_s = draw(window, Lengths(ONE, ONE), np.random.default_rng(seed)).arrived_s
        assert len(arrived_s) == 300
        assert arrived_s[-1] - arrived_s[0] == pytest.approx(30.0, rel=0.05)
        starts_s.append(arrived_s[0])
    # Anywhere in the window: the mean of 200 uniform starts is 285 within four of its errors.
    assert np.mean(starts_s) == pytest.approx(285.0, abs=4 * 570 / np.sqrt(12 * 200))


def test_gaps_longer_than_the_rate_allows_are_cut_to_the_window() -> None:
    window = RateWindow(0.0, 600.0, 50.0, Gaps.WEIBULL, shape=0.5, scale_s=10.0)
    arrived_s = draw(window, Lengths(ONE, ONE), np.random.default_rng(0)).arrived_s
    assert len(arrived_s) == 30_000
    assert arrived_s[-1] - arrived_s[0] > 590


# --- lengths --------------------------------------------------------------------------


def test_lengths_come_from_the_last_histogram_at_or_before_a_window(tmp_path: Path) -> None:
    rates = "\n".join(f"{start},2,1,,0,0" for start in (0, 600, 1200))
    dataset = {
        "600": {"input_tokens": "{9: 1.0}", "output_tokens": "{4: 1.0}"},
        "0": {**LANGUAGE, "reason_ratio": "{0.0: 1.0}"},
        "1200": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    found = drawn(client(tmp_path, rates, dataset))
    early = found.arrived < 600
    assert set(found.prompt_tokens[early].tolist()) == {5, 8}
    assert set(found.prompt_tokens[~early].tolist()) == {9}
    assert set(found.output_tokens[~early].tolist()) == {4}
    assert "1 windows have no lengths of their own and take those before them" in found.remarks


def test_lengths_follow_their_histograms_and_not_each_other(tmp_path: Path) -> None:
    found = drawn(client(tmp_path, "0,50,1,,0,0\n"))
    long, double = found.prompt_tokens == 8, found.output_tokens == 2
    # 30,000 draws: four standard errors are 0.010 for 0.75 and 0.012 for 0.5.
    assert long.mean() == pytest.approx(0.75, abs=0.010)
    assert double.mean() == pytest.approx(0.5, abs=0.012)
    assert np.corrcoef(long, double)[0, 1] == pytest.approx(0.0, abs=4 / np.sqrt(30_000))


@given(
    st.dictionaries(
        st.integers(0, 10_000_000), st.floats(0, 1, exclude_min=True), min_size=1, max_size=20
    ),
    st.integers(0, 10_000_000),
)
def test_only_lengths_with_mass_are_drawn(mass: dict[int, float], never: int) -> None:
    mass = {tokens: value for tokens, value in mass.items() if tokens != never} or {
        never + 1: 1.0
    }
    tokens = np.array([never, *mass])
    histogram = LengthHistogram.of(tokens, np.array([0.0, *mass.values()]))
    assert set(histogram.draw(np.random.default_rng(0), 50).tolist()) <= set(mass)


def test_lengths_of_zero_tokens_follow_their_policy_and_are_counted(tmp_path: Path) -> None:
    dataset = {"0": {"input_tokens": "{0: 0.1, 8: 0.9}", "output_tokens": "{0: 0.5, 2: 0.5}"}}
    path = client(tmp_path, "0,10,1,,0,0\n", dataset)
    trace = traced(path, ReadOptions())
    assert trace.notes.rows == 6000
    assert trace.notes.dropped["prompt of 0 tokens"] == pytest.approx(600, abs=93)
    assert trace.notes.dropped["output of 0 tokens"] == pytest.approx(2700, abs=155)
    assert len(trace) == 6000 - sum(trace.notes.dropped.values())
    said = message(path, zero_output=ZeroOutput.REFUSE)
    assert said == (
        "chunk-7-dataset.json: input_tokens in force at second 0 must be at least 1, got 0 "
        "with a probability of 0.1"
    )
    dataset = {"0": {"input_tokens": "{0: 0.0, 8: 1.0}", "output_tokens": "{2: 1.0}"}}
    fine = drawn(client(tmp_path, GAMMA, dataset), zero_output=ZeroOutput.REFUSE)
    assert fine.prompt_tokens.min() == 8


def test_of_a_multimodal_client_the_text_is_drawn_and_the_rest_is_said(tmp_path: Path) -> None:
    fields = {
        "text_tokens": "{50: 1.0}",
        "image_tokens": "{6: 1}",
        "output_tokens": "{11: 1.0}",
    }
    found = drawn(client(tmp_path, GAMMA, {"0": fields}))
    assert set(found.prompt_tokens.tolist()) == {50}
    assert str(found.remarks[-1]).startswith("images, audio and video are left out")


# --- a part of the file ---------------------------------------------------------------


def test_the_busiest_stretch_is_drawn_and_named(tmp_path: Path) -> None:
    rates = "0,1,1,,0,0\n600,4,1,,0,0\n1200,9,1,,0,0\n1800,0,0,,0,0\n"
    path = client(tmp_path, rates)
    found = drawn(path, sample_s=900)
    assert found.arrived.min() >= 900
    assert found.arrived.max() < 1800
    assert len(found.arrived) == pytest.approx(4 * 300 + 9 * 600, abs=4 * np.sqrt(1200))
    assert str(found.remarks[0]).endswith(
        "seed 0 from the busiest 900 s of 2,400 s, which begin at second 900"
    )
    whole = drawn(path)
    is_in = (whole.arrived >= 900) & (whole.arrived < 1800)
    assert found.arrived.tolist() == whole.arrived[is_in].tolist()
    assert found.prompt_tokens.tolist() == whole.prompt_tokens[is_in].tolist()
    longer = drawn(path, sample_s=1e9)
    assert longer.arrived.tolist() == whole.arrived.tolist()
    assert longer.remarks == whole.remarks


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=8),
    st.floats(0.1, 20.0),
)
def test_no_other_stretch_of_that_length_expects_more(
    steps: list[tuple[int, int]], length_s: float
) -> None:
    starts_s = np.cumsum([0, *(step for step, _ in steps)])
    windows = [
        RateWindow(float(start_s), 1.0, float(rate))
        for start_s, (_, rate) in zip(starts_s[:-1], steps, strict=True)
    ]

    def expected(start_s: float) -> float:
        return sum(
            w.rate_per_s * max(0.0, min(w.end_s, start_s + length_s) - max(w.start_s, start_s))
            for w in windows
        )

    start_s, end_s = busiest_stretch(windows, length_s)
    assert end_s - start_s == pytest.approx(min(length_s, windows[-1].end_s))
    best = max(expected(float(at)) for at in np.arange(0.0, windows[-1].end_s, 0.05))
    assert expected(start_s) >= best - 1e-6
