"""Draws of settings: what other traffic of the kind, and the model's own error, make of them.

Every draw replays all settings in contention on the same requests, so that what a draw does to
all of them cancels. Metrics of one decision come from one latency vector: a setting that may
break an SLO has a probability of it, not another metric. One that does not sustain a load that
another sustains costs the more the further it is from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.search.effects import Effects
from tuner.search.judging import COST, LOAD, SLO, Pair
from tuner.search.objective import WORST_SLACK, Score, Tier
from tuner.search.race import CONFIDENCE, OTHER_TRAFFIC
from tuner.stats import Estimate, Floats, student_quantile

# What the draws are of, beside other traffic.
MODEL_ALONE = "the model's error alone: of this traffic no other can be drawn"
LIVE_ALONE = "other replays of the same traffic"
Others = Callable[[Sequence[EngineLimits]], Floats]
"""Takes settings and returns what is drawn of them on other traffic, [draws, settings, 3]."""


def drawn_of(scores: Sequence[Score]) -> Floats:
    """Return what counts of each setting's score. Shapes: [settings, 3]."""
    return np.array(
        [(s.value_in(Tier.GOOD), _used(s.slo_used, s), _used(s.load_used, s)) for s in scores]
    )


def saved_by_more(loss: float, had: float, more: float) -> float:
    """Return what more of the same is expected to save of what choosing now loses.

    What is open shrinks as the root of what it was learnt from, and what it costs with it; that
    is the most that it may, for some of it shrinks by nothing.

    >>> round(saved_by_more(0.10, 100.0, 100.0), 3)
    0.029
    """
    return loss * (1 - math.sqrt(had / (had + more)))


def wider_for(stretches: int) -> float:
    """Return how many times as far as draws of so few stretches traffic spreads."""
    share = 0.5 + CONFIDENCE / 2
    student = student_quantile(stretches - 1, share) / NormalDist().inv_cdf(share)
    return student * math.sqrt(stretches / (stretches - 1))


@dataclass(frozen=True, slots=True)
class Learnable:
    """What of a column of draws replays would tell: its effects, and those that were drawn.

    Shapes: off is [draws, settings], in logarithms.
    """

    effects: Effects
    off: Floats
    column: int = COST


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn of each setting: the objective's value, and what its bounds leave.

    `slo_used` is how much of the tightest SLO is used up, `load_used` how much of what can be
    sustained; beyond 1 it is broken, or overloaded.

    `here` is on the traffic that was recorded. What other traffic of the kind makes of a
    setting `elsewhere` returns, and finds out when it is asked: most are never recommended.
    `basis` says what the draws are of, and `learnable` what of them replays would tell, nothing
    where none are thought of.

    Shapes: here is [draws, settings, 3].
    """

    settings: tuple[EngineLimits, ...]
    metric: str
    here: Floats
    elsewhere: Others
    basis: str
    has_slos: bool
    learnable: tuple[Learnable, ...] = ()

    @classmethod
    def of(
        cls,
        settings: Sequence[EngineLimits],
        point: Sequence[Score],
        here: Floats,
        others: Others | None = None,
        stretches: int | None = None,
        learnable: tuple[Learnable, ...] = (),
        off: Floats | None = None,
    ) -> Self:
        """Return draws around what was predicted of the traffic as it was recorded.

        Resampled traffic is less bound together than the recorded one, which moves its mean:
        only how it varies is taken from it. `stretches` is of how many `others` draws it, of
        which few vary too little; None where the traffic is not drawn, and other traffic is
        thought to be as uncertain as the recorded.

        The point is known to be `off` by so many times.

        Shapes: point is [settings], here [draws, settings, 3], off [settings, 3].
        """
        times, at = 1.0 if stretches is None else wider_for(stretches), drawn_of(point)
        at = at if off is None else at * off

        def elsewhere(some: Sequence[EngineLimits]) -> Floats:
            places = [settings.index(limits) for limits in some]
            drawn = here[:, places] if others is None else others(some)
            return around(at[places], drawn, times)

        return cls(
            tuple(settings),
            next((score.own_metric for score in point if score.tier is not Tier.FAILED), ""),
            here,
            elsewhere,
            MODEL_ALONE if others is None else OTHER_TRAFFIC,
            any(score.slo_used is not None for score in point),
            learnable,
        )

    @classmethod
    def pooled(cls, parts: Sequence[Self]) -> Self:
        """Return draws of the same settings together, as of any one of the parts."""

        def elsewhere(some: Sequence[EngineLimits]) -> Floats:
            return np.concatenate([p.elsewhere(some) for p in parts])

        here = np.concatenate([p.here for p in parts])
        return replace(parts[0], here=here, elsewhere=elsewhere, learnable=())

    def among(self, settings: Sequence[EngineLimits]) -> Self:
        """Return the draws of these settings alone."""
        at = [self.settings.index(limits) for limits in settings]
        return replace(self, settings=tuple(settings), here=self.here[:, at], learnable=())

    @property
    def values(self) -> Floats:
        """The objective's value on the recorded traffic. Shapes: [draws, settings]."""
        return self.here[:, :, COST]

    def with_margin(self, margin: float) -> Self:
        """Return the draws as though so many times as much of the SLOs were used up."""
        times = np.array([1.0, margin, 1.0])
        return replace(
            self, here=self.here * times, elsewhere=lambda some: self.elsewhere(some) * times
        )

    def times(self, factors: Floats) -> Self:
        """Return the draws with each's steps so many times as long. Shapes: [draws]."""
        each = factors[:, None, None]
        return replace(
            self, here=self.here * each, elsewhere=lambda some: self.elsewhere(some) * each
        )

    def ratios(
        self, setting: EngineLimits, other: EngineLimits, metric: str
    ) -> tuple[Estimate | None, Estimate | None]:
        """Return a metric of one over another's on other traffic and on the recorded traffic.

        Of the metric by which a decision of them was made, beside all others. None without end.
        """
        column = SLO if metric == WORST_SLACK else COST
        among = tuple(dict.fromkeys((setting, other, *self.settings)))
        here = self.here[:, [self.settings.index(limits) for limits in among]]
        return Pair.of(self.elsewhere(among), column).gain, Pair.of(here, column).gain

    def moved(self, logs: Floats) -> Self:
        """Return the draws moved. Shapes: logs is [draws, settings, 3]."""
        times: Floats = np.exp(logs)

        def elsewhere(some: Sequence[EngineLimits]) -> Floats:
            return self.elsewhere(some) * times[:, [self.settings.index(x) for x in some]]

        return replace(self, here=self.here * times, elsewhere=elsewhere)

    def p_slos_met(self, drawn: Floats) -> float | None:
        """Return in which share of its draws a setting meets every SLO, None without any.

        Shapes: drawn is [draws, 3].
        """
        return float((drawn[:, SLO] <= 1.0).mean()) if self.has_slos else None

    def p_sustained(self, setting: int) -> float | None:
        """Return how probably a setting sustains the load, None where that does not count.

        As under an objective that does not ask for it, and in a closed loop: no setting that
        runs has anything of the load used up then.
        """
        load = self.here[:, :, LOAD]
        counts = bool(((load > 0) & np.isfinite(load)).any())
        return float((load[:, setting] <= 1.0).mean()) if counts else None


def _used(share: float | None, score: Score) -> float:
    """Return how much of a bound is used up, nothing where there is none."""
    if not score.is_whole:
        return math.inf
    return 0.0 if share is None else share


def around(point: Floats, drawn: Floats, times: float) -> Floats:
    """Return draws moved to where the point is, their logarithms spread so many times as far.

    Shapes: point is [settings, 3], drawn [draws, settings, 3].
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs, centre = np.log(drawn), np.log(point)
    usable = np.isfinite(logs).all(axis=0) & np.isfinite(centre)
    moved: Floats = drawn.astype(np.float64, copy=True)
    spread = logs[:, usable] - logs[:, usable].mean(axis=0)
    moved[:, usable] = np.exp(centre[usable] + times * spread)
    return moved
