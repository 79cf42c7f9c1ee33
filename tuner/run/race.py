"""The live end of a run: the race of the finalists, and the winner on a cold engine.

Replays are made in turns, until the evidence or the time is through.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule
from tuner.replay.series import TimelineRecord, timeline_record
from tuner.run.context import RunContext, Workload
from tuner.run.journal import Round
from tuner.run.rounds import POLL_S, share_round
from tuner.run.time_plan import Observe, RacePlan, cold_cost_s, reserve_s
from tuner.run.trial_runner import TrialRunner
from tuner.search.objective import Score, Tier
from tuner.search.race import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    RaceDecision,
    RaceRun,
    RaceVerdict,
    decide,
    next_run,
    round_of,
)
from tuner.search.trials import TIE_RATIO, Phase

# A cold engine's gain that is this far from the race's is a caveat: ours, as much as two single
# replays may differ by.
COLD_DIFFERS_RATIO = 0.10


@dataclass(frozen=True, slots=True)
class Cold:
    """What the winner and the current configuration measured on engines of their own.

    `ratio` is winner / current of the score's value, None where the two cannot be compared, as
    when only one of them meets the SLOs and they are judged by different metrics.
    """

    winner: Score
    current: Score
    ratio: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the comparison for result.json."""
        return {
            "metric": self.winner.metric,
            "winner": self.winner.value,
            "current_metric": self.current.metric,
            "current": self.current.value,
            "ratio": self.ratio,
        }


def race(
    runner: TrialRunner,
    plan: RacePlan,
    observe: Observe | None = None,
    until_round: int | None = None,
    *,
    is_searched: bool = True,
) -> RaceDecision:
    """Replay the finalists in turns until they are separated or the time is over.

    Time is left for the cold engines, where it is enough for both. `observe` receives the logs
    of the first round, of which the timelines are kept. `is_searched` as in `decide`.

    Raises: EngineError when the engine cannot be kept alive.
    """
    context, current = runner.context, runner.context.space.current
    reserved_s = reserve_s(runner, plan)
    with context.stopwatch.stage("race"):
        while True:
            runs = context.journal.race_runs()
            following = next_run(runs, plan.settings, current, context.attempt)
            is_over = following is not None and (
                context.left_s - reserved_s < plan.replay_s(following[1])
            )
            if following is None or is_over or _is_beyond(following[0], until_round):
                if is_over and len(plan.settings) > 1:
                    context.caveats.add(Caveat.BUDGET_SPENT)
                if context.is_shared:
                    context.journal.withdraw(Phase.RACE)
                return decide(
                    runs, plan.settings, current, plan.predictions, is_searched=is_searched
                )
            race_round, limits = following
            if race_round == 1:
                _first_round(runner, plan.workload, limits, observe)
            elif context.is_shared and race_round not in {run.round for run in runs}:
                _share_rounds(runner, plan, runs, race_round)
            else:
                cut = _within_time(context)
                runner.measure(limits, Phase.RACE, plan.workload, cut, race_round)


def _share_rounds(
    runner: TrialRunner, plan: RacePlan, runs: Sequence[RaceRun], number: int
) -> None:
    """Offer the rounds that can be raced by now; replay one here, or wait for a worker's.

    The least rounds are known from the beginning; of later ones as many are offered as
    processes have raced, and one for a worker that comes. Those that nobody has claimed are
    offered anew each time, with who is still in.
    """
    context, workload = runner.context, plan.workload
    racers = {run.attempt for run in runs} | {context.attempt}
    last = max(MIN_ROUNDS, number + len(racers))
    begun = {run.round for run in runs}
    most_s = _within_time(context).max_wall_s or math.inf
    offered = []
    for n in range(number, min(last, MAX_ROUNDS) + 1):
        if n not in begun:
            settings = tuple(round_of(runs, plan.settings, n))
            walls_s = (most_s,) * len(settings)
            offered.append(
                Round(Phase.RACE, n, settings, walls_s, workload.windows, workload.plan.load)
            )
    context.journal.give_back_stale()
    context.journal.withdraw(Phase.RACE)
    context.journal.offer(offered)
    if not share_round(runner, workload, Phase.RACE):
        time.sleep(POLL_S)


def _within_time(context: RunContext) -> CutRule:
    return CutRule(max_wall_s=max(30.0, context.left_s))


def _first_round(
    runner: TrialRunner, workload: Workload, limits: EngineLimits, observe: Observe | None
) -> None:
    """Replay a finalist and keep what it looked like over time."""
    windows: list[TimelineRecord] = []

    def keep(log: ReplayLog) -> None:
        windows.append(timeline_record(log))
        if observe is not None:
            observe(limits, log)

    runner.measure(limits, Phase.RACE, workload, _within_time(runner.context), 1, keep)
    if windows:
        runner.context.keep_timelines(limits, "live", windows)


def _is_beyond(number: int, last: int | None) -> bool:
    return last is not None and number > last


def confirm_cold(
    runner: TrialRunner, plan: RacePlan, decision: RaceDecision
) -> tuple[RaceDecision, Cold | None]:
    """Start winner and current configuration as they would be deployed, and compare them.

    A winner that is not better there is not recommended.

    Raises: EngineError when the engine cannot be kept alive.
    """
    context, current = runner.context, runner.context.space.current
    if decision.verdict is RaceVerdict.KEEP or runner.engine.restarts_per_config:
        return decision, None
    known = [_known_cold(context, s) for s in (decision.winner, current)]
    if None in known and context.left_s < cold_cost_s(runner, plan, decision.winner):
        context.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, None
    with context.stopwatch.stage("cold"):
        ours, theirs = (
            _cold_score(runner, plan.workload, s) for s in (decision.winner, current)
        )
    compared = ours.ratio_to(theirs)
    cold = Cold(ours, theirs, None if compared is None else compared[1])
    if Tier.CUT in (ours.tier, theirs.tier) or (
        theirs.tier is Tier.FAILED and ours.tier is not Tier.FAILED
    ):
        who = decision.winner if ours.tier is Tier.CUT else current
        cause = _cold_cause(context, who)
        context.listener.note(f"nothing to compare, {who} started cold: {cause}")
        context.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, cold
    return _with_cold(context, decision, cold), cold


def _with_cold(context: RunContext, decision: RaceDecision, cold: Cold) -> RaceDecision:
    """Return the decision once both were measured cold."""
    if cold.winner.clearly_worse_than(cold.current, 0.0) or (
        cold.ratio is not None and cold.ratio > 1 - TIE_RATIO / 3
    ):
        why = "the gain did not show on engines started cold"
        if cold.winner.tier is Tier.FAILED:
            cause = _cold_cause(context, decision.winner)
            why = f"it failed when it was started cold: {cause}"
        current = context.space.current
        return replace(decision, verdict=RaceVerdict.KEEP, winner=current, why=why)
    change = None if decision.gain is None else decision.gain.value
    if cold.ratio and change and abs(cold.ratio / change - 1) > COLD_DIFFERS_RATIO:
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


def _known_cold(context: RunContext, limits: EngineLimits) -> Score | None:
    """Return what a cold engine showed before this run was resumed."""
    seen = [o for o in context.journal.observations() if o.phase is Phase.COLD]
    return next((o.score for o in seen if o.limits == limits and o.is_whole), None)


def _cold_score(runner: TrialRunner, workload: Workload, limits: EngineLimits) -> Score:
    """Measure on an engine started with the limits, unless that was done."""
    known = _known_cold(runner.context, limits)
    if known is not None:
        return known
    cut = _within_time(runner.context)
    return runner.measure(limits, Phase.COLD, workload, cut, is_cold=True)[1].score
