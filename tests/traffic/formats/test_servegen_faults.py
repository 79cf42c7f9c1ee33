"""ServeGen files with faults, public ones, and any bytes at all."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.any_bytes import gives_a_trace_or_an_error_of_ours
from support.servegen_parts import FILES, GAMMA, LANGUAGE, client, drawn, message, traced
from tuner.errors import UsageError
from tuner.traffic.formats.columns import ReadOptions, TimeUnit
from tuner.traffic.formats.servegen import SERVEGEN


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
        path = client(tmp_path, rates, found)
        gives_a_trace_or_an_error_of_ours(partial(traced, path, options))
