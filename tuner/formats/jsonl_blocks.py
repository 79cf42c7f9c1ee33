"""Blocks of JSON Lines as columns, and all of a file's blocks as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from tuner.arrays import Bools, Floats, Ints
from tuner.errors import TraceError
from tuner.formats.columns import Columns, Labels
from tuner.formats.jsonl_faults import Dialect
from tuner.formats.jsonl_header import Header
from tuner.formats.skipping import Skipped
from tuner.hashes import HashIds, counts_fit, offsets_of
from tuner.turns import Turns, pauses_of

# How long an answer took that nobody recorded: as `describe` estimates requests in flight.
_SECONDS_PER_OUTPUT_TOKEN = 0.020

Texts = tuple[str, ...] | None


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

    def __len__(self) -> int:
        return len(self.prompt)


def misfits(counts: Ints, prompt: Ints, block_size: int) -> Bools:
    """Say whose ids do not fit; absent ones (-1) do, an empty list only a short prompt."""
    fits = counts_fit(counts, prompt, block_size) & ~((counts == 0) & (prompt >= block_size))
    found: Bools = ~fits & (counts >= 0)
    return found


def join(
    path: Path, blocks: Sequence[Block], dialect: Dialect, header: Header, skipped: Skipped
) -> Columns:
    """Return the columns of a whole file.

    Raises: TraceError if turns wait for rows that are not there, or in a circle.
    """
    models = _joined_texts(blocks, lambda block: block.models)
    arrived = np.concatenate([block.arrived for block in blocks])
    e2e_s = np.concatenate([block.e2e_s for block in blocks])
    ttft_s = np.concatenate([block.ttft_s for block in blocks])
    output = np.concatenate([block.output for block in blocks])
    aborted = np.concatenate([block.aborted for block in blocks])
    chats = _joined_texts(blocks, lambda block: block.chats) if dialect.has_chats else None
    if chats is None:
        turns, told = _given_turns(path, blocks, skipped), ""
    else:
        parents = _joined_texts(blocks, lambda block: block.parents)
        turns, told = _chat_turns(chats, parents, arrived / dialect.ticks_per_s, e2e_s, output)
    return Columns(
        arrived=arrived,
        ticks_per_s=dialect.ticks_per_s,
        prompt_tokens=np.concatenate([block.prompt for block in blocks]),
        output_tokens=output,
        hashes=_hashes(blocks, dialect.block_size),
        e2e_s=None if np.isnan(e2e_s).all() else e2e_s,
        ttft_s=None if np.isnan(ttft_s).all() else ttft_s,
        request_ids=_joined_texts(blocks, lambda block: block.request_ids),
        models=Labels.of(models) if models is not None else None,
        aborted=aborted if aborted.any() else None,
        aborted_before=header.aborted,
        turns=turns,
        concurrency=header.concurrency,
        origin=header.origin,
        hash_scope=header.hash_scope,
        skipped=skipped.by_reason,
        remarks=(*header.remarks, told) if told else header.remarks,
        sampled_from=header.sampled_from,
    )


def _hashes(blocks: Sequence[Block], block_size: int) -> HashIds | None:
    counts = np.concatenate([block.counts for block in blocks])
    if not np.any(counts >= 0):
        return None
    ids = np.concatenate([block.ids for block in blocks])
    return HashIds(offsets_of(np.maximum(counts, 0)), ids, block_size)


def _joined_texts(blocks: Sequence[Block], of: Callable[[Block], Texts]) -> Texts:
    if all(of(block) is None for block in blocks):
        return None
    return tuple(chain.from_iterable(of(block) or ("",) * len(block) for block in blocks))


def _given_turns(path: Path, blocks: Sequence[Block], skipped: Skipped) -> Turns | None:
    """Return who waits for whom as the lines say it by row numbers."""
    after = np.concatenate([block.after for block in blocks])
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
    return Turns(after, np.concatenate([block.pause_s for block in blocks]))


def _chat_turns(
    chats: Sequence[str],
    parents: Texts,
    arrived_s: Floats,
    e2e_s: Floats,
    output: Ints,
) -> tuple[Turns | None, str]:
    """Return the turns of conversations from the names of their requests and parents."""
    if parents is None:
        return None, ""
    place: dict[str, int] = {}
    after = np.full(len(chats), -1, dtype=np.int64)
    for row, (chat, parent) in enumerate(zip(chats, parents, strict=True)):
        if parent and parent != "-1":
            after[row] = place.get(parent, -1)
        if chat:
            place[chat] = row
    known_s = np.where(np.isnan(e2e_s), output * _SECONDS_PER_OUTPUT_TOKEN, e2e_s)
    turns = pauses_of(after, arrived_s, known_s)
    told = (
        "answers have no recorded end: the pause before a next turn is counted from "
        f"{_SECONDS_PER_OUTPUT_TOKEN * 1000:g} ms per output token"
    )
    return (turns, told) if turns.waiting else (None, "")
