"""vidur's processed traces: seconds from 0 and two token counts, found by name.

Source: microsoft/vidur, data/processed_traces/splitwise_*.csv.
"""

from __future__ import annotations

from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TimeUnit, TraceFormat
from tuner.traffic.formats.csv_table import Field, Kind, header_names, read_table
from tuner.traffic.traces import ClockOrigin

TIME, PROMPT, OUTPUT = "arrived_at", "num_prefill_tokens", "num_decode_tokens"

_FIELDS = {
    "arrived": Field((TIME,), Kind.SECONDS),
    "prompt": Field((PROMPT,), Kind.TOKENS),
    "output": Field((OUTPUT,), Kind.TOKENS),
}


def matches(head: bytes) -> bool:
    """Return whether the header names the clock and at least one of the token columns."""
    names = header_names(head)
    return TIME in names and (PROMPT in names or OUTPUT in names)


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns, streamed and parsed in bulk.

    Units: the clock in seconds, or in the unit that the options name.
    Raises: TraceError that names the first wrong line.
    """
    table = read_table(path, _FIELDS, options)
    return Columns(
        arrived=table.numbers["arrived"],
        ticks_per_s=(options.time_unit or TimeUnit.SECONDS).ticks_per_s,
        prompt_tokens=table.whole["prompt"],
        output_tokens=table.whole["output"],
        origin=ClockOrigin.SHARED,
        skipped=table.skipped,
    )


VIDUR = TraceFormat(name="vidur", matches=matches, read=read)
