"""How a server does, by what Prometheus keeps of it: finished requests and how long they took.

Answers for a stretch of time. Whether that is good is left to `guard`; what traffic came is
left to `prometheus.sampled`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.hashes import Bools
from tuner.prometheus.engines import FINISHED, Selection, choose
from tuner.prometheus.facts import rise
from tuner.prometheus.server import Prometheus, Series, Span

E2E: Final = "vllm:e2e_request_latency_seconds"
"""The same name in vLLM's older and newer versions. Source: vllm/v1/metrics/loggers.py."""

LAST_SHARE: Final = 0.2
"""Ours: a server that shows nothing in the last fifth of a stretch is gone."""


@dataclass(frozen=True, slots=True)
class Live:
    """What was measured of a server over a stretch of time.

    `counts` are requests by the upper bound of their E2E latency. `covered_ratio` is the share
    of the time in which Prometheus looked at anything at all, `is_there` whether the server
    showed its metrics at the end, `lasting_s` for how long it did. `restarted_s` is the Unix
    time at which most of its engines were up anew, None where they did not restart.

    Shapes: bounds_s and counts are [buckets], bounds_s ascending, the last inf.
    """

    lasting_s: float
    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]
    covered_ratio: float
    is_there: bool
    restarted_s: float | None = None

    @property
    def requests(self) -> int:
        """How many requests finished."""
        return round(sum(self.counts))

    @property
    def requests_per_s(self) -> float:
        """How many requests finished per second."""
        return sum(self.counts) / self.lasting_s

    def e2e_within_s(self, q: float) -> tuple[float, float] | None:
        """Return between which bounds a quantile of the E2E latency lies; None without any.

        >>> Live(60.0, (1.0, 2.0, math.inf), (90, 8, 2), 1.0, True).e2e_within_s(0.95)
        (1.0, 2.0)
        """
        total = sum(self.counts)
        if total <= 0:
            return None
        upto = np.cumsum(self.counts)
        at = int(np.searchsorted(upto, q * total - 1e-9))
        return (self.bounds_s[at - 1] if at else 0.0), self.bounds_s[at]


def live_between(
    url: str,
    start_s: float,
    end_s: float,
    step_s: float,
    *,
    model: str | None,
    headers: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Live:
    """Return how the engines of a model did, added up.

    Units: Unix seconds, on whole steps.
    Raises: UsageError if Prometheus cannot be asked, or has several models and none is named.
    """
    step = int(step_s)
    first, last = math.floor(start_s / step) * step, math.floor(end_s / step) * step
    span = Span(first, max(last, first + step), step)
    with Prometheus(url, headers=headers, verify=verify) as server:
        chosen = Selection(model, None)
        if server.over(chosen.query(FINISHED), span):
            chosen = choose(server, span, model, None)
        buckets = server.over(chosen.query(f"{E2E}_bucket"), span)
        looked = server.over("max(up)", span)
    bounds_s, counts = _added(buckets)
    is_known = _known(buckets, span)
    end = max(1, round(LAST_SHARE * span.points))
    return Live(
        lasting_s=float(max(int(is_known.sum()) - 1, 1) * span.step_s),
        bounds_s=bounds_s,
        counts=counts,
        covered_ratio=float((is_known | _known(looked, span)).mean()),
        is_there=bool(is_known[-end:].any()),
        restarted_s=_restarted_s(buckets, span),
    )


def _known(found: Sequence[Series], span: Span) -> Bools:
    """Return at which instants any of the series has a value."""
    is_known = np.zeros(span.points, dtype=np.bool_)
    for series in found:
        is_known |= np.isfinite(series.values)
    return is_known


def _restarted_s(found: Sequence[Series], span: Span) -> float | None:
    """Return when the last engine was up anew, if most of those there at the end were.

    One replica more or less is not a restart.
    """
    engines, rows = 0, list[int]()
    for series in found:
        known = np.flatnonzero(np.isfinite(series.values))
        if float(series.labels["le"]) != math.inf or not known.size:
            continue
        engines += 1
        falls = known[1:][np.diff(series.values[known]) < 0]
        began = [*([int(known[0])] if known[0] > 0 else []), *falls.tolist()]
        rows.extend(began[-1:])
    if not rows or 2 * len(rows) < engines:
        return None
    return float(span.times_s[max(rows)])


def _added(found: Sequence[Series]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the histograms of all engines as one, by the bounds that all of them have."""
    upto: dict[frozenset[tuple[str, str]], dict[float, float]] = {}
    for series in found:
        own = frozenset((k, v) for k, v in series.labels.items() if k != "le")
        upto.setdefault(own, {})[float(series.labels["le"])] = rise(series.values)
    if not upto:
        return (math.inf,), (0.0,)
    bounds_s = sorted(set.intersection(*(set(one) for one in upto.values())))
    totals = [sum(one[bound] for one in upto.values()) for bound in bounds_s]
    # Scrapes are not of one instant, so that a bucket may be ahead of the next.
    counts = np.maximum(np.diff(totals, prepend=0.0), 0.0)
    return tuple(bounds_s), tuple(counts.tolist())
