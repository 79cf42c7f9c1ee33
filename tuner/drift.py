"""Whether traffic has moved away from what a configuration was tuned for, and by how much.

Compares two sketches: arrival rate, burstiness, lengths, requests in flight, prefix reuse. Each
shift is an effect with an interval, for with a million requests every difference is beyond
chance; it counts only if it is also large enough to be felt. Whether a re-tune would pay is
decided by replay, in `check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from tuner.drift_looks import Look, Unit, looks
from tuner.errors import UsageError
from tuner.stats import Estimate, difference, resampled
from tuner.traffic.sketch import TrafficSketch

ERROR_RATE: Final = 0.05
"""How often unshifted traffic may be called shifted, over all looks together (Bonferroni)."""

LEAST_REQUESTS: Final = 200
"""Ours: ten of them lie beyond a p95."""

LEAST_S: Final = 60.0
"""Ours: shorter traffic is one burst or one lull."""

LEAST_FILLED: Final = 16
"""Ours: blocks with requests; of fewer no spread can be told."""


@dataclass(frozen=True, slots=True)
class Shift:
    """One property of traffic, before and now.

    `effect` is now / before - 1, or the difference of two shares; its interval is wider than a
    95 % one, as one of several. `least` is the effect from which on it is felt.
    """

    name: str
    unit: Unit
    baseline: float
    now: float
    effect: Estimate
    least: float

    @property
    def matters(self) -> bool:
        """Whether it is beyond chance and large enough to be felt."""
        low, high = self.effect.low, self.effect.high
        is_beyond = low is not None and high is not None and (low > 0 or high < 0)
        return is_beyond and abs(self.effect.value) >= self.least

    @property
    def text(self) -> str:
        """Say it in a line."""
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
            "least": self.least,
            "matters": self.matters,
        }


def _signed(value: float | None, unit: Unit) -> str:
    if value is None:
        return "?"
    return f"{value:+.1%}" if unit is Unit.RATIO else f"{100 * value:+.1f} pts"


@dataclass(frozen=True, slots=True)
class Drift:
    """All shifts between two sketches, and what could not be compared.

    `too_little` says why nothing can be said, or is empty.
    """

    shifts: tuple[Shift, ...]
    not_compared: tuple[str, ...]
    too_little: str = ""

    @property
    def felt(self) -> tuple[Shift, ...]:
        """The shifts that matter, the largest first."""
        found = [shift for shift in self.shifts if shift.matters]
        return tuple(sorted(found, key=lambda shift: -abs(shift.effect.value) / shift.least))


class Side(StrEnum):
    """Which traffic is spoken of."""

    BASELINE = "baseline"
    NOW = "present"


def compare(baseline: TrafficSketch, now: TrafficSketch, seed: int = 0) -> Drift:
    """Return how traffic has shifted.

    Raises: UsageError if one records arrivals and the other requests in flight.
    """
    if baseline.is_closed != now.is_closed:
        names = {True: "requests in flight", False: "arrivals"}
        raise UsageError(
            f"the baseline records {names[baseline.is_closed]}, the present traffic "
            f"{names[now.is_closed]}: the two do not compare",
            "check traffic of the kind that the run was tuned for",
        )
    reasons = (*_lacks(baseline, Side.BASELINE), *_lacks(now, Side.NOW))
    if reasons:
        return Drift((), (), "; ".join(reasons))
    asked, not_compared = looks(baseline, now)
    rng = np.random.default_rng(seed)
    shifts, left_out = [], list(not_compared)
    for look in asked:
        shift = _shift(look, baseline, now, 1 - ERROR_RATE / len(asked), rng)
        if shift is None:
            left_out.append(f"{look.name}: no value in one of the two")
        else:
            shifts.append(shift)
    return Drift(tuple(shifts), tuple(left_out))


def _lacks(sketch: TrafficSketch, side: Side) -> Iterator[str]:
    """Say why a sketch is too small to be compared."""
    if sketch.requests < LEAST_REQUESTS:
        yield f"the {side} traffic has {sketch.requests} requests, {LEAST_REQUESTS} are needed"
    elif sketch.duration_s < LEAST_S:
        yield f"the {side} traffic lasts {sketch.duration_s:.0f} s, {LEAST_S:.0f} s are needed"
    elif np.count_nonzero(sketch.counts) < LEAST_FILLED:
        filled = np.count_nonzero(sketch.counts)
        yield (
            f"the {side} traffic comes in {filled} of {sketch.blocks} stretches of "
            f"{sketch.block_s:g} s, {LEAST_FILLED} are needed"
        )


def _shift(
    look: Look,
    baseline: TrafficSketch,
    now: TrafficSketch,
    confidence: float,
    rng: np.random.Generator,
) -> Shift | None:
    """Return one shift, None where one of the two has no value."""
    old = resampled(look.baseline, baseline.blocks, rng)
    new = resampled(look.now, now.blocks, rng)
    if math.isnan(old.value) or math.isnan(new.value):
        return None
    found = difference(new, old, confidence)
    n = min(baseline.blocks, now.blocks)
    if look.unit is Unit.POINTS:
        return Shift(
            look.name, look.unit, old.value, new.value, Estimate(*found, n), look.least
        )
    effect, low, high = (math.expm1(min(log, 700.0)) for log in found)
    values = math.exp(old.value), math.exp(new.value)
    return Shift(look.name, look.unit, *values, Estimate(effect, low, high, n), look.least)
