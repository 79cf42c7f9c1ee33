"""JSON Lines one line at a time: the header of a file, and what is wrong with a line.

A header settles the dialect for the whole file. Wrong lines are refused, or counted where the
user chose to skip them; only blocks that failed the fast way come here, so this may be slow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import msgspec
import numpy as np

from tuner.traffic.concurrency import MAX_IN_FLIGHT, Concurrency
from tuner.traffic.formats.columns import Skipped, line_error, shown, tokens_fault
from tuner.traffic.prefixes import MAX_SIZE, MISFIT_HINT, misfit_reason
from tuner.traffic.traces import ClockOrigin, Remark, RemarkKind

MAX_CLOCK = 1e16
"""Ours: past it a double no longer holds whole milliseconds, and no calendar reaches it."""

CLOCK_HINT = "timestamp is in milliseconds, arrived_at_s in seconds; all lines use the same one"
TIMELESS_HINT = (
    f"{CLOCK_HINT}; what has neither can be replayed in a closed loop: write arrived_at_s 0 in "
    "every line, and pass --load-model closed --concurrency N"
)
ZERO_HINT = (
    "drop empty requests at recording, or pass --zero-output drop to count and drop them"
)
CHAT_ID_HINT = "pass --trace-format bailian if the timestamps are seconds, as in those files"
WHOLE_HINT = (
    "Mooncake's timestamps are whole milliseconds: pass --trace-format native if yours have "
    "fractions, or --trace-format bailian or timed-trace if they are seconds"
)
# All that msgspec raises for bytes that are not the JSON that was asked for.
WRONG_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_JSON_HINT = "give one JSON object per line, in UTF-8"

Fault = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the format, the first line and the options settle for the whole file.

    `clock` is the key of the arrival; `unit_is_usual` where nobody says what unit it has. Lines
    may state `stated_size`, any size where it is None: --hash-block-size overrides them. With
    `has_chats` chat_id and parent_chat_id tell the
    turns of a conversation; elsewhere a chat_id marks a clock in seconds, and is refused.
    """

    clock: str
    ticks_per_s: float
    block_size: int
    zero_is_fault: bool
    stated_size: int | None = None
    unit_is_usual: bool = False
    whole_ticks: bool = False
    has_chats: bool = False


def sift(first_line: int, block: bytes, dialect: Dialect, skipped: Skipped) -> bytes:
    """Return the right lines of a block; the wrong ones are an error, or counted.

    Raises: TraceError for the first wrong line, unless wrong lines are skipped.
    """
    right = []
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        row = parse_line(line)
        fault = row if isinstance(row, tuple) else next(_faults(row, dialect), None)
        fault = fault or _strict_fault(line)
        if fault is None:
            right.append(line)
        else:
            skipped.add(number, *fault)
    return b"\n".join(right)


def parse_line(line: bytes) -> dict[str, object] | Fault:
    """Return one line as a JSON object, or (reason, hint) if it is anything else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        return f"is not UTF-8: byte {cause.start + 1} is 0x{line[cause.start]:02x}", _JSON_HINT
    except json.JSONDecodeError as cause:
        start = shown(line[:40].decode("utf-8", "replace"))
        where = f"{cause.msg} at character {cause.pos + 1}"
        return f"is not JSON: {where}, starts with {start}", _JSON_HINT
    except RecursionError:
        return "is nested too deep", _JSON_HINT
    except ValueError:  # Python reads no integer of more than 4,300 digits.
        return "holds a number that is too long", _JSON_HINT
    if not isinstance(row, dict):
        return f"must be a JSON object, got {shown(row)}", _JSON_HINT
    return row


def _strict_fault(line: bytes) -> Fault | None:
    """Return what Python's json lets pass, under any key: NaN, and halves of characters."""
    try:
        msgspec.json.decode(line)
    except WRONG_JSON as cause:
        return f"is not JSON: {cause}", _JSON_HINT
    return None


def _faults(row: dict[str, object], dialect: Dialect) -> Iterator[Fault]:
    """Yield (reason, hint) of each fault of one row."""
    if KEY in row:
        yield f"is a second {KEY}: two recordings stand in this file", _JOINED_HINT
        return
    yield from _clock_faults(row, dialect)
    for name in ("input_length", "output_length"):
        if name not in row:
            yield f"lacks {name}", ""
        elif fault := tokens_fault(name, row[name], zero_is_fault=dialect.zero_is_fault):
            is_zero = row[name] == 0 and not isinstance(row[name], bool)
            yield fault, ZERO_HINT if is_zero else ""
    yield from _hash_faults(row, dialect)
    for name in ("e2e_s", "ttft_s", "pause_s"):
        value = row.get(name)
        if value is not None and not (_is_number(value) and value >= 0):
            yield f"{name} must be a number of seconds, at least 0, got {shown(value)}", ""
    after = row.get("after")
    if after is not None and (not _is_id(after) or after < -1):
        yield (
            f"after must be the number of an earlier row, from 0, or -1, got {shown(after)}",
            "",
        )
    for name in ("priority", "engine_index"):
        if (value := row.get(name)) is not None and not _is_id(value):
            yield f"{name} must be a 64-bit whole number, got {shown(value)}", ""
    yield from _text_faults(row, dialect)


def _text_faults(row: dict[str, object], dialect: Dialect) -> Iterator[Fault]:
    names = (
        ("request_id", "chat_id", "parent_chat_id") if dialect.has_chats else ("request_id",)
    )
    for name in names:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            yield f"{name} must be text or a whole number, got {shown(value)}", ""
    if not isinstance(row.get("model"), str | None):
        yield f"model must be text, got {shown(row['model'])}", ""


def _clock_faults(row: dict[str, object], dialect: Dialect) -> Iterator[Fault]:
    if row.get("chat_id") is not None and not dialect.has_chats:
        yield "has a chat_id, as Bailian/Qwen files do, whose clock is in seconds", CHAT_ID_HINT
    other = "timestamp" if dialect.clock == "arrived_at_s" else "arrived_at_s"
    if row.get("timestamp") is not None and row.get("arrived_at_s") is not None:
        yield "carries both timestamp and arrived_at_s", CLOCK_HINT
    if row.get(other) is not None:
        yield f"carries {other}, but the first line {dialect.clock}", CLOCK_HINT
    if dialect.clock not in row:
        if other in row:
            yield f"lacks {dialect.clock}", CLOCK_HINT
        else:
            yield f"lacks {dialect.clock} or {other}", TIMELESS_HINT
        return
    value = row[dialect.clock]
    if not _is_number(value):
        yield f"{dialect.clock} must be a number, got {shown(value)}", CLOCK_HINT
    elif abs(value) > MAX_CLOCK:
        yield f"{dialect.clock} must be within ±{MAX_CLOCK:g}, got {shown(value)}", CLOCK_HINT
    elif dialect.whole_ticks and not isinstance(value, int):
        yield f"timestamp must be whole milliseconds, got {shown(value)}", WHOLE_HINT


def _hash_faults(row: dict[str, object], dialect: Dialect) -> Iterator[Fault]:
    size, stated = row.get("block_size"), dialect.stated_size
    if size is not None and (not _is_id(size) or size != (stated or size)):
        yield (
            f"block_size must be {stated or 'a number'}, as before, got {shown(size)}",
            "block_size must be a whole number above 0 and stand on the first line",
        )
    if row.get("hash_ids") is not None:
        yield from ids_faults(row["hash_ids"], row.get("input_length"), dialect.block_size)


def ids_faults(ids: object, prompt: object, block_size: int) -> Iterator[Fault]:
    """Yield what is wrong with a request's hash ids: their type, and how many there are."""
    is_whole = isinstance(ids, list) and all(type(one) is int for one in ids)
    if not isinstance(ids, list) or not is_whole or not _fit_64_bits(ids):
        yield f"hash_ids must be a list of 64-bit whole numbers, got {shown(ids)}", ""
    elif isinstance(prompt, int) and tokens_fault("", prompt, zero_is_fault=False) is None:
        extra = len(ids) - prompt // block_size
        if extra != 0 and not (extra == 1 and prompt % block_size):
            yield misfit_reason(len(ids), prompt, block_size), MISFIT_HINT


def _fit_64_bits(ids: list[int]) -> bool:
    return not ids or (min(ids) >= -(1 << 63) and max(ids) < 1 << 63)


def _is_id(value: object) -> TypeGuard[int]:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return -(1 << 63) <= value < 1 << 63


def _is_number(value: object) -> TypeGuard[int | float]:
    """Finite, not a boolean, and small enough to be a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() < 1000


KEY = "trace_header"
VERSION = 1
_JOINED_HINT = "name both files in place of one that joins them: tune trace merge A B -o C"
_HINT = f'the first line may be {{"{KEY}": {{"version": {VERSION}, ...}}}}, see the README'


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a native trace says of itself.

    In a file `lacks` names what the recording could not know; it is read as remarks. `aborted`
    counts rows whose answers had been cut short before the file was converted. The clock showed
    `starts_at_s` when the recording began, perhaps before its first request; None: with it.
    """

    block_size: int | None = None
    origin: ClockOrigin = ClockOrigin.OWN
    hash_scope: str = ""
    sampled_from: str = ""
    concurrency: Concurrency | None = None
    starts_at_s: float | None = None
    remarks: tuple[str | Remark, ...] = ()
    aborted: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the header's object, without what is as usual."""
        flow, starts_at_s = self.concurrency, self.starts_at_s
        content = {
            "version": VERSION,
            "block_size": self.block_size,
            "clock": None if self.origin is ClockOrigin.OWN else str(self.origin),
            "hash_scope": self.hash_scope or None,
            "sampled_from": self.sampled_from or None,
            "in_flight": flow
            and list(zip(flow.times_s.tolist(), flow.in_flight.tolist(), strict=True)),
            "starts_at_s": None if starts_at_s is None else round(starts_at_s, 9),
            "remarks": [_in_file(Remark.of(remark)) for remark in self.remarks] or None,
            "aborted": self.aborted or None,
        }
        return {key: value for key, value in content.items() if value is not None}


def take_header(
    path: Path, first_line: int, data: bytes, skipped: Skipped
) -> tuple[Header | None, bytes, dict[str, object] | None]:
    """Return the header, the block with all before the first request blanked, and its row.

    The header is None if there is none, the row if the block holds no request. Where wrong
    lines are skipped, the first request is the first line that has a clock and lengths.

    Raises: TraceError if the header or the first row is wrong.
    """
    header: Header | None = None
    start, number = 0, first_line
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        line = data[start:end]
        if line.strip():
            row = parse_line(line.rstrip(b"\n"))
            if isinstance(row, tuple):
                skipped.add(number, *row)
            elif header is None and KEY in row:
                header = _read(path, number, row[KEY])
            elif skipped.is_allowed and not _is_request(row):
                skipped.add(number, "lacks a clock or a length", CLOCK_HINT)
            else:
                return header, b"\n" * (number - first_line) + data[start:], row
        start, number = end, number + 1
    return header, b"", None


def _is_request(row: Mapping[str, object]) -> bool:
    has_clock = "timestamp" in row or "arrived_at_s" in row
    return has_clock and "input_length" in row and "output_length" in row


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
    flow, starts_at_s = value.get("in_flight"), value.get("starts_at_s")
    if starts_at_s is not None and not (
        _is_number(starts_at_s) and abs(starts_at_s) <= MAX_CLOCK
    ):
        raise ValueError(f"starts_at_s must be a number of seconds, got {shown(starts_at_s)}")
    clock = value.get("clock", ClockOrigin.OWN)
    if clock not in set(ClockOrigin):
        raise ValueError(f"clock must be wall, shared or own, got {shown(clock)}")
    return Header(
        block_size=size,
        origin=ClockOrigin(str(clock)),
        hash_scope=str(value.get("hash_scope") or ""),
        sampled_from=str(value.get("sampled_from", "")),
        concurrency=None if flow is None else _concurrency(flow),
        starts_at_s=None if starts_at_s is None else float(starts_at_s),
        remarks=(*_remarks(value), *_lacks(value)),
        aborted=aborted or 0,
    )


def _whole(value: Mapping[str, object], key: str, least: int) -> int | None:
    number = value.get(key)
    if number is None:
        return None
    if not _is_id(number) or not least <= number < MAX_SIZE:
        above = f"{'above 0' if least else 'at least 0'} and below {MAX_SIZE:,}"
        raise ValueError(f"{key} must be a whole number {above}, got {shown(number)}")
    return number


def _in_file(remark: Remark) -> object:
    if remark.kind is RemarkKind.TOLD:
        return remark.text
    return {"text": remark.text, "kind": str(remark.kind)}


def _remarks(value: Mapping[str, object]) -> Iterator[Remark]:
    """Yield the remarks of a header: texts, or objects that say what is decided by them."""
    remarks = value.get("remarks", [])
    if not isinstance(remarks, list):
        raise TypeError(f"remarks must be a list, got {shown(remarks)}")
    for each in remarks:
        match each:
            case str():
                yield Remark(each)
            case {"text": str() as text, "kind": str() as kind} if kind in set(RemarkKind):
                yield Remark(text, RemarkKind(kind))
            case _:
                raise ValueError(f"remarks must be texts, or text and kind, got {shown(each)}")


def _lacks(value: Mapping[str, object]) -> list[str]:
    """Return what the recording could not know, as remarks."""
    words = value.get("lacks", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"lacks must be a list of texts, got {shown(words)}")
    return [f"the recording lacks {word}" for word in words]


def _concurrency(flow: object) -> Concurrency:
    pairs = np.asarray(flow, dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError("in_flight must be a list of [seconds, requests]")
    # Written as what is right, so that nan is not.
    is_right = ((pairs >= 0) & (pairs <= (MAX_CLOCK, MAX_IN_FLIGHT))).all(axis=1)
    if not is_right.all():
        wrong = pairs[~is_right][0].tolist()
        raise ValueError(
            f"in_flight must be of at most {MAX_IN_FLIGHT:,} requests, from 0 to {MAX_CLOCK:g} "
            f"seconds, got {shown(wrong)}"
        )
    return Concurrency(pairs[:, 0].copy(), pairs[:, 1].astype(np.int64))
