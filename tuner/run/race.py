"""The live end of a run: finalists replayed in turns until it is settled, then cold engines.

What replays say is weighed in `search.posterior`: beside a prediction they tell how far it is
off, without one they are all there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.runner import Failure
from tuner.replay.series import TimelineRecord, timeline_record
from tuner.run.context import RunContext, Workload
from tuner.run.drawing import DRAWS, FEW_DRAWS, UNEXPLAINED, Deployed, draw
from tuner.run.journal import Round
from tuner.run.predict import DISAGREEMENT, Predictions, at_own_speed
from tuner.run.rounds import POLL_S, share_round
from tuner.run.time_plan import Observe, RacePlan, cold_cost_s, reserve_s
from tuner.run.trial_runner import TrialRunner
from tuner.search.effects import Effects
from tuner.search.objective import Score, Tier
from tuner.search.posterior import LIKELY, TIE_LOSS, Draws
from tuner.search.race import (
    CONFIDENCE,
    MAX_ROUNDS,
    RaceDecision,
    RaceRun,
    RaceVerdict,
    by_round,
    missing_in,
    whole_rounds,
)
from tuner.search.trials import Phase, Trial
from tuner.shadow.predictor import Predictor
from tuner.stats import Estimate

# With a prediction one round tells whether it holds: ours.
MIN_ROUNDS_PREDICTED = 1
# What a second of the engine has to be expected to save, as a share of what is optimised: ours,
# four minutes for one percent.
WORTH_PER_S = 4e-5
# How many times what the cold engines should take is kept for them: ours, a start differs.
COLD_MARGIN = 1.1
# By how much the gain on engines started cold usually differs from that on one engine, in
# logarithms: ours, for KV-cache blocks and captured graphs follow the start-up values.
COLD_EFFECT = 0.02
# How far replays of one setting on one engine differ where it was replayed but once: ours.
REPLAY_NOISE = 0.05
# A cold gain so many standard deviations from the race's is a caveat, and with so many what is
# deployed is another engine than what raced, and counts alone: ours.
COLD_DIFFERS, COLD_ALONE = 2.0, 2.5


class Evidence(Protocol):
    """What is known of the settings that race, and becomes known with each replay."""

    @property
    def min_rounds(self) -> int:
        """How many rounds are replayed at least."""

    def settings(self) -> Sequence[EngineLimits]:
        """Return who may race."""

    def draws(self, count: int) -> Draws:
        """Return so many draws of what is known by now. Raises: ShadowError, UsageError."""

    def inside(self, draws: Draws, confidence: float) -> list[EngineLimits]:
        """Return who replays in the next round."""

    def learn(self) -> None:
        """Take in what the round that has just ended showed."""


Relearn = Callable[[], tuple[RacePlan, Predictor, Predictions] | None]
"""Fits the step model anew and predicts who races with it; None where there is no time."""


@dataclass(slots=True)
class PredictedEvidence:
    """A prediction, and how far off live replays of the same requests show it to be.

    Each replay is compared with the simulation at the replay's own speed, so that the mood of
    the machine cancels, and on the blocks of the engine that all are replayed on; what is
    predicted is predicted of engines as they will be deployed.
    """

    plan: RacePlan
    predictor: Predictor
    predictions: Predictions
    relearn: Relearn
    min_rounds: int = MIN_ROUNDS_PREDICTED
    _off: dict[int, float] = field(default_factory=dict)

    def settings(self) -> Sequence[EngineLimits]:
        """Return who races, but for those of which nothing could be predicted."""
        found = self.predictions.outcomes
        return [s for s in self.plan.settings if isinstance(found.get(s), Measurement)]

    def draws(self, count: int) -> Draws:
        """Return draws of the predictions, moved and spread by what the replays showed."""
        return self.draws_of(self.settings(), count)

    def draws_of(self, settings: Sequence[EngineLimits], count: int) -> Draws:
        """Return draws of settings that were predicted, also of some that have not raced."""
        trials = self._trials(settings)
        failed = {t.limits for t in trials if t.score.tier is Tier.FAILED}
        outcomes = dict(self.predictions.outcomes)
        for limits in failed:
            outcomes[limits] = Failure("it failed in its live replay")
        predictions = replace(self.predictions, outcomes=outcomes)
        unexplained = self._unexplained(settings)
        return draw(self.predictor.as_deployed(), predictions, settings, count, unexplained)

    def _trials(self, settings: Sequence[EngineLimits]) -> list[Trial]:
        return [
            trial
            for trial in self.plan.context.journal.records()
            if trial.phase is Phase.RACE and trial.limits in settings
        ]

    def _unexplained(self, settings: Sequence[EngineLimits]) -> Effects:
        """Return how far off the predictions are beyond each replay's own speed."""
        replays = []
        for trial in self._trials(settings):
            if trial.is_whole and trial.number not in self._off:
                self._off[trial.number] = self._off_by(trial)
            off = self._off.get(trial.number, math.nan)
            if math.isfinite(off):
                replays.append((0, list(settings).index(trial.limits), off))
        return Effects.of(len(settings), replays, UNEXPLAINED)

    def _off_by(self, trial: Trial) -> float:
        """Return by how much a replay differs from the simulation at its own speed."""
        measured = trial.measurement or {}
        step_s = float(measured["busy_s"]) / max(int(measured["steps"]), 1)
        found = at_own_speed(self.predictor, self.plan.workload, trial.limits, step_s)
        if found is None:
            return math.nan
        predicted = self.plan.workload.scoring.score(found)
        live, simulated = trial.score.value_in(Tier.GOOD), predicted.value_in(Tier.GOOD)
        is_usable = 0 < live < math.inf and 0 < simulated < math.inf
        return math.log(live / simulated) if is_usable else math.nan

    def disagreement(self) -> str:
        """Say whose replays differ from the simulation at their own speed by too much.

        By more than a stated error of the prediction explains; empty where nobody's do. The
        mood of the machine is in none of it.
        """
        off: dict[tuple[EngineLimits, str], list[float]] = {}
        for trial in self._trials(self.settings()):
            found = self._off.get(trial.number, math.nan)
            if math.isfinite(found):
                off.setdefault((trial.limits, trial.score.own_metric), []).append(found)
        means = {key: math.expm1(float(np.mean(logs))) for key, logs in off.items()}
        return ", ".join(
            f"{metric} at {limits} is {wrong:+.0%} off the simulation at the same speed"
            for (limits, metric), wrong in means.items()
            if abs(wrong) > DISAGREEMENT * self.predictor.wrong_ratio
        )

    def inside(self, draws: Draws, confidence: float) -> list[EngineLimits]:
        """Return who may yet be the best."""
        return draws.contenders(self.plan.context.space.current, confidence)

    def learn(self) -> None:
        """Predict anew with what the round's steps have shown."""
        found = self.relearn()
        if found is not None:
            self.plan, self.predictor, self.predictions = found
            self._off.clear()


def race(
    runner: TrialRunner,
    plan: RacePlan,
    evidence: Evidence,
    observe: Observe | None = None,
    confidence: float = CONFIDENCE,
) -> RaceDecision:
    """Replay who may yet be the best, in turns, until it is settled or the time is over.

    Time is left for the cold engines where it is enough for both; where it is not, the race
    ends for them once it has an answer and another round would leave no time for them.
    `observe` receives the log of every replay; of the first round's the timelines are kept.

    Raises: EngineError when the engine cannot be kept alive; ShadowError, UsageError.
    """
    context, current = runner.context, runner.context.space.current
    reserved_s, rounds = reserve_s(runner, plan), 0
    usual_s = 0.0
    with context.stopwatch.stage("race"):
        draws = evidence.draws(FEW_DRAWS)
        while rounds < MAX_ROUNDS and len(draws.settings) > 1:
            inside = evidence.inside(draws, confidence)
            round_s = sum(plan.replay_s(limits) for limits in inside)
            if rounds >= evidence.min_rounds:
                next_s = max(round_s, usual_s)
                if not reserved_s and _is_for_the_cold(runner, plan, draws, next_s):
                    break
                if _is_settled(evidence, inside, current, confidence, round_s):
                    break
            before_s = context.left_s
            if not _replay_round(runner, plan, rounds + 1, inside, reserved_s, observe):
                context.caveats.add(Caveat.BUDGET_SPENT)
                break
            rounds += 1
            evidence.learn()
            draws = evidence.draws(FEW_DRAWS)
            usual_s = before_s - context.left_s
            context.listener.note(_so_far(draws, current, confidence, rounds))
        if context.is_shared:
            context.journal.withdraw(Phase.RACE)
        whole = whole_rounds(context.journal.race_runs(), evidence.settings())
        return evidence.draws(DRAWS).decide(current, confidence, whole)


def _is_settled(
    evidence: Evidence,
    inside: Sequence[EngineLimits],
    current: EngineLimits,
    confidence: float,
    round_s: float,
) -> bool:
    """Whether it is settled by a few draws, and by many, about which a few may be wrong."""
    return all(
        is_settled(evidence.draws(count), inside, current, confidence, round_s)
        for count in (FEW_DRAWS, DRAWS)
    )


def _is_for_the_cold(runner: TrialRunner, plan: RacePlan, draws: Draws, round_s: float) -> bool:
    """Whether the time that is left holds the cold engines of a change, and no round before.

    Who could be the best beside the winner is much like it; that it is better than the current
    one is what production relies on.
    """
    context = runner.context
    found = draws.decide(context.space.current, context.aim.confidence)
    if found.verdict is RaceVerdict.KEEP or runner.engine.restarts_per_config:
        return False
    pair = (found.winner, context.space.current)
    cold_s = COLD_MARGIN * cold_cost_s(runner, plan, pair)
    return cold_s <= context.left_s < cold_s + round_s


def is_settled(
    draws: Draws,
    inside: Sequence[EngineLimits],
    current: EngineLimits,
    confidence: float,
    round_s: float,
) -> bool:
    """Whether so little is lost, or another round would save so little for its time.

    Source: the knowledge-gradient rule, Frazier, Powell & Dayanik, A knowledge-gradient policy
        for sequential information collection, SIAM J. Control Optim. 47 (2008).
    """
    if draws.regret(current, confidence) <= TIE_LOSS:
        return True
    return draws.saved_by_a_round(inside, current, confidence) < WORTH_PER_S * round_s


def _so_far(draws: Draws, current: EngineLimits, confidence: float, number: int) -> str:
    """Say what a round has brought."""
    found = draws.decide(current, confidence, number)
    if found.gain is None or found.odds is None:
        return f"after round {number}: {found.why}"
    change, here = found.gain.value - 1, found.gain_here
    interval = (
        ""
        if here is None or here.low is None or here.high is None
        else (f" ({here.low - 1:+.1%} … {here.high - 1:+.1%})")
    )
    return (
        f"after round {number}: {found.best} changes {found.metric} by {change:+.1%}{interval},"
        f" {found.odds.text}"
    )


def _replay_round(
    runner: TrialRunner,
    plan: RacePlan,
    number: int,
    inside: Sequence[EngineLimits],
    reserved_s: float,
    observe: Observe | None,
) -> bool:
    """Replay what is missing of a round; tell whether there was time for all of it."""
    context = runner.context
    while True:
        runs = context.journal.race_runs()
        missing = missing_in(runs, number, inside, context.attempt)
        if not missing:
            return True
        if context.left_s - reserved_s < plan.replay_s(missing[0]):
            return False
        if context.is_shared and number > 1 and number not in {run.round for run in runs}:
            _share_rounds(runner, plan, runs, number, inside)
        else:
            _replay(runner, plan.workload, missing[0], number, observe)


def _share_rounds(
    runner: TrialRunner,
    plan: RacePlan,
    runs: Sequence[RaceRun],
    number: int,
    inside: Sequence[EngineLimits],
) -> None:
    """Offer the rounds that can be raced by now; replay one here, or wait for a worker's.

    As many are offered as processes have raced, and one for a worker that comes. Those that
    nobody has claimed are offered anew each time, with who is still in.
    """
    context, workload = runner.context, plan.workload
    racers = {run.attempt for run in runs} | {context.attempt}
    begun = {run.round for run in runs}
    most_s = _within_time(context).max_wall_s or math.inf
    offered = [
        Round(
            Phase.RACE,
            n,
            tuple(inside if n % 2 else reversed(inside)),
            (most_s,) * len(inside),
            workload.windows,
            workload.plan.load,
        )
        for n in range(number, min(number + len(racers), MAX_ROUNDS) + 1)
        if n not in begun
    ]
    context.journal.give_back_stale()
    context.journal.withdraw(Phase.RACE)
    context.journal.offer(offered)
    if not share_round(runner, lambda one: [workload] * len(one.settings), Phase.RACE):
        time.sleep(POLL_S)


def _within_time(context: RunContext) -> CutRule:
    return CutRule(max_wall_s=max(30.0, context.left_s))


def _replay(
    runner: TrialRunner,
    workload: Workload,
    limits: EngineLimits,
    number: int,
    observe: Observe | None,
) -> None:
    """Replay a finalist; of the first round keep what it looked like over time."""
    windows: list[TimelineRecord] = []

    def keep(log: ReplayLog) -> None:
        if number == 1:
            windows.append(timeline_record(log))
        if observe is not None:
            observe(limits, log)

    runner.measure(limits, Phase.RACE, workload, _within_time(runner.context), number, keep)
    if windows:
        runner.context.keep_timelines(limits, "live", windows)


# Engines started cold.


@dataclass(frozen=True, slots=True)
class Cold:
    """What the winner and the current configuration measured on engines of their own.

    `ratio` is winner / current of what the objective optimises, on the window that raced, the
    geometric mean over the starts of each; None where one has no value. `p_better` is how
    probable a gain is by all that is known, and `log_gain` the logarithm of the ratio by that,
    None as `ratio`; `deviations` is how far what these showed is from what the race had shown,
    and `starts` how many engines there were of each.
    """

    winner: Score
    current: Score
    ratio: float | None
    p_better: float | None = None
    starts: int = 1
    deviations: float = 0.0
    log_gain: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the comparison for result.json."""
        return {
            "metric": self.winner.metric,
            "winner": self.winner.value,
            "current_metric": self.current.metric,
            "current": self.current.value,
            "ratio": self.ratio,
            "p_better": self.p_better,
            "starts": self.starts,
        }


PredictDeployed = Callable[[EngineLimits], Deployed | None]
"""Predicts a setting over the current one, their blocks known; None where nothing can be."""


def confirm_cold(
    runner: TrialRunner,
    plan: RacePlan,
    decision: RaceDecision,
    predict: PredictDeployed = lambda _: None,
) -> tuple[RaceDecision, Cold | None]:
    """Start winner and current configuration as they would be deployed, and compare them.

    Each once, and once more in the opposite order where they are not what was expected and the
    time holds it. What they show is weighed with what is predicted of such engines, or with
    what the race has shown; a winner that is then not thought to be better is not recommended.
    The gain is from then on that of engines started with either.

    Raises: EngineError when the engine cannot be kept alive.
    """
    context, current = runner.context, runner.context.space.current
    if decision.verdict is RaceVerdict.KEEP or runner.engine.restarts_per_config:
        return decision, None
    pair = (decision.winner, current)
    cost_s = cold_cost_s(runner, plan, pair)
    missing = [limits for limits in pair if not _known_cold(context, limits)]
    if missing and context.left_s < cold_cost_s(runner, plan, missing):
        context.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, None
    with context.stopwatch.stage("cold"):
        start_all(runner, plan.workload, pair, 1)
        deployed = predict(decision.winner)
        cold = _cold_of(context, plan, decision, deployed)
        is_odd = cold.deviations > COLD_DIFFERS
        is_odd |= cold.winner.tier is not Tier.FAILED and _is_lower(context, plan, decision)
        if is_odd and context.left_s >= cost_s:
            start_all(runner, plan.workload, pair[::-1], 2)
            cold = _cold_of(context, plan, decision, deployed)
    ours, theirs = (_known_cold(context, limits) for limits in pair)
    tiers = {score.tier for score in (*ours, *theirs)}
    if Tier.CUT in tiers or (cold.current.tier is Tier.FAILED is not cold.winner.tier):
        who = decision.winner if Tier.CUT in {s.tier for s in ours} else current
        context.listener.note(
            f"nothing to compare, {who} started cold: {_cold_cause(context, who)}"
        )
        context.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, cold
    if deployed is not None:
        decision = replace(decision, gain=deployed.gain, gain_here=deployed.here)
    return _with_cold(context, plan, decision, cold), cold


def start_all(
    runner: TrialRunner, workload: Workload, order: Sequence[EngineLimits], starts: int
) -> None:
    """Replay each on an engine started with its limits, until it has had so many starts."""
    for limits in order:
        if len(_known_cold(runner.context, limits)) < starts:
            cut = _within_time(runner.context)
            runner.measure(limits, Phase.COLD, workload, cut, is_cold=True)


def _known_cold(context: RunContext, limits: EngineLimits) -> list[Score]:
    """Return what cold engines have shown, also before this run was resumed."""
    return [
        o.score
        for o in context.journal.observations()
        if o.phase is Phase.COLD and o.limits == limits
    ]


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
    ours, theirs = _known_cold(context, decision.winner), _known_cold(context, current)
    starts, noise = min(len(ours), len(theirs)), _noise(context)
    logs = [_log_ratio(a, b) for a, b in zip(ours[:starts], theirs[:starts], strict=True)]
    worst = max(ours, key=lambda s: s.order), max(theirs, key=lambda s: s.order)
    if not logs or not np.isfinite(logs).all():
        return Cold(*worst, None, starts=starts)
    seen, seen_sd = float(np.mean(logs)), noise * math.sqrt(2 / starts)
    cold = Cold(*worst, math.exp(seen), NormalDist().cdf(-seen / seen_sd), starts)
    raced, raced_sd = _raced_ratio(context, plan, decision.winner, noise)
    gain = decision.gain_here or decision.gain
    if deployed is not None:
        gain, raced, raced_sd = deployed.here, deployed.log_window, REPLAY_NOISE
    if gain is None:
        return cold
    known, known_sd = _normal(gain)
    if not math.isfinite(raced):
        raced, raced_sd = known, known_sd
    effect, effect_sd = seen - raced, math.hypot(seen_sd, raced_sd)
    deviations = abs(effect) / math.hypot(effect_sd, COLD_EFFECT)
    if deviations <= COLD_ALONE:
        believed = COLD_EFFECT**2 / (COLD_EFFECT**2 + effect_sd**2)
        effect, effect_sd = believed * effect, math.sqrt(believed) * effect_sd
    mean, sd = known + effect, math.hypot(known_sd, effect_sd)
    p_better = NormalDist().cdf(-mean / sd)
    return replace(cold, p_better=p_better, deviations=deviations, log_gain=mean)


def _log_ratio(ours: Score, theirs: Score) -> float:
    """Return the logarithm of the ratio by what the objective optimises, NaN without one."""
    a, b = ours.value_in(Tier.GOOD), theirs.value_in(Tier.GOOD)
    return math.log(a / b) if 0 < a < math.inf and 0 < b < math.inf else math.nan


def _raced_ratio(
    context: RunContext, plan: RacePlan, winner: EngineLimits, noise: float
) -> tuple[float, float]:
    """Return the logarithm of the winner's ratio to the current one on the window that raced.

    And how sure it is: as replayed live in the same rounds, or as predicted where it was not.
    """
    runs, current = context.journal.race_runs(), context.space.current
    ours, theirs = by_round(runs, winner), by_round(runs, current)
    logs = [_log_ratio(ours[n].score, theirs[n].score) for n in set(ours) & set(theirs)]
    logs = [log for log in logs if math.isfinite(log)]
    if logs:
        return float(np.mean(logs)), noise * math.sqrt(2 / len(logs))
    if not {winner, current} <= set(plan.predicted):
        return math.nan, math.nan
    score = plan.workload.scoring.score
    return _log_ratio(score(plan.predicted[winner]), score(plan.predicted[current])), noise


def _normal(gain: Estimate) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of a ratio with its 90 % interval."""
    if gain.low is None or gain.high is None:
        return math.log(gain.value), COLD_EFFECT
    return math.log(gain.value), math.log(gain.high / gain.low) / (2 * 1.645)


def _is_lower(context: RunContext, plan: RacePlan, decision: RaceDecision) -> bool:
    """Whether the winner was of a lower tier in every cold start than it ever was before.

    And than the current one ever was cold: a single start near a bound may miss it by chance.
    One that fails does not. A stretch that grows over the load that is sustained in all of the
    traffic says nothing of the tier, but in its tail.
    """
    is_stretch = decision.odds is not None and decision.odds.p_sustained >= LIKELY
    ours, theirs = (
        [_tier(score, is_stretch=is_stretch) for score in _known_cold(context, limits)]
        for limits in (decision.winner, context.space.current)
    )
    raced = by_round(context.journal.race_runs(), decision.winner).values()
    before = [run.score for run in raced]
    if isinstance(found := plan.predicted.get(decision.winner), Measurement):
        # A stretch may break what the whole keeps, where it was said to beforehand.
        before.append(plan.workload.scoring.score(found).times(1 + REPLAY_NOISE))
    usual = max((_tier(score, is_stretch=is_stretch) for score in before), default=Tier.GOOD)
    if Tier.FAILED in ours and Tier.FAILED not in theirs:
        return True
    return min(ours) > max(*theirs, usual)


def _tier(score: Score, *, is_stretch: bool) -> Tier:
    """Return the tier of a replay, in which a stretch may not sustain what the whole does."""
    is_growth = is_stretch and score.tier is Tier.NOT_SUSTAINED
    return Tier.GOOD if is_growth else score.tier


def _with_cold(
    context: RunContext, plan: RacePlan, decision: RaceDecision, cold: Cold
) -> RaceDecision:
    """Return the decision once both were measured cold."""
    # Who keeps what the current one does not need not be better in what is optimised.
    is_for_bounds = decision.odds is not None and decision.odds.meets_more
    is_none = cold.log_gain is not None and cold.log_gain > -TIE_LOSS and not is_for_bounds
    if _is_lower(context, plan, decision) or is_none:
        why = "the gain did not show on engines started cold"
        if cold.winner.tier is Tier.FAILED:
            cause = _cold_cause(context, decision.winner)
            why = f"it failed when it was started cold: {cause}"
        current = context.space.current
        return replace(decision, verdict=RaceVerdict.KEEP, winner=current, why=why)
    if cold.deviations > COLD_DIFFERS:
        context.caveats.add(Caveat.COLD_DIFFERS)
    return decision


def _cold_cause(context: RunContext, limits: EngineLimits) -> str:
    """Return what went wrong on the last cold engine with these limits."""
    mine = (
        record
        for record in reversed(context.journal.records())
        if record.phase is Phase.COLD and record.limits == limits
    )
    return next((record.cause or "its replay was cut short" for record in mine), "")
