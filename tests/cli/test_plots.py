"""Plots of a trace fit the terminal and bear numbers that people read."""

from __future__ import annotations

import pytest

from support.traffic import a_trace
from tuner.cli.plots import HEIGHT, trace_plots


@pytest.mark.parametrize("width", [20, 60, 300])
def test_plots_fit_and_bear_round_numbers(width: int) -> None:
    trace = a_trace([0, 1, 2, 50, 170], prompt=[10, 20, 200, 900, 5000], output=7)
    arrivals, prompts, outputs = trace_plots(trace, width)
    for plot in (arrivals, prompts, outputs):
        lines = plot.splitlines()
        assert len(lines) <= HEIGHT
        assert max(map(len, lines)) <= max(40, min(width, 100))
        assert "\x1b" not in plot
        assert "█" in plot
    assert arrivals.splitlines()[-1].split() == ["0", "50", "100", "150"]
    assert prompts.splitlines()[-1].split()[:2] == ["10", "20"]
    assert "prompt tokens" in prompts


def test_a_trace_of_one_instant_has_no_plot_over_time() -> None:
    assert len(trace_plots(a_trace([0, 0]), 80)) == 2
