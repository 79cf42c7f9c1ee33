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
from tuner.traffic.formats.columns import (
    NoSuchModelError,
    ReadOptions,
    TraceFormat,
    assemble,
    shown,
)
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
from tuner.traffic.reshape import clock_tick_s, have_one_clock, merge, spread
from tuner.traffic.traces import ClockOrigin, Trace

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
                f"{origin} cannot be loaded: {cause}", "update or remove that package"
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
        columns = reader.read(source.path, options)
        return assemble(
            columns, options, source=source.name, format_name=reader.name, sha256=source.sha256
        )


def read_traces(
    paths: Sequence[Path | str],
    format: str | None = None,  # noqa: A002 as in read_trace
    options: ReadOptions | None = None,
    *,
    spread_seed: int | None = None,
    sessions_over_s: float | None = None,
) -> Trace:
    """Return the trace in all files and folders together; see `merge` for their clocks.

    Hash ids of a recording with a clock of its own are taken as its own as well, unless it says
    otherwise: they are the same blocks only in files of one folder that is named as such. With
    `spread_seed` each quantised clock is spread. Recordings of single sessions, whose clocks
    say nothing about each other, start evenly at random over `sessions_over_s`, or where that
    is None over the median length of a session.

    Raises: TraceError if a file or a line of it is wrong, or they do not fit together;
        UsageError for an unknown name, and for a file that is named twice.
    """
    options = options if options is not None else ReadOptions()
    sets = [expand([path]) for path in paths]
    _check_once([path for files in sets for path in files])
    read, without = _read_all(sets, format, options)
    traces = _scoped(read)
    if spread_seed is not None:
        traces = _spread_out(traces, spread_seed)
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
    return replace(trace, notes=trace.notes.with_remark(without))


def _check_once(paths: Sequence[Path]) -> None:
    """Refuse a file that comes twice, whose load would be doubled. Raises: UsageError."""
    seen: dict[Path, Path] = {}
    for path in paths:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            raise UsageError(
                f"{first} and {path} are the same file, whose requests would come twice",
                "name it once: by itself or by its folder; --load 2 brings twice the requests",
            )


def _read_all(
    sets: Sequence[Sequence[Path]],
    format: str | None,  # noqa: A002 as in read_trace
    options: ReadOptions,
) -> tuple[list[list[Trace]], str]:
    """Return the traces of each set, and how many files lack the model that is wanted, if any.

    Raises: TraceError, UsageError as `read_traces`, and if no file has that model.
    """
    found: list[list[Trace]] = []
    lacking: list[NoSuchModelError] = []
    for paths in sets:
        traces = []
        for path in paths:
            try:
                traces.append(read_trace(path, format, options))
            except NoSuchModelError as lack:
                lacking.append(lack)
        if traces:
            found.append(traces)
    if lacking and not found:
        raise lacking[0]
    files, wanted = sum(map(len, sets)), shown(options.only_model)
    without = f"{len(lacking)} of {files} files hold no request of model {wanted}"
    return found, f"{without} and are left out" if lacking else ""


def _scoped(sets: Sequence[Sequence[Trace]]) -> list[Trace]:
    """Return the traces of all sets; unscoped ids are the same blocks within a set alone.

    What is assumed of ids that say nothing of it is remarked on.
    """
    unscoped = sum(_is_unscoped(trace) for traces in sets for trace in traces)
    if unscoped < 2:
        return [trace for traces in sets for trace in traces]
    message = (
        f"hash ids of {unscoped} files do not say whether equal ones are the same blocks: "
        "taken as the same in the files of a named folder, and as others from file to file"
    )
    found = []
    for traces in sets:
        scope = traces[0].sha256 if len(sets) > 1 else ""
        for trace in traces:
            if not _is_unscoped(trace):
                found.append(trace)
                continue
            notes = trace.notes.with_remark(message)
            found.append(replace(trace, hash_scope=scope, notes=notes))
    return found


def _is_unscoped(trace: Trace) -> bool:
    """Return whether a recording leaves it open where else its hash ids mean the same."""
    is_own = trace.origin is ClockOrigin.OWN
    return trace.hashes is not None and is_own and not trace.hash_scope


def _spread_out(traces: Sequence[Trace], seed: int) -> list[Trace]:
    """Return the traces, those with quantised clocks spread, each with a seed of its own.

    Raises: TraceError if no clock is quantised.
    """
    ticks = [clock_tick_s(trace.due_s) is not None for trace in traces]
    if not any(ticks):
        return [spread(trace, seed) for trace in traces]
    return [
        spread(trace, seed + place) if has_ticks else trace
        for place, (trace, has_ticks) in enumerate(zip(traces, ticks, strict=True))
    ]


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
    """Return whether each trace is one session: all its requests but the first wait."""
    return all(
        trace.format == WEKA.name or len(trace) - _waiting(trace) == 1 for trace in traces
    )


def _waiting(trace: Trace) -> int:
    return trace.turns.waiting if trace.turns is not None else 0


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
