"""Which requests wait for the answer to another: the turns of conversations and agents.

Answers what may go when. Keeping to it during a replay is the business of `arrivals`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """For each request the row whose answer it waits for, and for how long after it.

    `after` is -1 for a request that waits for nobody: the first of a session, or one whose
    predecessor is not part of the trace. A request never waits for itself, nor in a circle.

    Shapes: both [n].
    Units: pause_s in seconds from the end of the awaited answer; 0 where after is -1.
    Raises: ValueError if the columns differ in length or are out of range.
    """

    after: Ints
    pause_s: Floats

    def __post_init__(self) -> None:
        n = len(self.after)
        if len(self.pause_s) != n:
            raise ValueError(f"pause_s must have {n} rows, got {len(self.pause_s)}")
        if n and not (self.after.min() >= -1 and self.after.max() < n):
            raise ValueError(f"after must name rows below {n}, or -1")
        if np.any(self.after == np.arange(n)):
            raise ValueError("a request cannot wait for itself")
        if not (np.isfinite(self.pause_s).all() and np.all(self.pause_s >= 0)):
            raise ValueError("pause_s must be finite and at least 0")
        self.after.flags.writeable = False
        self.pause_s.flags.writeable = False

    def __len__(self) -> int:
        return len(self.after)

    def take(self, rows: Ints) -> Turns:
        """Return the given rows in the given order.

        Who waited for one left out waits for the one before it, and both pauses long.

        >>> turns = Turns(np.array([-1, 0, 1]), np.array([0.0, 2.0, 3.0]))
        >>> shorter = turns.take(np.array([2, 0]))
        >>> shorter.after.tolist(), shorter.pause_s.tolist()
        ([1, -1], [5.0, 0.0])
        """
        # The last place stands for nobody: -1 as an index.
        place = np.full(len(self) + 1, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        after, pause_s = self.after[rows], self.pause_s[rows]
        while (gone := np.flatnonzero((after >= 0) & (place[after] < 0))).size:
            left_out = after[gone]
            after[gone] = self.after[left_out]
            pause_s[gone] += self.pause_s[left_out]
        after = place[after]
        return Turns(after, np.where(after >= 0, pause_s, 0.0))

    @property
    def waiting(self) -> int:
        """How many requests wait for another's answer."""
        return int((self.after >= 0).sum())


def pauses_of(after: Ints, arrived_s: Floats, e2e_s: Floats) -> Turns:
    """Return turns whose pauses are what lay between an answer and the next arrival.

    A next request that arrived before the recorded (or estimated) answer follows it at once.

    Shapes: all [n]; e2e_s is nan where the answer's end is not known, which counts as no time.
    """
    ended_s = arrived_s + np.nan_to_num(e2e_s)
    follows = after >= 0
    pause_s = np.where(follows, np.maximum(arrived_s - ended_s[after], 0.0), 0.0)
    return Turns(after, pause_s)
