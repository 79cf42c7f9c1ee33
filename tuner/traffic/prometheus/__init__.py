"""Traces from what a Prometheus kept of a vLLM server, when nobody recorded its requests.

`server` asks, `engines` and `facts` know vLLM's metrics, `counters` tells what happened between
scrapes, and `sampled` draws requests that agree with it, with `prefixes` that hit as often, and
says how in `remarks`.
"""

from __future__ import annotations

from tuner.traffic.prometheus.remarks import hits_missed, known_in_part
from tuner.traffic.prometheus.sampled import trace_from_prometheus

__all__ = ["hits_missed", "known_in_part", "trace_from_prometheus"]
