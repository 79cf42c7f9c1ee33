"""What a recording holds: a header, then one line for each request that ended.

The reader of native traces takes both; keys it does not know do no harm.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

HEADER_VERSION: Final = 1
_DISTRIBUTION: Final = "max-num-seqs-recorder"


class CountsFrom(StrEnum):
    """Who counted the tokens: vLLM's engine, or the `usage` in the server's responses."""

    ENGINE = "engine"
    USAGE = "usage"


class Row(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request; what is not known is left out.

    `status` is vLLM's finish reason (stop, length, abort, error, …). `request_id` is a keyed
    hash. Several answers to one prompt (`n`) are as many requests to the engine and as many
    rows, which share a `request_id`. `engine_index` is vLLM's of the one that answered,
    where several are recorded together; who was given up has none.

    Units: arrived_at_s in seconds since 1970; queue_s from the engine's queue to the first
        step, prefill_s on to the first token, decode_s on to the last; ttft_s and e2e_s from
        the arrival. input_length, output_length and cached_tokens in tokens.
    """

    arrived_at_s: float
    input_length: int
    output_length: int
    status: str
    e2e_s: float | None = None
    ttft_s: float | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    request_id: str | None = None
    hash_ids: Sequence[int] | None = None
    engine_index: int | None = None


def seconds(value: float | None) -> float | None:
    """Return a duration in whole microseconds, None for one that never took place.

    >>> seconds(0.12345678), seconds(-1763.5)
    (0.123457, None)
    """
    return None if value is None or value < 0 else round(value, 6)


@dataclass(slots=True)
class RecordedServer:
    """What is known of the server being recorded; the doors fill it in as they open."""

    hash_scope: str
    vllm: str | None = None
    model: str | None = None
    block_size: int | None = None
    """In tokens; set when prompts are seen."""
    has_engine_counts: bool = False
    sees_unfinished: bool = False
    engines: int = 0
    """How many report their requests here: with data parallelism several."""
    server: dict[str, Any] = field(default_factory=dict)
    """Whose steps are recorded, as `plugin.described_server` says."""

    @property
    def counts_from(self) -> CountsFrom:
        """Who counts the tokens."""
        return CountsFrom.ENGINE if self.has_engine_counts else CountsFrom.USAGE

    @property
    def lacks(self) -> list[str]:
        """What no row will have, by key; "aborted" for requests whose client went away."""
        lacking = [] if self.has_engine_counts else ["queue_s", "prefill_s", "decode_s"]
        if self.block_size is None:
            lacking.append("hash_ids")
        if not self.sees_unfinished:
            lacking.append("aborted")
        return lacking

    @property
    def remarks(self) -> list[dict[str, str]]:
        """What a reader of the trace is told beside, and decides by: a RemarkKind of its."""
        if self.engines < 2:
            return []
        text = (
            f"{self.engines} engines are recorded together: tune trace thin --replicas "
            f"{self.engines} gives one of them its share"
        )
        return [{"text": text, "kind": "engines_together"}]


def header_line(source: RecordedServer) -> bytes:
    """Return the first line of a file: what the rest was recorded from, and what it lacks."""
    header = {
        "version": HEADER_VERSION,
        "recorded_by": recorded_by(),
        "clock": "wall",
        "vllm": source.vllm,
        "model": source.model,
        "block_size": source.block_size,
        "hash_scope": None if source.block_size is None else source.hash_scope,
        "counts_from": source.counts_from.value,
        "lacks": source.lacks,
        "remarks": source.remarks,
    }
    return msgspec.json.encode({"trace_header": header}) + b"\n"


def row_line(row: Row) -> bytes:
    """Return one line of the file."""
    return msgspec.json.encode(row) + b"\n"


def own_version() -> str:
    """Return this package's version, "unknown" where it runs from a folder, not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def recorded_by() -> str:
    """Return what writes a recording, with its version."""
    return f"{_DISTRIBUTION} {own_version()}"
