"""How many cores this process may keep busy: what it is scheduled on, and its group's quota.

A container is mostly held down by a quota of processor time and sees all of the node's cores:
a process for each of them would be too many by far.

Source: cpu.max, Linux, Documentation/admin-guide/cgroup-v2.rst; cpu.cfs_quota_us,
    Documentation/scheduler/sched-bwc.rst. A group is also held by the groups above it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes can run at full speed beside each other, at least 1.

    A quota that is no whole number of cores counts as the next larger one.
    """
    scheduled = len(os.sched_getaffinity(0))
    quotas = [math.ceil(quota) for quota in _quotas(cgroups, membership)]
    return max(1, min([scheduled, *quotas]))


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Yield the quotas in cores that hold for this process; none where there is no limit."""
    for folder in _groups(cgroups, membership):
        texts = _words(folder / "cpu.max")
        if not texts:
            texts = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        # "max" and -1 are no limit.
        if len(texts) == 2 and all(text.isdecimal() for text in texts):
            quota, period = map(int, texts)
            if quota > 0 and period > 0:
                yield quota / period


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's groups, from its own up to the root's.

    Inside a container the root that is seen is the container's own group.
    """
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif "cpu" in controllers.split(","):
            root = cgroups / "cpu"
        else:
            continue
        own = Path(path.lstrip("/"))
        yield from (root / group for group in (own, *own.parents))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's, none where there is no such file."""
    try:
        return path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
