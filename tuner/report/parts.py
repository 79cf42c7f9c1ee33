"""What a page is made of: sections with sentences, plots and tables.

Plain values without markup. How they look is decided by the template; text becomes HTML there
and is escaped there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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

    `mark` names how the cell looks; `heat` is how much of the map's colour it has, 0 to 1.
    """

    text: str
    order: float | str | None = None
    mark: str = ""
    heat: float | None = None


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
class Section:
    """A part of the page under its own heading."""

    anchor: str
    title: str
    says: tuple[str, ...] = ()
    bullets: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = field(default_factory=tuple)
    tables: tuple[Table, ...] = field(default_factory=tuple)


def number(value: float | None, text: str) -> Cell:
    """Return a cell with a number, which sorts by its value."""
    return Cell(text, value, "number")
