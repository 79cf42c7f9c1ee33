"""How settings stand beside each other by what was drawn of them.

In each draw a setting costs what the objective says, and more where it does not sustain a load
that another one sustains; it keeps its SLOs or does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from tuner.search.objective import MISSED_LOAD
from tuner.search.race import CONFIDENCE, LIKELY, MAX_LOSS, Odds
from tuner.stats import Bools, Estimate, Floats

# Settings whose expected losses differ by less than this are the same: ours, less than anybody
# would restart a server for.
TIE_LOSS = 0.01
# What is drawn of each setting: the objective's value, and how much of its bounds is used up.
COST, SLO, LOAD = range(3)


@dataclass(frozen=True, slots=True)
class Judged:
    """Who may be recommended, by what settings are judged, and what each costs by that.

    Shapes: field is [settings], cost [draws, settings].
    """

    field: Bools
    column: int
    metric: str
    cost: Floats

    @property
    def loss(self) -> Floats:
        """What each costs more than the best of the field, on average. Shapes: [settings]."""
        return losses(self.cost, self.field)

    @property
    def p_best(self) -> Floats:
        """In which share of the draws each is the best of the field. Shapes: [settings]."""
        least = np.where(self.field, self.cost, math.inf).argmin(axis=1)
        return np.bincount(least, minlength=len(self.field)) / len(least)

    def rival(self, now: int) -> int:
        """Return who is the likeliest to be better than the current setting.

        Among those that may be recommended, or where there is none among all that do not fail;
        the current one where there is no other.
        """
        alive: Bools = np.asarray(np.isfinite(self.cost).any(axis=0))
        others = [i for i in np.flatnonzero(alive & self.field).tolist() if i != now]
        others = others or [i for i in np.flatnonzero(alive).tolist() if i != now]
        better, loss = (self.cost < self.cost[:, [now]]).mean(axis=0), self.loss
        return max(others, key=lambda i: (better[i], -loss[i]), default=now)


def is_sure(odds: Odds) -> bool:
    """Whether what the odds are of may replace the current setting.

    A gain must be more likely than not on other traffic of the kind too, or be one in the mean:
    near overload little is lost as often as much is gained. Bounds that the current one misses
    are judged on the recorded traffic alone.
    """
    return odds.meets_more or (odds.p_better >= odds.confidence and _pays_elsewhere(odds))


def _pays_elsewhere(odds: Odds) -> bool:
    if odds.p_elsewhere >= LIKELY:
        return True
    return odds.cost_elsewhere is not None and odds.cost_elsewhere <= 1 - TIE_LOSS


@dataclass(frozen=True, slots=True)
class Pair:
    """What was drawn of two settings, and what each costs by what they are judged by.

    Shapes: drawn is [draws, 2, 3], cost [draws, 2].
    """

    drawn: Floats
    cost: Floats
    column: int

    @classmethod
    def of(cls, drawn: Floats, column: int) -> Self:
        """Return the first two of some settings, as they are judged among these.

        Shapes: drawn is [draws, settings, 3].
        """
        return cls(drawn[:, :2], charged(drawn, column)[:, :2], column)

    @property
    def is_better(self) -> Bools:
        """In which draws the first is better: it alone keeps its SLOs, or costs less.

        Judged by its bounds it is if it uses less of them. Shapes: [draws].
        """
        ours, theirs = (self.drawn[:, :, SLO] <= 1.0).T
        is_less: Bools = self.cost[:, 0] < self.cost[:, 1]
        better: Bools = (ours & ~theirs) | ((ours == theirs) & is_less)
        return is_less if self.column != COST else better

    @property
    def gain(self) -> Estimate | None:
        """What the first costs over the second, with its interval; None without end.

        What a missed load costs is in none of it where what is optimised decides.
        """
        return ratio_of(self.drawn[:, :, COST] if self.column == COST else self.cost)

    @property
    def mean_cost(self) -> float | None:
        """What the first costs over the second in the mean.

        None where it meets the SLOs in fewer of the draws.
        """
        met, its = (self.drawn[:, :, SLO] <= 1.0).sum(axis=0)
        if met < its:
            return None
        ours, theirs = self.cost.T
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.nan_to_num(ours / theirs, nan=1.0, posinf=1 + MAX_LOSS)
        return float(np.minimum(ratios, 1 + MAX_LOSS).mean())

    @property
    def mean_loss(self) -> float:
        """What the second costs more than the first, in the mean; 0 at least."""
        ours, theirs = self.cost.T
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.nan_to_num(theirs / ours - 1, nan=0.0, posinf=MAX_LOSS)
        return max(0.0, float(np.minimum(loss, MAX_LOSS).mean()))


def charged(drawn: Floats, column: int, field: Bools | None = None) -> Floats:
    """Return what settings cost, with what it costs not to sustain what one of the field does.

    By an SLO that is as much of the load as is used up by who is out.

    Shapes: drawn is [draws, settings, 3], field [settings], found [draws, settings].
    """
    cost, over = drawn[:, :, column], drawn[:, :, LOAD] - 1.0
    if column != COST:
        by_bounds: Floats = np.where(is_out(drawn, field), _bounds_used(drawn), cost)
        return by_bounds
    sustains = over <= 0 if field is None else (over <= 0) & field
    missed = (over > 0) & sustains.any(axis=1, keepdims=True)
    by_cost: Floats = np.where(missed, cost * (1 + np.maximum(over, MISSED_LOAD)), cost)
    return by_cost


def is_out(drawn: Floats, field: Bools | None = None) -> Bools:
    """Return in which draws a setting misses a load that one nearer to its bounds sustains.

    The nearer one is of the field; the bounds are the SLOs and the load.

    Shapes: drawn is [draws, settings, 3], field [settings], found [draws, settings].
    """
    nearest = used_by_sustained(drawn, field).min(axis=1, keepdims=True)
    out: Bools = (drawn[:, :, LOAD] > 1.0) & (nearest < _bounds_used(drawn))
    return out


def used_by_sustained(drawn: Floats, field: Bools | None = None) -> Floats:
    """Return how much of its bounds who sustains the load uses; without end for all others.

    And for who is not of the field. Shapes: drawn is [draws, settings, 3], field [settings],
    found [draws, settings].
    """
    sustains = drawn[:, :, LOAD] <= 1.0
    sustains = sustains if field is None else sustains & field
    used: Floats = np.where(sustains, _bounds_used(drawn), math.inf)
    return used


def _bounds_used(drawn: Floats) -> Floats:
    """Return how much of the SLOs and the load is used up, whichever is more."""
    used: Floats = drawn[:, :, [SLO, LOAD]].max(axis=2)
    return used


def why_of(odds: Odds, confidence: float, *, is_same: bool, may_rival_be: bool = True) -> str:
    """Say in a line why the answer is what it is.

    `may_rival_be` says whether the rival of a current setting that is kept may be the answer.
    """
    if is_same:
        of = "" if may_rival_be else " that surely keeps its bounds"
        return f"nothing{of} is better by {TIE_LOSS:.0%} in the mean"
    if odds.meets_more:
        bounds = _bounds(odds)
        return f"{bounds} with probability {confidence:g}, which the current one does not"
    text = f"better with probability {odds.p_better:.2f}"
    if odds.p_better < confidence:
        return f"{text}, which is below {confidence:g}"
    if not _pays_elsewhere(odds):
        return f"{text} on this traffic, but only {odds.p_elsewhere:.2f} on other of its kind"
    return text


def _bounds(odds: Odds) -> str:
    """Say which bounds a setting surely keeps, as what it does."""
    slos, load = (
        p is not None and p >= odds.confidence for p in (odds.p_slo, odds.p_sustained)
    )
    if slos and load:
        return "keeps the SLOs and the load"
    return "meets the SLOs" if slos else "sustains the load"


def ratio_of(pair: Floats) -> Estimate | None:
    """Return the ratio of the costs of two with its interval, None where one has no end.

    Shapes: pair is [draws, 2].
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = pair[:, 0] / pair[:, 1]
    ends = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
    if not (np.isfinite(ratios) & (ratios > 0)).all():
        return None
    # Of few draws the usual quantiles lie too far inside.
    middle, low, high = np.quantile(ratios, (0.5, *ends), method="weibull").tolist()
    mean = float(np.exp(np.log(ratios).mean()))
    # Near overload a few draws are many times off, which can move the mean out of the interval.
    return Estimate(mean if low <= mean <= high else middle, low, high, len(ratios))


def open_of(ratio: Estimate | None) -> float | None:
    """Return half the interval of a ratio as a share, None where it has no end."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return math.sqrt(ratio.high / ratio.low) - 1


def losses(cost: Floats, field: Bools) -> Floats:
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
