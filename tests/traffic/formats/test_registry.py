"""Every reader gives the rows that are there, and names the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.any_bytes import gives_a_trace_or_an_error_of_ours
from support.traffic import request_at
from tuner.errors import TraceError, UsageError
from tuner.traffic.formats import ReadOptions, TimeUnit, format_names, read_trace
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.traces import ZeroOutput

GOOD = '{"timestamp": 1, "input_length": 5, "output_length": 7}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
REFUSE = ReadOptions(zero_output=ZeroOutput.REFUSE)
ONE = ReadOptions(zero_output=ZeroOutput.ONE)


def written(folder: Path, data: str | bytes, name: str = "prod.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def with_(**fields: str) -> str:
    """Return a good line with some fields replaced by the given JSON texts."""
    row = {"timestamp": "1", "input_length": "5", "output_length": "7", **fields}
    return "{" + ", ".join(f'"{key}": {value}' for key, value in row.items()) + "}"


def message(path: Path, **more: object) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        read_trace(path, **more)  # type: ignore[arg-type]  # each case passes its own option
    assert caught.value.exit_code == 2
    return caught.value.message.replace(str(path), path.name)


# --- what is read ---------------------------------------------------------------------


def test_native_reads_both_clocks_and_all_optional_fields(tmp_path: Path) -> None:
    rich = (
        '{"arrived_at_s": 100.5, "input_length": 20, "output_length": 3, "block_size": 16,'
        ' "hash_ids": [4, 9], "e2e_s": 0.25, "request_id": "a", "unknown": {"x": [1]}}\n'
        '{"arrived_at_s": 101, "input_length": 5, "output_length": 7, "request_id": 12}\n'
    )
    trace = read_trace(written(tmp_path, rich))
    assert trace.format == "native"
    assert trace.due_s.tolist() == [0.0, 0.5]
    assert request_at(trace, 0).hash_ids == (4, 9)
    assert trace.request_ids == ("a", "12")
    assert trace.hashes is not None
    assert trace.hashes.block_size == 16
    assert trace.e2e_s is not None
    assert trace.e2e_s[0] == 0.25
    write_trace(trace, tmp_path / "again.jsonl")
    again = read_trace(tmp_path / "again.jsonl")
    assert [request_at(again, i) for i in (0, 1)] == [request_at(trace, i) for i in (0, 1)]
    assert again.e2e_s is not None
    assert again.e2e_s[0] == 0.25
    millis = read_trace(
        written(tmp_path, with_(timestamp="2000") + "\n" + with_(timestamp="2500.5"))
    )
    assert millis.due_s.tolist() == [0.0, 0.5005]


def test_mooncake_is_known_by_its_keys_and_has_blocks_of_512(tmp_path: Path) -> None:
    line = (
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
    )
    trace = read_trace(written(tmp_path, line))
    assert trace.format == "mooncake"
    assert trace.hashes is not None
    assert trace.hashes.block_size == 512
    assert read_trace(written(tmp_path, line), format="native").format == "native"
    fraction = line.replace("27482", "27482.5")
    assert "line 1: timestamp must be whole milliseconds, got 27482.5" in message(
        written(tmp_path, fraction)
    )


def test_milliseconds_that_look_like_seconds_are_asked_for_and_not_guessed(
    tmp_path: Path,
) -> None:
    rows = "\n".join(
        with_(timestamp=f"{1_700_000_000.25 + 1.5 * i}", hash_ids="[]") for i in range(3)
    )
    for mark in ("", "\ufeff"):
        path = written(tmp_path, mark + rows)
        assert "timestamp must be" in message(path)
        assert (
            read_trace(path, "native", ReadOptions(time_unit=TimeUnit.SECONDS)).duration_s == 3
        )
    whole = written(tmp_path, rows.replace(".25", "").replace(".75", ""))
    assert "1700000000 looks like seconds since 1970" in message(whole)
    small = read_trace(written(tmp_path, with_(timestamp="0.25")))
    assert "timestamps have fractions and are taken for milliseconds" in small.notes.texts[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.jsonl", '{{"timestamp": {0}000000, "input_length": 9, "output_length": 9}}'),
        ("t.jsonl", '{{"arrived_at_s": {0}000, "input_length": 9, "output_length": 9}}'),
        ("t.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n{0}000,9,9"),
    ],
)
def test_a_clock_past_the_year_2200_is_in_a_smaller_unit_than_is_thought(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text.format(1_700_000_000) + "\n")
    assert "is past the year 2200" in message(tmp_path / name)
    if "arrived_at_s" not in text:
        unit = TimeUnit.MICROSECONDS if "timestamp" in text else TimeUnit.MILLISECONDS
        found = read_trace(tmp_path / name, options=ReadOptions(time_unit=unit))
        assert found.zero_s == 1_700_000_000


def test_two_recordings_joined_into_one_file_are_told_to_be(tmp_path: Path) -> None:
    one = '{"trace_header": {"version": 1}}\n' + with_(timestamp="5", hash_ids="[]") + "\n"
    assert "line 3: is a second trace_header" in message(written(tmp_path, one + one))


def test_the_block_size_that_is_given_overrides_that_of_the_file(tmp_path: Path) -> None:
    line = '{"arrived_at_s": 1, "input_length": 600, "output_length": 7, "hash_ids": [1], '
    path = written(tmp_path, line + '"block_size": 512}\n')
    hashes = read_trace(path, None, ReadOptions(hash_block_size=600)).hashes
    assert hashes is not None
    assert hashes.block_size == 600


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n"])
def test_line_ends_and_a_missing_last_one_make_no_difference(
    tmp_path: Path, end: str, last: str
) -> None:
    csv = end.join([HEADER, ROW, "2023-11-16 18:15:47,1,2"]) + last
    trace = read_trace(written(tmp_path, csv, "a.csv"))
    assert trace.format == "azure"
    assert trace.due_s.tolist() == [0.0, 0.31941]
    jsonl = end.join([GOOD, with_(timestamp="2")]) + last
    assert read_trace(written(tmp_path, jsonl)).due_s.tolist() == [0.0, 0.001]


def test_azure_columns_are_found_by_name_through_spaces_quotes_and_marks(
    tmp_path: Path,
) -> None:
    csv = (
        '\ufeff GeneratedTokens , x,"TIMESTAMP", ContextTokens\n 7 ,, 2023-11-16 18:15:46 ,3\n'
    )
    request = request_at(read_trace(written(tmp_path, csv, "a.csv")), 0)
    assert (request.prompt_tokens, request.output_tokens) == (3, 7)


def test_seven_fractional_digits_are_all_kept(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:46.{fraction},1,1" for fraction in ("0000001", "0000003", "1")]
    trace = read_trace(written(tmp_path, "\n".join([HEADER, *rows]), "a.csv"))
    assert trace.due_s.tolist() == [0.0, 2e-7, 0.0999999]


def test_unsorted_rows_are_sorted_stably_counted_and_start_at_zero(tmp_path: Path) -> None:
    lines = [
        with_(timestamp=t, request_id=f'"{name}"')
        for t, name in [("500", "c"), ("100", "a"), ("500", "d"), ("100", "b")]
    ]
    trace = read_trace(written(tmp_path, "\n".join(lines)))
    assert trace.request_ids == ("a", "b", "c", "d")
    assert trace.due_s.tolist() == [0.0, 0.0, 0.4, 0.4]
    assert trace.notes.moved == 2
    many = [with_(timestamp=str(i % 2), request_id=str(i)) for i in range(400)]
    names = read_trace(written(tmp_path, "\n".join(many))).request_ids
    assert names == tuple(str(i) for i in [*range(0, 400, 2), *range(1, 400, 2)])


def test_empty_requests_follow_their_policy_and_are_counted(tmp_path: Path) -> None:
    lines = [GOOD, with_(output_length="0"), with_(input_length="0"), GOOD]
    path = written(tmp_path, "\n".join(lines))
    dropped = read_trace(path)
    assert (len(dropped), dropped.notes.rows) == (2, 4)
    assert dict(dropped.notes.dropped) == {"prompt of 0 tokens": 1, "output of 0 tokens": 1}
    kept = read_trace(path, options=ONE)
    assert kept.output_tokens.tolist() == [7, 1, 7]
    assert message(path, options=REFUSE) == (
        "prod.jsonl line 2: output_length must be at least 1, got 0"
    )
    csv = written(tmp_path, f"{HEADER}\n{ROW}\n2023-11-16 18:15:46,3,0", "a.csv")
    assert len(read_trace(csv)) == 1
    assert "a.csv line 3: GeneratedTokens must be at least 1" in message(csv, options=REFUSE)
    assert "none of the 1 requests can be replayed" in message(
        written(tmp_path, with_(output_length="0"))
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e6).map(lambda t: round(t, 3)),
            st.integers(1, 10_000_000),
            st.integers(1, 10_000_000),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_is_written_natively_is_read_back(
    tmp_path: Path, rows: list[tuple[float, int, int]]
) -> None:
    text = "\n".join(
        with_(timestamp=repr(t), input_length=str(p), output_length=str(o)) for t, p, o in rows
    )
    trace = read_trace(written(tmp_path, text))
    write_trace(trace, tmp_path / "again.jsonl")
    again = read_trace(tmp_path / "again.jsonl")
    assert again.due_s.tolist() == pytest.approx(trace.due_s.tolist(), abs=1e-8)
    assert again.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert again.output_tokens.tolist() == trace.output_tokens.tolist()


def test_lines_that_cross_read_blocks_are_neither_lost_nor_torn(tmp_path: Path) -> None:
    n = 120_000  # 7 MB: more than one block
    path = written(tmp_path, "".join(with_(timestamp=str(i)) + "\n" for i in range(n)))
    trace = read_trace(path)
    assert (trace.due_s * 1000).round().tolist() == list(range(n))
    with path.open("a") as file:
        file.write(with_(output_length="-1"))
    assert f"line {n + 1}: output_length must be at least 0, got -1" in message(path)


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (with_(input_length="-3"), "input_length must be at least 0, got -3"),
        (with_(input_length="10000001"), "input_length must be at most 10,000,000 tokens"),
        (with_(output_length="5.5"), "output_length must be a whole number of tokens, got 5.5"),
        (with_(output_length="NaN"), "output_length must be a whole number of tokens, got NaN"),
        (
            with_(output_length="true"),
            "output_length must be a whole number of tokens, got true",
        ),
        (with_(output_length='"7"'), 'output_length must be a whole number of tokens, got "7"'),
        (
            with_(output_length="null"),
            "output_length must be a whole number of tokens, got null",
        ),
        (with_(input_length="9" * 400), "input_length must be at most 10,000,000 tokens"),
        (with_(input_length="9" * 9000), "holds a number that is too long"),
        ('{"timestamp": 1, "input_length": 5}', "lacks output_length"),
        ('{"input_length": 5, "output_length": 7}', "lacks timestamp or arrived_at_s"),
        (with_(arrived_at_s="1"), "carries both timestamp and arrived_at_s"),
        (with_(timestamp="Infinity"), "timestamp must be a number, got inf"),
        (with_(timestamp="1e17"), "timestamp must be within"),
        (with_(timestamp='"now"'), 'timestamp must be a number, got "now"'),
        (with_(chat_id="0"), "has a chat_id, as Bailian/Qwen files do"),
        (
            with_(hash_ids="[1, 2]"),
            "hash_ids must hold 0 or 1 ids for 5 tokens in blocks of 512",
        ),
        (with_(input_length="512", hash_ids="[]"), "hash_ids must hold 1 ids for 512 tokens"),
        (with_(hash_ids='["x"]'), "hash_ids must be a list of 64-bit whole numbers"),
        (with_(hash_ids=f"[{1 << 64}]"), "hash_ids must be a list of 64-bit whole numbers"),
        (with_(block_size="16"), "block_size must be 512, as before, got 16"),
        (with_(after="-2"), "after must be the number of an earlier row, from 0, or -1, got"),
        (with_(z="NaN"), "is not JSON: JSON is malformed"),
        (with_(z='"\\ud800"'), "is not JSON"),
        (with_(e2e_s="-1"), "e2e_s must be a number of seconds, at least 0, got -1"),
        (with_(request_id="[1]"), "request_id must be text or a whole number, got [1]"),
        ("[1, 2]", "must be a JSON object, got [1, 2]"),
        (GOOD + GOOD, "is not JSON: Extra data at character"),
        (GOOD[:-1], "is not JSON"),
        ("x" * 10_000, "is not JSON: Expecting value at character 1, starts with"),
        ("\0\0", "is not JSON"),
        ("[" * 100_000, "is nested too deep"),
        (with_(z="[" * 100_000), "is nested too deep"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(
    tmp_path: Path, line: str, reason: str
) -> None:
    said = message(written(tmp_path, f"{GOOD}\n\n{line}\n{GOOD}\n"))
    assert said.startswith(f"prod.jsonl line 3: {reason}")
    assert len(said) < 250


def test_bytes_that_are_not_text_are_refused_even_where_nobody_looks(tmp_path: Path) -> None:
    data = f"{GOOD}\n".encode() + with_(z='"?"').encode().replace(b"?", b"\xff")
    assert "prod.jsonl line 2: is not UTF-8: byte" in message(written(tmp_path, data))


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = written(tmp_path, f'{GOOD}\n{{"z": "{"x" * (17 << 20)}')
    assert message(path) == "prod.jsonl line 2: is longer than 16 MiB"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,-1,4", "ContextTokens must be at least 0, got -1"),
        (
            "2023-11-16 18:15:46,1.5,4",
            'ContextTokens must be a whole number of tokens, got "1.5"',
        ),
        (
            "2023-11-16 18:15:46,nan,4",
            'ContextTokens must be a whole number of tokens, got "nan"',
        ),
        ("2023-11-16 18:15:46,3,", 'GeneratedTokens must be a whole number of tokens, got ""'),
        ("2023-11-16 18:15:46,3,99999999", "GeneratedTokens must be at most 10,000,000 tokens"),
        (
            "2023-11-16 18:15:46,3," + "9" * 30,
            "GeneratedTokens must be a whole number of tokens",
        ),
        (
            "2023-13-16 18:15:46,3,4",
            "TIMESTAMP must look like 2023-11-16 18:17:03.9799600, got",
        ),
        ("9999-11-16 18:15:46,3,4", "TIMESTAMP must look like"),
        ("2024-05-10 00:00:00.009930+25:00,3,4", "TIMESTAMP must look like"),
        ("2023-11-16 18:15:46,3", "must have 3 fields, got 2"),
        ("2023-11-16 18:15:46,3,4,5", "must have 3 fields, got 4"),
        ("2023-11-16 18:15:46,\0,4", "ContextTokens must be a whole number of tokens"),
        ("x" * 10_000, "must have 3 fields, got 1"),
    ],
)
def test_a_wrong_csv_row_is_named_with_what_was_expected(
    tmp_path: Path, row: str, reason: str
) -> None:
    path = written(tmp_path, f"{HEADER}\r\n{ROW}\r\n\r\n{row}\r\n{ROW}", "a.csv")
    said = message(path)
    assert said.startswith(f"a.csv line 4: {reason}")
    assert len(said) < 250


def test_a_csv_without_its_columns_or_rows_is_refused(tmp_path: Path) -> None:
    assert "has a header but no requests" in message(written(tmp_path, HEADER, "a.csv"))
    lacking = written(tmp_path, "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "a.csv")
    assert message(lacking) == (
        'a.csv line 1: must have one column GeneratedTokens, got "TIMESTAMP, ContextTokens"'
    )


def test_what_is_no_trace_file_at_all_is_said_plainly(tmp_path: Path) -> None:
    assert message(tmp_path / "none.jsonl") == "none.jsonl: no such file"
    assert "is a directory, expected a file" in message(tmp_path)
    assert "is not a regular file" in message(Path("/dev/null"))
    assert "cannot be read: File name too long" in message(tmp_path / ("x" * 300))
    assert message(written(tmp_path, "")) == "prod.jsonl is empty"
    assert "is in no format we know" in message(written(tmp_path, "\n \n"))
    assert "cannot be unpacked" in message(written(tmp_path, b"\x1f\x8b\x08rest"))
    assert "is a zip archive" in message(written(tmp_path, b"PK\x03\x04rest"))
    unknown = message(written(tmp_path, "hello,world\n1,2\n"))
    assert "mooncake" in unknown
    assert 'it starts with "hello,world' in unknown
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, pointer))
    assert caught.value.hint == "run: git lfs pull"
    with pytest.raises(UsageError, match=r"must be one of .*mooncake.*native"):
        read_trace(written(tmp_path, GOOD), format="mooncakes")


heads = st.sampled_from([b"", GOOD.encode() + b"\n", HEADER.encode() + b"\n", b"\xef\xbb\xbf{"])
bodies = st.one_of(
    st.binary(max_size=300),
    st.text(alphabet='{}[]",:0123456789.eE-+ \n\r\t\\uNaNtruefals', max_size=300).map(
        str.encode
    ),
    st.lists(st.sampled_from([GOOD, ROW, HEADER, "", '"', ",", "\0", "{}", "null"]), max_size=6)
    .map("\n".join)
    .map(str.encode),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(heads, bodies, st.sampled_from([None, *format_names()]))
def test_any_bytes_give_a_trace_or_an_error_of_ours(
    tmp_path: Path, head: bytes, body: bytes, name: str | None
) -> None:
    path = written(tmp_path, head + body)
    gives_a_trace_or_an_error_of_ours(lambda: read_trace(path, format=name))
