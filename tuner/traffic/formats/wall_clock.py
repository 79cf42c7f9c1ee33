"""Wall clocks in text: with T or a space, with a zone or without, up to nine fractional digits.

Source: the five spellings that published traces use; a clock without zone is taken for UTC.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tuner.traffic.formats.columns import shown

if TYPE_CHECKING:
    import polars as pl

_EARLIEST, _LATEST = "1970", "2200"
"""Ours: nanoseconds since 1970 in 64 bits end in 2262, and polars wraps silently past it."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PATTERN = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def nanoseconds_of(text: str) -> int:
    """Return nanoseconds since 1970 of a wall clock. Raises: ValueError if it is none.

    >>> nanoseconds_of("1970-01-01T00:00:01.000000002")
    1000000002
    """
    match = _PATTERN.fullmatch(text)
    if match is None or not _EARLIEST <= text <= _LATEST:
        raise ValueError(text)
    at = datetime.fromisoformat(f"{match[1]}T{match[2]}{match[4] or ''}")
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    digits = (match[3] or "").removeprefix(".").ljust(9, "0")
    return (at - _EPOCH) // timedelta(seconds=1) * 1_000_000_000 + int(digits)


def wall_clock_fault(name: str, text: str) -> str | None:
    """Return what is wrong with a wall clock, or None.

    >>> wall_clock_fault("TIMESTAMP", "2024-05-10 00:00:00+00:00") is None
    True
    """
    try:
        nanoseconds_of(text)
    except ValueError:
        return f"{name} must look like 2023-11-16 18:17:03.9799600, got {shown(text)}"
    return None


def nanoseconds(column: pl.Expr, example: str | None) -> pl.Expr:
    """Return nanoseconds since 1970 of a text column, null where a clock is wrong.

    Given an example only its spelling is understood, which is several times as fast.
    """
    import polars as pl  # it takes longer to import than `tune --help` may take

    text = column.str.strip_chars()
    in_range = text.is_between(pl.lit(_EARLIEST), pl.lit(_LATEST))
    plain = text.str.strip_suffix("Z").str.strip_suffix("+00:00")
    marks = (" ", "T") if example is None else ("T" if "T" in example else " ",)
    parsed = [
        plain.str.to_datetime(f"%Y-%m-%d{mark}%H:%M:%S%.f", strict=False, time_unit="ns")
        for mark in marks
    ]
    if example is None:
        # With %z the result has a zone; both kinds are instants in UTC.
        parsed += [
            text.str.to_datetime(f"%Y-%m-%d{mark}%H:%M:%S%.f%z", strict=False, time_unit="ns")
            .dt.convert_time_zone("UTC")
            .dt.replace_time_zone(None)
            for mark in marks
        ]
    return pl.when(in_range).then(pl.coalesce(parsed)).dt.timestamp("ns")
