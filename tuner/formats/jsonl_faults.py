"""What is wrong with one line of JSON Lines, in words.

Only lines of blocks that failed the fast way in `jsonl` come here, so this may be slow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from tuner.formats.columns import line_error, shown, tokens_fault
from tuner.hashes import MISFIT_HINT, counts_fit, misfit_reason

MAX_CLOCK = 1e16
"""Ours: past it a double no longer holds whole milliseconds, and no calendar reaches it."""

CLOCK_HINT = "timestamp is in milliseconds, arrived_at_s in seconds; all lines use the same one"
ZERO_HINT = (
    "drop empty requests at recording, or pass --zero-output drop to count and drop them"
)
CHAT_ID_HINT = "if the timestamps are seconds, name the key arrived_at_s and drop chat_id"
WHOLE_HINT = (
    "Mooncake's timestamps are whole milliseconds: pass --trace-format native if yours have "
    "fractions, or name the key arrived_at_s if they are seconds"
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the first line and the options settle for the whole file."""

    clock: str
    block_size: int
    zero_is_fault: bool
    whole_ticks: bool

    @property
    def ticks_per_s(self) -> float:
        """Ticks of the file's clock in one second."""
        return 1000.0 if self.clock == "timestamp" else 1.0


def raise_first_fault(path: Path, first_line: int, block: bytes, dialect: Dialect) -> None:
    """Raise TraceError for the first wrong line of a block; return if all are right."""
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        if line.strip():
            row = parse_line(path, number, line)
            for reason, hint in _faults(row, dialect):
                raise line_error(path, number, reason, hint)


def parse_line(path: Path, number: int, line: bytes) -> dict[str, object]:
    """Return one line as a JSON object.

    Raises: TraceError if it is anything else.
    """
    hint = "give one JSON object per line, in UTF-8"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        reason = f"is not UTF-8: byte {cause.start + 1} is 0x{line[cause.start]:02x}"
        raise line_error(path, number, reason, hint) from cause
    except json.JSONDecodeError as cause:
        start = shown(line[:40].decode("utf-8", "replace"))
        reason = f"is not JSON: {cause.msg} at character {cause.pos + 1}, starts with {start}"
        raise line_error(path, number, reason, hint) from cause
    except RecursionError as cause:
        raise line_error(path, number, "is nested too deep", hint) from cause
    except ValueError as cause:  # Python reads no integer of more than 4,300 digits.
        raise line_error(path, number, "holds a number that is too long", hint) from cause
    if not isinstance(row, dict):
        raise line_error(path, number, f"must be a JSON object, got {shown(row)}", hint)
    return row


def _faults(row: dict[str, object], dialect: Dialect) -> Iterator[tuple[str, str]]:
    """Yield (reason, hint) of each fault of one row."""
    yield from _clock_faults(row, dialect)
    for name in ("input_length", "output_length"):
        if name not in row:
            yield f"lacks {name}", ""
        elif fault := tokens_fault(name, row[name], zero_is_fault=dialect.zero_is_fault):
            is_zero = row[name] == 0 and not isinstance(row[name], bool)
            yield fault, ZERO_HINT if is_zero else ""
    yield from _hash_faults(row, dialect)
    e2e_s = row.get("e2e_s")
    if e2e_s is not None and not (_is_number(e2e_s) and e2e_s >= 0):
        yield f"e2e_s must be a number of seconds, at least 0, got {shown(e2e_s)}", ""
    request_id = row.get("request_id")
    if isinstance(request_id, bool) or not isinstance(request_id, str | int | None):
        yield f"request_id must be text or a whole number, got {shown(request_id)}", ""


def _clock_faults(row: dict[str, object], dialect: Dialect) -> Iterator[tuple[str, str]]:
    if row.get("chat_id") is not None:
        yield "has a chat_id, as Bailian/Qwen files do, whose clock is in seconds", CHAT_ID_HINT
    other = "timestamp" if dialect.clock == "arrived_at_s" else "arrived_at_s"
    if row.get("timestamp") is not None and row.get("arrived_at_s") is not None:
        yield "carries both timestamp and arrived_at_s", CLOCK_HINT
    if row.get(other) is not None:
        yield f"carries {other}, but the first line {dialect.clock}", CLOCK_HINT
    if dialect.clock not in row:
        lacks = dialect.clock if other in row else f"{dialect.clock} or {other}"
        yield f"lacks {lacks}", CLOCK_HINT
        return
    value = row[dialect.clock]
    if not _is_number(value):
        yield f"{dialect.clock} must be a number, got {shown(value)}", CLOCK_HINT
    elif abs(value) > MAX_CLOCK:
        yield f"{dialect.clock} must be within ±{MAX_CLOCK:g}, got {shown(value)}", CLOCK_HINT
    elif dialect.whole_ticks and not isinstance(value, int):
        yield f"timestamp must be whole milliseconds, got {shown(value)}", WHOLE_HINT


def _hash_faults(row: dict[str, object], dialect: Dialect) -> Iterator[tuple[str, str]]:
    size = row.get("block_size")
    if size is not None and (isinstance(size, bool) or size != dialect.block_size):
        yield (
            f"block_size must be {dialect.block_size}, as before, got {shown(size)}",
            "block_size must be a whole number above 0 and stand on the first line",
        )
    ids = row.get("hash_ids")
    if ids is None:
        return
    if not isinstance(ids, list) or not all(_is_id(i) for i in ids):
        yield f"hash_ids must be a list of 64-bit whole numbers, got {shown(ids)}", ""
        return
    prompt = row.get("input_length")
    if isinstance(prompt, int) and tokens_fault("", prompt, zero_is_fault=False) is None:
        fits = counts_fit(np.array([len(ids)]), np.array([prompt]), dialect.block_size)
        if not fits[0] or (not ids and prompt >= dialect.block_size):
            yield misfit_reason(len(ids), prompt, dialect.block_size), MISFIT_HINT


def _is_id(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return -(1 << 63) <= value < 1 << 63


def _is_number(value: object) -> TypeGuard[int | float]:
    """Finite, not a boolean, and small enough to be a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() < 1000
