"""Where traces go: a file, packed if its name says so, or standard output."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import IO

import msgspec
import zstandard

from tuner.errors import UsageError
from tuner.formats.native import native_rows
from tuner.traces import Trace


def write_trace(trace: Trace, path: Path | str | None) -> None:
    """Write a trace as native JSON Lines; None and - are standard output.

    A file appears whole or not at all.

    Raises: UsageError if the file cannot be written.
    """
    if path is None or path == "-":
        _write(trace, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("wb") as file:
            if target.suffix == ".gz":
                # No name and no date inside: the same trace gives the same bytes.
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                    _write(trace, packed)
            elif target.suffix == ".zst":
                with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
                    _write(trace, stream)
            else:
                _write(trace, file)
        part.replace(target)
    except OSError as cause:
        part.unlink(missing_ok=True)
        raise UsageError(
            f"{path} cannot be written: {cause.strerror or 'the system refused'}",
            "name a file in a folder that exists and may be written to",
        ) from cause


def _write(trace: Trace, file: IO[bytes] | gzip.GzipFile) -> None:
    encode = msgspec.json.Encoder().encode
    for row in native_rows(trace):
        file.write(encode(row) + b"\n")
