"""Latency against throughput, a picture for each latency that matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.replay.slo import Slo
from tuner.report.parts import (
    CHOSEN,
    INK,
    LIVE,
    SHADOW,
    WORSE,
    Plot,
    Section,
    axis,
    layout,
    scatter,
    seconds_axis,
)
from tuner.report.points import (
    Point,
    frontier,
    live_points,
    loads_words,
    ranked_points,
    shadow_points,
    with_values,
)
from tuner.report.run_files import RunFiles
from tuner.report.words import counted, listed, metric_name, quantity, seconds
from tuner.run.result import RunResult
from tuner.search.objective import RATE

# A sentence that names more points than these is not read: ours.
_MAX_NAMES = 8
# Half of the narrowest axis of rates as a share of the rate: ours, what replays differ by.
_MIN_SPAN = 0.05


def tradeoff(run: RunFiles) -> Section:
    """Return the pictures of all configurations."""
    title = "Latency against throughput"
    result = run.result
    if not live_points(result) and not shadow_points(result):
        return Section("tradeoff", title, ("No configuration was replayed to its end.",))
    slos = [Slo.parse(slo) for slo in result.slos]
    names = dict.fromkeys([f"e2e_{result.tail}", *(slo.name for slo in slos)])
    plots = [_plot(run, name, [slo for slo in slos if slo.name == name]) for name in names]
    drawn = tuple(plot for plot in plots if plot is not None)
    return Section("tradeoff", title, tuple(_sentences(run)), plots=drawn)


def _sentences(run: RunFiles) -> list[str]:
    result = run.result
    sentences = [
        "Each point is a configuration, named max_num_seqs/max_num_batched_tokens. Right and "
        "low is better; the line joins those that no other beats in both."
    ]
    if live_points(result) and shadow_points(result) and not run.predicted_same_requests:
        sentences.append(
            "Filled points were measured and open ones predicted. The two replayed different "
            "stretches of the trace, so a filled point does not lie where its open one does."
        )
    sentences += loads_words([*live_points(result), *shadow_points(result)])
    left_out = sum(t.phase.is_on_windows and not t.is_whole for t in result.trials)
    if left_out:
        sentences.append(
            f"{counted(left_out, 'more replay')} failed or could no longer win and stopped "
            "early: see the table of trials."
        )
    return sentences


def _plot(run: RunFiles, latency: str, slos: Sequence[Slo]) -> Plot | None:
    result = run.result
    live = with_values(live_points(result), latency, RATE)
    shadow = with_values(shadow_points(result), latency, RATE)
    best = frontier(with_values(ranked_points(result), latency, RATE), latency)
    every = [*live, *shadow]
    if not every:
        return None
    traces = [
        *_cloud(shadow, latency, "predicted", SHADOW, "diamond-open"),
        *_cloud(live, latency, "measured", LIVE, "circle"),
        *_line(best, latency),
        *_bounds(slos, every),
        *_ringed(run, every, latency),
    ]
    heights = [p.needed(latency) for p in every] + [slo.bound_s for slo in slos]
    return Plot(
        f"tradeoff-{latency}",
        f"{metric_name(latency)} against requests per second",
        _text(result, latency, best, slos, every),
        traces,
        layout(
            xaxis=axis("requests/s", range=_rate_range(every)),
            yaxis=seconds_axis(metric_name(latency), heights),
        ),
        height_px=440,
    )


def _rate_range(points: Sequence[Point]) -> list[float]:
    """Return the axis of rates, never so narrow that noise looks like a difference."""
    rates = [p.needed(RATE) for p in points]
    low, high = min(rates), max(rates)
    room = max(0.06 * (high - low), _MIN_SPAN * high - (high - low) / 2)
    return [max(0.0, low - room), high + room]


def _cloud(
    points: Sequence[Point], latency: str, name: str, colour: str, symbol: str
) -> list[dict[str, Any]]:
    if not points:
        return []
    words = [
        [str(p.limits), seconds(p.needed(latency)), p.how, quantity(RATE, p.needed(RATE))]
        for p in points
    ]
    marker = {"color": colour, "symbol": symbol, "size": 9}
    hover = "%{customdata[0]}: %{customdata[1]}, %{customdata[3]}, %{customdata[2]}"
    more = {"customdata": words, "hovertemplate": f"{hover}<extra></extra>", "marker": marker}
    return [_drawn(points, latency, "markers", name=name, **more)]


def _drawn(points: Sequence[Point], latency: str, mode: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as layout
    """Return points as Plotly draws them: their rate to the right, their latency upwards."""
    rates, latencies_s = ([p.needed(name) for p in points] for name in (RATE, latency))
    return scatter(mode, rates, latencies_s, **more)


def _line(best: Sequence[Point], latency: str) -> list[dict[str, Any]]:
    if len(best) < 2:
        return []
    line = {"color": INK, "width": 1.5}
    return [_drawn(best, latency, "lines", name="frontier", line=line, hoverinfo="skip")]


def _bounds(slos: Sequence[Slo], points: Sequence[Point]) -> list[dict[str, Any]]:
    line = {"color": WORSE, "width": 2, "dash": "dash"}
    return [
        scatter(
            "lines",
            _rate_range(points),
            [slo.bound_s, slo.bound_s],
            name=f"SLO {metric_name(slo.name)} {seconds(slo.bound_s)}",
            line=line,
            hoverinfo="name",
        )
        for slo in slos
    ]


def _ringed(run: RunFiles, points: Sequence[Point], latency: str) -> list[dict[str, Any]]:
    """Mark the current configuration and the one whose gain is shown."""
    wanted = [("current", run.current, "square-open", INK)]
    if run.shown != run.current:
        wanted.append((run.shown_as, run.shown, "circle-open", CHOSEN))
    made: list[dict[str, Any]] = []
    for name, limits, symbol, colour in wanted:
        marker = {"color": colour, "symbol": symbol, "size": 17, "line": {"width": 2}}
        more = {"name": f"{name} {limits}", "marker": marker, "hoverinfo": "skip"}
        if mine := [p for p in points if p.limits == limits][:1]:
            made.append(_drawn(mine, latency, "markers", **more))
    return made


def _text(
    result: RunResult,
    latency: str,
    best: Sequence[Point],
    slos: Sequence[Slo],
    points: Sequence[Point],
) -> str:
    measured = len({p.limits for p in points if p.is_live})
    predicted = len({p.limits for p in points if not p.is_live})
    kinds = [f"{measured} measured"] * bool(measured) + [f"{predicted} predicted"] * bool(
        predicted
    )
    sentences = [
        f"{counted(len({p.limits for p in points}), 'configuration')}, {listed(kinds)}."
    ]
    if best:
        kind = "measured" if best[0].is_live else "predicted"
        named = [
            f"{p.limits} with {quantity(RATE, p.needed(RATE))} and {seconds(p.needed(latency))}"
            for p in best[:_MAX_NAMES]
        ]
        more = f" and {len(best) - _MAX_NAMES} more" if len(best) > _MAX_NAMES else ""
        sentences.append(f"On the {kind} frontier: {listed(named)}{more}.")
    ranked = with_values(ranked_points(result), latency)
    how = "measured" if ranked and ranked[0].is_live else "predicted"
    for slo in slos:
        holding = sum(p.needed(latency) <= slo.bound_s for p in ranked)
        sentences.append(
            f"{slo.name} of at most {seconds(slo.bound_s)} holds at {holding} of the "
            f"{len(ranked)} that were {how}."
        )
    return " ".join(sentences)
