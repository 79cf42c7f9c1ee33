"""JSON Lines into columns, for the native format and its subset Mooncake.

Good data takes the fast way: blocks of lines decoded to typed rows. When a block fails, its
lines are read again one by one in `jsonl_faults` to say which one is wrong and why; so the
message is exact and good data does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from tuner.errors import TraceError
from tuner.formats.columns import Columns, ReadOptions, line_error, tokens_are_plausible
from tuner.formats.jsonl_faults import MAX_CLOCK, Dialect, parse_line, raise_first_fault
from tuner.hashes import Bools, Floats, HashIds, Ints, counts_fit, offsets_of
from tuner.traces import ZeroOutput

BLOCK_BYTES = 1 << 22
"""Ours: rows of 4 MiB as objects stay below 50 MB, and larger blocks are not faster."""

MAX_LINE_BYTES = 1 << 24
"""Ours: a million tokens hashed in blocks of 16 need half a megabyte."""

MOONCAKE_BLOCK_SIZE = 512
"""Source: Mooncake's FAST25 trace notes; the files themselves do not carry it."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Row(msgspec.Struct, gc=False, kw_only=True):
    """What a line may hold; `chat_id` only to refuse it, as it marks a clock in seconds."""

    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    block_size: int | None = None
    e2e_s: float | None = None
    request_id: str | int | None = None
    chat_id: None = None


class _MillisecondsRow(_Row, gc=False, kw_only=True):
    timestamp: int | float
    arrived_at_s: None = None


class _WholeMillisecondsRow(_MillisecondsRow, gc=False, kw_only=True):
    timestamp: int


class _SecondsRow(_Row, gc=False, kw_only=True):
    arrived_at_s: int | float
    timestamp: None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The columns of some lines; counts is -1 where a line has no hash_ids at all."""

    arrived: Floats
    prompt: Ints
    output: Ints
    e2e_s: Floats
    counts: Ints
    ids: Ints
    request_ids: tuple[str, ...] | None


def read_json_lines(path: Path, options: ReadOptions, *, whole_ticks: bool = False) -> Columns:
    """Return the columns of a JSON Lines file.

    Raises: TraceError that names the first wrong line, what was expected and what we got.
    """
    blocks: list[_Block] = []
    dialect: Dialect | None = None
    for first_line, data in _line_blocks(path):
        if not data.strip():
            continue
        if dialect is None:
            dialect = _dialect(path, first_line, data, options, whole_ticks=whole_ticks)
        blocks.append(_read_block(path, first_line, data, dialect))
    if dialect is None:
        raise TraceError(f"{path} holds only blank lines", "give one JSON object per line")
    return _join(blocks, dialect)


def _line_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, whole lines) until the file ends."""
    line, rest = 1, b""
    with path.open("rb") as file:
        if file.read(3) != _BYTE_ORDER_MARK:
            file.seek(0)
        while data := file.read(BLOCK_BYTES):
            data = rest + data
            cut = data.rfind(b"\n") + 1
            if cut:
                yield line, data[:cut]
                line += data.count(b"\n", 0, cut)
            rest = data[cut:]
            if len(rest) > MAX_LINE_BYTES:
                raise line_error(path, line, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
    if rest:
        yield line, rest


def _dialect(
    path: Path, first_line: int, data: bytes, options: ReadOptions, *, whole_ticks: bool
) -> Dialect:
    """Let the first line that is not blank choose the clock and the block size."""
    numbered = enumerate(data.split(b"\n"), start=first_line)
    number, line = next((number, line) for number, line in numbered if line.strip())
    row = parse_line(path, number, line)
    size = row.get("block_size")
    is_size = isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 31
    return Dialect(
        clock="arrived_at_s" if "arrived_at_s" in row else "timestamp",
        block_size=size if is_size and isinstance(size, int) else MOONCAKE_BLOCK_SIZE,
        zero_is_fault=options.zero_output is ZeroOutput.REFUSE,
        whole_ticks=whole_ticks,
    )


def _read_block(path: Path, first_line: int, data: bytes, dialect: Dialect) -> _Block:
    """Return the columns of whole lines, or raise for the first wrong one."""
    try:
        if not data.isascii():
            data.decode("utf-8")
        block = _decode(data, dialect)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as cause:
        raise_first_fault(path, first_line, data, dialect)
        reason = f"this line or one of the {data.count(10)} after it cannot be read: {cause}"
        raise line_error(path, first_line, reason) from cause
    lines = sum(1 for line in data.split(b"\n") if line.strip())
    if block is None or len(block.prompt) != lines:
        raise_first_fault(path, first_line, data, dialect)
    if block is None:
        reason = f"this line or one of the {lines} after it is not a valid request"
        raise line_error(path, first_line, reason)
    return block


def _decode(data: bytes, dialect: Dialect) -> _Block | None:
    """Return the columns, or None if a value is out of range."""
    if dialect.clock == "arrived_at_s":
        seconds = msgspec.json.Decoder(_SecondsRow).decode_lines(data)
        arrived = np.fromiter((row.arrived_at_s for row in seconds), np.float64, len(seconds))
        return _columns(seconds, arrived, dialect)
    kind = _WholeMillisecondsRow if dialect.whole_ticks else _MillisecondsRow
    millis = msgspec.json.Decoder(kind).decode_lines(data)
    arrived = np.fromiter((row.timestamp for row in millis), np.float64, len(millis))
    return _columns(millis, arrived, dialect)


def _columns(rows: Sequence[_Row], arrived: Floats, dialect: Dialect) -> _Block | None:
    n = len(rows)
    lists = [row.hash_ids for row in rows]
    names = [row.request_id for row in rows]
    block = _Block(
        arrived=arrived,
        prompt=np.fromiter((row.input_length for row in rows), np.int64, n),
        output=np.fromiter((row.output_length for row in rows), np.int64, n),
        e2e_s=np.array([row.e2e_s for row in rows], np.float64),
        counts=np.array([-1 if ids is None else len(ids) for ids in lists], np.int64),
        ids=np.fromiter(chain.from_iterable(ids for ids in lists if ids), np.int64),
        request_ids=None
        if names.count(None) == n
        else tuple("" if name is None else str(name) for name in names),
    )
    sizes = {row.block_size for row in rows} - {None, dialect.block_size}
    return block if not sizes and _is_plausible(block, dialect) else None


def _is_plausible(block: _Block, dialect: Dialect) -> bool:
    return bool(
        np.all(np.abs(block.arrived) <= MAX_CLOCK)
        and tokens_are_plausible(block.prompt, zero_is_fault=dialect.zero_is_fault)
        and tokens_are_plausible(block.output, zero_is_fault=dialect.zero_is_fault)
        and not np.any(block.e2e_s < 0)
        and not np.any(_misfits(block.counts, block.prompt, dialect.block_size))
    )


def _misfits(counts: Ints, prompt: Ints, block_size: int) -> Bools:
    """Absent ids (-1) always fit; an empty list fits only a prompt shorter than a block."""
    fits = counts_fit(counts, prompt, block_size) & ~((counts == 0) & (prompt >= block_size))
    misfits: Bools = ~fits & (counts >= 0)
    return misfits


def _join(blocks: Sequence[_Block], dialect: Dialect) -> Columns:
    counts = np.concatenate([block.counts for block in blocks])
    e2e_s = np.concatenate([block.e2e_s for block in blocks])
    hashes = None
    if np.any(counts >= 0):
        ids = np.concatenate([block.ids for block in blocks])
        hashes = HashIds(offsets_of(np.maximum(counts, 0)), ids, dialect.block_size)
    request_ids = None
    if any(block.request_ids is not None for block in blocks):
        each = (block.request_ids or ("",) * len(block.prompt) for block in blocks)
        request_ids = tuple(chain.from_iterable(each))
    return Columns(
        arrived=np.concatenate([block.arrived for block in blocks]),
        ticks_per_s=dialect.ticks_per_s,
        prompt_tokens=np.concatenate([block.prompt for block in blocks]),
        output_tokens=np.concatenate([block.output for block in blocks]),
        hashes=hashes,
        e2e_s=None if np.isnan(e2e_s).all() else e2e_s,
        request_ids=request_ids,
    )
