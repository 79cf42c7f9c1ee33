"""How many like steps begin before something else may happen.

Each takes a little longer than the one before, as the context that it attends to grows. Taking
them is left to `fast_forward`.
"""

from __future__ import annotations

import math


def steps_within(horizon_s: float, first_s: float, growth_s: float) -> int:
    """Return how many steps begin before the horizon, the first one in any case.

    >>> steps_within(0.0, 0.02, 0.0), steps_within(0.05, 0.02, 0.0)
    (1, 3)
    """
    if not math.isfinite(horizon_s):
        return 1 << 40
    if horizon_s <= 0:
        return 1
    # The root of growth/2 n^2 + (first - growth/2) n = horizon, in the form that bears a growth
    # of nearly nothing.
    slope_s = first_s - growth_s / 2
    before = 2 * horizon_s / (slope_s + math.sqrt(slope_s * slope_s + 2 * growth_s * horizon_s))
    # One more begins for the last that ends before the horizon; the root is not exact.
    steps = max(1, math.ceil(before))
    while steps > 1 and _ends_s(steps - 1, first_s, growth_s) >= horizon_s:
        steps -= 1
    while _ends_s(steps, first_s, growth_s) < horizon_s:
        steps += 1
    return steps


def _ends_s(steps: int, first_s: float, growth_s: float) -> float:
    return steps * first_s + growth_s * (steps * (steps - 1) / 2)
