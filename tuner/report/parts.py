"""What a page is made of: sections with sentences, plots and tables, and the axes of plots.

Plain values without markup: text is escaped where it becomes HTML, in the template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from tuner.report.words import NOTHING


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure for Plotly, and the sentence that says the same with its numbers.

    Plotly reads some markup in the text it draws, so `traces` and `layout` hold words of ours
    and numbers, never text of the user's.
    """

    anchor: str
    title: str
    says: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height_px: int = 340

    @property
    def spec(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        layout = {**self.layout, "height": self.height_px}
        return {"anchor": self.anchor, "data": self.traces, "layout": layout}


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table's cell; `order` is what a column is sorted by, None without one.

    `mark` names how the cell looks; `heat` is how much of the map's colour it has, 0 to 1;
    `note` is a second line, `unseen` is read aloud and not shown.
    """

    text: str
    order: float | str | None = None
    mark: str = ""
    heat: float | None = None
    note: str = ""
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row is its header."""

    anchor: str
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_sortable: bool = False
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Explorer:
    """A map that follows a load and a metric, and the figures of the setting that is picked.

    The tables show it at the load numbered `start`, by the first metric, the best one picked;
    `data` is what the page's script puts in their place.
    """

    anchor: str
    loads: tuple[str, ...]
    start: int
    metrics: tuple[str, ...]
    says: str
    map: Table
    figures: Table
    legend: tuple[tuple[str, str], ...]
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under its own heading."""

    anchor: str
    title: str
    says: tuple[str, ...] = ()
    bullets: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    explorer: Explorer | None = None


def number(value: float | None, write: Callable[[Any], str]) -> Cell:
    """Return a cell with a number as it is written, which sorts by its value."""
    return Cell(NOTHING if value is None else write(value), value, "number")


_Key = TypeVar("_Key")


def heats(values: Mapping[_Key, float]) -> dict[_Key, float]:
    """Return how near to the best each is where less is better: 1 the best, 0 the worst.

    By ratio, and halved at the middle one, so that one hopeless value does not make all others
    look alike. What is not above 0 or has no end has no heat.

    >>> heats({"a": 1.0, "b": 2.0, "c": 4.0})
    {'a': 1.0, 'b': 0.5, 'c': 0.25}
    """
    logs = {key: math.log(value) for key, value in values.items() if 0 < value < math.inf}
    least = min(logs.values(), default=0.0)
    usual = median(logs.values()) - least if logs else 0.0
    scale = usual or max(logs.values(), default=0.0) - least
    return {
        key: 1.0 if scale <= 0 else 2 ** -((value - least) / scale)
        for key, value in logs.items()
    }


LIVE = "#2f7ed8"
SHADOW = "#c26a1b"
BETTER = "#2b8a4b"
WORSE = "#d1495b"
CHOSEN = "#8b62c9"
INK = "#7b8794"

_CLEAR = "rgba(0,0,0,0)"
LEGEND = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "bgcolor": _CLEAR}
_HOVER_BACKGROUND = "#20262d"
_HOVER_INK = "#ffffff"
# Ticks as 5ms, 200ms or 2s.
_SECONDS = {"tickformat": "~s", "ticksuffix": "s"}
# A level that varies more than this many times is drawn on a logarithmic axis: ours.
LOG_SPAN = 20.0
# Room between the panels of a stack, as a share of its height: ours, what a title needs.
_GAP = 0.07


def layout(**more: Any) -> dict[str, Any]:  # noqa: ANN401 - Plotly's attributes are of any type
    """Return a layout on the page's own background."""
    common: dict[str, Any] = {
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 60, "r": 20, "t": 40, "b": 50},
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": _HOVER_BACKGROUND,
            "bordercolor": _HOVER_BACKGROUND,
            # Names whole: Plotly cuts them after 15 characters by itself.
            "namelength": -1,
            "font": {"color": _HOVER_INK},
        },
        "legend": LEGEND,
    }
    return {**common, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as layout
    """Return an axis with its title."""
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def seconds_axis(title: str, values: list[float]) -> dict[str, Any]:
    """Return an axis for durations, logarithmic where they span too much for another."""
    if not _is_wide(values):
        return axis(title, rangemode="tozero", **_SECONDS)
    return _log_axis(title, values, _tick)


def number_axis(title: str, values: list[float]) -> dict[str, Any]:
    """Return an axis for numbers, logarithmic as that for durations."""
    return _log_axis(title, values, "{:g}".format) if _is_wide(values) else axis(title)


def _is_wide(values: list[float]) -> bool:
    """Return whether values that all are above 0 span too much for an even axis."""
    return bool(values) and min(values) > 0 and max(values) > LOG_SPAN * min(values)


def _log_axis(title: str, values: list[float], told: Callable[[float], str]) -> dict[str, Any]:
    ticks = log_ticks(min(values), max(values))
    return axis(title, type="log", tickvals=ticks, ticktext=[told(tick) for tick in ticks])


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from just below the low to just above the high.

    >>> log_ticks(3.0, 45.0)
    [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [float(f"{n}e{power}") for power in range(first, last + 1) for n in (1, 2, 5)]
    below = max((tick for tick in every if tick <= low), default=every[0])
    above = min((tick for tick in every if tick >= high), default=every[-1])
    return [tick for tick in every if below <= tick <= above]


def _tick(value_s: float) -> str:
    return f"{value_s:g}s" if value_s >= 1 else f"{value_s * 1000:g}ms"


def scatter(
    mode: str,
    x: Iterable[object],
    y: Iterable[object],
    **more: Any,  # noqa: ANN401 - as layout
) -> dict[str, Any]:
    """Return a trace of lines or markers."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), **more}


def y_axis(panel: int) -> str:
    """Return what traces call the axis of a panel, counted from 0: y, y2, y3 and so on."""
    return "y" if panel == 0 else f"y{panel + 1}"


def stacked(axes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the axes of panels in a stack, the first on top, by their names in a layout.

    >>> stacked([{"nticks": 4}])
    {'yaxis': {'nticks': 4, 'domain': (0.0, 1.0)}}
    """
    each = (1 - _GAP * (len(axes) - 1)) / len(axes)
    made = {}
    for i, own in enumerate(axes):
        top = 1 - i * (each + _GAP)
        domain = (max(0.0, round(top - each, 6)), round(top, 6))
        made[y_axis(i).replace("y", "yaxis")] = {**own, "domain": domain}
    return made


def note(x: float, text: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as layout
    """Return words at the top of all panels."""
    place = {"x": x, "xref": "x", "y": 1, "yref": "paper"}
    return {**place, "text": text, "showarrow": False, **more}


def upright(x: float, colour: str, dash: str) -> dict[str, Any]:
    """Return a vertical line through all panels."""
    line = {"color": colour, "width": 2, "dash": dash}
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": line,
        "layer": "between",
    }
