"""vidur's processed traces: seconds from 0 and two token counts, found by name.

Source: microsoft/vidur, data/processed_traces/splitwise_*.csv.
"""

from __future__ import annotations

from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TimeUnit, TraceFormat
from tuner.traffic.formats.csv_table import Kind, ThreeColumns
from tuner.traffic.traces import ClockOrigin

TIME, PROMPT, OUTPUT = "arrived_at", "num_prefill_tokens", "num_decode_tokens"

_COLUMNS = ThreeColumns(TIME, Kind.SECONDS, PROMPT, OUTPUT)


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns, streamed and parsed in bulk.

    Units: the clock in seconds, or in the unit that the options name.
    Raises: TraceError that names the first wrong line.
    """
    table = _COLUMNS.read(path, options)
    return Columns(
        arrived=table.numbers["arrived"],
        ticks_per_s=(options.time_unit or TimeUnit.SECONDS).ticks_per_s,
        prompt_tokens=table.whole["prompt"],
        output_tokens=table.whole["output"],
        origin=ClockOrigin.SHARED,
        skipped=table.skipped,
    )


VIDUR = TraceFormat(name="vidur", matches=_COLUMNS.stand_in, read=read)
