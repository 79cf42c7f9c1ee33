"""What a served engine's recorder kept of its steps and requests, read from its files.

A file of steps says how many requests decoded in each step, how much was prefilled beside them
and how long it took, by the engine core's own clock. A recorder of another release may have
written it.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec
import numpy as np

from tuner.engine.compat.scheduler import with_layers
from tuner.engine.compat.shape import recorded_layers, recorded_shape
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import RETENTION, EngineShape, accepted_rates
from tuner.errors import ShadowError, UsageError
from tuner.files import UNREADABLE
from tuner.stats import Bools, Floats, Ints
from tuner.traffic.formats.sources import expand, plain_file, plain_name

STEPS_VERSION: Final = 3
SUFFIX: Final = ".steps"
COLUMNS: Final = (
    *("ended_us", "generating", "context_requests", "context_tokens"),
    *("interval_us", "elapsed_us", "preempted", "generation_tokens"),
)
UNKNOWN: Final = -1
"""What is read of a file of steps, written by a recorder that may be of another release.

Source: tuner/recorder/steps.py.
"""

_PART: Final = r"(?:\.\d+)*"
"""What numbers the files of a recording, behind its name.

Source: tuner/recorder/segments.py.
"""

OVERLAP_S: Final = 1.0
"""Ours: what one engine recorded after a restart begins no sooner before what it did before."""

HOW: Final = (
    "serve with TUNE_RECORD=prod.jsonl, TUNE_RECORD_STEPS=1 and "
    "--enable-logging-iteration-details"
)


class Server(msgspec.Struct, frozen=True):
    """Whose steps they are, as the recorder's plugin found it.

    `shape` is missing where the shadow cannot stand in for the engine, and `no_shadow` says
    why; neither is in the file, but follows from the `config` that is.
    """

    version: int
    recorded_by: str
    vllm: str = ""
    device: str = ""
    config: dict[str, Any] | None = None
    model: str = ""
    limits: EngineLimits | None = None
    num_blocks: int = 0
    engines: int = 1
    api_servers: int = 1
    has_details: bool = False
    shape: EngineShape | None = None
    no_shadow: str = ""


class _Header(msgspec.Struct, frozen=True):
    steps_header: Server


class _Packed(msgspec.Struct, frozen=True):
    """Some hundred steps; `columns` are little-endian, one column after the other.

    `drafts` counts those that were verified, of these those whose first token was accepted,
    whose first two were, and so on.
    """

    steps: int
    columns: str
    drafts: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()


@dataclass(frozen=True, slots=True)
class _Block:
    """Steps of one line. Shapes: table is [len(COLUMNS), steps]."""

    table: Ints
    drafts: tuple[int, ...]


class _Row(msgspec.Struct, frozen=True):
    """What is used of a recorded request. Units: as tuner/recorder/rows.py, Row."""

    arrived_at_s: float
    input_length: int
    output_length: int
    e2e_s: float | None = None
    ttft_s: float | None = None
    cached_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None

    @property
    def ends_s(self) -> float:
        """When it ended, of one whose time is known."""
        return self.arrived_at_s + (self.e2e_s or 0.0)

    @property
    def is_cut(self) -> bool:
        """Whether its client left it: of these the engine tells no time of its own."""
        return self.decode_s is None and self.ttft_s is not None

    @property
    def first_s(self) -> float:
        """When its first token came, of one whose time is known."""
        if self.is_cut:
            return self.arrived_at_s + (self.ttft_s or 0.0)
        return self.ends_s - (self.decode_s or 0.0)


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Steps of one server, in order; what is unknown of one is -1, of a time nan.

    `brought` counts what brought an answer one token, two, three and so on, of those that
    verified drafts; empty where there were none.

    Shapes: all others [steps].
    Units: seconds, ended_s since 1970; context_tokens in tokens prefilled, generation_tokens in
        tokens that the decoding requests computed, drafts included.
    """

    server: Server
    ended_s: Floats
    generating: Ints
    context_requests: Ints
    context_tokens: Ints
    interval_s: Floats
    elapsed_s: Floats
    preempted: Ints
    generation_tokens: Ints
    brought: tuple[int, ...]

    @classmethod
    def of(cls, server: Server, blocks: Sequence[_Block]) -> Self:
        """Return what was packed, every ended_us since 1970."""
        columns = np.concatenate([block.table for block in blocks], axis=1)
        order = np.argsort(columns[0], kind="stable")
        table = columns[:, order]
        drafts = [sum(each) for each in zip_longest(*(b.drafts for b in blocks), fillvalue=0)]
        times = np.where(table == UNKNOWN, np.nan, table / 1e6)
        named = dict(zip(COLUMNS, table, strict=True))
        timed = dict(zip(COLUMNS, times, strict=True))
        return cls(
            server=server,
            ended_s=timed["ended_us"],
            generating=named["generating"],
            context_requests=named["context_requests"],
            context_tokens=named["context_tokens"],
            interval_s=timed["interval_us"],
            elapsed_s=timed["elapsed_us"],
            preempted=named["preempted"],
            generation_tokens=named["generation_tokens"],
            brought=tuple(a - b for a, b in pairwise([*drafts, 0])) if drafts else (),
        )

    def __len__(self) -> int:
        return int(self.ended_s.size)

    @property
    def draft_tokens(self) -> int:
        """How many drafts a decoding request verifies in a step, 0 where nobody knows."""
        return 0 if self.server.shape is None else self.server.shape.draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """How many tokens a step brings a decoding request in the mean."""
        return 1 + sum(accepted_rates(self.brought))


def steps_beside(recordings: Sequence[Path]) -> list[Path]:
    """Return the files of steps that the recorder wrote beside its files of requests.

    Raises: UsageError if there are none; TraceError for a folder without recordings.
    """
    parts = {p for recording in expand(recordings) for p in _parts_of(recording, SUFFIX)}
    found = {part for part in parts if part.suffix == SUFFIX}
    if not found:
        if missing := [path for path in recordings if not path.exists()]:
            raise UsageError(f"{missing[0]}: no such file", "name what the recorder wrote")
        names = ", ".join(map(str, recordings))
        raise UsageError(f"no steps were recorded beside {names}", HOW)
    return sorted(found)


def parts_not_named(recordings: Sequence[Path]) -> list[Path]:
    """Return the files of requests that the recordings go on in, and that are not among them.

    Raises: TraceError for a folder without recordings.
    """
    named = expand(recordings)
    known = {path.with_name(plain_name(path)) for path in named}
    found = {
        part
        for path in named
        for part in _parts_of(path, Path(plain_name(path)).suffix)
        if part.with_name(plain_name(part)) not in known and not _is_empty(part)
    }
    return sorted(found)


def _parts_of(recording: Path, suffix: str) -> list[Path]:
    """Return the files beside a recording that are of any part of it, packed or not."""
    stem = re.sub(f"{_PART}$", "", Path(plain_name(recording)).stem)
    own = re.compile(rf"{re.escape(stem)}{_PART}{re.escape(suffix)}")
    return [path for path in recording.parent.glob("*") if own.fullmatch(plain_name(path))]


def read_steps(paths: Iterable[Path]) -> list[RecordedSteps]:
    """Return the steps of each server that the files name, the one that served last as last.

    The names of the files tell no order: prod.1.steps follows prod.steps, or another before it.

    A last line that a killed server left half written is left out, and so is a file in which it
    wrote nothing.

    Raises: UsageError for what is no file of steps, or of another version, and for files of
        several engines that served at once.
    """
    by_server: dict[str, tuple[Server, list[_Block]]] = {}
    spans: list[_Span] = []
    for path in paths:
        if _is_empty(path):
            continue
        server, blocks = _read_file(path)
        key = msgspec.json.encode(server).decode()
        by_server.setdefault(key, (server, []))[1].extend(blocks)
        if blocks:
            spans.append((path, blocks[0].table[0, 0] / 1e6, blocks[-1].table[0, -1] / 1e6))
    _check_one_engine("steps", spans)
    found = [(server, blocks) for server, blocks in by_server.values() if blocks]
    if not found:
        raise UsageError("no step was recorded before the server ended", HOW)
    each = [RecordedSteps.of(server, blocks) for server, blocks in found]
    return sorted(each, key=lambda steps: float(steps.ended_s[-1]))


_Span = tuple[Path, float, float]
"""A file, and when the first and the last of it ended. Units: seconds since 1970."""


def _check_one_engine(what: str, spans: Iterable[_Span]) -> None:
    """Refuse files that were recorded at the same time: of one engine one follows another.

    Raises: UsageError.
    """
    before: _Span | None = None
    for span in sorted(spans, key=itemgetter(1)):
        path, begin_s, end_s = span
        if before is not None and min(before[2], end_s) - begin_s > OVERLAP_S:
            overlap_s = min(before[2], end_s) - begin_s
            raise UsageError(
                f"the {what} of {before[0]} and {path} are of several engines, or API "
                f"servers of one: both were recorded over the same {overlap_s:.0f} s",
                "name the files of one engine, its steps with --steps; of several API servers "
                "each saw a part of every batch: record with --api-server-count 1",
            )
        if before is None or end_s > before[2]:
            before = span


def _is_empty(path: Path) -> bool:
    """Whether a server was killed before it wrote anything."""
    return path.is_file() and not path.stat().st_size


def _read_file(path: Path) -> tuple[Server, list[_Block]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        server = msgspec.json.decode(lines[0], type=_Header).steps_header
    except UNREADABLE as error:
        raise UsageError(f"{path} is no recording of steps: {error}", HOW) from None
    if server.version != STEPS_VERSION:
        raise UsageError(
            f"{path}: version must be {STEPS_VERSION}, got {server.version}",
            "read it with the version of this tool that recorded it",
        )
    # What follows the last newline was not written whole.
    return _with_shape(path, server), [
        _unpacked(path, n, line) for n, line in enumerate(lines[1:-1], 2)
    ]


def _with_shape(path: Path, server: Server) -> Server:
    """Return a server with the shape that follows from its configuration, or why none does."""
    if server.config is None:
        return msgspec.structs.replace(server, shape=None, no_shadow="")
    try:
        shape = recorded_shape(server.config, server.device, server.vllm)
        layers = recorded_layers(server.config)
        if any(layer["kind"] != "FullAttentionSpec" for layer in layers):
            kept = server.config["cache_config"].get(RETENTION)
            shape = with_layers(shape, layers, kept)
    except ShadowError as error:
        return msgspec.structs.replace(server, no_shadow=error.message)
    except UsageError as missing:
        reason = f"vLLM itself lays out the KV cache of such layers: {missing.message}"
        return msgspec.structs.replace(server, no_shadow=reason)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path} holds no configuration that a recorder writes: {type(error).__name__}: "
            f"{error}",
            HOW,
        ) from error
    return msgspec.structs.replace(server, shape=shape)


def _unpacked(path: Path, number: int, line: bytes) -> _Block:
    """Return one line's steps. Raises: UsageError."""
    try:
        packed = msgspec.json.decode(line, type=_Packed)
        content = zlib.decompress(base64.b64decode(packed.columns, validate=True))
        table = np.frombuffer(content, "<i8").reshape(len(COLUMNS), packed.steps).copy()
    except (*UNREADABLE, zlib.error, ValueError) as error:
        raise UsageError(f"{path}, line {number}: damaged: {error}", "leave it out") from None
    table[0] = np.cumsum(table[0])
    return _Block(table, packed.drafts)


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """What is used of the requests beside the steps, in the order of their ends.

    `is_cut` marks those whose clients left, which end between two steps; the others end with
    one. Each has its first token with one.

    Shapes: all [requests].
    Units: ends_s and first_s in seconds since 1970; prefill_s in seconds, nan where unknown.
    """

    ends_s: Floats
    first_s: Floats
    is_cut: Bools
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    prefill_s: Floats

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """Read a recorder's files, packed or in folders too. Raises: UsageError, TraceError."""
        begun: list[_Row] = []
        spans: list[_Span] = []
        for path in expand(list(paths)):
            rows = [
                row for row in _rows(path) if row.e2e_s is not None and row.output_length > 0
            ]
            if rows:
                ends_s = [row.ends_s for row in rows]
                spans.append((path, min(ends_s), max(ends_s)))
            begun += rows
        if not begun:
            raise UsageError(
                "the recording holds no request with a token and its times",
                "record the server with TUNE_RECORD: its rows have ttft_s and e2e_s",
            )
        _check_one_engine("requests", spans)
        begun.sort(key=lambda row: row.ends_s)

        prefills_s = [row.prefill_s for row in begun]
        return cls(
            ends_s=np.array([row.ends_s for row in begun]),
            first_s=np.array([row.first_s for row in begun]),
            is_cut=np.array([row.is_cut for row in begun]),
            prompt_tokens=np.array([row.input_length for row in begun]),
            output_tokens=np.array([row.output_length for row in begun]),
            cached_tokens=np.array([row.cached_tokens or 0 for row in begun]),
            prefill_s=np.array([np.nan if one is None else one for one in prefills_s]),
        )

    def __len__(self) -> int:
        return int(self.ends_s.size)


def _rows(path: Path) -> Iterator[_Row]:
    if _is_empty(path):
        return
    decoder = msgspec.json.Decoder(_Row)
    with plain_file(path) as source:
        lines = source.path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line or line.startswith(b'{"trace_header"'):
            continue
        try:
            yield decoder.decode(line)
        except UNREADABLE as error:
            if number == len(lines):
                return  # a killed server's last line
            raise UsageError(
                f"{path}, line {number}: {error}",
                "only this tool's recorder writes what belongs to its steps",
            ) from None


def check_usable(steps: RecordedSteps) -> tuple[EngineShape, EngineLimits]:
    """Return the shape and limits of a server that can be predicted.

    Raises: ShadowError naming why it cannot.
    """
    server = steps.server
    if server.no_shadow:
        raise ShadowError(server.no_shadow, "tune a spare machine with --method live")
    if server.engines > 1:
        raise ShadowError(
            f"{server.engines} engines served at once (data-parallel-size), and the recording "
            "does not tell their steps apart",
            "record one of them: a server with data-parallel-size 1",
        )
    if server.api_servers > 1:
        raise ShadowError(
            f"{server.api_servers} API servers shared the engine, and each saw a part of every "
            "batch",
            "record with --api-server-count 1",
        )
    if server.shape is None or server.limits is None or server.num_blocks < 1:
        raise ShadowError("the recording does not say what engine it is of", HOW)
    return server.shape, server.limits
