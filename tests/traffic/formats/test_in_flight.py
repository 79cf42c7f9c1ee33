"""A recording of requests in flight is read in every spelling, and needs lengths."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.cli import run
from tuner.errors import Caveat, TraceError, UsageError
from tuner.traffic.describe import describe
from tuner.traffic.formats import read_trace
from tuner.traffic.formats.columns import ReadOptions, TimeUnit, assemble
from tuner.traffic.formats.in_flight import (
    matches,
    read,
    read_in_flight,
    trace_from_concurrency,
)
from tuner.traffic.traces import ClockOrigin, Trace

LENGTHS = Trace(
    due_s=np.array([0.0, 1.0, 2.0, 3.0]),
    prompt_tokens=np.array([10, 20, 30, 40]),
    output_tokens=np.array([50, 50, 150, 150]),
    source="prod.jsonl",
    sha256="ab",
)


def written(folder: Path, text: str, name: str = "flow.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def said(path: Path, options: ReadOptions | None = None) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read(path, options or ReadOptions())
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("text", "zero_s", "origin"),
    [
        ("time_s,in_flight\n5,0\n10,2\n20,3.4\n30,0\n", 10, ClockOrigin.OWN),
        ("in_flight,timestamp\n2,1700000010\n3,1700000020\n0,1700000030\n", 1700000010, "own"),
        ("time,running,waiting\n10,2,\n20,1,2\n30,0,0\n", 10, "own"),
        ("time,running\r\n10,2\r\n20,3\r\n30,0", 10, "own"),
        (
            "timestamp,in_flight\n2023-11-14 22:13:30,2\n2023-11-14 22:13:40.000,3\n"
            "2023-11-14T22:13:50Z,0\n",
            1700000010,
            "wall",
        ),
    ],
)
def test_every_spelling_of_the_columns_is_read(
    tmp_path: Path, text: str, zero_s: float, origin: str
) -> None:
    assert matches(text.encode())
    found = read_in_flight(written(tmp_path, text), ReadOptions())
    assert found.flow.times_s.tolist() == [0, 10, 20]
    assert found.flow.in_flight.tolist() == [2, 3, 0]
    assert found.zero_s == zero_s
    assert found.origin == origin


def test_other_files_are_not_taken_for_one() -> None:
    for head in (b"", b"TIMESTAMP,ContextTokens\n", b"time_s,rate\n", b"in_flight\n", b"{\x00"):
        assert not matches(head)


def test_a_smaller_unit_is_asked_for_and_never_guessed(tmp_path: Path) -> None:
    path = written(tmp_path, "timestamp,in_flight\n1700000010000,2\n1700000020000,0\n")
    wrong = said(path)
    assert "timestamp must be in seconds, 1700000020000 is past the year 2200" in wrong.message
    assert "--time-unit" in wrong.hint
    found = read_in_flight(path, ReadOptions(time_unit=TimeUnit.MILLISECONDS))
    assert found.flow.times_s.tolist() == [0, 10]
    named = written(tmp_path, "time_s,in_flight\n1,2\n2,0\n", "named.csv")
    with pytest.raises(UsageError, match="--time-unit does not apply"):
        read_in_flight(named, ReadOptions(time_unit=TimeUnit.MILLISECONDS))


def test_what_is_said_of_a_recordings_clock_or_of_the_lengths_is_not_asked_of_the_other(
    tmp_path: Path,
) -> None:
    flow = written(tmp_path, "time,in_flight\n0,2\n1000,4\nlater,4\n3000,0\n")
    lengths = tmp_path / "lengths.jsonl"
    row = '{"arrived_at_s": 0, "input_length": 9, "output_length": %s, "model": "%s"}\n'
    lengths.write_text(row % (50, "a") * 2 + row % (70, "b"))
    asked = ["trace", "from-concurrency", str(flow), "--lengths", str(lengths)]
    asked += ["--only-model", "a"]
    asked += ["--time-unit", "ms", "--skip-invalid", "--max-invalid", "50"]
    assert run([*asked, "-o", str(tmp_path / "closed.jsonl")]) == 0
    trace = read_trace(tmp_path / "closed.jsonl")
    assert trace.concurrency is not None
    assert trace.concurrency.times_s.tolist() == [0, 1, 3]
    assert set(trace.output_tokens.tolist()) == {50}


def test_a_part_of_a_recording_is_as_long_as_its_requests_and_keeps_its_idle_start(
    tmp_path: Path,
) -> None:
    text = "time_s,in_flight,input_length,output_length\n"
    text += "0,1,9,50\n20,0,9,50\n60,4,9,50\n90,0,9,50\n"
    flow, part = written(tmp_path, text), tmp_path / "part.jsonl"
    cut = ["trace", "slice", str(flow), "-o", str(part)]
    assert run([*cut, "--window", "40s:90s"]) == 0
    idle = read_trace(part)
    assert idle.concurrency is not None
    assert idle.concurrency.times_s.tolist()[:2] == [0, 20]
    assert idle.concurrency.in_flight.tolist()[:2] == [0, 4]
    assert (idle.zero_s, idle.due_s[0]) == (40, pytest.approx(20, abs=1))
    assert run([*cut, "--rows", "0:10"]) == 0
    few = read_trace(part)
    assert few.concurrency is not None
    assert few.concurrency.in_flight.max() == 1
    assert few.concurrency.times_s[-1] == pytest.approx(10, abs=1.1)


def test_without_lengths_it_is_told_how_to_give_them(tmp_path: Path) -> None:
    wrong = said(written(tmp_path, "time_s,in_flight\n0,1\n5,0\n"))
    assert "no lengths: input_length and output_length missing" in wrong.message
    assert wrong.hint.endswith("tune trace from-concurrency flow.csv --lengths TRACE")
    half = said(written(tmp_path, "time_s,in_flight,input_length\n0,1,9\n5,0,9\n"))
    assert "no lengths: output_length missing" in half.message


def test_typical_lengths_in_the_file_are_those_of_its_requests(tmp_path: Path) -> None:
    text = "time_s,in_flight,input_length,output_length\n0,2,100,50\n10,4,900,100\n20,0,0,0\n"
    columns = read(written(tmp_path, text), ReadOptions())
    trace = assemble(columns, ReadOptions(), source="f", format_name="concurrency", sha256="")
    # 2 x 10 s at 1 s each, then 4 x 10 s at 2 s each.
    assert trace.prompt_tokens.tolist() == [100] * 20 + [900] * 20
    assert trace.output_tokens.tolist() == [50] * 20 + [100] * 20
    assert trace.due_s[20] == 10
    assert trace.concurrency is not None
    assert trace.concurrency.in_flight.tolist() == [2, 4, 0]
    assert Caveat.CLOSED_LOOP in {w.caveat for w in describe(trace).warnings}


def test_lengths_of_another_trace_are_taken_in_pairs_and_equally_often(tmp_path: Path) -> None:
    path = written(tmp_path, "time_s,in_flight\n0,8\n50,8\n100,0\n")
    trace, again, other = (trace_from_concurrency(path, LENGTHS, seed) for seed in (1, 1, 2))
    # 8 x 100 s, at 100 tokens of 20 ms each.
    assert len(trace) == 400
    pairs = sorted(zip(trace.prompt_tokens, trace.output_tokens, strict=True))
    assert pairs == sorted([(10, 50), (20, 50), (30, 150), (40, 150)] * 100)
    assert trace.prompt_tokens.tolist() == again.prompt_tokens.tolist()
    assert trace.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert trace.notes.sampled_from == "flow.csv and the lengths of prod.jsonl"
    assert trace.hashes is None
    caveats = {warning.caveat for warning in describe(trace).warnings}
    assert {Caveat.CLOSED_LOOP, Caveat.SAMPLED_TRACE} <= caveats


def test_readings_out_of_order_are_sorted_and_of_equal_ones_the_last_counts(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "time_s,in_flight\n20,0\n0,1\n10,5\n10,2\n")
    found = read_in_flight(path, ReadOptions())
    assert found.flow.in_flight.tolist() == [1, 2, 0]
    assert found.remarks == (
        "3 readings were out of order and have been sorted",
        "1 readings share their instant with a later one, which counts",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time_s,in_flight\n0,1\n5,x\n", 'line 3: in_flight must be a number, got "x"'),
        ("time_s,in_flight\nnow,1\n", 'line 2: time_s must be a number, got "now"'),
        ("time_s,in_flight\n0,1\n5,-2\n", "at 5 s: in_flight or running must be from 0 to"),
        ("time_s,running,waiting\n0,1,-2\n", "at 0 s: waiting must be from 0 to 10,000,000"),
        ("time_s,in_flight\n0,1e9\n", "must be from 0 to 10,000,000, got 1e+09"),
        ("time_s,in_flight\n0,0\n5,0\n", "never has a request in flight for any time"),
        (
            "time_s,in_flight\n0,3\n",
            "never has a request in flight for any time, in 1 readings",
        ),
        ("time_s,in_flight\n", "has a header but no requests"),
        (
            "at,busy\n0,1\n",
            "line 1: must have a column time_s, timestamp or time and one of in_flight or "
            'running, got "at, busy"',
        ),
        ("time_s,in_flight\n0,1,2\n", "line 2: must have 2 fields, got 3"),
        ("time,in_flight\n2023-13-01 00:00:00,1\n", "line 2: time must look like"),
        (
            "time_s,in_flight,input_length,output_length\n0,1,5,0\n9,0,1,1\n",
            "at 0 s: input_length and output_length must be at least 1",
        ),
        (
            "time_s,in_flight,input_length,output_length\n0,9e6,5,1\n7000000000,0,1,1\n",
            "requests, at most 50,000,000 are possible",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    assert words in said(written(tmp_path, text)).message


cells = st.sampled_from(["0", "1", "2.5", "-1", "1e400", "nan", "", "x" * 10_000, "\x00", '"'])
rows = st.lists(st.lists(cells, min_size=1, max_size=5).map(",".join), max_size=6)
headers = st.sampled_from(
    [
        "time_s,in_flight",
        "time,running,waiting",
        "timestamp,in_flight,input_length,output_length",
    ]
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(headers, rows | st.binary(max_size=200))
def test_any_file_gives_columns_or_an_error_of_ours(
    tmp_path: Path, header: str, body: list[str] | bytes
) -> None:
    data = body if isinstance(body, bytes) else "\n".join(body).encode()
    path = tmp_path / "flow.csv"
    path.write_bytes(header.encode() + b"\n" + data)
    with suppress(TraceError, UsageError):
        trace_from_concurrency(path, LENGTHS)
    with suppress(TraceError, UsageError):
        read(path, ReadOptions())


def test_where_every_reading_is_skipped_it_says_why(tmp_path: Path) -> None:
    path = written(tmp_path, "time_s,in_flight\nx,3\ny,4\n")
    with pytest.raises(TraceError, match=r"none of its readings can be used \(2 .*time_s"):
        read(path, ReadOptions(skip_invalid=True, max_invalid_ratio=1.0))


def test_a_packed_recording_is_told_of_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "flow.csv.gz"
    path.write_bytes(gzip.compress(b"time_s,in_flight\n0,x\n"))
    with pytest.raises(TraceError) as caught:
        trace_from_concurrency(path, LENGTHS)
    assert str(caught.value).startswith(f"{path} line 2: in_flight must be a number")
