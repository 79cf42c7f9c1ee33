"""Readers of recorded traffic: one module per public format behind one way in, `read_trace`.

`registry` finds the format, `sources` opens files, `columns` is what every reader returns and
how that becomes a trace; `jsonl`, `csv_table`, `json_document`, `span_table` and `wall_clock`
are what formats share.
"""

from __future__ import annotations

from tuner.traffic.formats.columns import Columns, Labels, ReadOptions, TimeUnit, TraceFormat
from tuner.traffic.formats.registry import format_names, read_trace, read_traces

__all__ = [
    "Columns",
    "Labels",
    "ReadOptions",
    "TimeUnit",
    "TraceFormat",
    "format_names",
    "read_trace",
    "read_traces",
]
