"""Clocks with coarse ticks: how to know one, and how to undo its false bursts.

A recorder that rounds arrivals to whole seconds makes bursts that no user made. What lies
between two ticks is lost; spreading puts the requests there evenly at random, with a seed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.arrays import Floats
from tuner.errors import TraceError
from tuner.traces import Trace

MANY_ROWS = 50
"""Ours: below it, equal lengths and shared instants happen by chance or by hand."""

_TICK_S = 0.010
"""Ours: a coarser clock delays a request by more than a decode step; a finer one does not."""

_TIED_RATIO = 0.1
"""Ours: one request in ten shares its instant with another."""

_ON_TICK_RATIO = 0.95
"""Ours: leaves room for late rows; gaps of a free clock are near a multiple 4 % of the time."""

_TICK_TOLERANCE = 0.02
"""Ours: Mooncake's 3 s clock strays by 3 ms, a twentieth of this."""


def tied_ratio(due_s: Floats) -> float:
    """Return the share of requests that share their instant with an earlier one."""
    return 1 - (int(np.count_nonzero(np.diff(due_s))) + 1) / len(due_s)


def clock_tick_s(due_s: Floats) -> float | None:
    """Return the tick of a quantised clock, or None for a fine one.

    Such a clock shows many shared instants, and gaps that are whole ticks.
    """
    gaps = np.diff(due_s)
    steps = gaps[gaps > 0]
    if len(due_s) < MANY_ROWS or tied_ratio(due_s) < _TIED_RATIO or steps.size < 2:
        return None
    tick_s = float(np.quantile(steps, 0.05))
    if tick_s < _TICK_S:
        return None
    ticks = steps / tick_s
    if (np.abs(ticks - np.round(ticks)) <= _TICK_TOLERANCE).mean() < _ON_TICK_RATIO:
        return None
    return float(np.median(steps[np.round(ticks) == 1]))


def spread(trace: Trace, seed: int) -> Trace:
    """Return the trace with every request moved by less than a tick of its clock, at random.

    Recorded latencies and who waits for whom stay. The choice is remarked on.

    Raises: TraceError if the clock is not quantised.
    """
    tick_s = clock_tick_s(trace.due_s)
    if tick_s is None:
        raise TraceError(
            f"{trace.source}: the clock shows no coarse ticks, there is nothing to spread",
            "leave --spread out",
        )
    moved_s = trace.due_s + np.random.default_rng(seed).uniform(0.0, tick_s, len(trace))
    order = np.argsort(moved_s, kind="stable")
    told = f"arrivals were spread over the clock's ticks of {tick_s:.3g} s, seed {seed}"
    spread_out = trace.slice_rows(order)
    due_s = moved_s[order]
    return replace(
        spread_out,
        due_s=due_s - due_s[0],
        zero_s=trace.zero_s + float(due_s[0]),
        notes=trace.notes.with_remark(told),
    )
