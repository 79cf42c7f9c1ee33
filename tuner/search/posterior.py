"""Decide by draws: what other traffic of the kind, and the model's own error, make of settings.

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
from tuner.errors import NoFeasibleConfigError
from tuner.search.effects import Effects
from tuner.search.judging import (
    COST,
    LOAD,
    SLO,
    TIE_LOSS,
    Judged,
    charged,
    is_better,
    is_sure,
    losses,
    mean_cost,
    open_of,
    ratio_of,
    why_of,
)
from tuner.search.objective import WORST_SLACK, Score, Tier, is_rate
from tuner.search.race import (
    CONFIDENCE,
    LIKELY,
    MAX_LOSS,
    OTHER_TRAFFIC,
    STANDING_SHARES,
    Odds,
    RaceDecision,
    RaceVerdict,
    Standing,
)
from tuner.stats import Bools, Estimate, Floats, student_quantile

# The current setting goes for the sake of its bounds alone where it misses them this many times
# as often as is asked: ours, so that nobody restarts a server for a percent of probability.
MISSED = 2.0
# Who is the best in fewer draws than this is out of contention, and so are all but the
# likeliest of those that are left: ours, since what is learnt of these tells of the others.
CONTENDS, MAX_CONTENDERS = 0.05, 2
# What the draws are of, beside other traffic.
MODEL_ALONE = "the model's error alone: of this traffic no other can be drawn"
LIVE_ALONE = "other replays of the same traffic"
Others = Callable[[Sequence[EngineLimits]], Floats]
"""Takes settings and returns what is drawn of them on other traffic, [draws, settings, 3]."""
# How often it is drawn what a round might show: ours.
LOOKS = 24


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

    def decide(
        self, current: EngineLimits, confidence: float = CONFIDENCE, rounds: int = 0
    ) -> RaceDecision:
        """Return the setting of least expected loss among those that surely keep their bounds.

        Where none surely does, the one that uses least of its SLOs and is not far from
        sustaining the load; and where all SLOs hold and no setting sustains the load, the one
        of least loss. Of those that lose the same the
        current one, then the smallest, or who loses least where that alone is surely better
        than the current one. `rounds` are those of live replays behind the draws.

        Raises: NoFeasibleConfigError if every setting failed.
        """
        if not np.isfinite(self.values).any():
            raise NoFeasibleConfigError(
                "no configuration survived its replay", "see the causes in trials.jsonl"
            )
        judged, now = self._judged(confidence, current), self.settings.index(current)
        column, loss = judged.column, judged.loss
        best, tied = self._least(loss, judged.field, now)
        rival = judged.rival(now) if best == now else best
        elsewhere, odds = self._beside(rival, now, column, confidence)
        if best == now:
            odds = self._of_a_keep(odds, rival, now, float(loss[now]), elsewhere)
        first = min(tied, key=lambda i: loss[i])
        if now not in (best, first) and not is_sure(odds):
            # The smallest of those that lose the same may be less sure than the best of them.
            found = self._beside(first, now, column, confidence)
            if is_sure(found[1]):
                best, (elsewhere, odds) = first, found
        is_change = best != now and is_sure(odds)
        verdict = RaceVerdict.CHANGE if is_change else RaceVerdict.KEEP
        return RaceDecision(
            verdict=verdict,
            winner=self.settings[best] if is_change else current,
            best=self.settings[best],
            tied=tuple(sorted(self.settings[i] for i in tied)),
            gain=None if best == now else ratio_of(elsewhere[:, :, column]),
            rounds=rounds,
            why=why_of(
                odds, confidence, is_same=best == now, may_rival_be=bool(judged.field[rival])
            ),
            metric=judged.metric,
            gain_here=None if best == now else ratio_of(self.here[:, [best, now], column]),
            is_predicted=not rounds and self.basis != LIVE_ALONE,
            odds=odds,
            standings=self._standings(judged),
        )

    def _beside(
        self, setting: int, now: int, column: int, confidence: float
    ) -> tuple[Floats, Odds]:
        """Return what other traffic makes of a setting and the current one, and the odds.

        Shapes: the first is [draws, 2, 3].
        """
        elsewhere = self.elsewhere((self.settings[setting], self.settings[now]))
        return elsewhere, self.odds([setting, now], elsewhere, column, confidence)

    def _of_a_keep(
        self, odds: Odds, rival: int, now: int, loss: float, elsewhere: Floats
    ) -> Odds:
        """Return the odds of a rival where the current setting is thought best itself.

        Shapes: elsewhere is [draws, 2, 3], of the rival and the current setting.
        """
        return replace(
            odds,
            p_slo=self._slos_met(self.here[:, now]),
            p_sustained=self._p_sustained(now),
            loss=loss,
            rival=None if rival == now else self.settings[rival],
            is_alone=rival == now,
            open_ratio=None if rival == now else odds.open_ratio,
            p_slo_elsewhere=self._slos_met(elsewhere[:, 1]),
        )

    def _standings(self, judged: Judged) -> tuple[Standing, ...]:
        """Return what is known of each, of the least expected loss first.

        Nothing is of one that fails, or where nobody was replayed, whose costs are zeros.
        """
        field, loss, shares = judged.field, judged.loss, judged.p_best
        cost = self.here[:, :, judged.column]
        order = np.lexsort((loss, ~field)).tolist()
        quantiles = np.quantile(cost, STANDING_SHARES, axis=0, method="inverted_cdf")
        return tuple(
            Standing(
                self.settings[i],
                tuple(quantiles[:, i].tolist()),
                self._slos_met(self.here[:, i]),
                self._p_sustained(i),
                float(shares[i]) if field[i] else None,
                float(loss[i]) if field[i] else None,
            )
            for i in order
            if (np.isfinite(quantiles[:, i]) & (quantiles[:, i] > 0)).all()
        )

    def contenders(
        self,
        current: EngineLimits,
        confidence: float = CONFIDENCE,
        most: int = MAX_CONTENDERS,
        share: float = CONTENDS,
    ) -> list[EngineLimits]:
        """Return who may yet be the best, the likeliest first, and the current one last.

        At most so many, who are the best in so large a share of the draws, then of the least
        expected loss. At least one other than the current one, as long as there is any. By a
        rate many settings are the same that bear the load: the smallest of them is the first.
        """
        judged, now = self._judged(confidence, current), self.settings.index(current)
        alive: Bools = np.asarray(np.isfinite(self.values).any(axis=0))
        loss, shares = judged.loss, judged.p_best
        order = [int(i) for i in np.lexsort((loss, -shares)) if i != now and alive[i]]
        # Among fewer there may be nobody left beside whom it shows who does not bear the load.
        bears = self._bears(confidence)
        order = [i for i in order if bears[i]] or order
        inside = [i for i in order if shares[i] >= share] or order[:1]
        _, same = self._least(loss, judged.field, now)
        if is_rate(judged.metric) and (others := [i for i in same if i != now]):
            smallest = min(others, key=lambda i: self.settings[i])
            inside = [smallest, *(i for i in inside if i != smallest)]
        return [*(self.settings[i] for i in inside[:most]), current]

    def ratios(
        self, setting: EngineLimits, other: EngineLimits, metric: str
    ) -> tuple[Estimate | None, Estimate | None]:
        """Return a metric of one over another's on other traffic and on the recorded traffic.

        Of the metric by which a decision of them was made. None without end.
        """
        column = SLO if metric == WORST_SLACK else COST
        pair = [self.settings.index(setting), self.settings.index(other)]
        elsewhere = self.elsewhere((setting, other))
        return ratio_of(elsewhere[:, :, column]), ratio_of(self.here[:, pair, column])

    def against(
        self, other: Self, confidence: float = CONFIDENCE
    ) -> tuple[Odds, str, Estimate | None]:
        """Return how sure one setting is better than one of another engine, and by how much.

        Of draws that both share, each of one setting. Between them stands by what they are
        judged; the ratio is that on other traffic.
        """
        both = np.concatenate([self.here, other.here], axis=1)
        parts = [own.elsewhere(own.settings) for own in (self, other)]
        elsewhere = np.concatenate(parts, axis=1)
        settings = (*self.settings, *other.settings)
        pair = replace(self, settings=settings, here=both, learnable=())
        _, column, metric = pair.criterion(confidence)
        odds = pair.odds([0, 1], elsewhere, column, confidence)
        return odds, metric, ratio_of(elsewhere[:, :, column])

    def regret(self, current: EngineLimits, confidence: float = CONFIDENCE) -> float:
        """Return what is lost in expectation by what would be recommended now, as a share.

        Against whoever is the best in each draw: what it would be worth to know everything.

        Source: expected value of perfect information, Raiffa & Schlaifer, Applied Statistical
            Decision Theory, chapter 4.
        """
        loss = self._judged(confidence, current).loss
        return float(loss[self.settings.index(self.decide(current, confidence).winner)])

    def saved_by_a_round(
        self,
        replayed: Sequence[EngineLimits],
        current: EngineLimits,
        confidence: float = CONFIDENCE,
    ) -> float:
        """Return what another round of live replays is expected to save, as a share.

        By what would be recommended after each of the outcomes that it may have. What replays
        do not tell, as how a model of speed is off, stays as open as it is.

        Source: expected value of sample information, Raiffa & Schlaifer, Applied Statistical
            Decision Theory, chapter 5.
        """
        if not self.learnable:
            return 0.0
        places = [self.settings.index(limits) for limits in replayed]
        half = np.random.default_rng(0).standard_normal((LOOKS // 2, len(places)))
        shown = np.concatenate([half, -half])
        logs = np.zeros((LOOKS, *self.here.shape))
        for told in self.learnable:
            root, shares = told.effects.by_a_round(places)
            # Around each outcome less is open than now.
            nearer = (shares - 1.0) * (told.off - told.effects.mean)
            logs[:, :, :, told.column] = nearer + (shown @ root.T)[:, None, :]
        after = [self._moved(each).regret(current, confidence) for each in logs]
        return max(0.0, self.regret(current, confidence) - float(np.mean(after)))

    def _moved(self, logs: Floats) -> Self:
        """Return the draws moved. Shapes: logs is [draws, settings, 3]."""
        times: Floats = np.exp(logs)

        def elsewhere(some: Sequence[EngineLimits]) -> Floats:
            return self.elsewhere(some) * times[:, [self.settings.index(x) for x in some]]

        return replace(self, here=self.here * times, elsewhere=elsewhere)

    def _judged(self, confidence: float, current: EngineLimits) -> Judged:
        field, column, metric = self.criterion(confidence, current)
        return Judged(field, column, metric, charged(self.here, column, field))

    def criterion(
        self, confidence: float = CONFIDENCE, current: EngineLimits | None = None
    ) -> tuple[Bools, int, str]:
        """Return who may be recommended, by what of the draws they are judged, and its name.

        Where nobody surely keeps the SLOs and nobody is further from them than the current
        setting is, whoever is as close is judged by what is optimised.

        Shapes: [settings].
        """
        bears = self._bears(confidence)
        field: Bools = bears & ((self.here[:, :, SLO] <= 1.0).mean(axis=0) >= confidence)
        if field.any():
            return field, COST, self.metric
        loss = losses(self.here[:, :, SLO], bears)
        least = bears & (loss <= loss[bears].min() + TIE_LOSS)
        if current is not None and least[self.settings.index(current)] and least.sum() > 1:
            return least, COST, self.metric
        return bears, SLO, WORST_SLACK

    def _bears(self, confidence: float) -> Bools:
        """Return who may be recommended for the load.

        Who surely does not sustain it may not be where another surely does that is likely
        nearer to its bounds, whichever of both those are: a queue that grows twice as fast as
        it is served is no price for an SLO that is just missed.

        Shapes: [settings].
        """
        used = self.here[:, :, [SLO, LOAD]].max(axis=2)
        sustains = (self.here[:, :, LOAD] <= 1.0).mean(axis=0)
        # Who may keep the SLOs is asked for with less; that is no surer of the load.
        surely = max(confidence, 1 - confidence)
        sure = sustains >= surely
        if not sure.any():
            return np.ones(len(self.settings), dtype=np.bool_)
        nearest = used[:, sure].min(axis=1, keepdims=True)
        may = (sustains > 1 - surely) | ((used > nearest).mean(axis=0) <= LIKELY)
        # Asked for no more than an even chance one surely does and surely does not.
        bears: Bools = sure | may
        return bears

    def _least(self, loss: Floats, field: Bools, now: int) -> tuple[int, list[int]]:
        """Return who loses least, and who loses no more that would matter.

        Among the same the current one, then the smallest.
        """
        least = float(loss[field].min())
        same = [int(i) for i in np.flatnonzero(field) if loss[i] <= least + TIE_LOSS]
        return now if now in same else min(same, key=lambda i: self.settings[i]), same

    def odds(self, pair: list[int], elsewhere: Floats, column: int, confidence: float) -> Odds:
        """Return how sure it is that the first of a pair is better than the second."""
        here, best = self.here[:, pair], pair[0]
        cost, its = charged(here, column).T
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.nan_to_num(its / cost - 1, nan=0.0, posinf=MAX_LOSS)
        p_better = float(is_better(here, column).mean())
        # What is more probably kept than it was, and surely: the SLOs, and the load.
        kept = (here[:, :, [SLO, LOAD]] <= 1.0).mean(axis=0)
        slos, load = (kept[0] >= confidence) & (1 - kept[1] > MISSED * (1 - confidence))
        return Odds(
            p_better,
            self._slos_met(here[:, 0]),
            self._p_sustained(best),
            max(0.0, float(np.minimum(loss, MAX_LOSS).mean())),
            float(is_better(elsewhere, column).mean()),
            meets_more=bool(slos or (load and p_better >= confidence)),
            basis=self.basis,
            confidence=confidence,
            open_ratio=open_of(ratio_of(here[:, :, column])),
            p_slo_elsewhere=self._slos_met(elsewhere[:, 0]),
            cost_elsewhere=mean_cost(elsewhere, column),
        )

    def _slos_met(self, drawn: Floats) -> float | None:
        """Return in which share of its draws a setting meets every SLO, None without any.

        Shapes: drawn is [draws, 3].
        """
        return float((drawn[:, SLO] <= 1.0).mean()) if self.has_slos else None

    def _p_sustained(self, setting: int) -> float | None:
        """Return how probably a setting sustains the load, None where that does not count.

        As under an objective that does not ask for it, and in a closed loop: no setting that
        runs has anything of the load used up then.
        """
        load = self.here[:, :, LOAD]
        counts = bool(((load > 0) & np.isfinite(load)).any())
        return float((load[:, setting] <= 1.0).mean()) if counts else None


def _used(share: float | None, score: Score) -> float:
    """Return how much of a bound is used up, nothing where there is none."""
    if score.tier in (Tier.FAILED, Tier.CUT):
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
