"""Decode time, tail latency and KV-cache usage by max_num_seqs, and where the climb ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.report.parts import (
    CHOSEN,
    INK,
    LIVE,
    SHADOW,
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
from tuner.report.points import Point, loads_words, ranked_points, shadow_points, with_values
from tuner.report.run_files import RunFiles
from tuner.report.words import counted, listed, metric_name, percent, quantity, seconds
from tuner.search.ladder import climb_is_over, same_schedule
from tuner.search.trials import (
    TIE_RATIO,
    Observation,
    Phase,
    Trial,
    leader,
    predictions,
    ranked,
)

DECODE, USAGE = "decode_step_p50", "gpu_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class Stop:
    """The cap at which climbing higher ends, and why."""

    cap: int
    why: str


def sweep(run: RunFiles) -> Section:
    """Return the three curves over one axis."""
    title = "Decode time, tail latency and gpu_cache_usage_perc against max_num_seqs"
    latency = f"e2e_{run.result.tail}"
    points = with_values(rung_points(run), USAGE)
    rungs = rungs_of(run)
    if not points or not rungs:
        return Section("sweep", title, ("No max_num_seqs was replayed.",))
    stop = stop_of(rungs)
    budget = run.current.max_num_batched_tokens
    sentences = (
        f"At the current max_num_batched_tokens, {budget:,} (or the same batches with fewer). "
        "gpu_cache_usage_perc is the name that vLLM gave to kv_cache_usage_perc before its V1 "
        "engine; it is a share from 0 to 1, the largest of the replay is shown.",
        *loads_words(points),
        f"The climb ends at {stop.cap}: {stop.why}.",
    )
    return Section("sweep", title, sentences, plots=(_plot(run, points, latency, stop),))


def rungs_of(run: RunFiles) -> list[Observation]:
    """Return one observation for each cap along the current token budget, by cap.

    Where the current budget itself was not replayed at a cap, a smaller one that never bound
    stands for it: it made the same batches.
    """
    budget = run.current.max_num_batched_tokens
    observations = [trial.observation for trial in ranked(run.result.trials)]
    rungs: dict[int, Observation] = {}
    for o in sorted(observations, key=lambda o: o.limits):
        cap, own = o.limits.max_num_seqs, o.limits.max_num_batched_tokens
        stands_for = o.budget_never_bound and own < max(budget, cap)
        if own == max(budget, cap) or stands_for:
            rungs[cap] = o
    return [rungs[cap] for cap in sorted(rungs)]


def stop_of(rungs: Sequence[Observation]) -> Stop:
    """Return the cap at which the climb ended: the first that says that no higher one can gain.

    None of those below the best does, whatever it says: a GPU may run the batches of a larger
    cap faster.

    Shapes: rungs is [caps], ascending, at least one.
    """
    climbed = climb_of(rungs)
    best = leader(climbed)
    for i in range(1, len(climbed) + 1):
        if (best is None or best in climbed[:i]) and climb_is_over(climbed[:i]):
            return Stop(climbed[i - 1].limits.max_num_seqs, _why(climbed[:i]))
    last = climbed[-1]
    if best is None or best is last:
        return Stop(last.limits.max_num_seqs, "it was the largest that was tried")
    is_worse = last.score.clearly_worse_than(best.score, TIE_RATIO)
    how = "better" if is_worse else f"as good within {TIE_RATIO:.0%}"
    cap = best.limits.max_num_seqs
    return Stop(last.limits.max_num_seqs, f"it was the ladder's last, and {cap} was {how}")


def climb_of(rungs: Sequence[Observation]) -> list[Observation]:
    """Return the rungs that were climbed one after the other.

    Looking between two rungs comes later, and the current cap is a rung only where the climb
    came to it. A shadow tries every cap, so there all of them are rungs.
    """
    tops = [o.limits for o in rungs if o.phase in (Phase.LADDER, Phase.EXTEND)]
    if not tops:
        return list(rungs)
    top = max(tops)
    climbed = [o for o in rungs if o.phase is not Phase.REFINE and o.limits <= top]
    beyond = [o for o in rungs if o.limits.max_num_seqs == 2 * top.max_num_seqs]
    is_edge_best = leader(climbed) is climbed[-1] and not climb_is_over(climbed)
    return [*climbed, *beyond[:1]] if is_edge_best else climbed


def _why(climbed: Sequence[Observation]) -> str:
    last = climbed[-1]
    if last.cap_never_bound:
        return (
            f"at most {counted(last.peak_running, 'request')} ran at once there, so a higher "
            "cap makes the same batches"
        )
    best = leader(climbed)
    above = [str(o.limits.max_num_seqs) for o in climbed[-2:]]
    than = "" if best is None else f" than {best.limits.max_num_seqs}"
    is_whole = all(o.is_whole for o in climbed[-2:])
    how = "with slower decode steps" if is_whole else "or did not get to their end"
    return f"{listed(above)} were worse{than}, {how}"


def rung_points(run: RunFiles) -> list[Point]:
    """Return a point for every cap of the ladder along the current token budget, by cap.

    What was replayed to its end there, or what made the same batches; what was predicted where
    that was not measured; else as far as its replay came.
    """
    result, budget = run.result, run.current.max_num_batched_tokens
    caps = {o.limits.max_num_seqs for o in rungs_of(run)} | set(result.ladder)
    searched, foretold = list(ranked(result.trials)), predictions(result.trials)
    ranking, predicted = ranked_points(result), shadow_points(result)
    along = []
    for cap in sorted({run.current.max_num_seqs, *caps}):
        limits = EngineLimits(cap, max(budget, cap))
        point = (
            _twin(limits, ranking, searched)
            or _twin(limits, predicted, foretold)
            or _cut(limits, searched)
        )
        if point is not None:
            along.append(point)
    return along


def _twin(
    limits: EngineLimits, points: Sequence[Point], trials: Sequence[Trial]
) -> Point | None:
    """Return the point of the limits, or of others that are known to make the same batches."""
    by_limits = {p.limits: p for p in points}
    if limits in by_limits:
        return by_limits[limits]
    whole = sorted(
        (o for o in (t.observation for t in trials) if o.limits in by_limits),
        key=lambda o: o.limits,
    )
    like = next((o.limits for o in whole if same_schedule([o], limits)), None)
    return None if like is None else replace(by_limits[like], limits=limits, twin=like)


def _cut(limits: EngineLimits, trials: Sequence[Trial]) -> Point | None:
    """Return what a replay that was cut short had shown until then."""
    for trial in trials:
        if trial.measurement and trial.limits == limits:
            return Point(limits, trial.is_live, (trial.measurement,), is_cut=True)
    return None


def _plot(run: RunFiles, points: Sequence[Point], latency: str, stop: Stop) -> Plot:
    caps = [p.limits.max_num_seqs for p in points]
    places = [math.log2(cap) for cap in caps]
    traces = []
    axes = []
    for i, metric in enumerate((DECODE, latency, USAGE)):
        values = [p.value(metric) for p in points]
        made = axis(USAGE, rangemode="tozero")
        if metric != USAGE:
            known = [v for v in values if v is not None]
            made = seconds_axis(metric_name(metric), known)
        axes.append(made)
        traces.append(_curve(points, places, values, y_axis(i), metric))
    named = _named(run, stop)
    lines, notes = _marks(named)
    return Plot(
        "sweep-plot",
        "Decode step, tail latency and KV-cache usage by max_num_seqs",
        _text(points, latency),
        traces,
        layout(
            xaxis=_caps_axis([*caps, *named]),
            shapes=lines,
            annotations=notes,
            showlegend=False,
            **stacked(axes),
        ),
        height_px=620,
    )


def _curve(
    points: Sequence[Point],
    places: Sequence[float],
    values: Sequence[float | None],
    where: str,
    metric: str,
) -> dict[str, Any]:
    colours = [LIVE if p.is_live else SHADOW for p in points]
    symbols = ["circle-open" if p.is_cut else "circle" for p in points]
    write = percent if metric == USAGE else partial(quantity, metric)
    return scatter(
        "lines+markers",
        places,
        values,
        yaxis=where,
        customdata=[
            [str(p.limits), write(value), p.how]
            for p, value in zip(points, values, strict=True)
        ],
        hovertemplate="%{customdata[0]}: %{customdata[1]}, %{customdata[2]}<extra></extra>",
        line={"color": colours[0], "width": 2},
        marker={"color": colours, "size": 8, "symbol": symbols},
    )


def _caps_axis(caps: Sequence[int]) -> dict[str, Any]:
    """Return the shared axis: powers of two stand equally far apart."""
    shown = sorted(set(caps))
    places = [math.log2(cap) for cap in shown]
    return axis(
        "max_num_seqs",
        tickvals=places,
        ticktext=[str(cap) for cap in shown],
        range=[places[0] - 0.4, places[-1] + 0.4],
        anchor="y3",
    )


def _named(run: RunFiles, stop: Stop) -> dict[int, list[str]]:
    """Return what the caps are that deserve a line."""
    named = {run.current.max_num_seqs: ["current"]}
    if run.shown != run.current:
        named.setdefault(run.shown.max_num_seqs, []).append(run.shown_as)
    named.setdefault(stop.cap, []).append("climb ends")
    return named


def _marks(
    named: Mapping[int, Sequence[str]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the upright lines at named caps, and their names."""
    lines, notes = [], []
    for level, (cap, names) in enumerate(sorted(named.items())):
        is_chosen = "recommended" in names or "best found" in names
        colour, dash = (CHOSEN, "solid") if is_chosen else (INK, "dash")
        lines.append(upright(math.log2(cap), colour, dash))
        # At the ends a name stands inside, or the edge would cut it.
        side = {min(named): "left", max(named): "right"}.get(cap, "center")
        # Neighbouring names stand at different heights, so that they do not cover each other.
        place = {"xanchor": side, "yanchor": "bottom", "yshift": 13 * level}
        notes.append(note(math.log2(cap), f"{' and '.join(names)} {cap}", **place))
    return lines, notes


def _text(points: Sequence[Point], latency: str) -> str:
    is_live = points[0].is_live
    sentences = []
    for p in points:
        other = "" if p.is_live == is_live else " (measured)" if p.is_live else " (predicted)"
        least = "at least " if p.is_cut else ""
        sentences.append(
            f"{p.limits.max_num_seqs}{other}: decode step {seconds(p.value(DECODE))}, "
            f"{metric_name(latency)} {least}{seconds(p.value(latency))}, "
            f"KV cache {percent(p.value(USAGE))}"
        )
    how = "Measured" if is_live else "Predicted"
    return f"{how}, by max_num_seqs. {'; '.join(sentences)}."
