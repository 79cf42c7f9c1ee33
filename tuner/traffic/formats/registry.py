"""The formats that can be read, and the one way in for all of them.

A new format is a module with one `TraceFormat` and its line in `FORMATS`, before the formats
that would also accept its first bytes. A package of a third party offers its own under the
entry point group `tuner.trace_formats`; those are tried first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median

import numpy as np

from tuner.errors import TraceError, UsageError
from tuner.traffic.formats.azure import AZURE
from tuner.traffic.formats.bailian import BAILIAN
from tuner.traffic.formats.burstgpt import BURSTGPT
from tuner.traffic.formats.columns import ReadOptions, TraceFormat, assemble, shown
from tuner.traffic.formats.flat_spans import FLAT_SPANS
from tuner.traffic.formats.in_flight import CONCURRENCY
from tuner.traffic.formats.lengths_only import LENGTHS_ONLY
from tuner.traffic.formats.mooncake import MOONCAKE, TIMED_TRACE
from tuner.traffic.formats.native import NATIVE
from tuner.traffic.formats.otlp import OTLP
from tuner.traffic.formats.servegen import SERVEGEN
from tuner.traffic.formats.sources import Source, expand, plain_file
from tuner.traffic.formats.splitwise import SPLITWISE
from tuner.traffic.formats.vidur import VIDUR
from tuner.traffic.formats.weka import WEKA
from tuner.traffic.reshape import have_one_clock, merge, spread
from tuner.traffic.traces import Trace

FORMATS: tuple[TraceFormat, ...] = (
    *(AZURE, BURSTGPT, VIDUR, SPLITWISE, SERVEGEN, CONCURRENCY),
    *(WEKA, OTLP, FLAT_SPANS),
    *(BAILIAN, LENGTHS_ONLY, MOONCAKE, TIMED_TRACE, NATIVE),
)
"""In the order of detection; native takes every JSON object, so it stands last."""

ENTRY_POINTS = "tuner.trace_formats"


@cache
def all_formats() -> tuple[TraceFormat, ...]:
    """Return the formats of third parties, then our own.

    Raises: UsageError if an installed package offers something that is no format.
    """
    offered = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            trace_format = point.load()
        except Exception as cause:  # any package's code may run here
            origin = f"trace format {point.name} of {_package(point.dist)}"
            raise UsageError(
                f"{origin} cannot be loaded: {cause}",
                "update or remove that package",
            ) from cause
        if not isinstance(trace_format, TraceFormat):
            raise UsageError(
                f"trace format {point.name} of {_package(point.dist)} is not a TraceFormat",
                "update or remove that package",
            )
        offered.append(trace_format)
    return (*offered, *FORMATS)


def _package(dist: object) -> str:
    return str(getattr(dist, "name", "an installed package"))


def format_names() -> tuple[str, ...]:
    """Return the names that --trace-format takes, in the order of detection."""
    return tuple(known.name for known in all_formats() if known is not LENGTHS_ONLY)


def read_trace(
    path: Path | str,
    format: str | None = None,  # noqa: A002 the user's own word, as in --trace-format
    options: ReadOptions | None = None,
) -> Trace:
    """Return the trace in a file, in the given format or in the one its first bytes show.

    The file may be packed with gzip or zstd; - is standard input.

    Raises: TraceError if the file or a line of it is wrong; UsageError for an unknown name.
    """
    options = options if options is not None else ReadOptions()
    chosen = _named(format) if format is not None else None
    with plain_file(Path(path), options.max_unpacked_bytes) as source:
        reader = chosen if chosen is not None else _detected(source)
        try:
            columns = reader.read(source.path, options)
        except (TraceError, UsageError) as wrong:
            # What was unpacked or piped is known to the user by another name.
            text = wrong.message.replace(str(source.path), str(path))
            raise type(wrong)(text, wrong.hint) from wrong
        return assemble(
            columns,
            options,
            source=source.name,
            format_name=reader.name,
            sha256=source.sha256,
        )


def read_traces(
    paths: Sequence[Path | str],
    format: str | None = None,  # noqa: A002 as in read_trace
    options: ReadOptions | None = None,
    *,
    spread_seed: int | None = None,
    sessions_over_s: float | None = None,
) -> Trace:
    """Return the trace in all files and folders together; see `merging` for their clocks.

    With `spread_seed` a quantised clock is spread. Recordings of single sessions, whose clocks
    say nothing about each other, start evenly at random over `sessions_over_s`, or where that
    is None over the median length of a session.

    Raises: TraceError if a file or a line of it is wrong, or they do not fit together;
        UsageError for an unknown name.
    """
    options = options if options is not None else ReadOptions()
    traces = [read_trace(path, format, options) for path in expand(paths)]
    if options.sample_s is not None and sum(bool(t.notes.sampled_from) for t in traces) > 1:
        raise UsageError(
            f"--sample draws the busiest stretch of one file, got {len(traces)}, whose busiest "
            "stretches are not of one time",
            "name one file, or leave --sample out and choose a --window",
        )
    are_sessions = len(traces) > 1 and not have_one_clock(traces) and _are_sessions(traces)
    _check_applies(traces, options, sessions_over_s, are_sessions=are_sessions)
    if are_sessions:
        trace = _overlapped(traces, sessions_over_s, options.seed)
    else:
        trace = merge(traces)
        if len(traces) > 1 and not have_one_clock(traces):
            message = f"{len(traces)} recordings with clocks of their own begin together"
            trace = replace(trace, notes=trace.notes.with_remark(message))
    return trace if spread_seed is None else spread(trace, spread_seed)


def _check_applies(
    traces: Sequence[Trace],
    options: ReadOptions,
    sessions_over_s: float | None,
    *,
    are_sessions: bool,
) -> None:
    """Refuse options for what is in none of the files. Raises: UsageError."""
    has_hashes = any(trace.hashes is not None for trace in traces)
    is_drawn = any(trace.notes.sampled_from for trace in traces)
    asked = (
        ("--hash-block-size", options.hash_block_size, has_hashes, "hash ids"),
        ("--sample", options.sample_s, is_drawn, "aggregates to draw requests from"),
        ("--sessions-over", sessions_over_s, are_sessions, "sessions with clocks of their own"),
    )
    for option, value, applies, what in asked:
        if value is not None and not applies:
            named = ", ".join(dict.fromkeys(trace.source for trace in traces))
            raise UsageError(
                f"{option} is for {what}, and {named} has none", f"leave {option} out"
            )


def _are_sessions(traces: Sequence[Trace]) -> bool:
    """Return whether each trace is one session, in which each request waits for another."""
    return all(len(t) == 1 or t.turns is not None for t in traces)


def _overlapped(traces: Sequence[Trace], over_s: float | None, seed: int) -> Trace:
    length_s = over_s if over_s is not None else median(trace.duration_s for trace in traces)
    starts_s = np.random.default_rng(seed).uniform(0.0, length_s, len(traces)).tolist()
    trace = merge(traces, starts_s)
    message = (
        f"{len(traces)} sessions without a common clock start at random within "
        f"{length_s:,.0f} s, seed {seed}: how they overlap is chosen, not recorded"
    )
    return replace(trace, notes=trace.notes.with_remark(message))


def _named(name: str) -> TraceFormat:
    for known in all_formats():
        if known.name == name:
            return known
    raise UsageError(
        f"trace format must be one of {', '.join(format_names())}, got {shown(name)}"
    )


def _detected(source: Source) -> TraceFormat:
    for known in all_formats():
        if known.matches(source.head):
            return known
    start = shown(source.head[:40].decode("utf-8", "replace"))
    raise TraceError(
        f"{source.name} is in no format we know ({', '.join(format_names())}): it starts "
        f"with {start}",
        "convert it to JSON Lines with arrived_at_s, input_length and output_length",
    )
