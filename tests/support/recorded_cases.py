"""Cases decided by what was recorded of a planted machine while it served, and by nothing else.

The machine serves the case's traffic at its current limits, in the mood of a seed; a profile is
learnt of those steps as `tune profile fit` does it, and held to the times of the recording.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from support.planted import VLLM_VERSION
from support.planted_cases import PlantedCase
from support.virtual_time import on_virtual_time
from tuner.engine.compat import serve
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.metrics import measure
from tuner.shadow.calibration import Calibration
from tuner.shadow.learnt import seen_in
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile
from tuner.shadow.rebuilt import Rebuilt
from tuner.traffic.prompts import PromptSource

MEDIANS = (("tpot_s", "p50"), ("e2e_s", "p50"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCase(PlantedCase):
    """A planted case, and what its recording taught."""

    profile: Profile

    def on_later(self) -> None:
        """Return nothing: nobody knows what came after."""


def recorded_case(case: PlantedCase, seed: int = 0) -> RecordedCase:
    """Serve the case's traffic in the mood of a seed, and learn of it."""
    source = case.source(seed)
    with on_virtual_time(source.clock):
        engine = source.start({}, case.current)
        plan = replace(case.plan, keep_steps=True)
        log = replay(engine, case.trace, PromptSource(case.trace, 1000), plan)
    steps = log.kept_steps
    assert steps is not None
    # Of its own vLLM a profile may be asked here; what the planted engine does all versions do.
    shape = replace(engine.shape(), vllm_version=serve.installed_vllm()[1] or VLLM_VERSION)
    learnt = (
        Calibration(shape, (), (), case.current, {"model": "planted"})
        .and_start(case.current, source.blocks_at(case.current))
        .and_steps(case.current, Rebuilt(steps, {}, len(case.trace)).stretches())
        .profile()
    )
    wrong = _off(learnt, case, log)
    profile = replace(learnt, seen=seen_in(steps), metric_error_ratio=wrong)
    planted = {field.name: getattr(case, field.name) for field in fields(case)}
    return RecordedCase(**planted, profile=profile)


def _off(profile: Profile, case: PlantedCase, log: ReplayLog) -> float:
    """Return how far the recording's own medians are off where the profile replays it."""
    again = Predictor(profile).replay(case.trace, case.current, case.plan)
    mine, its = measure([again]), measure([log])
    ratios = [(mine.latency(*which) or 0.0) / (its.latency(*which) or 1.0) for which in MEDIANS]
    return float(np.abs(np.array(ratios) - 1).max())
