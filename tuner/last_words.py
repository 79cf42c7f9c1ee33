"""What a process said last, where it ended without a word to its parent."""

from __future__ import annotations

import re
from pathlib import Path

_TELLING = re.compile(r"(\w*(Error|Exception|OutOfMemory\w*)\b.*)")


def last_words(log_path: Path, since: int = 0) -> str:
    """Return the line of a log's end that tells most: the last error, else the last line."""
    if not log_path.exists():
        return "it left no log"
    with log_path.open("rb") as log:
        size = log_path.stat().st_size
        log.seek(max(since, size - 65536))
        lines = log.read().decode("utf-8", "replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    for line in reversed(said):
        found = _TELLING.search(line)
        if found:
            return found.group(1)[:400]
    return said[-1][:400] if said else "it said nothing"
