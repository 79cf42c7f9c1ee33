"""From the instants of a replay to the numbers people tune by.

Answers how fast, how late, how full and how sustained a replay was. One `Measurement` may pool
several windows of the trace. Comparing measurements is left to `search` and `confirm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner import stats
from tuner.engine.steps import StepSummary
from tuner.errors import Caveat
from tuner.levels import Level, levels
from tuner.replay import ReplayLog
from tuner.slo import QUANTILES, Slo
from tuner.stats import Estimate
from tuner.sustained import is_sustained
from tuner.tally import Weighted, pooled
from tuner.timeline import Outcome, Timelines

Floats = NDArray[np.float64]

# Above this share of distorted steps the machine is called noisy: ours.
NOISY_RATIO = 0.05
# Above this share of requests the end of a closed loop's recording is told: ours, more than
# the last few that an engine as fast as the recorded one has in flight then.
UNFINISHED_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and quantiles of one latency over all its samples.

    Units: seconds. A quantile has an interval only where ten samples lie beyond it.
    """

    mean: Estimate
    quantiles: dict[str, Estimate]
    n: int

    def value(self, name: str) -> float:
        """Return the mean or a quantile by its name."""
        return self.mean.value if name == "mean" else self.quantiles[name].value

    def as_json(self) -> dict[str, Any]:
        """Return the numbers with their intervals."""
        parts = {"mean": self.mean, **self.quantiles}
        return {
            **{name: estimate.value for name, estimate in parts.items()},
            "n": self.n,
            "intervals": {
                name: [estimate.low, estimate.high]
                for name, estimate in parts.items()
                if estimate.has_interval
            },
        }


def distribution(samples: Floats) -> Distribution | None:
    """Return the distribution of samples, or None when there is none."""
    n = int(samples.size)
    if n == 0:
        return None
    quantiles = {name: stats.quantile(samples, q) for name, q in QUANTILES.items()}
    return Distribution(stats.mean(samples), quantiles, n)


def counted_distribution(samples: Weighted) -> Distribution | None:
    """Return the distribution of counted samples, or None when there is none."""
    n = round(samples.total_weight)
    if n == 0:
        return None
    quantiles = {name: samples.quantile(q) for name, q in QUANTILES.items()}
    return Distribution(samples.mean(), quantiles, n)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a replay measured.

    Units: seconds, tokens, requests, ratios in 0 to 1, as the names say. `clock_s` is the
    replay's own duration, `busy_s` that of its steps, without what it was idle, `wall_s` the
    real one, `max_step_tokens` the fullest step. `unfinished` counts requests that the end of a
    closed loop's recording left in flight or not sent. `load` is
    the multiple of the recorded load that was offered, `capacity` the largest at which the
    SLOs hold where that was looked for.
    """

    offered: int
    completed: int
    refused: int
    timed_out: int
    aborted: int
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None
    slo_attainment_ratio: float | None
    latencies: dict[str, Distribution | None]
    queue_depth: Level
    running: Level
    kv_usage: Level
    preemptions: int
    prefix_cache_hit_ratio: float | None
    is_sustained: bool
    distorted_steps_ratio: float | None
    send_lag_p99_s: float | None
    max_step_tokens: int
    steps: int
    busy_s: float
    clock_s: float
    wall_s: float
    cut_reason: str | None
    caveats: tuple[Caveat, ...]
    load: float = 1.0
    capacity: float | None = None
    unfinished: int = 0

    def latency(self, metric: str, statistic: str) -> float | None:
        """Return one statistic of one latency, or None where nothing was measured."""
        spread = self.latencies[metric]
        return None if spread is None else spread.value(statistic)

    def count(self, metric: str) -> int:
        """Return how many samples a latency has."""
        spread = self.latencies[metric]
        return 0 if spread is None else spread.n

    def _latencies_json(self) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "mean": None,
            **dict.fromkeys(QUANTILES),
            "n": 0,
            "intervals": {},
        }
        return {
            name: empty if spread is None else spread.as_json()
            for name, spread in self.latencies.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return every number under the name that `tune replay --json` documents."""
        usage = {"mean": self.kv_usage.mean, "p99": self.kv_usage.p99, "max": self.kv_usage.max}
        return {
            "offered": self.offered,
            "completed": self.completed,
            "refused": self.refused,
            "timed_out": self.timed_out,
            "aborted": self.aborted,
            "unfinished": self.unfinished,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "goodput_per_s": self.goodput_per_s,
            "slo_attainment_ratio": self.slo_attainment_ratio,
            **self._latencies_json(),
            "queue_depth": {"mean": self.queue_depth.mean, "max": self.queue_depth.max},
            "running": {"mean": self.running.mean, "max": self.running.max},
            "gpu_cache_usage_perc": usage,
            "kv_cache_usage_perc": usage,
            "preemptions": self.preemptions,
            "prefix_cache_hit_ratio": self.prefix_cache_hit_ratio,
            "sustained": self.is_sustained,
            "distorted_steps_ratio": self.distorted_steps_ratio,
            "send_lag_p99_s": self.send_lag_p99_s,
            "max_step_tokens": self.max_step_tokens,
            "cut_reason": self.cut_reason,
            "caveats": [str(caveat) for caveat in self.caveats],
            "steps": self.steps,
            "busy_s": self.busy_s,
            "virtual_duration_s": self.clock_s,
            "wall_s": self.wall_s,
            "load": self.load,
            "capacity": self.capacity,
        }


def measure(logs: Sequence[ReplayLog], slos: Sequence[Slo] = ()) -> Measurement:
    """Return the measurement of a replay, pooled when the trace was replayed in windows.

    Goodput and attainment count requests that meet every SLO on TTFT, TPOT and E2E themselves;
    without an SLO there is none.

    Shapes: logs is [windows], at least one.
    Raises: ValueError without a log.
    """
    if not logs:
        raise ValueError("nothing was replayed")
    lines, steps = [log.timelines for log in logs], [log.steps for log in logs]
    span_s = sum(_busy_span_s(log) for log in logs)
    offered = sum(len(line) for line in lines)
    completed = sum(line.count(Outcome.COMPLETED) for line in lines)
    good = sum(_good_requests(line, slos) for line in lines)
    tokens = sum(int(line.output_tokens.sum()) for line in lines)
    cut_reason = next((log.cut_reason for log in logs if log.cut_reason), None)
    measurement = Measurement(
        offered=offered,
        completed=completed,
        refused=sum(line.count(Outcome.REFUSED) for line in lines),
        timed_out=sum(line.count(Outcome.TIMED_OUT) for line in lines),
        aborted=sum(line.count(Outcome.ABORTED) for line in lines),
        requests_per_s=completed / span_s if span_s > 0 else 0.0,
        output_tokens_per_s=tokens / span_s if span_s > 0 else 0.0,
        goodput_per_s=good / span_s if slos and span_s > 0 else None,
        slo_attainment_ratio=good / offered if slos and offered else None,
        latencies=_latencies(lines, steps),
        queue_depth=levels(logs, "waiting"),
        running=levels(logs, "running"),
        kv_usage=levels(logs, "kv_usage_ratio"),
        preemptions=sum(s.preempted for s in steps),
        prefix_cache_hit_ratio=_hit_ratio(steps),
        is_sustained=cut_reason is None and all(is_sustained(log) for log in logs),
        distorted_steps_ratio=_pooled_ratio(steps),
        send_lag_p99_s=_send_lag_p99_s(lines),
        max_step_tokens=max((s.max_step_tokens for s in steps), default=0),
        steps=sum(s.steps for s in steps),
        busy_s=sum(s.duration_s for s in steps),
        clock_s=sum(log.clock_s for log in logs),
        wall_s=sum(log.wall_s for log in logs),
        cut_reason=cut_reason,
        caveats=(),
        unfinished=sum(line.count(Outcome.UNFINISHED) for line in lines),
    )
    return _with_caveats(measurement)


def _with_caveats(m: Measurement) -> Measurement:
    """Attach the doubts that follow from the numbers themselves."""
    e2e = m.latencies["e2e_s"]
    found = [
        (Caveat.NOT_SUSTAINED, not m.is_sustained and m.cut_reason is None),
        (Caveat.CUT_SHORT, m.cut_reason is not None),
        (Caveat.FEW_SAMPLES, e2e is None or not stats.carries_quantile(e2e.n, 0.99)),
        (Caveat.PREEMPTED, m.preemptions > 0),
        (Caveat.NOISY_MACHINE, (m.distorted_steps_ratio or 0.0) > NOISY_RATIO),
        (Caveat.REQUESTS_REFUSED, m.refused > 0),
        (Caveat.RECORDING_ENDED, m.unfinished > UNFINISHED_RATIO * m.offered),
    ]
    caveats = tuple(caveat for caveat, holds in found if holds)
    return replace(m, caveats=caveats)


def _good_requests(line: Timelines, slos: Sequence[Slo]) -> int:
    """Count completed requests that meet every SLO themselves."""
    meets = line.completed
    ttft_s, e2e_s = line.first_s - line.due_s, line.last_s - line.due_s
    decode_s = line.last_s - line.first_s
    gaps = np.maximum(line.output_tokens - 1, 1)
    tpot_s = np.where(line.output_tokens >= 2, decode_s / gaps, np.nan)
    for slo in slos:
        meets &= slo.is_met_by(ttft_s, tpot_s, e2e_s)
    return int(meets.sum())


def _busy_span_s(log: ReplayLog) -> float:
    """Return the seconds a rate is taken over: first due instant to the last token.

    To the end of the replay where that came first: by a cut, or as the recording ended.
    """
    due_s, last_s = log.timelines.due_s, log.timelines.last_s
    if due_s.size == 0:
        return 0.0
    if log.cut_reason is not None or log.timelines.count(Outcome.UNFINISHED):
        return max(0.0, log.clock_s - float(due_s.min()))
    ends = last_s[~np.isnan(last_s)]
    end_s = float(ends.max()) if ends.size else log.clock_s
    return max(end_s, float(due_s.max())) - float(due_s.min())


def _latencies(
    lines: Sequence[Timelines], steps: Sequence[StepSummary]
) -> dict[str, Distribution | None]:
    """Return the distribution of every latency, pooled over windows."""
    columns: dict[str, list[Floats]] = {
        "ttft_s": [line.ttft_s for line in lines],
        "tpot_s": [line.tpot_s for line in lines],
        "e2e_s": [line.e2e_s for line in lines],
    }
    return {
        **{name: distribution(np.concatenate(parts)) for name, parts in columns.items()},
        "itl_s": counted_distribution(pooled([line.gap_s for line in lines])),
        "decode_step_s": counted_distribution(pooled([s.decode_steps for s in steps])),
    }


def _hit_ratio(steps: Sequence[StepSummary]) -> float | None:
    """Return cached prompt tokens over all prompt tokens, or None without a prompt."""
    cached = sum(s.cached_tokens for s in steps)
    computed = sum(s.prefill_tokens for s in steps)
    return cached / (cached + computed) if cached + computed > 0 else None


def _pooled_ratio(steps: Sequence[StepSummary]) -> float | None:
    """Return the share of distorted steps over all windows."""
    counts = [s.distorted() for s in steps]
    compared = sum(n for _, n in counts)
    return sum(distorted for distorted, _ in counts) / compared if compared else None


def _send_lag_p99_s(lines: Sequence[Timelines]) -> float | None:
    lags = np.concatenate([line.send_lag_s for line in lines])
    return stats.quantile(lags, 0.99).value if lags.size else None
