"""JSON Lines into columns, for the native format and its relatives.

Good data takes the fast way: blocks of lines decoded to typed rows. When a block fails, its
lines are read again one by one, so that the message is exact and good data does not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tuner.errors import TraceError
from tuner.stats import Bools, Floats, Ints
from tuner.traffic.concurrency import SECONDS_PER_OUTPUT_TOKEN
from tuner.traffic.formats.columns import (
    Columns,
    Labels,
    ReadOptions,
    Skipped,
    line_error,
    recorded,
    skip_byte_order_mark,
    tokens_are_plausible,
    too_long,
)
from tuner.traffic.formats.jsonl_rows import (
    MAX_CLOCK,
    WRONG_JSON,
    Dialect,
    Header,
    sift,
    take_header,
)
from tuner.traffic.prefixes import HashIds, counts_fit, offsets_of
from tuner.traffic.traces import Texts, Turns, joined, joined_texts, pauses_of


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The columns of some lines; counts is -1 where a line has no hash_ids at all.

    `after` counts the file's requests from 0, -1 for none; chats and parents are Bailian's
    names of turns.
    """

    arrived: Floats
    prompt: Ints
    output: Ints
    e2e_s: Floats
    ttft_s: Floats
    counts: Ints
    ids: Ints
    request_ids: Texts
    models: Texts
    after: Ints
    pause_s: Floats
    chats: Texts
    parents: Texts
    aborted: Bools
    priorities: Ints | None
    engines: Ints | None

    def __len__(self) -> int:
        return len(self.prompt)


def misfits(counts: Ints, prompt: Ints, block_size: int) -> Bools:
    """Return which rows' ids do not fit; absent (-1) fit, an empty list only a short prompt."""
    fits = counts_fit(counts, prompt, block_size) & ~((counts == 0) & (prompt >= block_size))
    misfit: Bools = ~fits & (counts >= 0)
    return misfit


def join(
    path: Path, blocks: Sequence[Block], dialect: Dialect, header: Header, skipped: Skipped
) -> Columns:
    """Return the columns of a whole file.

    Raises: TraceError if turns wait for rows that are not there, or in a circle.
    """
    whole = _one(blocks)
    if whole.chats is None:
        turns, remark = _given_turns(path, whole, skipped), ""
    else:
        turns, remark = _chat_turns(whole, whole.chats, dialect.ticks_per_s)
    remarks = (*header.remarks, remark, _on_fractions(whole.arrived, dialect))
    return Columns(
        arrived=whole.arrived,
        ticks_per_s=dialect.ticks_per_s,
        starts_at_s=header.starts_at_s,
        prompt_tokens=whole.prompt,
        output_tokens=whole.output,
        hashes=_hashes(whole, dialect.block_size),
        e2e_s=recorded(whole.e2e_s),
        ttft_s=recorded(whole.ttft_s),
        request_ids=whole.request_ids,
        priorities=whole.priorities,
        engines=whole.engines,
        models=Labels.of(whole.models) if whole.models is not None else None,
        aborted=whole.aborted if whole.aborted.any() else None,
        aborted_before=header.aborted,
        turns=turns,
        concurrency=header.concurrency,
        origin=header.origin,
        hash_scope=header.hash_scope,
        skipped=skipped.by_reason,
        remarks=tuple(filter(None, remarks)),
        sampled_from=header.sampled_from,
    )


def _one(blocks: Sequence[Block]) -> Block:
    """Return the columns of all blocks; one that no block has stays None."""
    sizes, missing = list(map(len, blocks)), {"priorities": 0, "engines": -1}
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(Block)):
        parts = [getattr(block, name) for block in blocks]
        if name in {"request_ids", "models", "chats", "parents"}:
            columns[name] = joined_texts(parts, sizes)
        else:
            columns[name] = joined(parts, sizes, missing.get(name, np.nan))
    return Block(**columns)


def _on_fractions(arrived: Floats, dialect: Dialect) -> str:
    """Return what to doubt of milliseconds that have fractions, as seconds usually have."""
    if not dialect.unit_is_usual or np.array_equal(arrived, np.rint(arrived)):
        return ""
    return (
        "timestamps have fractions and are taken for milliseconds: --time-unit s if they are "
        "seconds"
    )


def _hashes(block: Block, block_size: int) -> HashIds | None:
    if not np.any(block.counts >= 0):
        return None
    return HashIds(offsets_of(np.maximum(block.counts, 0)), block.ids, block_size)


def _given_turns(path: Path, block: Block, skipped: Skipped) -> Turns | None:
    """Return the turns that the lines give by row numbers."""
    after = block.after
    if not np.any(after >= 0):
        return None
    if len(skipped):
        raise TraceError(
            f"{path} names the rows that turns wait for, and {len(skipped)} rows are invalid",
            "mend the rows; --skip-invalid cannot be used with `after`",
        )
    late = np.flatnonzero(after >= np.arange(len(after)))
    if late.size:
        row = int(late[0])
        raise TraceError(
            f"{path} request {row}: after must name an earlier request, got {int(after[row])}",
            "requests are counted from 0, without the header line",
        )
    return Turns(after, block.pause_s)


def _chat_turns(
    block: Block, chats: Sequence[str], ticks_per_s: float
) -> tuple[Turns | None, str]:
    """Return the turns of conversations from the names of their requests and parents.

    In order of arrival: no request waits for one that came later.
    """
    if block.parents is None:
        return None, ""
    arrived_s = block.arrived / ticks_per_s
    place: dict[str, int] = {}
    after = np.full(len(chats), -1, dtype=np.int64)
    for row in np.argsort(arrived_s, kind="stable").tolist():
        chat, parent = chats[row], block.parents[row]
        if parent and parent != "-1":
            after[row] = place.get(parent, -1)
        if chat:
            place[chat] = row
    lasting_s = block.output * SECONDS_PER_OUTPUT_TOKEN
    known_s = np.where(np.isnan(block.e2e_s), lasting_s, block.e2e_s)
    turns = pauses_of(after, arrived_s, known_s)
    message = (
        "answers have no recorded end: the pause before a next turn is counted from "
        f"{SECONDS_PER_OUTPUT_TOKEN * 1000:g} ms per output token"
    )
    return (turns, message) if turns.waiting else (None, "")


BLOCK_BYTES = 1 << 22
"""Ours: rows of 4 MiB as objects stay below 50 MB, and larger blocks are not faster."""

MAX_LINE_BYTES = 1 << 24
"""Ours: a million tokens hashed in blocks of 16 need half a megabyte."""

_EPOCH_S = (1.0e9, 4.2e9)
"""Seconds since 1970 of the years 2001 to 2103; in milliseconds a recording would begin in its
second week to seventh."""

_ABORTED = "abort"
"""vLLM's own word for a request whose client went away, as our recorder writes it."""


class _Row(msgspec.Struct, gc=False, kw_only=True):
    """What a line may hold; `chat_id` only to refuse it, as it marks a clock in seconds.

    A `status` may be anything: other tools have their own.
    """

    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    block_size: int | None = None
    e2e_s: float | None = None
    ttft_s: float | None = None
    request_id: str | int | None = None
    model: str | None = None
    after: int | None = None
    pause_s: float | None = None
    priority: int | None = None
    engine_index: int | None = None
    status: Any = None
    chat_id: None = None
    parent_chat_id: None = None


class _MillisecondsRow(_Row, gc=False, kw_only=True):
    timestamp: int | float
    arrived_at_s: None = None


class _WholeMillisecondsRow(_MillisecondsRow, gc=False, kw_only=True):
    timestamp: int


class _SecondsRow(_Row, gc=False, kw_only=True):
    arrived_at_s: int | float
    timestamp: None = None


class _ChatRow(_Row, gc=False, kw_only=True):
    timestamp: int | float
    arrived_at_s: None = None
    chat_id: int | str | None = None  # type: ignore[assignment]  # elsewhere refused
    parent_chat_id: int | str | None = None  # type: ignore[assignment]  # as chat_id


# Given the first line that holds a request, and the header's words.
Settle = Callable[[dict[str, object], Header], Dialect]


def read_json_lines(path: Path, options: ReadOptions, settle: Settle) -> Columns:
    """Return the columns of a JSON Lines file; `settle` chooses the dialect by its first row.

    Raises: TraceError that names the first wrong line, what was expected and what we got.
    """
    blocks: list[Block] = []
    dialect: Dialect | None = None
    header = Header()
    skipped = Skipped(path, options)
    for first_line, data in _line_blocks(path):
        if dialect is not None and _is_half_written(data):
            header = replace(header, remarks=(*header.remarks, HALF_WRITTEN))
            break
        lines = data
        if dialect is None:
            if not data.strip():
                continue
            found, lines, first_row = take_header(path, first_line, data, skipped)
            header = found or header
            if first_row is None:
                continue
            dialect = settle(first_row, header)
            _check_unit(path, dialect, first_row)
        if lines.strip():
            blocks.append(_read_block(path, first_line, lines, dialect, skipped))
    if dialect is None:
        skipped.check(len(skipped))
        raise TraceError(f"{path} holds no request", "give one JSON object per line")
    skipped.check(sum(len(block) for block in blocks) + len(skipped))
    return join(path, blocks, dialect, header, skipped)


def _check_unit(path: Path, dialect: Dialect, row: dict[str, object]) -> None:
    """Refuse a clock that looks like seconds where milliseconds are usual. Raises: TraceError.

    Taken as milliseconds such a recording would be a thousand times as fast.
    """
    value = row.get(dialect.clock)
    if not dialect.unit_is_usual or not isinstance(value, int | float):
        return
    if _EPOCH_S[0] <= value < _EPOCH_S[1]:
        raise TraceError(
            f"{path}: timestamp must be in milliseconds, {value:.15g} looks like seconds "
            "since 1970",
            "say its unit: --time-unit s, or ms if that is what it is",
        )


HALF_WRITTEN = (
    "the file's last line was not written to its end, as where its writer was killed: left out"
)


def _is_half_written(data: bytes) -> bool:
    """Whether lines are what a writer left that was killed, or is not done: half an object."""
    if data.endswith(b"\n"):
        return False
    line = data.strip()
    return line.startswith(b"{") and not line.endswith(b"}")


def _line_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, whole lines) until the file ends."""
    line, rest = 1, b""
    with path.open("rb") as file:
        skip_byte_order_mark(file)
        while data := file.read(BLOCK_BYTES):
            data = rest + data
            cut = data.rfind(b"\n") + 1
            if cut:
                yield line, data[:cut]
                line += data.count(b"\n", 0, cut)
            rest = data[cut:]
            if len(rest) > MAX_LINE_BYTES:
                raise too_long(path, line, MAX_LINE_BYTES)
    if rest:
        yield line, rest


def _read_block(
    path: Path, first_line: int, data: bytes, dialect: Dialect, skipped: Skipped
) -> Block:
    """Return the columns of whole lines, or raise for the first wrong one."""
    block, why = _try_block(data, dialect)
    if block is None:
        data = sift(first_line, data, dialect, skipped)
        block, why = _try_block(data, dialect)
    if block is None:
        reason = f"this line or one of the {data.count(10)} after it cannot be read: {why}"
        raise line_error(path, first_line, reason)
    return block


def _try_block(data: bytes, dialect: Dialect) -> tuple[Block | None, str]:
    """Return the columns of whole lines; None, and why, if not every line is a right one."""
    try:
        if not data.isascii():
            data.decode("utf-8")
        block = _decode(data, dialect)
    except WRONG_JSON as cause:
        return None, str(cause)
    lines = sum(1 for line in data.split(b"\n") if line.strip())
    is_right = block is not None and len(block) == lines
    return (block if is_right else None), "not a valid request"


def _row_type(dialect: Dialect) -> type[_Row]:
    if dialect.clock == "arrived_at_s":
        return _SecondsRow
    if dialect.has_chats:
        return _ChatRow
    return _WholeMillisecondsRow if dialect.whole_ticks else _MillisecondsRow


def _decode(data: bytes, dialect: Dialect) -> Block | None:
    """Return the columns, or None if a value is out of range."""
    rows = msgspec.json.Decoder(_row_type(dialect)).decode_lines(data)
    n = len(rows)
    lists = [row.hash_ids for row in rows]
    block = Block(
        arrived=np.fromiter(map(attrgetter(dialect.clock), rows), np.float64, n),
        prompt=np.fromiter((row.input_length for row in rows), np.int64, n),
        output=np.fromiter((row.output_length for row in rows), np.int64, n),
        e2e_s=np.array([row.e2e_s for row in rows], np.float64),
        ttft_s=np.array([row.ttft_s for row in rows], np.float64),
        counts=np.array([-1 if ids is None else len(ids) for ids in lists], np.int64),
        ids=np.fromiter(chain.from_iterable(ids for ids in lists if ids), np.int64),
        request_ids=_texts([row.request_id for row in rows]),
        models=_texts([row.model for row in rows]),
        after=np.array([-1 if row.after is None else row.after for row in rows], np.int64),
        pause_s=np.array([row.pause_s or 0.0 for row in rows], np.float64),
        chats=_texts([row.chat_id for row in rows]),
        parents=_texts([row.parent_chat_id for row in rows]),
        aborted=np.fromiter((row.status == _ABORTED for row in rows), np.bool_, n),
        priorities=_whole([row.priority for row in rows], 0),
        engines=_whole([row.engine_index for row in rows], -1),
    )
    stated = dialect.stated_size
    sizes = {row.block_size for row in rows} - {None, stated} if stated else set()
    return block if not sizes and _is_plausible(block, dialect) else None


def _whole(values: Sequence[int | None], missing: int) -> Ints | None:
    if values.count(None) == len(values):
        return None
    return np.array([missing if value is None else value for value in values], np.int64)


def _texts(values: Sequence[str | int | None]) -> tuple[str, ...] | None:
    if values.count(None) == len(values):
        return None
    return tuple("" if value is None else str(value) for value in values)


def _is_plausible(block: Block, dialect: Dialect) -> bool:
    return bool(
        np.all(np.abs(block.arrived) <= MAX_CLOCK)
        and tokens_are_plausible(block.prompt, zero_is_fault=dialect.zero_is_fault)
        and tokens_are_plausible(block.output, zero_is_fault=dialect.zero_is_fault)
        and not np.any(block.e2e_s < 0)
        and not np.any(block.ttft_s < 0)
        and not np.any(block.pause_s < 0)
        and not np.any(block.after < -1)
        and not np.any(misfits(block.counts, block.prompt, dialect.block_size))
    )
