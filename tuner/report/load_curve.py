"""Latency and throughput against load: the current configuration, and the best of each load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.report.parts import (
    CHOSEN,
    INK,
    LOG_SPAN,
    WORSE,
    Plot,
    Section,
    axis,
    layout,
    note,
    scatter,
    seconds_axis,
    stacked,
    upright,
    y_axis,
)
from tuner.report.words import listed, metric_name, quantity, sentence, times
from tuner.run.loads.surface import Reached, Surface
from tuner.search.objective import RATE

OFFERED = "offered_per_s"


@dataclass(frozen=True, slots=True)
class _Line:
    """What one line shows: a setting at each load, which may be another at each."""

    name: str
    short: str
    colour: str
    dash: str
    reached: tuple[Reached, ...]


def load_curve(surface: Surface) -> Section:
    """Return the section; its loads are multiples of the recorded one."""
    lines, loads = _lines(surface), [at.load for at in surface.loads]
    until = tuple(sentence(_until(line, loads)) for line in lines)
    title = "Latency and throughput against load"
    plot = _plot(surface, lines, loads)
    return Section("load", title, bullets=until, plots=(plot,))


def _lines(surface: Surface) -> tuple[_Line, _Line]:
    best = tuple(at.best for at in surface.loads)
    current = tuple(at.reached(surface.current) for at in surface.loads)
    return (
        _Line("best of each load", "best", CHOSEN, "solid", best),
        _Line(f"current {surface.current}", "current", INK, "dash", current),
    )


def _until(line: _Line, loads: Sequence[float]) -> str:
    """Return up to which load a line holds, and what ends it."""
    ends = _ends(line)
    if not ends:
        return f"{line.name}: holds at every load up to {times(loads[-1])}"
    first = min(ends)
    before = f"holds up to {times(loads[first - 1])}; " if first else ""
    ends_at = [f"{', '.join(faults)} from {times(loads[at])}" for at, faults in ends.items()]
    return f"{line.name}: {before}{'; '.join(ends_at)}"


def _ends(line: _Line) -> dict[int, list[str]]:
    """Return what of a line no longer holds, by the number of the first load at which."""
    ends: dict[int, list[str]] = {}
    seen: set[str] = set()
    for at, reached in enumerate(line.reached):
        if new := [fault for fault in reached.faults if fault not in seen]:
            ends[at] = new
            seen.update(new)
    return ends


def _plot(surface: Surface, lines: Sequence[_Line], loads: Sequence[float]) -> Plot:
    latencies = (f"e2e_{surface.tail}", f"ttft_{surface.tail}")
    panels = (*latencies, RATE)
    traces: list[dict[str, Any]] = []
    axes = []
    for i, metric in enumerate(panels):
        traces += [_curve(line, loads, metric, y_axis(i), is_named=i == 0) for line in lines]
        known = [
            v for line in lines for r in line.reached if (v := r.value(metric)) is not None
        ]
        title = metric_name(metric)
        made = axis(title, rangemode="tozero") if metric == RATE else seconds_axis(title, known)
        axes.append(made)
    traces.append(_offered(lines[0], loads))
    shapes, notes = _marks(lines, loads)
    across = axis("load, as a multiple of the recorded one", anchor="y3", **_ticks(loads))
    return Plot(
        "load-plot",
        f"{metric_name(latencies[0])}, {metric_name(latencies[1])} and requests/s by load",
        _text(lines, loads, (latencies[0], RATE)),
        traces,
        layout(xaxis=across, shapes=shapes, annotations=notes, **stacked(axes)),
        height_px=600,
    )


def _ticks(loads: Sequence[float]) -> dict[str, Any]:
    """Return where the axis of loads is labelled: at each of a few, or as Plotly likes."""
    span = 0.03 * (loads[-1] - loads[0] or 1.0)
    ends = [loads[0] - span, loads[-1] + span]
    if len(loads) > LOG_SPAN:
        return {"range": ends}
    return {"range": ends, "tickvals": list(loads), "ticktext": [times(x) for x in loads]}


def _curve(
    line: _Line, loads: Sequence[float], metric: str, where: str, *, is_named: bool
) -> dict[str, Any]:
    """Return a line with a cross where the setting does not hold."""
    texts = [
        [str(r.limits), quantity(metric, r.value(metric)), r.fault or "holds"]
        for r in line.reached
    ]
    symbols = ["circle" if r.holds else "x" for r in line.reached]
    return scatter(
        "lines+markers",
        loads,
        [r.value(metric) for r in line.reached],
        name=line.name,
        showlegend=is_named,
        yaxis=where,
        customdata=texts,
        hovertemplate="%{x:g} \N{MULTIPLICATION SIGN}, %{customdata[0]}: %{customdata[1]}, "
        "%{customdata[2]}<extra></extra>",
        line={"color": line.colour, "width": 2, "dash": line.dash},
        marker={"color": line.colour, "size": 8, "symbol": symbols},
    )


def _offered(line: _Line, loads: Sequence[float]) -> dict[str, Any]:
    """Return the offered rate, which a rate reaches where the load is sustained."""
    return scatter(
        "lines",
        loads,
        [(r.figures or {}).get(OFFERED) for r in line.reached],
        name="offered",
        yaxis="y3",
        hovertemplate="%{x:g} \N{MULTIPLICATION SIGN}: offered %{y:.3g}/s<extra></extra>",
        line={"color": WORSE, "width": 1.5, "dash": "dot"},
    )


def _marks(
    lines: Sequence[_Line], loads: Sequence[float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return upright lines where something no longer holds, and what it is."""
    shapes: list[dict[str, Any]] = []
    notes = []
    middle = (loads[0] + loads[-1]) / 2
    for line in lines:
        for at, faults in _ends(line).items():
            side = -1 if loads[at] > middle else 1
            beside = {"xanchor": "right" if side < 0 else "left", "xshift": 6 * side}
            # One below the other, so that they do not cover each other.
            below = {"yanchor": "top", "yshift": -16 * len(shapes)}
            text = f"{line.short}: {', '.join(faults)}"
            notes.append(note(loads[at], text, font={"size": 12}, **beside, **below))
            shapes.append(upright(loads[at], line.colour, "dot"))
    return shapes, notes


def _text(lines: Sequence[_Line], loads: Sequence[float], metrics: Sequence[str]) -> str:
    parts = []
    for i, load in enumerate(loads):
        texts = [
            f"{line.name} {listed([_named(line.reached[i], m) for m in metrics])}"
            for line in lines
        ]
        parts.append(f"{times(load)}: {', '.join(texts)}")
    return f"Predicted; a cross is a setting that does not hold. {'; '.join(parts)}."


def _named(reached: Reached, metric: str) -> str:
    value = quantity(metric, reached.value(metric))
    return value if metric == RATE else f"{metric_name(metric)} {value}"
