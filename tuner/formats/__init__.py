"""Readers of recorded traffic: one module per public format behind one way in, `read_trace`."""

from __future__ import annotations

from tuner.formats.columns import Columns, ReadOptions, TraceFormat
from tuner.formats.registry import format_names, read_trace

__all__ = ["Columns", "ReadOptions", "TraceFormat", "format_names", "read_trace"]
