"""Our own JSON Lines: Mooncake's keys, and a clock with its unit in the name if you like.

One object per line: `timestamp` (milliseconds) or `arrived_at_s` (seconds), `input_length`,
`output_length`, and if known `hash_ids` with `block_size` (512 without it), `e2e_s` and
`request_id`. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from tuner.formats.columns import TraceFormat
from tuner.formats.jsonl import read_json_lines
from tuner.traces import Trace


def matches(head: bytes) -> bool:
    """Say whether the file starts like a JSON object, good or bad.

    Bad ones too: the reader then names the line and what it lacks.
    """
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


NATIVE = TraceFormat(name="native", matches=matches, read=read_json_lines)


def write_native(trace: Trace, path: Path) -> None:
    """Write a trace as native JSON Lines; reading them gives the same columns back."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for row in _rows(trace):
            file.write(encode(row) + b"\n")


def _rows(trace: Trace) -> Iterator[dict[str, object]]:
    for i in range(len(trace)):
        row: dict[str, object] = {
            "arrived_at_s": float(trace.due_s[i]),
            "input_length": int(trace.prompt_tokens[i]),
            "output_length": int(trace.output_tokens[i]),
        }
        if trace.hashes is not None:
            if i == 0:
                row["block_size"] = trace.hashes.block_size
            ids = trace.hashes.row(i)
            if ids or trace.prompt_tokens[i] < trace.hashes.block_size:
                row["hash_ids"] = ids
        if trace.e2e_s is not None and not np.isnan(trace.e2e_s[i]):
            row["e2e_s"] = float(trace.e2e_s[i])
        if trace.request_ids is not None and trace.request_ids[i]:
            row["request_id"] = trace.request_ids[i]
        yield row
