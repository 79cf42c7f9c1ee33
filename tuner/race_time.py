"""How long the end of a run will take, and who races so that it fits into the time left.

What a replay takes is what it took before, or what the shadow foretells (`RunState.replay_s`).
Three rounds come before anything else, since fewer tell nothing; the cold engines come before
more finalists, since what is deployed starts cold and finalists are much alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.engine.limits import EngineLimits
from tuner.run_state import RunState
from tuner.search.race import LEAST_ROUNDS

# The race waits for the cold engines if they take less than this share of what is left: ours,
# it may need more than three rounds.
MOST_COLD_RATIO = 0.4


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
    is_small = wanted_s < MOST_COLD_RATIO * run.left_s
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
    return LEAST_ROUNDS * sum(run.replay_s(limits) for limits in field)
