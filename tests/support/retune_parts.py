"""A re-tune on toys: what `check` and `calendar` ask, answered in process and at once."""

from __future__ import annotations

from support.run_parts import ToyPredictor, a_profile
from support.toy import ToyCosts, ToySource
from tuner.drift.retune import Retune
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace

CEILING = EngineLimits(64, 8192)


def an_aim(objective: Objective = Objective.BALANCED, slos: tuple[Slo, ...] = ()) -> Aim:
    """Return an aim on the whole trace."""
    return Aim(objective, slos, ReplayPlan(), None)


def a_retune(
    current: EngineLimits,
    costs: ToyCosts | None = None,
    wrong_ratio: float = 0.03,
    ladder: tuple[int, ...] = (2, 8, 16),
) -> tuple[Retune, ToyPredictor]:
    """Return a re-tune whose predictions are made by toys of these costs, and these."""
    source = ToySource(costs=costs or ToyCosts())
    space = SearchSpace(current, ladder, (2048,), CEILING)
    predictor = ToyPredictor(a_profile(wrong_ratio, costs), toy=source)
    return Retune(space, predictor), predictor
