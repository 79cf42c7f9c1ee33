"""What is wrong with one line of JSON Lines, in words.

Only lines of blocks that failed the fast way in `jsonl` come here, so this may be slow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from tuner.formats.columns import shown, tokens_fault
from tuner.formats.skipping import Skipped
from tuner.hashes import MISFIT_HINT, counts_fit, misfit_reason

MAX_CLOCK = 1e16
"""Ours: past it a double no longer holds whole milliseconds, and no calendar reaches it."""

CLOCK_HINT = "timestamp is in milliseconds, arrived_at_s in seconds; all lines use the same one"
ZERO_HINT = (
    "drop empty requests at recording, or pass --zero-output drop to count and drop them"
)
CHAT_ID_HINT = "pass --trace-format bailian if the timestamps are seconds, as in those files"
WHOLE_HINT = (
    "Mooncake's timestamps are whole milliseconds: pass --trace-format native if yours have "
    "fractions, or --trace-format bailian or timed-trace if they are seconds"
)
_JSON_HINT = "give one JSON object per line, in UTF-8"

Fault = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the format, the first line and the options settle for the whole file.

    `clock` is the key of the arrival. With `has_chats` chat_id and parent_chat_id tell the
    turns of a conversation; elsewhere a chat_id marks a clock in seconds, and is refused.
    """

    clock: str
    ticks_per_s: float
    block_size: int
    zero_is_fault: bool
    whole_ticks: bool = False
    has_chats: bool = False


def sift(first_line: int, block: bytes, dialect: Dialect, skipped: Skipped) -> bytes:
    """Return the right lines of a block; the wrong ones are an error, or counted.

    Raises: TraceError for the first wrong line, unless wrong lines are skipped.
    """
    kept = []
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        row = parse_line(line)
        fault = row if isinstance(row, tuple) else next(_faults(row, dialect), None)
        if fault is None:
            kept.append(line)
        else:
            skipped.add(number, *fault)
    return b"\n".join(kept)


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


def _faults(row: dict[str, object], dialect: Dialect) -> Iterator[Fault]:
    """Yield (reason, hint) of each fault of one row."""
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
    if after is not None and (not _is_id(after) or after < 0):
        yield f"after must be the number of an earlier row, from 0, got {shown(after)}", ""
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


def _hash_faults(row: dict[str, object], dialect: Dialect) -> Iterator[Fault]:
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


def _is_id(value: object) -> TypeGuard[int]:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return -(1 << 63) <= value < 1 << 63


def _is_number(value: object) -> TypeGuard[int | float]:
    """Finite, not a boolean, and small enough to be a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() < 1000
