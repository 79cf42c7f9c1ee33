"""Raw columns of any format into a checked Trace: empty requests, order, zero of time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.errors import TraceError
from tuner.formats.columns import Columns
from tuner.hashes import Bools
from tuner.traces import ReadNotes, Trace, ZeroOutput

ZERO_PROMPT = "prompt of 0 tokens"
ZERO_OUTPUT = "output of 0 tokens"


def assemble(
    columns: Columns, zero_output: ZeroOutput, *, source: str, format_name: str, sha256: str
) -> Trace:
    """Return the trace of a file's columns: empty requests treated, sorted, starting at 0.

    Under REFUSE the readers raise at the line, so no empty request arrives here.

    Raises: TraceError if no request is left.
    """
    rows = len(columns.prompt_tokens)
    if zero_output is ZeroOutput.ONE:
        columns = replace(columns, output_tokens=np.maximum(columns.output_tokens, 1))
    no_prompt = columns.prompt_tokens < 1
    no_output = (columns.output_tokens < 1) & ~no_prompt
    notes = ReadNotes(rows=rows).with_dropped(ZERO_PROMPT, int(no_prompt.sum()))
    notes = notes.with_dropped(ZERO_OUTPUT, int(no_output.sum()))
    if notes.dropped:
        columns = _take(columns, np.flatnonzero(~(no_prompt | no_output)))
    if not len(columns.prompt_tokens):
        raise TraceError(
            f"{source}: all {rows} requests are empty", "pass --zero-output one to keep them"
        )
    columns, moved = _in_order(columns)
    arrived = columns.arrived - columns.arrived[0]
    return Trace(
        due_s=arrived / columns.ticks_per_s,
        prompt_tokens=columns.prompt_tokens,
        output_tokens=columns.output_tokens,
        hashes=columns.hashes,
        e2e_s=columns.e2e_s,
        request_ids=columns.request_ids,
        source=source,
        format=format_name,
        sha256=sha256,
        notes=replace(notes, moved=moved),
    )


def _in_order(columns: Columns) -> tuple[Columns, int]:
    """Sort stably by arrival; count the rows that arrived before one that stands above them."""
    arrived = columns.arrived
    is_late: Bools = arrived < np.maximum.accumulate(arrived)
    if not is_late.any():
        return columns, 0
    return _take(columns, np.argsort(arrived, kind="stable")), int(is_late.sum())


def _take(columns: Columns, rows: npt.NDArray[np.int64]) -> Columns:
    names = columns.request_ids
    return replace(
        columns,
        arrived=columns.arrived[rows],
        prompt_tokens=columns.prompt_tokens[rows],
        output_tokens=columns.output_tokens[rows],
        hashes=columns.hashes.take(rows) if columns.hashes is not None else None,
        e2e_s=columns.e2e_s[rows] if columns.e2e_s is not None else None,
        request_ids=tuple(names[i] for i in rows.tolist()) if names is not None else None,
    )
