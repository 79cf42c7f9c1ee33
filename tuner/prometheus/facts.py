"""What vLLM's counters tell a Prometheus of a server besides its traffic.

Answers what a sampled trace cannot hold but its reader should know: how well the server's own
prefix cache did, how full its KV cache was, how long answers took.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tuner.hashes import Floats
from tuner.prometheus.engines import Selection
from tuner.prometheus.server import Prometheus, Series, Span

_LATENCY = "vllm:e2e_request_latency_seconds"
_SUCCESS = "vllm:request_success_total"
# The names before V1 and after it.
_PREFIX_CACHES = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")
_KV_USAGE = "vllm:(kv|gpu)_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the counters tell of the server; None where they do not.

    `unsuccessful` counts requests that ended in abort or error.

    Units: ratios from 0 to 1.
    """

    prefix_hit_ratio: float | None
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
    return ServerFacts(
        prefix_hit_ratio=_hit_ratio(_rises(server.over(cache, span))),
        peak_kv_usage_ratio=max((float(np.nanmax(s.values)) for s in usage), default=None),
        mean_e2e_s=latency.get(f"{_LATENCY}_sum", 0.0) / count if count > 0 else None,
        unsuccessful=round(sum(_rises(server.over(ended, span)).values())),
    )


def rise(values: Floats) -> float:
    """Return how much a counter rose over readings with gaps; a drop is a restart from 0.

    >>> rise(np.array([5.0, 7.0, np.nan, 1.0]))
    3.0
    """
    known = values[np.isfinite(values)]
    steps = np.diff(known)
    return float(np.where(steps < 0, known[1:], steps).sum())


def _rises(found: Iterable[Series]) -> dict[str, float]:
    """Return the rise of all series of each name."""
    rises: dict[str, float] = {}
    for series in found:
        name = series.labels["__name__"]
        rises[name] = rises.get(name, 0.0) + rise(series.values)
    return rises


def _hit_ratio(rises: dict[str, float]) -> float | None:
    """Return hits by queries; versions that have both names count both alike."""
    for name in _PREFIX_CACHES:
        queries = rises.get(f"{name}_queries_total", 0.0)
        if queries > 0:
            return rises.get(f"{name}_hits_total", 0.0) / queries
    return None
