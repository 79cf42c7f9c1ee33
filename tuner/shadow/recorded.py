"""The batches of a served engine, rebuilt from what its recorder kept of steps and requests.

A file of steps says how many requests decoded in each step, how much was prefilled beside them
and how long it took, by the engine core's own clock. Which requests these were, and so how much
context each step attended to, follows from the recorded requests: a request ends with the step
that the engine stamped its end with, and each step before brought out one of its tokens. What
does not come together is left out and counted.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np

from tuner.engine.compat.shape import recorded_shape
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.engine.steps import StepColumns, joined
from tuner.errors import ShadowError, TooFewSamplesError, UsageError
from tuner.files import UNREADABLE
from tuner.shadow.calibration import Calibration
from tuner.shadow.fit import MIN_STEPS
from tuner.shadow.profiles import Profile
from tuner.stats import Bools, Floats, Ints

STEPS_VERSION: Final = 2
SUFFIX: Final = ".steps"
COLUMNS: Final = (
    *("ended_us", "generating", "context_requests", "context_tokens"),
    *("interval_us", "elapsed_us", "preempted"),
)
UNKNOWN: Final = -1
"""What is read of a file of steps, written by a recorder that may be of another release.

Source: tuner/recorder/steps.py.
"""

LATE_S: Final = 0.03
"""Ours: a first token is this much, or a step, from where its later tokens say it was."""

STRETCH_S: Final = 30.0
"""Ours: steps of so long a time share a mood of the machine, as a replay's do."""

MIN_SEEN: Final = 20
"""Ours: fewer steps do not tell how long batches so full take."""

MANY_S: Final = 600.0
"""Ours: a step that took longer is none."""

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
    """Some hundred steps; `columns` are little-endian, one column after the other."""

    steps: int
    columns: str


class _Row(msgspec.Struct, frozen=True):
    """What is used of a recorded request. Units: as tuner/recorder/rows.py, Row."""

    arrived_at_s: float
    input_length: int
    output_length: int
    e2e_s: float | None = None
    cached_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Steps of one server, in order; what is unknown of one is -1, of a time nan.

    Shapes: all [steps].
    Units: seconds, ended_s since 1970; context_tokens in tokens prefilled.
    """

    server: Server
    ended_s: Floats
    generating: Ints
    context_requests: Ints
    context_tokens: Ints
    interval_s: Floats
    elapsed_s: Floats
    preempted: Ints

    @classmethod
    def of(cls, server: Server, columns: Ints) -> Self:
        """Return what was packed, every ended_us since 1970.

        Shapes: columns is [len(COLUMNS), steps].
        """
        order = np.argsort(columns[0], kind="stable")
        table = columns[:, order]
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
        )

    def __len__(self) -> int:
        return int(self.ended_s.size)


def steps_beside(recordings: Sequence[Path]) -> list[Path]:
    """Return the files of steps that the recorder wrote beside its files of requests.

    Raises: UsageError if there are none.
    """
    found = {
        path
        for recording in recordings
        for stem in (recording.with_suffix("").name.split(".")[0],)
        for path in recording.parent.glob(f"{stem}*{SUFFIX}")
        if path.name.removesuffix(SUFFIX).removeprefix(stem).strip(".0123456789") == ""
    }
    if not found:
        names = ", ".join(map(str, recordings))
        raise UsageError(f"no steps were recorded beside {names}", HOW)
    return sorted(found)


def read_steps(paths: Iterable[Path]) -> list[RecordedSteps]:
    """Return the steps of each server that the files name, in the files' order.

    A last line that a killed server left half written is left out.

    Raises: UsageError for what is no file of steps, or of another version.
    """
    by_server: dict[str, tuple[Server, list[Ints]]] = {}
    for path in paths:
        server, blocks = _read_file(path)
        key = msgspec.json.encode(server).decode()
        by_server.setdefault(key, (server, []))[1].extend(blocks)
    found = [(server, blocks) for server, blocks in by_server.values() if blocks]
    return [
        RecordedSteps.of(server, np.concatenate(blocks, axis=1)) for server, blocks in found
    ]


def _read_file(path: Path) -> tuple[Server, list[Ints]]:
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
    except ShadowError as error:
        return msgspec.structs.replace(server, no_shadow=error.message)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path} holds no configuration that a recorder writes: {type(error).__name__}: "
            f"{error}",
            HOW,
        ) from error
    return msgspec.structs.replace(server, shape=shape)


def _unpacked(path: Path, number: int, line: bytes) -> Ints:
    """Return one line's columns. Shapes: [len(COLUMNS), steps]."""
    try:
        packed = msgspec.json.decode(line, type=_Packed)
        content = zlib.decompress(base64.b64decode(packed.columns, validate=True))
        table = np.frombuffer(content, "<i8").reshape(len(COLUMNS), packed.steps).copy()
    except (*UNREADABLE, zlib.error, ValueError) as error:
        raise UsageError(f"{path}, line {number}: damaged: {error}", "leave it out") from None
    table[0] = np.cumsum(table[0])
    return table


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """What is used of the requests beside the steps, in the order of their ends.

    Shapes: all [requests].
    Units: ends_s in seconds since 1970; decode_s and prefill_s in seconds, nan where unknown.
    """

    ends_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    decode_s: Floats
    prefill_s: Floats

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """Read a recorder's files. Raises: UsageError."""
        rows = [row for path in paths for row in _rows(path)]
        begun = [row for row in rows if row.e2e_s is not None and row.output_length > 0]
        if not begun:
            raise UsageError("the recording holds no request with a token and its times")
        begun.sort(key=lambda row: row.arrived_at_s + (row.e2e_s or 0.0))

        def times(name: str) -> Floats:
            known = [getattr(row, name) for row in begun]
            return np.array([np.nan if value is None else value for value in known])

        return cls(
            np.array([row.arrived_at_s for row in begun]) + times("e2e_s"),
            np.array([row.input_length for row in begun]),
            np.array([row.output_length for row in begun]),
            np.array([row.cached_tokens or 0 for row in begun]),
            times("decode_s"),
            times("prefill_s"),
        )

    def __len__(self) -> int:
        return int(self.ends_s.size)


def _rows(path: Path) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(_Row)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
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


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The steps whose batches are known, and how many are left out for which reason."""

    steps: StepColumns
    left_out: dict[str, int]

    def stretches(self) -> list[StepColumns]:
        """Return the steps in stretches that share a mood of the machine."""
        if not len(self.steps):
            return []
        number = ((self.steps.end_s - self.steps.end_s[0]) // STRETCH_S).astype(np.int64)
        return [_taken(self.steps, number == n) for n in np.unique(number)]


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


def rebuild(steps: RecordedSteps, requests: RecordedRequests) -> Rebuilt:
    """Return what was in each step, with the contexts of its sequences.

    Raises: TooFewSamplesError if nothing of the requests belongs to the steps.
    """
    spans = _Spans.of(steps, requests)
    if not spans.is_whole.any():
        raise TooFewSamplesError(
            f"none of {len(requests)} requests ends with one of {len(steps)} recorded steps",
            "name the recording that the steps lie beside",
        )
    decode_context, spread, is_decode_known = spans.decode_contexts(steps.generating)
    prefill, prefill_context = spans.prefills(steps)
    duration_s = _durations(steps)
    is_timed = np.isfinite(duration_s) & (duration_s > 0) & (duration_s < MANY_S)
    reasons = {
        "without a time": ~is_timed,
        "with a prompt whose pieces are unknown": ~np.isfinite(prefill_context),
        "with requests that are not in the recording": ~is_decode_known,
    }
    usable, left_out = np.ones(len(steps), dtype=np.bool_), {}
    for reason, is_out in reasons.items():
        left_out[reason] = int((usable & is_out).sum())
        usable &= ~is_out
    nothing = np.zeros(len(steps))
    columns = StepColumns(
        end_s=steps.ended_s,
        duration_s=duration_s,
        repeats=np.ones(len(steps)),
        decode_seqs=steps.generating.astype(np.float64),
        prefill_tokens=prefill,
        decode_context_tokens=decode_context,
        prefill_context_tokens=prefill_context,
        decode_spread_tokens=spread,
        running=(steps.generating + np.maximum(steps.context_requests, 0)).astype(np.float64),
        waiting=nothing,
        kv_usage_ratio=nothing,
        kv_peak_ratio=nothing,
        preempted=np.maximum(steps.preempted, 0).astype(np.float64),
        cached_tokens=nothing,
    )
    usable &= (columns.decode_seqs > 0) | (columns.prefill_tokens > 0)
    return Rebuilt(_taken(columns, usable), {k: n for k, n in left_out.items() if n})


def _durations(steps: RecordedSteps) -> Floats:
    """Return how long each step took: the interval, or what the core waited and usually adds.

    What the core waits for the model leaves its own work out, which the intervals hold.
    """
    both = np.isfinite(steps.interval_s) & np.isfinite(steps.elapsed_s)
    added_s = (
        float(np.median((steps.interval_s - steps.elapsed_s)[both])) if both.any() else 0.0
    )
    from_core: Floats = steps.elapsed_s + max(added_s, 0.0)
    return np.where(np.isfinite(steps.interval_s), steps.interval_s, from_core)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Between which steps each request ran: scheduled, first token, last token.

    `is_whole` marks those that ended with a recorded step.

    Shapes: all [requests]; `tokens_per_step` is 1 for who was never set aside.
    """

    begin: Ints
    first: Ints
    last: Ints
    tokens_per_step: Floats
    is_whole: Bools
    steps: int
    prompt_tokens: Ints
    cached_tokens: Ints

    @classmethod
    def of(cls, steps: RecordedSteps, requests: RecordedRequests) -> Self:
        ended_s, n = steps.ended_s, len(steps)
        last = np.clip(np.searchsorted(ended_s, requests.ends_s + 2e-5, "right") - 1, 0, n - 1)
        is_whole = np.abs(ended_s[last] - requests.ends_s) < 1e-4
        # Each step in which anything decodes brings out a token of all who do.
        counted = np.concatenate([[0], np.cumsum(steps.generating > 0)])
        wanted = counted[last + 1] - (requests.output_tokens - 1)
        # The step after a first token decodes.
        by_count = np.searchsorted(counted, np.maximum(wanted, 0), "right") - 2
        single = requests.output_tokens == 1
        by_count = np.where(single, last, by_count)
        first_s = requests.ends_s - np.nan_to_num(requests.decode_s)
        by_time = np.clip(np.searchsorted(ended_s, first_s - LATE_S / 2), 0, n - 1)
        by_count = np.clip(by_count, 0, n - 1)
        usual_s = float(np.nanmedian(steps.interval_s)) if n else 0.0
        late_s = np.abs(ended_s[by_count] - first_s)
        agrees = (late_s < LATE_S + usual_s) & (wanted >= 0)
        first = np.where(agrees, by_count, np.minimum(by_time, last))
        between = np.maximum(counted[last + 1] - counted[first + 1], 1)
        rate = np.where(agrees, 1.0, np.minimum(1.0, (requests.output_tokens - 1) / between))
        begin_s = first_s - np.nan_to_num(requests.prefill_s)
        begin = np.minimum(np.searchsorted(ended_s, begin_s + 1e-4, "right"), first)
        return cls(
            begin,
            first,
            last,
            rate,
            is_whole & (requests.ends_s >= ended_s[0]) if n else is_whole,
            n,
            requests.prompt_tokens,
            requests.cached_tokens,
        )

    def decode_contexts(self, generating: Ints) -> tuple[Floats, Floats, Bools]:
        """Return the contexts that each step's decodes attend to, and where they are known.

        Their sum, and how far they are apart. Where a request or two are missing the others
        stand for them.

        Shapes: [steps] each.
        """
        use = self.is_whole & (self.last > self.first)
        after, until, rate = self.first[use] + 1, self.last[use] + 1, self.tokens_per_step[use]
        level = self.prompt_tokens[use] - rate * self.first[use]

        def over(values: Floats) -> Floats:
            total = np.zeros(self.steps + 1)
            np.add.at(total, after, values)
            np.add.at(total, until, -values)
            return np.cumsum(total)[:-1]

        count, step = over(np.ones(after.size)), np.arange(self.steps)
        context = over(level) + over(rate) * step
        squares = over(level**2) + (2 * over(level * rate) + over(rate**2) * step) * step
        is_known = np.abs(count - generating) <= np.maximum(1, 0.1 * generating)
        is_known &= (count > 0) | (generating == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(count > 0.5, context / count, 0.0)
            apart = np.where(count > 0.5, squares / count - mean**2, 0.0)
        seqs = np.maximum(generating, 0)
        return mean * seqs, np.sqrt(np.maximum(apart, 0.0) * seqs), is_known

    def prefills(self, steps: RecordedSteps) -> tuple[Floats, Floats]:
        """Return the tokens that each step prefilled, and their contexts; nan where unknown.

        Who gets its first token with a step is prefilled to its end in it; what is left goes to
        the others in the order in which they were scheduled.

        Shapes: [steps] each.
        """
        tokens = steps.context_tokens.astype(np.float64)
        context = np.where(steps.context_tokens == 0, 0.0, np.nan)
        by_first: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.is_whole).tolist():
            by_first.setdefault(int(self.first[row]), []).append(row)
        left = (self.prompt_tokens - self.cached_tokens).astype(np.int64)
        done = self.cached_tokens.astype(np.int64).copy()
        waiting = sorted(
            np.flatnonzero(self.is_whole).tolist(), key=lambda row: self.begin[row]
        )
        at, open_rows = 0, list[int]()
        for step in np.flatnonzero(steps.context_tokens != 0).tolist():
            while at < len(waiting) and self.begin[waiting[at]] <= step:
                open_rows.append(waiting[at])
                at += 1
            open_rows = [row for row in open_rows if self.first[row] >= step and left[row] > 0]
            ending = [row for row in by_first.get(step, ()) if left[row] > 0]
            if steps.context_tokens[step] == UNKNOWN:
                found = self._single(step, ending, left)
            else:
                others = [row for row in open_rows if self.first[row] > step]
                found = _dealt(int(steps.context_tokens[step]), ending, others, left)
            if found is None:
                continue
            tokens[step] = sum(found.values())
            context[step] = sum(n * done[r] + n * (n + 1) // 2 for r, n in found.items())
            for row, n in found.items():
                left[row] -= n
                done[row] += n
        return np.maximum(tokens, 0.0), context

    def _single(self, step: int, ending: list[int], left: Ints) -> dict[int, int] | None:
        """Return what a step without details prefilled, None if prompts came in pieces."""
        if not ending or any(self.begin[row] < step for row in ending):
            return None
        return {row: int(left[row]) for row in ending}


def _dealt(
    tokens: int, ending: list[int], others: list[int], left: Ints
) -> dict[int, int] | None:
    """Return who was prefilled by how much, None if it does not come together."""
    found = {row: int(left[row]) for row in ending}
    rest = tokens - sum(found.values())
    if rest < 0:
        # A first token that is stamped a step off: nothing is known of either step.
        return None
    for row in others:
        part = min(rest, int(left[row]) - 1)
        if part > 0:
            found[row], rest = part, rest - part
    return found if rest == 0 else None


def _taken(steps: StepColumns, rows: Bools) -> StepColumns:
    names: Any = StepColumns.__dataclass_fields__
    return StepColumns(**{name: getattr(steps, name)[rows] for name in names})


@dataclass(frozen=True, slots=True)
class LearntSteps:
    """What steps of production have taught, and where they say nothing.

    `most_seqs` and `most_prefill` are the fullest batches that came often enough to count,
    beyond which a prediction extends the last slope. `off` is how far the replayed recording is
    off what was recorded, by metric, relative and signed, on requests that taught nothing but
    their steps.
    """

    steps: int
    left_out: dict[str, int]
    span_s: float
    most_seqs: int
    most_prefill: int
    has_details: bool
    off: dict[str, float]

    def lines(self) -> Iterator[str]:
        """Yield what was learnt for people."""
        yield f"learnt from {self.steps:,} steps in {self.span_s:.0f} s"
        for reason, count in self.left_out.items():
            yield f"left out {count:,} {reason}"
        if not self.has_details:
            yield (
                "the server told no details of its steps, so that prompts in several pieces "
                "taught nothing: add --enable-logging-iteration-details"
            )
        yield (
            f"batches of up to {self.most_seqs} decoding sequences and {self.most_prefill:,} "
            "prefilled tokens were seen; beyond them predictions extrapolate"
        )
        if self.off:
            yield "the recording itself, replayed on the profile, is off by:"
            for name, value in self.off.items():
                yield f"  {name:<9} {value:+7.1%}"

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {
            "steps": self.steps,
            "left_out": self.left_out,
            "span_s": self.span_s,
            "most_decode_seqs": self.most_seqs,
            "most_prefill_tokens": self.most_prefill,
            "has_details": self.has_details,
            "off": self.off,
        }


def learn_profile(
    recorded: Sequence[RecordedSteps],
    requests: RecordedRequests,
    serve_values: Mapping[str, object],
) -> tuple[Profile, LearntSteps]:
    """Return the profile of the engine that production serves with, and what taught it.

    Of several starts of one server the last says what is current. `off` is left empty: the
    recording is replayed by whoever holds it as a trace.

    Raises: ShadowError where nothing can be predicted of such an engine; TooFewSamplesError.
    """
    kinds = _of_one_engine(recorded)
    shape, current = kinds[-1]
    calibration = Calibration(shape, (), (), current, serve_values)
    left_out: Counter[str] = Counter()
    parts: list[StepColumns] = []
    for steps, (_, limits) in zip(recorded, kinds, strict=True):
        calibration = calibration.and_start(limits, steps.server.num_blocks)
        found = rebuild(steps, requests)
        left_out.update(found.left_out)
        calibration = calibration.and_steps(limits, found.stretches())
        parts.append(found.steps)
    seen = joined(parts)
    try:
        profile = calibration.profile()
    except TooFewSamplesError as few:
        raise _too_quiet(recorded, len(seen), left_out) from few
    return profile, LearntSteps(
        steps=len(seen),
        left_out=dict(left_out),
        span_s=sum(float(part.end_s[-1] - part.end_s[0]) for part in parts if len(part)),
        most_seqs=_often(seen.decode_seqs),
        most_prefill=_often(seen.prefill_tokens),
        has_details=all(steps.server.has_details for steps in recorded),
        off={},
    )


def _of_one_engine(
    recorded: Sequence[RecordedSteps],
) -> list[tuple[EngineShape, EngineLimits]]:
    """Return each start's shape and limits. Raises: ShadowError; TooFewSamplesError."""
    if not recorded:
        raise TooFewSamplesError("no steps were recorded", HOW)
    kinds = [check_usable(steps) for steps in recorded]
    shape, _ = kinds[-1]
    others = {f"{kind.model} on {kind.device}" for kind, _ in kinds if _differs(kind, shape)}
    if others:
        names = ", ".join(sorted(others))
        raise ShadowError(
            f"the steps are of different engines, of {shape.model} on {shape.device} and of "
            f"{names}",
            "name the files of one with --steps",
        )
    return kinds


def _too_quiet(
    recorded: Sequence[RecordedSteps], known: int, left_out: Mapping[str, int]
) -> TooFewSamplesError:
    """Return the error of steps that are too few to learn from, and what to do about it."""
    total = sum(map(len, recorded))
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    has_details = all(steps.server.has_details for steps in recorded)
    more = "" if has_details else "; --enable-logging-iteration-details times each of them"
    return TooFewSamplesError(
        f"{known} of {total} recorded steps teach how long a step takes, and "
        f"{MIN_STEPS} are wanted{f' ({why})' if why else ''}",
        f"record for longer, over a stretch in which several requests run at once{more}",
    )


def _differs(one: EngineShape, other: EngineShape) -> bool:
    return (one.model, one.device, one.dtype, one.block_size) != (
        *(other.model, other.device, other.dtype, other.block_size),
    )


def _often(values: Floats) -> int:
    """Return the largest that `MIN_SEEN` steps reach."""
    return int(np.sort(values)[-min(MIN_SEEN, values.size)]) if values.size else 0
