"""From the instants of a replay to the numbers people tune by.

Answers how fast, how late, how full and how sustained a replay was: distributions of latencies,
levels weighted by time, rates, and the caveats on them. One `Measurement` may pool several
windows of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tuner import stats
from tuner.engine.gpu import GpuLog
from tuner.engine.steps import StepSummary
from tuner.errors import Caveat
from tuner.replay.load import arrival_span_s, is_sustained, utilisation
from tuner.replay.loop import ReplayLog
from tuner.replay.slo import Slo
from tuner.replay.timeline import Outcome, Timelines
from tuner.stats import QUANTILES, Bools, Estimate, Floats, WeightedSamples, pooled, short


@dataclass(frozen=True, slots=True)
class TimeWeighted:
    """A quantity that holds for a while, such as queue depth, weighted by time."""

    mean: float
    p99: float
    max: float


def levels(logs: Sequence[ReplayLog], name: str) -> TimeWeighted:
    """Return a level of the steps weighted by time, idle time counting as nothing."""
    held = pooled([log.steps.levels[name] for log in logs])
    idle_s = sum(max(0.0, log.clock_s - log.steps.duration_s) for log in logs)
    samples = WeightedSamples(
        np.concatenate([(0.0,), held.values]), np.concatenate([(idle_s,), held.weights])
    )
    if samples.total_weight <= 0:
        return TimeWeighted(0.0, 0.0, 0.0)
    peak = max(log.steps.peaks[name] for log in logs)
    return TimeWeighted(samples.mean().value, samples.value_at(0.99), peak)


# Above this share of their time steps are called the host's: ours. On an H200 it was 0 to 6 %
# where it did not matter, and 10 to 40 % where step times went with what launching took.
HOST_BOUND_RATIO = 0.1
# Above this share of distorted steps the machine is called noisy: ours.
NOISY_RATIO = 0.05
# A window shorter than so many lives of a request shows an engine fill: ours.
SHOWN_LIVES = 3.0
# Above this share of requests the end of a closed loop's recording is a caveat, and above this
# share of what it has in flight the end of its requests: ours, more than the last few that an
# engine as fast as the recorded one has in flight then.
UNFINISHED_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and quantiles of one latency over all its samples.

    `lost` of the samples are requests that were never answered in full: they count in every
    quantile as longer than any other, which is exact, and the mean is that of the others.

    Units: seconds, infinite where the quantile falls on a lost request. A quantile has an
    interval only where ten samples lie beyond it.
    """

    mean: Estimate
    quantiles: dict[str, Estimate]
    n: int
    lost: int = 0

    def value(self, name: str) -> float:
        """Return the mean or a quantile by its name."""
        return self.mean.value if name == "mean" else self.quantiles[name].value

    def as_json(self) -> dict[str, Any]:
        """Return the numbers with their intervals."""
        parts = {"mean": self.mean, **self.quantiles}
        return {
            **{name: _finite(estimate.value) for name, estimate in parts.items()},
            "n": self.n,
            "lost": self.lost,
            "intervals": {
                name: [estimate.low, estimate.high and _finite(estimate.high)]
                for name, estimate in parts.items()
                if estimate.has_interval and math.isfinite(estimate.value)
            },
        }


def _finite(value: float) -> float | None:
    """Return a number as JSON can hold it: nothing for one without end."""
    return value if math.isfinite(value) else None


def distribution(
    samples: Floats, lost: int = 0, names: Collection[str] = QUANTILES
) -> Distribution | None:
    """Return the distribution of samples and of `lost` without end, None without a sample.

    Of its quantiles it has those that are named.
    """
    n = int(samples.size)
    if n + lost == 0:
        return None
    mean = stats.mean(samples) if n else Estimate(math.inf, None, None, 0)
    if lost:
        samples = np.concatenate([samples, np.full(lost, math.inf)])
    wanted = {name: q for name, q in QUANTILES.items() if name in names}
    return Distribution(mean, stats.quantiles(samples, wanted), n + lost, lost)


def counted_distribution(samples: WeightedSamples) -> Distribution | None:
    """Return the distribution of counted samples, or None when there is none."""
    n = round(samples.total_weight)
    if n == 0:
        return None
    return Distribution(samples.mean(), samples.quantiles(QUANTILES), n)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a replay measured.

    Units: seconds, tokens, requests, ratios in 0 to 1, as the names say. `clock_s` is the
    replay's own duration, `busy_s` that of its steps, without what it was idle, `wall_s` the
    real one, `max_step_tokens` the fullest step. `unfinished` counts requests that the end of a
    closed loop's recording left in flight or not sent, `unserved_ratio` is the share of what it
    has in flight that came after the last of them, `turned_away` and `truncated` what a
    gate kept out or cut off. `utilisation` is the offered work over the time in which it came,
    1 and more is overload, `offered_per_s` the requests that came in that time, None where
    either is unknown. `load` is the multiple of the recorded load
    that was offered, `capacity` the largest at which the SLOs hold where that was looked for.
    `gpu` is what the driver said of the GPUs, None where nobody could ask. For the share
    `host_bound_ratio` of `busy_s` steps took what launching the next batch took the host.
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
    queue_depth: TimeWeighted
    running: TimeWeighted
    kv_usage: TimeWeighted
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
    utilisation: float | None = None
    offered_per_s: float | None = None
    host_bound_ratio: float = 0.0
    unfinished: int = 0
    turned_away: int = 0
    truncated: int = 0
    gpu: GpuLog | None = None
    unserved_ratio: float = 0.0

    @property
    def spans_lives(self) -> bool:
        """Whether requests came for long enough to see what becomes of a queue.

        For several times as long as one of them lives; otherwise most of what is seen is how
        an empty engine fills.
        """
        life_s, per_s = self.latency("e2e_s", "mean"), self.offered_per_s
        if life_s is None or not per_s:
            return False
        return self.offered / per_s >= SHOWN_LIVES * life_s

    @property
    def lost_ratio(self) -> float:
        """The share of the offered requests without a full answer, the refused apart."""
        lost = self.timed_out + self.aborted + self.turned_away + self.truncated
        return lost / self.offered if self.offered else 0.0

    @property
    def load_text(self) -> str:
        """Return what was offered and whether it is too much; empty where that is unknown."""
        return load_text(self.offered_per_s, self.requests_per_s, self.utilisation)

    def slo_value(self, metric: str, statistic: str) -> float | None:
        """Return a statistic as an SLO bounds it: without end for a mean with lost requests."""
        spread = self.latencies[metric]
        if spread is not None and spread.lost and statistic == "mean":
            return math.inf
        return self.latency(metric, statistic)

    def latency(self, metric: str, statistic: str) -> float | None:
        """Return one statistic of one latency, or None where nothing was measured."""
        spread = self.latencies[metric]
        return None if spread is None else spread.value(statistic)

    def _latencies_json(self) -> dict[str, Any]:
        empty: dict[str, Any] = dict.fromkeys(("mean", *QUANTILES))
        empty |= {"n": 0, "lost": 0, "intervals": {}}
        return {
            name: empty if spread is None else spread.as_json()
            for name, spread in self.latencies.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return every number under the name that `tune replay --json` documents."""
        usage = asdict(self.kv_usage)
        return {
            **{name: getattr(self, name) for name in _REQUESTS},
            **self._latencies_json(),
            "queue_depth": {"mean": self.queue_depth.mean, "max": self.queue_depth.max},
            "running": {"mean": self.running.mean, "max": self.running.max},
            "gpu_cache_usage_perc": usage,
            "kv_cache_usage_perc": usage,
            "sustained": self.is_sustained,
            **{name: getattr(self, name) for name in _ENGINE},
            "caveats": [str(caveat) for caveat in self.caveats],
            "virtual_duration_s": self.clock_s,
            "gpu": None if self.gpu is None else self.gpu.as_json(),
        }


# What stands in JSON under its own name: of the requests, and of the engine that served them.
_REQUESTS = (
    *("offered", "completed", "refused", "timed_out", "aborted", "turned_away", "truncated"),
    *("lost_ratio", "offered_per_s", "unfinished", "requests_per_s", "output_tokens_per_s"),
    *("goodput_per_s", "slo_attainment_ratio"),
)
_ENGINE = (
    *("preemptions", "prefix_cache_hit_ratio", "utilisation", "distorted_steps_ratio"),
    *("host_bound_ratio", "send_lag_p99_s", "max_step_tokens", "cut_reason", "steps", "busy_s"),
    *("wall_s", "load", "capacity"),
)


def load_text(
    offered_per_s: float | None, finished_per_s: float, utilisation: float | None
) -> str:
    """Return what was offered and whether it is too much; empty where that is unknown.

    >>> load_text(58.3, 34.4, 1.7)
    'offered 58/s, finished 34/s: overloaded 1.7 x'
    >>> load_text(604.1, 133.2, 4.4)
    'offered 604/s, finished 133/s: overloaded 4.4 x'
    """
    if offered_per_s is None or utilisation is None:
        return ""
    message = f"offered {short(offered_per_s, 2)}/s, finished {short(finished_per_s, 2)}/s"
    if utilisation > 1:
        # Two digits of a load that is just missed would say that it is borne.
        return f"{message}: overloaded {short(utilisation, 3 if utilisation < 1.1 else 2)} x"
    return f"{message}: utilisation {utilisation:.0%}"


_ENDS = {outcome.name.lower(): outcome for outcome in Outcome}

Statistics = Mapping[str, Collection[str]]
"""The names of latencies, and of each its quantiles by name."""
_ALL: Statistics = dict.fromkeys(
    ("ttft_s", "tpot_s", "e2e_s", "itl_s", "decode_step_s"), QUANTILES
)


def measure(
    logs: Sequence[ReplayLog], slos: Sequence[Slo] = (), statistics: Statistics = _ALL
) -> Measurement:
    """Return the measurement of a replay, pooled when the trace was replayed in windows.

    It has the latencies and quantiles that are named, which are most of the work. Goodput and
    attainment count requests that meet every SLO on TTFT, TPOT and E2E themselves; without an
    SLO there is none.

    Shapes: logs is [windows], at least one.
    Raises: ValueError without a log.
    """
    lines, steps = _parts(logs)
    offered, span_s = sum(map(len, lines)), sum(map(_busy_span_s, logs))
    ended = {name: sum(line.count(end) for line in lines) for name, end in _ENDS.items()}
    good = sum(int(good_requests(line, slos).sum()) for line in lines) if slos else 0
    measurement = Measurement(
        offered=offered,
        **ended,
        requests_per_s=ended["completed"] / span_s if span_s > 0 else 0.0,
        output_tokens_per_s=_answered_tokens(logs) / span_s if span_s > 0 else 0.0,
        goodput_per_s=good / span_s if slos and span_s > 0 else None,
        slo_attainment_ratio=good / offered if slos and offered else None,
        latencies=_latencies(logs, statistics),
        queue_depth=levels(logs, "waiting"),
        running=levels(logs, "running"),
        kv_usage=levels(logs, "kv_usage_ratio"),
        preemptions=sum(s.preempted for s in steps),
        prefix_cache_hit_ratio=_hit_ratio(steps),
        is_sustained=all(map(_kept_up, logs)),
        distorted_steps_ratio=_pooled_ratio(steps),
        send_lag_p99_s=_send_lag_p99_s(lines) if statistics is _ALL else None,
        max_step_tokens=max((s.max_step_tokens for s in steps), default=0),
        steps=sum(s.steps for s in steps),
        busy_s=sum(s.duration_s for s in steps),
        clock_s=sum(log.clock_s for log in logs),
        wall_s=sum(log.wall_s for log in logs),
        cut_reason=next((log.cut_reason for log in logs if log.cut_reason), None),
        caveats=(),
        utilisation=utilisation(lines),
        offered_per_s=_offered_per_s(lines),
        host_bound_ratio=_host_bound_ratio(steps),
        gpu=GpuLog.pooled([log.gpu for log in logs]),
        unserved_ratio=max(log.unserved_ratio for log in logs),
    )
    return replace(measurement, caveats=_caveats(measurement))


def _parts(logs: Sequence[ReplayLog]) -> tuple[list[Timelines], list[StepSummary]]:
    if not logs:
        raise ValueError("nothing was replayed")
    return [log.timelines for log in logs], [log.steps for log in logs]


def _kept_up(log: ReplayLog) -> bool:
    """Whether a whole load was sustained; a closed loop offers what the engine takes."""
    return not log.cut_reason and (log.is_closed_loop or is_sustained(log.timelines))


def _offered_per_s(lines: Sequence[Timelines]) -> float | None:
    arrivals_s = sum(arrival_span_s(line) for line in lines)
    return sum(map(len, lines)) / arrivals_s if arrivals_s > 0 else None


def _caveats(m: Measurement) -> tuple[Caveat, ...]:
    """Return the doubts that follow from the numbers themselves."""
    e2e = m.latencies["e2e_s"]
    checks = [
        (Caveat.NOT_SUSTAINED, not m.is_sustained and m.cut_reason is None),
        (Caveat.CUT_SHORT, m.cut_reason is not None),
        (Caveat.FEW_SAMPLES, e2e is None or not stats.carries_quantile(e2e.n, 0.99)),
        (Caveat.PREEMPTED, m.preemptions > 0),
        (Caveat.NOISY_MACHINE, (m.distorted_steps_ratio or 0.0) > NOISY_RATIO),
        (Caveat.HOST_BOUND, m.host_bound_ratio > HOST_BOUND_RATIO),
        (Caveat.GPU_SLOWED, m.gpu is not None and m.gpu.is_slowed),
        (Caveat.REQUESTS_REFUSED, m.refused > 0),
        (Caveat.REQUESTS_LOST, m.cut_reason is None and m.lost_ratio > 0),
        (Caveat.REQUESTS_RAN_OUT, m.unserved_ratio > UNFINISHED_RATIO),
        (Caveat.RECORDING_ENDED, m.unfinished > UNFINISHED_RATIO * m.offered),
    ]
    return tuple(caveat for caveat, holds in checks if holds)


def good_requests(line: Timelines, slos: Sequence[Slo]) -> Bools:
    """Mark completed requests that meet every SLO themselves."""
    meets = line.completed
    ttft_s, e2e_s = line.first_s - line.due_s, line.last_s - line.due_s
    decode_s = line.last_s - line.first_s
    gaps = np.maximum(line.output_tokens - 1, 1)
    tpot_s = np.where(line.output_tokens >= 2, decode_s / gaps, np.nan)
    for slo in slos:
        meets &= slo.is_met_by(ttft_s, tpot_s, e2e_s)
    return meets


def _busy_span_s(log: ReplayLog) -> float:
    """Return the seconds a rate is taken over: first due instant to the last token.

    To the end of the replay where that came first: by a cut, or as the recording ended.
    """
    due_s, last_s = log.timelines.due_s, log.timelines.last_s
    if due_s.size == 0:
        return 0.0
    if log.cut_reason is not None or log.timelines.count(Outcome.UNFINISHED):
        return max(0.0, log.clock_s - float(due_s.min()))
    end_s = float(np.fmax.reduce(last_s))
    end_s = log.clock_s if math.isnan(end_s) else end_s
    return max(end_s, float(due_s.max())) - float(due_s.min())


def _answered_tokens(logs: Sequence[ReplayLog]) -> int:
    """Return the output tokens of answers, also of those that the replay's end cut off."""
    tokens = 0
    for log in logs:
        line = log.timelines
        counts = line.completed | (line.outcome == int(Outcome.UNFINISHED))
        counts |= log.cut_reason is not None
        tokens += int(line.output_tokens[counts].sum())
    return tokens


def _latencies(
    logs: Sequence[ReplayLog], statistics: Statistics
) -> dict[str, Distribution | None]:
    """Return the distribution of each latency that is named, pooled over windows.

    What was in flight when a replay was cut was not lost: how it would have ended is unknown.
    """
    lost = sum(int(log.timelines.lost.sum()) for log in logs if log.cut_reason is None)

    def spread(name: str) -> Distribution | None:
        if name == "itl_s":
            return counted_distribution(pooled([log.timelines.gap_s for log in logs]))
        if name == "decode_step_s":
            return counted_distribution(pooled([log.steps.decode_steps for log in logs]))
        samples = np.concatenate([getattr(log.timelines, name) for log in logs])
        return distribution(samples, lost, statistics[name])

    return {name: spread(name) for name in statistics}


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


def _host_bound_ratio(steps: Sequence[StepSummary]) -> float:
    """Return the share of the steps' time that the host was the slower one."""
    busy_s = sum(s.duration_s for s in steps)
    return sum(s.host_bound_s for s in steps) / busy_s if busy_s > 0 else 0.0


def _send_lag_p99_s(lines: Sequence[Timelines]) -> float | None:
    lags = np.concatenate([line.send_lag_s for line in lines])
    return stats.quantile(lags, 0.99).value if lags.size else None
