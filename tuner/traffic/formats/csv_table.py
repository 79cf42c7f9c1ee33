"""CSV of any public format into typed columns that are found by name.

Good data is streamed and parsed in bulk by polars. When a value turns out wrong, the rows are
read again one by one to say which and why, so good data does not pay for exact messages.

Files come from strangers: how many columns one has, and how long its lines are, is bounded
before anything grows with it.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from tuner.errors import TraceError, UsageError
from tuner.stats import Floats, Ints
from tuner.traffic.formats.columns import (
    MAX_TOKENS,
    Columns,
    Labels,
    ReadOptions,
    Skipped,
    TimeUnit,
    line_error,
    no_time_unit,
    shown,
    tokens_fault,
)
from tuner.traffic.formats.wall_clock import nanoseconds, wall_clock_fault
from tuner.traffic.traces import ClockOrigin, ZeroOutput

if TYPE_CHECKING:
    import polars as pl

MAX_SECONDS = 1e16
"""Ours: past it a double no longer holds whole seconds, and no calendar reaches it."""

MAX_COLUMNS = 256
"""Ours: thirty times the widest public trace; planning the read takes time and
memory that grow with their square."""

MOST_LINE_BYTES = 1 << 22
"""Ours: 4 MiB, thirty times what Python's csv takes for one field; a longer line is no row."""

_HEADER_BYTES = 1 << 16


class Kind(StrEnum):
    """What a column holds."""

    WALL_CLOCK = "a date and time"
    SECONDS = "a number"
    TOKENS = "a whole number of tokens"
    LABEL = "text"


@dataclass(frozen=True, slots=True)
class Field:
    """One column: its name, what it holds, and whether the file must have it.

    A column that may be `blank` has no value in some rows: nan, no label, or 0 tokens.
    """

    name: str
    kind: Kind
    is_needed: bool = True
    blank: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CsvTable:
    """The wanted columns of a CSV file in file order, and what was left out as invalid.

    Shapes: every column is [n].
    Units: wall clocks in nanoseconds since 1970 as integers, numbers as they stand.
    """

    whole: Mapping[str, Ints]
    numbers: Mapping[str, Floats]
    labels: Mapping[str, Labels]
    skipped: Mapping[str, int]

    def __len__(self) -> int:
        columns = (*self.whole.values(), *self.numbers.values())
        return len(columns[0])


def header_names(head: bytes) -> list[str]:
    """Return the column names in the first line of a file's head, without spaces around."""
    line = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    text = line.removeprefix("\ufeff").strip().replace("\r", " ").replace("\x00", " ")
    try:
        row = next(csv.reader([text]), [])
    except csv.Error:
        return []
    return [name.strip() for name in row]


def header_line(path: Path) -> bytes:
    """Return the first line of a file, or so much of it as may be a header."""
    with path.open("rb") as file:
        return file.readline(_HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class ThreeColumns:
    """A clock and two token counts, told by their names in the header."""

    clock: str
    kind: Kind
    prompt: str
    output: str

    def stand_in(self, head: bytes) -> bool:
        """Say whether the header names the clock and at least one of the token columns."""
        names = header_names(head)
        return self.clock in names and (self.prompt in names or self.output in names)

    def read(
        self, path: Path, options: ReadOptions, more: Mapping[str, Field] | None = None
    ) -> CsvTable:
        """Return `arrived`, `prompt` and `output`, and `more` columns.

        Raises: TraceError; UsageError for a unit of a clock that has its own.
        """
        if self.kind is Kind.WALL_CLOCK:
            no_time_unit(path, options)
        fields = {
            "arrived": Field(self.clock, self.kind),
            "prompt": Field(self.prompt, Kind.TOKENS),
            "output": Field(self.output, Kind.TOKENS),
            **(more or {}),
        }
        return read_table(path, fields, options)

    def columns(self, table: CsvTable, options: ReadOptions) -> Columns:
        """Return the columns that the three of a table make.

        Units: a clock that is a number in seconds, or in the unit that the options name.
        """
        is_wall = self.kind is Kind.WALL_CLOCK
        unit = options.time_unit or TimeUnit.SECONDS
        return Columns(
            arrived=table.whole["arrived"] if is_wall else table.numbers["arrived"],
            ticks_per_s=1e9 if is_wall else unit.ticks_per_s,
            prompt_tokens=table.whole["prompt"],
            output_tokens=table.whole["output"],
            origin=ClockOrigin.WALL if is_wall else ClockOrigin.SHARED,
            skipped=table.skipped,
        )


def read_table(path: Path, fields: Mapping[str, Field], options: ReadOptions) -> CsvTable:
    """Return the fields' columns.

    Raises: TraceError that names the first wrong line, or the column that is missing.
    """
    return _Reader(path, fields, options).read()


def first_value(path: Path, place: int) -> str:
    """Return the first value of a column, by which its spelling is known.

    Raises: TraceError if the first row is none.
    """
    rows = _rows(path)
    next(rows, None)
    row = next((row for _, row in rows if row), [])
    return row[place].strip() if len(row) > place else ""


class _Reader:
    """One file being read."""

    def __init__(self, path: Path, fields: Mapping[str, Field], options: ReadOptions) -> None:
        self._path, self._options = path, options
        line = header_line(path)
        self._header = header_names(line)
        if len(line) == _HEADER_BYTES and not line.endswith(b"\n"):
            raise line_error(path, 1, f"must be a header of less than {_HEADER_BYTES:,} bytes")
        if len(self._header) > MAX_COLUMNS:
            raise _too_many(path, len(self._header))
        self._where = _locate(path, fields, self._header)
        self._fields = {key: fields[key] for key in self._where}
        self._zero_is_fault = options.zero_output is ZeroOutput.REFUSE

    def read(self) -> CsvTable:
        """Return the table. Raises: TraceError; UsageError without polars."""
        # polars takes longer to import than `tune --help` may take, and only CSV needs it.
        try:
            import polars as pl
        except ModuleNotFoundError as missing:
            raise UsageError(
                f"{self._path} is CSV, which polars reads, and polars is not installed",
                "pip install 'max-num-seqs-tuner[csv]'",
            ) from missing

        skipped = Skipped(self._path, self._options)
        _check_lines(self._path)
        try:
            frame = self._scan(quick=True)
            if self._holes(frame).any():
                frame = self._scan(quick=False)
        except pl.exceptions.PolarsError as cause:
            for line, fault, hint in self._faults():
                raise line_error(self._path, line, fault, hint) from cause
            why = shown(str(cause).partition("\n")[0])
            message = f"{self._path} is not CSV that we can read: polars says {why}"
            raise TraceError(message) from cause
        if not frame.height:
            raise TraceError(
                f"{self._path} has a header but no requests", "record some traffic first"
            )
        holes = self._holes(frame)
        if holes.any():
            for line, fault, hint in self._faults():
                skipped.add(line, fault, hint)
            skipped.check(frame.height)
            if len(skipped) != int(holes.sum()):
                raise TraceError(f"{self._path} holds rows that cannot be told apart as CSV")
            frame = frame.filter(~pl.Series(holes))
        return self._table(frame, skipped)

    def _table(self, frame: pl.DataFrame, skipped: Skipped) -> CsvTable:
        whole, numbers, labels = {}, {}, {}
        for key, field in self._fields.items():
            # Taken out, so that no column is held twice for longer than it is copied.
            column = frame.drop_in_place(key)
            if field.kind in (Kind.WALL_CLOCK, Kind.TOKENS):
                whole[key] = column.to_numpy().astype(np.int64, copy=False)
            elif field.kind is Kind.SECONDS:
                numbers[key] = column.to_numpy()
            else:
                labels[key] = Labels.of(column.to_list())
            del column
        return CsvTable(whole, numbers, labels, skipped.by_reason)

    def _holes(self, frame: pl.DataFrame) -> np.ndarray:
        """Return which rows lack a value that they must have."""
        holes = np.zeros(frame.height, dtype=np.bool_)
        for key, field in self._fields.items():
            if field.kind is not Kind.LABEL and frame[key].null_count():
                holes |= frame[key].is_null().to_numpy()
        return holes

    def _scan(self, *, quick: bool) -> pl.DataFrame:
        """Read the columns, null where a value is wrong; skip blank rows."""
        import polars as pl  # Lazy for the reason given in `read`.

        lazy = pl.scan_csv(self._path, infer_schema=False, encoding="utf8-lossy")
        header = lazy.collect_schema().names()
        if len(header) <= max(self._where.values()):
            raise line_error(self._path, 1, "has quotes that do not close")
        if len(header) > MAX_COLUMNS:
            raise _too_many(self._path, len(header))
        # All columns are looked at: only where polars reads them all does it say of a row that
        # it has too many fields, as where a comma within a value has moved all behind it.
        is_blank = pl.coalesce(pl.all()).is_null()
        columns = []
        for key, place in self._where.items():
            example = first_value(self._path, place) if quick else None
            columns.append(
                self._typed(pl.col(header[place]), self._fields[key], example).alias(key)
            )
        return lazy.filter(~is_blank).select(columns).collect(engine="streaming")

    def _typed(self, column: pl.Expr, field: Field, example: str | None) -> pl.Expr:
        """Return a column as what it holds, null where it does not."""
        import polars as pl  # Lazy for the reason given in `read`.

        text = column.str.strip_chars()
        if field.kind is Kind.LABEL:
            return text
        if field.kind is Kind.WALL_CLOCK:
            return nanoseconds(column, example)
        no_text = text.is_null() | (text == "")
        if field.kind is Kind.SECONDS:
            number = text.cast(pl.Float64, strict=False)
            fine = pl.when(number.is_finite() & (number.abs() <= MAX_SECONDS)).then(number)
            return pl.when(no_text).then(math.nan).otherwise(fine) if field.blank else fine
        tokens = text.cast(pl.Int64, strict=False)
        if example is None:
            # Some writers give whole numbers a fraction of zero.
            number = text.cast(pl.Float64, strict=False)
            is_whole = number.is_finite() & (number == number.round()) & (number.abs() < 1e15)
            tokens = pl.coalesce(
                tokens, pl.when(is_whole).then(number).cast(pl.Int64, strict=False)
            )
        lowest = 1 if self._zero_is_fault and not field.blank else 0
        # MAX_TOKENS fits, and half the bytes are the larger part of what a long file takes.
        count = pl.when(tokens.is_between(lowest, MAX_TOKENS)).then(tokens).cast(pl.Int32)
        return pl.when(no_text).then(0).otherwise(count) if field.blank else count

    def _faults(self) -> Iterator[tuple[int, str, str]]:
        """Read row by row and yield line, fault and hint; slow, and only for wrong files.

        As for polars a row without any value is none, and a short one has no value at its end.
        """
        rows = _rows(self._path)
        next(rows)
        for line, row in rows:
            if any(row) and (found := self._fault(row, len(self._header))):
                yield line, *found

    def _fault(self, row: Sequence[str], width: int) -> tuple[str, str] | None:
        needed = [
            place
            for key, place in self._where.items()
            if self._fields[key].kind is not Kind.LABEL and not self._fields[key].blank
        ]
        if not max(needed) < len(row) <= width:
            return f"must have {width} fields, got {len(row)}", ""
        for key, place in self._where.items():
            field, name = self._fields[key], self._header[place]
            text = row[place].strip() if place < len(row) else ""
            if field.blank and not text:
                continue
            if fault := self._value_fault(name, text, field):
                return fault, ""
        return None

    def _value_fault(self, name: str, text: str, field: Field) -> str | None:
        if field.kind is Kind.WALL_CLOCK:
            return wall_clock_fault(name, text)
        if field.kind is Kind.SECONDS:
            number = _number(text)
            if number is None or abs(number) > MAX_SECONDS:
                return f"{name} must be a number, got {shown(text)}"
        if field.kind is Kind.TOKENS:
            must = self._zero_is_fault and not field.blank
            return tokens_fault(name, _whole(text), zero_is_fault=must)
        return None


def _locate(path: Path, fields: Mapping[str, Field], header: Sequence[str]) -> dict[str, int]:
    """Return the place of each field in the header; one that is not needed may lack."""
    where = {}
    for key, field in fields.items():
        places = [i for i, name in enumerate(header) if name == field.name]
        if len(places) > 1 or (field.is_needed and not places):
            columns = shown(", ".join(header))
            raise line_error(path, 1, f"must have one column {field.name}, got {columns}")
        if places:
            where[key] = places[0]
    return where


def _too_many(path: Path, columns: int) -> TraceError:
    return line_error(
        path,
        1,
        f"must have at most {MAX_COLUMNS} columns, got {columns:,}",
        "keep the columns of arrival times and lengths, and drop the others",
    )


def _check_lines(path: Path) -> None:
    """Refuse a file with a line that is no row, which would be held in memory as a whole.

    Raises: TraceError.
    """
    line = 1
    with path.open("rb") as file:
        while len(block := file.read(MOST_LINE_BYTES)) == MOST_LINE_BYTES:
            breaks = block.count(b"\n")
            if not breaks:
                raise _too_long(path, line)
            line += breaks


def _too_long(path: Path, line: int) -> TraceError:
    return line_error(path, line, f"must be shorter than {MOST_LINE_BYTES:,} bytes")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows, the header among them, with the number of their last line.

    Raises: TraceError if one is no row.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.reader(_lines(path, file))
        try:
            for row in rows:
                yield rows.line_num, row
        except csv.Error as cause:
            raise line_error(path, rows.line_num, f"is not CSV: {cause}") from cause


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), ""), start=1):
        if len(line) == MOST_LINE_BYTES and not line.endswith("\n"):
            raise _too_long(path, number)
        yield line.replace("\x00", " ")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _whole(text: str) -> object:
    """Return the number that a text stands for if it is a whole one, else the text."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    number = _number(text)
    is_whole = number is not None and number == round(number) and abs(number) < 1e15
    return int(number) if is_whole and number is not None else text
