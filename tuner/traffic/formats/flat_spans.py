"""Spans with flat attributes: one document with a list of spans and their times as text.

Exporters write them for reading, without OTLP's typed values. Token counts are often missing;
without any there is nothing to replay.

Source: kubernetes-sigs/inference-perf, examples/otel/test_traces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tuner.errors import TraceError
from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat, no_time_unit, shown
from tuner.traffic.formats.json_document import (
    BYTE_ORDER_MARK,
    JSON_HINT,
    SkippedParts,
    read_object,
)
from tuner.traffic.formats.jsonl_rows import Fault
from tuner.traffic.formats.span_table import (
    REQUEST_SPAN,
    WANTED,
    SpanFrame,
    SpanTable,
    is_error,
    trace_key,
    whole,
)
from tuner.traffic.formats.wall_clock import wall_clock_fault

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS = re.compile(r"\d*", re.ASCII)


def matches(head: bytes) -> bool:
    """Return whether the file starts like an object with a list of flat spans."""
    is_object = head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")
    is_flat = b'"spans"' in head and b'"start_time"' in head
    return is_object and is_flat and b'"resourceSpans"' not in head


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns of the requests among the spans, in file order.

    Raises: TraceError that names the first wrong span, or what no span has.
    """
    no_time_unit(path, options)
    spans = read_object(path).get("spans")
    if not isinstance(spans, list):
        raise TraceError(f"{path}: spans must be a list, got {shown(spans)}", JSON_HINT)
    table, skipped = SpanTable(options), SkippedParts(path, options)
    for number, span in enumerate(spans, start=1):
        fault = _add(table, span)
        if fault is not None:
            skipped.add_at(f"span {number}", *fault)
    return table.columns(path, skipped)


def _add(table: SpanTable, span: object) -> Fault | None:
    """Add a span if it is a request; return what is wrong with it, if anything is."""
    if not isinstance(span, dict):
        return f"must be a JSON object, got {shown(span)}", JSON_HINT
    given = span.get("attributes") or {}
    if not isinstance(given, dict):
        return f"attributes must be a JSON object, got {shown(given)}", JSON_HINT
    attributes = {key: whole(value) for key, value in given.items() if key in WANTED}
    failed = _has_failed(span)
    if not table.takes(span.get("name"), attributes, is_error=failed):
        return None
    start, end = span.get("start_time"), span.get("end_time")
    end = start if end is None else end
    for name, clock in (("start_time", start), ("end_time", end)):
        fault = _clock_fault(name, clock)
        if fault is not None:
            return fault, ""
    frame = SpanFrame(
        start_ns=nanoseconds_of(str(start)),
        end_ns=nanoseconds_of(str(end)),
        trace_key=trace_key(span.get("trace_id")),
        is_engines=span.get("name") == REQUEST_SPAN,
        is_error=failed,
    )
    return table.add(attributes, frame)


def _has_failed(span: Mapping[str, object]) -> bool:
    status = span.get("status")
    return is_error(status.get("code") if isinstance(status, dict) else status)


def _clock_fault(name: str, clock: object) -> str | None:
    if clock is None:
        return f"lacks {name}"
    if not isinstance(clock, str):
        return f"{name} must be a date and time as text, got {shown(clock)}"
    return wall_clock_fault(name, clock)


def nanoseconds_of(clock: str) -> int:
    """Return nanoseconds since 1970 of a checked wall clock; without a zone it is UTC.

    >>> nanoseconds_of("1970-01-01T00:00:01.000000002")
    1000000002
    """
    whole_part, _, rest = clock.partition(".")
    found = _DIGITS.match(rest)
    digits = found[0] if found else ""
    at = datetime.fromisoformat(whole_part + rest[len(digits) :])
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return (at - _EPOCH) // timedelta(seconds=1) * 1_000_000_000 + int(digits.ljust(9, "0"))


FLAT_SPANS = TraceFormat(name="flat-spans", matches=matches, read=read)
