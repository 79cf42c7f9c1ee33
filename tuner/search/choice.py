"""Choose by draws: who loses least in expectation of those that surely keep their bounds.

A change has to be better than the current setting with the confidence that is asked for. Beside
the answer stand how sure it is, who may yet be the best, and what more replays would save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.search.draws import LIVE_ALONE, Draws
from tuner.search.judging import (
    COST,
    LOAD,
    SLO,
    TIE_LOSS,
    Judged,
    Pair,
    charged,
    is_out,
    is_sure,
    losses,
    open_of,
    used_by_sustained,
    why_of,
)
from tuner.search.objective import WORST_SLACK, is_rate
from tuner.search.race import (
    CONFIDENCE,
    LIKELY,
    STANDING_SHARES,
    Odds,
    RaceDecision,
    RaceVerdict,
    Standing,
)
from tuner.stats import Bools, Estimate, Floats

# The current setting goes for the sake of its bounds alone where it misses them this many times
# as often as is asked: ours, so that nobody restarts a server for a percent of probability.
MISSED = 2.0
# Who is the best in fewer draws than this is out of contention, and so are all but the
# likeliest of those that are left: ours, since what is learnt of these tells of the others.
CONTENDS, MAX_CONTENDERS = 0.05, 2
# How often it is drawn what a round might show: ours.
LOOKS = 24


@dataclass(frozen=True)
class Choice:
    """What the draws of some settings say beside the current one, asked with a confidence."""

    draws: Draws
    current: EngineLimits
    confidence: float = CONFIDENCE

    @cached_property
    def judged(self) -> Judged:
        """Who may be recommended, by what they are judged, and what each costs by that."""
        field, column, metric = criterion(self.draws, self.confidence, self.current)
        return Judged(field, column, metric, charged(self.draws.here, column, field))

    @cached_property
    def _now(self) -> int:
        """The place of the current setting."""
        return self.draws.settings.index(self.current)

    def decide(self, rounds: int = 0) -> RaceDecision:
        """Return the setting of least expected loss among those that surely keep their bounds.

        Where none surely does, the one that uses least of them. Of those that lose the same the
        current one, then the smallest, or who loses least where that alone is surely better
        than the current one. `rounds` are those of live replays behind the draws.

        Raises: NoFeasibleConfigError if every setting failed.
        """
        is_predicted = not rounds and self.draws.basis != LIVE_ALONE
        return replace(self._decision, rounds=rounds, is_predicted=is_predicted)

    @cached_property
    def _decision(self) -> RaceDecision:
        if not np.isfinite(self.draws.values).any():
            raise NoFeasibleConfigError(
                "no configuration survived its replay", "see the causes in trials.jsonl"
            )
        settings, judged, now = self.draws.settings, self.judged, self._now
        loss = judged.loss
        best, tied = self._least()
        rival = judged.rival(now) if best == now else best
        elsewhere, odds = self._beside(rival)
        if best == now:
            odds = self._of_a_keep(odds, rival, elsewhere)
        first = min(tied, key=lambda i: loss[i])
        if now not in (best, first) and not is_sure(odds):
            # The smallest of those that lose the same may be less sure than the best of them.
            found = self._beside(first)
            if is_sure(found[1]):
                best, (elsewhere, odds) = first, found
        is_change, is_same = best != now and is_sure(odds), best == now
        return RaceDecision(
            verdict=RaceVerdict.CHANGE if is_change else RaceVerdict.KEEP,
            winner=settings[best] if is_change else self.current,
            best=settings[best],
            tied=tuple(sorted(settings[i] for i in tied)),
            gain=None if is_same else elsewhere.gain,
            rounds=0,
            why=why_of(
                odds,
                self.confidence,
                is_same=is_same,
                may_rival_be=bool(judged.field[rival]),
            ),
            metric=judged.metric,
            gain_here=None if is_same else self._here(best).gain,
            odds=odds,
            standings=self._standings(),
        )

    def _here(self, setting: int) -> Pair:
        """Return a setting and the current one on the traffic as recorded."""
        pair, judged = [setting, self._now], self.judged
        return Pair(self.draws.here[:, pair], judged.cost[:, pair], judged.column)

    def _beside(self, setting: int) -> tuple[Pair, Odds]:
        """Return what other traffic makes of a setting and the current one, and the odds.

        By their bounds they are judged beside who shows that one of them is out.
        """
        draws, column = self.draws, self.judged.column
        pair = (draws.settings[setting], self.current)
        shown = () if column == COST else witnesses(draws, pair)
        elsewhere = Pair.of(draws.elsewhere((*pair, *shown)), column)
        here = self._here(setting)
        return elsewhere, odds_of(draws, setting, here, elsewhere, self.confidence)

    def _of_a_keep(self, odds: Odds, rival: int, elsewhere: Pair) -> Odds:
        """Return the odds of a rival where the current setting is thought best itself."""
        draws, now = self.draws, self._now
        return replace(
            odds,
            p_slo=draws.p_slos_met(draws.here[:, now]),
            p_sustained=draws.p_sustained(now),
            loss=float(self.judged.loss[now]),
            rival=None if rival == now else draws.settings[rival],
            is_alone=rival == now,
            open_ratio=None if rival == now else odds.open_ratio,
            p_slo_elsewhere=draws.p_slos_met(elsewhere.drawn[:, 1]),
        )

    def _standings(self) -> tuple[Standing, ...]:
        """Return what is known of each, of the least expected loss first.

        Nothing is of one that fails, or where nobody was replayed, whose costs are zeros.
        """
        draws, judged = self.draws, self.judged
        field, loss, shares = judged.field, judged.loss, judged.p_best
        cost = draws.here[:, :, judged.column]
        order = np.lexsort((loss, ~field)).tolist()
        quantiles = np.quantile(cost, STANDING_SHARES, axis=0, method="inverted_cdf")
        return tuple(
            Standing(
                draws.settings[i],
                tuple(quantiles[:, i].tolist()),
                draws.p_slos_met(draws.here[:, i]),
                draws.p_sustained(i),
                float(shares[i]) if field[i] else None,
                float(loss[i]) if field[i] else None,
            )
            for i in order
            if (np.isfinite(quantiles[:, i]) & (quantiles[:, i] > 0)).all()
        )

    def _least(self) -> tuple[int, list[int]]:
        """Return who loses least, and who loses no more that would matter.

        Among the same the current one, then the smallest.
        """
        loss, field, now = self.judged.loss, self.judged.field, self._now
        least = float(loss[field].min())
        same = [int(i) for i in np.flatnonzero(field) if loss[i] <= least + TIE_LOSS]
        first = now if now in same else min(same, key=lambda i: self.draws.settings[i])
        return first, same

    def contenders(
        self, most: int = MAX_CONTENDERS, share: float = CONTENDS
    ) -> list[EngineLimits]:
        """Return who may yet be the best, the likeliest first, and the current one last.

        Who may not be recommended comes behind who may.

        At most so many, who are the best in so large a share of the draws, then of the least
        expected loss. At least one other than the current one, as long as there is any. By a
        rate many settings are the same that bear the load: the smallest of them is the first.
        """
        settings, judged, now = self.draws.settings, self.judged, self._now
        alive: Bools = np.asarray(np.isfinite(self.draws.values).any(axis=0))
        shares, ranks = judged.p_best, np.lexsort((judged.loss, -judged.p_best, ~judged.field))
        order = [int(i) for i in ranks if i != now and alive[i]]
        # Among fewer there may be nobody left beside whom it shows who does not bear the load.
        bears = who_bears(self.draws, self.confidence)
        order = [i for i in order if bears[i]] or order
        inside = [i for i in order if shares[i] >= share] or order[:1]
        _, same = self._least()
        if is_rate(judged.metric) and (others := [i for i in same if i != now]):
            smallest = min(others, key=lambda i: settings[i])
            inside = [smallest, *(i for i in inside if i != smallest)]
        return [*(settings[i] for i in inside[:most]), self.current]

    @cached_property
    def regret(self) -> float:
        """What is lost in expectation by what would be recommended now, as a share.

        Against whoever is the best in each draw: what it would be worth to know everything.

        Source: expected value of perfect information, Raiffa & Schlaifer, Applied Statistical
            Decision Theory, chapter 4.
        """
        winner = self.draws.settings.index(self.decide().winner)
        return float(self.judged.loss[winner])

    def saved_by_a_round(self, replayed: Sequence[EngineLimits]) -> float:
        """Return what another round of live replays is expected to save, as a share.

        By what would be recommended after each of the outcomes that it may have. What replays
        do not tell, as how a model of speed is off, stays as open as it is.

        Source: expected value of sample information, Raiffa & Schlaifer, Applied Statistical
            Decision Theory, chapter 5.
        """
        draws = self.draws
        if not draws.learnable:
            return 0.0
        places = [draws.settings.index(limits) for limits in replayed]
        half = np.random.default_rng(0).standard_normal((LOOKS // 2, len(places)))
        shown = np.concatenate([half, -half])
        logs = np.zeros((LOOKS, *draws.here.shape))
        for told in draws.learnable:
            root, shares = told.effects.by_a_round(places)
            # Around each outcome less is open than now.
            nearer = (shares - 1.0) * (told.off - told.effects.mean)
            logs[:, :, :, told.column] = nearer + (shown @ root.T)[:, None, :]
        after = [replace(self, draws=draws.moved(each)).regret for each in logs]
        return max(0.0, self.regret - float(np.mean(after)))


def criterion(
    draws: Draws, confidence: float = CONFIDENCE, current: EngineLimits | None = None
) -> tuple[Bools, int, str]:
    """Return who may be recommended, by what of the draws they are judged, and its name.

    Who surely keeps the SLOs, by what is optimised; not who is likely out by a setting that
    keeps them less surely. Where nobody is left, by the SLOs, who is not likely out. Where
    nobody is further from them than the current setting is, whoever is as close is judged by
    what is optimised.

    Shapes: [settings].
    """
    here, bears = draws.here, who_bears(draws, confidence)
    used = here[:, :, SLO]
    keeps: Bools = (used <= 1.0).mean(axis=0) >= confidence
    field: Bools = bears & keeps & ~is_likely_out(here, ~keeps)
    if field.any():
        return field, COST, draws.metric
    stay = bears & ~is_likely_out(here)
    bears = stay if stay.any() else bears
    loss = losses(used, bears)
    least = bears & (loss <= loss[bears].min() + TIE_LOSS)
    if current is not None and least[draws.settings.index(current)] and least.sum() > 1:
        return least, COST, draws.metric
    return bears, SLO, WORST_SLACK


def is_likely_out(here: Floats, field: Bools | None = None) -> Bools:
    """Return who likely misses a load that one of the field nearer to its bounds sustains.

    A queue that grows for good is no price for an SLO that is just missed.

    Shapes: here is [draws, settings, 3], field and found [settings].
    """
    likely: Bools = is_out(here, field).mean(axis=0) > LIKELY
    return likely


def witnesses(draws: Draws, kept: Sequence[EngineLimits]) -> tuple[EngineLimits, ...]:
    """Return who shows that one of those kept is out for the load, where none of them does.

    One of the others, or nobody. Without it who keeps the SLOs, and answers ever fewer of who
    asks, would seem the best.
    """
    among: Bools = np.array([limits in kept for limits in draws.settings])
    lost = is_likely_out(draws.here) & ~is_likely_out(draws.here, among)
    if not lost[among].any():
        return ()
    used = used_by_sustained(draws.here, ~among)
    nearest = used.argmin(axis=1)[np.isfinite(used).any(axis=1)]
    return (draws.settings[np.bincount(nearest).argmax()],)


def who_bears(draws: Draws, confidence: float) -> Bools:
    """Return who may be recommended for the load.

    Who surely does not sustain it may not be where another surely does that is likely
    nearer to its bounds, whichever of both those are.

    Shapes: [settings].
    """
    sustains = (draws.here[:, :, LOAD] <= 1.0).mean(axis=0)
    # Who may keep the SLOs is asked for with less; that is no surer of the load.
    surely = max(confidence, 1 - confidence)
    sure = sustains >= surely
    # Asked for no more than an even chance one surely does and surely does not.
    bears: Bools = sure | (sustains > 1 - surely) | ~is_likely_out(draws.here, sure)
    return bears


def odds_of(draws: Draws, setting: int, here: Pair, elsewhere: Pair, confidence: float) -> Odds:
    """Return how sure it is that the first of a pair, one of the draws', is better."""
    p_better = float(here.is_better.mean())
    # What is more probably kept than it was, and surely: the SLOs, and the load.
    kept = (here.drawn[:, :, [SLO, LOAD]] <= 1.0).mean(axis=0)
    slos, load = (kept[0] >= confidence) & (1 - kept[1] > MISSED * (1 - confidence))
    return Odds(
        p_better,
        draws.p_slos_met(here.drawn[:, 0]),
        draws.p_sustained(setting),
        here.mean_loss,
        float(elsewhere.is_better.mean()),
        meets_more=bool(slos or (load and p_better >= confidence)),
        basis=draws.basis,
        confidence=confidence,
        open_ratio=open_of(here.gain),
        p_slo_elsewhere=draws.p_slos_met(elsewhere.drawn[:, 0]),
        cost_elsewhere=elsewhere.mean_cost,
    )


def beside(
    ours: Draws, theirs: Draws, confidence: float = CONFIDENCE
) -> tuple[Odds, str, Estimate | None]:
    """Return how sure one setting is better than one of another engine, and by how much.

    Of draws that both share, each of one setting. Between them stands by what they are
    judged; the ratio is that on other traffic.
    """
    here = np.concatenate([ours.here, theirs.here], axis=1)
    parts = [draws.elsewhere(draws.settings) for draws in (ours, theirs)]
    elsewhere = np.concatenate(parts, axis=1)
    settings = (*ours.settings, *theirs.settings)
    pair = replace(ours, settings=settings, here=here, learnable=())
    _, column, metric = criterion(pair, confidence)
    other = Pair.of(elsewhere, column)
    odds = odds_of(pair, 0, Pair.of(here, column), other, confidence)
    return odds, metric, other.gain
