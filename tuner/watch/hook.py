"""Run the user's command that hands a file over, without a shell and not without end.

Answers how it ended. What it does is its own business; a watch never talks to the serving
process itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

TOLD_CHARACTERS: Final = 400
"""Ours: enough of what a command said last to see what it complained of."""


@dataclass(frozen=True, slots=True)
class HookEnd:
    """How a hook ended: exit_code is None where it did not start or was stopped in time."""

    exit_code: int | None
    said: str
    problem: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the file was handed over."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Say it in words."""
        how = self.problem or f"ended with exit code {self.exit_code}"
        return f"the hook {how}" + (f": {self.said}" if self.said and not self.is_done else "")


def run_hook(argv: Sequence[str], told: Mapping[str, str], timeout_s: float) -> HookEnd:
    """Run the command and return how it ended; past the time-out it is killed whole.

    `told` is added to its environment. Its own words go to neither of our streams, so that
    standard output stays the result's.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **told},
            # A group of its own, so that what it started ends with it.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return HookEnd(None, "", f"cannot be run: {argv[0]}: {reason}")
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        said, _ = process.communicate()
        return HookEnd(None, _tail(said), f"did not end within {timeout_s:g} s and was killed")
    except BaseException:
        _kill(process)
        raise
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return HookEnd(process.returncode, _tail(said), f"was ended by {name}")
    return HookEnd(process.returncode, _tail(said))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(said: bytes) -> str:
    r"""Return the end of what was said, as one line.

    >>> _tail(b"a\nb\n")
    'a / b'
    """
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return " / ".join(lines)[-TOLD_CHARACTERS:]
