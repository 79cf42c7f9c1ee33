"""The header line that a native trace may begin with: what holds for all of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.concurrency import Concurrency
from tuner.formats.columns import line_error, shown
from tuner.formats.jsonl_faults import parse_line
from tuner.traces import ClockOrigin

KEY = "trace_header"
VERSION = 1
_HINT = f'the first line may be {{"{KEY}": {{"version": {VERSION}, ...}}}}, see the README'


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a native trace says of itself.

    In a file `lacks` names what the recording could not know; it is read as remarks. `aborted`
    counts rows whose answers had been cut short before the file was converted.
    """

    block_size: int | None = None
    origin: ClockOrigin = ClockOrigin.OWN
    hash_scope: str = ""
    sampled_from: str = ""
    concurrency: Concurrency | None = None
    remarks: tuple[str, ...] = ()
    aborted: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the header's object, without what is as usual."""
        found: dict[str, object] = {"version": VERSION}
        if self.block_size is not None:
            found["block_size"] = self.block_size
        if self.origin is not ClockOrigin.OWN:
            found["clock"] = str(self.origin)
        if self.hash_scope:
            found["hash_scope"] = self.hash_scope
        if self.sampled_from:
            found["sampled_from"] = self.sampled_from
        if self.concurrency is not None:
            times_s, levels = self.concurrency.times_s, self.concurrency.in_flight
            found["in_flight"] = [
                [t, n] for t, n in zip(times_s.tolist(), levels.tolist(), strict=True)
            ]
        if self.remarks:
            found["remarks"] = list(self.remarks)
        if self.aborted:
            found["aborted"] = self.aborted
        return found


def take_header(
    path: Path, first_line: int, data: bytes
) -> tuple[Header | None, bytes, dict[str, object] | None]:
    """Return the header, the block with its line blanked, and the first request's row.

    The header is None if there is none, the row if the block holds no more than the header.

    Raises: TraceError if the header or the first row is wrong.
    """
    header: Header | None = None
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        line = data[start:end]
        number = first_line + data.count(b"\n", 0, start)
        if line.strip():
            row = parse_line(line.rstrip(b"\n"))
            if isinstance(row, tuple):
                raise line_error(path, number, *row)
            if header is not None or KEY not in row:
                return header, data, row
            header = _read(path, number, row[KEY])
            data = data[:start] + line[len(line.rstrip(b"\r\n")) :] + data[end:]
            end = data.find(b"\n", start) + 1 or len(data)
        start = end
    return header, data, None


def _read(path: Path, number: int, value: object) -> Header:
    """Check and return a header. Raises: TraceError."""
    if not isinstance(value, Mapping):
        raise line_error(path, number, f"{KEY} must be an object, got {shown(value)}", _HINT)
    version = value.get("version")
    if version != VERSION or isinstance(version, bool):
        reason = f"{KEY} must have version {VERSION}, got {shown(version)}"
        raise line_error(path, number, reason, "convert it with the tuner that wrote it")
    try:
        return _header(value)
    except (ValueError, TypeError, OverflowError) as cause:
        raise line_error(path, number, f"{KEY}: {cause}", _HINT) from cause


def _header(value: Mapping[str, object]) -> Header:
    """Return the header. Raises: ValueError or TypeError that says what is wrong."""
    size = _whole(value, "block_size", least=1)
    aborted = _whole(value, "aborted", least=0)
    flow = value.get("in_flight")
    clock = value.get("clock", ClockOrigin.OWN)
    if clock not in set(ClockOrigin):
        raise ValueError(f"clock must be wall, shared or own, got {shown(clock)}")
    return Header(
        block_size=size,
        origin=ClockOrigin(str(clock)),
        hash_scope=str(value.get("hash_scope") or ""),
        sampled_from=str(value.get("sampled_from", "")),
        concurrency=None if flow is None else _concurrency(flow),
        remarks=(*_words(value, "remarks"), *(_lack(w) for w in _words(value, "lacks"))),
        aborted=aborted or 0,
    )


def _whole(value: Mapping[str, object], key: str, least: int) -> int | None:
    found = value.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        above = "at least 0" if not least else "above 0"
        raise ValueError(f"{key} must be a whole number {above}, got {shown(found)}")
    return found


def _lack(word: str) -> str:
    return f"the recording lacks {word}"


def _words(value: Mapping[str, object], key: str) -> tuple[str, ...]:
    found = value.get(key, [])
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ValueError(f"{key} must be a list of texts, got {shown(found)}")
    return tuple(found)


def _concurrency(flow: object) -> Concurrency:
    pairs = np.asarray(flow, dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError("in_flight must be a list of [seconds, requests]")
    return Concurrency(pairs[:, 0].copy(), pairs[:, 1].astype(np.int64))
