"""Spans with flat attributes: one document with a list of spans and their times as text.

Exporters write them for reading, without OTLP's typed values. Token counts are often missing;
without any there is nothing to replay.

Source: kubernetes-sigs/inference-perf, examples/otel/test_traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tuner.errors import TraceError
from tuner.traffic.formats.columns import (
    Columns,
    ReadOptions,
    Skipped,
    TraceFormat,
    no_time_unit,
    shown,
    starts_object,
)
from tuner.traffic.formats.json_document import JSON_HINT, read_object
from tuner.traffic.formats.jsonl_rows import Fault
from tuner.traffic.formats.span_table import (
    WANTED,
    Span,
    SpanTable,
    is_error,
    whole,
)
from tuner.traffic.formats.wall_clock import nanoseconds_of, wall_clock_fault


def matches(head: bytes) -> bool:
    """Return whether the file starts like an object with a list of flat spans."""
    is_flat = b'"spans"' in head and b'"start_time"' in head
    return starts_object(head) and is_flat and b'"resourceSpans"' not in head


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns of the requests among the spans, in file order.

    Raises: TraceError that names the first wrong span, or what no span has.
    """
    no_time_unit(path, options)
    spans = read_object(path).get("spans")
    if not isinstance(spans, list):
        raise TraceError(f"{path}: spans must be a list, got {shown(spans)}", JSON_HINT)
    table, skipped = SpanTable(options), Skipped(path, options)
    for number, span in enumerate(spans, start=1):
        fault = _add(table, span)
        if fault is not None:
            skipped.add(f"span {number}", *fault)
    return table.columns(path, skipped)


def _add(table: SpanTable, span: object) -> Fault | None:
    """Add a span if it is a request; return what is wrong with it, if anything is."""
    if not isinstance(span, dict):
        return f"must be a JSON object, got {shown(span)}", JSON_HINT
    given = span.get("attributes") or {}
    if not isinstance(given, dict):
        return f"attributes must be a JSON object, got {shown(given)}", JSON_HINT
    attributes = {key: whole(value) for key, value in given.items() if key in WANTED}
    found = Span(span.get("name"), span.get("trace_id"), attributes, _has_failed(span))
    if not table.takes(found):
        return None
    start, end = span.get("start_time"), span.get("end_time")
    end = start if end is None else end
    for name, clock in (("start_time", start), ("end_time", end)):
        fault = _clock_fault(name, clock)
        if fault is not None:
            return fault, ""
    return table.add(found, nanoseconds_of(str(start)), nanoseconds_of(str(end)))


def _has_failed(span: Mapping[str, object]) -> bool:
    status = span.get("status")
    return is_error(status.get("code") if isinstance(status, dict) else status)


def _clock_fault(name: str, clock: object) -> str | None:
    if clock is None:
        return f"lacks {name}"
    if not isinstance(clock, str):
        return f"{name} must be a date and time as text, got {shown(clock)}"
    return wall_clock_fault(name, clock)


FLAT_SPANS = TraceFormat(name="flat-spans", matches=matches, read=read)
