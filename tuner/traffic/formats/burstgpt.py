"""BurstGPT's CSV, with six columns or eight: whole seconds, failures, sessions and two models.

Columns are found by name, as `Session ID` and `Elapsed time` stand at the end of some files
and behind the clock in others. The clock counts from midnight of the first day, which all
files of the data set share. A row without response tokens is a request that failed.

Source: HPMLL/BurstGPT, README.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tuner.stats import Bools, Floats
from tuner.traffic.formats.columns import Columns, Labels, ReadOptions, TraceFormat, recorded
from tuner.traffic.formats.csv_table import CsvTable, Field, Kind, ThreeColumns
from tuner.traffic.traces import Turns, pauses_of

_COLUMNS = ThreeColumns("Timestamp", Kind.SECONDS, "Request tokens", "Response tokens")

_MORE = {
    "model": Field("Model", Kind.LABEL, is_needed=False),
    "session": Field("Session ID", Kind.LABEL, is_needed=False),
    "e2e_s": Field("Elapsed time", Kind.SECONDS, is_needed=False, blank=True),
}


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns; sessions become turns.

    Units: Elapsed time in seconds.
    Raises: TraceError that names the first wrong line.
    """
    table = _COLUMNS.read(path, options, _MORE)
    columns = _COLUMNS.columns(table, options)
    e2e_s, negative = _latencies(table)
    failed: Bools = columns.output_tokens == 0
    turns = None
    if (sessions := table.labels.get("session")) is not None:
        is_turn: Bools = ~failed & (columns.prompt_tokens > 0)
        arrived_s = columns.arrived / columns.ticks_per_s
        turns = turns_of_sessions(sessions, is_turn, arrived_s, e2e_s)
    return replace(
        columns,
        e2e_s=recorded(e2e_s),
        models=table.labels.get("model"),
        failed=failed,
        turns=turns,
        remarks=(*_on_negative(negative), *_on_unknown_ends(turns, e2e_s)),
    )


def turns_of_sessions(
    sessions: Labels, is_turn: Bools, arrived_s: Floats, e2e_s: Floats
) -> Turns | None:
    """Return the turns: each request waits for the one before it in its session.

    Turns are in order of arrival, equal instants in order of the file. Rows that are no turn
    are passed over, so that the turn behind a failed one waits for the one before it.

    Shapes: all [n]; None if no request waits.
    """
    rows = np.flatnonzero((sessions.codes >= 0) & is_turn)
    ordered = rows[np.lexsort((arrived_s[rows], sessions.codes[rows]))]
    codes = sessions.codes[ordered]
    is_next = codes[1:] == codes[:-1]
    if not is_next.any():
        return None
    after = np.full(len(arrived_s), -1, dtype=np.int64)
    after[ordered[1:][is_next]] = ordered[:-1][is_next]
    return pauses_of(after, arrived_s, e2e_s)


def _latencies(table: CsvTable) -> tuple[Floats, int]:
    """Return the recorded latencies, and how many are impossible and taken as not recorded."""
    e2e_s = table.numbers.get("e2e_s")
    if e2e_s is None:
        return np.full(len(table), np.nan), 0
    is_negative = e2e_s < 0
    return np.where(is_negative, np.nan, e2e_s), int(is_negative.sum())


def _on_negative(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    return (f"an Elapsed time below 0 is taken as not recorded, in {count:,} rows",)


def _on_unknown_ends(turns: Turns | None, e2e_s: Floats) -> tuple[str, ...]:
    """Return what pauses are worth where the end of the answer before them is not recorded."""
    if turns is None:
        return ()
    awaited = turns.after[turns.after >= 0]
    unknown = int(np.isnan(e2e_s[awaited]).sum())
    if not unknown:
        return ()
    message = (
        f"the answers that {unknown:,} turns wait for have no recorded end: the pauses before "
        "these turns count from the arrival, and so hold the answer too"
    )
    return (message,)


BURSTGPT = TraceFormat(name="burstgpt", matches=_COLUMNS.stand_in, read=read)
