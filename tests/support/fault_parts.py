"""What the fault campaign is made of: processes that are marked, disks that fill, a tally.

A fault is something done to a run, a watch, a server or what they rest on, at an instant drawn
from a seed. What must be true afterwards is checked by each test; it tells the tally how many
faults there were, how many were survived, and what was lost.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

MARK: Final = "TUNE_FAULT_CAMPAIGN"
"""An environment variable that every process of a campaign inherits."""
PATIENCE_S: Final = 240.0
"""Far beyond what anything here takes on a busy machine."""
FAULTED: Final = "faults"
"""The property under which a test reports its tally."""


@dataclass(slots=True)
class Tally:
    """Faults of one test by kind: how many, how many survived, and what the others lost."""

    kinds: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    @contextmanager
    def fault(self, kind: str, where: str, count: int = 1) -> Iterator[None]:
        """Count faults, whose consequences the block checks."""
        self.kinds[kind] += count
        try:
            yield
        except AssertionError as failed:
            self.lost.append(f"{kind} ({where}): {str(failed).strip()[:4000]}")
        else:
            self.survived[kind] += count

    def report(self, record_property: Callable[[str, object], None]) -> None:
        """Hand the figures on to the table at the end, and fail if anything was lost."""
        for kind, count in self.kinds.items():
            record_property(FAULTED, [kind, count, self.survived[kind]])
        assert self.lost == [], "\n\n".join(self.lost)


def how_many(request: pytest.FixtureRequest, usual: int, share: float) -> int:
    """Return how many faults of a test are wanted: a few, or its share of --faults."""
    wanted = int(request.config.getoption("--faults"))
    return max(usual, round(share * wanted))


# --- processes ---


class Marked:
    """Processes that are started here, found again whatever becomes of their parents."""

    def __init__(self, name: str) -> None:
        self.name = name

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment that marks what is started with it."""
        return {**os.environ, "OPENBLAS_NUM_THREADS": "1", MARK: self.name, **(more or {})}

    def start(
        self, command: Sequence[str], log: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program whose words go to a file."""
        with log.open("ab") as out:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(more),
                start_new_session=True,
            )

    def alive(self) -> dict[int, str]:
        """Return what runs under the mark: the command of each process."""
        found: dict[int, str] = {}
        wanted = f"{MARK}={self.name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    if words:  # a process that has ended has none
                        found[int(folder.name)] = words.decode("utf-8", "replace")
        return found

    def children(self, of: int) -> list[int]:
        """Return what a process has started, directly, but multiprocessing's own tracker."""
        listed = Path(f"/proc/{of}/task/{of}/children")
        with suppress(OSError):
            known = self.alive()
            each = [int(word) for word in listed.read_text().split()]
            return [pid for pid in each if "resource_tracker" not in known.get(pid, "")]
        return []

    def none_left(self, within_s: float = 20.0) -> None:
        """Fail if anything of ours still runs after a while."""
        deadline_s = time.monotonic() + within_s
        while (left := self.alive()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        said = {pid: command[:120] for pid, command in left.items()}
        assert left == {}, f"still running: {said}"

    def end(self) -> None:
        """End all that still runs."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def marked(name: str) -> Iterator[Marked]:
    """Mark what is started, and leave nothing of it behind."""
    ours = Marked(f"{name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        yield ours
    finally:
        ours.end()


def ended(process: subprocess.Popen[bytes], within_s: float = PATIENCE_S) -> int:
    """Return the exit code of a process, or fail if it does not end."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{process.args!r} does not end") from None


def at_instant(rng: random.Random, process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Let some time pass, drawn evenly; return whether the process still runs."""
    until_s = time.monotonic() + rng.uniform(0.0, within_s)
    while process.poll() is None and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.02))
    return process.poll() is None


# --- disks and clocks ---


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """Mount a file system of so many KiB, or skip where that is not allowed."""
    folder.mkdir(exist_ok=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)]
    done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk of its own without a mount, run as root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # noqa: S607 - on the path


def fill(folder: Path) -> Path:
    """Take all that is free of a disk, and return the file to remove to give it back."""
    filler = folder / ".filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


SHIFTING = """
import os, time
_read, _ns, _path = time.time, time.time_ns, os.environ["TUNE_FAULT_CLOCK"]
def _off():
    try:
        with open(_path) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0
time.time = lambda: _read() + _off()
time.time_ns = lambda: _ns() + int(_off() * 1e9)
"""
"""A sitecustomize.py whose wall clock is off by what a file says, as set by people or NTP."""


@contextmanager
def clock_of(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Give an environment whose wall clock is off by what the file says that is given too."""
    site, off = folder / "site", folder / "off"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SHIFTING)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    yield {"PYTHONPATH": path, "TUNE_FAULT_CLOCK": str(off)}, off
