"""How far settings are apart where nothing was predicted, on planted effects and noise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tuner.search.effects import Effects, Replay
from tuner.search.mixture import KINDS, Kind, Mixture
from tuner.search.replayed import LIVE_SPREADS

DRAWS = 2000


def planted(
    effects: list[float], rounds: int, noise: float, rng: np.random.Generator
) -> list[Replay]:
    """Return replays in rounds, each with a mood of its own."""
    moods = rng.normal(0.0, LIVE_SPREADS.mood, rounds)
    return [
        (number, setting, effect + moods[number] + float(rng.normal(0.0, noise)))
        for number in range(rounds)
        for setting, effect in enumerate(effects)
    ]


def p_first_is_less(found: Mixture) -> float:
    """Return how probable it is that the first of two is the smaller."""
    draws = found.draws(DRAWS, np.random.default_rng(0))
    return float((draws[:, 0] < draws[:, 1]).mean())


def test_noise_of_settings_that_are_alike_is_seldom_taken_for_a_difference() -> None:
    """By one normal distribution every fourth of these is surely better."""
    rng = np.random.default_rng(1)
    sure = sum(
        p_first_is_less(Mixture.of(2, planted([0.0, 0.0], 3, 0.06, rng), LIVE_SPREADS)) > 0.9
        for _ in range(200)
    )
    assert sure <= 20


@pytest.mark.parametrize("effect", [0.1, 0.5, 3.0])
def test_what_is_far_apart_is_told_as_it_is(effect: float) -> None:
    rng = np.random.default_rng(2)
    replays = planted([0.0, effect, 0.0], 4, 0.01, rng)
    found = Mixture.of(3, replays, LIVE_SPREADS).pooled
    assert found.mean[1] - found.mean[0] == pytest.approx(effect, abs=0.015)
    assert found.mean[2] - found.mean[0] == pytest.approx(0.0, abs=0.01)


def test_intervals_hold_differences_about_as_often_as_they_say() -> None:
    rng, spread, share = np.random.default_rng(3), *np.array(KINDS).T
    held = []
    for _ in range(300):
        kinds = rng.choice(len(KINDS), 3, p=share)
        effects = (rng.normal(0.0, 1.0) + rng.normal(0.0, spread[kinds])).tolist()
        found = Mixture.of(3, planted(effects, 3, 0.04, rng), LIVE_SPREADS)
        apart = np.diff(found.draws(DRAWS, rng), axis=1)
        low, high = np.quantile(apart, [0.05, 0.95], axis=0)
        held += [
            lo <= b - a <= hi
            for lo, hi, (a, b) in zip(low, high, pairwise(effects), strict=True)
        ]
    assert 0.86 < np.mean(held) < 0.96


def test_settings_of_one_kind_are_what_one_normal_distribution_makes_of_them() -> None:
    replays = planted([0.0, 0.3, -0.2], 5, 0.05, np.random.default_rng(4))
    mine = Mixture.of(3, replays, LIVE_SPREADS, (Kind(1.0, 1.0),)).pooled
    theirs = Effects.of(3, replays, LIVE_SPREADS)
    assert np.diff(mine.mean) == pytest.approx(np.diff(theirs.mean), abs=0.01)
    assert mine.noise == pytest.approx(theirs.noise, rel=0.25)


def test_noise_is_learnt_from_the_replays() -> None:
    rng = np.random.default_rng(5)
    quiet, loud = (
        Mixture.of(2, planted([0.0, 0.1], 20, noise, rng), LIVE_SPREADS)
        for noise in (0.005, 0.2)
    )
    assert quiet.noise < 0.03
    assert loud.noise > 0.1


def test_draws_have_the_spread_of_the_pooled_distribution() -> None:
    found = Mixture.of(
        3, planted([0.0, 0.1, 0.4], 2, 0.05, np.random.default_rng(6)), LIVE_SPREADS
    )
    draws, pooled = found.draws(40_000, np.random.default_rng(7)), found.pooled
    spread = np.sqrt(np.diag(pooled.root @ pooled.root.T))
    assert draws.mean(axis=0) == pytest.approx(pooled.mean, abs=0.01)
    assert draws.std(axis=0) == pytest.approx(spread, rel=0.03)
