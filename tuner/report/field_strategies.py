"""The strategies of the field beside the answer, where `tune compare` kept them for the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.report.parts import (
    CHOSEN,
    LIVE,
    SHADOW,
    Cell,
    Plot,
    Section,
    Table,
    axis,
    layout,
    number,
    seconds_axis,
)
from tuner.report.run_files import RunFiles, SavedStrategy
from tuner.report.words import NOTHING, metric_name, plain, seconds
from tuner.search.objective import RATE
from tuner.search.trials import read_metric

TITLE = "The strategies of the field"
_LATENCIES = ("e2e_p50", "e2e_p99", "ttft_p50", "ttft_p99")
_COLOURS = {"recorded": LIVE, "uniform": SHADOW, "saturation": CHOSEN}
_NAMES = {
    "recorded": "the recorded load",
    "uniform": "uniform lengths",
    "saturation": "all requests at once",
}

Compared = Mapping[str, Sequence[SavedStrategy]]


def strategies(run: RunFiles) -> Section | None:
    """Return the comparison of strategies, None where none was kept."""
    compared = run.strategies
    if not compared:
        return None
    sentences = [
        "Each strategy served the same requests: one at a time, on one engine and on several "
        "that share its device; batches that wait for their slowest answer; continuous "
        "batching as vLLM comes, and as tuned."
    ]
    if "uniform" in compared:
        sentences.append(
            "With every length replaced by the mean (uniform), the same strategies look "
            "different: that is what even test data would have claimed."
        )
    plots = (
        _plot("strategies-rate", compared, RATE),
        _plot("strategies-tail", compared, "e2e_p99"),
    )
    tables = tuple(_table(name, rows) for name, rows in compared.items())
    return Section("strategies", TITLE, tuple(sentences), plots=plots, tables=tables)


def _plot(anchor: str, compared: Compared, metric: str) -> Plot:
    names = [row.strategy for row in next(iter(compared.values()))]
    traces: list[dict[str, Any]] = []
    values: list[float] = []
    for which, rows in compared.items():
        measured = [read_metric(row.measurement or {}, metric) for row in rows]
        values += [value for value in measured if value is not None]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _NAMES.get(which, which),
                "y": names,
                "x": measured,
                "marker": {"color": _COLOURS.get(which, LIVE)},
            }
        )
    title = metric_name(metric)
    along = axis(title) if metric == RATE else seconds_axis(title, values)
    return Plot(
        anchor,
        f"{title} by strategy",
        _text(compared, metric),
        traces,
        layout(xaxis=along, yaxis=axis("", autorange="reversed"), barmode="group"),
    )


def _text(compared: Compared, metric: str) -> str:
    """Return the picture's numbers in a sentence for each kind of lengths."""
    sentences = []
    for which, rows in compared.items():
        each = ", ".join(
            f"{row.strategy} {_shown(metric, read_metric(row.measurement or {}, metric))}"
            for row in rows
        )
        sentences.append(f"{metric_name(metric)} with {_NAMES.get(which, which)}: {each}.")
    return " ".join(sentences)


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{plain(value)}/s" if metric == RATE else seconds(value)


def _table(which: str, rows: Sequence[SavedStrategy]) -> Table:
    heads = (
        *("strategy", "seqs/tokens", "requests/s", *map(metric_name, _LATENCIES)),
        *("running, mean", "why"),
    )
    return Table(
        f"strategies-{which}",
        f"With {_NAMES.get(which, which)}",
        heads,
        tuple(_row(row) for row in rows),
    )


def _row(row: SavedStrategy) -> tuple[Cell, ...]:
    measured = row.measurement or {}
    rate = read_metric(measured, RATE)
    running = (measured.get("running") or {}).get("mean")
    return (
        Cell(row.strategy),
        Cell(str(row.limits)),
        number(rate, NOTHING if rate is None else plain(rate)),
        *(
            number(value, seconds(value))
            for value in (read_metric(measured, name) for name in _LATENCIES)
        ),
        number(running, NOTHING if running is None else plain(running)),
        Cell(row.failure or ""),
    )
