"""Whole JSON documents: read at once, and their wrong parts named by what they are.

A document has no lines that a reader could count, so faults say "request 17" or "span 3" in
place of a line.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from tuner.errors import TraceError
from tuner.traffic.formats.columns import BYTE_ORDER_MARK, shown
from tuner.traffic.formats.jsonl_rows import WRONG_JSON, parse_line

MAX_DOCUMENT_BYTES = 1 << 30
"""Ours: a document takes several times its size in memory while it is read."""

MAX_SECONDS = 1e9
"""Ours: thirty years; a longer stretch of time is in another unit."""

JSON_HINT = "give the JSON in UTF-8 as it was published or exported"


def read_object(path: Path) -> dict[str, object]:
    """Return the one JSON object that a file holds.

    Raises: TraceError if it is anything else, or too large to be read at once.
    """
    data = read_bytes(path)
    try:
        document = msgspec.json.decode(data)
    except WRONG_JSON as cause:
        raise TraceError(f"{path} {why_wrong(data, cause)}", JSON_HINT) from cause
    if not isinstance(document, dict):
        raise TraceError(f"{path} must be a JSON object, got {shown(document)}", JSON_HINT)
    return document


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes, without a byte order mark. Raises: TraceError if too many."""
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise TraceError(
            f"{path} must be at most {MAX_DOCUMENT_BYTES >> 20:,} MiB as one JSON document, "
            f"got {size >> 20:,} MiB",
            "write one JSON object per line, or cut it into several files",
        )
    return path.read_bytes().removeprefix(BYTE_ORDER_MARK)


def why_wrong(data: bytes, cause: Exception) -> str:
    """Return why bytes are not the JSON that was expected; `cause` is what the decoder said."""
    parsed = parse_line(data)
    return parsed[0] if isinstance(parsed, tuple) else f"is not as expected: {cause}"


def number_or_nan(value: object) -> float:
    """Return a checked number; a missing one is nan."""
    return float(value) if isinstance(value, int | float) else math.nan


def seconds_fault(name: str, value: object) -> str | None:
    """Return what is wrong with a stretch of time, or None.

    >>> seconds_fault("api_time", -1)
    'api_time must be a number of seconds, at least 0, got -1'
    """
    # `not >=` catches nan too, and works on integers that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        return f"{name} must be a number of seconds, at least 0, got {shown(value)}"
    if value > MAX_SECONDS:
        return f"{name} must be at most {MAX_SECONDS:,.0f} seconds, got {shown(value)}"
    return None
