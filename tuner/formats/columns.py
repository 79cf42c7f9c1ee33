"""What a reader of one format hands over, and the limits that every reader keeps.

A reader turns one file into raw `Columns` in file order. Sorting, the zero of time and the
treatment of empty requests are the same for all formats and live in `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuner.errors import TraceError
from tuner.hashes import Floats, HashIds, Ints
from tuner.traces import ZeroOutput

MAX_TOKENS = 10_000_000
"""Ours: ten times the longest context served today; above it a unit or a column is wrong."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user decided about rows that can be read in more than one way."""

    zero_output: ZeroOutput = ZeroOutput.DROP


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The rows of one file in file order, lengths of 0 included.

    Arrivals stay in the file's own ticks, so that integer clocks are subtracted exactly.

    Shapes: every column is [n].
    Units: arrived in ticks from any origin; e2e_s in seconds, nan where missing.
    """

    arrived: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    ticks_per_s: float
    prompt_tokens: Ints
    output_tokens: Ints
    hashes: HashIds | None = None
    e2e_s: Floats | None = None
    request_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: its name, how to know it by its first bytes, and its reader.

    `matches` sees the first 64 KiB and must not raise. `read` raises TraceError for anything
    wrong in the file, with the line.
    """

    name: str
    matches: Callable[[bytes], bool]
    read: Callable[[Path, ReadOptions], Columns]


def line_error(path: Path, line: int, reason: str, hint: str = "") -> TraceError:
    """Return the error for one wrong line, in the form every reader uses."""
    return TraceError(f"{path} line {line}: {reason}", hint)


def tokens_fault(name: str, value: object, *, zero_is_fault: bool) -> str | None:
    """Say what is wrong with a token count, or None.

    >>> tokens_fault("input_length", 0, zero_is_fault=True)
    'input_length must be at least 1, got 0'
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} must be a whole number of tokens, got {shown(value)}"
    lowest = 1 if zero_is_fault else 0
    if value < lowest:
        return f"{name} must be at least {lowest}, got {shown(value)}"
    if value > MAX_TOKENS:
        return f"{name} must be at most {MAX_TOKENS:,} tokens, got {shown(value)}"
    return None


def tokens_are_plausible(column: Ints, *, zero_is_fault: bool) -> bool:
    """Say whether a whole column would pass `tokens_fault`; the fast way through good data."""
    lowest = 1 if zero_is_fault else 0
    return not column.size or bool(column.min() >= lowest and column.max() <= MAX_TOKENS)


def shown(value: object) -> str:
    """Return a value as a message may show it: short, and on one line."""
    text = f'"{ascii(value)[1:-1]}"' if isinstance(value, str) else _plain(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: object) -> str:
    """Spell JSON's words as JSON does; huge integers have no decimal text in Python."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    words = {"None": "null", "True": "true", "False": "false", "nan": "NaN"}
    text = repr(value)
    return words.get(text, text)
