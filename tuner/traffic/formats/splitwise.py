"""Splitwise-sim's traces: one LLM request per row, with an id and a batch size.

A row with a batch size of b stands for b sequences of the same lengths: the simulator charges
the KV cache for b of them. A cap on sequences counts each, so each is replayed as a request of
its own. The simulator's own generator writes 1 throughout.

Source: Mutinifni/splitwise-sim, generate_trace.py; request.py, estimate_kv_cache_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tuner.errors import TraceError
from tuner.stats import Ints
from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat, shown
from tuner.traffic.formats.csv_table import CsvTable, Field, Kind, ThreeColumns

_COLUMNS = ThreeColumns("arrival_timestamp", Kind.SECONDS, "prompt_size", "token_size")
BATCH = "batch_size"

MAX_BATCH = 1024
"""Ours: the largest cap that vLLM sets by default; a greater number is another quantity."""

_MORE = {
    "request_id": Field("request_id", Kind.LABEL, is_needed=False),
    "batch": Field(BATCH, Kind.SECONDS, is_needed=False, blank=True),
}


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns; batches become requests.

    Raises: TraceError that names the first wrong line or request.
    """
    table = _COLUMNS.read(path, options, _MORE)
    sequences, skipped = _sequences(path, table, options)
    columns = replace(
        _COLUMNS.columns(table, options),
        request_ids=_request_ids(table),
        skipped={**table.skipped, **skipped},
        remarks=_on_batches(sequences),
    )
    if (sequences == 1).all():
        return columns
    return columns.take(np.repeat(np.arange(len(sequences)), sequences))


def _sequences(
    path: Path, table: CsvTable, options: ReadOptions
) -> tuple[Ints, Mapping[str, int]]:
    """Return how many sequences each row stands for; 0 where wrong rows are skipped."""
    sizes = table.numbers.get("batch")
    if sizes is None:
        return np.ones(len(table), dtype=np.int64), {}
    sizes = np.where(np.isnan(sizes), 1.0, sizes)
    is_wrong = (sizes < 1) | (sizes > MAX_BATCH) | (sizes != np.floor(sizes))
    reason = f"{BATCH} must be a whole number from 1 to {MAX_BATCH:,}"
    if is_wrong.any() and (
        not options.skip_invalid or is_wrong.mean() > options.max_invalid_ratio
    ):
        first = int(np.flatnonzero(is_wrong)[0])
        raise TraceError(
            f"{path} request {first + 1}: {reason}, got {shown(float(sizes[first]))}",
            "--skip-invalid counts and skips such rows, up to --max-invalid",
        )
    counts = np.where(is_wrong, 0, sizes).astype(np.int64)
    return counts, {reason: int(is_wrong.sum())} if is_wrong.any() else {}


def _request_ids(table: CsvTable) -> tuple[str, ...] | None:
    labels = table.labels.get("request_id")
    if labels is None:
        return None
    return tuple(labels.names[code] if code >= 0 else "" for code in labels.codes.tolist())


def _on_batches(sequences: Ints) -> tuple[str, ...]:
    batches = sequences[sequences > 1]
    if not batches.size:
        return ()
    message = (
        f"{batches.size:,} rows are batches: each of their {int(batches.sum()):,} sequences "
        "is replayed as a request of its own"
    )
    return (message,)


SPLITWISE = TraceFormat(name="splitwise", matches=_COLUMNS.stand_in, read=read)
