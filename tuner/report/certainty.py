"""How sure the answer is: what is known of each setting, and what would change it or help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.report.parts import (
    CHOSEN,
    INK,
    SHADOW,
    Cell,
    Plot,
    Section,
    Table,
    layout,
    number,
    number_axis,
    scatter,
    seconds_axis,
)
from tuner.report.run_files import RunFiles
from tuner.report.words import (
    counted,
    is_latency,
    listed,
    metric_name,
    percent,
    quantity,
    score,
    sentence,
)
from tuner.run.options import Method
from tuner.run.records import Advice
from tuner.search.judging import TIE_LOSS
from tuner.search.objective import Bounds, Objective, is_rate
from tuner.search.race import MAX_LOSS, Odds, Standing

# An interval over other hours so many times as wide as on this one is mostly theirs: ours.
_MOSTLY_TRAFFIC = 1.5
# So many settings are drawn at most, the likeliest: ours.
_MOST_DRAWN = 6


def certainty(run: RunFiles) -> Section:
    """Return what is known of the settings that were decided between."""
    title, advice = "How sure the answer is", run.result.recommendation
    if (nearest := run.result.nearest) is not None:
        who = f"{nearest.limits} is nearest and {nearest.text}"
        return Section(
            "certainty",
            title,
            (f"Nothing is likely to {nearest.missed}: {who}.",),
        )
    if advice is None or advice.odds is None or not advice.standings:
        return Section("certainty", title, ("No probabilities were found in this run.",))
    says = [
        _probable(advice, advice.odds),
        _what_would_change(advice, advice.odds, run.current),
        _what_would_help(advice, run),
    ]
    return Section(
        "certainty",
        title,
        tuple(sentence(text) for text in says if text),
        plots=(_plot(advice, run.current),),
        tables=(_table(advice, run.current),),
    )


def _probable(advice: Advice, odds: Odds) -> str:
    """Say who is probably the best, and what the answer is expected to lose."""
    chances = [
        f"{standing.limits} with probability {standing.p_best:.2f}"
        for standing in advice.standings
        if standing.p_best is not None and standing.p_best >= 0.005
    ]
    own = _standing_of(advice, advice.limits)
    basis = f"over {odds.basis}"
    if odds.has_other_traffic:
        basis = "on the recorded traffic, over the model's error"
    best = f"by {metric_name(advice.gain_metric)} the best is {listed(chances)}, {basis}"
    if own is None or own.loss is None:
        return best
    return f"{best}; {advice.limits} is expected to cost {_loss(own.loss)} more than it"


def _what_would_change(advice: Advice, odds: Odds, current: EngineLimits) -> str:
    """Say by how much what is known would have to be wrong for another answer."""
    if advice.is_change and odds.meets_more:
        return _is_for_bounds(advice, odds, current)
    if odds.rival is not None:
        return _what_a_rival_lacks(advice, odds.rival, current)
    here = _log_normal(advice.gain_here_interval)
    if here is None or advice.shown == current:
        return ""
    mean, spread = here
    room = -mean - NormalDist().inv_cdf(odds.confidence) * spread
    moved = percent(math.expm1(abs(room)))
    if advice.is_change:
        return (
            f"the answer would be to keep {current} if {advice.limits} were worse beside it by "
            f"{moved} than is known"
        )
    if room > 0:  # it is not sure enough elsewhere
        return ""
    return (
        f"the answer would be {advice.shown} if it were better beside {current} by {moved} "
        "than is known"
    )


def _is_for_bounds(advice: Advice, odds: Odds, current: EngineLimits) -> str:
    """Say which bounds the current setting may not keep, for which it is left."""
    own, asked = _standing_of(advice, current), odds.confidence
    # Where nobody surely sustains the load that is asked of nobody.
    is_load = (
        own is not None
        and _misses(own.p_sustained, asked)
        and not _misses(odds.p_sustained, asked)
    )
    is_slo = own is not None and _misses(own.p_slo, asked)
    for_what, otherwise = "for bounds that {} may not keep", "they are relaxed"
    if is_slo and not is_load:
        for_what = "for the SLOs that {} may not meet"
    elif is_load and not is_slo:
        for_what, otherwise = "for the load that {} may not sustain", "there is less of it"
    return (
        f"{advice.limits} is recommended {for_what.format(current)}: where {otherwise} the "
        "answer may be another"
    )


def _misses(chance: float | None, asked: float) -> bool:
    return chance is not None and chance < asked


def _what_a_rival_lacks(advice: Advice, rival: EngineLimits, current: EngineLimits) -> str:
    """Say what the likeliest other setting would have to be for the answer not to be to keep.

    By how much it would have to lose less before anybody restarts a server for it.
    """
    ours, theirs = _standing_of(advice, current), _standing_of(advice, rival)
    if ours is None or theirs is None or ours.loss is None or theirs.loss is None:
        return f"{rival} is not sure enough to keep its bounds to be the answer"
    lacking = TIE_LOSS + theirs.loss - ours.loss
    return (
        f"the answer would not be {rival} unless it were better beside {current} by "
        f"{percent(lacking)} more than is known"
    )


def _what_would_help(advice: Advice, run: RunFiles) -> str:
    """Say which measurement would make the answer most certain."""
    own = _standing_of(advice, advice.limits)
    if own is not None and own.loss is not None and own.loss <= TIE_LOSS:
        return (
            f"no measurement would help much: knowing everything of these would save "
            f"{percent(own.loss)}"
        )
    here, elsewhere = _log_normal(advice.gain_here_interval), _log_normal(advice.gain_interval)
    if here and elsewhere and elsewhere[1] > _MOSTLY_TRAFFIC * here[1]:
        return (
            "what would help most is a longer recording, for most of what is open is what "
            "other hours of the traffic bring"
        )
    pair = dict.fromkeys((advice.limits, _rival(advice, run.current)))
    names = listed([str(limits) for limits in pair])
    more = "replays of" if advice.rounds == 0 else "more rounds of"
    how = "give --budget more"
    if run.result.method in (Method.SHADOW, Method.CALIBRATED):
        how = f"run without --method {run.result.method}"
    return (
        f"what would help most is {more} {names} on a live engine, for most of what is open is "
        f"its speed with the batches that they make: {how}"
    )


def _rival(advice: Advice, current: EngineLimits) -> EngineLimits:
    """Return who is the likeliest to be better than what is recommended, else the current."""
    others = [s for s in advice.standings if s.limits != advice.limits]
    likely = max(others, key=lambda s: s.p_best or 0.0, default=None)
    return current if likely is None or not likely.p_best else likely.limits


def _log_normal(bounds: Bounds | None) -> tuple[float, float] | None:
    """Return mean and standard deviation of a ratio's logarithm by its 90 % interval."""
    if bounds is None or bounds[0] is None or bounds[1] is None or bounds[0] <= -1:
        return None
    low, high = math.log1p(bounds[0]), math.log1p(bounds[1])
    return (low + high) / 2, (high - low) / (2 * NormalDist().inv_cdf(0.95))


def _standing_of(advice: Advice, limits: EngineLimits) -> Standing | None:
    return next((s for s in advice.standings if s.limits == limits), None)


def _name(standing: Standing, advice: Advice, current: EngineLimits) -> str:
    role = {advice.limits: "recommended", current: "current"}.get(standing.limits)
    return f"{standing.limits} ({role})" if role else str(standing.limits)


def _value(metric: str, value: float) -> float:
    """Return a score as its metric is told: a rate stands in it as its inverse."""
    return 1 / value if is_rate(metric) else value


def _plot(advice: Advice, current: EngineLimits) -> Plot:
    metric, drawn = advice.gain_metric, advice.standings[:_MOST_DRAWN]
    kept = _standing_of(advice, current)
    if kept is not None and kept not in drawn:
        drawn = (*drawn[:-1], kept)
    upwards = drawn[::-1]
    names = [_name(standing, advice, current) for standing in upwards]
    ends = [sorted(_value(metric, q) for q in standing.quantiles) for standing in upwards]
    colours = [CHOSEN if one.limits == advice.limits else SHADOW for one in upwards]
    intervals = listed([f"{one.limits} {_between(one, metric)}" for one in drawn])
    return Plot(
        "certainty-plot",
        f"{metric_name(metric)} of those that were decided between, with what is open of it",
        sentence(f"intervals of 90%: {intervals}"),
        [
            *(_bar(names, ends, outer, width) for outer, width in ((0, 2), (1, 7))),
            scatter(
                "markers",
                [values[2] for values in ends],
                names,
                marker={"size": 11, "color": colours},
                customdata=[quantity(metric, values[2]) for values in ends],
                hovertemplate="%{y}: %{customdata}<extra></extra>",
                showlegend=False,
            ),
        ],
        layout(xaxis=_axis(metric, ends), yaxis={"automargin": True}),
        height_px=90 + 34 * len(drawn),
    )


def _axis(metric: str, ends: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the axis of a metric, with its unit and no wider than what is drawn."""
    title, values = metric_name(metric), [value for of_one in ends for value in of_one]
    if is_latency(metric):
        return {**seconds_axis(title, values), "rangemode": "normal"}
    if metric == Objective.CAPACITY:
        title += ", as a multiple of the recorded load"
    return number_axis(title, values)


def _bar(
    names: Sequence[str], ends: Sequence[Sequence[float]], outer: int, width: int
) -> dict[str, Any]:
    """Return a line for each setting from one quantile to its opposite."""
    xs: list[float | None] = []
    ys: list[str | None] = []
    for name, values in zip(names, ends, strict=True):
        xs += [values[outer], values[-1 - outer], None]
        ys += [name, name, None]
    line = {"color": INK, "width": width}
    return scatter("lines", xs, ys, line=line, hoverinfo="skip", showlegend=False)


def _between(standing: Standing, metric: str) -> str:
    low, high = sorted(
        _value(metric, q) for q in (standing.quantiles[0], standing.quantiles[-1])
    )
    return f"{quantity(metric, low)} to {quantity(metric, high)}"


def _table(advice: Advice, current: EngineLimits) -> Table:
    metric = advice.gain_metric
    rows = tuple(
        (
            Cell(_name(standing, advice, current)),
            number(standing.quantiles[2], partial(score, metric)),
            Cell(_between(standing, metric), mark="number"),
            number(standing.p_best, "{:.2f}".format),
            number(standing.loss, _loss),
            number(standing.p_slo, "{:.2f}".format),
            number(standing.p_sustained, "{:.2f}".format),
        )
        for standing in advice.standings
    )
    caption = f"{counted(len(rows), 'setting')} that were decided between; less is lost above"
    heads = (
        *("setting", metric_name(metric), "90% interval", "P(best)", "expected loss"),
        *("P(SLOs met)", "P(load sustained)"),
    )
    return Table("certainty-table", caption, heads, rows)


def _loss(loss: float) -> str:
    """Write what a setting is expected to cost more; what is larger counts as the largest."""
    return f"{percent(loss)}{' or more' if loss >= MAX_LOSS else ''}"
