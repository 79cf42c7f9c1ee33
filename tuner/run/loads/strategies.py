"""The serving strategies of the field, as limits and arrivals of one engine.

Answers what each strategy would have made of the same traffic: several engines with a share of
the device each, one request at a time, static batches that wait for their slowest answer,
continuous batching as vLLM comes, and as tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError, ReplayError, ShadowError
from tuner.replay.arrivals import StaticBatches
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import Failure
from tuner.shadow.predictor import Predictor
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulator import simulate
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to serve: a name, the engine's limits, and static batches where it makes them.

    Of several processes each has its share of the device and of the requests, in turns.
    """

    name: str
    limits: EngineLimits
    batches: StaticBatches | None = None
    processes: int = 1

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
            **asdict(self.strategy.limits),
            "processes": self.strategy.processes,
            "static_batches": batches and {"size": batches.size, "wait_s": batches.wait_s},
            "measurement": None if self.measured is None else self.measured.as_json(),
            "failure": self.failure or None,
        }


def strategies(
    default: EngineLimits,
    tuned: EngineLimits,
    batches: Sequence[StaticBatches],
    processes: int = 1,
    whose: str = "vLLM's defaults",
) -> list[Strategy]:
    """Return the strategies, the simplest first, with several processes if there are.

    `whose` says what the default limits are.
    """
    budget = max(default.max_num_batched_tokens, tuned.max_num_batched_tokens)
    alone = EngineLimits(1, budget)
    several = Strategy(
        f"one at a time on each of {processes} engines", alone, processes=processes
    )
    return [
        Strategy("one request at a time", alone),
        *([several] if processes > 1 else []),
        *(
            Strategy(
                f"static batches of {batch.size}, wait {batch.wait_s * 1000:g} ms",
                EngineLimits(batch.size, max(budget, batch.size)),
                batch,
            )
            for batch in batches
        ),
        Strategy(f"continuous batching, {whose}", default),
        Strategy("continuous batching, tuned", tuned),
    ]


def predicted(
    predictor: Predictor, trace: Trace, strategy: Strategy, plan: ReplayPlan
) -> StrategyRow:
    """Predict one strategy. Of several engines on one device each takes as many times as long.

    That is what a step costs that is bound by the device; what little of it is not, and a
    device's turns between processes, are left out.

    Raises: ShadowError, UsageError.
    """
    own = strategy.plan(plan)
    if strategy.processes == 1:
        outcome = predictor.measure([trace], strategy.limits, own, ())
        return row_of(strategy, outcome)
    engine, count = predictor.simulated(strategy.limits), strategy.processes
    slower = engine.step_model.scaled(float(count))
    own_share = replace(engine, num_blocks=engine.num_blocks // count, step_model=slower)
    try:
        logs = [
            simulate(own_share, PreparedTrace(part, own), strategy.limits, own)
            for part in in_turns(trace, count)
        ]
    except (EngineError, ReplayError, ShadowError) as error:
        return StrategyRow(strategy, None, error.message)
    return StrategyRow(strategy, pooled(logs))


def in_turns(trace: Trace, count: int) -> list[Trace]:
    """Return what each of several engines gets of a trace, request by request in turns.

    Of fewer requests than engines one each.
    """
    busy = min(count, len(trace))
    return [trace.slice_rows(np.arange(i, len(trace), count)) for i in range(busy)]


def row_of(strategy: Strategy, outcome: Measurement | Failure) -> StrategyRow:
    """Return what a strategy brought, or why it brought nothing."""
    if isinstance(outcome, Failure):
        return StrategyRow(strategy, None, outcome.cause)
    return StrategyRow(strategy, outcome)


def told_by_saturation(
    rows: Sequence[StrategyRow], at_once: Sequence[StrategyRow]
) -> list[StrategyRow]:
    """Return the rows, static batches as growing that are offered more than they serve at once.

    What a request costs in a full batch does not tell how long a static batch waits for its
    slowest answer, and a window may be too short to show the queue grow.
    """
    return [
        replace(row, measured=_not_sustained(row.measured))
        if row.measured and row.strategy.batches and _is_outrun(row.measured, full.measured)
        else row
        for row, full in zip(rows, at_once, strict=True)
    ]


def _is_outrun(m: Measurement, at_once: Measurement | None) -> bool:
    """Whether more requests came in a second than are served where all are there at once."""
    return at_once is not None and (m.offered_per_s or 0.0) > at_once.requests_per_s


def _not_sustained(m: Measurement) -> Measurement:
    caveats = [Caveat.NOT_SUSTAINED, *m.caveats]
    return replace(m, is_sustained=False, caveats=tuple(dict.fromkeys(caveats)))


def pooled(logs: Sequence[ReplayLog]) -> Measurement:
    """Return the measurement of several engines that served side by side."""
    found, count = measure(logs), len(logs)
    return replace(
        found,
        requests_per_s=count * found.requests_per_s,
        output_tokens_per_s=count * found.output_tokens_per_s,
    )


def saturated(trace: Trace) -> Trace:
    """Return the trace with all requests there at once, so that engines are never idle."""
    return replace(
        trace,
        due_s=np.zeros(len(trace)),
        turns=None,
        e2e_s=None,
        ttft_s=None,
        notes=trace.notes.with_remark("all requests were there at once"),
    )


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


_HEAD = ("requests/s", "times", "e2e p50", "e2e p99", "ttft p50", "ttft p99", "running")


def table(rows: Sequence[StrategyRow]) -> list[str]:
    """Return the comparison for people; latencies in milliseconds.

    `times` is the rate beside that of the first strategy.
    """
    first = rows[0].measured
    base = None if first is None else first.requests_per_s
    width = max(len(row.strategy.name) for row in rows) + 2
    lines = [" " * width + f"{'seqs/tokens':>12}" + "".join(f"{name:>12}" for name in _HEAD)]
    for row in rows:
        start = f"{row.strategy.name:<{width}}{row.strategy.limits!s:>12}"
        m = row.measured
        lines.append(start + (f"  {row.failure}" if m is None else _cells(m, base)))
    return lines


def _cells(m: Measurement, base: float | None) -> str:
    latencies: Mapping[str, float | None] = {
        name: m.latency(f"{name.split()[0]}_s", name.split()[1]) for name in _HEAD[2:6]
    }
    cells = [
        f"{m.requests_per_s:.2f}",
        f"{m.requests_per_s / base:.2f}" if base else "-",
        *("-" if value is None else f"{value * 1000:.1f}" for value in latencies.values()),
        f"{m.running.mean:.1f}",
    ]
    more = "" if m.is_sustained else "  queue grew"
    return "".join(f"{cell:>12}" for cell in cells) + more
