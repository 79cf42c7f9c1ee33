"""A run without an engine: the shadow of a profile ranks everything and decides.

The answer is a prediction and says so. With an engine at hand, `session` measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tuner.carried import Carried, carried
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.forecast import Forecast
from tuner.ranking import Ranking
from tuner.replay.loop import ReplayLog
from tuner.replay.series import TimelineRecord, timeline_record
from tuner.run_state import RunState
from tuner.search.ladder import at_edge
from tuner.search.race import Decision, Verdict, decide_predicted
from tuner.shadow.calibration import error_ratio
from tuner.shadow.pool import Shadows, Task
from tuner.traffic.windows import whole

# The share of the budget that the forecast may take: ours, the rest is for capacities.
FORECAST_SHARE = 0.8


@dataclass(slots=True)
class ShadowSession:
    """A run on shadows alone."""

    run_state: RunState
    shadows: Shadows
    is_forced: bool = False
    carried: Carried | None = None
    _ranking: Ranking | None = None

    def run(self) -> Decision:
        """Foretell the whole space and decide by it.

        Raises: ShadowError, UsageError, TooFewSamplesError.
        """
        run = self.run_state
        run.begin()
        began_s = time.monotonic()
        self.shadows.start_all()
        run.bench.ensure_started()
        forecast = Forecast(run.trace, run.aim, self.shadows, 0)
        forecast.choose_parts(run.space, FORECAST_SHARE * run.aim.budget.total_s)
        run.windows = forecast.parts
        run.use_windows()
        run.on_parts(forecast.parts, 0)
        self._ranking = Ranking(run, forecast)
        seen = self._ranking.rank()
        run.walls_s["shadow"] = time.monotonic() - began_s
        run.listener.note(
            f"the shadow ranked {len(run.space.grid())} settings with {len(seen)} replays"
        )
        wrong_ratio = error_ratio(self.shadows.profile)
        decision = decide_predicted(seen, run.space.present, wrong_ratio)
        if run.aim.slos:
            self.carried = carried(run, forecast, decision)
        self._keep_timelines(forecast, dict.fromkeys([decision.shown, run.space.present]))
        run.journal.set_state("done")
        return decision

    def _keep_timelines(self, forecast: Forecast, settings: Iterable[EngineLimits]) -> None:
        """Replay settings once more for what they look like over time."""
        run, plan = self.run_state, replace(self.run_state.aim.plan, keep_steps=True)
        found: dict[EngineLimits, list[TimelineRecord]] = {limits: [] for limits in settings}

        def keep(limits: EngineLimits, log: ReplayLog) -> None:
            found[limits].append(timeline_record(log))

        self.shadows.run(
            [
                Task(forecast.names, limits, plan, run.aim.slos, on_log=partial(keep, limits))
                for limits in found
            ]
        )
        for limits, windows in found.items():
            if windows:
                run.keep_timelines(limits, "shadow", windows)

    def close(self) -> None:
        """End the shadows' processes."""
        self.shadows.close()

    def doubts(self, decision: Decision) -> list[Caveat]:
        """Return the caveats of the run, in a fixed order."""
        run = self.run_state
        found = {*run.caveats, Caveat.SHADOW_ONLY}
        history = self._ranking.seen() if self._ranking is not None else []
        if at_edge(decision.winner, history):
            found.add(Caveat.AT_SPACE_EDGE)
        if run.windows != (whole(run.trace),):
            found.add(Caveat.WINDOWED)
        if self.is_forced:
            found.add(Caveat.PROFILE_FORCED)
        if decision.verdict is Verdict.KEEP and decision.best != run.space.present:
            found.add(Caveat.WITHIN_NOISE)
        return [caveat for caveat in Caveat if caveat in found]

    def findings(self) -> dict[str, Any]:
        """Return what stands in the result beside the decision."""
        return {
            "profile": profile_facts(self.shadows),
            "cold": None,
            "capacity": None if self.carried is None else self.carried.as_json(),
        }


def profile_facts(shadows: Shadows) -> dict[str, Any]:
    """Return where a prediction comes from, for the result."""
    profile = shadows.profile
    return {
        "made_at": profile.made_at,
        "device": profile.shape.device,
        "vllm_version": profile.shape.vllm_version,
        "calibrated_on": list(profile.calibrated_on),
        "error_ratio": error_ratio(profile),
    }
