"""Whether what is drawn from ServeGen's aggregates has their rates, gaps and lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import TraceError, TunerError, UsageError
from tuner.formats.assemble import assemble
from tuner.formats.columns import Columns, ReadOptions, TimeUnit
from tuner.formats.servegen import SERVEGEN
from tuner.formats.servegen_draw import Gaps, Histogram, Lengths, Window, busiest_stretch, draw
from tuner.traces import ClockOrigin, Trace, ZeroOutput

ONE = Histogram.of(np.array([1]), np.array([1.0]))
GAMMA = "0,2,1,Gamma,1,0.5\n"
LANGUAGE = {"input_tokens": "{5: 0.25, 8: 0.75}", "output_tokens": "{1: 0.5, 2: 0.5}"}
FILES = (
    "language_m-large/chunk-50-trace.csv",
    "language_m-large/chunk-57-trace.csv",
    "reason_deepseek-r1/chunk-48-trace.csv",
)


def client(folder: Path, rates: str | bytes, dataset: object = None, n: int = 7) -> Path:
    """Write the two files of a client; return the one with the rates."""
    path = folder / f"chunk-{n}-trace.csv"
    path.write_bytes(rates if isinstance(rates, bytes) else rates.encode())
    found = {"0": LANGUAGE} if dataset is None else dataset
    text = found if isinstance(found, str) else json.dumps(found, indent=2)
    (folder / f"chunk-{n}-dataset.json").write_text(text)
    return path


def drawn(path: Path, **chosen: object) -> Columns:
    options = ReadOptions(**chosen)  # type: ignore[arg-type]  # each case passes its own option
    return SERVEGEN.read(path, options)


def traced(path: Path, options: ReadOptions) -> Trace:
    columns = SERVEGEN.read(path, options)
    return assemble(columns, options, source=path.name, format_name="servegen", sha256="")


def message(path: Path, **chosen: object) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        drawn(path, **chosen)
    return caught.value.message.replace(str(path), path.name)


def counts_within(arrived_s: np.ndarray, start_s: float, end_s: float) -> int:
    return int(((arrived_s >= start_s) & (arrived_s < end_s)).sum())


# --- rates and gaps -------------------------------------------------------------------


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
    window = Window(300.0, 600.0, rate_per_s, gaps, shape, scale_s)
    found = draw(window, Lengths(ONE, ONE), np.random.default_rng(seed))
    n = len(found.arrived_s)
    assert n in (int(window.expected), int(window.expected) + 1)
    assert np.all(np.diff(found.arrived_s) >= 0)
    assert counts_within(found.arrived_s, window.start_s, window.end_s) == n
    assert len(found.prompt_tokens) == len(found.output_tokens) == n


def test_gaps_too_small_for_a_double_still_give_arrivals_in_the_window() -> None:
    window = Window(0.0, 10.0, 0.3, Gaps.GAMMA, shape=1e-5, scale_s=1e5)
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
    window = Window(0.0, 10.0, 0.03)
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
    window = Window(0.0, 600.0, 25.0, gaps, shape, scale_s)
    found = draw(window, Lengths(ONE, ONE), np.random.default_rng(1))
    between_s = np.diff(found.arrived_s)
    assert len(found.arrived_s) == 15_000
    assert between_s.mean() == pytest.approx(0.04, rel=0.02)
    assert between_s.std() / between_s.mean() == pytest.approx(cv, rel=0.06)


def test_gaps_shorter_than_the_rate_allows_fill_a_part_of_the_window() -> None:
    window = Window(0.0, 600.0, 0.5, Gaps.GAMMA, shape=2.0, scale_s=0.05)
    starts_s = []
    for seed in range(200):
        arrived_s = draw(window, Lengths(ONE, ONE), np.random.default_rng(seed)).arrived_s
        assert len(arrived_s) == 300
        assert arrived_s[-1] - arrived_s[0] == pytest.approx(30.0, rel=0.05)
        starts_s.append(arrived_s[0])
    # Anywhere in the window: the mean of 200 uniform starts is 285 within four of its errors.
    assert np.mean(starts_s) == pytest.approx(285.0, abs=4 * 570 / np.sqrt(12 * 200))


def test_gaps_longer_than_the_rate_allows_are_cut_to_the_window() -> None:
    window = Window(0.0, 600.0, 50.0, Gaps.WEIBULL, shape=0.5, scale_s=10.0)
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
    histogram = Histogram.of(tokens, np.array([0.0, *mass.values()]))
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
    assert found.remarks[-1].startswith("images, audio and video are left out")


# --- a part of the file ---------------------------------------------------------------


def test_the_busiest_stretch_is_drawn_and_named(tmp_path: Path) -> None:
    rates = "0,1,1,,0,0\n600,4,1,,0,0\n1200,9,1,,0,0\n1800,0,0,,0,0\n"
    path = client(tmp_path, rates)
    found = drawn(path, sample_s=900)
    assert found.arrived.min() >= 900
    assert found.arrived.max() < 1800
    assert len(found.arrived) == pytest.approx(4 * 300 + 9 * 600, abs=4 * np.sqrt(1200))
    assert found.remarks[0].endswith(
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
        Window(float(start_s), 1.0, float(rate))
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


@pytest.mark.parametrize("sample_s", [0.0, -5.0, float("nan"), float("inf")])
def test_a_stretch_that_cannot_be_is_refused(tmp_path: Path, sample_s: float) -> None:
    with pytest.raises(UsageError, match="--sample must be a number of seconds above 0"):
        drawn(client(tmp_path, GAMMA), sample_s=sample_s)


def test_more_requests_than_fit_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = client(tmp_path, "0,50000,1,,0,0\n600,50000,1,,0,0\n")
    assert message(path) == (
        "chunk-7-trace.csv stands for 60,000,000 requests, more than 50,000,000"
    )


def test_idle_clients_and_a_foreign_unit_are_refused(tmp_path: Path) -> None:
    idle = client(tmp_path, "0,0,0,,0,0\n600,0,0,,0,0\n")
    assert message(idle) == "chunk-7-trace.csv holds idle windows only"
    rare = client(tmp_path, "0,0.000001,1,,0,0\n")
    assert message(rare) == "chunk-7-trace.csv: no request was drawn"
    with pytest.raises(UsageError, match="has a clock with its own unit"):
        drawn(idle, time_unit=TimeUnit.SECONDS)


# --- what is wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("600,2,1,Gamma,1", "must have 6 fields, got 5"),
        ("x,2,1,Gamma,1,1", 'the window\'s start must be a number, got "x"'),
        ("600,nan,1,Gamma,1,1", 'the rate must be a number, got "nan"'),
        ("600,-2,1,Gamma,1,1", "the rate must be at least 0, got -2"),
        ("600,2,1,Pareto,1,1", "the distribution must be Gamma, Weibull or empty"),
        ("600,2,1,Gamma,0,1", "the shape must be from 0.01 to 1e+06, got 0"),
        ("600,2,1,Weibull,1,0", "the scale must be above 0, got 0"),
        ("0,2,1,Gamma,1,1", "the window's start must be above the one before it, got 0"),
        ("\0" * 20, "must have 6 fields, got 1"),
    ],
)
def test_a_wrong_window_is_named_and_can_be_skipped(
    tmp_path: Path, row: str, reason: str
) -> None:
    path = client(tmp_path, f"{GAMMA}\r\n{row}\r\n1200,1,1,,0,0")
    assert message(path).startswith(f"chunk-7-trace.csv line 3: {reason}")
    found = drawn(path, skip_invalid=True, max_invalid_ratio=0.5)
    assert sum(found.skipped.values()) == 1
    assert len(found.arrived) > 1000
    (tmp_path / "chunk-7-dataset.json").unlink()
    said = message(path, skip_invalid=True)
    assert "1 of 3 rows are invalid, more than 5%; the first is line 3" in said


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = client(tmp_path, GAMMA + "6" * 10_000)
    assert message(path) == "chunk-7-trace.csv line 2: is longer than 4,096 bytes"


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ("{", "must map windows to named histograms"),
        ('{"0": {"input_tokens": {"5": 1}}}', "must map windows to named histograms"),
        ("[" * 100_000, "must map windows to named histograms"),
        ({}, "holds no windows"),
        ({"x": LANGUAGE}, "windows must start at a number of seconds"),
        ({"0": {"output_tokens": "{1: 1.0}"}}, "window 0 lacks input_tokens, got"),
        ({"0": {**LANGUAGE, "output_tokens": "[1]"}}, "window 0: output_tokens must be token"),
        ({"0": {**LANGUAGE, "output_tokens": "{-1: 1.0}"}}, "window 0: output_tokens must be"),
        ({"0": {**LANGUAGE, "output_tokens": "{007: 1.0}"}}, "window 0: output_tokens must be"),
        ({"0": {**LANGUAGE, "output_tokens": "{5: open}"}}, "window 0: output_tokens must be"),
        (
            {"0": {**LANGUAGE, "output_tokens": "{5: 0.5}"}},
            "window 0: output_tokens: probabilities must add up to 1, got 0.5",
        ),
        (
            {"0": {**LANGUAGE, "output_tokens": "{99999999: 1.0}"}},
            "window 0: output_tokens: tokens must be at most 10,000,000 tokens",
        ),
    ],
)
def test_a_wrong_data_set_is_named(tmp_path: Path, dataset: object, reason: str) -> None:
    said = message(client(tmp_path, GAMMA, dataset))
    assert said.startswith("chunk-7-dataset.json")
    assert reason in said
    assert len(said) < 250


def test_rates_without_their_lengths_are_refused(tmp_path: Path) -> None:
    path = client(tmp_path, GAMMA)
    (tmp_path / "chunk-7-dataset.json").unlink()
    assert message(path) == (
        "chunk-7-trace.csv holds rates without lengths, and no chunk-7-dataset.json lies "
        "beside it"
    )
    other = path.rename(tmp_path / "rates.csv")
    assert "and no chunk-N-dataset.json lies beside it" in message(other)
    late = client(tmp_path, GAMMA, {"600": LANGUAGE})
    assert message(late) == (
        "chunk-7-trace.csv line 1: has requests, but chunk-7-dataset.json no lengths so early"
    )


def test_the_first_line_tells_the_format() -> None:
    assert SERVEGEN.matches(b"\xef\xbb\xbf0,0,0,,0,0\r\n")
    assert SERVEGEN.matches(b"600,2.5,1,Weibull,0.5,0.2")
    for head in (
        b"",
        b"0,0,0,0,0,0",
        b"0,0,0,,0",
        b"a,b,c,Gamma,d,e",
        b"0,nan,0,,0,0",
        b"\xff",
    ):
        assert not SERVEGEN.matches(head)


# --- public files ---------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_public_clients_keep_the_rate_of_every_window(shared_traces: Path, name: str) -> None:
    path = shared_traces / "servegen" / name
    files = json.loads((shared_traces / "MANIFEST.json").read_text())["files"]
    stats = next(each for each in files if each["file"] == f"servegen/{name}")["stats"]
    rows = [line.split(",") for line in path.read_text().splitlines()]
    found = drawn(path, seed=3)
    assert len(rows) == stats["rows"]
    starts_s = np.array([float(row[0]) for row in rows])
    held, _ = np.histogram(found.arrived, bins=[*starts_s, starts_s[-1] + 600])
    said = np.array([600 * float(row[1]) for row in rows])
    assert np.abs(held - said).max() < 1
    assert (held == 0).sum() == stats["zero_rate_rows"]
    assert held.max() / 600 == pytest.approx(stats["peak_rate_600s"], abs=0.001)
    assert len(found.arrived) / 600 / len(rows) == pytest.approx(stats["mean_rate"], abs=1e-4)


def test_a_public_client_at_its_busiest(shared_traces: Path) -> None:
    path = shared_traces / "servegen" / FILES[1]
    trace = traced(path, ReadOptions(sample_s=60.0))
    assert trace.zero_s >= 844_800
    assert len(trace) == pytest.approx(60 * 395.5, rel=0.1)
    assert trace.duration_s == pytest.approx(60, abs=1)


# --- anything at all ------------------------------------------------------------------

pieces = st.sampled_from(
    [
        *(GAMMA, "600,3,2,Weibull,0.6,0.2\n", "1200,1,1,,0,0\r\n", "0,0,0,,0,0\n", "\0"),
        *("9" * 400, "x" * 10_000, "\n", ",", "1e300,1,1,,0,0\n", "é", "-"),
        "1e15,1e15,1,Gamma,1e6,1e15\n",
    ]
)
bodies = st.one_of(
    st.binary(max_size=100),
    st.lists(pieces, max_size=6).map("".join).map(str.encode),
    st.lists(pieces, max_size=6).map("".join).map(lambda text: text.encode() + b"\xff\xfe,1"),
)
histograms = st.one_of(
    st.sampled_from(["{}", "{0: 1.0}", "{5: 1.0}", "{5: 1", "{" * 999, "{5: 1e999}"]),
    st.text(alphabet="{}[]0123456789:, .e-+", max_size=30),
    st.just("{" + " " * 50_000),
    st.just("{1: " + "9" * 5_000 + "}"),
)
datasets = st.one_of(
    st.text(max_size=50),
    st.dictionaries(
        st.sampled_from(["0", "600", "-1", "1e999", "nan", "\x07"]),
        st.dictionaries(st.sampled_from([*LANGUAGE, "text_tokens", "\n"]), histograms),
        max_size=3,
    ).map(json.dumps),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None
)
@given(bodies, datasets, st.booleans(), st.sampled_from([None, 1e-9, 60.0, 1e300]))
def test_any_bytes_give_requests_or_an_error_of_ours(
    tmp_path: Path,
    rates: bytes,
    dataset: str,
    lenient: bool,
    sample_s: float | None,
) -> None:
    SERVEGEN.matches(rates)
    for found in (dataset, json.dumps({"0": LANGUAGE})):
        options = ReadOptions(
            skip_invalid=lenient, max_invalid_ratio=float(lenient), sample_s=sample_s
        )
        said = None
        try:
            trace = traced(client(tmp_path, rates, found), options)
        except TunerError as error:
            said = error
        if said is None:
            assert len(trace) >= 1
        else:
            assert said.exit_code == 2
            assert said.message.isprintable()
