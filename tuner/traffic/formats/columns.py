"""What every reader makes of a file: raw columns, and the trace that follows from them.

A reader turns one file into raw `Columns` in file order. Sorting, the zero of time and the
treatment of empty requests are the same for all formats and live in `assemble`.

A recording holds of an answer whose client left before it ended what was served of it. Taken as
what was asked for, an overloaded server, whose users give up, looks like one that was asked for
little; `drawn_lengths` says how long such answers would have been.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tuner.errors import TraceError, UsageError
from tuner.stats import Bools, Floats, Ints
from tuner.traffic.concurrency import Concurrency
from tuner.traffic.prefixes import MAX_SIZE, HashIds
from tuner.traffic.traces import (
    PER_ROW,
    Aborted,
    ClockOrigin,
    ReadNotes,
    Remark,
    Trace,
    Turns,
    ZeroOutput,
    rows_of,
)

MAX_UNPACKED_BYTES = 64 << 30
"""Ours: 64 GiB, a hundred million requests with their prefixes; a small file that unpacks to
more is most likely made to fill a disk."""

MAX_TOKENS = 10_000_000
"""Ours: ten times the longest context served today; above it a unit or a column is wrong."""


class TimeUnit(StrEnum):
    """The unit of a clock that is a plain number."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    MICROSECONDS = "us"
    NANOSECONDS = "ns"

    @property
    def ticks_per_s(self) -> float:
        """How many of them make a second."""
        return {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[self.value]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user decided about rows that can be read in more than one way.

    `time_unit` and `hash_block_size` override what a format says of numbers that carry no
    unit. With `skip_invalid` wrong rows are counted and left out, up to `max_invalid_ratio`
    of all. `seed` is for what is drawn: formats that are sampled from aggregates, `sample_s`
    being how many seconds of them are wanted (None for all), and lengths of aborted answers.
    A packed or piped file is unpacked up to `max_unpacked_bytes`.

    Units: max_invalid_ratio is a share, 0 to 1.
    Raises: UsageError for a block size that no prompt is counted in.
    """

    zero_output: ZeroOutput = ZeroOutput.DROP
    only_model: str | None = None
    time_unit: TimeUnit | None = None
    hash_block_size: int | None = None
    skip_invalid: bool = False
    max_invalid_ratio: float = 0.05
    seed: int = 0
    sample_s: float | None = None
    aborted: Aborted = Aborted.DRAW
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES

    def __post_init__(self) -> None:
        """Refuse what is no size of a block."""
        if self.hash_block_size is not None and not 0 < self.hash_block_size < MAX_SIZE:
            raise UsageError(
                f"--hash-block-size must be above 0 and below {MAX_SIZE:,} tokens, "
                f"got {self.hash_block_size}",
                "as the trace was recorded: 512 by Mooncake, 16 by Bailian",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A name for each row, spelt once: most traces have few models and many rows.

    Shapes: codes is [n], indices into names; -1 where a row has none.
    """

    codes: Ints
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Labels:
        """Return the labels of values given one by one; None or empty is no name.

        >>> Labels.of(["a", None, "a"]).codes.tolist()
        [0, -1, 0]
        """
        places: dict[str, int] = {}
        codes = [places.setdefault(v, len(places)) if v else -1 for v in values]
        return cls(np.array(codes, dtype=np.int64), tuple(places))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The rows of one file in file order, lengths of 0 included.

    Arrivals stay in the file's own ticks, so that integer clocks are subtracted exactly.
    `turns.after` names rows of these columns. Hash ids mean the same in all files of one
    `hash_scope`; with `local_hashes` in this file alone. `failed` marks requests that the
    recording says went wrong; they are counted and left out. `aborted` marks answers that were
    cut short as their clients left; `aborted_before` counts such rows of which the file alone
    says how many they were, as one that was converted does. `skipped` counts wrong rows by
    what was wrong. `remarks` are sentences about what the file cannot say, and `sampled_from`
    is set where the rows were drawn from aggregates. The recording begins when its clock shows
    `starts_at_s`, or with the first row where that is None or later.

    Shapes: every column is [n].
    Units: arrived in ticks from any origin; e2e_s and ttft_s in seconds, nan where missing.
    """

    arrived: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    ticks_per_s: float
    prompt_tokens: Ints
    output_tokens: Ints
    hashes: HashIds | None = None
    e2e_s: Floats | None = None
    request_ids: tuple[str, ...] | None = None
    ttft_s: Floats | None = None
    models: Labels | None = None
    failed: Bools | None = None
    aborted: Bools | None = None
    aborted_before: int = 0
    turns: Turns | None = None
    concurrency: Concurrency | None = None
    origin: ClockOrigin = ClockOrigin.OWN
    local_hashes: bool = False
    hash_scope: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str | Remark, ...] = ()
    sampled_from: str = ""
    priorities: Ints | None = None
    engines: Ints | None = None
    starts_at_s: float | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> Columns:
        """Return the given rows, in the given order."""
        return replace(
            self,
            arrived=self.arrived[rows],
            models=self.models and Labels(self.models.codes[rows], self.models.names),
            failed=self.failed[rows] if self.failed is not None else None,
            aborted=self.aborted[rows] if self.aborted is not None else None,
            **rows_of(self, rows, self.arrived / self.ticks_per_s),
        )


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: its name, how to know it by its first bytes, and its reader.

    `matches` sees the first 64 KiB and must not raise. `read` gets a plain local file
    (compressed ones and standard input are spooled before), and raises TraceError for anything
    wrong in it, with the line. A package of a third party offers one under the entry point
    group `tuner.trace_formats`.
    """

    name: str
    matches: Callable[[bytes], bool]
    read: Callable[[Path, ReadOptions], Columns]


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def first_line_of(head: bytes) -> bytes:
    """Return the first line with anything in it, without a byte order mark."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().split(b"\n", 1)[0]


def starts_object(head: bytes) -> bool:
    """Return whether a file starts like a JSON object, good or bad."""
    return first_line_of(head).startswith(b"{")


def line_error(path: Path, line: int, reason: str, hint: str = "") -> TraceError:
    """Return the error for one wrong line, in the form every reader uses."""
    return TraceError(f"{path} line {line}: {reason}", hint)


def too_long(path: Path, line: int, most_bytes: int) -> TraceError:
    """Return the error for a line that is longer than may be held at once."""
    most = f"{most_bytes >> 20} MiB" if most_bytes >> 20 else f"{most_bytes:,} bytes"
    return line_error(path, line, f"is longer than {most}")


def lines_of(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line that is not blank, and the line.

    Raises: TraceError if one is too long to be read at once.
    """
    with path.open("rb") as file:
        skip_byte_order_mark(file)
        lines = iter(lambda: file.readline(most_bytes + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > most_bytes:
                raise too_long(path, number, most_bytes)
            if line.strip():
                yield number, line


def skip_byte_order_mark(file: BinaryIO) -> None:
    """Begin a file behind its byte order mark, if it has one."""
    if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
        file.seek(0)


def recorded(column: Floats) -> Floats | None:
    """Return a column that is nan where nothing was recorded, None where nothing ever was."""
    return None if np.isnan(column).all() else column


def no_time_unit(path: Path, options: ReadOptions) -> None:
    """Refuse --time-unit for a clock that carries its unit. Raises: UsageError."""
    if options.time_unit is not None:
        raise UsageError(
            f"{path} has a clock with its own unit, --time-unit does not apply to it",
            "leave --time-unit out",
        )


def tokens_fault(name: str, value: object, *, zero_is_fault: bool) -> str | None:
    """Return what is wrong with a token count, or None.

    >>> tokens_fault("input_length", 0, zero_is_fault=True)
    'input_length must be at least 1, got 0'
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} must be a whole number of tokens, got {shown(value)}"
    lowest = 1 if zero_is_fault else 0
    if value < lowest:
        return f"{name} must be at least {lowest}, got {shown(value)}"
    if value > MAX_TOKENS:
        return f"{name} must be at most {MAX_TOKENS:,} tokens, got {shown(value)}"
    return None


def tokens_are_plausible(column: Ints, *, zero_is_fault: bool) -> bool:
    """Return whether a whole column passes `tokens_fault`; the fast way through good data."""
    lowest = 1 if zero_is_fault else 0
    return not column.size or bool(column.min() >= lowest and column.max() <= MAX_TOKENS)


def shown(value: object) -> str:
    """Return a value as a message may show it: short, and on one line."""
    text = f'"{ascii(value)[1:-1]}"' if isinstance(value, str) else _plain(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: object) -> str:
    """Spell JSON's words as JSON does; huge integers have no decimal text in Python."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    words = {"None": "null", "True": "true", "False": "false", "nan": "NaN"}
    text = repr(value)
    return words.get(text, text)


class NoSuchModelError(UsageError):
    """A file that names its models has no request of the one that is wanted."""


LATEST_S = 7.3e9
"""The year 2201; a number above it counts in a smaller unit than seconds."""
ZERO_PROMPT = "prompt of 0 tokens"
ZERO_OUTPUT = "output of 0 tokens"
FAILED = "failed request"
ABORTED = "aborted request"


def assemble(
    columns: Columns, options: ReadOptions, *, source: str, format_name: str, sha256: str
) -> Trace:
    """Return the trace of a file's columns: unwanted rows left out, sorted, starting at 0.

    Under REFUSE the readers raise at the line, so no empty request arrives here.

    Raises: TraceError if no request is left; UsageError if the one model wanted is not there.
    """
    rows = len(columns.prompt_tokens) + sum(columns.skipped.values())
    remarks = tuple(map(Remark.of, columns.remarks))
    notes = ReadNotes(rows=rows, remarks=remarks, sampled_from=columns.sampled_from)
    for reason, count in columns.skipped.items():
        notes = notes.with_dropped(f"invalid: {reason}", count)
    columns, notes = _of_one_model(columns, options, notes, source)
    columns, notes = _with_aborted(columns, options, notes)
    columns, notes = _without_empty(columns, options.zero_output, notes)
    _refuse_none(columns, notes, source)
    columns, moved = _in_order(columns)
    _check_unit(columns, source)
    columns, notes = _without_turned_round(columns, notes)
    zero = columns.arrived[0]
    if columns.starts_at_s is not None:
        zero = min(zero, columns.starts_at_s * columns.ticks_per_s)
    if columns.turns is not None and not columns.turns.waiting:
        columns = replace(columns, turns=None)
    return Trace(
        due_s=(columns.arrived - zero) / columns.ticks_per_s,
        **{name: getattr(columns, name) for name in PER_ROW},
        concurrency=columns.concurrency,
        source=source,
        format=format_name,
        sha256=sha256,
        notes=replace(notes, moved=moved),
        origin=columns.origin,
        zero_s=float(zero) / columns.ticks_per_s,
        hash_scope=sha256 if columns.local_hashes else columns.hash_scope,
    )


def _check_unit(columns: Columns, source: str) -> None:
    """Refuse a clock that is taken in too large a unit. Raises: TraceError.

    In seconds a recording in milliseconds would be a thousand times as slow.
    """
    largest_s = float(np.abs(columns.arrived[[0, -1]]).max()) / columns.ticks_per_s
    if largest_s > LATEST_S:
        raise TraceError(
            f"{source}: the clock reads {largest_s:.15g} seconds, which is past the year 2200",
            "say its unit: --time-unit ms, us or ns; arrived_at_s has to be in seconds",
        )


def _refuse_none(columns: Columns, notes: ReadNotes, source: str) -> None:
    """Refuse a file of which no request is left. Raises: TraceError."""
    if len(columns.prompt_tokens):
        return
    why = ", ".join(f"{count} {reason}" for reason, count in notes.dropped.items())
    raise TraceError(
        f"{source}: none of the {notes.rows} requests can be replayed ({why})",
        "pass --zero-output one to keep empty answers"
        if ZERO_OUTPUT in notes.dropped
        else "give a recording with requests that were answered",
    )


def _of_one_model(
    columns: Columns, options: ReadOptions, notes: ReadNotes, source: str
) -> tuple[Columns, ReadNotes]:
    """Keep the rows of --only-model; a mixture without it is remarked on."""
    models, wanted = columns.models, options.only_model
    if wanted is None:
        if models is None or len(models.names) < 2:
            return columns, notes
        counts = np.bincount(models.codes[models.codes >= 0], minlength=len(models.names))
        named = ", ".join(
            f"{shown(name)} {count:,}" for name, count in zip(models.names, counts, strict=True)
        )
        # The remark stays with what is made of the file, where names of models do not.
        message = (
            f"{source} mixes {len(models.names)} models ({named}): --only-model picks one of "
            "them where that file is read"
        )
        return columns, notes.with_remark(message)
    lacks = f"{source} holds no request of model {shown(wanted)}; it has"
    if models is None or not models.names:
        raise UsageError(f"{lacks} no model names")
    if wanted not in models.names:
        raise NoSuchModelError(f"{lacks} {', '.join(models.names)}")
    is_other = models.codes != models.names.index(wanted)
    notes = notes.with_dropped(f"not of model {wanted}", int(is_other.sum()))
    return columns.take(np.flatnonzero(~is_other)), notes


def _with_aborted(
    columns: Columns, options: ReadOptions, notes: ReadNotes
) -> tuple[Columns, ReadNotes]:
    """Treat answers that were cut short, and say so."""
    notes = replace(notes, aborted=columns.aborted_before)
    if columns.aborted is None or not columns.aborted.any():
        return columns, notes
    count, rows = int(columns.aborted.sum()), len(columns.aborted)
    if options.aborted is Aborted.DROP:
        left = columns.take(np.flatnonzero(~columns.aborted))
        return left, notes.with_dropped(ABORTED, count)
    message = (
        f"{count:,} of {rows:,} answers ({count / rows:.1%}) were cut short: clients left; "
    )
    if options.aborted is Aborted.KEEP:
        message += "they are replayed as short as they were cut (--aborted keep)"
    else:
        output = drawn_lengths(
            columns.prompt_tokens, columns.output_tokens, columns.aborted, options.seed
        )
        columns = replace(columns, output_tokens=output)
        message += (
            "the rest of their length is drawn from answers that went on (--aborted draw)"
        )
    return columns, replace(notes.with_remark(message), aborted=notes.aborted + count)


MIN_ALIKE = 30
"""Ours: so many longer answers to prompts of like length are drawn from alone; with fewer, all
longer answers are."""


def drawn_lengths(prompt: Ints, output: Ints, aborted: Bools, seed: int) -> Ints:
    """Return the output lengths, those of aborted answers drawn among the ones that went on.

    An answer cut after so many tokens is as long as one taken at random from all that had more,
    to prompts within the same power of two where there are enough of them. One of these may
    have been cut as well, later, and then stands for what was drawn for it. That an answer was
    cut says nothing of how long it would have been: the assumption is the estimator's. Where no
    answer went on, the length stays.

    Shapes: [n] all, and the result.
    Source: redistribution to the right, Efron (1967), The two sample problem with censored
        data; equal in expectation to Kaplan and Meier (1958).

    >>> cut = np.array([False, True, False])
    >>> drawn_lengths(np.array([9, 9, 9]), np.array([5, 7, 80]), cut, seed=0).tolist()
    [5, 80, 80]
    """
    rows = np.flatnonzero(aborted)
    draws = np.random.default_rng(seed).random(rows.size)
    everyone, longer = _longer(output, np.arange(output.size), rows)
    taken = np.where(longer > 0, everyone[(draws * longer).astype(np.int64)], rows)
    alike = np.log2(np.maximum(prompt, 1)).astype(np.int64)
    for one in np.unique(alike[rows]):
        mine = np.flatnonzero(alike[rows] == one)
        pool, longer = _longer(output, np.flatnonzero(alike == one), rows[mine])
        enough = longer >= MIN_ALIKE
        places = (draws[mine] * longer).astype(np.int64)[enough]
        taken[mine[enough]] = pool[places]
    source = np.arange(output.size)
    source[rows] = taken
    # Who was taken may have been cut too, always later: follow them until nobody was.
    while not np.array_equal(further := source[source], source):
        source = further
    lengths: Ints = output[source]
    return lengths


def _longer(output: Ints, pool: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the pool from the longest down, and how many of it lie above each of the rows."""
    down = pool[np.argsort(-output[pool], kind="stable")]
    above = np.searchsorted(-output[down], -output[rows], side="left")
    return down, above.astype(np.int64)


def _without_empty(
    columns: Columns, zero_output: ZeroOutput, notes: ReadNotes
) -> tuple[Columns, ReadNotes]:
    """Leave out failed and empty requests, or give empty answers one token."""
    failed: Bools = np.zeros(len(columns.prompt_tokens), dtype=np.bool_)
    if columns.failed is not None:
        failed = columns.failed
    if zero_output is ZeroOutput.ONE:
        columns = replace(columns, output_tokens=np.maximum(columns.output_tokens, 1))
    no_prompt = (columns.prompt_tokens < 1) & ~failed
    no_output = (columns.output_tokens < 1) & ~no_prompt & ~failed
    notes = notes.with_dropped(FAILED, int(failed.sum()))
    notes = notes.with_dropped(ZERO_PROMPT, int(no_prompt.sum()))
    notes = notes.with_dropped(ZERO_OUTPUT, int(no_output.sum()))
    unwanted = failed | no_prompt | no_output
    if unwanted.any():
        columns = columns.take(np.flatnonzero(~unwanted))
    return columns, notes


def _in_order(columns: Columns) -> tuple[Columns, int]:
    """Sort stably by arrival; count the rows that arrived before one that stands above them."""
    arrived = columns.arrived
    is_late: Bools = arrived < np.maximum.accumulate(arrived)
    if not is_late.any():
        return columns, 0
    return columns.take(np.argsort(arrived, kind="stable")), int(is_late.sum())


def _without_turned_round(columns: Columns, notes: ReadNotes) -> tuple[Columns, ReadNotes]:
    """Let turns wait for nobody that arrived before the request they are to wait for."""
    turns = columns.turns
    if turns is None or not (is_before := turns.after > np.arange(len(turns))).any():
        return columns, notes
    message = (
        f"{int(is_before.sum()):,} turns arrived before the request that they wait for: they "
        "wait for none"
    )
    return replace(columns, turns=turns.freed(is_before)), notes.with_remark(message)


# Reasons that are told apart in the counts: ours, more would fill a terminal.
MAX_REASONS = 8
_GOT = re.compile(r",? got .*$", re.DOTALL)


class Skipped:
    """The wrong rows of one file so far."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path, self._options = path, options
        self._counts: Counter[str] = Counter()
        self._first = ""

    def __len__(self) -> int:
        return self._counts.total()

    @property
    def is_allowed(self) -> bool:
        """Whether wrong rows are skipped, and not refused."""
        return self._options.skip_invalid

    def add(self, place: int | str, reason: str, hint: str = "") -> None:
        """Count a wrong row, by the number of its line, or a wrong request by what it is.

        Raises: TraceError that names it, unless wrong rows are to be skipped.
        """
        is_line = isinstance(place, int)
        where = f"line {place}" if is_line else place
        if not self._options.skip_invalid:
            more = f"--skip-invalid counts and skips such {'rows' if is_line else 'requests'}"
            raise TraceError(f"{self._path} {where}: {reason}", hint or more)
        self._first = self._first or f"{where}: {reason}"
        fault = _GOT.sub("", reason)
        known = fault in self._counts or len(self._counts) < MAX_REASONS
        self._counts[fault if known else "other faults"] += 1

    def check(self, rows: int) -> None:
        """Refuse a file of which too many rows are wrong; `rows` counts these too.

        Raises: TraceError.
        """
        limit = self._options.max_invalid_ratio
        if rows and len(self) > limit * rows:
            raise TraceError(
                f"{self._path}: {len(self)} of {rows} rows are invalid, more than "
                f"{limit:.0%}; the first is {self._first}",
                "check --trace-format, or allow more with --max-invalid",
            )

    @property
    def by_reason(self) -> Mapping[str, int]:
        """How many rows were skipped, by what was wrong."""
        return dict(self._counts)
