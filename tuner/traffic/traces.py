"""Recorded traffic as columns: when each request was due, how long it was, what it awaits.

A trace can be cut, scaled and limited, each time into a new one; its notes count what reading
it sorted, dropped or clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tuner.errors import TraceError, UsageError
from tuner.stats import Bools, Floats, Ints
from tuner.traffic.concurrency import Concurrency, in_flight_steps
from tuner.traffic.prefixes import HashIds


class RemarkKind(StrEnum):
    """What a remark on a trace decides beside being told; a native file keeps the words."""

    TOLD = ""
    KNOWN_IN_PART = "known_in_part"
    PREFIX_HITS_MISSED = "prefix_hits_missed"
    ENGINES_ADDED_UP = "engines_added_up"
    SUMS_OVER_SERVERS = "sums_over_servers"
    ENGINES_TOGETHER = "engines_together"
    MIDDLE_ENGINE = "middle_engine"
    LOAD_MISSED = "load_missed"


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence for the reader of a description, and what is decided by it."""

    text: str
    kind: RemarkKind = RemarkKind.TOLD

    @classmethod
    def of(cls, remark: str | Remark) -> Remark:
        """Return a remark; of a text alone nothing is decided."""
        return cls(remark) if isinstance(remark, str) else remark


@dataclass(frozen=True, slots=True)
class ReadNotes:
    """What reading did: rows read, rows sorted, rows dropped or clipped by reason.

    `remarks` say what was spread, sampled, merged, or is not in the recording at all.
    `aborted` counts answers that were cut short as their clients left, and whose length is
    therefore drawn or too short. `sampled_from` names the source of a trace that was drawn at
    random from aggregates; empty for a recording.
    """

    rows: int = 0
    moved: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    clipped: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    sampled_from: str = ""
    aborted: int = 0

    @property
    def kept(self) -> int:
        """How many of the rows that were read were not dropped."""
        return self.rows - sum(self.dropped.values())

    def with_dropped(self, reason: str, count: int) -> ReadNotes:
        """Return the notes with `count` more rows dropped for `reason`."""
        return replace(self, dropped=_add(self.dropped, reason, count))

    def with_clipped(self, reason: str, count: int) -> ReadNotes:
        """Return the notes with `count` more rows clipped for `reason`."""
        return replace(self, clipped=_add(self.clipped, reason, count))

    def with_remark(self, remark: str | Remark) -> ReadNotes:
        """Return the notes with one more remark, unless it is there already or empty."""
        made = Remark.of(remark)
        if not made.text or made in self.remarks:
            return self
        return replace(self, remarks=(*self.remarks, made))

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of all remarks."""
        return tuple(remark.text for remark in self.remarks)

    def told(self, *kinds: RemarkKind) -> list[str]:
        """Return the texts of the remarks of some kinds."""
        return [remark.text for remark in self.remarks if remark.kind in kinds]

    def and_those_of(self, other: ReadNotes) -> ReadNotes:
        """Return the notes of two traces that became one."""
        notes = replace(self, rows=self.rows + other.rows, moved=self.moved + other.moved)
        for reason, count in other.dropped.items():
            notes = notes.with_dropped(reason, count)
        for reason, count in other.clipped.items():
            notes = notes.with_clipped(reason, count)
        for remark in other.remarks:
            notes = notes.with_remark(remark)
        return replace(
            notes,
            sampled_from=self.sampled_from or other.sampled_from,
            aborted=self.aborted + other.aborted,
        )


def counts_text(counts: Mapping[str, int]) -> str:
    """Return how many there are for each reason, in a line.

    >>> counts_text({"failed request": 47})
    '47 (failed request)'
    """
    return ", ".join(f"{count:,} ({why})" for why, count in counts.items())


def _add(counts: Mapping[str, int], reason: str, count: int) -> Mapping[str, int]:
    return {**counts, reason: counts.get(reason, 0) + count} if count else counts


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """For each request the row whose answer it awaits, and the pause after that answer.

    `after` is -1 for a request that awaits none: the first of a session, or one whose
    predecessor is not part of the trace. A request never waits for itself, nor in a circle.

    Shapes: both [n].
    Units: pause_s in seconds from the end of the awaited answer; 0 where after is -1.
    Raises: ValueError if the columns differ in length or are out of range.
    """

    after: Ints
    pause_s: Floats

    def __post_init__(self) -> None:
        n = len(self.after)
        if len(self.pause_s) != n:
            raise ValueError(f"pause_s must have {n} rows, got {len(self.pause_s)}")
        if n and not (self.after.min() >= -1 and self.after.max() < n):
            raise ValueError(f"after must name rows below {n}, or -1")
        if np.any(self.after == np.arange(n)):
            raise ValueError("a request cannot wait for itself")
        if not (np.isfinite(self.pause_s).all() and np.all(self.pause_s >= 0)):
            raise ValueError("pause_s must be finite and at least 0")
        self.after.flags.writeable = False
        self.pause_s.flags.writeable = False

    def __len__(self) -> int:
        return len(self.after)

    def take(self, rows: Ints, due_s: Floats) -> Turns:
        """Return the given rows in the given order.

        Who waited for one left out waits for the one before it, for as long as the one left
        out took: its pause, its answer and the pause after that, so that it comes at its
        recorded time.

        Shapes: due_s is [n], when each request was due.

        >>> turns = Turns(np.array([-1, 0, 1]), np.array([0.0, 2.0, 3.0]))
        >>> shorter = turns.take(np.array([2, 0]), np.array([0.0, 6.0, 19.0]))
        >>> shorter.after.tolist(), shorter.pause_s.tolist()
        ([1, -1], [15.0, 0.0])
        """
        # The last place stands for none: -1 as an index.
        place = np.full(len(self) + 1, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        came, after, pause_s = rows.copy(), self.after[rows], self.pause_s[rows]
        while (gone := np.flatnonzero((after >= 0) & (place[after] < 0))).size:
            left_out = after[gone]
            later_s = due_s[came[gone]] - due_s[left_out] - self.pause_s[came[gone]]
            pause_s[gone] += self.pause_s[left_out] + np.maximum(later_s, 0.0)
            came[gone], after[gone] = left_out, self.after[left_out]
        after = place[after]
        return Turns(after, np.where(after >= 0, pause_s, 0.0))

    def freed(self, rows: Bools) -> Turns:
        """Return the turns of which those marked wait for none. Shapes: rows is [n]."""
        return Turns(np.where(rows, -1, self.after), np.where(rows, 0.0, self.pause_s))

    @property
    def waiting(self) -> int:
        """How many requests wait for another's answer."""
        return int((self.after >= 0).sum())


def pauses_of(after: Ints, arrived_s: Floats, e2e_s: Floats) -> Turns:
    """Return turns whose pauses are what lay between an answer and the next arrival.

    A next request that arrived before the recorded (or estimated) answer follows it at once.

    Shapes: all [n]; e2e_s is nan where the answer's end is not known, which counts as no time.
    """
    ended_s = arrived_s + np.nan_to_num(e2e_s)
    follows = after >= 0
    pause_s = np.where(follows, np.maximum(arrived_s - ended_s[after], 0.0), 0.0)
    return Turns(after, pause_s)


class LoadModel(StrEnum):
    """Whether arrivals wait for answers."""

    OPEN = "open"
    CLOSED = "closed"


class TooLong(StrEnum):
    """What becomes of a request whose prompt and output exceed max_model_len."""

    REFUSE = "refuse"
    CLIP = "clip"
    DROP = "drop"


class ZeroOutput(StrEnum):
    """What becomes of a recorded request without output tokens; engines refuse to make none."""

    DROP = "drop"
    ONE = "one"
    REFUSE = "refuse"


class Aborted(StrEnum):
    """What becomes of a recorded answer that was cut short because its client left.

    What is recorded of it is what was served, which is less than what was requested.
    """

    DRAW = "draw"
    KEEP = "keep"
    DROP = "drop"


class ClockOrigin(StrEnum):
    """What the zero of a recording's clock means when several recordings come together.

    WALL is the calendar; SHARED one clock of a whole data set; OWN that each starts its own.
    """

    WALL = "wall"
    SHARED = "shared"
    OWN = "own"


# What a trace, and a file's columns, have of each request, by the names of their fields.
ARRAYS = ("prompt_tokens", "output_tokens", "e2e_s", "ttft_s", "priorities", "engines")
PER_ROW = (*ARRAYS, "hashes", "turns", "request_ids")


def rows_of(columns: object, rows: Ints, due_s: Floats) -> dict[str, Any]:
    """Return some rows of what a trace, or a file's columns, have of each request."""
    every = {name: getattr(columns, name) for name in PER_ROW}
    every = {name: column for name, column in every.items() if column is not None}
    taken = {name: every[name][rows] for name in ARRAYS if name in every}
    if "hashes" in every:
        taken["hashes"] = every["hashes"].take(rows)
    if "turns" in every:
        taken["turns"] = every["turns"].take(rows, due_s)
    if "request_ids" in every:
        taken["request_ids"] = tuple(every["request_ids"][i] for i in rows.tolist())
    return taken


_Numbers = TypeVar("_Numbers", Floats, Ints)
Texts = tuple[str, ...] | None


def joined(
    columns: Sequence[_Numbers | None], sizes: Sequence[int], missing: float
) -> _Numbers | None:
    """Return the columns of several parts as one, None where no part has it.

    Shapes: columns[i] is [sizes[i]].
    """
    if all(column is None for column in columns):
        return None
    filled: list[_Numbers] = [
        np.full(size, missing) if column is None else column
        for column, size in zip(columns, sizes, strict=True)
    ]
    return np.concatenate(filled)


def joined_texts(columns: Sequence[Texts], sizes: Sequence[int]) -> Texts:
    """Return as `joined` does; a text that is missing is empty."""
    if all(column is None for column in columns):
        return None
    filled = (column or ("",) * size for column, size in zip(columns, sizes, strict=True))
    return tuple(chain.from_iterable(filled))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Recorded traffic in columns, in due order, with the identity of the file it came from.

    Columns because public traces reach 27 million rows. They are read-only: every method that
    changes something returns a new Trace. `turns` says which answer a request awaits, where the
    recording has it; `concurrency` is set for a recording of requests in flight in place of
    arrivals, which only a closed loop can replay. `zero_s` is what the recording's own clock
    showed at 0, and `origin` what that clock is. Equal hash ids of two recordings are the same
    block if their `hash_scope` is the same, which is empty for ids of a whole data set. `load`
    is the multiple of the recorded arrivals that these are (`resample.at_load`); below 1 it is
    what was asked for, and `recorded` is what they are a part of, so that more of them is more
    of that, bursts and all.
    Of `priorities` the smallest is served first, as in vLLM; None where all are alike.
    `engines` is the number of the one that answered, -1 where unknown; None of one alone.
    What is due in the first `lead_in_s` warms the engine up, its queue and its prefix cache: it
    is replayed and not measured, and a log's clock is at zero when it is over.

    Shapes: due_s, prompt_tokens, output_tokens, e2e_s, ttft_s, priorities, engines are [n],
        n >= 1; due_s ascends.
    Units: seconds from the start of the trace; e2e_s and ttft_s are nan where not recorded.
    Raises: TraceError if n is 0 or the hash ids do not fit the prompts; ValueError if the
        columns differ in length or are out of range.
    """

    due_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    hashes: HashIds | None = None
    e2e_s: Floats | None = None
    request_ids: tuple[str, ...] | None = None
    source: str = ""
    format: str = "native"
    sha256: str = ""
    notes: ReadNotes = field(default_factory=ReadNotes)
    ttft_s: Floats | None = None
    turns: Turns | None = None
    concurrency: Concurrency | None = None
    origin: ClockOrigin = ClockOrigin.OWN
    zero_s: float = 0.0
    hash_scope: str = ""
    load: float = 1.0
    priorities: Ints | None = None
    engines: Ints | None = None
    recorded: Trace | None = None
    lead_in_s: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.due_s)
        if not n:
            raise TraceError(f"{self.source}: no requests are left", "choose a wider window")
        for name in PER_ROW:
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise ValueError(f"{name} must have {n} rows, got {len(column)}")
        if not (self.due_s[0] >= 0 and math.isfinite(self.due_s[-1])):
            raise ValueError("due_s must be finite and at least 0")
        if not np.all(self.due_s[1:] >= self.due_s[:-1]):
            raise ValueError("due_s must ascend")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise ValueError("every request must have at least 1 prompt and 1 output token")
        if self.hashes is not None:
            self.hashes.check_fits(self.prompt_tokens, self.source)
        for name in ("due_s", *ARRAYS):
            if (column := getattr(self, name)) is not None:
                column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def duration_s(self) -> float:
        """Time from the first due time to the last; 0 for one request."""
        return float(self.due_s[-1] - self.due_s[0])

    def slice_rows(self, indices: npt.ArrayLike) -> Trace:
        """Return the given rows (ascending indices or a mask), their due times unchanged.

        A turn whose predecessor is left out waits for the one before that, and comes at its
        recorded time where that is answered as fast as recorded. What they are a part of is not
        known any more.
        """
        rows = np.asarray(indices)
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64)
        taken = rows_of(self, rows, self.due_s)
        return replace(self, due_s=self.due_s[rows], recorded=None, **taken)

    @property
    def led_in(self) -> int:
        """How many requests are due in the lead-in: the first rows, all others are measured.

        By the recording alone. A turn that waits for an answer may be sent later, by how fast
        a setting is, and all settings are to be measured on the same requests.
        """
        return int(np.searchsorted(self.due_s, self.lead_in_s, side="left"))

    @property
    def is_measured(self) -> Bools:
        """Which requests are due after the lead-in. Shapes: [n]."""
        found: Bools = np.arange(len(self)) >= self.led_in
        return found

    @property
    def measured(self) -> int:
        """How many requests are due after the lead-in."""
        return len(self) - self.led_in

    def all_measured(self) -> Trace:
        """Return the trace with its lead-in measured too, as also what it is a part of."""
        if not self.lead_in_s:
            return self
        whole = self.recorded
        return replace(self, lead_in_s=0.0, recorded=whole and whole.all_measured())

    def between(self, start_s: float, end_s: float, lead_in_s: float = 0.0) -> Trace:
        """Return the requests due in [start_s, end_s), after the lead-in that time begins with.

        The silence before the first of them is part of the window and stays.

        Raises: TraceError if none is due in the window itself.
        """
        begin_s = start_s - lead_in_s
        low, first, high = np.searchsorted(self.due_s, (begin_s, start_s, end_s), side="left")
        if first >= high:
            raise TraceError(
                f"{self.source}: no request is due between {start_s:g} s and {end_s:g} s, "
                f"the trace ends at {float(self.due_s[-1]):g} s",
                "choose a window that holds requests",
            )
        part = self.slice_rows(np.arange(low, high))
        # Rounded as due times are, so that who is due when the window starts belongs to it.
        return self._counted_from(part, begin_s, end_s, start_s - begin_s)

    def shifted(self) -> Trace:
        """Return the trace with its first request due at 0; its own clock is kept in zero_s."""
        return self._counted_from(self, float(self.due_s[0]), math.inf)

    def _counted_from(
        self, part: Trace, start_s: float, end_s: float, lead_in_s: float = 0.0
    ) -> Trace:
        """Return rows due in [start_s, end_s), counted from start_s, the lead-in first."""
        flow, whole = self.concurrency, self.recorded
        return replace(
            part,
            due_s=part.due_s - start_s,
            zero_s=self.zero_s + start_s,
            concurrency=flow and flow.between(start_s, end_s),
            recorded=whole and whole.between(start_s + lead_in_s, end_s, lead_in_s),
            lead_in_s=lead_in_s,
        )

    def recorded_concurrency(self) -> tuple[Floats, Ints]:
        """Return when the recorded number of requests in flight changed, and to what.

        A recording of that number itself comes first; else it follows from the latencies, and
        rows whose e2e_s is missing are left out.

        Shapes: both [m], times ascending and distinct; the last count is 0 where it
            follows from latencies.
        Raises: TraceError if the trace recorded no latency at all.
        """
        if self.concurrency is not None:
            return self.concurrency.times_s, self.concurrency.in_flight
        known = None if self.e2e_s is None else ~np.isnan(self.e2e_s)
        if self.e2e_s is None or known is None or not known.any():
            raise TraceError(
                f"{self.source}: the recorded concurrency needs e2e_s, and no row has it",
                "record e2e_s, or name a number to keep in flight: --concurrency 16",
            )
        return in_flight_steps(self.due_s[known], self.e2e_s[known])

    def in_flight_as_recorded(self) -> Trace:
        """Return the trace with its recorded concurrency as a recording of its own.

        A window of it then holds who was in flight when it begins; latencies alone tell of
        those that are due in it.

        Raises: TraceError if the trace recorded no latency at all.
        """
        return replace(self, concurrency=Concurrency(*self.recorded_concurrency()))

    def too_long(self, max_model_len: int) -> Bools:
        """Return by request whether prompt and output together exceed max_model_len."""
        over: Bools = self.prompt_tokens + self.output_tokens > max_model_len
        return over

    def limit_lengths(self, max_model_len: int, policy: TooLong) -> Trace:
        """Return the trace with requests above max_model_len treated by `policy`.

        REFUSE leaves them in: the replay counts them as refused, as a server would. CLIP cuts
        the prompt first and the output only when a prompt of one token does not suffice.

        Raises: UsageError if max_model_len is below 2; TraceError if nothing is left.
        """
        if max_model_len < 2:
            raise UsageError(f"max_model_len must be at least 2, got {max_model_len}")
        if policy is TooLong.REFUSE:
            return self
        over = self.too_long(max_model_len)
        count = int(over.sum())
        whole = self.recorded and self.recorded.limit_lengths(max_model_len, policy)
        if not count:
            return self if whole is self.recorded else replace(self, recorded=whole)
        reason = f"over max_model_len {max_model_len}"
        if policy is TooLong.DROP:
            notes = self.notes.with_dropped(reason, count)
            return replace(self.slice_rows(~over), notes=notes, recorded=whole)
        room = np.maximum(max_model_len - self.output_tokens, 1)
        prompt = np.where(over, room, self.prompt_tokens)
        output = np.minimum(self.output_tokens, max_model_len - prompt)
        return replace(
            self,
            prompt_tokens=prompt,
            output_tokens=output,
            hashes=self.hashes and self.hashes.cut(-(-prompt // self.hashes.block_size)),
            notes=self.notes.with_clipped(reason, count),
            recorded=whole,
        )
