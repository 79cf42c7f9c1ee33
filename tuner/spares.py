"""Processes that have imported vLLM before anybody knows what they will replay.

An import takes as long as many replays, and while the live engine starts most cores have
nothing to do. What the processes do later is up to `shadows`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from tuner.quota import usable_cores
from tuner.replay.process import Host
from tuner.shadow_source import prepare_shadow


class Spares:
    """Processes that do `how` side by side from now on; the default imports vLLM."""

    def __init__(
        self, count: int, log_path: Path, how: Callable[[], None] = prepare_shadow
    ) -> None:
        self._left = [Host(None, log_path) for _ in range(count)]
        self._threads = ThreadPoolExecutor(max(1, count), "spare")
        self._importing: list[Future[None]] = [
            self._threads.submit(host.prepare, how) for host in self._left
        ]

    def settle(self) -> None:
        """Wait until nothing is imported any more, so that a measurement has the cores alone.

        An import that failed fails again, and is told, where the process is asked to start.
        """
        wait(self._importing)

    @property
    def left(self) -> int:
        """How many nobody has taken."""
        return len(self._left)

    def take(self) -> Host | None:
        """Return a process that is ready or will soon be, to be closed by whoever takes it."""
        return self._left.pop() if self._left else None

    def close(self) -> None:
        """End the processes that nobody took."""
        for host in self._left:
            host.close(gently=False)
        self._left.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def spare_cores() -> int:
    """Return how many cores an engine that starts leaves idle: all but one."""
    return usable_cores() - 1
