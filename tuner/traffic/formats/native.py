"""Our own JSON Lines: Mooncake's keys, and a clock with its unit in the name if you like.

One object per line: `timestamp` (milliseconds) or `arrived_at_s` (seconds), `input_length`,
`output_length`, and if known `hash_ids`, `e2e_s`, `ttft_s`, `request_id`, `model`; a turn that
waits for an answer says `after` (the number of that request in the file, from 0) and `pause_s`,
a `priority` is vLLM's, the smallest served first, 0 without one. `engine_index` is that of the
engine which answered, where several were recorded together.
A `status` of `abort` says that the client left before the answer was whole. Other keys are
ignored. A first line `{"trace_header": {"version": 1, ...}}` says what holds for all:
`block_size` of the hash ids (512 without it), `clock` (wall, shared, own), `in_flight` (a
recording of concurrency in place of arrivals), `starts_at_s` (what the requests' clock showed
when that began, if not with the first of them), `sampled_from`, `remarks`, `lacks`, `aborted`
(how many answers had been cut short where the rows no longer say so).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tuner.traffic.formats.columns import (
    Columns,
    ReadOptions,
    TimeUnit,
    TraceFormat,
    no_time_unit,
    starts_object,
)
from tuner.traffic.formats.jsonl import read_json_lines
from tuner.traffic.formats.jsonl_rows import KEY, Dialect, Header
from tuner.traffic.prefixes import MAX_SIZE
from tuner.traffic.traces import Trace, ZeroOutput

MOONCAKE_BLOCK_SIZE = 512
"""Source: Mooncake's FAST25 trace notes; the files themselves do not carry it."""


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns.

    Raises: TraceError that names the first wrong line; UsageError for a unit of a clock that
        has its own.
    """

    def chosen(row: dict[str, object], header: Header) -> Dialect:
        if "arrived_at_s" in row:
            no_time_unit(path, options)
        return settle(options, row, header)

    return read_json_lines(path, options, chosen)


def settle(
    options: ReadOptions,
    row: dict[str, object],
    header: Header,
    usual_size: int = MOONCAKE_BLOCK_SIZE,
) -> Dialect:
    """Let the options, the header and the first row choose the clock and the block size."""
    clock = "arrived_at_s" if "arrived_at_s" in row else "timestamp"
    usual = TimeUnit.MILLISECONDS if clock == "timestamp" else TimeUnit.SECONDS
    size = row.get("block_size")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < MAX_SIZE:
        size = header.block_size or usual_size
    return Dialect(
        clock=clock,
        ticks_per_s=(options.time_unit or usual).ticks_per_s,
        block_size=options.hash_block_size or size,
        zero_is_fault=options.zero_output is ZeroOutput.REFUSE,
        stated_size=size if options.hash_block_size is None else None,
        unit_is_usual=clock == "timestamp" and options.time_unit is None,
    )


def in_seconds(options: ReadOptions) -> ReadOptions:
    """Return options that say seconds where they leave it open."""
    return replace(options, time_unit=options.time_unit or TimeUnit.SECONDS)


# Bad objects too: the reader then names the line and what it lacks.
NATIVE = TraceFormat(name="native", matches=starts_object, read=read)


def native_rows(trace: Trace) -> Iterator[dict[str, object]]:
    """Yield the header, and each request as a JSON object."""
    begins_idle = trace.concurrency is not None and trace.due_s[0] > 0
    header = Header(
        block_size=trace.hashes.block_size if trace.hashes is not None else None,
        origin=trace.origin,
        hash_scope=trace.hash_scope,
        sampled_from=trace.notes.sampled_from,
        concurrency=trace.concurrency,
        starts_at_s=trace.zero_s if begins_idle else None,
        remarks=trace.notes.remarks,
        aborted=_aborted(trace),
    ).as_json()
    size = header.get("block_size")
    # A block size alone stands on the first line, as other tools understand it.
    is_needed = set(header) - {"version", "block_size"}
    if is_needed:
        yield {KEY: header}
    for i in range(len(trace)):
        yield _row(trace, i, size if i == 0 and not is_needed else None)


def _aborted(trace: Trace) -> int:
    """Return how many answers had been cut short: of a part of a recording its share of them.

    Which they were is not known any more.
    """
    count, kept = trace.notes.aborted, trace.notes.kept
    return round(count * len(trace) / kept) if kept > 0 else count


def _row(trace: Trace, i: int, size: object) -> dict[str, object]:
    row: dict[str, object] = {
        "arrived_at_s": round(trace.zero_s + float(trace.due_s[i]), 9),
        "input_length": int(trace.prompt_tokens[i]),
        "output_length": int(trace.output_tokens[i]),
    }
    if size is not None:
        row["block_size"] = size
    if trace.hashes is not None:
        ids = trace.hashes.row(i)
        if ids or trace.prompt_tokens[i] < trace.hashes.block_size:
            row["hash_ids"] = ids
    for name, column in (("e2e_s", trace.e2e_s), ("ttft_s", trace.ttft_s)):
        if column is not None and not np.isnan(column[i]):
            row[name] = float(column[i])
    if trace.turns is not None and trace.turns.after[i] >= 0:
        row["after"] = int(trace.turns.after[i])
        row["pause_s"] = float(trace.turns.pause_s[i])
    if trace.request_ids is not None and trace.request_ids[i]:
        row["request_id"] = trace.request_ids[i]
    if trace.priorities is not None:
        row["priority"] = int(trace.priorities[i])
    if trace.engines is not None and trace.engines[i] >= 0:
        row["engine_index"] = int(trace.engines[i])
    return row
