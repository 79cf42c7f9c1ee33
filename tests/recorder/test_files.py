"""The files of a recording: what stands in them, how they follow each other, how they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.paths import TESTS
from support.recorder_parts import (
    Reported,
    asked,
    finished,
    log_kept,
    recorded,
    recording,
    warnings_kept,
)
from tuner.recorder.faults import MAX_IN_A_ROW
from tuner.recorder.recorder import MAX_WAITING_BYTES, Recorder, process_recorder
from tuner.recorder.rows import RecordedServer, header_line
from tuner.recorder.segments import Room, RoomError, Segments
from tuner.recorder.settings import (
    FILE,
    KEY,
    MAX_BYTES,
    MAX_TOTAL_BYTES,
    RecordSettings,
    share_key,
)
from tuner.traffic.formats import read_trace


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=30),
    batch=st.integers(1, 7),
    max_bytes=st.integers(50, 400),
)
def test_files_keep_to_their_size_lose_nothing_and_each_have_a_header(
    lengths: list[int], batch: int, max_bytes: int
) -> None:
    lines = [b"%d" % n + b"x" * n + b"\n" for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prod.jsonl"
        path.write_bytes(b"from before\n")
        segments = Segments(path, max_bytes, lambda: b"head\n", Room(path, (), 10**9))
        for at in range(0, len(lines), batch):
            segments.write(lines[at : at + batch])
        segments.close()
        assert path.read_bytes() == b"from before\n"
        found: list[bytes] = []
        for number, each in enumerate(segments.paths, start=1):
            assert each.name == f"prod.{number}.jsonl"
            head, *rest = each.read_bytes().splitlines(keepends=True)
            assert head == b"head\n"
            assert rest
            assert each.stat().st_size <= max_bytes or len(rest) == 1
            found += rest
    assert found == lines


@pytest.mark.parametrize("taken", ["deleted", "emptied", "renamed"])
def test_what_follows_a_file_that_was_taken_away_is_kept(tmp_path: Path, taken: str) -> None:
    path, kept = tmp_path / "prod.jsonl", tmp_path / "prod.jsonl.1"
    segments = Segments(path, None, lambda: b"head\n", Room(path, (), 10**9))
    segments.write([b"one\n"])
    if taken == "renamed":
        path.rename(kept)
    else:
        # As logrotate does, by copytruncate or before it compresses.
        shutil.copy(path, kept)
        path.unlink() if taken == "deleted" else os.truncate(path, 0)
    segments.write([b"two\n"])
    segments.write([b"three\n"])
    segments.close()
    parts = [part.read_bytes() for part in (kept, *segments.paths) if part.exists()]
    whole = [b"head\none\n", b"head\ntwo\nthree\n"]
    assert [part for part in parts if part] == (
        [b"head\none\ntwo\nthree\n"] if taken == "renamed" else whole
    )


def test_a_recording_is_a_trace_that_tune_reads(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    with recording(path) as recorder:
        recorder.source.block_size = 4
        recorder.source.model = "demo"
        recorder.offer(asked("a", list(range(10))))
        recorder.offer(finished(Reported("b", e2e_latency=5.0), Reported("a")))
        recorder.offer(finished(Reported("c", num_generation_tokens=0)))
    header, rows = recorded(path)
    assert (header["version"], header["clock"], header["model"]) == (1, "wall", "demo")
    assert (header["block_size"], header["counts_from"]) == (4, "engine")
    assert header["lacks"] == ["aborted"]
    assert len(rows) == 3
    assert path.stat().st_mode & 0o777 == 0o600
    trace = read_trace(path)
    assert trace.due_s.tolist() == [0.0, 3.0]
    assert trace.prompt_tokens.tolist() == [10, 10]
    assert trace.output_tokens.tolist() == [3, 3]
    assert trace.hashes is not None
    assert trace.hashes.block_size == 4
    assert trace.hashes.counts.tolist() == [0, 2]


def test_the_header_says_what_is_lacking() -> None:
    alone = header_line(RecordedServer("5c0e"))
    for word in (b'"queue_s"', b'"hash_ids"', b'"aborted"', b'"counts_from":"usage"'):
        assert word in alone
    assert b'"hash_scope":null' in alone


def test_a_recording_of_several_engines_says_so_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    with recording(path) as recorder:
        recorder.source.engines = 2
        recorder.offer(replace(finished(Reported("a"), Reported("b")), engine_index=1))
        recorder.offer(replace(finished(Reported("c")), engine_index=0))
    engines = read_trace(path).engines
    assert engines is not None
    assert engines.tolist() == [1, 1, 0]
    (remark,) = (said for said in read_trace(path).notes.texts if "engines" in said)
    assert remark.startswith("2 engines are recorded together: tune trace thin --replicas 2")
    assert not RecordedServer("5c0e", engines=1).remarks


def test_nothing_a_client_sent_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    with recording(path) as recorder:
        recorder.source.block_size = 4
        recorder.offer(asked("alice@example.org", [3141, 5926, 5358, 9793]))
        recorder.offer(finished(Reported("alice@example.org", num_prompt_tokens=4)))
    text = path.read_text()
    for secret in ("alice", "3141", "5926"):
        assert secret not in text


def test_unset_means_no_file_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FILE, raising=False)
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.chdir(tmp_path)
    process_recorder.cache_clear()
    before = threading.active_count()
    assert process_recorder() is None
    share_key()
    assert KEY not in os.environ
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [MAX_BYTES, MAX_TOTAL_BYTES])
def test_a_size_that_is_none_is_warned_of_and_nothing_recorded(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(FILE, "prod.jsonl")
    monkeypatch.setenv(name, "1 GB")
    process_recorder.cache_clear()
    with warnings_kept() as said:
        assert process_recorder() is None
    process_recorder.cache_clear()
    assert f"{name} must be a size in bytes" in said[0]


def test_a_folder_is_no_file_to_record_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "rec"))
    (tmp_path / "rec").mkdir()
    process_recorder.cache_clear()
    with warnings_kept() as said:
        assert process_recorder() is None
    process_recorder.cache_clear()
    assert "must name a file, got the folder" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["rec"]


def test_all_files_of_a_recording_take_no_more_than_their_total(tmp_path: Path) -> None:
    path, most = tmp_path / "prod.jsonl", 60_000
    (tmp_path / "prod.3.steps").write_bytes(bytes(20_000))
    (tmp_path / "product.jsonl").write_bytes(bytes(90_000))
    kept = RecordSettings(path, max_bytes=8192, max_total_bytes=most)
    recorder = Recorder(kept)
    with warnings_kept() as said:
        for _ in range(40):
            for number in range(50):
                recorder.offer(finished(Reported(f"a-{number}")))
            recorder._closing.wait(0.3)
            if not recorder.is_on:
                break
        recorder.close()
    (warning,) = said
    assert "stopped: its files have the 60,000 bytes that they may have in all" in warning
    assert warning.endswith("serving goes on")
    own = [one for one in tmp_path.iterdir() if not one.name.startswith("product")]
    taken = sum(one.stat().st_size for one in own)
    assert most - 30_000 < taken <= most
    assert len(read_trace(path)) > 20
    # Who starts again with nothing moved away is told again, and writes nothing.
    again = Recorder(kept)
    with warnings_kept() as said:
        again.offer(finished(*(Reported(f"b-{number}") for number in range(200))))
        again.close()
    assert "TUNE_RECORD_MAX_TOTAL_BYTES" in said[0]
    now = [one for one in tmp_path.iterdir() if not one.name.startswith("product")]
    assert sum(one.stat().st_size for one in now) == taken


def test_a_part_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, left = 4096, [60]

    def statvfs(_: object) -> object:
        return SimpleNamespace(f_frsize=block, f_blocks=1000, f_bavail=left[0])

    monkeypatch.setattr("os.statvfs", statvfs)
    room = Room(tmp_path / "prod.jsonl", (), 10**9)
    room.take(10 * block - 1)
    with pytest.raises(RoomError, match="less than 5% of the disk would be left free"):
        room.take(11 * block)
    left[0] = 100
    room.take(11 * block)


def test_processes_of_one_server_hash_alike_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FILE, "prod.jsonl")
    monkeypatch.setenv(KEY, "")
    apart = [RecordSettings.from_environment(os.environ) for _ in range(2)]
    share_key()
    together = [RecordSettings.from_environment(os.environ) for _ in range(2)]
    keys = [one.key for one in (*apart, *together) if one is not None]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 3
    assert keys[3].hex() not in repr(together)


def test_a_folder_that_is_not_there_ends_the_recording_with_one_warning(
    tmp_path: Path,
) -> None:
    with warnings_kept() as said, recording(tmp_path / "none" / "prod.jsonl") as recorder:
        for _ in range(3):
            recorder.offer(finished(Reported("a")))
    assert len(said) == 1
    assert "stopped: No such file or directory; serving goes on" in said[0]


def test_a_disk_that_hangs_ends_the_recording_before_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def write(_segments: Segments, _lines: list[bytes]) -> None:
        hangs.set()
        goes_on.wait(20)

    monkeypatch.setattr(Segments, "write", write)
    prompt = [1] * 100_000
    tracemalloc.start()
    try:
        with warnings_kept() as said, recording(tmp_path / "prod.jsonl") as recorder:
            recorder.offer(finished(Reported("a")))
            assert hangs.wait(20)
            most_bytes = 0
            for number in range(1000):
                recorder.offer(asked("a", prompt, number))
                most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[0])
                if not recorder.is_on:
                    break
            assert not recorder.is_on
            # What waited is let go of at once, not only when the disk comes back.
            assert tracemalloc.get_traced_memory()[0] < MAX_WAITING_BYTES / 10
            assert 0.9 * MAX_WAITING_BYTES < most_bytes < 1.1 * MAX_WAITING_BYTES
            goes_on.set()
    finally:
        tracemalloc.stop()
    assert len(said) == 1
    assert "the disk does not keep up" in said[0]


def test_what_fails_of_one_request_costs_that_request_and_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    odd: Any = None
    with log_kept() as said, recording(path) as recorder:
        for number in range(50):
            good, bad = Reported(f"good-{number}"), Reported("bad", e2e_latency=odd)
            recorder.offer(finished(bad, good, bad))
    assert len(recorded(path)[1]) == 50
    assert [line for line in said if "had to leave" in line] == [
        f"recording to {path} had to leave something out: TypeError: unsupported operand "
        "type(s) for -: 'NoneType' and 'float'; recording and serving go on",
        f"recorded 50 requests to {path}; had to leave something out 100 times",
    ]


def test_very_many_faults_without_a_request_that_goes_well_end_the_recording(
    tmp_path: Path,
) -> None:
    odd: Any = None
    with log_kept() as said, recording(tmp_path / "prod.jsonl") as recorder:
        for _ in range(MAX_IN_A_ROW - 1):
            recorder.offer(finished(Reported("bad", e2e_latency=odd)))
        recorder.offer(finished(Reported("good")))
        for _ in range(MAX_IN_A_ROW):
            assert recorder.is_on
            recorder.offer(finished(Reported("bad", e2e_latency=odd)))
        recorder.close()
    assert not recorder.is_on
    (stopped,) = [line for line in said if "stopped" in line]
    assert "stopped: 1000 faults in a row, the last one TypeError" in stopped


def test_a_thread_that_the_system_refuses_ends_the_recording_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with warnings_kept() as said, recording(tmp_path / "prod.jsonl") as recorder:
        for number in range(3):
            recorder.offer(asked("a", [1] * 10, number))
        assert not recorder.is_on
    (warning,) = said
    assert "stopped: RuntimeError: can't start new thread; serving goes on" in warning


FULL_DISK = """
import logging, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.recorder_parts import Reported, finished, recording
logging.basicConfig(level=logging.WARNING)
if sys.argv[3] == "limit":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
with recording(Path(sys.argv[2]) / "prod.jsonl") as recorder:
    for _ in range(40):
        for _ in range(100):
            recorder.offer(finished(Reported("a")))
        recorder._closing.wait(0.3)
        if not recorder.is_on:
            break
    recorder.offer(finished(Reported("a")))
print("serving goes on")
"""


@pytest.mark.parametrize("kind", ["tmpfs", "limit"])
def test_a_full_disk_ends_the_recording_and_leaves_whole_lines(
    tmp_path: Path, kind: str
) -> None:
    mounted = False
    if kind == "tmpfs":
        mount = [
            shutil.which("mount") or "mount",
            "-t",
            "tmpfs",
            "-o",
            "size=64k",
            "none",
            str(tmp_path),
        ]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("no right to mount a small tmpfs: run as root to fill a real one")
        mounted = True
    try:
        parts = str(TESTS)
        command = [sys.executable, "-c", FULL_DISK, parts, str(tmp_path), kind]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "serving goes on\n"
        assert done.stderr.count("serving goes on") == 1
        full = "less than 5% of the disk would be left free"
        assert (full if mounted else "File too large") in done.stderr
        _, rows = recorded(tmp_path / "prod.jsonl")
        assert len(rows) >= 100
        assert {row["status"] for row in rows} == {"length"}
    finally:
        if mounted:
            subprocess.run([shutil.which("umount") or "umount", str(tmp_path)], check=True)
