"""A gate that is found for an engine that is overloaded at twice its recorded traffic."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from support.shadow_files import a_profile
from support.surface_parts import TRACE
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.loads.gate import GateAnswer, find_gate
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.shadow.predictor import Predictor
from tuner.traffic.windows import Window, whole

LIMITS = EngineLimits(8, 512)
LOADS = (0.5, 2.0)
PREDICTOR = Predictor(a_profile())


def a_workload(*slos: str, window: Window | None = None) -> Workload:
    """Return sixteen requests a second, of which the engine serves some twenty."""
    aim = Aim(Objective.GOODPUT, tuple(map(Slo.parse, slos)), ReplayPlan(), None)
    trace = replace(TRACE, source="prod.jsonl")
    return Workload.of("traffic", trace, (window or whole(trace),), aim)


@cache
def a_gate(*slos: str) -> GateAnswer:
    """Return the gate that is found for SLOs."""
    return find_gate(PREDICTOR, LIMITS, a_workload(*(slos or ("ttft_p95=1s",))), LOADS)
