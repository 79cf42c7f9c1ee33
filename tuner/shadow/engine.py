"""The shadow engine: vLLM's own scheduler and KV cache, with predicted steps.

Admission, chunked prefill, prefix hits, preemption and asynchronous scheduling are vLLM's;
only how long a batch takes comes from a step-time model. Needs neither model nor device.
Which configurations to try on it is left to `search`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.guards import ProgressGuard, check_busy, check_idle, check_new_limits
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo, PrefixCacheNeeded, Prompt, Step
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError
from tuner.shadow.fast_forward import is_foreseeable
from tuner.shadow.pipeline import Pipeline, SchedulerPair, StepTimer


class ShadowEngine:
    """vLLM's scheduler behind the Engine protocol, with a StepTimer in the model's place.

    With `fast` it takes like steps at once and does not ask the scheduler about requests of
    which the answer is known; schedules and timelines are the same either way.
    """

    def __init__(
        self,
        shape: EngineShape,
        ceiling: EngineLimits,
        num_blocks: int,
        timer: StepTimer,
        *,
        fast: bool = True,
        remark: str = "",
    ) -> None:
        self._shape, self._timer, self._limits = shape, timer, ceiling
        self._hides = fast and is_foreseeable(shape)
        self._pair = SchedulerPair(shape, ceiling, num_blocks)
        self._pipeline: Pipeline | None = None
        self._use(self._pair.core(sharing=True))
        self._progress = ProgressGuard()
        self._arrived = 0
        self._info = EngineInfo.of_shadow(shape, ceiling, num_blocks, remark)

    def _use(self, core: SchedulerCore) -> None:
        """Go on with an idle scheduler."""
        length = self._shape.max_model_len
        self._pipeline = Pipeline(core, self._pair, self._timer, length, hides=self._hides)
        self._pipeline.set_limits(self._limits)

    @property
    def info(self) -> EngineInfo:
        """What is known of the engine that this is the shadow of."""
        return self._info

    def shape(self) -> EngineShape:
        """Return what the scheduler knows of the engine."""
        return self._shape

    @property
    def _open(self) -> Pipeline:
        if self._pipeline is None:
            raise EngineError("the engine is closed")
        return self._pipeline

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold now."""
        return self._limits

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits. Raises: EngineError while busy or above the ceiling."""
        check_new_limits(self, limits)
        self._limits = limits
        self._open.set_limits(limits)

    def reset(self, *, sharing: bool = True) -> None:
        """Forget the prefix cache. Raises: EngineError while busy or if vLLM declines.

        Without sharing a scheduler without a cache decides the same, as long as it preempts
        nobody, and has no blocks to book.
        """
        check_idle(self)
        core = self._pair.core(sharing=sharing)
        if core is not self._open.core:
            self._use(core)
        if not core.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache although it is idle")

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request that answers with exactly output_tokens tokens."""
        self._arrived += 1
        self._open.add(row, prompt, output_tokens, float(self._arrived))

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running."""
        self._open.abort(rows)

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return self._open.has_work()

    def close(self) -> None:
        """Let go of the scheduler."""
        self._pipeline = None

    def step(self, horizon_s: float = 0.0) -> Step:
        """Take one turn, or several like ones that begin before horizon_s.

        Raises: PrefixCacheNeeded, and is idle then; EngineError.
        """
        check_busy(self)
        try:
            step = self._open.step(horizon_s)
        except PrefixCacheNeeded:
            self._use(self._pair.core(sharing=True))
            raise
        self._progress.check(step)
        return step
