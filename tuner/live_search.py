"""The search without a shadow: every point is a live replay.

A pilot says what a second of the trace costs here, windows are chosen so that the run fits
into its time, and `search` is asked for one configuration after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError
from tuner.race_time import fitting
from tuner.replay.load import pace_s, share_done
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule
from tuner.replay.runner import Failure
from tuner.run_state import RunState
from tuner.search.budget import (
    RACE_REPLAYS,
    SEARCH_REPLAYS,
    SEARCH_SHARE,
    Pilot,
    choose_windows,
)
from tuner.search.ladder import FINALISTS, finalists, propose
from tuner.search.race import LEAST_ROUNDS
from tuner.search.trials import Observation, Phase, leader
from tuner.traffic.windows import busiest

# A replay may take this many times what was planned before it is cut: ours; a low cap under
# overload takes several times as long as the present configuration.
OVERTIME = 8.0
# The race may claim this share of the budget at most: ours, the search needs the rest.
MOST_RESERVED = 0.7


Learn = Callable[[EngineLimits, ReplayLog], None]


def searched(run: RunState) -> list[Observation]:
    """Return what the live search has seen so far."""
    return [o for o in run.journal.observations() if o.phase.is_search]


def fly_pilot(run: RunState, learn: Learn | None = None) -> Pilot:
    """Return what a part of the trace costs at the present limits.

    Counted by the work that was done when the pilot ended, not by who was answered in full.
    `learn` hears of its steps.

    Raises: EngineError if the engine fails at them.
    """
    pilot = busiest(run.trace, min(run.trace.duration_s, 60.0) or 1.0).of(run.trace)
    run.bench.use("pilot", pilot)
    cut = CutRule(max_wall_s=run.aim.budget.pilot_s)
    plan = replace(run.aim.plan, cut=cut, keep_steps=learn is not None)
    logs: list[ReplayLog] = []
    measured = run.bench.measure(["pilot"], run.space.present, plan, (), on_log=logs.append)
    if isinstance(measured, Failure):
        raise EngineError(
            f"the engine failed at the present configuration: {measured.cause}",
            "run it once with `tune replay` and look at the engine's log",
        )
    (log,) = logs
    if learn is not None:
        learn(run.space.present, log)
    done = share_done(pilot, log.timelines, log.steps) if measured.cut_reason else 1.0
    if done == 0:
        raise EngineError(
            f"the engine computed nothing in {measured.wall_s:.0f} s of the trace",
            "give --budget more, or look at the engine's log",
        )
    rate = measured.wall_s / (done * max(pilot.duration_s, 1e-3))
    run.listener.note(f"pilot: a second of the trace costs {rate:.2g} s here")
    return Pilot(rate, pace_s(log.timelines) * float(np.median(pilot.output_tokens)))


def plan_windows(run: RunState, rate: float | None = None, replays: int | None = None) -> None:
    """Choose the windows unless they are known, and make them ready.

    Raises: EngineError, TooFewSamplesError, UsageError.
    """
    if not run.windows:
        if run.aim.window is not None:
            run.windows = (run.aim.window,)
        else:
            rate = fly_pilot(run).wall_per_trace_s if rate is None else rate
            wanted = SEARCH_REPLAYS + RACE_REPLAYS if replays is None else replays
            run.windows = choose_windows(run.trace, rate, run.left_s, wanted)
    run.use_windows()


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
    least_s = (FINALISTS + 1) * LEAST_ROUNDS * run.usual_wall_s
    reserved_s = min(max((1 - SEARCH_SHARE) * total_s, least_s), MOST_RESERVED * total_s)
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
