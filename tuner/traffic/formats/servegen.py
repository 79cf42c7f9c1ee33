"""ServeGen's clients: rates and gaps of ten minutes each, and histograms of lengths.

`chunk-N-trace.csv` has no header and six columns: start of the window in seconds, requests per
second, coefficient of variation of the gaps, their distribution and its two parameters.
`chunk-N-dataset.json` beside it has histograms of token counts, as Python's text, for every six
hours; the last one before a window that is not empty is in force. This is no recording:
requests are drawn from it, with a seed. The coefficient of variation is not used, as the
distribution implies one. Output tokens of reasoning models include the reasoning.

Source: alibaba/ServeGen, data/ and servegen/clientpool.py; Xiang et al., ServeGen, 2025.
"""

from __future__ import annotations

import ast
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from tuner.errors import TraceError, UsageError
from tuner.traffic.formats.columns import (
    BYTE_ORDER_MARK,
    Columns,
    ReadOptions,
    Skipped,
    TraceFormat,
    lines_of,
    no_time_unit,
    shown,
    tokens_fault,
)
from tuner.traffic.formats.csv_table import MAX_SECONDS
from tuner.traffic.formats.servegen_draw import (
    Drawn,
    Gaps,
    LengthHistogram,
    Lengths,
    RateWindow,
    busiest_stretch,
    draw,
    generator,
)
from tuner.traffic.sampling import MAX_REQUESTS
from tuner.traffic.traces import ClockOrigin, ZeroOutput

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
        dataset = path.with_name(path.name.removesuffix(TRACE_SUFFIX) + DATASET_SUFFIX)
        if dataset.is_file():
            return dataset
        expected = dataset.name
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
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise TraceError(
            f"{path.name} must map windows to named histograms: {shown(str(cause))}",
            "fetch it again, and check that it is no Git-LFS pointer",
        ) from cause
    if not content:
        raise TraceError(f"{path.name} holds no windows", "fetch it again")
    is_multimodal = all(MULTIMODAL in fields for fields in content.values())
    by_start = {_start_s(path.name, key): fields for key, fields in content.items()}
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
    histograms = []
    for field in (MULTIMODAL if is_multimodal else TEXT, OUTPUT):
        if field not in fields:
            raise TraceError(f"{where} lacks {field}, got {shown(', '.join(fields))}")
        histograms.append(_histogram(f"{where}: {field}", fields[field]))
    prompt, output = histograms
    return Lengths(prompt, output) if prompt is not None and output is not None else None


def _histogram(where: str, text: str) -> LengthHistogram | None:
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
    return LengthHistogram.of(np.array(list(pairs), dtype=np.int64), mass)


def _not_a_histogram(where: str, text: str) -> TraceError:
    return TraceError(
        f"{where} must be token counts with probabilities like {{224: 0.5, 225: 0.5}}, "
        f"got {shown(text)}"
    )


MAX_WINDOWS = 200_000
"""Ours: nearly four years of ten minutes each."""

WINDOW_S = 600.0
"""Source: ServeGen's published windows; used where a file holds a single one."""

_SHAPES = (0.01, 1e6)
"""Ours: far around the published shapes; beyond, doubles do not carry the gaps."""

_MAX_LINE_BYTES = 1 << 12


def matches(head: bytes) -> bool:
    """Return whether the first line has six fields, the fourth of them a known distribution."""
    return _form_fault(_fields(head.split(b"\n", 1)[0])) is None


def read(path: Path, options: ReadOptions) -> Columns:
    """Return requests drawn from the aggregates of one client.

    `sample_s` of the options draws the busiest stretch of that length alone. Each window
    depends on the seed, the file's name and its own place, not on other windows.

    Units: arrivals in seconds on the clock that all clients share.
    Raises: TraceError that names the wrong line or histogram; also for too many requests.
    """
    no_time_unit(path, options)
    skipped = Skipped(path, options)
    windows = _read_windows(path, skipped)
    start_s, end_s = _stretch(path, windows, options.sample_s)
    dataset = read_dataset(dataset_beside(path))
    drawn, stale = [], 0
    for place, window in enumerate(windows):
        if not window.expected or window.start_s >= end_s or window.end_s <= start_s:
            continue
        lengths, is_newest = dataset.at(window.start_s)
        if lengths is None:
            skipped.add(window.line, f"has requests, but {dataset.name} no lengths so early")
            continue
        if options.zero_output is ZeroOutput.REFUSE:
            dataset.refuse_zero(window.start_s)
        stale += not is_newest
        requests = draw(window, lengths, generator(options.seed, path.name, place))
        drawn.append(_between(requests, start_s, end_s))
    skipped.check(len(windows) + len(skipped))
    remarks = _remarks(windows, options, (start_s, end_s), dataset, stale)
    return _columns(path, drawn, skipped.by_reason, remarks)


def _columns(
    path: Path, drawn: Sequence[Drawn], skipped: Mapping[str, int], remarks: tuple[str, ...]
) -> Columns:
    if not sum(len(part.arrived_s) for part in drawn):
        raise TraceError(f"{path}: no request was drawn", "draw a longer stretch with --sample")
    return Columns(
        arrived=np.concatenate([part.arrived_s for part in drawn]),
        ticks_per_s=1.0,
        prompt_tokens=np.concatenate([part.prompt_tokens for part in drawn]),
        output_tokens=np.concatenate([part.output_tokens for part in drawn]),
        origin=ClockOrigin.SHARED,
        skipped=skipped,
        remarks=remarks,
        sampled_from="ServeGen aggregates",
    )


def _between(drawn: Drawn, start_s: float, end_s: float) -> Drawn:
    is_in = (drawn.arrived_s >= start_s) & (drawn.arrived_s < end_s)
    if is_in.all():
        return drawn
    return Drawn(drawn.arrived_s[is_in], drawn.prompt_tokens[is_in], drawn.output_tokens[is_in])


def _stretch(
    path: Path, windows: Sequence[RateWindow], sample_s: float | None
) -> tuple[float, float]:
    """Return from when to when requests are drawn.

    Raises: UsageError if sample_s is not above 0; TraceError if there are none or too many.
    """
    stretch = (windows[0].start_s, windows[-1].end_s)
    if sample_s is not None:
        if not (math.isfinite(sample_s) and sample_s > 0):
            raise UsageError(f"--sample must be a number of seconds above 0, got {sample_s:g}")
        stretch = busiest_stretch(windows, sample_s)
    start_s, end_s = stretch
    within = [w for w in windows if w.start_s < end_s and w.end_s > start_s]
    expected = math.fsum(window.expected for window in within)
    if not expected:
        raise TraceError(f"{path} holds idle windows only", "choose a client that was at work")
    if expected > MAX_REQUESTS:
        raise TraceError(
            f"{path} stands for {expected:,.0f} requests, more than {MAX_REQUESTS:,}",
            "draw fewer seconds with --sample",
        )
    return stretch


def _remarks(
    windows: Sequence[RateWindow],
    options: ReadOptions,
    stretch: tuple[float, float],
    dataset: DataSet,
    stale: int,
) -> tuple[str, ...]:
    start_s, end_s = stretch
    total_s = windows[-1].end_s - windows[0].start_s
    notes = [f"arrivals and lengths were drawn with seed {options.seed}"]
    if end_s - start_s < total_s:
        notes = [
            f"{notes[0]} from the busiest {end_s - start_s:,.0f} s of {total_s:,.0f} s, which "
            f"begin at second {start_s:,.0f}"
        ]
    if stale:
        notes.append(
            f"{stale:,} windows have no lengths of their own and take those before them"
        )
    if dataset.is_multimodal:
        notes.append(
            "images, audio and video are left out: the prompts are text of the published length"
        )
    return tuple(notes)


def _read_windows(path: Path, skipped: Skipped) -> list[RateWindow]:
    """Return all windows, idle ones included; a hole in the file is idle time."""
    rows: list[tuple[int, list[str]]] = []
    before_s = -math.inf
    for number, line in lines_of(path, _MAX_LINE_BYTES):
        fields = _fields(line)
        fault = _form_fault(fields) or _value_fault(fields, before_s)
        if fault:
            skipped.add(number, fault)
            continue
        before_s = float(fields[0])
        rows.append((number, fields))
        if len(rows) > MAX_WINDOWS:
            raise TraceError(f"{path} has more than {MAX_WINDOWS:,} windows")
    skipped.check(len(rows) + len(skipped))
    if not rows:
        raise TraceError(f"{path} holds no windows", "give a client's chunk-N-trace.csv")
    starts_s = [float(fields[0]) for _, fields in rows]
    steps_s = [after - before for before, after in pairwise(starts_s)]
    step_s = median(steps_s) if steps_s else WINDOW_S
    return [
        _window(number, fields, min(room_s, step_s))
        for (number, fields), room_s in zip(rows, (*steps_s, step_s), strict=True)
    ]


def _window(line: int, fields: Sequence[str], length_s: float) -> RateWindow:
    start, rate, _, name, shape, scale = fields
    return RateWindow(
        start_s=float(start),
        length_s=length_s,
        rate_per_s=float(rate),
        gaps=Gaps(name),
        shape=float(shape),
        scale_s=float(scale),
        line=line,
    )


def _fields(line: bytes) -> list[str]:
    if len(line) > _MAX_LINE_BYTES:
        return []
    text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace")
    return [field.strip() for field in text.split(",")]


def _form_fault(fields: Sequence[str]) -> str | None:
    """Return how a row is not of this format, or None."""
    if len(fields) != 6:
        return f"must have 6 fields, got {len(fields)}"
    names = ("the window's start", "the rate", "the CV", "", "the shape", "the scale")
    for name, text in zip(names, fields, strict=True):
        if name and not _is_number(text):
            return f"{name} must be a number, got {shown(text)}"
    if fields[3] not in set(Gaps):
        return f"the distribution must be Gamma, Weibull or empty, got {shown(fields[3])}"
    return None


def _value_fault(fields: Sequence[str], before_s: float) -> str | None:
    """Return which value of a row of this format cannot be, or None."""
    start, rate, _, name, shape, scale = fields
    if float(start) <= before_s:
        return f"the window's start must be above the one before it, got {start}"
    if float(rate) < 0:
        return f"the rate must be at least 0, got {rate}"
    if not name or not float(rate):
        return None
    low, high = _SHAPES
    if not low <= float(shape) <= high:
        return f"the shape must be from {low:g} to {high:g}, got {shape}"
    if float(scale) <= 0:
        return f"the scale must be above 0, got {scale}"
    return None


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= MAX_SECONDS
    except ValueError:
        return False


SERVEGEN = TraceFormat(name="servegen", matches=matches, read=read)
