"""A trace in a few dozen kilobytes: what a later comparison with other traffic needs of it.

Time is cut into about a hundred blocks, and each keeps its counts, lengths, bursts, prefix
reuse and requests in flight. Blocks and not requests, because requests that come together are
alike: a comparison resamples blocks. A sketch is kept as a file beside the run's profile.

Tried and given up: moments and quantiles of the whole trace. They are smaller, but say nothing
of how much they would differ from one hour to the next by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from tuner.errors import UsageError
from tuner.files import UNREADABLE, write_atomic
from tuner.stats import Floats, Ints
from tuner.traffic.concurrency import SECONDS_PER_OUTPUT_TOKEN, Concurrency
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace


def held_tokens(
    hashes: HashIds, due_s: Floats, prompt_tokens: Ints, lookbacks_s: Sequence[float]
) -> dict[float, Ints]:
    """Return by lookback the prompt tokens of each request whose prefix came so recently.

    Shapes: due_s, prompt_tokens and each result are [n], due_s ascending.

    >>> rows = HashIds.from_rows([(7, 8), (7, 9), (7, 8)], block_size=16)
    >>> held = held_tokens(rows, np.array([0.0, 1.0, 9.0]), np.full(3, 32), (4.0, 10.0))
    >>> held[4.0].tolist(), held[10.0].tolist()
    ([0, 16, 0], [0, 16, 32])
    """
    since_s = _since_last_s(hashes, due_s)
    return {
        lookback_s: np.minimum(
            hashes.leading(since_s <= lookback_s) * hashes.block_size, prompt_tokens
        )
        for lookback_s in lookbacks_s
    }


def _since_last_s(hashes: HashIds, due_s: Floats) -> Floats:
    """Return for each id how long before its request an earlier one had it.

    Shapes: [ids]; inf where none had.
    """
    rows = np.repeat(np.arange(len(hashes)), hashes.counts)
    order = np.argsort(hashes.ids, kind="stable")
    ids, row = hashes.ids[order], rows[order]
    is_again = (ids[1:] == ids[:-1]) & (row[1:] > row[:-1])
    since_s = np.full(len(ids), np.inf)
    since_s[order[1:][is_again]] = (due_s[row[1:]] - due_s[row[:-1]])[is_again]
    return since_s


MIN_BLOCKS: Final = 64
"""Ours: fewer than twice as many blocks follow; enough to resample, few enough to keep."""

BURST_SCALES_S: Final = (1.0, 4.0, 16.0, 64.0)
"""Ours: from what one batch of an engine sees to what its queue outlasts."""

SLOTS_PER_WINDOW: Final = 16
"""Ours: counts are compared with those of sixteen slots around, not with another hour's."""

MAX_SLOTS: Final = 10_000_000
"""Ours: counts of four months by the second take 80 MB; of more only longer slots are kept."""

LOOKBACKS_S: Final = (16.0, 64.0, 256.0, 1024.0, 4096.0)
"""Ours: how long a prefix is remembered; without an end longer traces would show more reuse."""

INSTANTS_PER_BLOCK: Final = 64
"""Ours: how often a block looks how many requests are in flight."""

_DECADES = 7
# What comes within a millisecond comes at once: ours, no recording's clock is finer.
_SHORTEST_S = 1e-3


def _edges() -> Ints:
    """Return the upper bounds of the buckets of lengths, 1 to ten million."""
    parts = [
        np.geomspace(low, high, steps + 1)[1:] * 10.0**decade
        for decade in range(_DECADES)
        for low, high, steps in ((1, 2, 8), (2, 5, 10), (5, 10, 8))
    ]
    return np.unique(np.rint(np.concatenate([np.ones(1), *parts]))).astype(np.int64)


EDGES: Final = _edges()
"""Bucket i holds lengths above EDGES[i - 1] up to EDGES[i], a tenth apart.

Source: 1, 2, 5, 10, 20, … are among them, the bounds of vLLM's own length histograms
(build_1_2_5_buckets in vllm/v1/metrics), so that lengths drawn from those compare.
"""

LEVEL_EDGES: Final = np.concatenate([np.zeros(1, np.int64), EDGES])
"""The same for requests in flight, of which there may be none."""


@dataclass(frozen=True, slots=True, eq=False)
class Bursts:
    """How uneven arrivals are at one scale: windows of sixteen slots, summed by block.

    Shapes: windows, requests and variance are [blocks]; variance adds up the variances of the
        counts per slot within each window that begins in the block.
    """

    windows: Floats
    requests: Floats
    variance: Floats


@dataclass(frozen=True, slots=True, eq=False)
class TrafficSketch:
    """What is kept of a trace; equal stretches of time, the last part of one left out.

    `resolution_s` is the time within which arrivals were drawn at random because only their
    count was recorded: 0 for a recording, inf where unknown. `held` has by lookback the
    prompt tokens whose prefix came within so many seconds before, for a sampled trace the same
    for all: how soon a drawn prefix comes again is a guess. None without hash ids.

    Shapes: counts, prompt_sum, output_sum and each of held are [blocks], the histograms
        [blocks, buckets] of EDGES, in_flight [blocks, buckets] of LEVEL_EDGES.
    Units: seconds and tokens; in_flight counts instants, INSTANTS_PER_BLOCK of each block.
    """

    source: str
    sha256: str
    requests: int
    duration_s: float
    is_closed: bool
    sampled_from: str
    resolution_s: float
    block_s: float
    counts: Ints
    prompt_sum: Ints
    output_sum: Ints
    prompt: Ints
    output: Ints
    in_flight: Ints
    bursts: Mapping[float, Bursts]
    held: Mapping[float, Ints] | None

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.counts)


def sketch_of(trace: Trace, resolution_s: float | None = None) -> TrafficSketch:
    """Return the sketch of a trace.

    `resolution_s` says within which time a sampled trace's arrivals were drawn.
    """
    until_s = float(trace.due_s[-1])
    block_s = 2.0 ** math.floor(math.log2(max(until_s, _SHORTEST_S) / MIN_BLOCKS))
    blocks = int(until_s / block_s)
    # Requests of the unfinished last block fall behind the others and are cut off.
    place = np.minimum((trace.due_s / block_s).astype(np.int64), blocks)
    drawn_s = math.inf if trace.notes.sampled_from else 0.0
    return TrafficSketch(
        source=trace.source,
        sha256=trace.sha256,
        requests=len(trace),
        duration_s=until_s,
        is_closed=trace.concurrency is not None,
        sampled_from=trace.notes.sampled_from,
        resolution_s=drawn_s if resolution_s is None else resolution_s,
        block_s=block_s,
        counts=_summed(place, None, blocks),
        prompt_sum=_summed(place, trace.prompt_tokens, blocks),
        output_sum=_summed(place, trace.output_tokens, blocks),
        prompt=_histogram(place, trace.prompt_tokens, blocks),
        output=_histogram(place, trace.output_tokens, blocks),
        in_flight=_in_flight(trace, block_s, blocks),
        bursts={
            scale: _bursts(trace.due_s, scale, block_s, blocks)
            for scale in BURST_SCALES_S
            if until_s / scale <= MAX_SLOTS
        },
        held=_held(trace, place, blocks),
    )


def _summed(place: Ints, values: Ints | None, blocks: int) -> Ints:
    sums = np.bincount(place, weights=values, minlength=blocks + 1)[:blocks]
    return np.rint(sums).astype(np.int64)


def _histogram(place: Ints, tokens: Ints, blocks: int) -> Ints:
    bucket = np.minimum(np.searchsorted(EDGES, tokens, side="left"), len(EDGES) - 1)
    return _table(place, bucket, blocks, len(EDGES))


def _table(place: Ints, bucket: Ints, blocks: int, buckets: int) -> Ints:
    """Count pairs of block and bucket."""
    flat = np.bincount(place * buckets + bucket, minlength=(blocks + 1) * buckets)
    return flat.reshape(blocks + 1, buckets)[:blocks].astype(np.int64)


def _in_flight(trace: Trace, block_s: float, blocks: int) -> Ints:
    """Count instants by the number of requests that were in flight.

    A trace of arrivals is taken to need 20 ms for each output token, whatever was recorded of
    latencies: these belong to the configuration of that day, the demand does not.
    """
    instants = np.arange(blocks * INSTANTS_PER_BLOCK)
    at_s: Floats = (instants + 0.5) * np.float64(block_s / INSTANTS_PER_BLOCK)
    if trace.concurrency is not None:
        levels = _recorded(trace.concurrency, at_s)
    else:
        ends_s = np.sort(trace.due_s + trace.output_tokens * SECONDS_PER_OUTPUT_TOKEN)
        begun = np.searchsorted(trace.due_s, at_s, side="right")
        levels = begun - np.searchsorted(ends_s, at_s, side="right")
    bucket = np.minimum(np.searchsorted(LEVEL_EDGES, levels), len(LEVEL_EDGES) - 1)
    return _table(instants // INSTANTS_PER_BLOCK, bucket, blocks, len(LEVEL_EDGES))


def _recorded(flow: Concurrency, at_s: Floats) -> Ints:
    reading = np.searchsorted(flow.times_s, at_s, side="right") - 1
    return np.where(reading < 0, 0, flow.in_flight[np.maximum(reading, 0)])


def _bursts(due_s: Floats, scale_s: float, block_s: float, blocks: int) -> Bursts:
    """Return how counts per slot vary within windows of sixteen slots."""
    window_s = scale_s * SLOTS_PER_WINDOW
    windows = int(blocks * block_s / window_s)
    slot = (due_s / scale_s).astype(np.int64)
    size = windows * SLOTS_PER_WINDOW
    counts = np.bincount(slot[slot < size], minlength=size).reshape(windows, SLOTS_PER_WINDOW)
    place = (np.arange(windows) * window_s / block_s).astype(np.int64)
    spread = counts.var(axis=1, ddof=1) if windows else np.zeros(0)

    def by_block(values: Floats | None) -> Floats:
        return np.bincount(place, weights=values, minlength=blocks).astype(np.float64)

    return Bursts(by_block(None), by_block(counts.sum(axis=1) * 1.0), by_block(spread))


def _held(trace: Trace, place: Ints, blocks: int) -> dict[float, Ints] | None:
    if trace.hashes is None:
        return None
    if trace.notes.sampled_from:
        # Nothing comes again after longer than all of the trace.
        ever_s = float(trace.due_s[-1])
        held = held_tokens(trace.hashes, trace.due_s, trace.prompt_tokens, (ever_s,))
        return dict.fromkeys(LOOKBACKS_S, _summed(place, held[ever_s], blocks))
    held = held_tokens(trace.hashes, trace.due_s, trace.prompt_tokens, LOOKBACKS_S)
    return {lookback_s: _summed(place, tokens, blocks) for lookback_s, tokens in held.items()}


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
    # JSON has no infinity: null where it is unknown.
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
    content = msgspec.json.encode(_in_file(sketch), enc_hook=_as_lists) + b"\n"
    write_atomic(path, content, hint="free space there")


def read_sketch(path: Path) -> TrafficSketch:
    """Return the sketch of a file. Raises: UsageError if it cannot be read or is damaged."""
    hint = "name the traffic that the run was tuned for with --baseline-trace"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_File)
        if content.schema != SCHEMA:
            raise UsageError(f"{path}: schema must be {SCHEMA}, got {content.schema}", hint)
        return _from_file(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error
    except (*UNREADABLE, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}", hint) from error


def _in_file(sketch: TrafficSketch) -> dict[str, Any]:
    """Return what stands in the file; JSON has no infinity, msgspec writes null for it."""
    plain = {part.name: getattr(sketch, part.name) for part in fields(sketch)}
    bursts = {
        f"{scale_s:g}": Bursts(
            found.windows.astype(np.int64),
            found.requests.astype(np.int64),
            np.round(found.variance, 3),
        )
        for scale_s, found in sketch.bursts.items()
    }
    held = {f"{lookback_s:g}": sums for lookback_s, sums in (sketch.held or {}).items()}
    plain |= {"bursts": bursts, "held": None if sketch.held is None else held}
    return {"schema": SCHEMA, **plain}


def _as_lists(array: Any) -> Any:  # noqa: ANN401 - a table or a column, and what it holds
    return _rows(array) if array.ndim == 2 else array.tolist()


def _from_file(content: _File) -> TrafficSketch:
    """Return the sketch. Raises: ValueError if a column is not as long as the others."""
    blocks, found = len(content.counts), msgspec.structs.asdict(content)
    del found["schema"]
    for name in ("counts", "prompt_sum", "output_sum"):
        found[name] = _column(name, found[name], blocks)
    for name, edges in (("prompt", EDGES), ("output", EDGES), ("in_flight", LEVEL_EDGES)):
        found[name] = _read_table(name, found[name], blocks, len(edges))
    if content.resolution_s is None:
        found["resolution_s"] = math.inf
    found["bursts"] = {
        float(scale): Bursts(
            *(
                _column("bursts", part, blocks, np.float64)
                for part in msgspec.structs.astuple(one)
            )
        )
        for scale, one in content.bursts.items()
    }
    found["held"] = content.held and {
        float(lookback): _column("held", rows, blocks)
        for lookback, rows in content.held.items()
    }
    return TrafficSketch(**found)


def _column(name: str, values: Sequence[float], blocks: int, kind: type = np.int64) -> Any:  # noqa: ANN401 - an array of that kind
    column: Any = np.array(values, dtype=kind)
    if column.shape != (blocks,) or column.min(initial=0) < 0:
        raise ValueError(f"{name} must hold {blocks} blocks of 0 or more, got {column.size}")
    return column


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
