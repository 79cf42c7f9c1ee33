"""What one configuration gains over another on the same traffic, with an interval.

Runs of neighbouring requests that are drawn again, the same for both, show how a gain in a
latency varies with the traffic; pairs of stretches do it for a rate. The profile's error is
added: the shadow itself may be off by so much.

Tried and given up: a latency's gain from its quantiles in eight stretches, which carry lower
quantiles than the whole and vary so much more that gains of 8 and 22 % passed for chance; and
replaying each stretch by itself, since an engine that starts empty has no queue from before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from scipy.special import stdtrit

from tuner import stats
from tuner.arrays import Floats, Ints
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.slo import Slo
from tuner.replay.timeline import Timelines
from tuner.search.objective import RATE, Objective, Score, Scoring, Tier
from tuner.stats import MIN_RUNS, QUANTILES, Estimate, resampled, tail_statistic

STRETCHES: Final = 8
"""Ours: enough for an interval of Student's that is not mostly its factor."""

MIN_PER_STRETCH: Final = 40
"""Ours: twice what a median demands."""

BLOCKS: Final = 64
"""Ours: runs of four and of eight of them leave sixteen and eight to draw."""

MIN_PER_BLOCK: Final = 5
"""Ours: with fewer requests there are fewer blocks."""


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a metric improves: a latency's fall, or a rate's rise.

    `ratio` is new / old of the score's value, of which less is better; its interval holds what
    varies with the traffic and the shadow's stated error, n counts blocks or stretches.
    `is_tier_better`: in every stretch the new one meets a demand that the old one does not.
    """

    metric: str
    ratio: Estimate
    is_tier_better: bool

    @property
    def is_rate(self) -> bool:
        """Whether more of the metric is better, so that its inverse was compared."""
        return self.metric.endswith("_per_s") or self.metric == "capacity"

    @property
    def value(self) -> float:
        """The gain as a share of what there was."""
        return self._share(self.ratio.value)

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and upper end of the gain."""
        low, high = self.ratio.low or 0.0, self.ratio.high or math.inf
        return self._share(high), self._share(low)

    @property
    def pays(self) -> bool:
        """Whether it is a gain beyond the traffic's chance and the shadow's error."""
        return self.interval[0] > 0 or self.is_tier_better

    def _share(self, ratio: float) -> float:
        if not self.is_rate:
            return 1 - ratio
        return 1 / ratio - 1 if ratio > 0 else math.inf

    @property
    def text(self) -> str:
        """Return the gain in words."""
        low, high = self.interval
        verb = "rises" if self.is_rate else "falls"
        return f"{self.metric} {verb} by {self.value:.1%} ({low:.1%} … {high:.1%})"

    def as_json(self) -> dict[str, Any]:
        """Return the gain for --json."""
        low, high = self.interval
        return {
            "metric": self.metric,
            "value": self.value,
            "interval": [low if math.isfinite(low) else None, high],
            "blocks": self.ratio.n,
            "pays": self.pays,
        }


def by_stretch(log: ReplayLog, stretches: int, slos: Sequence[Slo]) -> list[Measurement]:
    """Return what a replay measured of each of so many stretches, cut by due order.

    The replay goes through: each stretch begins with what the one before has left in flight.
    What is counted by step and not by request, as gaps between tokens, is the whole replay's.

    Shapes: [stretches], each with as many requests, to within one.
    """
    lines = log.timelines
    rows = np.array_split(np.arange(len(lines)), stretches)
    return [measure([replace(log, timelines=_taken(lines, part))], slos) for part in rows]


def _taken(lines: Timelines, rows: Ints) -> Timelines:
    return replace(
        lines,
        due_s=lines.due_s[rows],
        sent_s=lines.sent_s[rows],
        first_s=lines.first_s[rows],
        last_s=lines.last_s[rows],
        output_tokens=lines.output_tokens[rows],
        outcome=lines.outcome[rows],
        work_s=lines.work_s[rows],
    )


def gain_over(
    old: Sequence[ReplayLog], new: Sequence[ReplayLog], scoring: Scoring, wrong_ratio: float
) -> Gain | None:
    """Return what the new one gains, None where the two cannot be compared.

    Where they are judged by different metrics, as when one breaks an SLO, the tail of the
    latency is compared, which both have.

    Shapes: old and new are [pieces of traffic], the same for both.
    """
    scores = [scoring.score(measure(logs, scoring.slos)) for logs in (old, new)]
    if any(score.tier in (Tier.CUT, Tier.FAILED) for score in scores):
        return None
    before, after = (_stretches(logs, scoring) for logs in (old, new))
    is_tier_better = all(n.tier < o.tier for o, n in zip(before, after, strict=True))
    metrics = {score.metric for score in scores}
    metric = metrics.pop() if len(metrics) == 1 else f"e2e_{scoring.tail}"
    ratio = None if metric.startswith("e2e_") else _paired_ratio(before, after, metric)
    if ratio is None:
        # A rate whose stretches are judged by other metrics is compared by the tail as well.
        metric = metric if metric.startswith("e2e_") else f"e2e_{scoring.tail}"
        ratio = _quantile_ratio(old, new, QUANTILES[metric.removeprefix("e2e_")])
    if ratio is None and any(bool(log.timelines.lost.any()) for log in (*old, *new)):
        # A tail that falls on lost requests has no end: the rate of answers is compared.
        metric, ratio = RATE, _rate_ratio(old, new, scoring)
    if ratio is None:
        return None
    return Gain(metric, _widened(ratio, wrong_ratio), is_tier_better)


def _stretches(logs: Sequence[ReplayLog], scoring: Scoring) -> list[Score]:
    """Return the scores of stretches of a replay, by the quantiles that they carry."""
    fewest = min(len(log.timelines) for log in logs)
    count = max(1, min(STRETCHES // len(logs), fewest // MIN_PER_STRETCH))
    # An SLO beyond the quantiles of a stretch is noise in it. Goodput counts request by
    # request and needs none.
    is_counted = scoring.objective in (Objective.GOODPUT, Objective.CAPACITY)
    slos = tuple(s for s in scoring.slos if is_counted or s.needed_samples <= fewest // count)
    lower = Scoring(scoring.objective, slos, tail_statistic(max(fewest // count, 20)))
    return [lower.score(m) for log in logs for m in by_stretch(log, count, scoring.slos)]


def _paired_ratio(
    before: Sequence[Score], after: Sequence[Score], metric: str
) -> Estimate | None:
    """Return the ratio of a rate from pairs of stretches that are both judged by it."""
    pairs = [
        (o.value, n.value)
        for o, n in zip(before, after, strict=True)
        if o.metric == n.metric == metric
    ]
    if len(pairs) < 2:
        return None
    return stats.paired_ratio([n for _, n in pairs], [o for o, _ in pairs])


def _rate_ratio(
    old: Sequence[ReplayLog], new: Sequence[ReplayLog], scoring: Scoring
) -> Estimate | None:
    """Return the inverse ratio of answers per second, from pairs of stretches."""
    counts = [max(1, len(log.timelines) // MIN_PER_STRETCH) for log in old]
    count = min(STRETCHES, *counts)
    before, after = (
        [m.requests_per_s for log in logs for m in by_stretch(log, count, scoring.slos)]
        for logs in (old, new)
    )
    pairs = [(o, n) for o, n in zip(before, after, strict=True) if o > 0 and n > 0]
    if len(pairs) < 2:
        return None
    return stats.paired_ratio([o for o, _ in pairs], [n for _, n in pairs])


def _quantile_ratio(
    old: Sequence[ReplayLog], new: Sequence[ReplayLog], q: float
) -> Estimate | None:
    """Return the ratio of a quantile of the end-to-end latency, both over the same requests.

    Source: circular block bootstrap, as in `resampled`; Student's interval of the logarithm.
    """
    requests = sum(len(log.timelines) for log in old)
    blocks = min(BLOCKS, requests // MIN_PER_BLOCK)
    if blocks < MIN_RUNS:
        return None
    before, after = (_Latencies.of(logs, blocks) for logs in (old, new))

    def log_ratio(weights: Floats) -> Floats:
        new_s, old_s = (np.array(list(one.quantiles(weights, q))) for one in (after, before))
        ratios: Floats = np.log(new_s / old_s)
        return ratios

    change = resampled(log_ratio, blocks, np.random.default_rng(0))
    if not math.isfinite(change.error):
        return None
    half = float(stdtrit(change.df, 0.5 + stats.CONFIDENCE / 2)) * change.error
    low, high = math.exp(change.value - half), _exp(change.value + half)
    return Estimate(math.exp(change.value), low, high, blocks)


@dataclass(frozen=True, slots=True)
class _Latencies:
    """The end-to-end latencies of accepted requests, ascending, and the block of each.

    Requests that timed out or were aborted took longer than any other, without end.

    Shapes: both [completed and lost].
    """

    e2e_s: Floats
    block: Ints

    @classmethod
    def of(cls, logs: Sequence[ReplayLog], blocks: int) -> _Latencies:
        """Return those of all pieces, cut into blocks of as many requests by due order."""
        lines = [log.timelines for log in logs]
        counted = np.concatenate([line.completed | line.lost for line in lines])
        took_s = np.concatenate(
            [np.where(line.lost, np.inf, line.last_s - line.due_s) for line in lines]
        )
        e2e_s = took_s[counted]
        block = np.flatnonzero(counted) * blocks // counted.size
        order = np.argsort(e2e_s)
        return cls(e2e_s[order], block[order])

    def quantiles(self, weights: Floats, q: float) -> Iterator[float]:
        """Yield the nearest-rank quantile for each draw of blocks, nan where none is drawn."""
        for counts in weights:
            up_to = np.cumsum(counts[self.block])
            total = up_to[-1] if up_to.size else 0.0
            if total <= 0:
                yield math.nan
                continue
            rank = max(1.0, math.ceil(q * total - 1e-9))
            yield float(self.e2e_s[np.searchsorted(up_to, rank, side="left")])


def _widened(ratio: Estimate, wrong_ratio: float) -> Estimate:
    """Return the ratio with the shadow's error in its interval; the two are independent."""
    centre = math.log(ratio.value)
    high = ratio.high if ratio.high is not None else math.inf
    half = math.hypot(math.log(high) - centre, math.log1p(wrong_ratio))
    return Estimate(ratio.value, math.exp(centre - half), _exp(centre + half), ratio.n)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700.0 else math.inf
