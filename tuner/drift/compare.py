"""Whether traffic has moved away from what a configuration was tuned for, and by how much.

Compares two sketches: arrival rate, burstiness, lengths, requests in flight, prefix reuse. Each
shift is an effect with an interval, for with a million requests every difference is beyond
chance; it counts only if it is also large enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

import numpy as np

from tuner.errors import UsageError
from tuner.stats import Estimate, Floats, Ints, Statistic, difference, resampled
from tuner.traffic.sketch import EDGES, LEVEL_EDGES, SLOTS_PER_WINDOW, TrafficSketch

MIN_RATIO: Final = 0.05
"""Ours: a rate or a length that moved by less does not move a best cap by a rung."""

MIN_BURST_RATIO: Final = 0.20
"""Ours: as MIN_RATIO, for a variance, which acts by its root at most."""

MIN_POINTS: Final = 0.02
"""Ours: two in a hundred prompt tokens, less than prefill times vary by."""

MIN_WINDOWS: Final = 8
"""Ours: windows of a burst scale that each of the two must hold."""

MIN_PER_SLOT: Final = 2.0
"""Ours: with fewer requests per slot its count is chance and shows no bursts."""

LOOKBACKS_IN_TRACE: Final = 8.0
"""Ours: how often a lookback must fit, since the first one is left out."""

# A perfectly even stream has no variance, and no logarithm: ours.
_MIN_DISPERSION = 0.05


class Unit(StrEnum):
    """What an effect is: now / before - 1, or the difference of two shares."""

    RATIO = "ratio"
    POINTS = "points"


@dataclass(frozen=True, slots=True)
class DriftFeature:
    """One property of both; statistics of a ratio are logarithms."""

    name: str
    unit: Unit
    min_effect: float
    baseline: Statistic
    now: Statistic


def drift_features(
    baseline: TrafficSketch, now: TrafficSketch
) -> tuple[list[DriftFeature], list[str]]:
    """Return the features that can be compared, and a sentence for each that cannot."""
    features: list[DriftFeature] = []
    missing: list[str] = []
    if not baseline.is_closed:
        features.append(_ratio("arrival_rate", baseline, now, _rate))
        bursts = list(_burst_features(baseline, now))
        features.extend(bursts)
        if not bursts:
            missing.append(
                "burstiness: too few requests, or drawn at random from counts per interval"
            )
    features.extend(_length_features("prompt_tokens", baseline, now))
    features.extend(_length_features("output_tokens", baseline, now))
    features.append(_ratio("in_flight_mean", baseline, now, _mean_level))
    if _is_smeared(baseline, now):
        missing.append("in_flight_p95: arrivals of one of the two are spread within scrapes")
    else:
        features.append(_ratio("in_flight_p95", baseline, now, partial(_level, q=0.95)))
    if not baseline.is_closed:
        reuse = _reuse_feature(baseline, now)
        if isinstance(reuse, DriftFeature):
            features.append(reuse)
        elif reuse:
            missing.append(reuse)
    return features, missing


def _ratio(
    name: str,
    baseline: TrafficSketch,
    now: TrafficSketch,
    of: Callable[[TrafficSketch, Floats], Floats],
) -> DriftFeature:
    return DriftFeature(name, Unit.RATIO, MIN_RATIO, partial(of, baseline), partial(of, now))


def _rate(sketch: TrafficSketch, weights: Floats) -> Floats:
    logs: Floats = np.log(weights @ sketch.counts / (weights.sum(axis=1) * sketch.block_s))
    return logs


def _burst_features(baseline: TrafficSketch, now: TrafficSketch) -> Iterator[DriftFeature]:
    """Yield burstiness at the finest scale that shows it, and at one sixteen times as long."""
    both = (baseline, now)
    # Spreading takes a third of what one scrape shows, and a sixth of what two do.
    drawn_s = max(sketch.resolution_s for sketch in both) * (1 + _is_smeared(*both))
    usable = [
        scale_s
        for scale_s in sorted(baseline.bursts.keys() & now.bursts.keys())
        if scale_s >= drawn_s
        and all(sketch.bursts[scale_s].windows.sum() >= MIN_WINDOWS for sketch in both)
        and all(_per_slot(sketch, scale_s) >= MIN_PER_SLOT for sketch in both)
    ]
    quieter = min(sketch.counts.sum() / (sketch.blocks * sketch.block_s) for sketch in both)
    for scale_s in (s for s in usable if s in (usable[0], 16 * usable[0])):
        statistics = [
            partial(_dispersion, sketch, scale_s=scale_s, quieter_per_s=quieter)
            for sketch in both
        ]
        yield DriftFeature(f"burstiness_{scale_s:g}s", Unit.RATIO, MIN_BURST_RATIO, *statistics)


def _is_smeared(baseline: TrafficSketch, now: TrafficSketch) -> bool:
    """Whether the arrivals of one alone were drawn from counters, evenly within a scrape."""
    is_one_drawn = bool(baseline.sampled_from) != bool(now.sampled_from)
    return is_one_drawn and not baseline.is_closed


def _per_slot(sketch: TrafficSketch, scale_s: float) -> float:
    bursts = sketch.bursts[scale_s]
    return float(bursts.requests.sum() / (bursts.windows.sum() * SLOTS_PER_WINDOW))


def _dispersion(
    sketch: TrafficSketch, weights: Floats, scale_s: float, quieter_per_s: float
) -> Floats:
    """Return the variance of counts over their mean (Poisson: 1), as at the quieter's rate.

    A stream of which every request is kept with probability p has a dispersion so much nearer
    to 1; without that a higher rate alone would look burstier.
    """
    bursts = sketch.bursts[scale_s]
    dispersion = (weights @ bursts.variance) * SLOTS_PER_WINDOW / (weights @ bursts.requests)
    share = quieter_per_s * sketch.blocks * sketch.block_s / sketch.counts.sum()
    thinned: Floats = np.log(np.maximum(1 + share * (dispersion - 1), _MIN_DISPERSION))
    return thinned


def _length_features(
    name: str, baseline: TrafficSketch, now: TrafficSketch
) -> Iterator[DriftFeature]:
    """Yield a length's mean, and its middle and tail.

    Where lengths were drawn from a histogram, middle and tail are shares above a bound of it,
    which the drawing has kept; where a quantile lies within a bucket is invented.
    """

    def table(sketch: TrafficSketch) -> Ints:
        return sketch.prompt if name == "prompt_tokens" else sketch.output

    def mean(sketch: TrafficSketch, weights: Floats) -> Floats:
        total = sketch.prompt_sum if name == "prompt_tokens" else sketch.output_sum
        statistics: Floats = np.log(weights @ total / (weights @ sketch.counts))
        return statistics

    yield _ratio(f"{name}_mean", baseline, now, mean)
    both = (baseline, now)
    if baseline.sampled_from or now.sampled_from:
        # Where lengths lie close together one bound is the nearest to both.
        for bound in dict.fromkeys(_bound_near(table(baseline), q) for q in (0.5, 0.95)):
            shares = [partial(_share_above, table(sketch), bound) for sketch in both]
            yield DriftFeature(f"{name}_above_{bound}", Unit.POINTS, MIN_POINTS, *shares)
        return
    for q in (0.5, 0.95):
        statistics = [partial(_quantile, table(sketch), EDGES, q) for sketch in both]
        yield DriftFeature(f"{name}_p{100 * q:.0f}", Unit.RATIO, MIN_RATIO, *statistics)


def _quantile(table: Ints, edges: Ints, q: float, weights: Floats) -> Floats:
    """Return the logarithm of a quantile, within a bucket as if even in the logarithm."""
    highs = np.log(np.maximum(edges, 0.5))
    # The first bucket holds one value, and so does any between neighbouring whole numbers.
    lows = np.log(np.maximum(np.append(edges[0], edges[:-1]), 0.5))
    single = np.append(True, np.diff(edges) <= 1)
    lows = np.where(single, highs, lows)
    used = np.flatnonzero(table.any(axis=0))
    counts = weights @ table[:, used]
    upto = np.cumsum(counts, axis=1)
    weight = q * upto[:, -1:]
    at = np.argmax(upto >= weight, axis=1)[:, None]
    inside = np.take_along_axis(counts, at, axis=1)
    below = np.take_along_axis(upto, at, axis=1) - inside
    share = np.clip((weight - below) / inside, 0, 1)[:, 0]
    place = used[at[:, 0]]
    logs: Floats = lows[place] + share * (highs - lows)[place]
    return logs


def _bound_near(table: Ints, q: float) -> int:
    """Return the bound of 1, 2, 5, 10, … that lies nearest to a quantile."""
    middle = _quantile(table, EDGES, q, np.ones((1, len(table))))[0]
    bounds = np.array([step * 10**decade for decade in range(7) for step in (1, 2, 5)])
    return int(bounds[np.argmin(np.abs(np.log(bounds) - middle))])


def _share_above(table: Ints, bound: int, weights: Floats) -> Floats:
    counts = weights @ table
    shares: Floats = counts[:, bound < EDGES].sum(axis=1) / counts.sum(axis=1)
    return shares


def _mean_level(sketch: TrafficSketch, weights: Floats) -> Floats:
    middles = (LEVEL_EDGES + np.append(0, LEVEL_EDGES[:-1] + 1)) / 2
    counts = weights @ sketch.in_flight
    logs: Floats = np.log(counts @ middles / counts.sum(axis=1))
    return logs


def _level(sketch: TrafficSketch, weights: Floats, q: float) -> Floats:
    return _quantile(sketch.in_flight, LEVEL_EDGES, q, weights)


def _reuse_feature(baseline: TrafficSketch, now: TrafficSketch) -> DriftFeature | str:
    """Return how much of the prompts came shortly before, or why that is not compared."""
    if baseline.held is None or now.held is None:
        if baseline.held is None and now.held is None:
            return ""
        which = "baseline" if baseline.held is None else "current"
        return f"prefix_reuse: the {which} traffic has no hash ids"
    if bool(baseline.sampled_from) != bool(now.sampled_from):
        which = "baseline" if baseline.sampled_from else "current"
        return f"prefix_reuse: the {which} traffic has only what a server's cache hit"
    shortest_s = min(baseline.duration_s, now.duration_s)
    fitting = [s for s in baseline.held if s * LOOKBACKS_IN_TRACE <= shortest_s]
    both = baseline.held.keys() & now.held.keys()
    usable = sorted(both.intersection(fitting))
    if not usable:
        return f"prefix_reuse: the traffic lasts {shortest_s:.0f} s, too short for any lookback"
    parts = [partial(_reuse, sketch, usable[-1]) for sketch in (baseline, now)]
    return DriftFeature(f"prefix_reuse_within_{usable[-1]:g}s", Unit.POINTS, MIN_POINTS, *parts)


def _reuse(sketch: TrafficSketch, lookback_s: float, weights: Floats) -> Floats:
    """Return the share of prompt tokens that came before, past the first lookback."""
    held = (sketch.held or {})[lookback_s]
    is_warm = np.arange(sketch.blocks) * sketch.block_s >= lookback_s
    warm = weights * is_warm
    shares: Floats = (warm @ held) / (warm @ sketch.prompt_sum)
    return shares


ERROR_RATE: Final = 0.05
"""How often unshifted traffic may be called shifted, over all looks together (Bonferroni).

As long as what is alike in it, as a session is or a rate that wanders, lasts for no more than a
twentieth of either. Of 100 pairs of hours with sessions of four minutes 10 were, of 50 with
sessions of a quarter of an hour, which is too little to tell by, 14.
"""

MIN_REQUESTS: Final = 200
"""Ours: ten of them lie beyond a p95."""

MIN_S: Final = 60.0
"""Ours: shorter traffic is one burst or one lull."""

MIN_FILLED: Final = 16
"""Ours: blocks with requests; fewer have no spread."""


@dataclass(frozen=True, slots=True)
class Shift:
    """One property of traffic, before and now.

    `effect` is now / before - 1, or the difference of two shares; its interval is wider than a
    95 % one, as one of several. `min_effect` is the least effect that matters.
    """

    name: str
    unit: Unit
    baseline: float
    now: float
    effect: Estimate
    min_effect: float

    @property
    def matters(self) -> bool:
        """Whether it is beyond chance and large enough to matter."""
        low, high = self.effect.low, self.effect.high
        is_beyond = low is not None and high is not None and (low > 0 or high < 0)
        return is_beyond and abs(self.effect.value) >= self.min_effect

    @property
    def text(self) -> str:
        """Return the shift as a line."""
        form = ".1%" if self.unit is Unit.POINTS else ",.4g"
        effect, low, high = (
            _signed(v, self.unit)
            for v in (self.effect.value, self.effect.low, self.effect.high)
        )
        mark = "  <-" if self.matters else ""
        return (
            f"{self.name:<26} {self.baseline:>10{form}} -> {self.now:<10{form}} "
            f"{effect:>9}  ({low} … {high}){mark}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the shift for --json."""
        return {
            "name": self.name,
            "unit": str(self.unit),
            "baseline": self.baseline,
            "now": self.now,
            "effect": self.effect.value,
            "interval": [self.effect.low, self.effect.high],
            "least": self.min_effect,
            "matters": self.matters,
        }


def _signed(value: float | None, unit: Unit) -> str:
    if value is None:
        return "?"
    return f"{value:+.1%}" if unit is Unit.RATIO else f"{100 * value:+.1f} pts"


@dataclass(frozen=True, slots=True)
class Drift:
    """All shifts between two sketches, and what could not be compared.

    `too_little` is the reason why nothing could be compared, or empty.
    """

    shifts: tuple[Shift, ...]
    not_compared: tuple[str, ...]
    too_little: str = ""

    @property
    def relevant(self) -> tuple[Shift, ...]:
        """The shifts that matter, the largest first."""
        relevant = [shift for shift in self.shifts if shift.matters]
        return tuple(
            sorted(relevant, key=lambda shift: -abs(shift.effect.value) / shift.min_effect)
        )


def drift_between(baseline: TrafficSketch, now: TrafficSketch, seed: int = 0) -> Drift:
    """Return how traffic has shifted.

    Raises: UsageError if one records arrivals and the other requests in flight.
    """
    if baseline.is_closed != now.is_closed:
        names = {True: "requests in flight", False: "arrivals"}
        raise UsageError(
            f"the baseline records {names[baseline.is_closed]}, the current traffic "
            f"{names[now.is_closed]}: the two do not compare",
            "check traffic of the kind that the run was tuned for",
        )
    reasons = (*_lacks(baseline, "baseline"), *_lacks(now, "current"))
    if reasons:
        return Drift((), (), "; ".join(reasons))
    features, not_compared = drift_features(baseline, now)
    rng = np.random.default_rng(seed)
    shifts, left_out = [], list(not_compared)
    for feature in features:
        shift = _shift(feature, baseline, now, 1 - ERROR_RATE / len(features), rng)
        if shift is None:
            left_out.append(f"{feature.name}: no value in one of the two")
        else:
            shifts.append(shift)
    return Drift(tuple(shifts), tuple(left_out))


def _lacks(sketch: TrafficSketch, side: str) -> Iterator[str]:
    """Yield why the sketch of a side is too small to be compared."""
    if sketch.requests < MIN_REQUESTS:
        yield f"the {side} traffic has {sketch.requests} requests, {MIN_REQUESTS} are needed"
    elif sketch.duration_s < MIN_S:
        yield f"the {side} traffic lasts {sketch.duration_s:.0f} s, {MIN_S:.0f} s are needed"
    elif np.count_nonzero(sketch.counts) < MIN_FILLED:
        filled = np.count_nonzero(sketch.counts)
        yield (
            f"the {side} traffic comes in {filled} of {sketch.blocks} stretches of "
            f"{sketch.block_s:g} s, {MIN_FILLED} are needed"
        )


def _shift(
    feature: DriftFeature,
    baseline: TrafficSketch,
    now: TrafficSketch,
    confidence: float,
    rng: np.random.Generator,
) -> Shift | None:
    """Return one shift, None where one of the two has no value."""
    old = resampled(feature.baseline, baseline.blocks, rng)
    new = resampled(feature.now, now.blocks, rng)
    if math.isnan(old.value) or math.isnan(new.value):
        return None
    effect, low, high = difference(new, old, confidence)
    before, after = old.value, new.value
    if feature.unit is Unit.RATIO:
        effect, low, high = (math.expm1(min(log, 700.0)) for log in (effect, low, high))
        before, after = math.exp(before), math.exp(after)
    found = Estimate(effect, low, high, min(baseline.blocks, now.blocks))
    return Shift(feature.name, feature.unit, before, after, found, feature.min_effect)
