"""A replay over time beside another: arrivals, running, waiting, KV use, preemptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.replay.series import ReplayTimelines, TimelineRecord
from tuner.report.parts import (
    BETTER,
    INK,
    LEGEND,
    LIVE,
    SHADOW,
    WORSE,
    Plot,
    Section,
    axis,
    layout,
    scatter,
    stacked,
    y_axis,
)
from tuner.report.run_files import RunFiles
from tuner.report.words import counted, limits_words, percent, plain, times
from tuner.search.objective import Objective

TITLE = "The replay over time"
_PANELS = ("arrivals/s", "requests", "KV cache used", "preemptions/s")
# Bins of what is counted: ours, wide enough to hold several arrivals of a usual trace.
_COUNT_BINS = 100
# How far after a window the next begins, as a multiple of its length: ours.
_GAP = 1.05


def over_time(run: RunFiles) -> Section:
    """Return the timelines of the current configuration and of the one that is recommended."""
    nearest = run.result.nearest
    name, limits = (run.shown_as, run.shown) if nearest is None else ("nearest", nearest.limits)
    found = {} if limits == run.current else {name: _replay(run, limits)}
    found["current"] = _replay(run, run.current)
    replays = {name: replay for name, replay in found.items() if replay is not None}
    if not replays:
        return Section("over-time", TITLE, ("This run kept no timelines of its replays.",))
    drawn = list(replays.values())
    tops = _tops(drawn)
    longest_s = max(_length_s(_spans_s(replay)) for replay in drawn)
    plots = tuple(_plot(name, replay, tops, longest_s) for name, replay in replays.items())
    sentences = _sentences(run, drawn)
    missing = found.keys() - replays
    sentences.extend(f"No timeline of the {name} configuration was kept." for name in missing)
    return Section("over-time", TITLE, tuple(sentences), plots=plots)


def _sentences(run: RunFiles, replays: Sequence[ReplayTimelines]) -> list[str]:
    """Say how the pictures are to be read, and why there is one alone."""
    scales = " Both pictures have the same scales." if len(replays) > 1 else ""
    sentences = [
        "Running and waiting requests are means over each bin; KV use is the largest in it."
        f"{scales}"
    ]
    if run.result.feasible and run.shown == run.current:
        sentences.append(
            "The current configuration is what is recommended, so it stands alone."
        )
    is_predicted = any(replay.engine == "shadow" for replay in replays)
    if is_predicted and run.result.objective is Objective.CAPACITY:
        load = times(run.result.provenance.options.get("load", 1.0))
        sentences.append(
            f"Drawn is the load of the run, {load} the recorded one, and not the largest that "
            "each configuration bears."
        )
    if is_predicted:
        sentences.append("These replays were predicted, not measured.")
    if any(len(replay.windows) > 1 for replay in replays):
        sentences.append(
            "The windows of the trace stand one after the other, with a gap between."
        )
    return sentences


def _replay(run: RunFiles, limits: EngineLimits) -> ReplayTimelines | None:
    """Return the configuration's replay, a live one where there is one."""
    mine = [r for r in run.timelines if r.limits == limits and _is_drawable(r)]
    return min(mine, key=lambda r: r.engine != "live", default=None)


def _is_drawable(replay: ReplayTimelines) -> bool:
    """Whether every series of every window has the same bins, and there are some."""
    return bool(replay.windows) and all(
        len(w.arrivals) > 0
        and w.bin_s > 0
        and {len(w.running), len(w.waiting), len(w.kv_peak_ratio), len(w.preemptions)}
        == {len(w.arrivals)}
        for w in replay.windows
    )


@dataclass(frozen=True, slots=True)
class _Series:
    """One line of a panel: its values window by window, in bins of the given widths."""

    name: str
    panel: int
    colour: str
    dash: str
    parts: tuple[tuple[float, ...], ...]
    widths_s: tuple[float, ...]


def _series(windows: Sequence[TimelineRecord]) -> list[_Series]:
    """Return what is drawn; what is counted stands in coarser bins than levels."""
    times = [math.ceil(len(w.arrivals) / _COUNT_BINS) for w in windows]
    fine = tuple(w.bin_s for w in windows)
    wide = tuple(k * w.bin_s for k, w in zip(times, windows, strict=True))
    arrivals = [_sums(w.arrivals, k) for k, w in zip(times, windows, strict=True)]
    preempted = [_sums(w.preemptions, k) for k, w in zip(times, windows, strict=True)]
    levels = (
        ("running", 1, LIVE, "solid", tuple(tuple(w.running) for w in windows)),
        ("waiting", 1, SHADOW, "dot", tuple(tuple(w.waiting) for w in windows)),
        ("KV cache used", 2, BETTER, "solid", tuple(tuple(w.kv_peak_ratio) for w in windows)),
    )
    return [
        _Series("arrivals/s", 0, INK, "solid", _per_s(arrivals, wide), wide),
        *(_Series(*level, fine) for level in levels),
        _Series("preemptions/s", 3, WORSE, "solid", _per_s(preempted, wide), wide),
    ]


def _sums(counts: Sequence[float], times: int) -> tuple[float, ...]:
    return tuple(sum(counts[i : i + times]) for i in range(0, len(counts), times))


def _per_s(
    counts: Sequence[Sequence[float]], widths_s: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """Return counts as rates, so that bins of other widths stand beside each other."""
    return tuple(tuple(n / s for n in ns) for ns, s in zip(counts, widths_s, strict=True))


def _tops(replays: Sequence[ReplayTimelines]) -> tuple[float, ...]:
    """Return how high each panel must reach, so that all replays share their scales."""
    drawn = [line for replay in replays for line in _series(replay.windows)]
    return tuple(
        max(
            (v for line in drawn if line.panel == panel for part in line.parts for v in part),
            default=0.0,
        )
        for panel in range(len(_PANELS))
    )


def _spans_s(replay: ReplayTimelines) -> list[float]:
    return [w.bin_s * len(w.arrivals) for w in replay.windows]


def _length_s(spans_s: Sequence[float]) -> float:
    """Return how long the windows are one after the other, with the gaps between."""
    return _GAP * sum(spans_s[:-1]) + spans_s[-1]


def _plot(name: str, replay: ReplayTimelines, tops: Sequence[float], longest_s: float) -> Plot:
    """Return the picture of a replay, on scales that reach the tops and the longest replay."""
    spans_s = _spans_s(replay)
    traces = [_line(line, spans_s) for line in _series(replay.windows)]
    made = []
    for panel, top in zip(_PANELS, tops, strict=True):
        # A level that is zero throughout still needs an axis of some height.
        room = [0, 1.05 * top or 1.0]
        form = ".0%" if panel == "KV cache used" and top >= 0.1 else None
        made.append(axis(panel, range=room, tickformat=form, nticks=4))
    axes = stacked(made)
    limits = replay.limits
    how = "predicted" if replay.engine == "shadow" else "measured"
    return Plot(
        f"over-time-{name.split(maxsplit=1)[0]}",
        f"{name.capitalize()}: {limits_words(limits)} ({how})",
        _text(replay),
        traces,
        layout(
            xaxis=axis("seconds of the replay", anchor="y4", range=[0, longest_s]),
            legend={**LEGEND, "y": axes["yaxis2"]["domain"][1]},
            **axes,
        ),
        height_px=620,
    )


def _line(line: _Series, spans_s: Sequence[float]) -> dict[str, Any]:
    """Return a line with a hole between one window and the next."""
    times: list[float | None] = []
    values: list[float | None] = []
    offset_s = 0.0
    for part, width_s, span_s in zip(line.parts, line.widths_s, spans_s, strict=True):
        hole = [None] if times else []
        times += [*hole, *(round(offset_s + i * width_s, 6) for i in range(len(part)))]
        values += [*hole, *part]
        offset_s += _GAP * span_s
    return scatter(
        "lines",
        times,
        values,
        name=line.name,
        yaxis=y_axis(line.panel),
        line={"color": line.colour, "width": 1.5, "dash": line.dash, "shape": "hv"},
        hovertemplate=f"%{{y:.3g}} {line.name} at %{{x:.4g}} s<extra></extra>",
        connectgaps=False,
        showlegend=line.panel == 1,
    )


def _text(replay: ReplayTimelines) -> str:
    windows = replay.windows
    arrivals = round(sum(sum(w.arrivals) for w in windows))
    total_s = sum(_spans_s(replay))
    peak_per_s = max(rate for part in _series(windows)[0].parts for rate in part)
    running = [level for w in windows for level in w.running]
    waiting = [level for w in windows for level in w.waiting]
    fullest = max(level for w in windows for level in w.kv_peak_ratio)
    preempted = round(sum(sum(w.preemptions) for w in windows))
    return (
        f"{counted(arrivals, 'request')} in {plain(total_s)} s, at most {plain(peak_per_s)}/s. "
        f"Up to {plain(max(running))} ran and up to {plain(max(waiting))} waited (means of a "
        f"bin); the KV cache was {percent(fullest)} full at most; "
        f"{counted(preempted, 'preemption') if preempted else 'no preemption'}."
    )
