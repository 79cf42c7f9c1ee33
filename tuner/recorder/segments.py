"""The files of a recording: prod.jsonl, prod.1.jsonl, prod.2.jsonl and so on.

One rule names them: the first number that is free. So a full file is followed by the next, a
restarted server adds to what it recorded before, several processes of one server write side by
side, and nothing is ever overwritten. Every file begins with its own header.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
"""When people talk to a server is nobody's business but its owner's."""


class Segments:
    """The file being written, and the ones to come.

    `header` is asked for at every write, and a file is opened at the first line; when the
    header has changed, the next file begins.
    """

    def __init__(self, path: Path, max_bytes: int | None, header: Callable[[], bytes]) -> None:
        self._path, self._max_bytes, self._header = path, max_bytes, header
        self._fd: int | None = None
        self._size = 0
        self._number = 0
        self._written_header = b""
        self.paths: list[Path] = []

    def write(self, lines: Sequence[bytes]) -> None:
        """Append whole lines.

        When a write fails its part of a line is cut off again, and a file without any line is
        removed, so that what was recorded before stays readable.

        Raises: OSError.
        """
        header = self._header()
        if header != self._written_header:
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
