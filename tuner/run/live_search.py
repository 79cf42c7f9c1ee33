"""The search without a shadow: every point is a live replay.

A pilot says what a second of the trace costs here, windows are chosen so that the run fits
into its time, and `search` is asked for one configuration after the other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.plan import CutRule
from tuner.run.state import RunState
from tuner.run.time_plan import Learn, fitting, plan_windows
from tuner.search.budget import (
    RACE_REPLAYS,
    SEARCH_REPLAYS,
    SEARCH_SHARE,
)
from tuner.search.ladder import FINALISTS, finalists, propose
from tuner.search.race import MIN_ROUNDS
from tuner.search.trials import Observation, Phase, leader

# A replay may take this many times what was planned before it is cut: ours; a low cap under
# overload takes several times as long as the present configuration.
OVERTIME = 8.0
# The race may claim this share of the budget at most: ours, the search needs the rest.
MAX_RESERVED = 0.7


def searched(run: RunState) -> list[Observation]:
    """Return what the live search has seen so far."""
    return [o for o in run.journal.observations() if o.phase.is_search]


def search_live(run: RunState, on_log: Learn | None = None) -> list[EngineLimits]:
    """Measure what the search proposes until it is done or its time is over; return who races.

    on_log hears of every replay's log with all its steps.

    Raises: EngineError, TooFewSamplesError, UsageError.
    """
    plan_windows(run)
    while True:
        proposal = propose(searched(run), run.space)
        if proposal is None:
            break
        if searched(run) and _must_race(run):
            run.caveats.add(Caveat.BUDGET_SPENT)
            run.listener.note("the search's share of the budget is spent, racing now")
            break
        hears = None if on_log is None else partial(on_log, proposal.limits)
        run.trial(proposal.limits, proposal.phase, _cut(run, proposal.phase), on_log=hears)
    return fitting(run, finalists(searched(run), run.space))


def _must_race(run: RunState) -> bool:
    """Whether the search has to make room for the race's least rounds."""
    if len(finalists(searched(run), run.space)) < 2:
        return run.left_s < run.usual_wall_s
    total_s = run.aim.budget.total_s
    least_s = (FINALISTS + 1) * MIN_ROUNDS * run.usual_wall_s
    reserved_s = min(max((1 - SEARCH_SHARE) * total_s, least_s), MAX_RESERVED * total_s)
    return run.left_s < reserved_s


def longest_wall_s(run: RunState) -> float:
    """Return after which real time a replay of the search is cut."""
    planned_s = run.aim.budget.total_s / (SEARCH_REPLAYS + RACE_REPLAYS)
    return max(30.0, OVERTIME * planned_s)


def _cut(run: RunState, phase: Phase) -> CutRule:
    """Return when a replay of the search can stop early."""
    if phase is Phase.PRESENT:
        return CutRule(max_wall_s=max(longest_wall_s(run), run.left_s))
    best = leader(searched(run))
    rule = run.goal.cut_rule(best.score if best else None, run.window_requests)
    return replace(rule, max_wall_s=longest_wall_s(run))
