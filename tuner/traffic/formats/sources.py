"""Where traces come from and go to: files, folders, standard streams, gzip and zstd.

Readers get a path to plain data. What is packed or piped is spooled to a temporary file first,
so that memory stays that of the columns. A few bytes may unpack to any number, so how many are
spooled is bounded.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from tuner.errors import TraceError, UsageError
from tuner.files import free_bytes, replacing, scratch_folder
from tuner.traffic.formats.columns import MAX_UNPACKED_BYTES
from tuner.traffic.formats.native import native_rows
from tuner.traffic.traces import Trace

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STDIN = "-"
"""The path that stands for standard input."""

HEAD_BYTES = 1 << 16
"""Ours: the first line of a request of a million tokens in blocks of 128 fits."""

_Bytes = IO[bytes] | gzip.GzipFile | zstd.ZstdFile
_LFS_POINTER = b"version https://git-lfs"
_GZIP, _ZSTD, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_CHUNK_BYTES = 1 << 20

_FREE_SHARE = 0.9
"""Ours: what a trace may take of the room for temporary files, so that others keep some."""

_SUFFIXES = (".json", ".jsonl", ".csv")
_PACKED = (".gz", ".zst")
# What names a file of a format that is read and never written.
_NOT_LINES = (".csv", ".tsv", ".parquet")
_COMPANION = "-dataset.json"
"""How a file of lengths ends that belongs to the trace file beside it. Source: ServeGen."""


@dataclass(frozen=True, slots=True)
class Source:
    """One plain local file with the name and the SHA-256 of what it came from."""

    path: Path
    name: str
    sha256: str
    head: bytes


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths mean; of a folder every trace file in it, by name.

    Raises: TraceError if a folder holds no trace file, or a name is empty.
    """
    files: list[Path] = []
    for named in paths:
        if not os.fspath(named):  # It would stand for the folder that the process is in.
            raise TraceError(
                "a trace's name must not be empty, got ''",
                "name a file or a folder; . is the folder that you are in",
            )
        path = Path(named)
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(p for p in path.iterdir() if p.is_file() and _is_trace_name(p))
        if not inside:
            raise TraceError(
                f"{path} holds no trace file",
                f"expected files ending in {', '.join(_SUFFIXES)}, perhaps with .gz or .zst",
            )
        files.extend(inside)
    return files


def plain_name(path: Path) -> str:
    """Return the name of a file without what says that it is packed.

    >>> plain_name(Path("recorded/prod.jsonl.gz"))
    'prod.jsonl'
    """
    name = path.name
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return name


def _is_trace_name(path: Path) -> bool:
    name = plain_name(path)
    if name.startswith(".") or name.endswith(_COMPANION):
        return False
    return name.endswith(_SUFFIXES)


@contextmanager
def plain_file(path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> Iterator[Source]:
    """Give a path to the plain data of a trace file, for as long as it is read.

    Raises: TraceError if it cannot be read, unpacked, is no data at all, or is more than may be
        spooled.
    """
    try:
        if str(path) == STDIN:
            with scratch_folder() as folder:
                spooled, name = folder / "stdin", "standard input"
                _spool(sys.stdin.buffer.read, spooled, name, max_bytes)
                with _unpacked(spooled, name, max_bytes) as source, _told_of(path, source):
                    yield source
        else:
            _check_is_file(path)
            # It is told within a line, which a stranger's file must not end.
            name = path.name.replace("\n", r"\x0a")
            with _unpacked(path, name, max_bytes) as source, _told_of(path, source):
                yield source
    except (gzip.BadGzipFile, zlib.error, zstd.ZstdError, EOFError) as cause:
        reason = f"{path} cannot be unpacked: {cause}"
        raise TraceError(reason, "the file is damaged or cut off; fetch it again") from cause
    except OSError as cause:
        reason = f"{path} cannot be read: {cause.strerror or 'the system refused'}"
        hint = "check the path and its rights"
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"it is unpacked in {tempfile.gettempdir()}: {_ROOM_HINT}"
        raise TraceError(reason, hint) from cause


@contextmanager
def _told_of(path: Path, source: Source) -> Iterator[None]:
    """Tell of what was unpacked or piped by the name that its user knows."""
    try:
        yield
    except (TraceError, UsageError) as wrong:
        text = wrong.message.replace(str(source.path), str(path))
        raise type(wrong)(text, wrong.hint) from wrong


_ROOM_HINT = "free space there, or name a folder with more in TMPDIR"


def _spool(read: Callable[[int], bytes], path: Path, name: str, max_bytes: int) -> None:
    """Write all that there is to read to a temporary file, if the disk can spare so much.

    Raises: TraceError at the first byte beyond that, or beyond max_bytes.
    """
    spare_bytes = int(shutil.disk_usage(path.parent).free * _FREE_SHARE)
    size = 0
    with path.open("wb") as file:
        while data := read(_CHUNK_BYTES):
            size += len(data)
            if size > max_bytes:
                raise TraceError(
                    f"{name} holds more than {max_bytes:,} bytes of plain data",
                    "if it is no file made to fill a disk, allow more with --max-unpacked",
                )
            if size > spare_bytes:
                raise TraceError(
                    f"{name} holds more plain data than {tempfile.gettempdir()} has room for: "
                    f"{spare_bytes:,} bytes to spare",
                    _ROOM_HINT,
                )
            file.write(data)


def _check_is_file(path: Path) -> None:
    if not path.exists():
        raise TraceError(f"{path}: no such file", "give the path of a recorded trace")
    if path.is_dir():
        raise TraceError(f"{path} is a directory, expected a file", "give one of its files")
    if not path.is_file():
        raise TraceError(f"{path} is not a regular file", "pipe it in, with - as the file")


def _check_fits(path: Path, name: str) -> None:
    """Refuse what no memory is there for, before it is read.

    Its columns take as much as the lines of a file or more: ours, 1.2 to 2.0 times as much was
    measured.
    """
    size, free = path.stat().st_size, free_bytes()
    if size > free:
        raise TraceError(
            f"{name} has {size / 1e9:.1f} GB, which takes as much memory or more, and "
            f"{free / 1e9:.1f} GB are free",
            "give a part of it, a day for example, or read it on a larger machine",
        )


@contextmanager
def _unpacked(path: Path, name: str, max_bytes: int) -> Iterator[Source]:
    _check_fits(path, name)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    head = _head(path)
    if head.startswith(_ZIP):
        raise TraceError(f"{name} is a zip archive", f"unpack it first: unzip {name}")
    if not head.startswith((_GZIP, _ZSTD)):
        yield _checked(Source(path, name, sha256, head))
        return
    with scratch_folder() as folder:
        plain = folder / (path.stem or "trace")
        with gzip.open(path) if head.startswith(_GZIP) else zstd.open(path) as packed:
            _spool(packed.read, plain, name, max_bytes)
        _check_fits(plain, name)
        _link_companions(path, plain)
        yield _checked(Source(plain, name, sha256, _head(plain)))


def _link_companions(path: Path, plain: Path) -> None:
    """Let a reader that needs the file beside a packed one find it beside the plain one."""
    for other in path.parent.glob(f"*{_COMPANION}"):
        (plain.parent / other.name).symlink_to(other.resolve())


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _checked(source: Source) -> Source:
    if not source.head:
        raise TraceError(f"{source.name} is empty", "record some traffic first")
    if source.head.startswith(_LFS_POINTER):
        reason = f"{source.name} is a Git-LFS pointer, not the data"
        raise TraceError(reason, "run: git lfs pull")
    return source


def is_private(paths: Iterable[Path | str]) -> bool:
    """Return whether others than its owner may not read one of the files.

    A recording is such a file: when people talk to a server is nobody's business.
    """
    named = [path for path in paths if str(path) != STDIN and Path(path).is_file()]
    return any(not Path(path).stat().st_mode & 0o077 for path in named)


def write_trace(trace: Trace, path: Path | str | None, *, secret: bool = False) -> None:
    """Write a trace as native JSON Lines; None and - are standard output.

    A file appears whole or not at all, and with `secret` to its owner alone.

    Raises: UsageError if the file cannot be written, or is named as another format is.
    """
    if path is None or path == "-":
        _write(trace, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    suffixes = [suffix.lower() for suffix in target.suffixes if suffix not in _PACKED]
    if suffixes and suffixes[-1] in _NOT_LINES:
        raise UsageError(
            f"{target}: a trace is written as JSON Lines, which its name does not say",
            "name it .jsonl, or .jsonl.gz or .jsonl.zst to have it packed",
        )
    hint = "name a file in a folder that exists and may be written to"
    with replacing(target, secret=secret, hint=hint) as file:
        if target.suffix == ".gz":
            # No name and no date inside: the same trace gives the same bytes.
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                _write(trace, packed)
        elif target.suffix == ".zst":
            with zstd.open(file, "wb") as packed:
                _write(trace, packed)
        else:
            _write(trace, file)


def _write(trace: Trace, file: _Bytes) -> None:
    encode = msgspec.json.Encoder().encode
    for row in native_rows(trace):
        file.write(encode(row) + b"\n")
