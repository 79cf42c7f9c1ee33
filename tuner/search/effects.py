"""What repeated replays say of each setting, where all of a round share the machine's mood.

Values are logarithms of what was measured: of a metric, or of how far it was from what had
been predicted. A round's mood is common to its replays, a setting's effect to its rounds, and
what is left is noise; how large the noise is, and the effects, is learnt from all replays
together, so that two rounds already have an honest interval.

Source: two-way random effects, Searle, Casella & McCulloch, Variance Components, chapter 3;
    variances by their posterior mode beside a scaled inverse chi-square prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from tuner.search.judging import COST, SLO
from tuner.stats import Floats

# How many replays' worth the assumed noise and spread count for: ours.
PRIOR_FREEDOM = 4.0
_PASSES = 8

Replay = tuple[int, int, float]
"""The round of a replay, the number of its setting, and the logarithm of its value."""


@dataclass(frozen=True, slots=True)
class Spreads:
    """How far values are thought to differ before any was measured: standard deviations.

    `effect` from setting to setting, `mood` from round to round, `noise` from replay to replay.
    Where `learns_effect`, the first is learnt from the effects that were measured.
    """

    effect: float
    mood: float
    noise: float
    learns_effect: bool = False


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of settings, as a normal distribution with a scale of Student's t.

    `noise` is how far replays of one setting differ, `mood` how far rounds do.

    Shapes: mean is [settings], root [settings, settings], a square root of the covariance.
    """

    mean: Floats
    root: Floats
    noise: float
    freedom: float
    mood: float = 0.0

    @classmethod
    def of(
        cls,
        settings: int,
        replays: Sequence[Replay],
        spreads: Spreads,
        alike: Floats | None = None,
    ) -> Self:
        """Return the effects of so many settings.

        `replays` are the round, the setting and the value of each, `alike` the correlation of
        effects before any was measured, None where they have nothing to do with each other.

        Shapes: alike is [settings, settings].
        """
        alike = np.eye(settings) if alike is None else alike
        design, rounds = design_of(settings, replays)
        values = np.array([value for _, _, value in replays])
        own = rounds + np.flatnonzero(design[:, rounds:].any(axis=0))
        unlike, apart = (
            np.linalg.inv(alike),
            np.linalg.inv(alike[np.ix_(own - rounds, own - rounds)]),
        )
        prior = np.zeros((design.shape[1], design.shape[1]))
        prior[:rounds, :rounds] = np.eye(rounds) / max(spreads.mood, 1e-9) ** 2
        effect2, noise2, freedom = spreads.effect**2, spreads.noise**2, PRIOR_FREEDOM
        for _ in range(_PASSES):
            prior[rounds:, rounds:] = unlike / effect2
            covariance = np.linalg.inv(prior + design.T @ design / noise2)
            mean = covariance @ design.T @ values / noise2
            used = float(np.trace(covariance @ design.T @ design)) / noise2
            off = values - design @ mean
            freedom = PRIOR_FREEDOM + max(0.0, len(values) - used)
            noise2 = (PRIOR_FREEDOM * spreads.noise**2 + float(off @ off)) / freedom
            if spreads.learns_effect:
                squares = np.outer(mean[own], mean[own]) + covariance[np.ix_(own, own)]
                learnt = PRIOR_FREEDOM * spreads.effect**2 + float(np.sum(apart * squares))
                effect2 = learnt / (PRIOR_FREEDOM + len(own))
        mine = covariance[rounds:, rounds:] + 1e-15 * np.eye(settings)
        root = np.asarray(np.linalg.cholesky(mine), np.float64)
        noise = float(np.sqrt(noise2))
        return cls(np.asarray(mean[rounds:]), root, noise, freedom, spreads.mood)

    def among(self, settings: Sequence[int]) -> Self:
        """Return the effects of some of the settings alone."""
        covariance = (self.root @ self.root.T)[np.ix_(settings, settings)]
        root = np.linalg.cholesky(covariance + 1e-15 * np.eye(len(settings)))
        return replace(self, mean=self.mean[list(settings)], root=np.asarray(root))

    def draw(self, rng: np.random.Generator) -> Floats:
        """Return effects that are as possible. Shapes: [settings]."""
        wider = np.sqrt(self.freedom / rng.chisquare(self.freedom))
        found: Floats = self.mean + wider * (self.root @ rng.standard_normal(self.mean.size))
        return found

    def by_a_round(self, replayed: Sequence[int]) -> tuple[Floats, Floats]:
        """Return what one more round of some settings would tell.

        A root of the covariance of how far it would move the means, and to which share it would
        bring each setting's standard deviation.

        Shapes: [settings, replayed], [settings].
        """
        covariance = self.root @ self.root.T
        seen = covariance[:, list(replayed)]
        errors = self.noise**2 * np.eye(len(replayed)) + self.mood**2
        told = np.linalg.cholesky(seen[list(replayed)] + errors)
        moves: Floats = np.linalg.solve(told, seen.T).T
        before = np.diag(covariance)
        left = np.maximum(before - (moves**2).sum(axis=1), 0.0)
        shares: Floats = np.sqrt(left / np.maximum(before, 1e-30))
        return moves, shares


def design_of(settings: int, replays: Sequence[Replay]) -> tuple[Floats, int]:
    """Return of which round and which setting each replay is, and how many rounds there are.

    Shapes: [replays, rounds + settings].
    """
    rounds = sorted({number for number, _, _ in replays})
    design = np.zeros((len(replays), len(rounds) + settings))
    for at, (number, setting, _) in enumerate(replays):
        design[at, rounds.index(number)] = design[at, len(rounds) + setting] = 1.0
    return design, len(rounds)


# By how much a replay differs from the simulation of the same requests at its own speed, from
# setting to setting and from replay to replay, before any was compared: ours. Identical live
# replays, each freed of its own speed, differ by 1.0 to 1.4 % in their tails.
UNEXPLAINED = Spreads(effect=0.01, mood=0.0, noise=0.02, learns_effect=True)

Off = tuple[int, float]
"""The number of a setting, and how far off a replay of it was."""


@dataclass(frozen=True, slots=True)
class Unexplained:
    """What live replays show to be off beyond their own speed, in logarithms, by setting.

    Of what is optimised, and of the tightest SLO, which has little to do with that: TTFT is off
    where a tail of E2E is not. Utilisation is hardly off at all.
    """

    cost: Effects
    slo: Effects

    @classmethod
    def of(
        cls,
        settings: int,
        cost: Sequence[Off] = (),
        slo: Sequence[Off] = (),
        alike: Floats | None = None,
    ) -> Self:
        """Return what replays show, each the number of its setting and how far it is off.

        `alike` is how alike settings are, as for the effects.
        """
        found = (
            Effects.of(
                settings, [(0, setting, off) for setting, off in seen], UNEXPLAINED, alike
            )
            for seen in (cost, slo)
        )
        return cls(*found)

    def among(self, settings: Sequence[int]) -> Self:
        """Return what is off of some of the settings alone."""
        return type(self)(self.cost.among(settings), self.slo.among(settings))

    @property
    def means(self) -> Floats:
        """How many times as much as predicted it is. Shapes: [settings, 3]."""
        logs = np.zeros((self.cost.mean.size, 3))
        logs[:, COST], logs[:, SLO] = self.cost.mean, self.slo.mean
        found: Floats = np.exp(logs)
        return found
