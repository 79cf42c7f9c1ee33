"""The page of `tune explore`: every setting at every load, as a profile predicts it.

A table and not a drawing shows the settings, as in a run's own map, so that every value can be
read; the page's script only puts other values of the same kind into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tuner.engine.limits import EngineLimits
from tuner.report.load_curve import load_curve
from tuner.report.page import page_of
from tuner.report.parts import Cell, Explorer, Section, Table, heats, number
from tuner.report.points import value_of
from tuner.report.words import (
    counted,
    limits_words,
    metric_name,
    percent,
    plain,
    quantity,
    sentence,
    times,
)
from tuner.run.loads.surface import LATENCIES, AtLoad, Reached, Surface
from tuner.search.objective import is_rate
from tuner.shadow.profiles import Profile
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window

CURRENT, BEST, NEAREST, HOLDS = "current", "best", "nearest", "holds"
_UNSUSTAINED, _BREAKS = "unsustained", "breaks"
_OTHERS = ("utilisation", "KV cache used, peak", "waiting, mean", "preemptions", "completed")


_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Explored:
    """What was predicted, and from what.

    `took_s` is how long predicting took.
    """

    surface: Surface
    profile: Profile
    profile_name: str
    trace: Trace
    objective: str
    took_s: float

    @property
    def requests(self) -> int:
        """How many requests are measured at the load that the trace was given with."""
        return sum(piece.measured for piece in self.surface.workload.pieces)

    @property
    def loads(self) -> list[float]:
        """The loads as multiples of the recorded arrivals."""
        return [at.load for at in self.surface.loads]

    @property
    def start(self) -> int:
        """The number of the load that is shown first: the recorded one, or the next to it."""
        return min(range(len(self.loads)), key=lambda i: abs(self.loads[i] - 1))

    @property
    def metrics(self) -> list[str]:
        """What can be shown on the map."""
        surface = self.surface
        statistics = dict.fromkeys((surface.tail, "p50"))
        latencies = [f"{name}_{statistic}" for name in LATENCIES for statistic in statistics]
        goodput = ["goodput_per_s"] if surface.workload.slos else []
        return [*latencies, "requests_per_s", "output_tokens_per_s", *goodput]


def explore_page(explored: Explored) -> str:
    """Return the page as the text of one HTML file."""
    shape = explored.profile.shape
    eyebrow = f"{shape.model} · {shape.device} · vLLM {shape.vllm_version}"
    return page_of(explore_sections(explored), _headline(explored), eyebrow, "tune explore")


def explore_sections(explored: Explored) -> list[Section]:
    """Return the sections in the page's order, the answer first."""
    curve = load_curve(explored.surface)
    return [_answer(explored), _map(explored), curve, _sources(explored), _all(explored)]


def _headline(explored: Explored) -> str:
    at = explored.surface.loads[explored.start]
    load = explored.loads[explored.start]
    where = "" if load == 1 else f" at {times(load)}"
    if at.is_hopeless:
        nearest = limits_words(at.decision.best)
        return f"Predicted{where}: no setting meets the SLOs, nearest is {nearest}"
    if at.change_pays:
        return f"Predicted best{where}: {limits_words(at.decision.best)}"
    return f"Predicted{where}: keep {limits_words(explored.surface.current)}"


def _at(load: float) -> str:
    return "At the recorded load" if load == 1 else f"At {times(load)} the recorded load"


def _answer(explored: Explored) -> Section:
    surface = explored.surface
    n, requests = len(surface.settings), counted(explored.requests, "request")
    replays = counted(n * len(surface.loads), "replay")
    sentences = (
        "Every number on this page is predicted, none was measured: "
        f"{surface.error.words(percent(surface.error.wrong_ratio))}",
        *surface.error.lines(),
        f"{counted(n, 'setting')} at {counted(len(surface.loads), 'load')}: "
        f"{replays} of {explored.trace.source} ({requests}), and at each load "
        f"draws of other traffic that tell what is best, in {plain(explored.took_s)} s",
    )
    return Section("answer", "The answer", tuple(sentence(text) for text in sentences))


def _says(explored: Explored, i: int) -> str:
    """Return what the best and the current configuration reach at a load."""
    surface = explored.surface
    at, metric = surface.loads[i], explored.metrics[0]
    best, current = at.best, at.reached(surface.current)
    offered = (best.figures or {}).get("offered_per_s")
    rate = "" if offered is None else f" ({plain(offered)} requests/s)"
    head = "no setting meets the SLOs; nearest is" if at.is_hopeless else "the best is"
    text = f"{_at(explored.loads[i])}{rate} {head} {_figure_text(best, metric)}"
    if best.limits == current.limits:
        why = "" if at.is_hopeless else f": {at.why}"
        return f"{text}, which is the current configuration{why}"
    text = f"{text}; the current configuration is {_figure_text(current, metric)}"
    if at.is_hopeless:
        return text
    advice = "change" if at.change_pays else "keep it"
    return f"{text}: {advice}, {at.why}"


def _figure_text(reached: Reached, metric: str) -> str:
    fault = f", {reached.fault}" if reached.fault else ""
    value = quantity(metric, reached.value(metric))
    return f"{reached.limits} with {metric_name(metric)} {value}{fault}"


def _map(explored: Explored) -> Section:
    surface = explored.surface
    says = (
        "The stronger the colour, the better; coloured are the settings that keep up with the "
        "load within every SLO, or where none does those that come nearest.",
    )
    or_nearest = ", or nearest to the SLOs" if surface.workload.slos else ""
    legend = [
        (BEST, f"best at this load ({explored.objective}){or_nearest}"),
        (CURRENT, "current configuration"),
        (_UNSUSTAINED, "does not sustain the load"),
    ]
    if slos := surface.workload.slos:
        legend.append((_BREAKS, f"breaks {' or '.join(map(str, slos))}"))
    levels = [_level(explored, i) for i in range(len(surface.loads))]
    explorer = Explorer(
        "explorer",
        tuple(times(load) for load in explored.loads),
        explored.start,
        tuple(metric_name(metric) for metric in explored.metrics),
        sentence(_says(explored, explored.start)),
        _map_table(explored, levels[explored.start]),
        _figures_table(explored),
        tuple(legend),
        {"levels": levels, "settings": _rows(surface, str)},
    )
    return Section("map", "Every setting at every load", says, explorer=explorer)


def _rows(surface: Surface, make: Callable[[EngineLimits], _Made]) -> list[list[_Made | None]]:
    """Return what is made of each setting of the map, None where vLLM takes none.

    Shapes: [budgets, caps], the largest budget first.
    """
    settings = set(surface.settings)
    caps, budgets = _axes(surface)
    return [
        [
            make(limits)
            if cap <= budget and (limits := EngineLimits(cap, budget)) in settings
            else None
            for cap in caps
        ]
        for budget in budgets
    ]


def _axes(surface: Surface) -> tuple[list[int], list[int]]:
    """Return the map's caps, ascending, and its token budgets, descending."""
    caps = sorted({limits.max_num_seqs for limits in surface.settings})
    budgets = {limits.max_num_batched_tokens for limits in surface.settings}
    return caps, sorted(budgets, reverse=True)


def _level(explored: Explored, i: int) -> dict[str, Any]:
    """Return all that the script shows of one load."""
    surface = explored.surface
    at = surface.loads[i]
    reached = {limits: at.reached(limits) for limits in surface.settings}
    tiers = {limits: at.score(limits).tier for limits in reached}
    top = min(tiers.values())
    foremost = [mine for limits, mine in reached.items() if tiers[limits] is top]
    hot = [_heats(foremost, metric) for metric in explored.metrics]

    best, best_as = at.decision.best, _best_as(at)
    notes = {surface.current: CURRENT, best: best_as}

    def cell(limits: EngineLimits) -> dict[str, Any]:
        mine = reached[limits]
        return {
            "figures": [figure.text for figure in _figures(mine, explored.metrics)],
            "heats": [round(heat[limits], 3) if limits in heat else None for heat in hot],
            "mark": _mark(mine, at, surface),
            "note": notes.get(limits, ""),
        }

    return {
        "says": sentence(_says(explored, i)),
        "best": str(best),
        "best_as": best_as,
        "current": str(surface.current),
        "cells": _rows(surface, cell),
    }


def _heats(foremost: Sequence[Reached], metric: str) -> dict[EngineLimits, float]:
    """Return how near to the best each of the settings is by a metric."""
    values = {reached.limits: reached.value(metric) for reached in foremost}
    known = {limits: value for limits, value in values.items() if value}
    if is_rate(metric):
        known = {limits: 1 / value for limits, value in known.items()}
    return heats(known)


def _mark(reached: Reached, at: AtLoad, surface: Surface) -> str:
    """Return the names of how a cell looks."""
    marks = {
        BEST: reached.limits == at.decision.best,
        CURRENT: reached.limits == surface.current,
        _UNSUSTAINED: not reached.is_sustained,
        _BREAKS: bool(reached.broken),
    }
    return " ".join(name for name, is_so in marks.items() if is_so)


def _best_as(at: AtLoad) -> str:
    """Return what the page calls who is best at a load."""
    return NEAREST if at.is_hopeless else BEST


def _figures(reached: Reached, metrics: Sequence[str]) -> list[Cell]:
    """Return all figures of a setting: the metrics, the others, and whether it holds."""
    found = reached.figures or {}
    return [
        *(number(reached.value(metric), partial(quantity, metric)) for metric in metrics),
        number(found.get("utilisation"), percent),
        number(value_of(found, "gpu_cache_usage_perc"), percent),
        number(value_of(found, "queue_depth"), plain),
        number(found.get("preemptions"), "{:,}".format),
        number(found.get("completed"), "{:,}".format),
        Cell(reached.fault or HOLDS, reached.fault),
    ]


def _figure_names(explored: Explored) -> list[str]:
    return [*(metric_name(metric) for metric in explored.metrics), *_OTHERS, "state"]


def _map_table(explored: Explored, level: dict[str, Any]) -> Table:
    """Return the map at the load that is shown first, by the first metric."""
    caps, budgets = _axes(explored.surface)
    rows = []
    for budget, cells in zip(budgets, level["cells"], strict=True):
        made = (Cell("", mark="void") if cell is None else _map_cell(cell) for cell in cells)
        rows.append((Cell(f"{budget:,}"), *made))
    caption = "Rows: max_num_batched_tokens. Columns: max_num_seqs."
    heads = ("tokens", *map(str, caps))
    return Table("explorer-map", caption, heads, tuple(rows), kind="map")


def _map_cell(cell: dict[str, Any]) -> Cell:
    figures, state = cell["figures"], cell["figures"][-1]
    unseen = "" if state == HOLDS else f", {state}"
    mark, heat, note = cell["mark"], cell["heats"][0], cell["note"]
    return Cell(figures[0], mark=mark, heat=heat, note=note, unseen=unseen)


def _figures_table(explored: Explored) -> Table:
    """Return the figures of the setting that is picked, which is the best one at first."""
    surface = explored.surface
    at = surface.loads[explored.start]
    best = _figures(at.best, explored.metrics)
    current = _figures(at.reached(surface.current), explored.metrics)
    rows = tuple(
        (Cell(name), ours, ours, theirs)
        for name, ours, theirs in zip(_figure_names(explored), best, current, strict=True)
    )
    heads = ("predicted", str(at.decision.best), _best_as(at), CURRENT)
    caption = "Point at a setting, or walk with the arrow keys"
    return Table("explorer-figures", caption, heads, rows, kind="picked")


def _all(explored: Explored) -> Section:
    """Return every figure of every setting at every load as a table."""
    surface, metrics = explored.surface, explored.metrics
    limits = ("max_num_seqs", "max_num_batched_tokens")
    heads = ("load", *limits, *_figure_names(explored))
    rows = tuple(
        _row(load, at.reached(setting), metrics)
        for load, at in zip(explored.loads, surface.loads, strict=True)
        for setting in surface.settings
    )
    caption = f"{counted(len(rows), 'prediction')}; load as a multiple of the recorded one."
    table = Table("all-table", caption, heads, rows, is_sortable=True, kind="wide tall")
    return Section("all", "All figures", tables=(table,))


def _row(load: float, reached: Reached, metrics: Sequence[str]) -> tuple[Cell, ...]:
    cap, budget = reached.limits.max_num_seqs, reached.limits.max_num_batched_tokens
    # Without separators, so that a spreadsheet takes them.
    limits = (number(cap, str), number(budget, str))
    return (number(load, times), *limits, *_figures(reached, metrics))


def _lead_in(window: Window) -> str:
    return f", after {window.lead_in_s:.2g} s to warm up" if window.lead_in_s else ""


def _sources(explored: Explored) -> Section:
    """Return what the predictions rest on."""
    surface, profile, trace = explored.surface, explored.profile, explored.trace
    plan = surface.workload.plan
    window = surface.workload.windows[0]
    slos = ", ".join(map(str, surface.workload.slos))
    calibrated = ", ".join(profile.calibrated_on)
    facts = {
        "profile": f"{explored.profile_name}, made {profile.made_at}",
        "model": profile.shape.model,
        "device": profile.shape.device,
        "vLLM": profile.shape.vllm_version,
        "calibrated on": f"{calibrated} (seqs/tokens), {profile.fit.steps:,} steps",
        "stated error": percent(surface.error.wrong_ratio),
        "scheduler": _scheduler(surface, profile),
        "trace": f"{trace.source}, {counted(len(trace), 'request')}",
        "window": f"{plain(window.start_s)} s to {plain(window.end_s)} s{_lead_in(window)}",
        "trace SHA-256": trace.sha256,
        "load model": f"{plan.load_model} loop",
        "objective": explored.objective,
        "SLOs": slos or "none was given",
        "tail": f"{surface.tail}, the highest quantile with ten requests beyond it",
    }
    rows = tuple((Cell(name), Cell(text)) for name, text in facts.items() if text)
    table = Table("sources-table", "Where the figures come from", ("what", "which"), rows)
    whence = "were measured on the device below"
    if profile.origin:
        whence = f"are {profile.origin}"
    says = (
        f"A profile knows batches, not kernels: its step times {whence}, "
        "and the schedule is vLLM's. Measure a change before it goes to production: "
        "with tune on that device, or with tune verify on a server.",
    )
    return Section("sources", "Predicted from", says, tables=(table,))


def _scheduler(surface: Surface, profile: Profile) -> str:
    """Return whose schedule was replayed."""
    if surface.doubt:
        return f"vLLM's own, because {surface.doubt}"
    if profile.agreement is None:
        return "compiled from vLLM's rules"
    steps = counted(profile.agreement.steps, "step")
    return f"compiled from vLLM's rules, the same as vLLM's own over {steps}"
