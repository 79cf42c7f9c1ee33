"""What the answer gains over the current configuration, metric by metric."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tuner.report.parts import (
    BETTER,
    INK,
    WORSE,
    Cell,
    Plot,
    Section,
    Table,
    axis,
    layout,
    number,
    scatter,
)
from tuner.report.points import Point
from tuner.report.run_files import RunFiles, shadow_error
from tuner.report.words import (
    change,
    counted,
    interval,
    limits_words,
    listed,
    metric_name,
    quantity,
    sentence,
)
from tuner.run.evidence import MetricChange
from tuner.run.result import RunResult
from tuner.search.judging import TIE_LOSS
from tuner.search.objective import is_rate, moved
from tuner.search.trials import Phase

_COLOURS = {"better": BETTER, "worse": WORSE}


def gain(run: RunFiles) -> Section:
    """Return the comparison with the current configuration."""
    title = "Gain over the current configuration"
    rows = run.result.evidence
    if run.shown == run.current or not rows:
        return Section("gain", title, (_nothing(run),))
    sentences = [
        f"{limits_words(run.shown)} beside the current {limits_words(run.current)}. "
        f"{_how(rows, run.result)}",
        *_cold(run),
    ]
    meanings = [_meaning(row, shadow_error(run.result) or 0.0) for row in rows]
    table = _table(rows, meanings, f"Current and {run.shown_as} values")
    return Section(
        "gain", title, tuple(sentences), plots=(_plot(rows, meanings),), tables=(table,)
    )


def _nothing(run: RunFiles) -> str:
    if not run.result.feasible:
        nearest = run.result.nearest
        missed = "meet the SLOs" if nearest is None else nearest.missed
        return f"Nothing is likely to {missed}, so that nothing is recommended that could gain."
    advice = run.result.recommendation
    if advice is not None and run.shown == run.current:
        return sentence(f"the current configuration is what is recommended: {advice.why}")
    return "The two were not replayed on the same requests, so there is no gain to show."


def _how(rows: Sequence[MetricChange], result: RunResult) -> str:
    rounds = max(row.rounds for row in rows)
    text = "; 90% interval" if any(row.change_interval for row in rows) else ""
    if rounds == 0:
        return f"Both were predicted by the shadow{result.at_which_load}{text}."
    trace, times = result.provenance.trace, counted(rounds, "round")
    of = f" The answer goes by {trace.predicted}." if trace.is_predicted_of_more else ""
    return f"Both were replayed in turns on the same requests, {times}{text}.{of}"


def _meaning(row: MetricChange, wrong: float) -> str:
    """Return whether a change is for the better, and whether it is one that matters.

    `wrong` is by how much a prediction without an interval may be off.
    """
    ratio = row.moved_ratio
    if row.rounds == 0 and row.change_interval is None:
        if abs(ratio) <= wrong:
            return "within the shadow's error"
    elif row.change_interval is None:
        return "too few rounds to tell"
    else:
        low, high = row.change_interval
        if low is None or high is None:
            return "within noise"
        if low > -TIE_LOSS and high < TIE_LOSS:
            return "equal"
        if low <= 0 <= high:
            return "within noise"
    return "better" if (ratio > 0) == is_rate(row.metric) else "worse"


def _table(rows: Sequence[MetricChange], meanings: Sequence[str], caption: str) -> Table:
    made = []
    for row, meaning in zip(rows, meanings, strict=True):
        shown = (
            Cell(metric_name(row.metric)),
            number(row.before, partial(quantity, row.metric)),
            number(row.after, partial(quantity, row.metric)),
            number(row.moved_ratio, change),
            Cell(interval(row.change_interval), mark="number"),
            number(row.rounds, lambda rounds: str(rounds) if rounds else "predicted"),
            Cell(meaning),
        )
        made.append(shown)
    heads = ("metric", "current", "then", "change", "interval", "rounds", "meaning")
    return Table("gain-table", caption, heads, tuple(made))


def _plot(rows: Sequence[MetricChange], meanings: Sequence[str]) -> Plot:
    shown = rows[::-1]
    names = [metric_name(row.metric) for row in shown]
    percents = [100 * row.moved_ratio for row in shown]
    colours = [_COLOURS.get(meaning, INK) for meaning in meanings[::-1]]
    trace = scatter(
        "markers",
        percents,
        names,
        marker={"size": 10, "color": colours},
        error_x=_bars(shown, percents),
        hovertemplate="%{y}: %{x:+.1f}%<extra></extra>",
        showlegend=False,
    )
    zero = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper"}
    return Plot(
        "gain-plot",
        "Change of each metric in percent, with its interval",
        sentence(f"against the current configuration: {_text(rows, meanings)}"),
        [trace],
        layout(
            xaxis=axis("change, %", ticksuffix="%"),
            yaxis={"automargin": True},
            shapes=[{**zero, "line": {"color": INK, "width": 1, "dash": "dot"}}],
        ),
        height_px=90 + 34 * len(rows),
    )


def _text(rows: Sequence[MetricChange], meanings: Sequence[str]) -> str:
    """Return every change as text, with what they all mean once."""
    changes = [f"{metric_name(row.metric)} {change(row.moved_ratio)}" for row in rows]
    if len(set(meanings)) == 1:
        return f"{listed(changes)}; all of them {meanings[0]}"
    return listed([f"{c} ({m})" for c, m in zip(changes, meanings, strict=True)])


def _bars(rows: Sequence[MetricChange], percents: Sequence[float]) -> dict[str, Any]:
    """Return error bars; an interval without an end shows none."""
    up, down = [], []
    for row, centre in zip(rows, percents, strict=True):
        low, high = row.change_interval or (None, None)
        is_closed = low is not None and high is not None
        up.append(100 * high - centre if is_closed and high is not None else 0)
        down.append(centre - 100 * low if is_closed and low is not None else 0)
    bars = {"array": up, "arrayminus": down, "symmetric": False, "thickness": 1.5, "width": 4}
    return {"type": "data", **bars, "color": INK}


def _cold(run: RunFiles) -> list[str]:
    """Return what engines showed that were started as they would be deployed."""
    cold = run.result.confirmed_cold
    if cold is None:
        return []
    tried = [t for t in run.result.trials if t.phase is Phase.COLD and t.measurement]
    metric = cold.metric
    ours, theirs = (
        Point(
            limits,
            is_live=True,
            measurements=tuple(t.measurement or {} for t in tried if t.limits == limits),
        )
        for limits in (run.shown, run.current)
    )
    by = "" if cold.ratio is None else f" ({change(moved(metric, cold.ratio - 1))})"
    return [
        f"On engines started cold with these values, as they would be deployed, "
        f"{metric_name(metric)} was {quantity(metric, ours.value(metric))}, with the current "
        f"ones {quantity(metric, theirs.value(metric))}{by}."
    ]
