"""Wrong rows: the first one is an error, or with --skip-invalid each is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tuner.errors import TraceError
from tuner.formats.columns import ReadOptions, line_error

# Reasons that are told apart in the counts: ours, more would fill a terminal.
MOST_REASONS = 8
_GOT = re.compile(r",? got .*$", re.DOTALL)


class Skipped:
    """The wrong rows of one file so far."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path, self._options = path, options
        self._counts: Counter[str] = Counter()
        self._first = ""

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, line: int, reason: str, hint: str = "") -> None:
        """Count a wrong row.

        Raises: TraceError that names it, unless wrong rows are to be skipped.
        """
        if not self._options.skip_invalid:
            more = "--skip-invalid counts and skips such rows"
            raise line_error(self._path, line, reason, hint or more)
        self._first = self._first or f"line {line}: {reason}"
        kind = _GOT.sub("", reason)
        known = kind in self._counts or len(self._counts) < MOST_REASONS
        self._counts[kind if known else "other faults"] += 1

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
