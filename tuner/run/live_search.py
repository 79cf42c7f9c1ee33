"""The search without predictions: every point is a live replay.

A pilot says what a second of the trace costs here, windows are chosen so that the run fits
into its time, and `search` is asked for one configuration after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.plan import CutRule
from tuner.run.context import SHORT_S, RunContext, Workload
from tuner.run.time_plan import MIN_ROUNDS, Observe, RacePlan, fitting
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import REPLAYS, SEARCH_SHARE
from tuner.search.choice import Choice
from tuner.search.ladder import FINALISTS, finalists, propose
from tuner.search.replayed import draws_of_replays
from tuner.search.trials import Observation, Phase, leader

# A replay may take this many times what was planned before it is cut: ours; a low cap under
# overload takes several times as long as the current configuration.
OVERTIME = 8.0
# Two rounds tell how far replays differ: ours.
MIN_ROUNDS_LIVE = 2
# The race may claim this share of the budget at most: ours, the search needs the rest.
MAX_RESERVED = 0.7


@dataclass(slots=True)
class LiveEvidence:
    """Replays in turns, where nothing is predicted."""

    plan: RacePlan
    min_rounds: int = MIN_ROUNDS_LIVE
    least_in_a_round: int = 2

    def settings(self) -> Sequence[EngineLimits]:
        """Return who races."""
        return self.plan.settings

    def regret_after(self, count: int, more_s: float) -> float:  # noqa: ARG002
        """Return no end: no model of the engine's speed is learnt."""
        return math.inf

    def choice(self, count: int) -> Choice:
        """Return what draws of the replays say."""
        context = self.plan.context
        runs = context.journal.race_runs()
        return context.choice(draws_of_replays(self.plan.settings, runs, count))

    def inside(self, choice: Choice) -> list[EngineLimits]:
        """Return everybody at first, and then who may yet be the best."""
        if not self.plan.context.journal.race_runs():
            return list(self.plan.settings)
        return choice.contenders()

    def learn(self) -> None:
        """Take in nothing: the journal has it."""


def searched(context: RunContext) -> list[Observation]:
    """Return what the live search has seen so far."""
    return [t.observation for t in context.journal.records() if t.phase.is_search]


def search_live(runner: TrialRunner, workload: Workload, observe: Observe | None) -> RacePlan:
    """Measure what the search proposes until it is done or its time is over; return who races.

    `observe` receives every replay's log with all its steps.

    Raises: EngineError.
    """
    context, space = runner.context, runner.context.space
    plan = RacePlan(context, (space.current,), workload)
    while True:
        seen = searched(context)
        proposal = propose(seen, space)
        if proposal is None:
            break
        if seen and _must_race(plan):
            context.caveats.add(Caveat.BUDGET_SPENT)
            context.listener.note("the search's share of the budget is spent, racing now")
            break
        on_log = None if observe is None else partial(observe, proposal.limits)
        cut = _cut(plan, proposal.phase)
        runner.measure(proposal.limits, proposal.phase, workload, cut, on_log=on_log)
    return fitting(runner, replace(plan, settings=tuple(finalists(searched(context), space))))


def has_searched(context: RunContext) -> bool:
    """Whether the live search can say anything of other configurations than the current one.

    It cannot where none of them was replayed whole, and it was real time that ended the search
    or one of their replays: only a rule that cuts what is certain to lose tells of it.
    """
    tried = [t for t in context.journal.records() if t.phase.is_search]
    others = [t for t in tried if t.limits != context.space.current]
    if any(t.is_whole for t in others):
        return True
    walls_s = [(t.measurement or {}).get("wall_s", 0.0) for t in others]
    is_cut = max(walls_s, default=0.0) >= longest_wall_s(context)
    return Caveat.BUDGET_SPENT not in context.caveats and not is_cut


def _must_race(plan: RacePlan) -> bool:
    """Whether the search has to make room for the race's least rounds."""
    context = plan.context
    if len(finalists(searched(context), context.space)) < 2:
        return context.left_s < plan.usual_s
    total_s = context.budget.total_s
    least_s = (FINALISTS + 1) * MIN_ROUNDS * plan.usual_s
    reserved_s = min(max((1 - SEARCH_SHARE) * total_s, least_s), MAX_RESERVED * total_s)
    return context.left_s < reserved_s


def longest_wall_s(context: RunContext) -> float:
    """Return after which real time a replay of the search is cut."""
    return max(SHORT_S, OVERTIME * context.budget.total_s / REPLAYS)


def _cut(plan: RacePlan, phase: Phase) -> CutRule:
    """Return when a replay of the search can stop early."""
    context, workload = plan.context, plan.workload
    limit_s = longest_wall_s(context)
    if phase is Phase.CURRENT:
        return CutRule(max_wall_s=max(limit_s, context.left_s))
    best = leader(searched(context))
    rule = workload.scoring.cut_rule(best.score if best else None, workload.requests)
    return replace(rule, max_wall_s=limit_s)
