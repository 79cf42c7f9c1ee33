"""Mooncake's published traces: whole milliseconds, and hash ids in blocks of 512 tokens.

The data set `timed_trace` of vLLM's own benchmark has the same keys, in seconds and blocks of
16. Unit and block size are options of that benchmark, so nothing in a file tells it from
Mooncake's: it has to be named, with --trace-format timed-trace.

Source: kvcache-ai/Mooncake, FAST25-release/traces; vLLM vllm/benchmarks/datasets, TimedTrace:
--timed-trace-sec-multiplier is 1 and --timed-trace-chunk-hash-size 16 unless given, as
--time-unit and --hash-block-size here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat, first_line_of
from tuner.traffic.formats.jsonl import read_json_lines
from tuner.traffic.formats.jsonl_rows import Dialect, Header
from tuner.traffic.formats.native import in_seconds, settle

_NATIVE_ONLY = (
    *(b'"arrived_at_s"', b'"block_size"', b'"e2e_s"', b'"request_id"', b'"chat_id"'),
    b'"trace_header"',
)


def matches(head: bytes) -> bool:
    """Return whether the first line has Mooncake's keys and none that only others have."""
    line = first_line_of(head)
    return (
        line.startswith(b"{")
        and b'"timestamp"' in line
        and b'"hash_ids"' in line
        and not any(key in line for key in _NATIVE_ONLY)
    )


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns; a timestamp with a fraction is refused, as its unit is in doubt."""
    return read_json_lines(path, options, partial(_whole, options))


def _whole(options: ReadOptions, row: dict[str, object], header: Header) -> Dialect:
    return replace(settle(options, row, header), whole_ticks=options.time_unit is None)


MOONCAKE = TraceFormat(name="mooncake", matches=matches, read=read)

TIMED_BLOCK_SIZE = 16


def _read_timed(path: Path, options: ReadOptions) -> Columns:
    chosen = partial(settle, in_seconds(options), usual_size=TIMED_BLOCK_SIZE)
    return read_json_lines(path, options, chosen)


TIMED_TRACE = TraceFormat(name="timed-trace", matches=lambda _: False, read=_read_timed)
