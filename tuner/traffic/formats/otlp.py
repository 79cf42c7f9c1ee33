"""OTLP traces in JSON: what an OpenTelemetry Collector's file exporter writes, or one document.

A file holds one export per line, or a single one spread over many. Lines are read one after
the other, so that memory is that of the longest line and of the requests' columns.

Source: OpenTelemetry Collector, exporter/fileexporter; OTLP specification, JSON encoding.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tuner.errors import TraceError
from tuner.traffic.formats.columns import (
    Columns,
    ReadOptions,
    Skipped,
    TraceFormat,
    lines_of,
    no_time_unit,
    starts_object,
)
from tuner.traffic.formats.json_document import JSON_HINT, read_bytes, why_wrong
from tuner.traffic.formats.jsonl_rows import WRONG_JSON, Fault
from tuner.traffic.formats.span_table import (
    WANTED,
    Export,
    OtlpSpan,
    Span,
    SpanTable,
    attributes_of,
    instant_fault,
    is_error,
    whole,
)

MAX_LINE_BYTES = 1 << 28
"""Ours: two hundred thousand spans in one export; collectors send thousands at a time."""

_START, _END = "startTimeUnixNano", "endTimeUnixNano"


def matches(head: bytes) -> bool:
    """Return whether the file starts like an export of spans."""
    return starts_object(head) and b'"resourceSpans"' in head


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns of the requests among the spans, in file order.

    Raises: TraceError that names the first wrong line or span.
    """
    no_time_unit(path, options)
    return _Reader(path, options).read()


class _Reader:
    """One file being read."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(Export)
        self._skipped = Skipped(path, options)
        self._table = SpanTable(options)

    def read(self) -> Columns:
        """Return the columns."""
        if self._is_one_document():
            self._read_document()
        else:
            for number, line in lines_of(self._path, MAX_LINE_BYTES):
                export, why = self._decoded(line)
                if export is None:
                    self._skipped.add(number, why, JSON_HINT)
                else:
                    self._add_spans(export, f"line {number} ")
        return self._table.columns(self._path, self._skipped)

    def _is_one_document(self) -> bool:
        """Return whether the first lines are the beginning of a document, and no exports."""
        lines = lines_of(self._path, MAX_LINE_BYTES)
        _, first = next(lines, (0, b""))
        _, second = next(lines, (0, b""))
        if not second or second.lstrip().startswith(b'{"resourceSpans"'):
            return False
        return self._decoded(first)[0] is None

    def _read_document(self) -> None:
        data = read_bytes(self._path)
        export, why = self._decoded(data)
        if export is None:
            raise TraceError(f"{self._path} {why}", JSON_HINT)
        self._add_spans(export, "")

    def _decoded(self, data: bytes) -> tuple[Export | None, str]:
        """Return an export, or None and what is wrong with it."""
        try:
            if not data.isascii():
                data.decode("utf-8")
            return self._decoder.decode(data), ""
        except WRONG_JSON as cause:
            return None, why_wrong(data, cause)

    def _add_spans(self, export: Export, place: str) -> None:
        for number, span in enumerate(export.spans(), start=1):
            fault = self._add(span)
            if fault is not None:
                self._skipped.add(f"{place}span {number}", *fault)

    def _add(self, span: OtlpSpan) -> Fault | None:
        """Add a span if it is a request; return what is wrong with it, if anything is."""
        failed = span.status is not None and is_error(span.status.code)
        found = Span(span.name, span.trace_id, attributes_of(span, WANTED), failed)
        if not self._table.takes(found):
            return None
        start_ns = whole(span.start_time_unix_nano)
        # 0 is what a span that has not ended has.
        end_ns = whole(span.end_time_unix_nano) or start_ns
        fault = instant_fault(_START, start_ns) or instant_fault(_END, end_ns)
        if fault or not isinstance(start_ns, int) or not isinstance(end_ns, int):
            return fault or f"lacks {_START}", ""
        return self._table.add(found, start_ns, end_ns)


OTLP = TraceFormat(name="otlp", matches=matches, read=read)
