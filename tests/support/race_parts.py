"""What races in the tests: a crowded toy, on which fewer sequences at once are better."""

from __future__ import annotations

from support.toy import ToySource
from support.toy_tune import CROWDED
from support.traffic import replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import measure
from tuner.search.objective import Objective, Scoring, Tier

CURRENT, BETTER, WORSE = EngineLimits(16, 2048), EngineLimits(9, 2048), EngineLimits(24, 2048)
TRACE = steady(240, per_s=14.0, prompt=110, output=35)
GOAL = Scoring(Objective.BALANCED, (), "p95")
CROWDED_TOY = ToySource(CROWDED)


def known_ratio(winner: EngineLimits) -> float:
    """Return the score's ratio to the current one, by replays on fresh toys."""
    ours, theirs = (
        GOAL.score(measure([replay_toy(TRACE, limits, CROWDED_TOY)]))
        for limits in (winner, CURRENT)
    )
    assert ours.tier is theirs.tier is Tier.GOOD
    return ours.value / theirs.value
