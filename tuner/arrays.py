"""The array types that signatures name, and how much memory there is for arrays."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# What holds the limit of a container and what is used of it; of that a part can be dropped.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return how much memory this process may still take, of the machine or its container.

    Without end where the system does not tell.

    Source: proc(5), MemAvailable; cgroups(7), version 2 and 1: a container sees its own.
    """
    free = [math.inf]
    with suppress(OSError, ValueError):  # there is none
        free.append(1024.0 * _field(meminfo, "MemAvailable:"))
    for limit, used, stat, droppable in _GROUPS:
        with suppress(OSError, ValueError):  # there is none, or it says "max"
            left = int((groups / limit).read_text()) - int((groups / used).read_text())
            free.append(float(left + _field(groups / stat, droppable)))
    return max(0.0, min(free))


def _field(path: Path, name: str) -> int:
    """Return the number behind a name. Raises: OSError, ValueError."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")
