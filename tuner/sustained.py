"""Whether an engine kept up with the load it was given.

Two things speak: the work that was offered, against the time in which it came; and the
requests in flight, which must not grow. Whether a latency is good enough is for SLOs to say.
"""

from __future__ import annotations

import numpy as np

from tuner.arrays import Floats
from tuner.replay import ReplayLog
from tuner.timeline import Outcome, Timelines
from tuner.work import utilisation

# Requests in flight count as growing when their rise over the middle of the window is worth
# this share of the requests offered, at least this many requests, and this many standard
# errors of its own noise: ours, see `is_sustained`.
GROWTH_RATIO = 0.05
GROWTH_REQUESTS = 4.0
GROWTH_ERRORS = 3.0
# An empty engine fills for about so many lives of a request, over the share of its capacity
# that is spare, which counts as this at least: ours, a batch grows until as many end as come.
FILLING_LIVES, LEAST_SPARE = 2.0, 0.05
# Stretches of the middle from which the noise of the requests in flight is taken: ours.
STRETCHES = 10
# Rounding of the offered work: what is just full is not overloaded.
_ROUNDING = 1e-6


def is_sustained(log: ReplayLog) -> bool:
    """Tell whether the engine kept up with what it was offered.

    It did not when the offered work exceeds the time in which it came, however early everybody
    was admitted; nor when the requests in flight grow, beyond their noise, through the middle
    of the window. The first sees what a window shorter than its requests live cannot show,
    the second what the cost of a step does not tell. Nor when many were given up. A closed loop
    offers what the engine takes, and is always kept up with.

    Source: ours; the criterion of a stable queue is that its mean has no trend.
    """
    line = log.timelines
    if log.is_closed_loop:
        return True
    waits = line.outcome != int(Outcome.REFUSED)
    due_s = np.sort(line.due_s[waits])
    if due_s.size < 2 or due_s[-1] <= due_s[0]:
        return True
    if int((line.outcome == int(Outcome.TIMED_OUT)).sum()) > GROWTH_RATIO * due_s.size:
        return False
    offered = utilisation([line])
    if offered is not None and offered > 1 + _ROUNDING:
        return False
    return not _grows(due_s, _ends_s(line)[waits], offered or 0.0)


def _ends_s(line: Timelines) -> Floats:
    """Return when each request left the engine; what was given up at the end never did."""
    answered = line.outcome == int(Outcome.COMPLETED)
    return np.where(answered, line.last_s, np.inf)


def _grows(due_s: Floats, ends_s: Floats, offered: float) -> bool:
    """Whether the requests in flight rise through the middle of the window.

    The middle begins when the first batch of requests has come and gone, and ends with the
    arrivals. An engine fills for some lives of a request, and the longer the nearer it is to
    what it can take; where the middle is shorter nothing can be told. What more arrivals in its
    second half explain is no growth, nor is a burst that is worked off.
    """
    finite = np.isfinite(ends_s)
    if not finite.any():
        return True
    life_s = float(ends_s[finite].mean()) - float(due_s[finite].mean())
    begin_s, end_s = float(due_s[0]) + life_s, float(due_s[-1])
    filling_s = FILLING_LIVES * life_s / max(1.0 - offered, LEAST_SPARE)
    if end_s - begin_s < filling_s:
        return not finite.all()
    edges_s = np.linspace(begin_s, end_s, STRETCHES + 1)
    flight = _mean_in_flight(due_s, np.sort(ends_s), edges_s)
    arrivals = np.diff(np.searchsorted(due_s, edges_s)) / np.diff(edges_s)
    half = STRETCHES // 2
    explained = arrivals * _life_s(due_s, ends_s, begin_s, (begin_s + end_s) / 2)
    excess = flight - explained
    growth = 2 * float(excess[half:].mean() - excess[:half].mean())
    limit = max(GROWTH_REQUESTS, GROWTH_RATIO * due_s.size, GROWTH_ERRORS * _noise(excess))
    return growth > limit and bool(flight[-1] >= flight[half:].mean())


def _mean_in_flight(due_s: Floats, ends_s: Floats, edges_s: Floats) -> Floats:
    """Return the mean number of requests in flight in each stretch between the edges.

    Shapes: due_s and ends_s ascend; [edges - 1].
    """
    fine_s = np.linspace(edges_s[0], edges_s[-1], STRETCHES * 200, endpoint=False)
    count = np.searchsorted(due_s, fine_s, side="right") - np.searchsorted(
        ends_s, fine_s, side="right"
    )
    means: Floats = count.reshape(STRETCHES, -1).mean(axis=1)
    return means


def _life_s(due_s: Floats, ends_s: Floats, begin_s: float, end_s: float) -> float:
    """Return the mean life of the requests due in a stretch; of those that ended."""
    mine = (due_s >= begin_s) & (due_s < end_s) & np.isfinite(ends_s)
    return float((ends_s - due_s)[mine].mean()) if mine.any() else 0.0


def _noise(excess: Floats) -> float:
    """Return the standard error of a growth between halves, from what is no trend."""
    places = np.arange(excess.size, dtype=np.float64)
    trend = np.polyval(np.polyfit(places, excess, 1), places)
    spread = float(np.sqrt(((excess - trend) ** 2).sum() / (excess.size - 2)))
    return 2 * spread * float(np.sqrt(4 / excess.size))
