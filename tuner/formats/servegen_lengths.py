"""ServeGen's data sets: histograms of token counts, six hours each, as text of Python dicts.

Answers which lengths are in force at a time. Drawing from them is left to `servegen_draw`.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tuner.errors import TraceError
from tuner.formats.columns import shown, tokens_fault
from tuner.formats.csv_table import MAX_SECONDS
from tuner.formats.servegen_draw import Histogram, Lengths

TRACE_SUFFIX, DATASET_SUFFIX = "-trace.csv", "-dataset.json"
TEXT, MULTIMODAL, OUTPUT = "input_tokens", "text_tokens", "output_tokens"

MAX_BYTES = 1 << 26
"""Ours: two hundred times the largest published data set."""

MAX_HISTOGRAM_CHARS = 1 << 20
"""Ours: thirty thousand token counts with their probabilities, several times the published."""

_SUM_TOLERANCE = 0.01
"""Ours: published sums are 1 to nine digits; a histogram that was cut off misses more."""

_PAIR = r"[0-9]+\s*:\s*[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_DICT = re.compile(rf"\{{\s*(?:{_PAIR}\s*(?:,\s*{_PAIR}\s*)*(?:,\s*)?)?\}}")


@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """The histograms of one client in order of time; None where they are empty.

    Shapes: starts_s and lengths are [n], n >= 1.
    Units: seconds on the clock that all clients share.
    """

    name: str
    starts_s: tuple[float, ...]
    lengths: tuple[Lengths | None, ...]
    is_multimodal: bool

    def at(self, at_s: float) -> tuple[Lengths | None, bool]:
        """Return the last lengths at or before a time, and whether that window has its own.

        Empty histograms are passed over, as ServeGen's own reader does.
        """
        newest = bisect_right(self.starts_s, at_s) - 1
        for place in range(newest, -1, -1):
            if (lengths := self.lengths[place]) is not None:
                return lengths, place == newest
        return None, False

    def refuse_zero(self, at_s: float) -> None:
        """Refuse lengths of 0 tokens at a time. Raises: TraceError."""
        lengths, _ = self.at(at_s)
        if lengths is None:
            return
        prompt = MULTIMODAL if self.is_multimodal else TEXT
        for field, histogram in ((prompt, lengths.prompt), (OUTPUT, lengths.output)):
            if histogram.tokens[0] == 0:
                raise TraceError(
                    f"{self.name}: {field} in force at second {at_s:g} must be at least 1, "
                    f"got 0 with a probability of {histogram.cumulative[0]:.3g}",
                    "pass --zero-output drop, or one to keep empty answers",
                )


def dataset_beside(path: Path) -> Path:
    """Return the data set of a client's rates. Raises: TraceError if there is none."""
    expected = f"chunk-N{DATASET_SUFFIX}"
    if path.name.endswith(TRACE_SUFFIX):
        found = path.with_name(path.name.removesuffix(TRACE_SUFFIX) + DATASET_SUFFIX)
        if found.is_file():
            return found
        expected = found.name
    raise TraceError(
        f"{path} holds rates without lengths, and no {expected} lies beside it",
        f"keep both files of a client in one folder, named chunk-N{TRACE_SUFFIX} and "
        f"chunk-N{DATASET_SUFFIX}",
    )


def read_dataset(path: Path) -> DataSet:
    """Return the histograms of a client.

    Raises: TraceError that names the window and the field.
    """
    if path.stat().st_size > MAX_BYTES:
        raise TraceError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise TraceError(
            f"{path.name} must map windows to named histograms: {shown(str(cause))}",
            "fetch it again, and check that it is no Git-LFS pointer",
        ) from cause
    if not found:
        raise TraceError(f"{path.name} holds no windows", "fetch it again")
    is_multimodal = all(MULTIMODAL in fields for fields in found.values())
    by_start = {_start_s(path.name, key): fields for key, fields in found.items()}
    starts_s = tuple(sorted(by_start))
    lengths = tuple(
        _lengths(
            f"{path.name} window {start_s:.0f}", by_start[start_s], is_multimodal=is_multimodal
        )
        for start_s in starts_s
    )
    return DataSet(path.name, starts_s, lengths, is_multimodal)


def _start_s(name: str, key: str) -> float:
    try:
        start_s = float(key)
    except ValueError:
        start_s = float("nan")
    if not abs(start_s) <= MAX_SECONDS:
        raise TraceError(f"{name}: windows must start at a number of seconds, got {shown(key)}")
    return start_s


def _lengths(where: str, fields: dict[str, str], *, is_multimodal: bool) -> Lengths | None:
    """Return both histograms, or None if one of them is empty."""
    found = []
    for field in (MULTIMODAL if is_multimodal else TEXT, OUTPUT):
        if field not in fields:
            raise TraceError(f"{where} lacks {field}, got {shown(', '.join(fields))}")
        found.append(_histogram(f"{where}: {field}", fields[field]))
    prompt, output = found
    return Lengths(prompt, output) if prompt is not None and output is not None else None


def _histogram(where: str, text: str) -> Histogram | None:
    """Return a histogram, or None for an empty one."""
    if len(text) > MAX_HISTOGRAM_CHARS:
        raise TraceError(f"{where} is longer than {MAX_HISTOGRAM_CHARS:,} characters")
    try:
        pairs = ast.literal_eval(text) if _DICT.fullmatch(text) else None
        mass = np.array([float(value) for value in pairs.values()]) if pairs else None
    except (ValueError, SyntaxError, OverflowError) as cause:
        raise _not_a_histogram(where, text) from cause
    if pairs is None:
        raise _not_a_histogram(where, text)
    if mass is None:
        return None
    for tokens in (min(pairs), max(pairs)):
        if fault := tokens_fault("tokens", tokens, zero_is_fault=False):
            raise TraceError(f"{where}: {fault}")
    total = float(mass.sum())
    if not abs(total - 1) <= _SUM_TOLERANCE:
        raise TraceError(f"{where}: probabilities must add up to 1, got {total:.6g}")
    return Histogram.of(np.array(list(pairs), dtype=np.int64), mass)


def _not_a_histogram(where: str, text: str) -> TraceError:
    return TraceError(
        f"{where} must be token counts with probabilities like {{224: 0.5, 225: 0.5}}, "
        f"got {shown(text)}"
    )
