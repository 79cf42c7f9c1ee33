"""Whether a configuration that was handed over does as well as the one before it would have.

Live metrics of the time since are compared with the shadows' predictions of both configurations
for the very traffic of that time, so that a busier hour does not count against the new one. How
far the old configuration was from its own prediction before the change, in either direction, is
allowed for; where that is more than the profile's error, there is no verdict, and the change
neither passes nor is rolled back.

What was predicted rests on traffic that others have a hand in: a client, or whoever is scraped
under the model's name. So the queue is compared with what it was before as well, which no
prediction excuses: requests that wait now, and did not before, and would by no prediction.

A restart after the change is the rollout's: the guard begins again after it. An engine that
restarts once more is held against the configuration, unless it did so before the change too.
Replicas that restart one after the other do so once each.

Tried and given up: comparing live before with live after. Traffic has just shifted, or there
would have been no change; the two hours do not compare. Looking at tails alone: vLLM's buckets
are up to two and a half times as wide as they are low, so that a new configuration twice as
slow stays in the old one's; means have no buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

from tuner.drift.compare import MIN_REQUESTS
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.stats import QUANTILES, Estimate, short, tail_statistic
from tuner.traffic.prometheus.live import Live

MIN_COVERED: Final = 0.8
"""Ours: a stretch that Prometheus scraped less of may have been quite another."""

SETTLE_RATIO: Final = 0.2
"""Ours: a share of the guard's time for the restart and the queue that it leaves."""

MAX_GUARD_TIMES: Final = 4.0
"""Ours: after so many times its own length without a verdict the guard ends."""

QUEUE_TIMES: Final = 2.0
MIN_QUEUED: Final = 1.0
"""Ours: a busier hour has a longer queue, and less than a request in the mean is none."""

MEAN, TAIL, RATE = "mean", "tail", "requests_per_s"
_AS_PREDICTED: Final = Estimate(1.0, None, None, 1)


class GuardVerdict(StrEnum):
    """How a change does."""

    AGREES = "does as well as predicted"
    WORSE = "does worse than the old configuration would"
    UNKNOWN = "has no verdict"


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """The guard's verdict, and why."""

    verdict: GuardVerdict
    why: str
    restarted_s: float | None = None
    """When the server was up again, if it restarted: the guard's window begins again there."""

    anew: tuple[str, ...] = ()
    """The engines that restarted then, if the window begins again."""


@dataclass(frozen=True, slots=True)
class GuardSample:
    """A stretch of time: how the server did, and what was predicted of each configuration.

    `predicted` is empty where there was no traffic to replay, for the reason `why_not`.
    """

    live: Live
    predicted: Mapping[EngineLimits, Measurement | Failure]
    why_not: str = ""


Observe = Callable[[float, float, Sequence[EngineLimits]], GuardSample]
"""Measure and predict a stretch between two Unix times, at the end of which the last of the
configurations was in use. Raises: TunerError if Prometheus does not answer."""


@dataclass(frozen=True, slots=True)
class Bias:
    """How many times as slow a configuration was live as predicted, less than 1 where faster.

    `why_not` is the reason why that is not known, or not to be trusted; else empty. `waiting`
    is how many requests were queued then, None where that is not known.
    """

    times: Mapping[str, Estimate]
    why_not: str = ""
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """How long a change is on probation, how to observe it, how wrong the shadows may be."""

    lasting_s: float
    sample: Observe
    wrong_ratio: float

    def window(self, handed_s: float) -> tuple[float, float]:
        """Return the stretch that is judged: after the restart has settled."""
        start_s = handed_s + SETTLE_RATIO * self.lasting_s
        return start_s, start_s + self.lasting_s

    def is_over(self, decided_s: float, now_s: float) -> bool:
        """Whether it is time to give up on a change of back then."""
        return now_s > decided_s + MAX_GUARD_TIMES * self.lasting_s

    def judge(
        self,
        decided_s: float,
        handed_s: float,
        old: EngineLimits,
        new: EngineLimits,
        restarted: Sequence[str],
    ) -> GuardDecision:
        """Return the verdict on a change after which these engines have restarted already.

        Raises: TunerError if Prometheus does not answer.
        """
        sample = self.sample(*self.window(handed_s), (old, new))
        if sample.live.covered_ratio >= MIN_COVERED and not sample.live.is_there:
            return GuardDecision(GuardVerdict.WORSE, "the server shows no metrics any more")
        if sample.live.restarted_s is not None:
            return self._after_restart(sample.live, decided_s, old, restarted)
        if reason := _too_little(sample):
            return GuardDecision(GuardVerdict.UNKNOWN, reason)
        before, after = sample.predicted.get(old), sample.predicted.get(new)
        if not isinstance(before, Measurement) or not isinstance(after, Measurement):
            return GuardDecision(
                GuardVerdict.UNKNOWN, sample.why_not or "its traffic cannot be replayed"
            )
        return self._judged(sample.live, before, after, self.bias_before(decided_s, old))

    def _after_restart(
        self, live: Live, decided_s: float, old: EngineLimits, restarted: Sequence[str]
    ) -> GuardDecision:
        """Return what a restart means: the guard begins again, or it is one of many."""
        # The queue that a restart leaves is not the configuration's doing.
        verdict, why = GuardVerdict.UNKNOWN, "the server was up again only then"
        if again := set(restarted).intersection(live.anew):
            before = self._sample_before(decided_s, old).live
            verdict, why = kept_restarting(again, before)
        return GuardDecision(verdict, why, live.restarted_s, live.anew)

    def _judged(
        self, live: Live, before: Measurement, after: Measurement, bias: Bias
    ) -> GuardDecision:
        if queue := longer_queue(live.waiting, bias.waiting, (before, after)):
            return GuardDecision(GuardVerdict.WORSE, queue)
        if bias.why_not:
            return GuardDecision(GuardVerdict.UNKNOWN, bias.why_not)
        return compared(live, before, after, self.wrong_ratio, bias.times)

    def bias_before(self, decided_s: float, old: EngineLimits) -> Bias:
        """Return how the old configuration did before the change against its prediction.

        Raises: TunerError if Prometheus does not answer.
        """
        sample = self._sample_before(decided_s, old)
        measured = sample.predicted.get(old)
        reason = _too_little(sample)
        if not reason and sample.live.restarted_s is not None:
            reason = "the server restarted then"
        if not reason and not isinstance(measured, Measurement):
            reason = sample.why_not or "its traffic cannot be replayed"
        waiting = sample.live.waiting
        if reason or not isinstance(measured, Measurement):
            why = f"{old} has no measure of the time before the change: {reason}"
            return Bias({}, why, waiting)
        return replace(bias_of(sample.live, measured, old, self.wrong_ratio), waiting=waiting)

    def _sample_before(self, decided_s: float, old: EngineLimits) -> GuardSample:
        """Return the stretch before the change that the time after it is compared with."""
        return self.sample(decided_s - self.lasting_s, decided_s, (old,))


def kept_restarting(again: Collection[str], before: Live) -> tuple[GuardVerdict, str]:
    """Return what it says of a change that engines restart again and again since, and why."""
    if before.covered_ratio < MIN_COVERED or not before.is_there:
        why = "it keeps restarting, and nobody knows whether it did before the change"
        return GuardVerdict.UNKNOWN, why
    if before.restarted_s is not None or not set(again).isdisjoint(before.anew):
        return GuardVerdict.UNKNOWN, "it keeps restarting, as it did before the change"
    return GuardVerdict.WORSE, "it keeps restarting, and did not before the change"


def longer_queue(
    waiting: float | None, before: float | None, predicted: Sequence[Measurement]
) -> str:
    """Return how much longer the queue is than it was and would be, empty where it is not."""
    if waiting is None or before is None:
        return ""
    expected = max(one.queue_depth.mean for one in predicted)
    if waiting <= max(MIN_QUEUED, QUEUE_TIMES * before, QUEUE_TIMES * expected):
        return ""
    return (
        f"{short(waiting)} requests wait in the mean, {short(before)} did before the change "
        f"and {short(expected)} were predicted to"
    )


def bias_of(live: Live, measured: Measurement, old: EngineLimits, wrong_ratio: float) -> Bias:
    """Return how a server does against its prediction, and whether that can be trusted."""
    tail = tail_statistic(min(live.requests, measured.completed))
    told = partial(_predicted, measured)
    ratios: dict[str, Estimate] = {}
    for metric, times, took in _beside(
        live, tail, told, measured.requests_per_s, ("was", "finished")
    ):
        if _is_off(times, wrong_ratio):
            return Bias({}, _off(old, took, wrong_ratio))
        ratios[metric] = times
    return Bias(ratios)


def compared(
    live: Live,
    old: Measurement,
    new: Measurement,
    wrong_ratio: float,
    bias: Mapping[str, Estimate],
) -> GuardDecision:
    """Return whether live metrics are worse than predicted, beyond their intervals.

    Where the new configuration was meant to be worse in one metric, as a throughput that costs
    latency, it is compared with its own prediction there.
    """
    tail = tail_statistic(min(live.requests, old.completed, new.completed))
    told_per_s = min(old.requests_per_s, new.requests_per_s)
    messages = []
    for metric, times, words in _beside(
        live, tail, partial(_slower, old, new), told_per_s, ("is", "finish")
    ):
        if _low(_ratio(times, bias.get(metric, _AS_PREDICTED), metric)) > 1 + wrong_ratio:
            of = "" if metric == RATE else f", on the same {live.requests:,} requests"
            return GuardDecision(GuardVerdict.WORSE, f"{words}{of}{_allowed(bias, metric)}")
        messages.append(words)
    return GuardDecision(GuardVerdict.AGREES, "; ".join(messages))


def _beside(
    live: Live,
    tail: str,
    told: Callable[[str], Estimate | None],
    told_per_s: float,
    verbs: tuple[str, str],
) -> Iterator[tuple[str, Estimate, str]]:
    """Yield each known metric, how many times as slow as predicted it is, and both in words."""
    does, finish = verbs
    for metric, name in ((MEAN, MEAN), (TAIL, tail)):
        observed, predicted = _observed(live, name), told(name)
        if observed is not None and predicted is not None:
            was, expected = _latency_text(observed), _latency_text(predicted)
            words = f"e2e_{name} {does} {was}, predicted {expected}"
            yield metric, _ratio(observed, predicted, metric), words
    words = (
        f"{short(live.requests_per_s)} requests/s {finish}, predicted were {short(told_per_s)}"
    )
    # Of a predicted rate chance is that of the live one.
    yield RATE, _ratio(Estimate(told_per_s, None, None, 1), _rate_of(live), RATE), words


def _too_little(sample: GuardSample) -> str:
    """Return why a stretch cannot carry a verdict, empty where it can."""
    if sample.live.covered_ratio < MIN_COVERED:
        return f"Prometheus scraped {sample.live.covered_ratio:.0%} of the time only"
    if sample.live.requests < MIN_REQUESTS:
        return f"{sample.live.requests} requests finished, {MIN_REQUESTS} are needed"
    for measured in sample.predicted.values():
        if isinstance(measured, Measurement) and measured.completed < MIN_REQUESTS:
            return f"the traffic holds {measured.completed} requests, too few to replay"
    return ""


def _observed(live: Live, name: str) -> Estimate | None:
    """Return the mean or a quantile of the live latency; None where it has no interval."""
    if name != MEAN:
        return live.e2e_quantile(QUANTILES[name])
    mean = live.mean_e2e
    return mean if mean is not None and mean.has_interval else None


def _predicted(measured: Measurement, name: str) -> Estimate | None:
    """Return the same of the predicted one; None where it has none, or no end."""
    spread = measured.latencies["e2e_s"]
    if spread is None:
        return None
    predicted = spread.mean if name == MEAN else spread.quantiles[name]
    return predicted if math.isfinite(predicted.value) else None


def _slower(old: Measurement, new: Measurement, name: str) -> Estimate | None:
    """Return the worse of two predictions."""
    both = [_predicted(measured, name) for measured in (old, new)]
    known = [one for one in both if one is not None]
    return max(known, key=lambda one: one.value) if len(known) == len(both) else None


def _rate_of(live: Live) -> Estimate:
    """Return the rate at which requests finished, with what chance does to so many."""
    n = live.requests
    value, half = live.requests_per_s, 2 / math.sqrt(n)
    return Estimate(value, value * math.exp(-half), value * math.exp(half), n)


def _ratio(one: Estimate, other: Estimate, metric: str) -> Estimate:
    """Return one over the other, with its interval.

    Chance in two means is independent, and what they are off by adds up as squares do. The ends
    of a tail are bounds of its bucket, and it may lie at one of them in both.

    >>> ratio = _ratio(Estimate(6.0, 5.0, 8.0, 9), Estimate(2.0, 1.0, 2.5, 9), TAIL)
    >>> ratio.value, round(ratio.low, 6), round(ratio.high, 6)
    (3.0, 2.0, 8.0)
    """
    value = one.value / other.value
    down = _log(one.value, _low(one)), _log(_high(other), other.value)
    up = _log(_high(one), one.value), _log(other.value, _low(other))
    lower, upper = (sum(p) if metric == TAIL else math.hypot(*p) for p in (down, up))
    return Estimate(
        value, value * math.exp(-lower), value * math.exp(upper), min(one.n, other.n)
    )


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 and math.isfinite(high) else math.inf


def _is_off(times: Estimate, wrong_ratio: float) -> bool:
    """Return whether a server was surely further from its prediction than the stated error."""
    return _low(times) > 1 + wrong_ratio or _high(times) < 1 / (1 + wrong_ratio)


def _low(estimate: Estimate) -> float:
    return estimate.value if estimate.low is None else estimate.low


def _high(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high


def _latency_text(latency: Estimate) -> str:
    """Return a latency with its interval as text.

    >>> _latency_text(Estimate(1.5, 1.0, 2.0, 9)), _latency_text(Estimate(1.5, None, None, 9))
    ('1.5 s (1 … 2)', '1.5 s')
    """
    if latency.low is None or latency.high is None:
        return f"{short(latency.value)} s"
    return f"{short(latency.value)} s ({short(latency.low)} … {short(latency.high)})"


def _off(old: EngineLimits, took: str, wrong_ratio: float) -> str:
    return (
        f"before the change {old} was further from its prediction than the profile's error of "
        f"{wrong_ratio:.0%}: {took}; tune calibrate corrects the profile"
    )


def _allowed(bias: Mapping[str, Estimate], metric: str) -> str:
    """Return how far it was from its prediction before the change, as text."""
    if metric not in bias:
        return ""
    return f", and before the change {bias[metric].value:.2f} times as slow as predicted"
