"""The files of a recording: prod.jsonl, prod.1.jsonl, prod.2.jsonl and so on.

One rule names them: the first number that is free. So a full file is followed by the next, a
restarted server adds to what it recorded before, several processes of one server write side by
side, and nothing is ever overwritten. Every file begins with its own header. All together take
so much of a disk and no more: it is the server's, and a pod that fills it is ended.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
"""When people talk to a server is nobody's business but its owner's."""

FREE_SHARE: Final = 0.05
MAX_FREE_BYTES: Final = 10_000_000_000
"""Ours: a twentieth of a disk stays free for what else is written there, or 10 GB."""

LOOK_AGAIN_S: Final = 2.0
LOOK_AGAIN_BYTES: Final = 16 << 20
"""Ours: what others write meanwhile is little beside what is left free."""


class Room:
    """What a recording may still take: of its own total, and of what the disk has left.

    Its files are those of all processes and of all suffixes, known by their names.
    """

    def __init__(self, path: Path, suffixes: Sequence[str], max_total_bytes: int) -> None:
        self._folder, self._max_bytes = path.parent, max_total_bytes
        ends = "|".join(re.escape(suffix) for suffix in {path.suffix, *suffixes})
        self._own = re.compile(rf"{re.escape(path.stem)}(?:\.\d+)?(?:{ends})")
        self._left = 0
        self._looked_s = -LOOK_AGAIN_S

    def take(self, size: int) -> None:
        """Count bytes that are about to be written. Raises: RoomError if there is no room."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_AGAIN_S or size > self._left:
            self._left, self._looked_s = min(self._look(), LOOK_AGAIN_BYTES), now_s
        if size > self._left and size > self._look():
            raise RoomError(self._why(size))
        self._left -= size

    def _look(self) -> int:
        """Return how many bytes may be written by now."""
        return min(self._max_bytes - self._total(), self._spare())

    def _total(self) -> int:
        with os.scandir(self._folder) as found:
            return sum(one.stat().st_size for one in found if self._own.fullmatch(one.name))

    def _spare(self) -> int:
        """Return what the disk has beyond what is to stay free."""
        disk = os.statvfs(self._folder)
        floor = min(int(disk.f_blocks * disk.f_frsize * FREE_SHARE), MAX_FREE_BYTES)
        return disk.f_bavail * disk.f_frsize - floor

    def _why(self, size: int) -> str:
        if size > self._max_bytes - self._total():
            return (
                f"its files have the {self._max_bytes:,} bytes that they may have in all, "
                "TUNE_RECORD_MAX_TOTAL_BYTES; move the old ones away and restart to go on"
            )
        return f"less than {FREE_SHARE:.0%} of the disk would be left free"


class RoomError(OSError):
    """A recording has taken all that it may."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EDQUOT, why)


class Segments:
    """The file being written, and the ones to come.

    `header` is asked for at every write, and a file is opened at the first line; when the
    header has changed, the next file begins.
    """

    def __init__(
        self, path: Path, max_bytes: int | None, header: Callable[[], bytes], room: Room
    ) -> None:
        self._path, self._max_bytes, self._header, self._room = path, max_bytes, header, room
        self._fd: int | None = None
        self._size = 0
        self._number = 0
        self._written_header = b""
        self.paths: list[Path] = []

    def write(self, lines: Sequence[bytes]) -> None:
        """Append whole lines.

        When a write fails its part of a line is cut off again, and a file without any line is
        removed, so that what was recorded before stays readable.

        Raises: OSError; RoomError, with nothing written of what there is no room for.
        """
        header = self._header()
        self._room.take(sum(map(len, lines)) + len(header))
        if header != self._written_header or self._is_taken():
            self.close()
        piece: list[bytes] = []
        piece_size = 0
        for line in lines:
            if self._is_full(piece_size + len(line)):
                self._append(piece)
                self.close()
                piece, piece_size = [], 0
            if self._fd is None:
                self._open_next()
                piece.append(header)
                self._written_header = header
                piece_size += len(header)
            piece.append(line)
            piece_size += len(line)
        self._append(piece)

    def close(self) -> None:
        """Close the file being written; the next line opens another."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_taken(self) -> bool:
        """Whether somebody deleted the file, moved it to another disk or cut it short.

        What is written would be lost, or have no header. One renamed is written on.
        """
        if self._fd is None:
            return False
        found = os.fstat(self._fd)
        return not found.st_nlink or found.st_size < self._size

    def _is_full(self, more: int) -> bool:
        if self._fd is None or self._max_bytes is None:
            return False
        return self._size + more > self._max_bytes

    def _open_next(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while True:
            path = self._named(self._number)
            self._number += 1
            try:
                self._fd = os.open(path, flags, FILE_MODE)
            except FileExistsError:
                continue
            self._size = 0
            self.paths.append(path)
            return

    def _named(self, number: int) -> Path:
        suffix = f".{number}{self._path.suffix}" if number else self._path.suffix
        return self._path.with_suffix(suffix)

    def _append(self, lines: Sequence[bytes]) -> None:
        if self._fd is None or not lines:
            return
        data = memoryview(b"".join(lines))
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            self._undo()
            raise
        self._size += written

    def _undo(self) -> None:
        if self._fd is None:
            return
        if self._size:
            os.ftruncate(self._fd, self._size)
        else:
            self.paths.pop().unlink(missing_ok=True)
