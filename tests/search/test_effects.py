"""What repeated replays say of settings, on planted effects, moods and noise."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.search.effects import Effects, Spreads

WIDE = Spreads(effect=1.0, mood=0.3, noise=0.05)


def planted(
    effects: list[float], rounds: int, mood: float, noise: float, seed: int
) -> list[tuple[int, int, float]]:
    """Return replays in rounds, each with a mood of its own."""
    rng = np.random.default_rng(seed)
    moods = rng.normal(0.0, mood, rounds)
    return [
        (number, setting, effect + moods[number] + float(rng.normal(0.0, noise)))
        for number in range(rounds)
        for setting, effect in enumerate(effects)
    ]


def test_a_mood_that_a_round_shares_says_nothing_of_its_settings() -> None:
    found = Effects.of(2, planted([0.0, 0.2], 4, mood=0.5, noise=0.001, seed=1), WIDE)
    assert found.mean[1] - found.mean[0] == pytest.approx(0.2, abs=0.01)


def test_one_round_has_an_interval_as_wide_as_replays_are_thought_to_differ() -> None:
    found = Effects.of(2, [(0, 0, 0.0), (0, 1, 0.1)], WIDE)
    rng = np.random.default_rng(0)
    apart = [float(np.diff(found.draw(rng))[0]) for _ in range(4000)]
    assert np.std(apart) == pytest.approx(0.05 * 2**0.5, rel=0.5)


def test_noise_is_learnt_from_the_replays() -> None:
    quiet = Effects.of(2, planted([0.0, 0.1], 20, 0.1, 0.005, seed=0), WIDE)
    loud = Effects.of(2, planted([0.0, 0.1], 20, 0.1, 0.2, seed=0), WIDE)
    assert quiet.noise < 0.05
    assert loud.noise > 0.1


def test_what_was_not_replayed_is_as_open_as_before_and_learns_how_far_others_are_off() -> None:
    spreads = Spreads(effect=0.01, mood=0.0, noise=0.02, learns_effect=True)
    nothing = Effects.of(2, [], spreads)
    assert nothing.mean.tolist() == [0.0, 0.0]
    assert np.diag(nothing.root).tolist() == pytest.approx([0.01, 0.01])
    far = Effects.of(2, [(0, 0, 0.3), (1, 0, 0.31), (2, 0, 0.29)], spreads)
    assert far.mean[0] == pytest.approx(0.3, abs=0.03)
    assert far.mean[1] == 0.0
    assert far.root[1, 1] > 0.05


def test_a_replay_tells_of_settings_as_far_as_they_are_alike() -> None:
    spreads = Spreads(effect=0.02, mood=0.0, noise=0.01)
    alike = np.array([[1.0, 0.95, 0.0], [0.95, 1.0, 0.0], [0.0, 0.0, 1.0]])
    found = Effects.of(3, [(0, 0, 0.05)] * 4, spreads, alike)
    covariance = found.root @ found.root.T
    assert found.mean[0] == pytest.approx(0.05, abs=0.005)
    assert found.mean[1] == pytest.approx(0.95 * found.mean[0])
    assert found.mean[2] == 0.0
    assert covariance[1, 1] < 0.3 * covariance[2, 2] == pytest.approx(0.3 * 0.02**2)


def test_how_far_settings_are_off_is_learnt_of_those_that_differ() -> None:
    """Two that are nearly the same tell once how far they are off, and not twice."""
    spreads = Spreads(effect=0.01, mood=0.0, noise=0.002, learns_effect=True)
    replays = [(0, at, 0.06) for at in (0, 1) for _ in range(3)]
    alike = np.array([[1.0, 0.999, 0.0], [0.999, 1.0, 0.0], [0.0, 0.0, 1.0]])
    apart, same = (Effects.of(3, replays, spreads, own) for own in (None, alike))
    assert 0.01 < same.root[2, 2] < 0.8 * apart.root[2, 2]


@pytest.mark.parametrize(("rounds", "noise"), [(1, 0.05), (3, 0.03), (3, 0.08), (8, 0.05)])
def test_intervals_of_a_difference_hold_it_about_as_often_as_they_say(
    rounds: int, noise: float
) -> None:
    held = 0
    for seed in range(200):
        found = Effects.of(2, planted([0.0, 0.08], rounds, 0.2, noise, seed), WIDE)
        rng = np.random.default_rng(seed)
        drawn = [float(np.diff(found.draw(rng))[0]) for _ in range(200)]
        low, high = np.quantile(drawn, (0.05, 0.95))
        held += bool(low <= 0.08 <= high)
    # Nine in ten; less where the noise is larger than was thought, more where it is smaller.
    assert held >= 0.80 * 200


def test_no_replay_outweighs_what_all_others_say() -> None:
    steady = planted([0.0, 0.1], 6, 0.0, 0.01, seed=3)
    found = Effects.of(2, [*steady, (6, 0, 0.0), (6, 1, 0.1)], WIDE)
    assert found.mean[1] - found.mean[0] == pytest.approx(0.1, abs=0.02)


def test_what_a_round_would_tell_is_what_it_tells() -> None:
    """The covariance that is left is that of the same replays with one round more."""
    spreads, rng = Spreads(effect=0.1, mood=0.15, noise=0.05), np.random.default_rng(0)
    replays = [(n, at, float(rng.normal(0, 0.1))) for n in (1, 2) for at in (0, 1, 2)]
    before = Effects.of(3, replays, spreads)
    moves, shares = before.by_a_round([0, 2])
    # The mean of what is already thought changes no size of the noise by much.
    more = [(3, at, float(before.mean[at])) for at in (0, 2)]
    after = Effects.of(3, [*replays, *more], spreads)
    left = before.root @ before.root.T - moves @ moves.T
    assert left == pytest.approx(after.root @ after.root.T, rel=0.2, abs=1e-5)
    assert shares == pytest.approx(
        np.sqrt(np.diag(left) / np.diag(before.root @ before.root.T))
    )
