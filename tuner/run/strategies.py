"""The serving strategies of the field, as limits and arrivals of one engine.

Answers what each strategy would have made of the same traffic: one request at a time, static
batches that wait for their slowest answer, continuous batching as vLLM comes, and as tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.replay.arrivals import StaticBatches
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to serve: a name, the engine's limits, and static batches where it makes them."""

    name: str
    limits: EngineLimits
    batches: StaticBatches | None = None

    def plan(self, plan: ReplayPlan) -> ReplayPlan:
        """Return how the trace is replayed with this strategy."""
        return replace(plan, batches=self.batches)


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """What one strategy measured, or why it could not be."""

    strategy: Strategy
    measured: Measurement | None
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row for --json and the report."""
        batches = self.strategy.batches
        return {
            "strategy": self.strategy.name,
            "max_num_seqs": self.strategy.limits.max_num_seqs,
            "max_num_batched_tokens": self.strategy.limits.max_num_batched_tokens,
            "static_batches": batches and {"size": batches.size, "wait_s": batches.wait_s},
            "measurement": None if self.measured is None else self.measured.as_json(),
            "failure": self.failure or None,
        }


def strategies(
    default: EngineLimits, tuned: EngineLimits, batches: StaticBatches
) -> list[Strategy]:
    """Return the four strategies, the simplest first."""
    budget = max(default.max_num_batched_tokens, tuned.max_num_batched_tokens)
    return [
        Strategy("one request at a time", EngineLimits(1, budget)),
        Strategy(
            f"static batches of {batches.size}, wait {batches.wait_s * 1000:g} ms",
            EngineLimits(batches.size, max(budget, batches.size)),
            batches,
        ),
        Strategy("continuous batching, vLLM's defaults", default),
        Strategy("continuous batching, tuned", tuned),
    ]


def uniform(trace: Trace) -> Trace:
    """Return the trace with every length replaced by the mean, and without shared prefixes.

    It is what a test with uniform data would have replayed.
    """
    n = len(trace)
    mean = {
        name: np.full(n, max(1, round(float(column.mean()))), dtype=np.int64)
        for name, column in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens))
    }
    return replace(
        trace,
        prompt_tokens=mean["prompt"],
        output_tokens=mean["output"],
        hashes=None,
        e2e_s=None,
        ttft_s=None,
        notes=trace.notes.with_remark("every length was replaced by the mean"),
    )


_HEAD = ("requests/s", "e2e p50", "e2e p99", "ttft p50", "ttft p99", "running")


def table(rows: Sequence[StrategyRow]) -> list[str]:
    """Return the comparison for people; latencies in milliseconds."""
    width = max(len(row.strategy.name) for row in rows) + 2
    lines = [" " * width + f"{'seqs/tokens':>12}" + "".join(f"{name:>12}" for name in _HEAD)]
    for row in rows:
        start = f"{row.strategy.name:<{width}}{row.strategy.limits!s:>12}"
        m = row.measured
        lines.append(start + (f"  {row.failure}" if m is None else _cells(m)))
    return lines


def _cells(m: Measurement) -> str:
    latencies: Mapping[str, float | None] = {
        name: m.latency(f"{name.split()[0]}_s", name.split()[1]) for name in _HEAD[1:5]
    }
    cells = [
        f"{m.requests_per_s:.2f}",
        *("-" if value is None else f"{value * 1000:.1f}" for value in latencies.values()),
        f"{m.running.mean:.1f}",
    ]
    more = "" if m.is_sustained else "  queue grew"
    return "".join(f"{cell:>12}" for cell in cells) + more
