"""How long the end of a run will take, and who races so that it fits into the time left.

What a replay takes is what it took before, or what the shadow foretells (`RunState.replay_s`).
Three rounds come before anything else, since fewer tell nothing; the cold engines come before
more finalists, since what is deployed starts cold and finalists are much alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError
from tuner.replay.load import pace_s, share_done
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule
from tuner.replay.runner import Failure
from tuner.run.state import RunState
from tuner.search.budget import RACE_REPLAYS, SEARCH_REPLAYS, Pilot, choose_windows
from tuner.search.race import MIN_ROUNDS
from tuner.traffic.windows import busiest

Learn = Callable[[EngineLimits, ReplayLog], None]
"""What hears of the steps of a replay at the limits."""


# The race waits for the cold engines if they take less than this share of what is left: ours,
# it may need more than three rounds.
MAX_COLD_RATIO = 0.4


def cold_cost_s(run: RunState, winner: EngineLimits) -> float:
    """Return what starting and replaying the winner and the present one cold will take."""
    started = run.bench.started
    start_s = started.start_s + started.warm_up_s if started is not None else 0.0
    replays_s = run.replay_s(winner) + run.replay_s(run.space.present)
    return 2 * (run.bench.process_s + start_s) + replays_s


def reserve_s(run: RunState, field: Sequence[EngineLimits]) -> float:
    """Return the time to keep for the cold engines, 0 where the time cannot bear them as well.

    Before the race; `field` begins with who is thought best.
    """
    wanted_s = cold_cost_s(run, field[0])
    is_small = wanted_s < MAX_COLD_RATIO * run.left_s
    return wanted_s if is_small and wanted_s + _least_s(run, field) < run.left_s else 0.0


def fitting(run: RunState, field: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return who races: fewer where the time would not hold three rounds of all, and the cold.

    The last before the present one go first, and somebody always races against it.
    """
    field = list(field)
    cold_s = cold_cost_s(run, field[0])
    while len(field) > 2 and _least_s(run, field) + cold_s > run.left_s:
        del field[-2]
    return field


def _least_s(run: RunState, field: Sequence[EngineLimits]) -> float:
    """Return what the fewest rounds take that tell anything."""
    return MIN_ROUNDS * sum(run.replay_s(limits) for limits in field)


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
