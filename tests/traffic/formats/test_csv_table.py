"""What the readers of vidur, Splitwise-sim and of mere lengths accept, and all refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.any_bytes import gives_a_trace_or_an_error_of_ours
from support.csv_parts import BURST_6, BURST_8, message, public, traced, written
from tuner.traffic.formats.azure import AZURE
from tuner.traffic.formats.burstgpt import BURSTGPT
from tuner.traffic.formats.columns import ReadOptions, TimeUnit, TraceFormat
from tuner.traffic.formats.in_flight import CONCURRENCY
from tuner.traffic.formats.lengths_only import LENGTHS_ONLY
from tuner.traffic.formats.servegen import SERVEGEN
from tuner.traffic.formats.splitwise import SPLITWISE
from tuner.traffic.formats.vidur import VIDUR
from tuner.traffic.traces import ClockOrigin, ZeroOutput

VIDUR_HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens"
SPLIT_HEAD = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
)
GOOD = {
    BURSTGPT: (BURST_6, "5,ChatGPT,472,18,490,Conversation log"),
    VIDUR: (VIDUR_HEAD, "4.3,396,109"),
    SPLITWISE: (SPLIT_HEAD, "0,2,0,1,1,4096,32"),
}
FORMATS = (AZURE, BURSTGPT, VIDUR, SPLITWISE, SERVEGEN, LENGTHS_ONLY)


def test_the_clock_of_a_format_without_unit_can_be_overridden(tmp_path: Path) -> None:
    millis = ReadOptions(time_unit=TimeUnit.MILLISECONDS)
    for known, rows in (
        (BURSTGPT, "1000,m,5,1,6,API log\n3000,m,5,1,6,API log"),
        (VIDUR, "1000.0,5,1\n3000.0,5,1"),
        (SPLITWISE, "0,2,0,1000,1,5,1\n1,2,0,3000,1,5,1"),
    ):
        path = written(tmp_path, f"{GOOD[known][0]}\n{rows}")
        assert traced(path, known).duration_s == 2000
        assert traced(path, known, millis).duration_s == 2
    turns = "1000,7,0.5,m,5,1,6,Conversation log\n3000,7,0.5,m,5,1,6,Conversation log"
    found = traced(written(tmp_path, f"{BURST_8}\n{turns}"), BURSTGPT, millis).turns
    assert found is not None
    assert found.pause_s.tolist() == [0.0, 1.5]


# --- vidur and Splitwise-sim ----------------------------------------------------------


def test_vidur_keeps_every_digit_and_reads_counts_written_as_floats(tmp_path: Path) -> None:
    rows = "0.0,374.0,44\n5.8926549999999995,396,109.0\n"
    trace = traced(written(tmp_path, f"{VIDUR_HEAD}\n{rows}"), VIDUR)
    assert trace.due_s.tolist() == [0.0, 5.8926549999999995]
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.origin is ClockOrigin.SHARED
    half = written(tmp_path, f"{VIDUR_HEAD}\n1,374.5,44\n")
    assert message(half, VIDUR).startswith("t.csv line 2: num_prefill_tokens must be a whole")


def test_a_splitwise_batch_is_as_many_sequences_and_ids_are_kept(tmp_path: Path) -> None:
    rows = "b,2,0,3,2,2048,8\na,2,0,1,1,4096,32\n"
    trace = traced(written(tmp_path, f"{SPLIT_HEAD}\n{rows}"), SPLITWISE)
    assert trace.request_ids == ("a", "b", "b")
    assert trace.due_s.tolist() == [0.0, 2.0, 2.0]
    assert trace.prompt_tokens.tolist() == [4096, 2048, 2048]
    assert trace.notes.texts == (
        "1 rows are batches: each of their 2 sequences is replayed as a request of its own",
    )


@pytest.mark.parametrize("size", ["0", "1.5", "-1", "1025"])
def test_a_splitwise_batch_that_cannot_be_is_named_or_skipped(
    tmp_path: Path, size: str
) -> None:
    rows = ["0,2,0,1,1,4096,32", f"1,2,0,2,{size},4096,32", "2,2,0,3,1,7,8"]
    path = written(tmp_path, "\n".join([SPLIT_HEAD, *rows]))
    reason = "batch_size must be a whole number from 1 to 1,024"
    assert message(path, SPLITWISE).startswith(f"t.csv request 2: {reason}, got ")
    lenient = ReadOptions(skip_invalid=True, max_invalid_ratio=0.5)
    trace = traced(path, SPLITWISE, lenient)
    assert trace.request_ids == ("0", "2")
    assert dict(trace.notes.dropped) == {f"invalid: {reason}": 1}
    strict = ReadOptions(skip_invalid=True, max_invalid_ratio=0.1)
    assert message(path, SPLITWISE, strict).startswith(f"t.csv request 2: {reason}")


# --- what is wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "row", "reason"),
    [
        (BURSTGPT, "x,m,5,1,6,API log", 'Timestamp must be a number, got "x"'),
        (BURSTGPT, "nan,m,5,1,6,API log", 'Timestamp must be a number, got "nan"'),
        (BURSTGPT, "1,m,-5,1,6,API log", "Request tokens must be at least 0, got -5"),
        (BURSTGPT, "1,m,5,,6,API log", "Response tokens must be a whole number of tokens"),
        (BURSTGPT, "1,m,5", "must have 6 fields, got 3"),
        (VIDUR, "1e17,5,1", 'arrived_at must be a number, got "1e17"'),
        (VIDUR, "1,99999999,1", "num_prefill_tokens must be at most 10,000,000 tokens"),
        (VIDUR, "1,5", "must have 3 fields, got 2"),
        (VIDUR, "1,\0,5", "num_prefill_tokens must be a whole number of tokens"),
        (SPLITWISE, "0,2,0,,1,5,1", 'arrival_timestamp must be a number, got ""'),
        (SPLITWISE, "0,2,0,1,x,5,1", 'batch_size must be a number, got "x"'),
        (SPLITWISE, "0,2,0,1,1,5,1.5", "token_size must be a whole number of tokens"),
    ],
)
def test_a_wrong_row_is_named_with_what_was_expected_and_can_be_skipped(
    tmp_path: Path, known: TraceFormat, row: str, reason: str
) -> None:
    header, good = GOOD[known]
    path = written(tmp_path, f"{header}\r\n{good}\r\n\r\n{row}\r\n{good}")
    assert message(path, known).startswith(f"t.csv line 4: {reason}")
    lenient = ReadOptions(skip_invalid=True, max_invalid_ratio=0.5)
    trace = traced(path, known, lenient)
    assert (len(trace), trace.notes.rows) == (2, 3)
    assert [why.startswith("invalid: ") for why in trace.notes.dropped] == [True]
    assert "1 of 3 rows are invalid, more than 5%" in message(
        path, known, ReadOptions(skip_invalid=True)
    )


def test_rows_without_values_and_short_ones_with_all_that_is_wanted_are_no_faults(
    tmp_path: Path,
) -> None:
    """As spreadsheets write the first, and a recording that was cut ends with the second."""
    header, good = GOOD[BURSTGPT]
    rows = f"{good}\n,,,,,\n5,m,n/a,1,6,x\n{good}\n6,m,472,18"
    trace = traced(
        written(tmp_path, f"{header}\n{rows}"),
        BURSTGPT,
        ReadOptions(skip_invalid=True, max_invalid_ratio=0.5),
    )
    assert (len(trace), trace.notes.rows) == (3, 4)


@pytest.mark.parametrize(
    ("known", "header", "wanted"),
    [
        (BURSTGPT, "Timestamp,Request tokens", "Response tokens"),
        (VIDUR, "num_prefill_tokens,num_decode_tokens", "arrived_at"),
        (VIDUR, "arrived_at,num_prefill_tokens", "num_decode_tokens"),
        (SPLITWISE, "arrival_timestamp,token_size", "prompt_size"),
        (SPLITWISE, "arrival_timestamp,token_size,prompt_size,prompt_size", "prompt_size"),
    ],
)
def test_a_missing_or_doubled_column_is_named(
    tmp_path: Path, known: TraceFormat, header: str, wanted: str
) -> None:
    path = written(tmp_path, f"{header}\n" + ",".join("1" for _ in header.split(",")))
    assert message(path, known).startswith(f"t.csv line 1: must have one column {wanted}, got")


@pytest.mark.parametrize(
    ("head", "lack"),
    [
        ("num_prefill_tokens,num_decode_tokens\n5,1\n", "no arrival times (column arrived_at)"),
        (
            '{"request_id": 0, "type": "text", "input_length": 5, "hash_ids": [0]}\n',
            "no timestamp and no output_length",
        ),
        (
            '{\n "request_id": 0,\n "type": "a",\n "input_length": 5,\n "output_length": 7\n}',
            "no timestamp",
        ),
        (
            '{\n "0": {\n  "input_tokens": "{}"',
            "no arrival rates: these stand in the -trace.csv",
        ),
    ],
)
def test_lengths_without_arrivals_are_refused_by_what_they_lack(
    tmp_path: Path, head: str, lack: str
) -> None:
    assert [known.name for known in FORMATS if known.matches(head.encode())] == ["lengths-only"]
    said = message(written(tmp_path, head), LENGTHS_ONLY)
    assert said.startswith(f"t.csv has {lack}")


def test_what_has_arrivals_is_not_taken_for_mere_lengths(tmp_path: Path) -> None:
    timed = b'{"request_id": 0, "type": "text", "input_length": 5, "timestamp": 3}'
    assert not LENGTHS_ONLY.matches(timed)
    assert not LENGTHS_ONLY.matches(b"")
    said = message(written(tmp_path, timed), LENGTHS_ONLY)
    assert said == "t.csv is none of the files of lengths that we know"


# --- what is too large ----------------------------------------------------------------

MEASURE = """
import re, sys
from pathlib import Path
import polars
from tuner.errors import TraceError
from tuner.traffic.formats import read_trace
def peak_kib():  # its own: ru_maxrss would be that of whoever started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kib()
try:
    print(len(read_trace(Path(sys.argv[1]))))
except TraceError as error:
    print(error.message.replace(sys.argv[1], "t.csv"))
print((peak_kib() - before) >> 10)
"""


def read_alone(path: Path) -> tuple[str, int]:
    """Return what reading a file in a process of its own came to, and the MiB that it took."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    said, took_mib = done.stdout.splitlines()
    return said, int(took_mib)


def wide(columns: int) -> str:
    """Return a BurstGPT file with so many columns."""
    more = columns - 6
    head = ",".join([BURST_6, *(f"c{i}" for i in range(more))])
    return "\n".join([head, *(f"{i},m,5,1,6,API log" + "," * more for i in range(3)), ""])


@pytest.mark.slow
def test_a_small_file_of_very_many_columns_takes_no_memory(tmp_path: Path) -> None:
    said, took_mib = read_alone(written(tmp_path, wide(2003)))
    assert said == "t.csv line 1: must have at most 256 columns, got 2,003"
    assert took_mib < 50
    said, took_mib = read_alone(written(tmp_path, wide(256)))
    assert said == "3"
    assert took_mib < 200
    quoted = wide(7).replace(",c0", f',"c0\n",{",".join(f"d{i}" for i in range(3000))}')
    said, took_mib = read_alone(written(tmp_path, quoted))
    assert said == "t.csv line 1: must have at most 256 columns, got 3,007"
    assert took_mib < 100


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_line_without_end_is_refused_before_it_is_held(tmp_path: Path, at: int) -> None:
    lines = wide(6).splitlines()
    lines[at] += "x" * (200 << 20)
    said, took_mib = read_alone(written(tmp_path, "\n".join(lines)))
    most = "a header of less than 65,536" if at == 0 else "shorter than 4,194,304"
    assert said == f"t.csv line {at + 1}: must be {most} bytes"
    assert took_mib < 100


@pytest.mark.parametrize("row", ["1,m,5,1,6,{}", "1,m,5,1,6,API log\n2,m,x,1,6,{}"])
def test_a_field_longer_than_csv_allows_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    path = written(tmp_path, f"{BURST_6}\n{row.format('x' * 140_000)}\n")
    line = 2 + row.count("\n")
    reason = "is not CSV: field larger than field limit (131072)"
    assert message(path, BURSTGPT) == f"t.csv line {line}: {reason}"


def test_a_reading_longer_than_csv_allows_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, f"timestamp,in_flight\n{'1' * 140_000},3\n2,3\n")
    assert message(path, CONCURRENCY).startswith("t.csv line 2: is not CSV: field larger")


@pytest.mark.parametrize("row", [",,,x", "5,7", "2,5,1,x,more", ",,,,more"])
def test_a_row_of_other_columns_is_no_blank_one(tmp_path: Path, row: str) -> None:
    head, good = f"{VIDUR_HEAD},note", "4.3,396,109,"
    path = written(tmp_path, f"{head}\n{good}\n\n,,,\n{good}")
    assert len(traced(path, VIDUR)) == 2
    path = written(tmp_path, f"{head}\n{good}\n\n{row}\n{good}")
    assert message(path, VIDUR).startswith("t.csv line 4: ")


# --- public files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("format_samples/burstgpt_1.first3.csv", BURSTGPT),
        ("format_samples/splitwise_sim_test_trace.csv", SPLITWISE),
        ("format_samples/servegen_offline_trace_a.rows0-45.jsonl", LENGTHS_ONLY),
        ("format_samples/servegen_offline_trace_d.readme2.jsonl", LENGTHS_ONLY),
        ("format_samples/azure_2025_multimodal.first5.csv", AZURE),
        ("format_samples/qwen_thinking_blksz_16.first1.jsonl", None),
        ("vidur_splitwise_conv.open.csv", VIDUR),
        ("servegen/language_m-large/chunk-57-trace.csv", SERVEGEN),
        ("servegen/language_m-large/chunk-57-dataset.json", LENGTHS_ONLY),
        ("synthetic/burstgpt_format/v1.2_8col_with_fails.csv", BURSTGPT),
        ("mooncake_conversation.open.jsonl", None),
        ("agentic_weka/trace_0028.json", None),
    ],
)
def test_each_public_file_is_known_by_one_format(
    shared_traces: Path, name: str, known: TraceFormat | None
) -> None:
    head = (shared_traces / name).read_bytes()[: 1 << 16]
    assert [each for each in FORMATS if each.matches(head)] == ([known] if known else [])


def test_vidur_and_splitwise_files_hold_what_their_manifest_says(shared_traces: Path) -> None:
    path, says = public(shared_traces, "vidur_splitwise_conv.open.csv")
    trace, stats = traced(path, VIDUR), says["stats"]
    assert len(trace) == stats["rows"]
    assert int(trace.prompt_tokens.sum()) == stats["sum_prompt"]
    assert int(trace.output_tokens.sum()) == stats["sum_output"]
    assert round(trace.duration_s, 2) == 1199.75
    toy = traced(shared_traces / "format_samples/splitwise_sim_test_trace.csv", SPLITWISE)
    assert toy.request_ids == ("0", "1", "2")
    assert toy.due_s.tolist() == [0.0, 2.0, 3.0]
    assert toy.prompt_tokens.tolist() == [4096, 2048, 2048]
    assert toy.output_tokens.tolist() == [32, 8, 16]


# --- anything at all ------------------------------------------------------------------


pieces = st.sampled_from(
    [
        *(f"{part}\n" for pair in GOOD.values() for part in pair),
        *("\0", "9" * 400, "x" * 10_000, "\r\n", ",", '"', "nan", "1e400", "-", "é", "\n"),
        BURST_8,
    ]
)
bodies = st.one_of(
    st.binary(max_size=200),
    st.lists(pieces, max_size=8).map("".join).map(str.encode),
    st.lists(pieces, max_size=8).map("".join).map(lambda text: text.encode() + b"\xff\xfe,1\n"),
)


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None
)
@given(
    st.sampled_from([*GOOD, LENGTHS_ONLY]),
    bodies,
    st.booleans(),
    st.booleans(),
    st.sampled_from(ZeroOutput),
)
def test_any_bytes_give_a_trace_or_an_error_of_ours(
    tmp_path: Path,
    known: TraceFormat,
    body: bytes,
    has_head: bool,
    lenient: bool,
    zero_output: ZeroOutput,
) -> None:
    head = "\n".join(GOOD[known]).encode() + b"\n" if has_head and known in GOOD else b""
    options = ReadOptions(
        zero_output=zero_output,
        skip_invalid=lenient,
        max_invalid_ratio=1.0 if lenient else 0.05,
    )
    for each in FORMATS:
        each.matches(head + body)
    path = written(tmp_path, head + body)
    gives_a_trace_or_an_error_of_ours(lambda: traced(path, known, options))
