"""How full a server's KV cache is by its own metrics, read while a replay runs."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens a server's pages without a proxy, as its requests go: it may be on this machine."""

CACHE_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The gauge by its name, and by that of before 0.11. Source: vLLM v1/metrics/loggers.py."""


def cache_usage(page: str) -> float | None:
    """Return the cache usage on a /metrics page, the mean of all engines; None without one.

    Raises: ValueError if the page is not in Prometheus' text format.
    """
    engines = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in CACHE_USAGE
    ]
    return float(np.mean(engines)) if engines else None


@dataclass(slots=True)
class Scraper:
    """Reads /metrics every so often in a thread, for as long as the block runs."""

    url: str
    every_s: float = 0.5
    readings: list[tuple[float, float]] = field(default_factory=list)
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
                    usage = cache_usage(page.read().decode("utf-8"))
                if usage is not None:
                    self.readings.append((time.monotonic(), usage))
            except (urllib.error.URLError, OSError, ValueError):
                self.missed += 1
            self._stop.wait(self.every_s)

    def spread(self, since_s: float) -> tuple[float, float] | None:
        """Return mean and maximum since an instant, None if no page had the usage."""
        values = [usage for at_s, usage in self.readings if at_s >= since_s]
        return (float(np.mean(values)), float(max(values))) if values else None
