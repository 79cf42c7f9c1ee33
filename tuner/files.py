"""Put a file onto the disk whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import UsageError


class ChangedMeanwhileError(UsageError):
    """The file is no longer what the new text was made from; it was left alone."""


@dataclass(frozen=True, slots=True)
class ExpectedText:
    """The text that a file must still have; None where there must be no file."""

    text: str | None

    def is_in(self, path: Path) -> bool:
        """Return whether the file has just this text."""
        if self.text is None:
            return not path.exists()
        try:
            return path.read_bytes() == self.text.encode()
        except OSError:
            return False


def write_atomic(
    path: Path, text: str, *, secret: bool, expected: ExpectedText | None = None
) -> None:
    """Write the file whole or not at all: what stood there before survives a full disk.

    With a secret inside, only the owner may read it (mode 0600), from the first byte on. A
    target that is no regular file, as /dev/stdout, is written to as it is. Where a text is
    `expected`, the file is read again right before the new one takes its place; an edit within
    the microseconds between the two would be lost, as no file system compares and renames in
    one.

    Raises: UsageError if the file cannot be written; ChangedMeanwhileError if it is not as
        expected.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            target = path.resolve()
            _replace(target, text, 0o600 if secret else _usual_mode(target), expected)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="name another file after -o, or free space there",
        ) from error


def _replace(target: Path, text: str, mode: int, expected: ExpectedText | None) -> None:
    """Put a finished copy in the target's place, within its folder so that a rename does it."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as copy:
            copy.write(text)
            copy.flush()
            os.fchmod(copy.fileno(), mode)
            os.fsync(copy.fileno())
        _check_still(target, expected)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _check_still(target: Path, expected: ExpectedText | None) -> None:
    """Refuse a file that is not as expected. Raises: ChangedMeanwhileError."""
    if expected is not None and not expected.is_in(target):
        raise ChangedMeanwhileError(
            f"{target} was changed by others meanwhile and is left alone",
            "run it again: it starts from the file as it is now",
        )


def _usual_mode(target: Path) -> int:
    """Return the mode the file has, or the one a new file gets."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
