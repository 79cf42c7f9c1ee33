"""Decide by draws: what other traffic of the kind, and the model's own error, make of settings.

Every draw replays all settings in contention on the same requests, so that what a draw does to
all of them cancels. Metrics of one decision come from one latency vector: a setting that may
break an SLO, or not sustain the load, has a probability of it, not another metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
from scipy.special import ndtri, stdtrit

from tuner.arrays import Bools, Floats
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.search.effects import Effects, Spreads
from tuner.search.objective import RATE, WORST_SLACK, Score, Tier
from tuner.search.race import (
    CONFIDENCE,
    STANDING_SHARES,
    Odds,
    RaceDecision,
    RaceRun,
    RaceVerdict,
    Standing,
)
from tuner.stats import Estimate

# Settings whose expected losses differ by less than this are the same: ours, less than anybody
# would restart a server for.
TIE_LOSS = 0.01
# The current setting goes for the sake of its bounds alone where it misses them this many times
# as often as is asked: ours, so that nobody restarts a server for a percent of probability.
MISSED = 2.0
# A change must be more likely than not to be better on other traffic of the kind too.
LIKELY = 0.5
# Who is the best in fewer draws than this is out of contention, and so are all but the
# likeliest of those that are left: ours, since what is learnt of these tells of the others.
CONTENDS, MAX_CONTENDERS = 0.05, 2
# Of what live replays show where nothing was predicted, before any: settings differ by a lot,
# rounds by a busy machine's mood, replays of a round by what two differ by on one: ours.
LIVE_SPREADS = Spreads(effect=1.0, mood=0.15, noise=0.05)
# Of what a bound leaves it is the level that counts, of which a mood is a part.
LEVEL_SPREADS = Spreads(effect=1.0, mood=0.0, noise=0.05)
# What the draws are of.
OTHER_TRAFFIC = "other traffic of the kind and the model's error"
MODEL_ALONE = "the model's error alone: of this traffic no other can be drawn"
LIVE_ALONE = "other replays of the same traffic"
_LEAST_USED = 1e-9
# What of draws has a row for each.
_DRAWN = (
    "values",
    "slo_used",
    "load_used",
    "elsewhere",
    "slo_elsewhere",
    "load_elsewhere",
)
# How often it is drawn what a round might show: ours.
LOOKS = 24
# What is lost at most in a draw, as where a setting fails: ours, so that a mean exists.
MAX_LOSS = 10.0


@dataclass(frozen=True, slots=True)
class Learnable:
    """What of draws replays would tell: the effects of settings, and those that were drawn.

    Shapes: off is [draws, settings], in logarithms.
    """

    effects: Effects
    off: Floats


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn of each setting: the objective's value, and what its bounds leave.

    `slo_used` is how much of the tightest SLO is used up, `load_used` how much of what can be
    sustained; beyond 1 it is broken, or overloaded.

    These are on the traffic that was recorded, `elsewhere`, `slo_elsewhere` and
    `load_elsewhere` on other traffic of the kind. `basis` says what the draws are of, and
    `learnable` what of them replays would tell, None where none are thought of.

    Shapes: [draws, settings] each, but point, what was predicted of the traffic as recorded,
        [settings].
    """

    settings: tuple[EngineLimits, ...]
    metric: str
    point: Floats
    values: Floats
    slo_used: Floats
    load_used: Floats
    elsewhere: Floats
    slo_elsewhere: Floats
    load_elsewhere: Floats
    basis: str
    has_slos: bool
    learnable: Learnable | None = None

    @classmethod
    def of(
        cls,
        settings: Sequence[EngineLimits],
        point: Sequence[Score],
        drawn: Sequence[Sequence[Score]],
        here: Sequence[Sequence[Score]],
        stretches: int | None,
        learnable: Learnable | None = None,
    ) -> Self:
        """Return draws around what was predicted of the traffic as it was recorded.

        Resampled traffic is less bound together than the recorded one, which moves its mean:
        only how it varies is taken from it. `stretches` is of how many it was drawn, of which
        few vary too little; None where the traffic was not drawn. `here` are the same draws of
        the model on the traffic as it was recorded.

        Shapes: point is [settings], drawn and here [draws][settings].
        """
        times = 1.0
        if stretches is not None:
            share = 0.5 + CONFIDENCE / 2
            student = float(stdtrit(stretches - 1, share)) / float(ndtri(share))
            times = student * math.sqrt(stretches / (stretches - 1))

        def columns(of: Callable[[Score], float]) -> tuple[Floats, Floats]:
            at, others = np.array([of(s) for s in point]), [[of(s) for s in r] for r in drawn]
            return np.array([[of(s) for s in r] for r in here]), _around(
                at, np.array(others), times
            )

        values, elsewhere = columns(lambda score: score.value_in(Tier.GOOD))
        slo_used, slo_elsewhere = columns(lambda score: _used(score.slo_used, score))
        load_used, load_elsewhere = columns(lambda score: _used(score.load_used, score))
        return cls(
            tuple(settings),
            next((score.own_metric for score in point if score.tier is not Tier.FAILED), ""),
            np.array([score.value_in(Tier.GOOD) for score in point]),
            values,
            slo_used,
            load_used,
            elsewhere,
            slo_elsewhere,
            load_elsewhere,
            MODEL_ALONE if stretches is None else OTHER_TRAFFIC,
            any(score.slo_used is not None for score in point),
            learnable,
        )

    @classmethod
    def of_replays(
        cls, settings: Sequence[EngineLimits], runs: Sequence[RaceRun], draws: int
    ) -> Self:
        """Return draws of what live replays in turns say, where nothing was predicted.

        A setting that failed once is taken to fail; one that was not replayed may be anything.
        """
        whole = [run for run in runs if run.score.tier is not Tier.CUT]
        failed = {run.limits for run in whole if run.score.tier is Tier.FAILED}
        good = [run for run in whole if run.limits not in failed and run.limits in settings]
        is_own = all(math.isfinite(run.score.value_in(Tier.GOOD)) for run in good)
        metric = good[0].score.own_metric if good and is_own else RATE
        drawn = partial(_drawn_live, settings, good, draws)
        values, learnable = drawn(LIVE_SPREADS, lambda score: score.value_of(metric))
        values[:, [limits in failed for limits in settings]] = math.inf
        bounds = (
            drawn(LEVEL_SPREADS, lambda score: score.slo_used)[0],
            drawn(LEVEL_SPREADS, lambda score: score.load_used)[0],
        )
        has_slos = any(run.score.slo_used is not None for run in good)
        point = np.median(values, axis=0)
        drawn_twice = (values, *bounds, values, *bounds)
        basis = (LIVE_ALONE, has_slos, learnable)
        return cls(tuple(settings), metric, point, *drawn_twice, *basis)

    @classmethod
    def pooled(cls, parts: Sequence[Self]) -> Self:
        """Return draws of the same settings together, as of any one of the parts."""
        first = parts[0]
        rows = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _DRAWN}
        point = np.exp(np.mean([np.log(p.point) for p in parts], axis=0))
        return replace(first, point=point, learnable=None, **rows)

    def among(self, settings: Sequence[EngineLimits]) -> Self:
        """Return the draws of these settings alone."""
        at = [self.settings.index(limits) for limits in settings]
        columns = {name: getattr(self, name)[:, at] for name in _DRAWN}
        here, point = tuple(settings), self.point[at]
        return replace(self, settings=here, point=point, learnable=None, **columns)

    @property
    def meets(self) -> Bools:
        """Whether every SLO is met."""
        return self.slo_used <= 1.0

    @property
    def sustains(self) -> Bools:
        """Whether the load is sustained."""
        return self.load_used <= 1.0

    @property
    def _bounds(self) -> tuple[tuple[Bools, Bools], ...]:
        """What may be asked for, the most first: all bounds are kept, or the SLOs alone.

        On the recorded traffic and on other of its kind.

        Shapes: [draws, settings] each.
        """
        meets, sustains = self.slo_elsewhere <= 1.0, self.load_elsewhere <= 1.0
        return (self.meets & self.sustains, meets & sustains), (self.meets, meets)

    def with_margin(self, margin: float) -> Self:
        """Return the draws as though so many times as much of the SLOs were used up."""
        used, elsewhere = self.slo_used * margin, self.slo_elsewhere * margin
        return replace(self, slo_used=used, slo_elsewhere=elsewhere)

    def decide(
        self, current: EngineLimits, confidence: float = CONFIDENCE, rounds: int = 0
    ) -> RaceDecision:
        """Return the setting of least expected loss among those that surely keep their bounds.

        Where none surely does, the one that uses least of its SLOs; and where all SLOs hold and
        no setting sustains the load, the one of least loss. Of those that lose the same the
        current one, then the smallest. `rounds` are those of live replays behind the draws.

        Raises: NoFeasibleConfigError if every setting failed.
        """
        if not np.isfinite(self.values).any():
            raise NoFeasibleConfigError(
                "no configuration survived its replay", "see the causes in trials.jsonl"
            )
        field, cost, elsewhere, metric = self.criterion(confidence, current)
        loss = _losses(cost, field)
        now = self.settings.index(current)
        best, tied = self._least(loss, field, now)
        odds = self._odds(best, now, (cost, elsewhere), confidence)
        is_better = odds.meets_more or (
            odds.p_better >= confidence and odds.p_elsewhere >= LIKELY
        )
        is_change = best != now and is_better
        verdict = RaceVerdict.CHANGE if is_change else RaceVerdict.KEEP
        return RaceDecision(
            verdict=verdict,
            winner=self.settings[best] if is_change else current,
            best=self.settings[best],
            tied=tuple(sorted(self.settings[i] for i in tied)),
            gain=None if best == now else _gain(best, now, elsewhere),
            rounds=rounds,
            why=_why(odds, confidence, is_same=best == now),
            metric=metric,
            gain_here=None if best == now else _gain(best, now, cost),
            is_predicted=not rounds and self.basis != LIVE_ALONE,
            odds=odds,
            standings=self._standings(field, cost, loss),
        )

    def _standings(self, field: Bools, cost: Floats, loss: Floats) -> tuple[Standing, ...]:
        """Return what is known of each, of the least expected loss first."""
        least = np.where(field, cost, math.inf).argmin(axis=1)
        shares = np.bincount(least, minlength=len(self.settings)) / len(least)
        order = np.lexsort((loss, ~field)).tolist()
        quantiles = np.quantile(cost, STANDING_SHARES, axis=0, method="inverted_cdf")
        return tuple(
            Standing(
                self.settings[i],
                tuple(quantiles[:, i].tolist()),
                self._p_slo(i),
                _share(self.sustains[:, i]),
                float(shares[i]) if field[i] else None,
                float(loss[i]) if field[i] else None,
            )
            for i in order
            if np.isfinite(quantiles[:, i]).all()
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
        expected loss. At least one other than the current one, as long as there is any.
        """
        field, cost, *_ = self.criterion(confidence, current)
        least = np.where(field, cost, math.inf).argmin(axis=1)
        shares = np.bincount(least, minlength=len(self.settings)) / len(least)
        now = self.settings.index(current)
        alive: Bools = np.asarray(np.isfinite(self.values).any(axis=0))
        loss = _losses(cost, field)
        order = [int(i) for i in np.lexsort((loss, -shares)) if i != now and alive[i]]
        inside = [i for i in order if shares[i] >= share][:most] or order[:1]
        return [*(self.settings[i] for i in inside), current]

    def ratios(
        self, setting: EngineLimits, other: EngineLimits, confidence: float = CONFIDENCE
    ) -> tuple[Estimate | None, Estimate | None]:
        """Return what one costs over another on other traffic and on the recorded traffic.

        None without end.
        """
        _, cost, elsewhere, _ = self.criterion(confidence, other)
        pair = self.settings.index(setting), self.settings.index(other)
        return _gain(*pair, elsewhere), _gain(*pair, cost)

    def regret(self, current: EngineLimits, confidence: float = CONFIDENCE) -> float:
        """Return what is lost in expectation by what would be recommended now, as a share.

        Against whoever is the best in each draw: what it would be worth to know everything.

        Source: expected value of perfect information, Raiffa & Schlaifer, Applied Statistical
            Decision Theory, chapter 4.
        """
        field, cost, *_ = self.criterion(confidence, current)
        loss = _losses(cost, field)
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
        if self.learnable is None:
            return 0.0
        off, effects = self.learnable.off, self.learnable.effects
        root, shares = effects.by_a_round([self.settings.index(s) for s in replayed])
        # Around each outcome less is open than now.
        nearer = (shares - 1.0) * (off - effects.mean)
        rng = np.random.default_rng(0)
        half = rng.standard_normal((LOOKS // 2, root.shape[1]))
        moves = np.concatenate([half, -half]) @ root.T
        after = [self._moved(nearer + move).regret(current, confidence) for move in moves]
        return max(0.0, self.regret(current, confidence) - float(np.mean(after)))

    def _moved(self, logs: Floats) -> Self:
        """Return the draws with all latencies moved. Shapes: logs is [draws, settings]."""
        times = np.exp(logs)
        names = ("values", "slo_used", "elsewhere", "slo_elsewhere")
        return replace(self, **{name: getattr(self, name) * times for name in names})

    def criterion(
        self, confidence: float = CONFIDENCE, current: EngineLimits | None = None
    ) -> tuple[Bools, Floats, Floats, str]:
        """Return who may be recommended, by which costs they are judged, and what those are.

        The costs on the recorded traffic, and on other traffic of the kind. Where nobody surely
        keeps the SLOs and nobody is further from them than the current setting is, whoever is
        as close is judged by what is optimised.

        Shapes: [settings], then [draws, settings] each.
        """
        for kept, _ in self._bounds:
            field = kept.mean(axis=0) >= confidence
            if field.any():
                return field, self.values, self.elsewhere, self.metric
        every = np.ones(len(self.settings), dtype=np.bool_)
        loss = _losses(self.slo_used, every)
        least = loss <= loss.min() + TIE_LOSS
        if current is not None and least[self.settings.index(current)] and least.sum() > 1:
            return least, self.values, self.elsewhere, self.metric
        return every, self.slo_used, self.slo_elsewhere, WORST_SLACK

    def _least(self, loss: Floats, field: Bools, now: int) -> tuple[int, list[int]]:
        """Return who loses least, and who loses no more that would matter.

        Among the same the current one, then the smallest.
        """
        least = float(loss[field].min())
        same = [int(i) for i in np.flatnonzero(field) if loss[i] <= least + TIE_LOSS]
        return now if now in same else min(same, key=lambda i: self.settings[i]), same

    def _odds(
        self, best: int, now: int, costs: tuple[Floats, Floats], confidence: float
    ) -> Odds:
        """Return how sure it is that one is better, by its costs here and elsewhere."""
        cost, elsewhere = costs
        # What nobody keeps is asked of nobody.
        asked = (b for b in self._bounds if (b[0].mean(axis=0) >= confidence).any())
        holds, holds_elsewhere = next(asked, self._bounds[-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.nan_to_num(cost[:, now] / cost[:, best] - 1, nan=0.0, posinf=MAX_LOSS)
        missed = 1 - _share(holds[:, now])
        return Odds(
            _share(_is_better(best, now, holds, cost)),
            self._p_slo(best),
            _share(self.sustains[:, best]),
            max(0.0, float(np.minimum(loss, MAX_LOSS).mean())),
            _share(_is_better(best, now, holds_elsewhere, elsewhere)),
            meets_more=_share(holds[:, best]) >= confidence
            and missed > MISSED * (1 - confidence),
            basis=self.basis,
            confidence=confidence,
        )

    def _p_slo(self, setting: int) -> float | None:
        """Return how probably a setting meets every SLO, None where there is none."""
        return _share(self.meets[:, setting]) if self.has_slos else None


def _is_better(best: int, now: int, holds: Bools, cost: Floats) -> Bools:
    """Return in which draws one is better: it alone keeps its bounds, or costs less."""
    ours, theirs = holds[:, best], holds[:, now]
    better: Bools = (ours & ~theirs) | ((ours == theirs) & (cost[:, best] < cost[:, now]))
    return better


def _drawn_live(
    settings: Sequence[EngineLimits],
    runs: Sequence[RaceRun],
    draws: int,
    spreads: Spreads,
    of: Callable[[Score], float | None],
) -> tuple[Floats, Learnable | None]:
    """Return draws of a value of each setting by its replays, and what more of them would tell.

    Zeros and nothing where none has one.

    Shapes: [draws, settings].
    """
    replays = [
        (run.round, settings.index(run.limits), math.log(max(value, _LEAST_USED)))
        for run in runs
        if (value := of(run.score)) is not None and value < math.inf
    ]
    if not replays:
        return np.zeros((draws, len(settings))), None
    middle = float(np.median([value for _, _, value in replays]))
    around = [(number, setting, value - middle) for number, setting, value in replays]
    found, rng = Effects.of(len(settings), around, spreads), np.random.default_rng(0)
    off = np.array([found.draw(rng) for _ in range(draws)])
    return np.exp(middle + off), Learnable(found, off)


def _why(odds: Odds, confidence: float, *, is_same: bool) -> str:
    """Say in a line why the answer is what it is."""
    if is_same:
        return f"nothing is better by {TIE_LOSS:.0%}"
    if odds.meets_more:
        return f"keeps with probability {confidence:g} what the current one does not"
    text = f"better with probability {odds.p_better:.2f}"
    if odds.p_better < confidence:
        return f"{text}, which is below {confidence:g}"
    if odds.p_elsewhere < LIKELY:
        return f"{text} on this traffic, but only {odds.p_elsewhere:.2f} on other of its kind"
    return text


def _gain(best: int, now: int, cost: Floats) -> Estimate | None:
    """Return the ratio of the costs with its interval, None where one has no end."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = cost[:, best] / cost[:, now]
    ends = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
    if not (np.isfinite(ratios) & (ratios > 0)).all():
        return None
    middle, low, high = np.quantile(ratios, (0.5, *ends)).tolist()
    mean = float(np.exp(np.log(ratios).mean()))
    # Near overload a few draws are many times off, which can move the mean out of the interval.
    return Estimate(mean if low <= mean <= high else middle, low, high, len(ratios))


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
