"""Put a file onto the disk whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from tuner.errors import UsageError


def write_atomic(path: Path, text: str, *, secret: bool) -> None:
    """Write the file whole or not at all: what stood there before survives a full disk.

    With a secret inside, only the owner may read it (mode 0600), from the first byte on. A
    target that is no regular file, as /dev/stdout, is written to as it is.

    Raises: UsageError if the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            target = path.resolve()
            _replace(target, text, mode=0o600 if secret else _usual_mode(target))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="name another file after -o, or free space there",
        ) from error


def _replace(target: Path, text: str, mode: int) -> None:
    """Put a finished copy in the target's place, within its folder so that a rename does it."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as copy:
            copy.write(text)
            copy.flush()
            os.fchmod(copy.fileno(), mode)
            os.fsync(copy.fileno())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _usual_mode(target: Path) -> int:
    """Return the mode the file has, or the one a new file gets."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
