"""Where traces come from: packed, piped, in parts, with wrong rows, in formats of others."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tuner.cli import run
from tuner.errors import TraceError, UsageError
from tuner.traffic.describe import prefix_reuse_ratio
from tuner.traffic.formats import (
    Columns,
    ReadOptions,
    TimeUnit,
    TraceFormat,
    read_trace,
    read_traces,
)
from tuner.traffic.formats import registry as registry_module
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.traces import ClockOrigin, ReadNotes, Remark, RemarkKind, Trace

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LINES = "".join(
    f'{{"arrived_at_s": {i}.5, "input_length": {10 + i}, "output_length": 3}}\n'
    for i in range(40)
)
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CHAT = '{{"chat_id": {}, "parent_chat_id": {}, "timestamp": {}, "input_length": {}, '
CHAT += '"output_length": {}, "type": "text", "turn": 1, "hash_ids": {}}}\n'


def written(folder: Path, data: str | bytes, name: str = "prod.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# --- packed and piped -----------------------------------------------------------------


def test_packed_files_read_like_plain_ones(tmp_path: Path) -> None:
    data = LINES.encode()
    two_frames = zstd.compress(data[:700]) + zstd.compress(data[700:])
    plain = read_trace(written(tmp_path, data))
    for name, packed in (
        ("a.jsonl.gz", gzip.compress(data)),
        ("a.jsonl.zst", zstd.compress(data)),
        ("b.jsonl.zst", two_frames),
    ):
        trace = read_trace(written(tmp_path, packed, name))
        assert trace.due_s.tolist() == plain.due_s.tolist()
        assert trace.source == name


def test_the_name_of_a_file_stays_within_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ev\nmax-num-seqs: 999.csv"
    path.write_text(CSV + "2023-11-16 18:17:00,3,4\n")
    assert read_trace(path).source == r"ev\x0amax-num-seqs: 999.csv"


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_a_packed_file_that_is_cut_off_is_an_error(tmp_path: Path, pack: object) -> None:
    data = np.random.default_rng(0).integers(0, 9, 9000).astype(str)
    packed = pack("".join(data).encode())  # type: ignore[operator]
    with pytest.raises(TraceError, match="cannot be unpacked"):
        read_trace(written(tmp_path, packed[: len(packed) // 2]))


def test_a_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, LINES)
    os.truncate(path, 1 << 42)  # a hole, which takes no room on the disk
    with pytest.raises(
        TraceError, match=r"prod.jsonl has 4398.0 GB, which takes as much"
    ) as no:
        read_trace(path)
    assert "give a part of it" in no.value.hint


def test_standard_input_is_a_file_like_any(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.TextIOWrapper(io.BytesIO(gzip.compress(LINES.encode())))
    monkeypatch.setattr(sys, "stdin", piped)
    trace = read_trace("-")
    assert (len(trace), trace.source) == (40, "standard input")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_is_written_is_read_back_packed_or_not(tmp_path: Path, name: str) -> None:
    trace = read_trace(written(tmp_path, LINES))
    write_trace(trace, tmp_path / name)
    again = read_trace(tmp_path / name)
    assert again.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert again.zero_s == 0.5
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(trace, tmp_path / "none" / name)


PACKED: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstd.compress}


@pytest.mark.parametrize("kind", PACKED)
def test_a_small_file_that_unpacks_to_a_huge_one_is_refused_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bomb = written(tmp_path, PACKED[kind](bytes(400 << 20)), f"a.jsonl.{kind}")
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="holds more than 1,048,576 bytes") as caught:
            read_trace(bomb, options=ReadOptions(max_unpacked_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 << 20
    assert "--max-unpacked" in caught.value.hint
    assert list(tmp_path.iterdir()) == [bomb]


def test_a_trace_leaves_others_room_on_the_disk_where_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, gzip.compress(LINES.encode()))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=len(LINES)))
    with pytest.raises(TraceError, match=r"than .* has room for") as caught:
        read_trace(path)
    assert "TMPDIR" in caught.value.hint


def test_what_is_piped_in_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES.encode())))
    with pytest.raises(TraceError, match="standard input holds more than 100 bytes"):
        read_trace("-", options=ReadOptions(max_unpacked_bytes=100))


def test_a_private_recording_is_as_private_once_converted(tmp_path: Path) -> None:
    recording = written(tmp_path, LINES)
    for mode in (0o600, 0o644):
        recording.chmod(mode)
        output = tmp_path / f"{mode}.jsonl.gz"
        assert run(["trace", "convert", str(recording), "-o", str(output)]) == 0
        assert output.stat().st_mode & 0o777 == mode


def test_writing_a_trace_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = read_trace(written(tmp_path, LINES))

    def interrupted(_: Trace) -> Iterator[object]:
        yield {"arrived_at_s": 0}
        raise KeyboardInterrupt

    monkeypatch.setattr("tuner.traffic.formats.sources.native_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_trace(trace, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["prod.jsonl"]


# --- several files --------------------------------------------------------------------


@pytest.mark.parametrize("named", ["", "day.jsonl"])
def test_an_empty_name_is_not_the_folder_that_one_is_in(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, CSV + "2024-05-10 00:00:10+00:00,5,6\n", "1.csv")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="a trace's name must not be empty"):
        read_traces([named, ""])
    assert len(read_traces(["."]).due_s) == 1


def test_a_folder_stands_for_its_trace_files(tmp_path: Path) -> None:
    written(tmp_path, CSV + "2024-05-10 00:00:10+00:00,5,6\n", "2.csv")
    written(tmp_path, CSV + "2024-05-10 00:00:00.5+00:00,3,4\n", "1.csv")
    written(tmp_path, "not a trace", "README.md")
    trace = read_traces([tmp_path])
    assert trace.due_s.tolist() == [0, 9.5]
    assert trace.prompt_tokens.tolist() == [3, 5]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no trace file"):
        read_traces([tmp_path / "empty"])


# --- clocks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clock",
    [
        "2023-11-16 18:17:03.9799600",
        "2023-11-16 18:17:03.979960+00:00",
        "2023-11-16 18:17:03+00:00",
        "2023-11-16T18:17:03.979Z",
        "2023-11-16 18:17:03",
        "2023-11-16T20:17:03.5+02:00",
    ],
)
def test_each_kind_of_wall_clock_is_the_same_instant(tmp_path: Path, clock: str) -> None:
    first = "2023-11-16 18:17:00+00:00"
    for rows in ((first, clock), (clock, first)):
        body = "".join(f"{when},3,4\r\n" for when in rows)
        trace = read_trace(written(tmp_path, CSV + body, "a.csv"))
        assert int(trace.due_s[1]) == 3
        assert int(trace.zero_s) == 1_700_158_620


def test_the_unit_of_a_plain_number_can_be_given_but_not_that_of_a_calendar(
    tmp_path: Path,
) -> None:
    rows = "".join(
        f'{{"timestamp": {t}, "input_length": 5, "output_length": 7}}\n' for t in (0, 2000)
    )
    path = written(tmp_path, rows)
    assert read_trace(path).duration_s == 2
    seconds = ReadOptions(time_unit=TimeUnit.SECONDS)
    assert read_trace(path, None, seconds).duration_s == 2000
    azure = written(tmp_path, CSV + "2024-05-10 00:00:10,5,6\n", "a.csv")
    own = '{"arrived_at_s": 3, "input_length": 5, "output_length": 7}\n'
    for known in (azure, written(tmp_path, own, "own.jsonl")):
        with pytest.raises(UsageError, match=f"{known.name} .*--time-unit does not apply"):
            read_trace(known, None, seconds)


def test_options_for_what_is_in_none_of_the_files_are_refused(tmp_path: Path) -> None:
    row = '{{"arrived_at_s": {}, "input_length": 5, "output_length": 7{}}}\n'
    plain = written(tmp_path, row.format(0, "") + row.format(1, ""), "plain.jsonl")
    hashed = written(tmp_path, row.format(0, ', "hash_ids": [1]'), "hashed.jsonl")
    blocks = ReadOptions(hash_block_size=64)
    assert len(read_traces([plain, hashed], None, blocks)) == 3
    with pytest.raises(UsageError, match=r"--hash-block-size is for hash ids, and .*plain"):
        read_traces([plain], None, blocks)
    with pytest.raises(UsageError, match="--sample is for aggregates"):
        read_traces([plain], None, ReadOptions(sample_s=60.0))
    with pytest.raises(UsageError, match="--sessions-over is for sessions"):
        read_traces([plain, hashed], sessions_over_s=60.0)


def test_a_file_that_is_named_twice_does_not_come_twice(tmp_path: Path) -> None:
    row = '{"arrived_at_s": 0, "input_length": 5, "output_length": 7}\n'
    recorded = written(tmp_path, row, "recorded.jsonl")
    with pytest.raises(UsageError, match=r"recorded.jsonl and .*recorded.jsonl are the same"):
        read_traces([tmp_path, recorded])
    (tmp_path / "latest.jsonl").symlink_to(recorded)
    with pytest.raises(UsageError, match=r"latest.jsonl and .*recorded.jsonl are the same"):
        read_traces([tmp_path])


def test_files_that_number_their_blocks_from_zero_share_them_in_a_named_folder_alone(
    tmp_path: Path,
) -> None:
    row = '{{"timestamp": {}, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}}\n'
    first, second = (written(tmp_path, row.format(at), f"{at}.jsonl") for at in (1000, 2000))
    apart, shared = read_traces([first, second]), read_traces([tmp_path])
    assert prefix_reuse_ratio(apart) == 0.0
    assert prefix_reuse_ratio(shared) == 0.5
    for trace in (apart, shared):
        assert "hash ids of 2 files do not say whether" in trace.notes.texts[0]
    stated = '{"trace_header": {"version": 1, "hash_scope": "one"}}\n'
    parts = [written(tmp_path, stated + row.format(at), f"{at}.jsonl") for at in (0, 1)]
    assert prefix_reuse_ratio(read_traces(parts)) == 0.5


def test_recordings_of_many_sessions_begin_together_and_are_not_overlaid_at_random(
    tmp_path: Path,
) -> None:
    row = '{{"arrived_at_s": {}, "input_length": 5, "output_length": 7{}}}\n'
    text = "".join(row.format(*one) for one in ((0, ""), (9, ""), (20, ', "after": 0')))
    days = [written(tmp_path, text, f"{day}.jsonl") for day in "ab"]
    both = read_traces(days)
    assert both.due_s.tolist() == [0, 0, 9, 9, 20, 20]
    assert "clocks of their own begin together" in both.notes.texts[-1]


def test_clocks_of_different_data_sets_are_not_one(tmp_path: Path) -> None:
    burst = "Timestamp,Model,Request tokens,Response tokens\n{},GPT-4,5,7\n{},GPT-4,5,7\n"
    files = [written(tmp_path, burst.format(at, at + 1), f"{at}.csv") for at in (100, 300)]
    assert read_traces(files).due_s.tolist() == [0, 1, 200, 201]
    vidur = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,7\n"
    both = read_traces([files[0], written(tmp_path, vidur, "vidur.csv")])
    assert both.due_s.tolist() == [0, 0, 1]
    assert both.origin is ClockOrigin.OWN


def test_only_the_files_whose_clock_is_coarse_are_spread(tmp_path: Path) -> None:
    row = '{{"arrived_at_s": {}, "input_length": 5, "output_length": 7}}\n'
    coarse = "".join(row.format(10 * (i // 2)) for i in range(100))
    fine = "".join(row.format(0.37 * i + 0.01 * (i % 3)) for i in range(100))
    files = [written(tmp_path, text, f"{len(text)}.jsonl") for text in (coarse, fine)]
    trace = read_traces(files, spread_seed=1)
    alone = read_traces(files[:1], spread_seed=1)
    assert np.unique(alone.due_s).size == 100
    assert set(alone.due_s) < set(trace.due_s)
    assert set(read_traces(files[1:]).due_s) < set(trace.due_s)


def test_files_without_the_model_that_is_wanted_are_left_out_unless_all_are(
    tmp_path: Path,
) -> None:
    row = '{{"arrived_at_s": {}, "input_length": 5, "output_length": 7, "model": "{}"}}\n'
    files = [written(tmp_path, row.format(0, name), f"{name}.jsonl") for name in "abc"]
    trace = read_traces(files, None, ReadOptions(only_model="b"))
    assert (len(trace), trace.source) == (1, "b.jsonl")
    left_out = '2 of 3 files hold no request of model "b" and are left out'
    assert trace.notes.texts == (left_out,)
    with pytest.raises(UsageError, match=r'a\.jsonl holds no request of model "x"; it has a'):
        read_traces(files, None, ReadOptions(only_model="x"))
    nameless = written(tmp_path, "Timestamp,Model,Request tokens,Response tokens\n1,,5,6\n")
    with pytest.raises(UsageError, match=r"it has no model names$"):
        read_traces([nameless], None, ReadOptions(only_model="x"))


def test_images_are_remarked_on_and_not_replayed(tmp_path: Path) -> None:
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,2,9,4\n"
    trace = read_trace(written(tmp_path, text, "a.csv"))
    assert trace.prompt_tokens.tolist() == [9]
    assert "images" in trace.notes.texts[0]


# --- chats and vLLM's own data set ----------------------------------------------------


def test_chats_are_known_by_their_ids_and_their_turns_wait(tmp_path: Path) -> None:
    rows = (
        CHAT.format(7, -1, 10.0, 40, 100, [1, 2, 3])
        + CHAT.format(9, -1, 11.0, 5, 5, [4])
        + CHAT.format(8, 7, 15.0, 50, 10, [1, 2, 3, 5])
    )
    trace = read_trace(written(tmp_path, rows))
    assert trace.format == "bailian"
    assert trace.due_s.tolist() == [0, 1, 5]  # seconds
    assert trace.hashes is not None
    assert trace.hashes.block_size == 16
    assert trace.turns is not None
    assert trace.turns.after.tolist() == [-1, -1, 0]
    # 100 tokens at 20 ms leave 3 of the 5 seconds.
    assert trace.turns.pause_s[2] == pytest.approx(3.0)
    again = tmp_path / "again.jsonl"
    write_trace(trace, again)
    assert (found := read_trace(again).turns) is not None
    assert found.after.tolist() == [-1, -1, 0]


def test_turns_wait_in_order_of_arrival_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    rows = (
        CHAT.format(8, 7, 15.0, 50, 10, [1, 2, 3, 5])
        + CHAT.format(7, -1, 10.0, 40, 100, [1, 2, 3])
        + CHAT.format(9, 8, 12.0, 60, 5, [1, 2, 3, 6])  # before what it would wait for
    )
    trace = read_trace(written(tmp_path, rows))
    assert trace.turns is not None
    assert trace.turns.after.tolist() == [-1, -1, 0]
    again = tmp_path / "again.jsonl"
    write_trace(trace, again)
    assert (found := read_trace(again).turns) is not None
    assert found.after.tolist() == [-1, -1, 0]


def test_vllms_own_data_set_has_to_be_named(tmp_path: Path) -> None:
    row = '{"timestamp": 2, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}\n'
    path = written(tmp_path, row + row.replace("2,", "4,", 1))
    trace = read_trace(path, "timed-trace")
    assert trace.duration_s == 2
    assert trace.hashes is not None
    assert trace.hashes.block_size == 16
    with pytest.raises(TraceError, match="in blocks of 512"):
        read_trace(path)  # taken for Mooncake's, whose blocks are larger


# --- the header -----------------------------------------------------------------------


def test_a_header_says_what_holds_for_all_requests(tmp_path: Path) -> None:
    header = (
        '{"trace_header": {"version": 1, "clock": "wall", "block_size": 8, '
        '"in_flight": [[0, 2], [10, 4]], "sampled_from": "a dashboard", "lacks": ["hash ids"]}}'
    )
    trace = read_trace(written(tmp_path, f"\n{header}\n{LINES}"))
    assert trace.origin == "wall"
    assert trace.concurrency is not None
    assert trace.concurrency.in_flight.tolist() == [2, 4]
    assert trace.notes.sampled_from == "a dashboard"
    assert trace.notes.texts == ("the recording lacks hash ids",)
    write_trace(trace, tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl").notes.texts == trace.notes.texts


def test_what_a_remark_decides_is_kept_in_the_file(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, LINES))
    remarks = tuple(Remark(f"{kind} is told", kind) for kind in RemarkKind)
    write_trace(replace(trace, notes=ReadNotes(remarks=remarks)), tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl").notes.remarks == remarks


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("7", "trace_header must be an object, got 7"),
        ('{"version": 2}', "must have version 1, got 2"),
        ('{"version": 1, "block_size": 0}', "block_size must be a whole number above 0"),
        (
            '{"version": 1, "block_size": 99999999999999999999}',
            "above 0 and below 2,147,483,648",
        ),
        ('{"version": 1, "in_flight": [[3, 1], [2, 1]]}', "times_s must ascend"),
        ('{"version": 1, "in_flight": [1, 2]}', "must be a list of [seconds, requests]"),
        ('{"version": 1, "in_flight": [[0, 1e15]]}', "at most 10,000,000 requests"),
        ('{"version": 1, "in_flight": [[0, 300000000]]}', "got [0.0, 300000000.0]"),
        ('{"version": 1, "in_flight": [[0, 1], [1e300, 2]]}', "from 0 to 1e+16 seconds"),
        ('{"version": 1, "clock": "sun"}', 'must be wall, shared or own, got "sun"'),
        ('{"version": 1, "lacks": "much"}', "lacks must be a list of texts"),
        ('{"version": 1, "remarks": "much"}', "remarks must be a list"),
        ('{"version": 1, "remarks": [{"text": "x", "kind": "y"}]}', "or text and kind"),
    ],
)
def test_a_wrong_header_is_said_to_be_wrong(tmp_path: Path, header: str, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, f'{{"trace_header": {header}}}\n{LINES}'))
    assert "line 1" in caught.value.message
    assert said in caught.value.message


def test_a_file_with_a_header_alone_holds_no_request(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(written(tmp_path, '{"trace_header": {"version": 1}}\n'))


def test_a_turn_cannot_wait_for_one_that_is_not_there(tmp_path: Path) -> None:
    wrong = LINES + '{"arrived_at_s": 99, "input_length": 1, "output_length": 1, "after": 40}\n'
    with pytest.raises(TraceError, match="request 40: after must name an earlier request"):
        read_trace(written(tmp_path, wrong))


# --- wrong rows -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "name"),
    [
        (LINES, '{"arrived_at_s": 1, "input_length": -5, "output_length": 7}\nnonsense\n', "j"),
        (CSV + "2024-05-10 00:00:10,5,6\n" * 40, "2024-05-10 00:00:10,-5,6\nx,1,2\n", "c"),
    ],
)
def test_wrong_rows_can_be_counted_and_skipped_up_to_a_share(
    tmp_path: Path, good: str, bad: str, name: str
) -> None:
    path = written(tmp_path, good + bad, name)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "--skip-invalid" in caught.value.hint
    trace = read_trace(path, None, ReadOptions(skip_invalid=True))
    assert len(trace) == 40
    assert trace.notes.rows == 42
    assert sum(trace.notes.dropped.values()) == 2
    with pytest.raises(TraceError, match="2 of 42 rows are invalid, more than 1%"):
        read_trace(path, None, ReadOptions(skip_invalid=True, max_invalid_ratio=0.01))


@pytest.mark.parametrize(
    "first", ['ength": 10, "output_length": 5}', '{"level": "info", "msg": "recorder started"}']
)
def test_a_wrong_first_line_is_skipped_as_any_other(tmp_path: Path, first: str) -> None:
    no_wait = '{"arrived_at_s": 50, "input_length": 1, "output_length": 1, "after": -1}\nx\n'
    path = written(tmp_path, f"{first}\n{LINES}{no_wait}")
    with pytest.raises(TraceError, match="line 1: "):
        read_trace(path, "native")
    trace = read_trace(path, "native", ReadOptions(skip_invalid=True))
    assert (len(trace), trace.notes.rows) == (41, 43)


# --- formats of third parties ---------------------------------------------------------


def _read_dots(path: Path, options: ReadOptions) -> Columns:  # noqa: ARG001 - as all readers
    n = path.read_bytes().count(b".")
    ones = np.ones(n, dtype=np.int64)
    return Columns(np.arange(n, dtype=np.float64), 1.0, ones, ones.copy())


DOTS = TraceFormat(name="dots", matches=lambda head: head.startswith(b"..."), read=_read_dots)
NO_FORMAT = 7


@pytest.mark.parametrize("named", [None, "dots"])
def test_an_installed_package_can_bring_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    here = Path(__file__)
    monkeypatch.syspath_prepend(str(here.parent))

    def offer(value: str) -> None:
        point = EntryPoint("dots", f"{here.stem}:{value}", registry_module.ENTRY_POINTS)
        monkeypatch.setattr(registry_module, "entry_points", lambda **_: [point])
        registry_module.all_formats.cache_clear()

    offer("DOTS")
    try:
        assert len(read_trace(written(tmp_path, "....."), named)) == 5
        offer("NO_FORMAT")
        with pytest.raises(UsageError, match="is not a TraceFormat"):
            read_trace(written(tmp_path, "....."))
        offer("NOTHING")
        with pytest.raises(UsageError, match="cannot be loaded"):
            read_trace(written(tmp_path, "....."))
    finally:
        monkeypatch.undo()
        registry_module.all_formats.cache_clear()
