"""What a profile says of any setting: replays on the simulated scheduler, in this process.

Everything that is predicted goes through `Predictor.replay`: rankings, capacities, checks of
drift, corrections by a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import EngineError, ShadowError, UsageError
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import Failure, measure_capacity
from tuner.replay.slo import Slo
from tuner.shadow.calibration import StatedError, error_ratio
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.profiles import Profile
from tuner.shadow.reference import ReferenceEngine
from tuner.shadow.simulated import SimulatedEngine, unknown_options
from tuner.shadow.simulator import room_for, simulate
from tuner.shadow.step_model import StepModel
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class Predictor:
    """What a profile says of any setting.

    `ceiling` is what the engine starts at, on which its KV-cache blocks and captured graphs
    depend; None where it starts at the limits themselves. With `has_own_graphs` the graphs are
    those of the limits whatever it starts at. `seed` draws the prompts that vLLM's scheduler is
    asked with, where the simulator must not be relied on. `is_forced`: the profile may be of
    another engine.
    """

    profile: Profile
    ceiling: EngineLimits | None = None
    seed: int = 0
    has_own_graphs: bool = True
    is_forced: bool = False
    _engines: dict[EngineLimits, ReferenceEngine] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Those that are made of another share what is laid out of the traces.
    _prepared: list[PreparedTrace] = field(default_factory=list, repr=False, compare=False)

    @property
    def wrong_ratio(self) -> float:
        """How wrong a prediction typically is, as a share of what is measured."""
        return error_ratio(self.profile)

    @property
    def error(self) -> StatedError:
        """How wrong its predictions are said to be, and the caveats they carry."""
        return StatedError.of(self.profile, is_forced=self.is_forced)

    @property
    def doubt(self) -> str:
        """Why vLLM's own scheduler is asked instead of the simulator; empty where it is not."""
        if unknown := unknown_options(self.profile.shape):
            return f"the simulator does not know {', '.join(unknown)}"
        agreement = self.profile.agreement
        if agreement is not None and agreement.departs:
            return f"vLLM {agreement.vllm_version} decides otherwise, {agreement.departs}"
        return ""

    def as_deployed(self) -> Predictor:
        """Return what says of each setting what an engine started with it will do."""
        return replace(self, ceiling=None)

    def of(self, profile: Profile) -> Predictor:
        """Return the same of another profile."""
        return replace(self, profile=profile)

    def info(self, limits: EngineLimits) -> EngineInfo:
        """Return what is known of the engine that the limits are predicted on."""
        ceiling, doubt = self._ceiling(limits), self.doubt
        remark = f"{doubt}: vLLM's own scheduler is asked, which takes longer" if doubt else ""
        blocks = self.profile.num_blocks_at(ceiling)
        return EngineInfo.of_shadow(self.profile.shape, ceiling, blocks, remark)

    def step_model_at(self, limits: EngineLimits) -> StepModel:
        """Return how long steps take on the engine that the limits are predicted on."""
        at = limits if self.has_own_graphs else self._ceiling(limits)
        return self.profile.step_model_at(at)

    def simulated(self, limits: EngineLimits) -> SimulatedEngine:
        """Return the engine that the limits are simulated on. Raises: ShadowError."""
        ceiling = self._ceiling(limits)
        blocks, model = self.profile.num_blocks_at(ceiling), self.step_model_at(limits)
        accepted = self.profile.accepted
        return SimulatedEngine(self.profile.shape, blocks, model, ceiling, accepted)

    def replay(self, trace: Trace, limits: EngineLimits, plan: ReplayPlan) -> ReplayLog:
        """Predict a replay of the trace, at the plan's multiple of its load.

        Units: seconds on the replay's clock, zero at the trace's own zero.
        Raises: EngineError if a request cannot be served at the limits; ShadowError or
            UsageError if nothing can be predicted from the profile here, or memory is short.
        """
        if self.doubt:
            return self._ask(at_load(trace, plan.load), limits, plan)
        return simulate(self.simulated(limits), self._prepare(trace, plan), limits, plan)

    def _prepare(self, trace: Trace, plan: ReplayPlan) -> PreparedTrace:
        """Return the trace as it is replayed; the last few are kept from call to call."""
        for known in self._prepared:
            if known.fits(trace, plan):
                return known
        room_for(trace, self.profile.shape)
        del self._prepared[: 1 - _KEPT]
        made = PreparedTrace(at_load(trace, plan.load), plan, of=trace)
        self._prepared.append(made)
        return made

    def _ask(self, trace: Trace, limits: EngineLimits, plan: ReplayPlan) -> ReplayLog:
        """Replay on vLLM's own scheduler."""
        engine = self._reference(limits)
        prompts = PromptSource(trace, self.profile.shape.vocab_size, self.seed)
        try:
            engine.set_limits(limits)
            return replay(engine, trace, prompts, plan)
        except EngineError:
            # It is busy with what it could not serve.
            self._engines.clear()
            raise

    def measure(
        self,
        traces: Sequence[Trace],
        limits: EngineLimits,
        plan: ReplayPlan,
        slos: Sequence[Slo] = (),
    ) -> Measurement | Failure:
        """Predict replays of the traces, one after the other, and pool them.

        Raises: ShadowError, UsageError.
        """
        try:
            logs = [self.replay(trace, limits, plan) for trace in traces]
        except EngineError as error:
            return Failure(error.message)
        return replace(measure(logs, slos), load=plan.load * traces[0].load)

    def measure_capacity(
        self,
        traces: Sequence[Trace],
        limits: EngineLimits,
        plan: ReplayPlan,
        slos: Sequence[Slo],
    ) -> Measurement | Failure:
        """Predict the largest load at which the SLOs hold, and the measurement there.

        Raises: ShadowError, UsageError.
        """

        def measure_at(load: float) -> Measurement | Failure:
            return self.measure(traces, limits, replace(plan, load=load), slos)

        return measure_capacity(measure_at, traces, plan.load, slos)

    def _ceiling(self, limits: EngineLimits) -> EngineLimits:
        return limits if self.ceiling is None else self.ceiling.covering(limits)

    def _reference(self, limits: EngineLimits) -> ReferenceEngine:
        """Return an engine that can take the limits. Raises: ShadowError without vLLM."""
        ceiling = self._ceiling(limits)
        model = self.step_model_at(limits)
        if ceiling not in self._engines:
            serve.prepare_environment()
            blocks, shape = self.profile.num_blocks_at(ceiling), self.profile.shape
            try:
                accepted = self.profile.accepted
                made = ReferenceEngine(shape, ceiling, blocks, model, accepted)
            except UsageError as missing:
                if serve.installed_vllm()[0]:
                    raise
                raise ShadowError(
                    f"{self.doubt}, and vLLM, whose own scheduler is asked then, is not"
                    " installed",
                    "pip install 'max-num-seqs-tuner[cpu]', or [gpu]: it needs no GPU for that",
                ) from missing
            self._engines[ceiling] = made
        self._engines[ceiling].timer = model
        return self._engines[ceiling]


# Prepared traces that are kept: ours, as many windows as a run has.
_KEPT = 8
