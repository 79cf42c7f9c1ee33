"""How a server did over a stretch of time, from Prometheus: requests finished, and how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner import stats
from tuner.stats import Bools, Estimate, Floats, Ints
from tuner.traffic.prometheus.client import Series, Span
from tuner.traffic.prometheus.readings import (
    E2E,
    FINISHED,
    WAITING,
    Scraped,
    choose,
    mean_level,
    rise,
    rises_by_name,
)

LAST_SHARE: Final = 0.2
"""Ours: a server that shows nothing in the last fifth of a stretch is gone."""


@dataclass(frozen=True, slots=True)
class Live:
    """What was measured of a server over a stretch of time.

    `counts` are requests by the upper bound of their E2E latency, `mean_e2e` is its mean, None
    where no sum of it was kept. `covered_ratio` is the share of the time in which Prometheus
    looked at anything at all, `is_there` whether the server showed its metrics at the end,
    `lasting_s` for how long it did. `restarted_s` is the Unix time at which most of its engines
    were up anew, None where they did not restart. `waiting` is how many requests were queued in
    the mean, None where that was not kept. `anew` names the engines whose counts began anew, by
    their labels; where those are of several servers added up, one name stands for all.

    Shapes: bounds_s and counts are [buckets], bounds_s ascending, the last inf.
    """

    lasting_s: float
    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]
    covered_ratio: float
    is_there: bool
    restarted_s: float | None = None
    mean_e2e: Estimate | None = None
    waiting: float | None = None
    anew: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """How many requests finished."""
        return round(sum(self.counts))

    @property
    def requests_per_s(self) -> float:
        """How many requests finished per second."""
        return sum(self.counts) / self.lasting_s

    def e2e_quantile(self, q: float) -> Estimate | None:
        """Return a quantile of the E2E latency in seconds; None without any.

        The value is interpolated, as if latencies lay evenly in the logarithm between the
        bounds; the interval, which also holds chance, does not rest on that: its ends are
        bounds.

        >>> live = Live(60.0, (1.0, 2.0, math.inf), (900, 80, 20), 1.0, True)
        >>> found = live.e2e_quantile(0.95)
        >>> round(found.value, 2), found.low, found.high
        (1.54, 1.0, 2.0)
        """
        total = sum(self.counts)
        if total <= 0:
            return None
        upto = np.cumsum(self.counts)
        low_rank, high_rank = stats.order_interval(round(total), q)

        def bucket(rank: float) -> int:
            return min(int(np.searchsorted(upto, rank - 1e-9)), len(upto) - 1)

        low_s, high_s = self._range_s(bucket(low_rank))[0], self._range_s(bucket(high_rank))[1]
        at = bucket(q * total)
        share = (q * total - (upto[at] - self.counts[at])) / self.counts[at]
        return Estimate(_between(*self._range_s(at), share), low_s, high_s, round(total))

    def _range_s(self, bucket: int) -> tuple[float, float]:
        """Return the bounds of a bucket."""
        return (self.bounds_s[bucket - 1] if bucket else 0.0), self.bounds_s[bucket]


def _between(low_s: float, high_s: float, share: float) -> float:
    """Return the latency at a share of a bucket; an open one ends where it begins."""
    if math.isinf(high_s):
        return low_s
    if low_s <= 0:
        return high_s * share
    return math.exp(math.log(low_s) + share * math.log(high_s / low_s))


def live_between(of: Scraped, start_s: float, end_s: float, step_s: float) -> Live:
    """Return how the engines of a model did, added up.

    Units: Unix seconds, on whole steps.
    Raises: UsageError if Prometheus cannot be asked, or has several models and none is named.
    """
    step = int(step_s)
    first, last = math.floor(start_s / step) * step, math.floor(end_s / step) * step
    span = Span(first, max(last, first + step), step)
    with of.connected() as server:
        chosen = of.asked
        if server.over(chosen.query(FINISHED), span):
            chosen = choose(server, span, chosen)
        buckets = server.over(chosen.query(f"{E2E}_bucket"), span)
        totals = server.over(chosen.query(f"{E2E}_(sum|count)"), span)
        queued = server.over(chosen.query(WAITING), span)
        looked = server.over("max(up)", span)
        made = server.over(chosen.query(f"{E2E}_created"), span)
    bounds_s, counts = _added(buckets)
    is_known = _known(buckets, span)
    end = max(1, round(LAST_SHARE * span.points))
    born_s = {_engine(series): series.values for series in made}
    return Live(
        lasting_s=float(max(_steps_over(is_known), 1) * span.step_s),
        bounds_s=bounds_s,
        counts=counts,
        covered_ratio=float((is_known | _known(looked, span)).mean()),
        is_there=bool(is_known[-end:].any()),
        restarted_s=_restarted_s(buckets, span, born_s),
        mean_e2e=_mean_e2e(totals),
        waiting=mean_level(queued),
        anew=_anew(buckets, span, born_s),
    )


def _steps_over(is_known: Bools) -> int:
    """Return over how many steps counters rose: across scrapes that failed as well."""
    known = np.flatnonzero(is_known)
    return int(known[-1] - known[0]) if known.size else 0


def _mean_e2e(found: Sequence[Series]) -> Estimate | None:
    """Return the mean of the E2E latency over all engines; None where its sum was not kept."""
    rises = rises_by_name(found)
    totals, counts = rises.get(f"{E2E}_sum"), rises.get(f"{E2E}_count")
    if totals is None or counts is None or not counts.any():
        return None
    return stats.mean_of_totals(totals, counts)


def _known(found: Sequence[Series], span: Span) -> Bools:
    """Return at which instants any of the series has a value."""
    is_known = np.zeros(span.points, dtype=np.bool_)
    for series in found:
        is_known |= np.isfinite(series.values)
    return is_known


Born = Mapping[str, Floats]
"""By the name of an engine when its counters were made, as the metrics say: Unix seconds."""


def _engine(series: Series) -> str:
    """Return the name of a series' engine: its labels but for those of the metric."""
    own = {k: v for k, v in series.labels.items() if k not in {"le", "__name__"}}
    return ",".join(f'{k}="{v}"' for k, v in sorted(own.items()))


def _restarted_s(found: Sequence[Series], span: Span, born_s: Born) -> float | None:
    """Return when the last engine was up anew, if most of those there at the end were.

    One replica more or less is not a restart.
    """
    engines, rows = 0, list[int]()
    for series in found:
        known = np.flatnonzero(np.isfinite(series.values))
        if series.bound != math.inf or not known.size:
            continue
        engines += 1
        born = born_s.get(_engine(series))
        began = [int(known[0])] if known[0] > 0 and _is_young(born, known[0], span) else []
        rows.extend([*began, *_falls(series.values, born).tolist()][-1:])
    if not rows or 2 * len(rows) < engines:
        return None
    return float(span.times_s[max(rows)])


def _is_young(born: Floats | None, row: int, span: Span) -> bool:
    """Whether an engine may have been made within the stretch, by what a reading says."""
    return born is None or not born[row] < span.start_s


def _falls(values: Floats, born: Floats | None = None) -> Ints:
    """Return the readings at which a count of requests is one that began anew.

    Its engine says when it was made: `born`, with values where there are counts. Where it does
    not, a 0 after a gap is one that began anew too: a server that ends before it answers
    anything counts no further. One that nobody asks, and that was not scraped for a while,
    looks the same then.

    >>> _falls(np.array([0.0, 2.0, 1.0, np.nan, 3.0])).tolist()
    [2]
    >>> gap = np.array([0.0, 0.0, np.nan, 0.0])
    >>> _falls(gap).tolist(), _falls(gap, gap + 5).tolist()
    ([3], [])
    """
    known = np.flatnonzero(np.isfinite(values))
    counts = values[known]
    is_anew = np.diff(counts) < 0
    if born is None:
        is_anew |= (counts[1:] == 0) & (np.diff(known) > 1)
    else:
        is_anew |= np.diff(born[known]) > 0
    found: Ints = known[1:][is_anew]
    return found


def _anew(found: Sequence[Series], span: Span, born_s: Born) -> tuple[str, ...]:
    """Return the names of the engines that were up anew."""
    counts = ((_engine(each), each.values) for each in found if each.bound == math.inf)
    names = {
        name
        for name, values in counts
        if _falls(values, born := born_s.get(name)).size or _begins(values, born, span)
    }
    return tuple(sorted(names))


def _begins(values: Floats, born: Floats | None, span: Span) -> bool:
    """Whether a count that is there later than the stretch is of an engine that began then.

    Where the engine does not say when it was made: whether the count begins near 0. That of a
    server which was only not scraped at first has gone on meanwhile. How near is what the
    server counts in as much time as went by.

    >>> late, span = np.array([np.nan, 9.0, 20.0, 30.0]), Span(100, 160, 20)
    >>> [_begins(values, None, span) for values in (late, late + 100, late[1:])]
    [True, False, False]
    >>> [_begins(late, np.full(4, made_s), span) for made_s in (90.0, 110.0)]
    [False, True]
    """
    known = np.flatnonzero(np.isfinite(values))
    if not known.size or known[0] == 0:
        return False
    if born is not None and np.isfinite(born[known[0]]):
        return _is_young(born, int(known[0]), span)
    first, last = values[known[0]], values[known[-1]]
    return bool(first * (known[-1] - known[0]) <= (last - first) * (known[0] + 1))


def _added(found: Sequence[Series]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the histograms of all engines as one, by the bounds that all of them have."""
    upto: dict[frozenset[tuple[str, str]], dict[float, float]] = {}
    for series in found:
        own = frozenset((k, v) for k, v in series.labels.items() if k != "le")
        if (bound := series.bound) is not None:
            upto.setdefault(own, {})[bound] = rise(series.values)
    if not upto:
        return (math.inf,), (0.0,)
    bounds_s = sorted(set.intersection(*(set(one) for one in upto.values())))
    totals = [sum(one[bound] for one in upto.values()) for bound in bounds_s]
    # Scrapes are not of one instant, so that a bucket may be ahead of the next.
    counts = np.maximum(np.diff(totals, prepend=0.0), 0.0)
    return tuple(bounds_s), tuple(counts.tolist())
