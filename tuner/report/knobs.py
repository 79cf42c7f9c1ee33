"""The two limits as a map: what each pair was worth.

A table and not a drawing, so that every value can be read, by whatever means the reader reads.
Only one kind of replay stands on it: the one that ranked the space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.engine.limits import EngineLimits
from tuner.report.parts import Cell, Section, Table, heats
from tuner.report.run_files import RunFiles
from tuner.report.words import NOTHING, counted, metric_name, score, sentence
from tuner.run.knobs.records import KnobAdvice
from tuner.search.ladder import same_schedule
from tuner.search.objective import RATE_TIE_RATIO, Tier
from tuner.search.trials import TIE_RATIO, Observation, leader, ranked

SAME = "="


def knobs(run: RunFiles) -> Section:
    """Return the map."""
    title = "The two knobs as a map"
    observations = [trial.observation for trial in ranked(run.result.trials)]
    others = () if run.result.knobs is None else (_others(run.result.knobs),)
    if not observations:
        says = ("Nothing was replayed that ranks the space.",)
        return Section("knobs", title, says, tables=others)
    said = [
        *_sentences(run, observations),
        *(sentence(point.text) for point in run.result.starting_points),
        *_together(run.result.knobs),
    ]
    return Section("knobs", title, tuple(said), tables=(_map(run, observations), *others))


def _together(advice: KnobAdvice | None) -> list[str]:
    """Say which of the other knobs pay together, and on how many combinations that rests."""
    if advice is None:
        return []
    counts = f"{advice.predicted:,} of {advice.space:,} combinations of knobs and limits"
    return [sentence(advice.lines[-1]), sentence(f"{counts} were predicted")]


def _others(advice: KnobAdvice) -> Table:
    """Return what the other knobs do, each alone, and what each of their values costs."""
    rows = []
    for one in advice.findings:
        tried = ", ".join(
            f"{value} {NOTHING if ratio is None else f'{ratio - 1:+.1%}'}"
            for value, ratio in one.tried.items()
        )
        mark = "marked" if one.is_recommended else ""
        rows.append((Cell(one.knob, mark=mark), Cell(tried or NOTHING), Cell(one.says)))
    caption = (
        f"Other knobs, each alone beside {advice.before}; of what a value costs less is better."
    )
    heads = ("knob", "values that were predicted", "what it does")
    return Table("knobs-others", caption, heads, tuple(rows))


def _sentences(run: RunFiles, observations: list[Observation]) -> tuple[str, ...]:
    best = leader(observations)
    is_live = all(trial.is_live for trial in ranked(run.result.trials))
    how = "measured" if is_live else "predicted"
    sentences = [
        f"{counted(len({o.limits for o in observations}), 'pair')} of limits, {how}, "
        "one replay each"
    ]
    if best is not None and math.isfinite(best.score.value):
        metric, value = best.score.metric, score(best.score.metric, best.score.value)
        chosen = f"of those within {TIE_RATIO:.0%} of each other the smallest"
        if best.score.tier is Tier.NOT_SUSTAINED:
            chosen = f"of those within {RATE_TIE_RATIO:.0%} of the best the smallest with a "
            chosen += f"tail within {TIE_RATIO:.0%} of the shortest, as none sustains the load"
        sentences.append(
            f"the best is {best.limits} with {metric_name(metric)} {value} ({chosen}); the "
            "stronger the colour, the better by that"
        )
    sentences.append(
        f"{SAME} is a pair that makes the same batches as one with smaller limits, because a "
        f"limit never bound there; {NOTHING} was not tried"
    )
    return tuple(sentence(text) for text in sentences)


def _map(run: RunFiles, observations: list[Observation]) -> Table:
    caps = sorted({o.limits.max_num_seqs for o in observations})
    budgets = sorted({o.limits.max_num_batched_tokens for o in observations}, reverse=True)
    values = _by_limits(observations)
    heats = _heats(values)
    rows = []
    for budget in budgets:
        cells = (_cell(run, observations, values, heats, cap, budget) for cap in caps)
        rows.append((Cell(f"{budget:,}"), *cells))
    heads = ("max_num_batched_tokens", *(f"{cap}" for cap in caps))
    caption = "Rows: max_num_batched_tokens. Columns: max_num_seqs."
    return Table("knobs-map", caption, heads, tuple(rows), kind="map")


def _by_limits(observations: list[Observation]) -> dict[EngineLimits, Observation]:
    """Return each pair's middle observation."""
    grouped: dict[EngineLimits, list[Observation]] = {}
    for o in observations:
        grouped.setdefault(o.limits, []).append(o)
    return {
        limits: sorted(mine, key=lambda o: o.score.order)[len(mine) // 2]
        for limits, mine in grouped.items()
    }


def _heats(values: Mapping[EngineLimits, Observation]) -> dict[EngineLimits, float]:
    """Return how near to the best each pair of the best tier is."""
    top = min((o.score.tier for o in values.values()), default=Tier.FAILED)
    return heats({x: o.score.value for x, o in values.items() if o.score.tier is top})


def _cell(
    run: RunFiles,
    observations: list[Observation],
    values: Mapping[EngineLimits, Observation],
    heats: Mapping[EngineLimits, float],
    cap: int,
    budget: int,
) -> Cell:
    if budget < cap:
        return Cell("", mark="void")
    limits = EngineLimits(cap, budget)
    observation = values.get(limits)
    marks = _marks(run, limits)
    if observation is None:
        return Cell(f"{SAME if same_schedule(observations, limits) else NOTHING}{marks}")
    text = (
        score(observation.score.metric, observation.score.value) if observation.is_whole else ""
    )
    tier = "" if observation.score.tier is Tier.GOOD else str(observation.score.tier)[2:]
    phrase = ", ".join(part for part in (text, tier) if part)
    mark = "marked" if marks else "failed" if not observation.is_whole else ""
    return Cell(f"{phrase}{marks}", mark=mark, heat=heats.get(limits))


def _marks(run: RunFiles, limits: EngineLimits) -> str:
    """Return what the pair is, beside its value."""
    if limits == run.current:
        return " (current)"
    return f" ({run.shown_as})" if limits == run.shown else ""
