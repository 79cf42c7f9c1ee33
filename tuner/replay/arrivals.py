"""When requests go, and what time it is: the two things a replay keeps time with.

Open arrivals follow the recording; causal ones too, but for turns that wait for an answer;
closed ones hold a number in flight. Requests are made ready before they go, so that no step
pays for it: tokens, block hashes and request objects of a long prompt take many milliseconds,
which a server spends beside its engine's loop.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from tuner.errors import TraceError, UsageError
from tuner.traffic.traces import LoadModel, Trace, Turns


class ClockKind(StrEnum):
    """Whose seconds a replay counts."""

    VIRTUAL = "virtual"
    WALL = "wall"


class Sessions(StrEnum):
    """Whether a session's next turn waits for the answer or goes when it was recorded."""

    CAUSAL = "causal"
    RECORDED = "recorded"


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


class _InOrder:
    """Which request is expected next where they go in their order."""

    end_s: float = math.inf

    def __init__(self, due_s: NDArray[np.float64]) -> None:
        self._due_s: list[float] = due_s.tolist()
        self._expected = self._next = 0

    def expected(self) -> tuple[float, int] | None:
        """Return when the next request that was not passed is due, and its row."""
        at = self._expected
        return (self._due_s[at], at) if at < len(self._due_s) else None

    def pass_expected(self) -> None:
        """Go on to the one after it."""
        self._expected += 1

    def pop(self, now_s: float) -> tuple[int, float]:  # noqa: ARG002 - as next_due_s
        """Return the next request's row, when it was due, and move on."""
        self._next += 1
        return self._next - 1, self._due_s[self._next - 1]

    def ended(self, row: int, now_s: float) -> None:
        """Take note that a request is over; the loop tells how many are in flight."""


class OpenArrivals(_InOrder):
    """Requests go when the trace says, whatever the engine does."""

    def next_due_s(
        self,
        now_s: float,  # noqa: ARG002 - the loop asks every kind of arrivals alike
        in_flight: int,  # noqa: ARG002 - as now_s
    ) -> float | None:
        """Return the recorded instant."""
        return self._due_s[self._next] if self._next < len(self._due_s) else None


class CausalArrivals:
    """Sessions start when the trace says; a next turn goes when the answer before it is read.

    A turn whose predecessor was refused, timed out or aborted goes just the same: its user
    tries again.
    """

    end_s: ClassVar[float] = math.inf

    def __init__(self, due_s: NDArray[np.float64], turns: Turns) -> None:
        roots = np.flatnonzero(turns.after < 0)
        # Ascending in time and then in row, hence already a heap.
        self._ready = [(float(due_s[row]), int(row)) for row in roots]
        self._expected = list(self._ready)
        self._pauses_s = turns.pause_s.tolist()
        self._followers: dict[int, list[int]] = {}
        for row in np.flatnonzero(turns.after >= 0).tolist():
            self._followers.setdefault(int(turns.after[row]), []).append(row)

    def expected(self) -> tuple[float, int] | None:
        """Return the earliest request known by now and not passed: its due time and row."""
        return self._expected[0] if self._expected else None

    def pass_expected(self) -> None:
        """Go on to the one after it."""
        heappop(self._expected)

    def next_due_s(
        self,
        now_s: float,  # noqa: ARG002 - the loop asks every kind of arrivals alike
        in_flight: int,  # noqa: ARG002 - as now_s
    ) -> float | None:
        """Return when the next request known by now is due."""
        return self._ready[0][0] if self._ready else None

    def pop(self, now_s: float) -> tuple[int, float]:  # noqa: ARG002 - as next_due_s
        """Return the next request's row, when it was due, and move on."""
        due_s, row = heappop(self._ready)
        return row, due_s

    def ended(self, row: int, now_s: float) -> None:
        """Let those that waited for this request follow, each after its pause."""
        for follower in self._followers.pop(row, ()):
            due = (now_s + self._pauses_s[follower], follower)
            heappush(self._ready, due)
            heappush(self._expected, due)


class ClosedArrivals(_InOrder):
    """Requests go as soon as fewer are in flight than a target that may change with time.

    At `end_s` the recording of that target is over, and with it the replay: past it nothing
    says how many should be in flight. Going on with what is left, one at a time, was tried: an
    engine 10 % slower than the recorded one then measured 43 % less requests/s.
    """

    def __init__(
        self, times_s: list[float], targets: list[int], n: int, end_s: float = math.inf
    ) -> None:
        # Nobody knows when: as soon as there is room.
        super().__init__(np.full(n, math.inf))
        self._times_s, self._targets = times_s, targets
        self.end_s = end_s

    def next_due_s(self, now_s: float, in_flight: int) -> float | None:
        """Return now if there is room, else when the target next rises, else None.

        With nothing in flight and no rise to come it is the end, where the replay stops.
        """
        if self._next == len(self._due_s) or now_s >= self.end_s:
            return None
        at = bisect_right(self._times_s, now_s) - 1
        if at >= 0 and self._targets[at] > in_flight:
            return now_s
        for later in range(at + 1, len(self._targets)):
            if self._targets[later] > in_flight:
                return self._times_s[later]
        return self.end_s if in_flight == 0 else None

    def pop(self, now_s: float) -> tuple[int, float]:
        """Return the next request's row, due now, and move on."""
        row, _ = super().pop(now_s)
        return row, now_s


@dataclass(frozen=True, slots=True)
class StaticBatches:
    """Batches that are filled, sent together and waited for, as servers did before vLLM.

    A batch goes when `size` requests wait, or the first of them has waited for `wait_s`; the
    next one goes when the slowest answer of the last has ended.

    Raises: ValueError if size is below 1 or wait_s negative.
    """

    size: int
    wait_s: float

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.wait_s < float("inf"):
            raise ValueError(f"batches must be of 1 or more and wait 0 s or longer, got {self}")


class BatchArrivals(_InOrder):
    """Requests are due when the trace says, and go batch by batch."""

    def __init__(self, due_s: NDArray[np.float64], batches: StaticBatches) -> None:
        super().__init__(due_s)
        self._batches, self._going = batches, 0

    def next_due_s(self, now_s: float, in_flight: int) -> float | None:
        """Return when the next batch is complete; None while one is being answered."""
        left = len(self._due_s) - self._next
        if not left:
            return None
        if self._going:
            return now_s
        if in_flight:
            return None
        first_s = self._due_s[self._next]
        is_short = left < self._batches.size
        full_s = float("inf") if is_short else self._due_s[self._next + self._batches.size - 1]
        return min(full_s, first_s + self._batches.wait_s)

    def pop(self, now_s: float) -> tuple[int, float]:
        """Return the next request of the batch, and when it was due."""
        if not self._going:
            arrived = bisect_right(self._due_s, now_s, lo=self._next) - self._next
            self._going = max(1, min(arrived, self._batches.size))
        self._going -= 1
        return super().pop(now_s)


def check_arrivals(trace: Trace, load_model: LoadModel) -> None:
    """Refuse an open loop of what records no arrivals, and a lead-in of a closed one.

    Raises: TraceError, UsageError.
    """
    check_lead_in(trace.lead_in_s, load_model)
    if load_model is LoadModel.OPEN and trace.concurrency is not None:
        raise TraceError(
            f"{trace.source} records requests in flight, not arrivals",
            "replay it with --load-model closed",
        )


def check_lead_in(lead_in_s: float, load_model: LoadModel) -> None:
    """Refuse a lead-in of a closed loop, of which no due time says who comes after it.

    Raises: UsageError.
    """
    if lead_in_s and load_model is LoadModel.CLOSED:
        raise UsageError(
            "in a closed loop who comes after a lead-in is the engine's speed, so that no two "
            "settings are measured on the same requests",
            "leave the lead-in out: the number in flight is there at once",
        )


def check_priorities(trace: Trace, *, has_priorities: bool) -> None:
    """Refuse priorities where an engine serves by arrival, as vLLM does. Raises: UsageError."""
    if has_priorities or trace.priorities is None or not trace.priorities.any():
        return
    count = np.count_nonzero(trace.priorities)
    raise UsageError(
        f"{count} of {len(trace)} requests have a priority, and the engine's scheduling-policy"
        " is fcfs",
        "add `scheduling-policy: priority` to the configuration, or leave `priority` out",
    )


Arrivals = OpenArrivals | CausalArrivals | ClosedArrivals | BatchArrivals

MOST_TOKENS: Final = 1 << 20
"""Prompt tokens that are held ready: ours. One takes some 50 bytes, twice as a list of Python's
integers and its share of a block's hash, so these are about 50 MB."""
SOON_S: Final = 1.0
"""What is due so soon is made ready at once, on the replay's clock: ours. A next turn is known
only when the answer before it has ended."""


class Ahead:
    """Makes requests ready in the order in which they are expected.

    `make` makes one ready, `tokens_of` says how long its prompt is. Rows that went before
    their turn came are passed over. Where pauses delay requests, on a clock that does not
    stand still, there is one before the replay begins and later only what is due soon.

    Units: seconds on the replay's clock.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        make: Callable[[int], None],
        tokens_of: Callable[[int], int],
        n: int,
        most_tokens: int = MOST_TOKENS,
        *,
        pauses: bool = True,
    ) -> None:
        self._arrivals, self._make, self._tokens_of = arrivals, make, tokens_of
        self._most, self._held = most_tokens, 0
        self._pauses, self._has_begun = pauses, False
        self._is_done = bytearray(n)

    def fill(self, now_s: float) -> None:
        """Make ready what is due soon, and once half of what may be held has gone all of it."""
        refills = 2 * self._held <= self._most and (self._pauses or not self._has_begun)
        self._has_begun = True
        while (expected := self._arrivals.expected()) is not None:
            due_s, row = expected
            if not self._is_done[row]:
                tokens = self._tokens_of(row)
                is_full = self._held > 0 and self._held + tokens > self._most
                if is_full or not (refills or due_s <= now_s + SOON_S):
                    return
                self._is_done[row] = True
                self._held += tokens
                self._make(row)
            self._arrivals.pass_expected()

    def went(self, row: int) -> None:
        """Take note that a request has gone, ready or not, or never will."""
        if self._is_done[row]:
            self._held -= self._tokens_of(row)
        self._is_done[row] = True
