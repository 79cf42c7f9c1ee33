"""The file of a traffic sketch, as a run keeps it: `traffic.json`.

JSON, so that other tools can read it. Histograms stand as what lies between their first and
last filled bucket. A damaged file is refused as a whole, for half a sketch is another traffic.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tuner.arrays import Floats, Ints
from tuner.errors import UsageError
from tuner.traffic_sketch import EDGES, LEVEL_EDGES, Bursts, TrafficSketch

TRAFFIC_FILE: Final = "traffic.json"
SCHEMA: Final = 1

_Row = tuple[int, list[int]]
"""The first filled bucket, and the counts from there to the last one."""


class _Bursts(msgspec.Struct, forbid_unknown_fields=True):
    windows: list[int]
    requests: list[int]
    variance: list[float]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    source: str
    sha256: str
    requests: int
    duration_s: float
    is_closed: bool
    sampled_from: str
    # JSON knows no infinity: null where nobody knows.
    resolution_s: float | None
    block_s: float
    counts: list[int]
    prompt_sum: list[int]
    output_sum: list[int]
    prompt: list[_Row]
    output: list[_Row]
    in_flight: list[_Row]
    bursts: dict[str, _Bursts]
    held: dict[str, list[int]] | None


def write_sketch(path: Path, sketch: TrafficSketch) -> None:
    """Write the sketch whole or not at all. Raises: UsageError if it cannot be written."""
    copy = path.with_name(f".{path.name}.new")
    try:
        with copy.open("wb") as file:
            file.write(msgspec.json.encode(_in_file(sketch)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        copy.replace(path)
    except OSError as error:
        with suppress(OSError):
            copy.unlink(missing_ok=True)
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", "free space there"
        ) from error


def read_sketch(path: Path) -> TrafficSketch:
    """Return the sketch of a file. Raises: UsageError if it cannot be read or is damaged."""
    hint = "name the traffic that the run was tuned for with --baseline-trace"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
        if found.schema != SCHEMA:
            raise UsageError(f"{path}: schema must be {SCHEMA}, got {found.schema}", hint)
        return _from_file(found)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}", hint) from error


def _in_file(sketch: TrafficSketch) -> _File:
    finite = np.isfinite(sketch.resolution_s)
    return _File(
        schema=SCHEMA,
        source=sketch.source,
        sha256=sketch.sha256,
        requests=sketch.requests,
        duration_s=sketch.duration_s,
        is_closed=sketch.is_closed,
        sampled_from=sketch.sampled_from,
        resolution_s=sketch.resolution_s if finite else None,
        block_s=sketch.block_s,
        counts=sketch.counts.tolist(),
        prompt_sum=sketch.prompt_sum.tolist(),
        output_sum=sketch.output_sum.tolist(),
        prompt=_rows(sketch.prompt),
        output=_rows(sketch.output),
        in_flight=_rows(sketch.in_flight),
        bursts={
            f"{scale_s:g}": _Bursts(
                found.windows.astype(int).tolist(),
                found.requests.astype(int).tolist(),
                np.round(found.variance, 3).tolist(),
            )
            for scale_s, found in sketch.bursts.items()
        },
        held=None
        if sketch.held is None
        else {f"{lookback_s:g}": held.tolist() for lookback_s, held in sketch.held.items()},
    )


def _from_file(found: _File) -> TrafficSketch:
    """Return the sketch. Raises: ValueError if a column is not as long as the others."""
    blocks = len(found.counts)

    def column(name: str, values: list[int]) -> Ints:
        return _checked(name, np.array(values, dtype=np.int64), blocks)

    return TrafficSketch(
        source=found.source,
        sha256=found.sha256,
        requests=found.requests,
        duration_s=found.duration_s,
        is_closed=found.is_closed,
        sampled_from=found.sampled_from,
        resolution_s=np.inf if found.resolution_s is None else found.resolution_s,
        block_s=found.block_s,
        counts=column("counts", found.counts),
        prompt_sum=column("prompt_sum", found.prompt_sum),
        output_sum=column("output_sum", found.output_sum),
        prompt=_read_table("prompt", found.prompt, blocks, len(EDGES)),
        output=_read_table("output", found.output, blocks, len(EDGES)),
        in_flight=_read_table("in_flight", found.in_flight, blocks, len(LEVEL_EDGES)),
        bursts={
            float(scale): _read_bursts(kept, blocks) for scale, kept in found.bursts.items()
        },
        held=None
        if found.held is None
        else {float(lookback): column("held", kept) for lookback, kept in found.held.items()},
    )


def _read_bursts(kept: _Bursts, blocks: int) -> Bursts:
    parts = (kept.windows, kept.requests, kept.variance)
    windows, requests, variance = (_floats(part, blocks) for part in parts)
    return Bursts(windows, requests, variance)


def _floats(values: list[int] | list[float], blocks: int) -> Floats:
    found = np.array(values, dtype=np.float64)
    if found.shape != (blocks,) or found.min(initial=0.0) < 0:
        raise ValueError(f"bursts must hold {blocks} blocks of 0 or more")
    return found


def _checked(name: str, found: Ints, blocks: int) -> Ints:
    if found.shape != (blocks,) or found.min(initial=0) < 0:
        raise ValueError(f"{name} must hold {blocks} blocks of 0 or more, got {found.size}")
    return found


def _rows(table: Ints) -> list[_Row]:
    rows = []
    for row in table:
        filled = np.flatnonzero(row)
        first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
        rows.append((first, row[first : last + 1].tolist()))
    return rows


def _read_table(name: str, rows: list[_Row], blocks: int, buckets: int) -> Ints:
    table = np.zeros((blocks, buckets), dtype=np.int64)
    if len(rows) != blocks:
        raise ValueError(f"{name} must hold {blocks} blocks, got {len(rows)}")
    for block, (first, counts) in enumerate(rows):
        if first < 0 or first + len(counts) > buckets or min(counts, default=0) < 0:
            raise ValueError(f"{name}: block {block} does not fit its {buckets} buckets")
        table[block, first : first + len(counts)] = counts
    return table
