"""What a profile predicts of a small space at a few loads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from support.shadow_files import a_profile
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.loads.surface import Surface, predict_surface
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.shadow.predictor import Predictor
from tuner.traffic.windows import whole

CURRENT, CEILING = EngineLimits(4, 512), EngineLimits(64, 2048)
SPACE = SearchSpace(CURRENT, (2, 8, 32), (512, 2048), CEILING)
LOADS = (0.5, 1.0, 3.0)
"""The current configuration holds at the first, the best at all but the last."""
PREDICTOR = Predictor(a_profile(), CEILING)
SLO = "ttft_p95=1s"
TRACE = replace(
    steady(500, per_s=16.0, prompt=200, output=80, seed=3),
    source="a&b <b>.jsonl",
    sha256="59445ac5",
)


@cache
def a_surface(loads: tuple[float, ...] = LOADS, slos: tuple[str, ...] = (SLO,)) -> Surface:
    """Return what is predicted of the traffic at the loads."""
    aim = Aim(Objective.BALANCED, tuple(map(Slo.parse, slos)), ReplayPlan(), None)
    workload = Workload.of("traffic", TRACE, (whole(TRACE),), aim)
    return predict_surface(PREDICTOR, SPACE, workload, loads)
