"""The end of a run: winner and current configuration on engines started as they would be.

What these show is weighed with what was predicted of such engines, or with what raced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import NormalDist

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.metrics import Measurement
from tuner.run.context import RunContext
from tuner.run.drawing import Deployed
from tuner.run.records import ColdConfirmation
from tuner.run.time_plan import RacePlan, cold_cost_s
from tuner.run.trial_runner import TrialRunner
from tuner.search.draws import LIVE_ALONE
from tuner.search.judging import TIE_LOSS
from tuner.search.objective import Score, Tier
from tuner.search.race import LIKELY, Odds, RaceDecision, RaceVerdict, by_round
from tuner.search.trials import Phase
from tuner.stats import Estimate

# By how much the gain on engines started cold usually differs from that on one engine, in
# logarithms: ours, for KV-cache blocks and captured graphs follow the start-up values.
COLD_EFFECT = 0.02
# How far replays of one setting on one engine differ where it was replayed but once: ours.
REPLAY_NOISE = 0.05
# What part of that, as a variance, replays of one start have in common: measured live, E2E p95
# of replays one after the other differs by 10.8 %, of any by 12.2 %.
SHARED_BY_START = 0.2
# An engine that shows what was not expected is replayed on so many times at most, where all but
# the first take no longer than starting it did: ours, for a start costs the most.
MOST_REPLAYS = 3
# How much of what a prediction is off by on all of the traffic it is off by on the window that
# raced too, as a correlation, and by how much else it is there, in logarithms: ours. One half
# holds nine in ten best where all, half or none of it is truly shared.
SHARED, OF_WINDOW = 0.5, 0.05
# Engines are started cold in so large a share of the time that they should take: ours, for what
# a start should take is on the safe side, and nothing else is done with the time.
MAY_FIT = 0.85
# A cold gain so many standard deviations from the race's is a caveat, and with so many what is
# deployed is another engine than what raced, and counts alone: ours.
COLD_DIFFERS, COLD_ALONE = 2.0, 2.5
# So many standard deviations wide is an interval of 90 % to either side.
_WIDE = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class Cold:
    """What the winner and the current configuration measured on engines of their own.

    `ratio` is winner / current of what the objective optimises, on the window that raced, the
    geometric mean over the starts of each; None where one has no value. `p_better` is how
    probable a gain is by all that is known, and `log_gain` the logarithm of the ratio by that,
    None as `ratio`; `deviations` is how far what these showed is from what the race had shown,
    and `starts` how many engines there were of each. `effect` is by how much they move the
    gain, in logarithms, `wider` by how much that makes its variance larger, or smaller below
    0, and `least` is what that is at least.
    """

    winner: Score
    current: Score
    ratio: float | None
    p_better: float | None = None
    starts: int = 1
    deviations: float = 0.0
    log_gain: float | None = None
    effect: float = 0.0
    wider: float = 0.0
    least: float = 0.0

    def moved(self, gain: Estimate | None) -> Estimate | None:
        """Return a gain as it is thought to be of engines started cold."""
        if gain is None:
            return None
        times = math.exp(self.effect)
        if gain.low is None or gain.high is None:
            return replace(gain, value=gain.value * times)
        half = math.log(gain.high / gain.low) / 2
        variance = max((half / _WIDE) ** 2 + self.wider, self.least)
        wider = math.exp(_WIDE * math.sqrt(variance) - half)
        low, high = gain.low * times / wider, gain.high * times * wider
        return replace(gain, value=gain.value * times, low=low, high=high)

    @property
    def record(self) -> ColdConfirmation:
        """The comparison for result.json."""
        each = [score.value_in(Tier.GOOD) for score in (self.winner, self.current)]
        winner, current = (value if math.isfinite(value) else None for value in each)
        # A failed one has nothing that is optimised.
        metrics = (s.own_metric for s in (self.winner, self.current) if s.tier < Tier.FAILED)
        return ColdConfirmation(
            metric=next(metrics, self.winner.metric),
            winner=winner,
            current=current,
            ratio=self.ratio,
            p_better=self.p_better,
            starts=self.starts,
        )


PredictDeployed = Callable[[RaceDecision], Deployed | None]
"""Predicts the winner over the current one, their blocks known; None where nothing can be."""


def confirm_cold(
    runner: TrialRunner,
    plan: RacePlan,
    decision: RaceDecision,
    predict: PredictDeployed = lambda _: None,
) -> tuple[RaceDecision, Cold | None]:
    """Start winner and current configuration as they would be deployed, and compare them.

    Each once, with several replays where the first is not what was expected and these cost
    little beside the start, and once more in the opposite order where they still are not and
    the time holds it. What they show is weighed with what is predicted of such engines, or with
    what the race has shown; a winner that is then not thought to be better is not recommended.
    The gain is from then on that of engines started with either.

    Raises: EngineError when the engine cannot be kept alive.
    """
    context, current = runner.context, runner.context.space.current
    if decision.verdict is RaceVerdict.KEEP or runner.engine.restarts_per_config:
        return decision, None
    pair = (decision.winner, current)
    cost_s = cold_cost_s(runner, plan, pair)
    missing = [limits for limits in pair if not _starts(context, limits)]
    if missing and context.left_s < MAY_FIT * cold_cost_s(runner, plan, missing):
        context.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, None
    with context.stopwatch.stage("cold"):
        start_all(runner, plan, pair, 1)
        deployed = predict(decision)
        cold = _cold_of(context, plan, decision, deployed)
        is_odd = cold.deviations > COLD_DIFFERS
        is_odd |= cold.winner.tier is not Tier.FAILED and _is_lower(context, plan, decision)
        # No process has begun ahead of these.
        if is_odd and context.left_s >= cost_s + runner.engine.process.first_answer_s:
            start_all(runner, plan, pair[::-1], 2)
            cold = _cold_of(context, plan, decision, deployed)
    if _shows_nothing(context, decision, cold):
        return decision, cold
    if deployed is not None:
        decision = replace(decision, gain=deployed.gain, gain_here=deployed.here)
    gain, here = cold.moved(decision.gain), cold.moved(decision.gain_here)
    decision = replace(decision, gain=gain, gain_here=here)
    return _with_cold(context, plan, decision, cold), cold


def _shows_nothing(context: RunContext, decision: RaceDecision, cold: Cold) -> bool:
    """Whether they say nothing of the winner beside the current one; what that leaves is told.

    Of a winner that fails they say all that is needed.
    """
    pair = (decision.winner, context.space.current)
    ours, theirs = ({s.tier for s in _known_cold(context, limits)} for limits in pair)
    is_refuted = Tier.FAILED in ours
    # The current one did start with its values if the winner fails alone.
    if cold.ratio is None and not (is_refuted and Tier.FAILED not in theirs):
        context.caveats.add(Caveat.NOT_CONFIRMED_COLD)
    if is_refuted or not (Tier.FAILED in theirs or Tier.CUT in ours | theirs):
        return False
    who = pair[0] if Tier.CUT in ours else pair[1]
    cause = _cold_cause(context, who)
    context.listener.note(f"nothing to compare, {who} started cold: {cause}")
    return True


def unless_refuted(context: RunContext, decision: RaceDecision) -> RaceDecision:
    """Return the decision, or to keep the current setting where the other one failed cold."""
    current = context.space.current
    failed = [
        limits
        for limits in dict.fromkeys((decision.winner, current))
        if Tier.FAILED in {score.tier for score in _known_cold(context, limits)}
    ]
    if decision.verdict is RaceVerdict.KEEP or decision.winner not in failed:
        return decision
    why = f"it failed when it was started cold: {_cold_cause(context, decision.winner)}"
    if current in failed:
        why += f"; so did the current one, {current}: {_cold_cause(context, current)}"
    return replace(decision, verdict=RaceVerdict.KEEP, winner=current, why=why)


def start_all(
    runner: TrialRunner,
    plan: RacePlan,
    order: Sequence[EngineLimits],
    starts: int,
    later: int = 0,
) -> None:
    """Replay each on an engine started with its limits, until it has had so many starts.

    So many other engines are expected to start later.
    """
    missing = [one for one in order if len(_starts(runner.context, one)) < starts]
    runner.engine.process.expect(len(missing) + later)
    for number, limits in enumerate(missing):
        # While it runs the engine's own start is the one that counts.
        start_s = runner.engine.cold_start_s(limits)
        later_s = cold_cost_s(runner, plan, missing[number + 1 :])
        wants_more = partial(_wants_more, plan, limits, start_s, later_s)
        runner.measure_cold(limits, plan.workload, starts, wants_more)


def _wants_more(
    plan: RacePlan,
    limits: EngineLimits,
    start_s: float,
    later_s: float,
    shown: Sequence[Score],
) -> bool:
    """Whether what a start has shown wants another look, and one costs little beside starting.

    Where it is not what was seen of the setting in the race, or else predicted. The time has to
    hold what comes later, too.
    """
    context, replay_s = plan.context, plan.replay_s(limits)
    is_dear = not 0 < replay_s * len(shown) <= start_s
    if len(shown) == MOST_REPLAYS or is_dear or context.left_s < replay_s + later_s:
        return False
    raced = by_round(context.journal.race_runs(), limits).values()
    before = [run.score for run in raced]
    if not before and (found := plan.predicted.get(limits)) is not None:
        before = [plan.workload.score(found)]
    if not before:
        return True
    noise = _noise(context)
    sd = math.hypot(COLD_EFFECT, noise * _spread(len(shown)), noise / math.sqrt(len(before)))
    # Not a number where one of them has no such value, which more would not show either.
    return abs(_log(shown) - _log(before)) > sd


def _starts(context: RunContext, limits: EngineLimits) -> list[list[Score]]:
    """Return what each engine started with the limits showed, also before a run was resumed.

    A replay that was cut counts where the start has no other.
    """
    starts: dict[int, list[Score]] = {}
    for record in context.journal.records():
        if record.phase is Phase.COLD and record.limits == limits:
            starts.setdefault(record.race_round, []).append(record.observation.score)
    return [
        [score for score in scores if score.tier is not Tier.CUT] or scores
        for scores in starts.values()
    ]


def _known_cold(context: RunContext, limits: EngineLimits) -> list[Score]:
    """Return what replays on cold engines have shown, also before this run was resumed."""
    return [score for scores in _starts(context, limits) for score in scores]


def _noise(context: RunContext) -> float:
    """Return how far replays of one setting differ, in logarithms, as the race has seen it."""
    by_setting: dict[EngineLimits, list[float]] = {}
    for run in context.journal.race_runs():
        value = run.score.value_in(Tier.GOOD)
        if 0 < value < math.inf:
            by_setting.setdefault(run.limits, []).append(math.log(value))
    off = [np.array(v) - np.mean(v) for v in by_setting.values() if len(v) > 1]
    freedom = sum(len(v) - 1 for v in off)
    squares = sum(float(v @ v) for v in off)
    return math.sqrt((4 * REPLAY_NOISE**2 + squares) / (4 + freedom))


def _cold_of(
    context: RunContext, plan: RacePlan, decision: RaceDecision, deployed: Deployed | None
) -> Cold:
    """Return the two beside each other, with how probable a gain is by all that is known.

    What they show is of the window that raced, and the gain of the whole trace: it is by how
    much the cold ones differ there from what was predicted of them, or else from what raced,
    that moves the gain.
    """
    current = context.space.current
    ours, theirs = _starts(context, decision.winner), _starts(context, current)
    starts, noise = min(len(ours), len(theirs)), _noise(context)
    worst, worst_now = (max(chain(*s), key=lambda s: s.order) for s in (ours, theirs))
    sides = (ours[:starts], theirs[:starts])
    seen, now = (float(np.mean([_log(scores) for scores in side])) for side in sides)
    seen -= now
    if not math.isfinite(seen):
        return Cold(worst, worst_now, None, starts=starts)
    seen_sd = noise * math.hypot(*(_spread(len(s)) for s in chain(*sides))) / starts
    cold = Cold(worst, worst_now, math.exp(seen), NormalDist().cdf(-seen / seen_sd), starts)
    raced, raced_sd = _raced_ratio(context, plan, decision.winner, noise)
    gain, shared = decision.gain_here or decision.gain, 1.0
    if deployed is not None:
        gain, raced, shared = deployed.here, deployed.log_window, SHARED
    if gain is None:
        return cold
    mean, sd = _normal(gain)
    if deployed is not None:
        raced_sd = math.hypot(sd, OF_WINDOW)
    elif _is_raced_alone(decision, worst.own_metric) or not math.isfinite(raced):
        raced, raced_sd = mean, sd
    return weighed(cold, (mean, sd), (raced, raced_sd, shared), (seen, seen_sd))


def _is_raced_alone(decision: RaceDecision, metric: str) -> bool:
    """Whether the gain is what the window's replays show of a metric, their noise weighed."""
    odds = decision.odds
    return odds is not None and odds.basis == LIVE_ALONE and decision.metric == metric


def weighed(
    cold: Cold,
    known: tuple[float, float],
    expected: tuple[float, float, float],
    seen: tuple[float, float],
) -> Cold:
    """Return the comparison with what it says of the gain.

    `known` is the gain, `expected` what cold engines should show of it on the window that
    raced, and `seen` what they do: mean and standard deviation of each, in logarithms, and how
    much of the error of the first two is shared, as a correlation. What cold engines differ by
    is in neither.
    """
    mean, sd = known
    off = seen[0] - expected[0]
    together = expected[2] * sd * min(sd, expected[1]) + COLD_EFFECT**2
    variance = expected[1] ** 2 + COLD_EFFECT**2 + seen[1] ** 2
    deviations = abs(off) / math.sqrt(variance)
    if deviations > COLD_ALONE:
        effect, left = off, expected[1] ** 2 + seen[1] ** 2
        left = max(left, sd**2)
    else:
        effect = together / variance * off
        left = sd**2 + COLD_EFFECT**2 - together**2 / variance
    return replace(
        cold,
        p_better=NormalDist().cdf(-(mean + effect) / math.sqrt(left)),
        deviations=deviations,
        log_gain=mean + effect,
        effect=effect,
        wider=left - sd**2,
        least=left,
    )


def _log(scores: Sequence[Score]) -> float:
    """Return the mean logarithm of what is optimised, NaN where one has no such value."""
    values = [score.value_in(Tier.GOOD) for score in scores]
    is_known = all(0 < value < math.inf for value in values)
    return float(np.mean(np.log(values))) if is_known else math.nan


def _spread(replays: int) -> float:
    """Return how far the mean of so many replays of a start is off, one being off by 1."""
    return math.sqrt(SHARED_BY_START + (1 - SHARED_BY_START) / replays)


def _raced_ratio(
    context: RunContext, plan: RacePlan, winner: EngineLimits, noise: float
) -> tuple[float, float]:
    """Return the logarithm of the winner's ratio to the current one on the window that raced.

    And how sure it is: as replayed live in the same rounds, or as predicted where it was not.
    """
    runs, current = context.journal.race_runs(), context.space.current
    ours, theirs = by_round(runs, winner), by_round(runs, current)
    logs = [ours[n].score.log_over(theirs[n].score) for n in set(ours) & set(theirs)]
    logs = [log for log in logs if math.isfinite(log)]
    if logs:
        return float(np.mean(logs)), noise * math.sqrt(2 / len(logs))
    if not {winner, current} <= set(plan.predicted):
        return math.nan, math.nan
    score = plan.workload.score
    return score(plan.predicted[winner]).log_over(score(plan.predicted[current])), noise


def _normal(gain: Estimate) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of a ratio with its 90 % interval."""
    if gain.low is None or gain.high is None:
        return math.log(gain.value), COLD_EFFECT
    return math.log(gain.value), math.log(gain.high / gain.low) / (2 * _WIDE)


def _is_lower(context: RunContext, plan: RacePlan, decision: RaceDecision) -> bool:
    """Whether the winner was of a lower tier in every cold start than it ever was before.

    And than the current one ever was cold: a single start near a bound may miss it by chance.
    One that fails does not. A stretch that grows over the load that is sustained in all of the
    traffic says nothing of the tier, but in its tail.
    """
    odds = decision.odds
    is_stretch = odds is not None and (odds.p_sustained is None or odds.p_sustained >= LIKELY)
    ours, theirs = (
        [_tier(score, is_stretch=is_stretch) for score in _known_cold(context, limits)]
        for limits in (decision.winner, context.space.current)
    )
    raced = by_round(context.journal.race_runs(), decision.winner).values()
    before = [run.score for run in raced]
    if isinstance(found := plan.predicted.get(decision.winner), Measurement):
        # A stretch may break what the whole keeps, where it was said to beforehand.
        before.append(plan.workload.score(found).times(1 + REPLAY_NOISE))
    usual = max((_tier(score, is_stretch=is_stretch) for score in before), default=Tier.GOOD)
    return Tier.FAILED in ours or min(ours) > max(*theirs, usual)


def _tier(score: Score, *, is_stretch: bool) -> Tier:
    """Return the tier of a replay, in which a stretch may not sustain what the whole does."""
    is_growth = is_stretch and score.tier is Tier.NOT_SUSTAINED
    return Tier.GOOD if is_growth else score.tier


def _with_cold(
    context: RunContext, plan: RacePlan, decision: RaceDecision, cold: Cold
) -> RaceDecision:
    # Who keeps what the current one does not need not be better in what is optimised.
    is_for_bounds = decision.odds is not None and decision.odds.meets_more
    is_none = cold.log_gain is not None and cold.log_gain > -TIE_LOSS and not is_for_bounds
    if _is_lower(context, plan, decision) or is_none:
        if cold.winner.tier is Tier.FAILED:
            return unless_refuted(context, decision)
        why, current = "the gain did not show on engines started cold", context.space.current
        return replace(decision, verdict=RaceVerdict.KEEP, winner=current, why=why)
    if cold.deviations > COLD_DIFFERS:
        context.caveats.add(Caveat.COLD_DIFFERS)
        return replace(decision, odds=_less_sure(decision.odds, cold))
    return decision


def _less_sure(odds: Odds | None, cold: Cold) -> Odds | None:
    """Return the odds, no surer than engines started cold leave them; bounds are not theirs."""
    if odds is None or odds.meets_more or cold.p_better is None:
        return odds
    here, elsewhere = (min(p, cold.p_better) for p in (odds.p_better, odds.p_elsewhere))
    return replace(odds, p_better=here, p_elsewhere=elsewhere)


def _cold_cause(context: RunContext, limits: EngineLimits) -> str:
    """Return what went wrong on the last cold engine with these limits."""
    mine = (
        record
        for record in reversed(context.journal.records())
        if record.phase is Phase.COLD and record.limits == limits
    )
    return next((record.cause or "its replay was cut short" for record in mine), "")
