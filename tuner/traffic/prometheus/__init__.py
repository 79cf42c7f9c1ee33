"""Traces from what a Prometheus kept of a vLLM server, when nobody recorded its requests.

`client` queries, `readings` knows vLLM's metrics, `counters` says what happened between
scrapes, and `sampled` draws requests that agree with it, with `prefixes` that hit as often, and
says how in `remarks`; `replicas` picks one of several engines that served at once, and `live`
is how a server does over a stretch of time.
"""

from __future__ import annotations

from tuner.traffic.prometheus.readings import Scraped, Selection
from tuner.traffic.prometheus.remarks import another_load, known_in_part
from tuner.traffic.prometheus.sampled import trace_from_prometheus

__all__ = ["Scraped", "Selection", "another_load", "known_in_part", "trace_from_prometheus"]
