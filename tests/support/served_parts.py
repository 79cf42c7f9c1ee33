"""A recording of a served engine whose costs are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from support.run_parts import a_profile
from support.shadow_parts import RandomTraffic, simulated
from tuner.engine.limits import EngineLimits
from tuner.replay.timeline import Timelines
from tuner.shadow.step_model import StepModel
from tuner.traffic.traces import Trace

LIMITS = EngineLimits(8, 512)


STEPS = StepModel.linear(0.006, 0.0002, 0.0001, prefill_base_s=0.001, decode_context_s=1e-9)


PROFILE = a_profile(step_model=STEPS)


CALM = RandomTraffic(seed=1, n=240, per_s=3.0, longest_prompt=400, longest_output=60)


def replaying(trace: Trace) -> Callable[[StepModel], Timelines]:
    """Return what replays the trace on a simulated engine of any step model."""

    def run(model: StepModel) -> Timelines:
        return simulated(trace, LIMITS, model).timelines

    return run


def recorded(trace: Trace, model: StepModel, frontend_s: float = 0.0) -> Trace:
    """Return the trace with the times of a served engine, whose front end adds its own."""
    lines = replaying(trace)(model)
    ttft_s, e2e_s = lines.first_s - lines.due_s, lines.last_s - lines.due_s
    return replace(trace, ttft_s=ttft_s + frontend_s, e2e_s=e2e_s + frontend_s)
