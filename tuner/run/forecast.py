"""What the shadow foretells of single settings, on the whole trace or as much as time allows.

Answers how a setting is asked about and how its answer is judged; which settings to ask about
is left to `ranking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.engine.limits import EngineLimits
from tuner.replay.load import share_done
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.runner import Failure
from tuner.search.budget import Aim
from tuner.search.objective import Objective, Score, Scoring, make_scoring
from tuner.search.space import SearchSpace
from tuner.shadow.pool import ReplayTask, ShadowPool
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window, busiest, typical, whole

# A whole trace that takes longer than this share of the forecast's time per setting is cut
# into windows: ours.
MIN_WINDOW_S = 60.0
# Real time that a first look at how long a setting takes may cost: ours.
PROBE_S = 2.0


@dataclass(slots=True)
class Forecast:
    """One profile's shadows and what they replay.

    `generation` counts profiles: after a recalibration everything is foretold anew.
    """

    trace: Trace
    aim: Aim
    shadows: ShadowPool
    generation: int
    parts: tuple[Window, ...] = ()
    _goal: Scoring | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts of the trace that are replayed."""
        return tuple(f"part {i}" for i in range(len(self.parts)))

    @property
    def goal(self) -> Scoring:
        """What is optimised on the forecast's parts."""
        if self._goal is None:
            self._goal = make_scoring(self.aim.objective, self.aim.slos, self._requests)
        return self._goal

    @property
    def _requests(self) -> int:
        return sum(len(part.of(self.trace)) for part in self.parts)

    def choose_parts(self, space: SearchSpace, time_s: float) -> None:
        """Take the whole trace, or its busiest and a typical stretch where time is short.

        One replay at the present limits tells how long a setting takes.

        Raises: ShadowError or UsageError when a shadow cannot be made of the profile.
        """
        trace = self.trace
        if self.aim.window is not None:
            self.parts = (self.aim.window,)
        elif not self.parts:
            per_setting_s = time_s * self.shadows.jobs / (len(space.grid()) + 8)
            self.parts = (whole(trace),)
            self.load_parts()
            # A glance, not all of it: the present one may be the slowest of all.
            rule = CutRule(max_wall_s=min(max(per_setting_s, 1.0), PROBE_S))
            logs: list[ReplayLog] = []
            glance = replace(self.aim.plan, cut=rule)
            self.shadows.run(
                [ReplayTask(self.names, space.present, glance, on_log=logs.append)]
            )
            if logs and logs[0].cut_reason is not None:
                done = share_done(trace, logs[0].timelines, logs[0].steps)
                share = per_setting_s * done / logs[0].wall_s
                if share < 1:
                    length_s = max(trace.duration_s * share, MIN_WINDOW_S)
                    self.parts = _stretches(trace, length_s)
        self.load_parts()

    def load_parts(self) -> None:
        """Give the shadows what they replay."""
        for name, part in zip(self.names, self.parts, strict=True):
            self.shadows.use(name, part.of(self.trace))

    def predict(
        self,
        settings: Sequence[EngineLimits],
        names: Sequence[str] | None = None,
        plan: ReplayPlan | None = None,
    ) -> list[Measurement | Failure]:
        """Return what the shadow says of settings, without keeping it.

        Of the forecast's parts by the aim's plan, unless told otherwise.
        """
        used = self.names if names is None else tuple(names)
        tasks = [ReplayTask(used, s, plan or self.aim.plan, self.aim.slos) for s in settings]
        return self.shadows.run(tasks)

    def task(self, limits: EngineLimits, number: int, cut: CutRule) -> ReplayTask:
        """Return what has to be replayed to place a setting."""
        aim, plan = self.aim, replace(self.aim.plan, cut=cut)
        asks = aim.objective is Objective.CAPACITY
        return ReplayTask(self.names, limits, plan, aim.slos, number, wants_capacity=asks)

    def cut_rule(self, best: Score | None) -> CutRule:
        """Return when a replay of the parts is certain to lose to the best so far."""
        return self.goal.cut_rule(best, self._requests)

    def capacities(self, settings: Sequence[EngineLimits]) -> list[Measurement | None]:
        """Return what is foretold at the largest load at which the SLOs hold; None if at none.

        That load is the measurement's capacity.
        """
        aim = self.aim
        tasks = [
            ReplayTask(self.names, s, aim.plan, aim.slos, wants_capacity=True) for s in settings
        ]
        found = self.shadows.run(tasks)
        return [f if isinstance(f, Measurement) and f.capacity else None for f in found]


def _stretches(trace: Trace, length_s: float) -> tuple[Window, ...]:
    """Return the busiest and a typical stretch of so many seconds together."""
    busy, usual = busiest(trace, length_s / 2), typical(trace, length_s / 2)
    return (busiest(trace, length_s),) if busy.overlaps(usual) else (busy, usual)
