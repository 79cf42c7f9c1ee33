"""What vLLM's counters tell a Prometheus of a server besides its traffic.

Answers what a sampled trace cannot hold but its reader should know: how well the server's own
prefix cache did, how full its KV cache was, how long answers took.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.prometheus.engines import RUNNING, Selection
from tuner.prometheus.server import Prometheus, Series, Span

_LATENCY = "vllm:e2e_request_latency_seconds"
_SUCCESS = "vllm:request_success_total"
# The names before V1 and after it.
_PREFIX_CACHES = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")
_KV_USAGE = "vllm:(kv|gpu)_cache_usage_perc"


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHits:
    """Prompt tokens that the server's prefix cache was asked for, and those that it had.

    Shapes: both [span.points], at the reading that counted them first; some were asked for.
    """

    asked: Floats
    found: Floats

    @property
    def ratio(self) -> float:
        """The share that was found."""
        return float(self.found.sum() / self.asked.sum())

    def by_stretch(self, stretch_of: Ints) -> Floats:
        """Return the share that was found in each stretch, or in all where nothing was asked.

        Shapes: stretch_of is [span.points], ascending from 0; the result [stretches].
        """
        asked = np.bincount(stretch_of, weights=self.asked)
        found = np.bincount(stretch_of, weights=self.found)
        whole = np.full(len(asked), self.ratio)
        ratios = np.divide(found, asked, out=whole, where=asked > 0)
        # Scrapes of the two may be a moment apart.
        shares: Floats = np.clip(ratios, 0.0, 1.0)
        return shares


@dataclass(frozen=True, slots=True, eq=False)
class ServerFacts:
    """What the counters tell of the server; None where they do not.

    `running` is how many requests ran at once, in the mean and over all engines.
    `unsuccessful` counts requests that ended in abort or error.

    Units: ratios from 0 to 1.
    """

    prefix_hits: PrefixHits | None
    running: float | None
    peak_kv_usage_ratio: float | None
    mean_e2e_s: float | None
    unsuccessful: int


def read_facts(server: Prometheus, span: Span, chosen: Selection) -> ServerFacts:
    """Return what else the counters tell of the chosen engines."""
    names = "|".join(_PREFIX_CACHES)
    cache = chosen.query(f"({names})_(hits|queries)_total")
    latency = _rises(server.over(chosen.query(f"{_LATENCY}_(sum|count)"), span))
    count = latency.get(f"{_LATENCY}_count", 0.0)
    ended = chosen.query(_SUCCESS, 'finished_reason=~"abort|error"')
    usage = server.over(chosen.query(_KV_USAGE), span)
    running = server.over(chosen.query(RUNNING), span)
    return ServerFacts(
        prefix_hits=_prefix_hits(server.over(cache, span), span),
        running=sum(float(np.nanmean(s.values)) for s in running) if running else None,
        peak_kv_usage_ratio=max((float(np.nanmax(s.values)) for s in usage), default=None),
        mean_e2e_s=latency.get(f"{_LATENCY}_sum", 0.0) / count if count > 0 else None,
        unsuccessful=round(sum(_rises(server.over(ended, span)).values())),
    )


def rise(values: Floats) -> float:
    """Return how much a counter rose over readings with gaps; a drop is a restart from 0.

    >>> rise(np.array([5.0, 7.0, np.nan, 1.0]))
    3.0
    """
    return float(rises_by_reading(values).sum())


def rises_by_reading(values: Floats) -> Floats:
    """Return how much a counter rose from the reading before, 0 where there was none.

    Shapes: both [points].

    >>> rises_by_reading(np.array([5.0, 7.0, np.nan, 1.0])).tolist()
    [0.0, 2.0, 0.0, 1.0]
    """
    at = np.flatnonzero(np.isfinite(values))
    steps = np.diff(values[at])
    found = np.zeros(len(values))
    found[at[1:]] = np.where(steps < 0, values[at[1:]], steps)
    return found


def _rises(found: Iterable[Series]) -> dict[str, float]:
    """Return the rise of all series of each name."""
    rises: dict[str, float] = {}
    for series in found:
        name = series.labels["__name__"]
        rises[name] = rises.get(name, 0.0) + rise(series.values)
    return rises


def _prefix_hits(found: Iterable[Series], span: Span) -> PrefixHits | None:
    """Return what was asked for and found; versions that have both names count both alike."""
    rises: dict[str, Floats] = {}
    for series in found:
        of_name = rises.setdefault(series.labels["__name__"], np.zeros(span.points))
        of_name += rises_by_reading(series.values)
    for name in _PREFIX_CACHES:
        asked = rises.get(f"{name}_queries_total")
        if asked is not None and asked.any():
            hits = rises.get(f"{name}_hits_total", np.zeros(span.points))
            return PrefixHits(asked, hits)
    return None
