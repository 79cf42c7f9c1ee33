"""The race of a run: finalists are replayed live in turns until it is settled.

What replays say is weighed in `search.choice`: beside a prediction they tell how far it is
off, without one they are all there is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.replay.series import TimelineRecord, timeline_record
from tuner.run.context import RunContext, Workload
from tuner.run.drawing import DRAWS, FEW_DRAWS, Drawing
from tuner.run.evidence import change_bounds
from tuner.run.journal import Round
from tuner.run.live_search import LiveEvidence
from tuner.run.predict import DISAGREEMENT, Foretold, at_own_speed
from tuner.run.rounds import POLL_S, share_round
from tuner.run.time_plan import Observe, RacePlan, cold_cost_s, reserve_s
from tuner.run.trial_runner import TrialRunner
from tuner.search.choice import Choice
from tuner.search.draws import Draws
from tuner.search.effects import Unexplained
from tuner.search.judging import COST, SLO, TIE_LOSS
from tuner.search.objective import Tier, moved, moved_bounds, named
from tuner.search.race import (
    MAX_ROUNDS,
    RaceDecision,
    RaceRun,
    RaceVerdict,
    missing_in,
    whole_rounds,
)
from tuner.search.trials import Phase, Trial
from tuner.shadow.predictor import Predictor

# With a prediction one round tells whether it holds: ours.
MIN_ROUNDS_PREDICTED = 1
# What a second of the engine has to be expected to save, as a share of what is optimised: ours,
# four minutes for one percent.
WORTH_PER_S = 4e-5
# How many times what the cold engines should take is kept for them: ours, a start differs.
COLD_MARGIN = 1.1


Relearn = Callable[[], tuple[RacePlan, Foretold] | None]
"""Fits the step model anew and predicts who races with it; None where there is no time."""


@dataclass(slots=True)
class PredictedEvidence:
    """A prediction, and how far off live replays of the same requests show it to be.

    Each replay is compared with the simulation at the replay's own speed, so that the mood of
    the machine cancels, and on the blocks of the engine that all are replayed on; what is
    predicted is predicted of engines as they will be deployed.
    """

    plan: RacePlan
    known: Foretold
    relearn: Relearn
    min_rounds: int = MIN_ROUNDS_PREDICTED
    least_in_a_round: int = 1
    _off: dict[int, tuple[float, float]] = field(default_factory=dict)

    def regret_after(self, count: int, more_s: float) -> float:
        """Return what choosing would lose if the engine's speed was known by so much more time.

        As a share of what is optimised, by draws.
        """
        open_now, predictor = self.known.predictor.profile.uncertainty, self.known.predictor
        records = self.plan.context.journal.records()
        learnt_s = sum(
            float(t.measurement["wall_s"]) for t in records if t.is_live and t.measurement
        )
        if open_now is None or learnt_s <= 0:
            return math.inf
        left = replace(predictor.profile, uncertainty=open_now.after(learnt_s, more_s))
        drawn = self._draws_by(predictor.of(left), count)
        return self.plan.context.choice(drawn).regret

    def settings(self) -> Sequence[EngineLimits]:
        """Return who races, and who is decided beside them, as far as it could be predicted.

        The current configuration comes last.
        """
        found, (*racing, current) = self.known.predictions.outcomes, self.plan.settings
        settings = dict.fromkeys([*racing, *self.known.witnesses, current])
        return [s for s in settings if isinstance(found.get(s), Measurement)]

    def choice(self, count: int) -> Choice:
        """Return what draws say of the predictions, moved by what the replays showed."""
        return self.plan.context.choice(self._draws_by(self.known.predictor, count))

    def _draws_by(self, predictor: Predictor, count: int) -> Draws:
        """Return draws as they are by a predictor of the same settings."""
        drawing = self._drawing(predictor)
        return drawing.draws(self.settings(), count, self._unexplained(drawing))

    def _drawing(self, predictor: Predictor) -> Drawing:
        """Return draws of what was predicted, and of who failed since."""
        outcomes = dict(self.known.predictions.outcomes)
        for limits in {t.limits for t in self._trials() if t.score.tier is Tier.FAILED}:
            outcomes[limits] = Failure("it failed in its live replay")
        predictions = replace(self.known.predictions, outcomes=outcomes)
        return Drawing(predictor.as_deployed(), predictions)

    def _trials(self) -> list[Trial]:
        settings = self.settings()
        return [
            trial
            for trial in self.plan.context.journal.records()
            if trial.phase is Phase.RACE and trial.limits in settings
        ]

    def unexplained(self) -> Unexplained:
        """Return how far off the predictions are beyond each replay's own speed.

        Of each of the `settings`.
        """
        return self._unexplained(self._drawing(self.known.predictor))

    def _unexplained(self, drawing: Drawing) -> Unexplained:
        settings, whole = self.settings(), [t for t in self._trials() if t.is_whole]
        for trial in whole:
            if trial.number not in self._off:
                self._off[trial.number] = self._off_by(trial)
        cost, slo = (
            [
                (settings.index(trial.limits), off)
                for trial in whole
                if math.isfinite(off := self._off[trial.number][column])
            ]
            for column in (COST, SLO)
        )
        return Unexplained.of(len(settings), cost, slo, drawing.alike(settings))

    def _off_by(self, trial: Trial) -> tuple[float, float]:
        """Return by how much a replay differs from the simulation at its own speed.

        In what is optimised and in the tightest SLO, in logarithms; NaN without either.
        """
        measured = trial.measurement or {}
        step_s = float(measured["busy_s"]) / max(int(measured["steps"]), 1)
        found = at_own_speed(self.known.predictor, self.plan.workload, trial.limits, step_s)
        if found is None:
            return math.nan, math.nan
        own = self.plan.workload.score(found)
        ours, theirs = trial.score.slo_used or 0.0, own.slo_used or 0.0
        has_slos = 0.0 < ours < math.inf and 0.0 < theirs < math.inf
        return trial.score.log_over(own), math.log(ours / theirs) if has_slos else math.nan

    def disagreement(self) -> str:
        """Say whose replays differ from the simulation at their own speed by too much.

        By more than a stated error of the prediction explains; empty where nobody's do. The
        mood of the machine is in none of it.
        """
        off: dict[tuple[EngineLimits, str], list[float]] = {}
        for trial in self._trials():
            found, _ = self._off.get(trial.number, (math.nan, math.nan))
            if math.isfinite(found):
                off.setdefault((trial.limits, trial.score.own_metric), []).append(found)
        means = {key: math.expm1(float(np.mean(logs))) for key, logs in off.items()}
        return ", ".join(
            f"{metric} at {limits} is {wrong:+.0%} off the simulation at the same speed"
            for (limits, metric), wrong in means.items()
            if abs(wrong) > DISAGREEMENT * self.known.predictor.wrong_ratio
        )

    def inside(self, choice: Choice) -> list[EngineLimits]:
        """Return who may yet be the best."""
        return choice.contenders()

    def learn(self) -> None:
        """Predict anew with what the round's steps have shown."""
        found = self.relearn()
        if found is not None:
            self.plan, self.known = found
            self._off.clear()


Evidence = PredictedEvidence | LiveEvidence
"""What is known of the settings that race, and becomes known with each replay.

`min_rounds` are replayed at least, and `least_in_a_round` replays tell anything: two where they
are compared.
"""


def race(
    runner: TrialRunner, evidence: Evidence, observe: Observe | None = None
) -> RaceDecision:
    """Replay who may yet be the best, in turns, until it is settled or the time is over.

    Time is left for the cold engines where it is enough for both; where it is not, the race
    ends for them once it has an answer and another round would leave no time for them.
    `observe` receives the log of every replay; of the first round's the timelines are kept.

    Raises: EngineError when the engine cannot be kept alive; ShadowError, UsageError.
    """
    context, rounds, beside_s = runner.context, 0, 0.0
    reserved_s = reserve_s(runner, evidence.plan)
    with context.stopwatch.stage("race"):
        choice = evidence.choice(FEW_DRAWS)
        while rounds < MAX_ROUNDS and len(choice.draws.settings) > 1:
            plan, inside = evidence.plan, evidence.inside(choice)
            if rounds:
                least = evidence.least_in_a_round
                if _is_made(context.journal.race_runs(), rounds + 1, least):
                    rounds, choice = rounds + 1, evidence.choice(FEW_DRAWS)
                    continue
                chosen = who_replays(choice, inside, plan.replay_s, least)
                inside = _with_new(context, inside, chosen)
            round_s, before_s = sum(map(plan.replay_s, inside)), context.left_s
            if rounds >= evidence.min_rounds and (
                _is_for_the_cold(runner, plan, choice, round_s + beside_s, reserved_s)
                or _is_enough(evidence, choice, inside, round_s)
                or _is_spent(context, round_s + beside_s, reserved_s)
            ):
                break
            if not _replay_round(runner, evidence, rounds + 1, inside, reserved_s, observe):
                context.caveats.add(Caveat.BUDGET_SPENT)
                break
            rounds += 1
            evidence.learn()
            choice = evidence.choice(FEW_DRAWS)
            # What is learnt of a round takes its time too, however short the replays are.
            beside_s = max(0.0, before_s - context.left_s - round_s)
            context.listener.note(_so_far(choice, rounds))
        if context.is_shared:
            context.journal.withdraw(Phase.RACE)
        whole = whole_rounds(context.journal.race_runs(), evidence.settings())
        return evidence.choice(DRAWS).decide(whole)


def _is_made(runs: Sequence[RaceRun], number: int, least: int) -> bool:
    """Whether a process has replayed so many in a round, as before a run went on."""
    made = Counter(run.attempt for run in runs if run.round == number)
    return max(made.values(), default=0) >= least


def _with_new(
    context: RunContext, inside: Sequence[EngineLimits], chosen: Sequence[EngineLimits]
) -> list[EngineLimits]:
    """Return who was chosen, and who may be the best by now and was never replayed."""
    raced = {run.limits for run in context.journal.race_runs()}
    return [limits for limits in inside if limits in chosen or limits not in raced]


def _is_spent(context: RunContext, round_s: float, reserved_s: float) -> bool:
    """Whether another round would be at the cost of the cold engines; half tells nothing."""
    is_spent = reserved_s > 0 and context.left_s - reserved_s < round_s
    if is_spent:
        context.caveats.add(Caveat.BUDGET_SPENT)
    return is_spent


def _is_for_the_cold(
    runner: TrialRunner, plan: RacePlan, choice: Choice, round_s: float, reserved_s: float
) -> bool:
    """Whether the time that is left holds the cold engines of a change, and no round before.

    Not where it is reserved for them.

    Who could be the best beside the winner is much like it; that it is better than the current
    one is what production relies on.
    """
    context = runner.context
    if reserved_s:
        return False
    found = choice.decide()
    if found.verdict is RaceVerdict.KEEP or runner.engine.restarts_per_config:
        return False
    pair = (found.winner, context.space.current)
    cold_s = COLD_MARGIN * cold_cost_s(runner, plan, pair)
    return cold_s <= context.left_s < cold_s + round_s


def _is_enough(
    evidence: Evidence, few: Choice, inside: Sequence[EngineLimits], round_s: float
) -> bool:
    """Whether it is settled by a few draws, which may be wrong about it, and by many.

    Not while who would be recommended was never replayed: a round may have moved all others.
    """
    raced = {run.limits for run in evidence.plan.context.journal.race_runs()}
    if few.decide().winner in set(inside) - raced - {few.current}:
        return False
    return all(
        is_settled(
            few if count == FEW_DRAWS else evidence.choice(count),
            inside,
            round_s,
            partial(evidence.regret_after, count, round_s),
        )
        for count in (FEW_DRAWS, DRAWS)
    )


def is_settled(
    choice: Choice,
    inside: Sequence[EngineLimits],
    round_s: float,
    regret_after: Callable[[], float] = lambda: math.inf,
) -> bool:
    """Whether so little is lost, or another round would save so little for its time.

    Replays tell how far settings are off at their own speed; and while they go on, how fast the
    machine is: `regret_after` is what would be lost if no more but that was known better.

    Source: the knowledge-gradient rule, Frazier, Powell & Dayanik, A knowledge-gradient policy
        for sequential information collection, SIAM J. Control Optim. 47 (2008).
    """
    worth = WORTH_PER_S * round_s
    if choice.regret <= TIE_LOSS:
        return True
    if choice.saved_by_a_round(inside) >= worth:
        return False
    return choice.regret - regret_after() < worth


def who_replays(
    choice: Choice,
    inside: Sequence[EngineLimits],
    cost_s: Callable[[EngineLimits], float],
    least: int,
) -> list[EngineLimits]:
    """Return of whom, so many at least, another round should save the most for its time.

    All that are inside where no fewer are worth more. `cost_s` is what a replay takes.

    Source: as for `is_settled`.
    """
    fields = [f for n in range(len(inside), least - 1, -1) for f in combinations(inside, n)]
    if len(fields) <= 1:
        return list(inside)

    def worth(field: tuple[EngineLimits, ...]) -> float:
        return choice.saved_by_a_round(field) / max(sum(map(cost_s, field)), 1e-9)

    best = max(fields, key=worth)
    return list(best)


def _so_far(choice: Choice, number: int) -> str:
    found = choice.decide(number)
    if found.gain is None or found.odds is None:
        return f"after round {number}: {found.why}"
    change, here = moved(found.metric, found.gain.value - 1), found.gain_here
    bounds = (None, None) if here is None else change_bounds(here)
    low, high = moved_bounds(found.metric, bounds)
    interval = "" if low is None or high is None else f" ({low:+.1%} … {high:+.1%})"
    return (
        f"after round {number}: {found.best} changes {named(found.metric)} by "
        f"{change:+.1%}{interval},"
        f" {found.odds.text}"
    )


def _replay_round(
    runner: TrialRunner,
    evidence: Evidence,
    number: int,
    inside: Sequence[EngineLimits],
    reserved_s: float,
    observe: Observe | None,
) -> bool:
    """Replay what is missing of a round; tell whether there was time for all of it.

    What a worker has made of it counts, though it was offered when others were inside.
    """
    context, plan, least = runner.context, evidence.plan, evidence.least_in_a_round
    while True:
        runs = context.journal.race_runs()
        if context.is_shared and number > 1 and _is_made(runs, number, least):
            return True
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
    most_s = context.within_time.max_wall_s or math.inf
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

    runner.measure(limits, Phase.RACE, workload, runner.context.within_time, number, keep)
    if windows:
        runner.context.keep_timelines(limits, "live", windows)
