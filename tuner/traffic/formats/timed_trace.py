"""The data set `timed_trace` of vLLM's own benchmark: JSON Lines in seconds, blocks of 16.

Its keys are Mooncake's, and its unit and block size are options of that benchmark, so nothing
in a file tells it from Mooncake's: it has to be named, with --trace-format timed-trace.

Source: vLLM vllm/benchmarks/datasets, TimedTrace; --timed-trace-sec-multiplier is 1 and
--timed-trace-chunk-hash-size 16 unless given, as --time-unit and --hash-block-size here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TimeUnit, TraceFormat
from tuner.traffic.formats.jsonl import read_json_lines
from tuner.traffic.formats.jsonl_rows import Dialect, Header
from tuner.traffic.formats.native import settle

BLOCK_SIZE = 16


def matches(head: bytes) -> bool:  # noqa: ARG001 - every format is asked alike
    """Return False: nothing in a file identifies the format."""
    return False


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns. Raises: TraceError that names the first wrong line."""
    return read_json_lines(path, options, partial(_seconds, options))


def _seconds(options: ReadOptions, row: dict[str, object], header: Header) -> Dialect:
    dialect = settle(options, row, header)
    return replace(
        dialect,
        ticks_per_s=(options.time_unit or TimeUnit.SECONDS).ticks_per_s,
        block_size=options.hash_block_size or BLOCK_SIZE,
    )


TIMED_TRACE = TraceFormat(name="timed-trace", matches=matches, read=read)
