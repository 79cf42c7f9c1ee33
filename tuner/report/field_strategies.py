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
from tuner.report.words import NOTHING, metric_name, plain, seconds, times
from tuner.search.objective import RATE
from tuner.search.trials import read_metric

TITLE = "The strategies of the field"
_LATENCIES = ("e2e_p50", "e2e_p99", "ttft_p50", "ttft_p99")
_COLOURS = {"recorded": LIVE, "uniform": SHADOW, "saturation": CHOSEN}
_NAMES = {"uniform": "uniform lengths", "saturation": "all requests at once"}

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
    every = [row for rows in compared.values() for row in rows]
    if every and every[0].window:
        how = "predicted, none was measured" if every[0].engine == "shadow" else "measured live"
        sentences.append(f"Every number here was {how}: {every[0].window}.")
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


def _name(which: str, rows: Sequence[SavedStrategy]) -> str:
    """Return what a kind of traffic is called; as recorded it comes at a load."""
    load = rows[0].load if rows else 1.0
    return _NAMES.get(
        which, "the recorded load" if load == 1 else f"{times(load)} the recorded load"
    )


def _plot(anchor: str, compared: Compared, metric: str) -> Plot:
    names = [row.strategy for row in next(iter(compared.values()))]
    traces: list[dict[str, Any]] = []
    values: list[float] = []
    for which, rows in compared.items():
        name = _name(which, rows)
        measured = [read_metric(row.measurement or {}, metric) for row in rows]
        values += [value for value in measured if value is not None]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": names,
                "x": measured,
                "customdata": [_shown(metric, value) for value in measured],
                "hovertemplate": f"%{{y}}, {name}: %{{customdata}}<extra></extra>",
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
        sentences.append(f"{metric_name(metric)} with {_name(which, rows)}: {each}.")
    return " ".join(sentences)


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{plain(value)}/s" if metric == RATE else seconds(value)


def _table(which: str, rows: Sequence[SavedStrategy]) -> Table:
    heads = (
        *("strategy", "seqs/tokens", "requests/s", *map(metric_name, _LATENCIES)),
        *("running, mean", "state"),
    )
    return Table(
        f"strategies-{which}",
        f"With {_name(which, rows)}",
        heads,
        tuple(_row(row) for row in rows),
    )


def _row(row: SavedStrategy) -> tuple[Cell, ...]:
    measured = row.measurement or {}
    running = (measured.get("running") or {}).get("mean")
    return (
        Cell(row.strategy),
        Cell(str(row.limits)),
        number(read_metric(measured, RATE), plain),
        *(number(read_metric(measured, name), seconds) for name in _LATENCIES),
        number(running, plain),
        Cell(row.failure or ("queue grew" if measured.get("sustained") is False else "")),
    )
