"""What a vLLM server's past looks like in Prometheus: requests that are known, page by page."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PastEngine:
    """A vLLM engine that served known requests, and when Prometheus looked at it.

    Each request lives 20 ms per output token. `hit_ratio` of its prompt is in the prefix cache,
    `later_hit_ratio` in the second half of the scrapes. A restart loses those in flight, and
    counting begins anew. `lacks` names metrics that were not kept.

    Shapes: arrived_s, prompt and output are [n], arrived_s ascending; scrapes_s ascends.
    """

    arrived_s: Floats
    prompt: Ints
    output: Ints
    scrapes_s: Floats
    model: str = "demo/model"
    instance: str = "a:8000"
    engine: str | None = "0"
    restarts_s: tuple[float, ...] = ()
    lacks: tuple[str, ...] = ()
    prefix: str = "vllm:prefix_cache"
    usage: str = "vllm:kv_cache_usage_perc"
    hit_ratio: float = 0.25
    later_hit_ratio: float | None = None

    @property
    def ends_s(self) -> Floats:
        """When each request was answered; inf for those that a restart lost."""
        ends_s = self.arrived_s + 0.02 * self.output
        for restart_s in self.restarts_s:
            is_lost = (self.arrived_s <= restart_s) & (ends_s > restart_s)
            ends_s = np.where(is_lost, np.inf, ends_s)
        return ends_s

    def in_flight(self, at_s: float) -> int:
        """Return how many requests were in flight at an instant."""
        began_s = max([t for t in self.restarts_s if t <= at_s], default=-np.inf)
        here = (self.arrived_s > began_s) & (self.arrived_s <= at_s) & (self.ends_s > at_s)
        return int(here.sum())

    def lines(self) -> list[str]:
        """Return the history in OpenMetrics."""
        found: list[str] = []
        for at_s in self.scrapes_s.tolist():
            began_s = max([t for t in self.restarts_s if t <= at_s], default=-np.inf)
            done = (self.ends_s <= at_s) & (self.ends_s > began_s)
            found += self._page(at_s, self.prompt[done], self.output[done], self._hits(done))
        return found

    def _hits(self, done: Bools) -> int:
        """Return how many prompt tokens of these requests hit."""
        later = self.hit_ratio if self.later_hit_ratio is None else self.later_hit_ratio
        is_later = self.arrived_s > np.median(self.scrapes_s)
        return int((self.prompt * np.where(is_later, later, self.hit_ratio))[done].sum())

    def _page(self, at_s: float, prompt: Ints, output: Ints, hits: int) -> list[str]:
        """Return what a scrape at an instant read."""
        in_flight = self.in_flight(at_s)
        values = {
            'vllm:request_success_total{finished_reason="stop"}': len(prompt),
            'vllm:request_success_total{finished_reason="abort"}': 3,
            'vllm:request_success_created{finished_reason="stop"}': 1.79e9,
            "vllm:num_requests_running": min(in_flight, 4),
            "vllm:num_requests_waiting": max(in_flight - 4, 0),
            'vllm:num_requests_waiting_by_reason{reason="capacity"}': 1000,
            f"{self.prefix}_queries_total": int(prompt.sum()),
            f"{self.prefix}_hits_total": hits,
            f"{self.prefix}_hits_created": 1.79e9,
            self.usage: 0.5,
            "vllm:e2e_request_latency_seconds_sum": 0.02 * int(output.sum()),
            "vllm:e2e_request_latency_seconds_count": len(prompt),
        }
        for name, tokens in (("prompt", prompt), ("generation", output)):
            family = f"vllm:request_{name}_tokens"
            for bound in BOUNDS:
                values[f'{family}_bucket{{le="{bound}.0"}}'] = int((tokens <= bound).sum())
            values[f'{family}_bucket{{le="+Inf"}}'] = len(tokens)
            values[f"{family}_count"] = len(tokens)
            values[f"{family}_sum"] = int(tokens.sum())
            values[f"{family}_created"] = 1.79e9
        model = self.model.replace("\\", r"\\").replace('"', '\\"')
        own = f'instance="{self.instance}",model_name="{model}"'
        own += "" if self.engine is None else f',engine="{self.engine}"'
        return [
            f"{_labelled(name, own)} {value} {at_s:.3f}"
            for name, value in values.items()
            if not (self.lacks and name.startswith(self.lacks))
        ]


def _labelled(name: str, own: str) -> str:
    """Return a metric's name with more labels."""
    base, _, labels = name.partition("{")
    first = labels.removesuffix("}") + "," if labels else ""
    return f"{base}{{{first}{own}}}"


HOUR_S = 3600
# Six hours ago, on a whole half minute: within what Prometheus keeps, and before its head.
END_S = (int(time.time()) - 6 * HOUR_S) // 30 * 30
START_S = END_S - 2 * HOUR_S
SCRAPES_S = np.arange(START_S, END_S + 1, 15.0)


def past(rate_per_s: float = 1.0, seed: int = 0, **more: Any) -> PastEngine:
    """Return two hours of Poisson arrivals with lognormal lengths, scraped every 15 s."""
    rng = np.random.default_rng(seed)
    n = rng.poisson(rate_per_s * 2 * HOUR_S)
    return PastEngine(
        arrived_s=np.sort(rng.uniform(START_S, END_S, n)),
        prompt=np.clip(np.rint(rng.lognormal(6.0, 1.0, n)), 1, 8000).astype(np.int64),
        output=np.clip(np.rint(rng.lognormal(4.5, 0.8, n)), 1, 2000).astype(np.int64),
        **({"scrapes_s": SCRAPES_S} | more),
    )


RESTART_S = START_S + 2400.0
GAP_S = (START_S + 3600.0, START_S + 4200.0)
_SINCE_GAP_S = SCRAPES_S - GAP_S[0]
_IN_GAP = (_SINCE_GAP_S > 0) & (_SINCE_GAP_S < 600)
PLAIN = past(model="plain")
SHAKEN = past(seed=1, model="shaken", scrapes_s=SCRAPES_S[~_IN_GAP], restarts_s=(RESTART_S,))
TWINS = (
    past(seed=2, model="twins"),
    past(0.5, seed=3, model="twins", instance="b:8000", engine="1"),
)
MOVED = (
    past(seed=8, model="moved", scrapes_s=SCRAPES_S[:240]),
    past(seed=8, model="moved", scrapes_s=SCRAPES_S[235:], instance="c:8000"),
)
OLD = past(
    seed=4,
    model='org/old "0.6"',
    engine=None,
    prefix="vllm:gpu_prefix_cache",
    usage="vllm:gpu_cache_usage_perc",
    lacks=("vllm:num_requests",),
)
CHATTY = past(seed=6, model="chatty", hit_ratio=0.8, later_hit_ratio=0.4)
TERSE = replace(
    past(seed=7, model="terse", hit_ratio=0.97), prompt=np.full_like(past(seed=7).prompt, 40)
)
BARE = past(seed=5, model="bare", lacks=("vllm:request_generation_tokens_bucket",))
