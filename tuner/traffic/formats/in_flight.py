"""Requests in flight over time as CSV: a recording that only a closed loop can replay.

A time column (`time_s` in seconds; `timestamp` or `time` in seconds or as a wall clock) and
`in_flight`, or `running` and perhaps `waiting`. Each reading holds until the next; the last
one ends the recording. `input_length` and `output_length` may give the typical lengths at each
reading; without them lengths are drawn from another trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tuner.errors import TraceError
from tuner.stats import Floats, Ints
from tuner.traffic.concurrency import MAX_IN_FLIGHT, SECONDS_PER_OUTPUT_TOKEN, Concurrency
from tuner.traffic.formats.columns import (
    LATEST_S,
    Columns,
    ReadOptions,
    TimeUnit,
    TraceFormat,
    assemble,
    line_error,
    no_time_unit,
    shown,
)
from tuner.traffic.formats.csv_table import (
    CsvTable,
    Field,
    Kind,
    first_value,
    header_line,
    header_names,
    read_table,
)
from tuner.traffic.formats.sources import plain_file
from tuner.traffic.sampling import MAX_REQUESTS, as_changes, requests_in_flight, shuffled_rounds
from tuner.traffic.traces import ClockOrigin, Trace

FORMAT = "concurrency"
TIME_S, TIMES = "time_s", ("time_s", "timestamp", "time")
IN_FLIGHT, RUNNING, WAITING = "in_flight", "running", "waiting"
PROMPT, OUTPUT = "input_length", "output_length"

_COUNT_REMARK = (
    "there are as many requests as keep up the recorded number in flight at "
    f"{SECONDS_PER_OUTPUT_TOKEN * 1000:g} ms per output token"
)


@dataclass(frozen=True, slots=True, eq=False)
class InFlightReadings:
    """A recording of requests in flight, from its first busy reading on.

    Shapes: prompt_tokens and output_tokens are [m] as the readings are, None if not given.
    Units: zero_s is what the recording's clock showed at the first busy reading.
    """

    flow: Concurrency
    zero_s: float
    origin: ClockOrigin
    prompt_tokens: Ints | None
    output_tokens: Ints | None
    skipped: dict[str, int]
    remarks: tuple[str, ...]


def matches(head: bytes) -> bool:
    """Return whether the header names a clock and requests in flight."""
    return _has_columns(header_names(head))


def _header(path: Path) -> list[str]:
    """Return the names of the columns. Raises: TraceError if they are of no such recording."""
    names = header_names(header_line(path))
    if not _has_columns(names):
        raise line_error(
            path,
            1,
            f"must have a column {', '.join(TIMES[:-1])} or {TIMES[-1]} and one of {IN_FLIGHT} "
            f"or {RUNNING}, got {shown(', '.join(names))}",
            "name the columns so: readings of a clock, and of requests in flight",
        )
    return names


def _has_columns(names: Collection[str]) -> bool:
    return (IN_FLIGHT in names or RUNNING in names) and any(name in names for name in TIMES)


def read(path: Path, options: ReadOptions) -> Columns:
    """Return requests that keep up the recorded number in flight, with the file's lengths.

    There are as many as at 20 ms per output token, each with the typical lengths at its
    reading.

    Raises: TraceError that names the first wrong line, or says that there are no lengths.
    """
    found = read_in_flight(path, options)
    prompt, output = found.prompt_tokens, found.output_tokens
    if prompt is None or output is None:
        lacking = " and ".join(
            name for name, column in ((PROMPT, prompt), (OUTPUT, output)) if column is None
        )
        raise TraceError(
            f"{path} has requests in flight but no lengths: {lacking} missing",
            f"take those of another trace: tune trace from-concurrency {path.name} "
            "--lengths TRACE",
        )
    busy = np.flatnonzero((found.flow.in_flight > 0) & ((prompt < 1) | (output < 1)))
    if busy.size:
        at_s = found.flow.times_s[busy[0]]
        raise TraceError(
            f"{path} at {at_s:g} s: {PROMPT} and {OUTPUT} must be at least 1 while requests "
            f"are in flight, got {prompt[busy[0]]} and {output[busy[0]]}"
        )
    due_s, readings = _requests(path, found.flow, np.maximum(output, 1))
    message = "lengths are the typical ones at each reading, not those of single requests"
    return _columns(found, due_s, prompt[readings], output[readings], message)


def _columns(
    found: InFlightReadings, due_s: Floats, prompt: Ints, output: Ints, on_lengths: str
) -> Columns:
    return Columns(
        arrived=found.zero_s + due_s,
        ticks_per_s=1.0,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=as_changes(found.flow),
        origin=found.origin,
        skipped=found.skipped,
        remarks=(*found.remarks, on_lengths, _COUNT_REMARK),
    )


def _requests(path: Path, flow: Concurrency, output: Ints | Floats) -> tuple[Floats, Ints]:
    """Return when requests come that keep up what was in flight, and at which reading.

    Raises: TraceError if these are more than a trace may hold.
    """
    lives_s: Floats = output * np.float64(SECONDS_PER_OUTPUT_TOKEN)
    wanted = float((flow.in_flight[:-1] * np.diff(flow.times_s) / lives_s[:-1]).sum())
    if wanted > MAX_REQUESTS:
        raise TraceError(
            f"{path} asks for {wanted:,.0f} requests, at most {MAX_REQUESTS:,} are possible",
            "check the unit of its clock, or cut the file",
        )
    return requests_in_flight(flow, lives_s)


def read_in_flight(path: Path, options: ReadOptions) -> InFlightReadings:
    """Return the readings in order of time.

    Raises: TraceError that names the first wrong line, or if nothing was ever in flight.
    """
    names = _header(path)
    time = next(name for name in TIMES if name in names)
    place = names.index(time)
    is_wall = time != TIME_S and not _is_number(first_value(path, place))
    if is_wall or time == TIME_S:
        no_time_unit(path, options)
    table = read_table(path, _fields(names, time, is_wall=is_wall), options)
    if not len(table):
        why = ", ".join(f"{count} {reason}" for reason, count in table.skipped.items())
        raise TraceError(
            f"{path}: none of its readings can be used ({why})",
            "check its columns and their units",
        )
    times_s = table.whole["time"] / 1e9 if is_wall else _seconds(path, table, time, options)
    levels = _levels(path, table, times_s)
    order = np.argsort(times_s, kind="stable")
    moved = int((times_s < np.maximum.accumulate(times_s)).sum())
    ascending_s = times_s[order]
    is_last = np.append(np.diff(ascending_s) > 0, True)
    rows = order[is_last]
    busy = np.flatnonzero(levels[rows[:-1]])
    if not busy.size:
        raise TraceError(
            f"{path} never has a request in flight for any time, in {len(rows)} readings",
            "record some traffic first",
        )
    rows = rows[busy[0] :]
    zero_s = float(times_s[rows[0]])
    return InFlightReadings(
        flow=Concurrency(times_s[rows] - zero_s, levels[rows]),
        zero_s=zero_s,
        origin=ClockOrigin.WALL if is_wall else ClockOrigin.OWN,
        prompt_tokens=table.whole["prompt"][rows] if "prompt" in table.whole else None,
        output_tokens=table.whole["output"][rows] if "output" in table.whole else None,
        skipped=dict(table.skipped),
        remarks=tuple(_remarks(moved, len(is_last) - int(is_last.sum()))),
    )


def _fields(names: list[str], time: str, *, is_wall: bool) -> dict[str, Field]:
    """Return the columns to read: in_flight comes before running and waiting."""
    fields = {"time": Field(time, Kind.WALL_CLOCK if is_wall else Kind.SECONDS)}
    if IN_FLIGHT in names:
        fields["level"] = Field(IN_FLIGHT, Kind.SECONDS)
    else:
        fields["level"] = Field(RUNNING, Kind.SECONDS)
        fields["waiting"] = Field(WAITING, Kind.SECONDS, is_needed=False, blank=True)
    fields["prompt"] = Field(PROMPT, Kind.TOKENS, is_needed=False)
    fields["output"] = Field(OUTPUT, Kind.TOKENS, is_needed=False)
    return fields


def _seconds(path: Path, table: CsvTable, name: str, options: ReadOptions) -> Floats:
    """Return a plain clock in seconds. Raises: TraceError if its unit must be a smaller one."""
    unit = options.time_unit or TimeUnit.SECONDS
    times_s: Floats = table.numbers["time"] / unit.ticks_per_s
    if np.abs(times_s).max() > LATEST_S:
        largest = float(times_s[np.abs(times_s).argmax()])
        raise TraceError(
            f"{path}: {name} must be in seconds, {largest:.15g} is past the year 2200",
            "say its unit: --time-unit ms, us or ns",
        )
    return times_s


def _levels(path: Path, table: CsvTable, times_s: Floats) -> Ints:
    """Return how many were in flight at each reading; averages are rounded.

    Raises: TraceError if a number is out of range.
    """
    levels = np.nan_to_num(table.numbers["level"])
    for key, name in (("level", f"{IN_FLIGHT} or {RUNNING}"), ("waiting", WAITING)):
        column = np.nan_to_num(table.numbers.get(key, np.zeros(len(table))))
        wrong = np.flatnonzero((column < 0) | (column > MAX_IN_FLIGHT))
        if wrong.size:
            raise TraceError(
                f"{path} at {times_s[wrong[0]]:.15g} s: {name} must be from 0 to "
                f"{MAX_IN_FLIGHT:,}, got {column[wrong[0]]:g}"
            )
        if key == "waiting":
            levels = levels + column
    whole: Ints = np.rint(levels).astype(np.int64)
    return whole


def _remarks(moved: int, doubled: int) -> list[str]:
    remarks = []
    if moved:
        remarks.append(f"{moved:,} readings were out of order and have been sorted")
    if doubled:
        remarks.append(
            f"{doubled:,} readings share their instant with a later one, which counts"
        )
    return remarks


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


CONCURRENCY = TraceFormat(name=FORMAT, matches=matches, read=read)


def trace_from_concurrency(
    path: Path | str, lengths: Trace, seed: int = 0, options: ReadOptions | None = None
) -> Trace:
    """Return the recorded requests in flight with lengths drawn from another trace.

    Prompt and answer of a request stay together, and each request of that trace is taken as
    often as any other to within one. Its hash ids are left out: drawn rows would repeat whole
    prompts, which no recording says.

    Raises: TraceError if the recording cannot be read; UsageError if an option does not apply.
    """
    options = options if options is not None else ReadOptions()
    with plain_file(Path(path), options.max_unpacked_bytes) as source:
        readings = read_in_flight(source.path, options)
        name, sha256 = source.name, source.sha256
    flow = readings.flow
    mean = np.full(len(flow.times_s), lengths.output_tokens.mean())
    due_s, _ = _requests(Path(name), flow, mean)
    rows = shuffled_rounds(len(lengths), len(due_s), np.random.default_rng(seed))
    message = f"lengths are those of {lengths.source} in random order, without its prefix reuse"
    prompt, output = lengths.prompt_tokens[rows], lengths.output_tokens[rows]
    columns = replace(
        _columns(readings, due_s, prompt, output, message),
        sampled_from=f"{name} and the lengths of {lengths.source}",
    )
    both = hashlib.sha256(f"{sha256}{lengths.sha256}".encode()).hexdigest()
    return assemble(columns, options, source=name, format_name=FORMAT, sha256=both)
