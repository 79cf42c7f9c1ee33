"""Draws of what live replays in turns say of settings, where nothing was predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.search.draws import LIVE_ALONE, Draws, Learnable
from tuner.search.effects import Effects, Replay, Spreads
from tuner.search.judging import COST, LOAD, SLO
from tuner.search.mixture import Mixture
from tuner.search.objective import RATE, Score, Tier
from tuner.search.race import RaceRun, compared
from tuner.stats import Floats

# Of what live replays show where nothing was predicted, before any: what settings have in
# common may be anything, rounds differ by a busy machine's mood, replays of a round by what two
# differ by on one: ours.
LIVE_SPREADS = Spreads(effect=1.0, mood=0.15, noise=0.05)
# Of what a bound leaves it is the level that counts, of which a mood is a part.
LEVEL_SPREADS = Spreads(effect=1.0, mood=0.0, noise=0.05)
_LEAST_USED = 1e-9

_ToldBy = Callable[[int, Sequence[Replay], int], tuple[Floats, Effects]]


def draws_of_replays(
    settings: Sequence[EngineLimits], runs: Sequence[RaceRun], draws: int
) -> Draws:
    """Return draws of what live replays in turns say, where nothing was predicted.

    A setting that failed once is taken to fail, and one that lost so many requests that an
    SLO, or what is optimised, once had no end is taken to have none. One that was not
    replayed beside another in a round may be anything. What a setting showed before it failed
    still tells of the rounds in which others were beside it.
    """
    failed = {run.limits for run in runs if run.score.tier is Tier.FAILED}
    mine = compared([run for run in runs if run.limits in settings])
    good = [run for run in mine if run.limits not in failed]
    metric = _own_metric(good)
    drawn = partial(_drawn_live, settings, mine, draws)
    values, told = drawn(_by_kinds, lambda score: score.value_of(metric))
    endless = failed | _endless(good, metric)
    values[:, [limits in endless for limits in settings]] = math.inf
    slo, told_of_slo = drawn(_by_level, lambda score: score.slo_used, SLO)
    load, told_of_load = drawn(_by_level, lambda score: score.load_used, LOAD)
    breaking = {run.limits for run in good if run.score.slo_used == math.inf}
    slo[:, [limits in breaking for limits in settings]] = math.inf
    has_slos = any(run.score.slo_used is not None for run in good)
    here = np.stack([values, slo, load], axis=-1)

    def elsewhere(some: Sequence[EngineLimits]) -> Floats:
        return here[:, [settings.index(limits) for limits in some]]

    learnable = tuple(filter(None, (told, told_of_slo, told_of_load)))
    basis = (LIVE_ALONE, has_slos, learnable)
    return Draws(tuple(settings), metric, here, elsewhere, *basis)


def _own_metric(runs: Sequence[RaceRun]) -> str:
    """Return what is optimised, or the rate where each setting once had none of it."""
    names = {run.score.own_metric for run in runs} - {RATE}
    limits = {run.limits for run in runs}
    return next((n for n in sorted(names) if _endless(runs, n) < limits), RATE)


def _endless(runs: Sequence[RaceRun], metric: str) -> set[EngineLimits]:
    """Return whose value had no end in a replay, as where nothing was answered in time."""
    return {run.limits for run in runs if run.score.value_of(metric) in (None, math.inf)}


def _drawn_live(
    settings: Sequence[EngineLimits],
    runs: Sequence[RaceRun],
    draws: int,
    told_by: _ToldBy,
    of: Callable[[Score], float | None],
    column: int = COST,
) -> tuple[Floats, Learnable | None]:
    """Return draws of a value of each setting by its replays, and what more of them would tell.

    Zeros and nothing where none has one.

    Shapes: [draws, settings].
    """
    turns = sorted({run.turn for run in runs})
    replays = [
        (turns.index(run.turn), settings.index(run.limits), math.log(max(value, _LEAST_USED)))
        for run in runs
        if (value := of(run.score)) is not None and value < math.inf
    ]
    if not replays:
        return np.zeros((draws, len(settings))), None
    middle = float(np.median([value for _, _, value in replays]))
    around = [(number, setting, value - middle) for number, setting, value in replays]
    off, found = told_by(len(settings), around, draws)
    return np.exp(middle + off), Learnable(found, off, column)


def _by_kinds(settings: int, replays: Sequence[Replay], draws: int) -> tuple[Floats, Effects]:
    """Return draws of effects that are hardly, by some or by a lot apart, and their spread."""
    found = Mixture.of(settings, replays, LIVE_SPREADS)
    return found.draws(draws, np.random.default_rng(0)), found.pooled


def _by_level(settings: int, replays: Sequence[Replay], draws: int) -> tuple[Floats, Effects]:
    """Return draws of effects, each of which may be anything, and their spread."""
    found, rng = Effects.of(settings, replays, LEVEL_SPREADS), np.random.default_rng(0)
    return np.array([found.draw(rng) for _ in range(draws)]), found
