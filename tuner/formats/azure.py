"""Azure's CSV of 2023: TIMESTAMP, ContextTokens, GeneratedTokens, on a wall clock without zone.

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace_{code,conv}.csv.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import TraceError
from tuner.formats.columns import (
    Columns,
    ReadOptions,
    TraceFormat,
    line_error,
    shown,
    tokens_are_plausible,
    tokens_fault,
)
from tuner.traces import ZeroOutput

if TYPE_CHECKING:
    import polars as pl

TIME, PROMPT, OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"

_TIME_PATTERN = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?")
_CLOCK_HINT = "only a clock without T and without zone is read; take both out"
_EARLIEST, _LATEST = "1970", "2200"
"""Ours: nanoseconds since 1970 in 64 bits end in 2262, and polars wraps silently past it."""


def matches(head: bytes) -> bool:
    """Say whether the header names the clock and at least one of the token columns."""
    names = _names(head.split(b"\n", 1)[0].decode("utf-8", "replace"))
    return TIME in names and (PROMPT in names or OUTPUT in names)


def _names(header: str) -> list[str]:
    header = header.removeprefix("\ufeff").strip().replace("\r", " ")
    row = next(csv.reader([header]), [])
    return [name.strip() for name in row]


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns, streamed and parsed in bulk.

    Raises: TraceError that names the first wrong line.
    """
    # polars takes longer to import than `tune --help` may take, and only CSV needs it.
    import polars as pl

    where = _locate(path)
    zero_is_fault = options.zero_output is ZeroOutput.REFUSE
    try:
        frame = _scan(path, where)
    except pl.exceptions.PolarsError as cause:
        _raise_first_fault(path, where, zero_is_fault=zero_is_fault)
        why = shown(str(cause).partition("\n")[0])
        raise TraceError(f"{path} is not CSV that we can read: polars says {why}") from cause
    if not frame.height:
        raise TraceError(f"{path} has a header but no requests", "record some traffic first")
    has_gap = any(frame[name].null_count() for name in (TIME, PROMPT, OUTPUT))
    prompt, output = (frame[name].to_numpy() for name in (PROMPT, OUTPUT))
    if has_gap or not all(
        tokens_are_plausible(column, zero_is_fault=zero_is_fault) for column in (prompt, output)
    ):
        _raise_first_fault(path, where, zero_is_fault=zero_is_fault)
        raise TraceError(f"{path} holds a row that is not a valid request")
    return Columns(frame[TIME].to_numpy(), 1e9, prompt, output)


def _locate(path: Path) -> Mapping[str, int]:
    """Return the place of each needed column in the header."""
    with path.open("rb") as file:
        names = _names(file.readline(1 << 16).decode("utf-8", "replace"))
    for name in (TIME, PROMPT, OUTPUT):
        if names.count(name) != 1:
            found = shown(", ".join(names))
            raise line_error(path, 1, f"must have one column {name}, got {found}")
    return {name: names.index(name) for name in (TIME, PROMPT, OUTPUT)}


def _scan(path: Path, where: Mapping[str, int]) -> pl.DataFrame:
    """Read three columns of 64-bit integers, null where a value is wrong; skip blank rows."""
    import polars as pl  # Lazy for the reason given in `read`.

    lazy = pl.scan_csv(path, infer_schema=False, encoding="utf8-lossy")
    header = lazy.collect_schema().names()
    if len(header) <= max(where.values()):
        raise line_error(path, 1, "has quotes that do not close")
    raw = {name: pl.col(header[place]).str.strip_chars() for name, place in where.items()}
    is_blank = pl.all_horizontal(pl.col(name).is_null() for name in header)
    moment = raw[TIME].str.to_datetime("%Y-%m-%d %H:%M:%S%.f", strict=False, time_unit="ns")
    in_range = raw[TIME].is_between(pl.lit(_EARLIEST), pl.lit(_LATEST))
    return (
        lazy.filter(~is_blank)
        .select(
            pl.when(in_range).then(moment).dt.timestamp("ns").alias(TIME),
            raw[PROMPT].cast(pl.Int64, strict=False).alias(PROMPT),
            raw[OUTPUT].cast(pl.Int64, strict=False).alias(OUTPUT),
        )
        .collect(engine="streaming")
    )


def _raise_first_fault(path: Path, where: Mapping[str, int], *, zero_is_fault: bool) -> None:
    """Read row by row and raise for the first wrong line; slow, and only for wrong files."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.reader(file)
        try:
            width = len(next(rows))
            for row in rows:
                if row and (fault := _fault(row, width, where, zero_is_fault=zero_is_fault)):
                    hint = _CLOCK_HINT if fault.startswith(TIME) else ""
                    raise line_error(path, rows.line_num, fault, hint)
        except csv.Error as cause:
            raise line_error(path, rows.line_num, f"is not CSV: {cause}") from cause


def _fault(
    row: list[str], width: int, where: Mapping[str, int], *, zero_is_fault: bool
) -> str | None:
    if len(row) != width:
        return f"must have {width} fields, got {len(row)}"
    if fault := _time_fault(row[where[TIME]].strip()):
        return fault
    for name in (PROMPT, OUTPUT):
        text = row[where[name]].strip()
        value: object = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text
        if fault := tokens_fault(name, value, zero_is_fault=zero_is_fault):
            return fault
    return None


def _time_fault(text: str) -> str | None:
    expected = f"{TIME} must look like 2023-11-16 18:17:03.9799600, got {shown(text)}"
    match = _TIME_PATTERN.fullmatch(text)
    if match is None or not _EARLIEST <= text <= _LATEST:
        return expected
    try:
        datetime.fromisoformat(match[1])
    except ValueError:
        return expected
    return None


AZURE_2023 = TraceFormat(name="azure2023", matches=matches, read=read)
