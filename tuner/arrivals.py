"""When requests go, and what time it is: the two things a replay keeps time with.

Open arrivals follow the recording; closed ones hold a number in flight. The loop that asks
them, and what happens to the requests, is in `replay`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tuner.traces import LoadModel, Trace


class ClockKind(StrEnum):
    """Whose seconds a replay counts."""

    VIRTUAL = "virtual"
    WALL = "wall"


class ReplayClock:
    """The replay's seconds: virtual ones add up, real ones pass."""

    def __init__(self, kind: ClockKind) -> None:
        self.kind = kind
        self.now_s = 0.0
        self._started_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Real seconds since the replay began."""
        return time.perf_counter() - self._started_s

    def step(self, duration_s: float) -> None:
        """Let a step pass."""
        self.now_s = self.wall_s if self.kind is ClockKind.WALL else self.now_s + duration_s

    def idle_until(self, due_s: float) -> None:
        """Let idle time pass, by jumping or by waiting."""
        if self.kind is ClockKind.WALL:
            time.sleep(max(0.0, due_s - self.wall_s))
            self.now_s = max(self.wall_s, due_s)
        else:
            self.now_s = max(self.now_s, due_s)


class OpenArrivals:
    """Requests go when the trace says, whatever the engine does."""

    def __init__(self, due_s: NDArray[np.float64]) -> None:
        self._due_s = due_s.tolist()
        self._next = 0

    def next_due_s(
        self,
        now_s: float,  # noqa: ARG002 - the loop asks every kind of arrivals alike
        in_flight: int,  # noqa: ARG002 - as now_s
    ) -> float | None:
        """Return the recorded instant."""
        return self._due_s[self._next] if self._next < len(self._due_s) else None

    def pop(self) -> None:
        """Move on to the next request."""
        self._next += 1


class ClosedArrivals:
    """Requests go as soon as fewer are in flight than a target that may change with time."""

    def __init__(self, times_s: list[float], targets: list[int], n: int) -> None:
        self._times_s, self._targets, self._left = times_s, targets, n

    def next_due_s(self, now_s: float, in_flight: int) -> float | None:
        """Return now if there is room, else when the target next rises, else None."""
        if self._left == 0:
            return None
        at = bisect_right(self._times_s, now_s) - 1
        if at >= 0 and self._targets[at] > in_flight:
            return now_s
        for later in range(at + 1, len(self._targets)):
            if self._targets[later] > in_flight:
                return self._times_s[later]
        # Past the recording's end the last request still has to go: one at a time.
        return now_s if in_flight == 0 else None

    def pop(self) -> None:
        """Move on to the next request."""
        self._left -= 1


def arrivals_of(
    trace: Trace, load_model: LoadModel, concurrency: int | None
) -> OpenArrivals | ClosedArrivals:
    """Choose how the trace's requests arrive; no concurrency means the recorded one.

    Raises: TraceError when a closed loop asks for a concurrency that was not recorded.
    """
    if load_model is LoadModel.OPEN:
        return OpenArrivals(trace.due_s)
    if concurrency is not None:
        return ClosedArrivals([0.0], [concurrency], len(trace))
    times_s, in_flight = trace.recorded_concurrency()
    return ClosedArrivals(times_s.tolist(), [int(c) for c in in_flight], len(trace))
