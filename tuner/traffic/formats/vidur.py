"""vidur's processed traces: seconds from 0 and two token counts, found by name.

Source: microsoft/vidur, data/processed_traces/splitwise_*.csv.
"""

from __future__ import annotations

from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat
from tuner.traffic.formats.csv_table import Kind, ThreeColumns

TIME, PROMPT, OUTPUT = "arrived_at", "num_prefill_tokens", "num_decode_tokens"

_COLUMNS = ThreeColumns(TIME, Kind.SECONDS, PROMPT, OUTPUT)


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns. Raises: TraceError that names the first wrong line."""
    return _COLUMNS.columns(_COLUMNS.read(path, options), options)


VIDUR = TraceFormat(name="vidur", matches=_COLUMNS.stand_in, read=read)
