"""How far settings are apart where nothing was predicted: hardly, by some, or by a lot.

Of settings that could be the best most are nearly the same, and a few are far from all others.
One normal distribution for both takes noise for a difference, and the more so the more settings
there are to be the luckiest. So each is of one of some kinds, all ways to deal the kinds out
are weighed by how well they explain the replays, and what is drawn is drawn of all of them.

Source: spike and slab, Mitchell & Beauchamp, Bayesian Variable Selection in Linear Regression,
    JASA 83 (1988); the few settings of a race let all ways be counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple, Self

import numpy as np

from tuner.search.effects import PRIOR_FREEDOM, Effects, Replay, Spreads, design_of
from tuner.stats import Floats


class Kind(NamedTuple):
    """How far a setting is from what all have in common, and how likely it is to be so.

    Units: `spread` is a standard deviation of logarithms.
    """

    spread: float
    share: float


# Ours: nearly the same, as settings are that make the same batches; apart by a tenth; and by
# any factor, as a cap that queues is.
KINDS: Final = (Kind(0.01, 0.4), Kind(0.1, 0.3), Kind(1.0, 0.3))
# How far replays of a setting may differ, as tried: from a quiet GPU to a shared machine.
_NOISES: Final = np.geomspace(0.004, 0.3, 28)
# Ways that explain so little are left out.
_LEAST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Mixture:
    """The effects of settings, as a mixture of normal distributions.

    `noise` is how far replays of one setting differ, `mood` how far rounds do.

    Shapes: means [parts, settings], covariances [parts, settings, settings], shares [parts].
    """

    means: Floats
    covariances: Floats
    shares: Floats
    noise: float
    mood: float

    @classmethod
    def of(
        cls,
        settings: int,
        replays: Sequence[Replay],
        spreads: Spreads,
        kinds: Sequence[Kind] = KINDS,
    ) -> Self:
        """Return the effects of so many settings; there are kinds ** settings ways.

        `replays` are the round, the setting and the value of each; `spreads.effect` is of what
        the settings have in common.
        """
        design, rounds = design_of(settings, replays)
        values = np.array([value for _, _, value in replays])
        moods, own = design[:, :rounds], design[:, rounds:]
        ways = np.array(list(product(range(len(kinds)), repeat=settings)))
        spread, share = np.array(kinds).T
        # Before any replay, of each way: how effects vary together, and so how values do.
        before = spreads.effect**2 + np.eye(settings) * (spread[ways] ** 2)[:, None, :]
        shown = before @ own.T
        width, axes = np.linalg.eigh(own @ shown + spreads.mood**2 * moods @ moods.T)
        along = values @ axes
        noise2 = _NOISES**2
        wide = width[:, None, :] + noise2[:, None]
        log_of_noise = -PRIOR_FREEDOM * (np.log(_NOISES) + spreads.noise**2 / noise2 / 2)
        explained = -(np.log(wide) + along[:, None, :] ** 2 / wide).sum(axis=-1) / 2
        logs = explained + log_of_noise + np.log(share)[ways].sum(axis=1)[:, None]
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        way, noise = np.nonzero(shares >= _LEAST_SHARE)
        told = shown[way] @ axes[way]
        each = told / wide[way, noise][:, None, :]
        kept = shares[way, noise]
        return cls(
            np.einsum("psr,pr->ps", each, along[way]),
            before[way] - each @ told.swapaxes(1, 2),
            kept / kept.sum(),
            math.sqrt(float(shares.sum(axis=0) @ noise2)),
            spreads.mood,
        )

    def draws(self, count: int, rng: np.random.Generator) -> Floats:
        """Return so many effects that are as possible. Shapes: [count, settings]."""
        roots = np.linalg.cholesky(self.covariances + _tiny(self.means.shape[1]))
        part = rng.choice(self.shares.size, count, p=self.shares)
        normal = rng.standard_normal((count, self.means.shape[1]))
        found: Floats = self.means[part] + np.einsum("cij,cj->ci", roots[part], normal)
        return found

    @property
    def pooled(self) -> Effects:
        """The normal distribution with the same mean and covariance."""
        mean = self.shares @ self.means
        around = self.means - mean
        covariance = np.einsum("p,pij->ij", self.shares, self.covariances)
        covariance += np.einsum("p,pi,pj->ij", self.shares, around, around)
        root = np.asarray(np.linalg.cholesky(covariance + _tiny(mean.size)), np.float64)
        return Effects(mean, root, self.noise, math.inf, self.mood)


def _tiny(size: int) -> Floats:
    """Return what keeps rounding from making a covariance none."""
    return 1e-12 * np.eye(size)
