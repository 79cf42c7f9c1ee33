"""Small plots for a terminal. Owns plotext."""

from __future__ import annotations

import numpy as np
import plotext

from tuner.traces import Trace

# Rows of a plot: ours, two fit a usual terminal with the description above them.
HEIGHT = 12
_BINS = 60


def trace_plots(trace: Trace, width: int) -> list[str]:
    """Return plots of arrivals over time and of both lengths, `width` characters wide."""
    plots = []
    if trace.duration_s > 0:
        counts, edges = np.histogram(trace.due_s, bins=_BINS)
        rates = counts / np.diff(edges)
        plots.append(_bars("arrivals per second over time, s", edges[:-1], rates, width))
    for name, tokens in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens)):
        counts, edges = np.histogram(np.log10(tokens), bins=_BINS // 2)
        title = f"requests by {name} tokens, log10"
        plots.append(_bars(title, edges[:-1], counts.astype(np.float64), width))
    return plots


def _bars(title: str, places: np.ndarray, heights: np.ndarray, width: int) -> str:
    """Return one bar plot as text."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(max(40, min(width, 100)), HEIGHT)
    plotext.bar(places.tolist(), heights.tolist(), width=1.0)
    plotext.title(title)
    return str(plotext.build())
