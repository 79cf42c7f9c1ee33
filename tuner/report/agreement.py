"""Live against shadow: how far predictions lie from what was measured.

Only the same requests compare. Where the run kept such pairs they are shown; otherwise what the
shadow predicted of its own stretches stands beside the race, with a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.report.parts import (
    BETTER,
    CHOSEN,
    INK,
    LIVE,
    Cell,
    Plot,
    Section,
    Table,
    axis,
    layout,
    number,
    scatter,
)
from tuner.report.points import live_points, shadow_points
from tuner.report.run_files import RunFiles, shadow_error, shadow_error_words
from tuner.report.words import change, counted, listed, metric_name, percent, quantity
from tuner.run.records import Compared
from tuner.search.trials import COMPARED

TITLE = "Live against shadow"
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
_COLOURS = (LIVE, CHOSEN, BETTER, INK)


def agreement(run: RunFiles) -> Section:
    """Return the comparison of predictions with measurements."""
    stored = run.result.live_against_shadow
    is_same = bool(stored) or run.predicted_same_requests
    pairs = stored or _pairs(run)
    if not pairs:
        return Section("agreement", TITLE, (_nothing(run),))
    sentences = [_text(pairs, shadow_error(run.result))]
    if not is_same:
        sentences.append(
            "The shadow replayed other stretches of the trace than the race did, so these "
            "differences hold both its error and the difference of the traffic."
        )
    plot, table = _plot(pairs, shadow_error(run.result)), _table(pairs)
    return Section("agreement", TITLE, tuple(sentences), plots=(plot,), tables=(table,))


def _nothing(run: RunFiles) -> str:
    if run.result.method == "shadow":
        wrong = shadow_error_words(run.result)
        known = f" It is {wrong}." if wrong else ""
        return f"Nothing was measured in this run: the shadow of a profile spoke alone.{known}"
    if shadow_points(run.result):
        return "No configuration was both predicted and measured."
    return "No shadow spoke in this run: every number was measured."


def _pairs(run: RunFiles) -> list[Compared]:
    """Return the metrics of what was both predicted and measured."""
    shadow_by_limits = {p.limits: p for p in shadow_points(run.result)}
    return [
        Compared(**asdict(point.limits), metric=metric, live=live, shadow=shadow)
        for point in live_points(run.result)
        if (other := shadow_by_limits.get(point.limits)) is not None
        for metric in COMPARED
        if (live := point.value(metric)) and (shadow := other.value(metric))
    ]


def _off(pair: Compared) -> float:
    return pair.shadow / pair.live - 1


def _text(pairs: Sequence[Compared], wrong: float | None) -> str:
    by_metric: dict[str, list[float]] = {}
    for pair in pairs:
        by_metric.setdefault(pair.metric, []).append(abs(_off(pair)))
    sentences = [
        f"{metric_name(metric)} by {percent(median(offs))}"
        for metric, offs in by_metric.items()
    ]
    pairs_of = len({pair.limits for pair in pairs})
    text = (
        f"At {counted(pairs_of, 'configuration')} the shadow was off, in the middle, in "
        f"{listed(sentences)}."
    )
    return text if wrong is None else f"{text} Its stated error is {percent(wrong)}."


def _plot(pairs: Sequence[Compared], wrong: float | None) -> Plot:
    settings = sorted({pair.limits for pair in pairs})
    metrics = list(dict.fromkeys(pair.metric for pair in pairs))
    traces = [
        _marks([p for p in pairs if p.metric == metric], metric, settings, i)
        for i, metric in enumerate(metrics)
    ]
    shapes = [_across(0.0, "solid")]
    if wrong is not None:
        shapes += [_across(100 * wrong, "dot"), _across(-100 * wrong, "dot")]
    names = [str(limits) for limits in settings]
    # A tenth of room, so that no mark and no line stands on the edge.
    reach = 110 * max(wrong or 0.0, *(abs(_off(pair)) for pair in pairs))
    return Plot(
        "agreement-plot",
        "Predicted against measured, difference in percent",
        _worst(pairs),
        traces,
        layout(
            xaxis=axis(
                "max_num_seqs/max_num_batched_tokens",
                tickvals=list(range(len(names))),
                ticktext=names,
                range=[-0.5, len(names) - 0.5],
            ),
            yaxis=axis("predicted / measured, %", ticksuffix="%", range=[-reach, reach]),
            shapes=shapes,
        ),
        height_px=360,
    )


def _marks(
    pairs: Sequence[Compared], metric: str, settings: Sequence[EngineLimits], at: int
) -> dict[str, Any]:
    # Metrics of one configuration stand beside each other, or they would hide one another.
    shift = 0.12 * (at - 1)
    symbol, colour = _SYMBOLS[at % len(_SYMBOLS)], _COLOURS[at % len(_COLOURS)]
    return scatter(
        "markers",
        [settings.index(pair.limits) + shift for pair in pairs],
        [100 * _off(pair) for pair in pairs],
        name=metric_name(metric),
        customdata=[[str(pair.limits)] for pair in pairs],
        hovertemplate="%{customdata[0]}: %{y:+.1f}%",
        marker={"size": 10, "symbol": symbol, "color": colour},
    )


def _across(y: float, dash: str) -> dict[str, Any]:
    line = {"color": INK, "width": 1, "dash": dash}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _worst(pairs: Sequence[Compared]) -> str:
    worst = max(pairs, key=lambda pair: abs(_off(pair)))
    predicted, measured = (quantity(worst.metric, v) for v in (worst.shadow, worst.live))
    return (
        f"Furthest off: {metric_name(worst.metric)} at {worst.limits}, predicted {predicted}, "
        f"measured {measured} ({change(_off(worst))}). Dotted lines: the error that the shadow "
        "had stated."
    )


def _table(pairs: Sequence[Compared]) -> Table:
    rows = tuple(
        (
            Cell(f"{pair.limits}"),
            Cell(metric_name(pair.metric)),
            number(pair.live, partial(quantity, pair.metric)),
            number(pair.shadow, partial(quantity, pair.metric)),
            number(_off(pair), change),
        )
        for pair in sorted(pairs, key=lambda pair: pair.limits)
    )
    heads = ("seqs/tokens", "metric", "measured", "predicted", "difference")
    return Table("agreement-table", "Measured and predicted values", heads, rows)
