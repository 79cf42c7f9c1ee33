"""Whether an engine kept up with the load it was given.

Judges the growth of the queue through one replay. Whether a latency is good enough is left to
`slo` and `objective`.
"""

from __future__ import annotations

import numpy as np

from tuner.replay import ReplayLog
from tuner.timeline import Outcome

# The queue counts as growing when its trend over the window is worth this share of the
# requests offered, and at least this many requests: ours, see `is_sustained`.
GROWTH_RATIO = 0.05
GROWTH_REQUESTS = 4.0


def is_sustained(log: ReplayLog) -> bool:
    """Tell whether the engine kept up: the queue did not grow through the window.

    The queue is taken as requests due but not yet answered by a first token. Growth is twice
    the rise of its mean from the first to the second half of the arrivals, which is exact for
    a steady rise. A burst that is being worked off when arrivals end does not count.

    Source: ours; the criterion of a stable queue is that its mean has no trend.
    """
    line = log.timelines
    waits = line.outcome != int(Outcome.REFUSED)
    due_s = np.sort(line.due_s[waits])
    if due_s.size < 2 or due_s[-1] <= due_s[0]:
        return True
    if int((line.outcome == int(Outcome.TIMED_OUT)).sum()) > GROWTH_RATIO * due_s.size:
        return False
    answered_s = np.sort(np.nan_to_num(line.first_s[waits], nan=np.inf))
    grid_s = np.linspace(due_s[0], due_s[-1], 2001)
    queue = np.searchsorted(due_s, grid_s, side="right") - np.searchsorted(
        answered_s, grid_s, side="right"
    )
    half = grid_s.size // 2
    first, second, last = queue[:half].mean(), queue[half:].mean(), queue[-200:].mean()
    growth = 2 * (second - first)
    limit = max(GROWTH_REQUESTS, GROWTH_RATIO * due_s.size)
    return not (growth > limit and last >= second)
