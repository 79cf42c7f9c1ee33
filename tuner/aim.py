"""What a run is after: objective, SLOs, manner of replay, time, window.

What the user asked, checked; the stages of a run read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.objective import Objective
from tuner.plan import Budget
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.traffic.windows import Window


@dataclass(frozen=True, slots=True)
class Aim:
    """What a run is after, as the user asked."""

    objective: Objective
    slos: tuple[Slo, ...]
    plan: ReplayPlan
    budget: Budget
    window: Window | None
