"""Decide by draws: what other traffic of the kind, and the model's own error, make of settings.

Every draw replays all settings in contention on the same requests, so that what a draw does to
all of them cancels. Metrics of one decision come from one latency vector: a setting that may
break an SLO, or not sustain the load, has a probability of it, not another metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.special import ndtri, stdtrit

from tuner.arrays import Bools, Floats
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.search.objective import WORST_SLACK, Score, Tier
from tuner.search.race import Odds, RaceDecision, RaceVerdict
from tuner.stats import Estimate

# How sure a change must be, and an SLO to be met: ours, as an interval of 90 % says it.
CONFIDENCE = 0.9
# Settings whose expected losses differ by less than this are the same: ours, less than anybody
# would restart a server for.
TIE_LOSS = 0.01
# The current setting goes for the sake of its bounds alone where it misses them this many times
# as often as is asked: ours, so that nobody restarts a server for a percent of probability.
MISSED = 2.0
# What is lost at most in a draw, as where a setting fails: ours, so that a mean exists.
MAX_LOSS = 10.0


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn of each setting: the objective's value, and what its bounds leave.

    `slo_used` is how much of the tightest SLO is used up, `load_used` how much of what can be
    sustained; beyond 1 it is broken, or overloaded. `is_resampled`: not the model's error alone
    was drawn, but other traffic too.

    Shapes: [draws, settings] each, but point, what was predicted of the traffic as recorded,
        [settings].
    """

    settings: tuple[EngineLimits, ...]
    metric: str
    point: Floats
    values: Floats
    slo_used: Floats
    load_used: Floats
    is_resampled: bool
    has_slos: bool

    @classmethod
    def of(
        cls,
        settings: Sequence[EngineLimits],
        point: Sequence[Score],
        drawn: Sequence[Sequence[Score]],
        stretches: int | None,
    ) -> Self:
        """Return draws around what was predicted of the traffic as it was recorded.

        Resampled traffic is less bound together than the recorded one, which moves its mean:
        only how it varies is taken from it. `stretches` is of how many it was drawn, of which
        few vary too little; None where the traffic was not drawn.

        Shapes: point is [settings], drawn [draws][settings].
        """
        times = 1.0
        if stretches is not None:
            share = 0.5 + CONFIDENCE / 2
            student = float(stdtrit(stretches - 1, share)) / float(ndtri(share))
            times = student * math.sqrt(stretches / (stretches - 1))

        def column(of: list[list[float]], at: list[float]) -> Floats:
            return _around(np.array(at), np.array(of), times)

        values = [[score.value_in(Tier.GOOD) for score in row] for row in drawn]
        point_values = [score.value_in(Tier.GOOD) for score in point]
        return cls(
            tuple(settings),
            next((score.own_metric for score in point if score.tier is not Tier.FAILED), ""),
            np.array(point_values),
            column(values, point_values),
            column(
                [[_used(s.slo_used, s) for s in row] for row in drawn],
                [_used(s.slo_used, s) for s in point],
            ),
            column(
                [[_used(s.load_used, s) for s in row] for row in drawn],
                [_used(s.load_used, s) for s in point],
            ),
            stretches is not None,
            any(score.slo_used is not None for score in point),
        )

    @property
    def meets(self) -> Bools:
        """Whether every SLO is met."""
        return self.slo_used <= 1.0

    @property
    def sustains(self) -> Bools:
        """Whether the load is sustained."""
        return self.load_used <= 1.0

    def decide(self, current: EngineLimits, confidence: float = CONFIDENCE) -> RaceDecision:
        """Return the setting of least expected loss among those that surely keep their bounds.

        Where none surely does, the one that uses least of its SLOs; and where all SLOs hold and
        no setting sustains the load, the one of least loss. Of those that lose the same the
        current one, then the smallest.

        Raises: NoFeasibleConfigError if every setting failed.
        """
        if not np.isfinite(self.values).any():
            raise NoFeasibleConfigError(
                "no configuration survived its prediction", "see the causes in trials.jsonl"
            )
        field, cost, metric = self._criterion(confidence)
        loss = _losses(cost, field)
        now = self.settings.index(current)
        best = self._least(loss, field, now)
        if best == now:
            return self._kept(current, now, metric)
        odds = self._odds(best, now, cost, confidence)
        gain = self._gain(best, now, cost)
        limits = self.settings[best]
        verdict, winner = RaceVerdict.CHANGE, limits
        if odds.meets_more:
            why = f"keeps with probability {confidence:g} what the current one does not"
        elif odds.p_better >= confidence:
            why = f"better with probability {odds.p_better:.2f}"
        else:
            why = f"better with probability {odds.p_better:.2f}, which is below {confidence:g}"
            verdict, winner = RaceVerdict.KEEP, current
        return RaceDecision(
            *(verdict, winner, limits, (winner,), gain, 0, why, metric),
            is_predicted=True,
            odds=odds,
        )

    def _kept(self, current: EngineLimits, now: int, metric: str) -> RaceDecision:
        """Return that nothing is better than the current configuration."""
        odds = Odds(
            0.0,
            self._p_slo(now),
            _share(self.sustains[:, now]),
            0.0,
            is_resampled=self.is_resampled,
        )
        why = f"nothing that was predicted is better by {TIE_LOSS:.0%}"
        return RaceDecision(
            *(RaceVerdict.KEEP, current, current, (current,), None, 0, why, metric),
            is_predicted=True,
            odds=odds,
        )

    def _criterion(self, confidence: float) -> tuple[Bools, Floats, str]:
        """Return who may be recommended, by which costs they are judged, and what those are."""
        holds = (self.meets & self.sustains).mean(axis=0) >= confidence
        meets = self.meets.mean(axis=0) >= confidence
        if holds.any():
            return holds, self.values, self.metric
        if meets.any():
            return meets, self.values, self.metric
        return np.ones(len(self.settings), dtype=np.bool_), self.slo_used, WORST_SLACK

    def _least(self, loss: Floats, field: Bools, now: int) -> int:
        """Return who loses least; among the same the current one, then the smallest."""
        least = float(loss[field].min())
        same = [i for i in np.flatnonzero(field) if loss[i] <= least + TIE_LOSS]
        return now if now in same else min(same, key=lambda i: self.settings[i])

    def _odds(self, best: int, now: int, cost: Floats, confidence: float) -> Odds:
        holds = self.meets & self.sustains
        ours, theirs = holds[:, best], holds[:, now]
        better = (ours & ~theirs) | ((ours == theirs) & (cost[:, best] < cost[:, now]))
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.nan_to_num(cost[:, now] / cost[:, best] - 1, nan=0.0, posinf=MAX_LOSS)
        missed = 1 - _share(theirs)
        return Odds(
            _share(better),
            self._p_slo(best),
            _share(self.sustains[:, best]),
            max(0.0, float(np.minimum(loss, MAX_LOSS).mean())),
            meets_more=_share(ours) >= confidence and missed > MISSED * (1 - confidence),
            is_resampled=self.is_resampled,
        )

    def _p_slo(self, setting: int) -> float | None:
        """Return how probably a setting meets every SLO, None where there is none."""
        return _share(self.meets[:, setting]) if self.has_slos else None

    def _gain(self, best: int, now: int, cost: Floats) -> Estimate | None:
        """Return the ratio of the costs on the traffic as recorded, with its interval."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = cost[:, best] / cost[:, now]
        ends = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
        if not (np.isfinite(ratios) & (ratios > 0)).all():
            return None
        low, high = np.quantile(ratios, ends).tolist()
        return Estimate(float(np.exp(np.log(ratios).mean())), low, high, len(ratios))


def _used(share: float | None, score: Score) -> float:
    """Return how much of a bound is used up, nothing where there is none."""
    if score.tier in (Tier.FAILED, Tier.CUT):
        return math.inf
    return 0.0 if share is None else share


def _around(point: Floats, drawn: Floats, times: float) -> Floats:
    """Return draws moved to where the point is, their logarithms spread so many times as far.

    Shapes: point is [settings], drawn [draws, settings].
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs, centre = np.log(drawn), np.log(point)
    usable = np.isfinite(logs).all(axis=0) & np.isfinite(centre)
    moved: Floats = drawn.astype(np.float64, copy=True)
    spread = logs[:, usable] - logs[:, usable].mean(axis=0)
    moved[:, usable] = np.exp(centre[usable] + times * spread)
    return moved


def _losses(cost: Floats, field: Bools) -> Floats:
    """Return what each setting costs more than the best of the field, on average.

    Shapes: [settings].
    """
    least = cost[:, field].min(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = cost / least - 1
    expected: Floats = np.clip(np.nan_to_num(loss, nan=0.0, posinf=MAX_LOSS), 0, MAX_LOSS).mean(
        axis=0
    )
    return expected


def _share(holds: Bools) -> float:
    return float(holds.mean())
