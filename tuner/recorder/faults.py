"""What cannot be recorded: kept from the server, counted, and reported once.

Serving comes first, so nothing that fails here may reach vLLM. And one request must not be able
to end the recording of all others: a fault costs what it struck, and only many in a row end it.
Exceptions alone are kept back; an interrupt, or a task being cancelled, is the server's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

MAX_IN_A_ROW: Final = 1000
"""Ours: a client's odd requests stand between others that go well, so a thousand without one of
those are no odd requests but a vLLM whose interface is another one."""

silently: Final = suppress(Exception)
"""For what is done once something has failed: a fault in it is dropped."""

# A child of vLLM's logger, so that the server's log shows it in the server's own form.
_log = logging.getLogger("vllm.tuner.recorder")


def warn(text: str, *values: object) -> None:
    """Write a warning to the server's log; a log that fails stays silent."""
    with silently:
        _log.warning(text, *values)


def inform(text: str, *values: object) -> None:
    """Write progress to the server's log, under the same care."""
    with silently:
        _log.info(text, *values)


def described(cause: object) -> str:
    """Return a reason in words, also of an exception that fails at its own text."""
    kind = type(cause).__name__
    try:
        text = str(cause)
    except Exception:  # noqa: BLE001 - its text is not ours
        return kind
    if isinstance(cause, OSError) and cause.strerror:
        return str(cause.strerror)
    return f"{kind}: {text}" if isinstance(cause, Exception) else text


class Faults:
    """Counts what one recorder could not record, and ends the recording where it must."""

    def __init__(self, path: Path, stop: Callable[[object], None]) -> None:
        self._path, self._stop = path, stop
        self._lock = threading.Lock()
        self.count = 0

    def add(self, cause: Exception, in_a_row: int, max_in_a_row: int) -> None:
        """Count a fault, and warn or stop as its number asks for."""
        with self._lock:
            self.count += 1
            is_first = self.count == 1
        if in_a_row >= max_in_a_row:
            often = f"{in_a_row} faults in a row, the last one " if in_a_row > 1 else ""
            self._stop(often + described(cause))
        elif is_first:
            warn(
                "recording to %s had to leave something out: %s; recording and serving go on",
                self._path,
                described(cause),
            )


class FaultGuard:
    """Lets no exception of its block out, `with guard:`; one for each place that may fail."""

    __slots__ = ("_faults", "_in_a_row", "_max_in_a_row")

    def __init__(self, faults: Faults, max_in_a_row: int) -> None:
        self._faults, self._max_in_a_row = faults, max_in_a_row
        self._in_a_row = 0

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Keep an exception back, and count it."""
        if cause is None:
            self._in_a_row = 0
            return False
        if not isinstance(cause, Exception):
            return False
        self._in_a_row += 1
        with silently:
            self._faults.add(cause, self._in_a_row, self._max_in_a_row)
        return True
