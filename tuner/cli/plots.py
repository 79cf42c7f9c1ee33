"""Small plots for a terminal. Owns plotext."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import plotext

from tuner.stats import Floats
from tuner.traffic.traces import Trace

# Rows of a plot: ours, two fit a usual terminal with the description above them.
HEIGHT = 12
# Columns of a plot: ours, wider bars show no more.
MIN_WIDTH, MAX_WIDTH = 40, 100
_BINS = 60
_TICKS = 5

Ticks = Callable[[float, float], dict[float, str]]
"""From the ends of an axis, the places of its marks and what stands there."""


def trace_plots(trace: Trace, width: int) -> list[str]:
    """Return plots of arrivals over time and of both lengths, `width` characters wide."""
    plots = []
    if trace.duration_s > 0:
        counts, edges = np.histogram(trace.due_s, bins=_BINS)
        rates = counts / np.diff(edges)
        plots.append(_bars("arrivals per second, over seconds", edges, rates, _seconds, width))
    for name, tokens in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens)):
        counts, edges = np.histogram(np.log10(tokens), bins=_BINS // 2)
        heights = counts.astype(np.float64)
        plots.append(_bars(f"requests by {name} tokens", edges, heights, _powers, width))
    return plots


def _bars(title: str, edges: Floats, heights: Floats, ticks: Ticks, width: int) -> str:
    middles = (edges[:-1] + edges[1:]) / 2
    places = ticks(float(edges[0]), float(edges[-1]))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(max(MIN_WIDTH, min(width, MAX_WIDTH)), HEIGHT)
    plotext.bar(middles.tolist(), heights.tolist(), width=1.0)
    plotext.xticks(list(places), list(places.values()))
    plotext.title(title)
    return str(plotext.uncolorize(plotext.build())).rstrip()


def _seconds(low: float, high: float) -> dict[float, str]:
    """Return round numbers between two ends, about five.

    >>> _seconds(0.0, 170.0)
    {0.0: '0', 50.0: '50', 100.0: '100', 150.0: '150'}
    """
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    first = math.ceil(low / step)
    places = [step * at for at in range(first, math.floor(high / step) + 1)]
    return {place: f"{place:,.10g}" for place in places}


def _powers(low: float, high: float) -> dict[float, str]:
    """Return numbers of tokens between two powers of ten.

    >>> list(_powers(1.3, 2.7).values())
    ['20', '50', '100', '200', '500']
    """
    numbers = [
        times * 10**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for times in (1, 2, 5)
    ]
    within = [n for n in numbers if low - 1e-9 <= math.log10(n) <= high + 1e-9]
    return {math.log10(n): f"{n:,}" for n in within}
