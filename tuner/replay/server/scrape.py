"""A server's own metrics, read while a replay runs.

Source: vLLM v1/metrics/loggers.py; kv_cache_usage_perc was gpu_cache_usage_perc before 0.11.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens a server's pages without a proxy, as its requests go: it may be on this machine."""

GAUGES = {
    "gpu_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
}


def read_gauges(page: str) -> dict[str, float]:
    """Return the gauges on a /metrics page, summed over engines, the cache usage averaged.

    Raises: ValueError if the page is not in Prometheus' text format.
    """
    gauges: dict[str, list[float]] = {name: [] for name in GAUGES}
    for family in text_string_to_metric_families(page):
        for name, spellings in GAUGES.items():
            if family.name in spellings:
                gauges[name].extend(s.value for s in family.samples if s.name == family.name)
    summed = {name: float(sum(values)) for name, values in gauges.items() if values}
    if usage := gauges["gpu_cache_usage_perc"]:
        summed["gpu_cache_usage_perc"] = float(np.mean(usage))
    return summed


@dataclass(slots=True)
class Scraper:
    """Reads /metrics every so often in a thread, for as long as the block runs."""

    url: str
    every_s: float = 0.5
    readings: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    missed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with DIRECT.open(f"{self.url}/metrics", timeout=5) as page:
                    gauges = read_gauges(page.read().decode("utf-8"))
                    self.readings.append((time.monotonic(), gauges))
            except (urllib.error.URLError, OSError, ValueError):
                self.missed += 1
            self._stop.wait(self.every_s)

    def spread(self, name: str, since_s: float) -> tuple[float, float] | None:
        """Return mean and maximum of a gauge since an instant, None if the page had none."""
        values = [
            read[name] for at_s, read in self.readings if at_s >= since_s and name in read
        ]
        return (float(np.mean(values)), float(max(values))) if values else None
