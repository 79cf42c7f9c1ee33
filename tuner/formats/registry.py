"""The formats that can be read, and the one way in for all of them.

A new format is a module with one `TraceFormat` and its line in `FORMATS`, before the formats
that would also accept its first bytes. Compressed files and standard input fit in front of
`_checked_head`, by spooling to a file; third-party formats fit behind `FORMATS`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tuner.errors import TraceError, UsageError
from tuner.formats.assemble import assemble
from tuner.formats.azure import AZURE_2023
from tuner.formats.columns import ReadOptions, TraceFormat, shown
from tuner.formats.mooncake import MOONCAKE
from tuner.formats.native import NATIVE
from tuner.traces import Trace

FORMATS: tuple[TraceFormat, ...] = (AZURE_2023, MOONCAKE, NATIVE)
"""In the order of detection; native takes every JSON object, so it stands last."""

HEAD_BYTES = 1 << 16
"""Ours: the first line of a request of a million tokens in blocks of 128 fits."""

_LFS_POINTER = b"version https://git-lfs"
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}


def format_names() -> tuple[str, ...]:
    """Return the names that --trace-format takes, in the order of detection."""
    return tuple(known.name for known in FORMATS)


def read_trace(
    path: Path | str,
    format: str | None = None,  # noqa: A002 the user's own word, as in --trace-format
    options: ReadOptions | None = None,
) -> Trace:
    """Return the trace in a file, in the given format or in the one its first bytes show.

    Raises: TraceError if the file or a line of it is wrong; UsageError for an unknown name.
    """
    path = Path(path)
    options = options if options is not None else ReadOptions()
    try:
        head = _checked_head(path)
        chosen = _named(format) if format is not None else _detected(path, head)
        columns = chosen.read(path, options)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as cause:
        reason = f"{path} cannot be read: {cause.strerror or 'the system refused'}"
        raise TraceError(reason, "check the path and its rights") from cause
    return assemble(
        columns, options.zero_output, source=path.name, format_name=chosen.name, sha256=sha256
    )


def _checked_head(path: Path) -> bytes:
    """Return the first bytes of a file that can hold a trace."""
    if not path.exists():
        raise TraceError(f"{path}: no such file", "give the path of a recorded trace")
    if path.is_dir():
        raise TraceError(f"{path} is a directory, expected a file", "give one of its files")
    if not path.is_file():
        raise TraceError(f"{path} is not a regular file", "save the trace to a file first")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        raise TraceError(f"{path} is empty", "record some traffic first")
    if head.startswith(_LFS_POINTER):
        raise TraceError(f"{path} is a Git-LFS pointer, not the data", "run: git lfs pull")
    for magic, tool in _COMPRESSED.items():
        if head.startswith(magic):
            raise TraceError(f"{path} is compressed", f"unpack it first: {tool} {path.name}")
    return head


def _named(name: str) -> TraceFormat:
    for known in FORMATS:
        if known.name == name:
            return known
    raise UsageError(
        f"trace format must be one of {', '.join(format_names())}, got {shown(name)}"
    )


def _detected(path: Path, head: bytes) -> TraceFormat:
    for known in FORMATS:
        if known.matches(head):
            return known
    start = shown(head[:40].decode("utf-8", "replace"))
    raise TraceError(
        f"{path} is in no format we know ({', '.join(format_names())}): it starts with {start}",
        "convert it to JSON Lines with arrived_at_s, input_length and output_length",
    )
