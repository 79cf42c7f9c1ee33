"""The live engine: a real vLLM in this process, measured.

Starts once at the largest limits of the sweep; afterwards limits change while it is idle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.engine.compat import core as compat_core
from tuner.engine.compat import serve
from tuner.engine.guards import ProgressGuard, check_busy, check_idle, check_new_limits
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts, EngineInfo, Prompt, Step
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError


class LiveEngine:
    """vLLM's engine core behind the Engine protocol.

    A step's duration is wall time around the core's own turn. What the replay does between
    two turns is not charged, unless the device computes meanwhile (asynchronous scheduling):
    then the time since the last turn belongs to the step, or the device would work for free.
    """

    def __init__(self, engine_args: Any, ceiling: EngineLimits) -> None:
        """Start at the ceiling. Raises: EngineError when vLLM does not start."""
        engine_args.max_num_seqs = ceiling.max_num_seqs
        engine_args.max_num_batched_tokens = ceiling.max_num_batched_tokens
        for cap in ("max_num_active_seqs", "max_num_scheduled_tokens"):
            if hasattr(engine_args, cap):
                setattr(engine_args, cap, None)
        self._core: compat_core.Core | None = compat_core.Core(engine_args)
        self._info = self._core.info()
        self._limits = self._info.ceiling
        self._turn_ended_s: float | None = None
        self._progress = ProgressGuard()

    @property
    def info(self) -> EngineInfo:
        """What is known of this engine."""
        return self._info

    def shape(self) -> EngineShape:
        """Return what the scheduler knows of this engine. Raises: ShadowError."""
        return self._running_core.shape()

    @property
    def _running_core(self) -> compat_core.Core:
        if self._core is None:
            raise EngineError("the engine is closed")
        return self._core

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold now."""
        return self._limits

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits. Raises: EngineError while busy, above the ceiling, or hidden."""
        check_new_limits(self, limits)
        if limits != self._limits:
            self._running_core.set_limits(limits)
            self._limits = limits

    def reset(self) -> None:
        """Forget the prefix cache. Raises: EngineError while busy or if vLLM declines."""
        check_idle(self)
        if not self._running_core.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache although it is idle")

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request that answers with exactly output_tokens tokens."""
        self._running_core.add(row, prompt.token_ids(), output_tokens)

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running."""
        self._running_core.abort(rows)

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return self._running_core.has_work()

    def step(self) -> Step:
        """Take one turn of the core's loop and time it."""
        core = self._running_core
        check_busy(self)
        between_s = 0.0
        if self._turn_ended_s is not None:
            between_s = time.perf_counter() - self._turn_ended_s
        step = compat_core.step_of(*core.turn())
        step = replace(step, duration_s=step.duration_s + between_s)
        self._turn_ended_s = time.perf_counter() if core.batches_in_flight() else None
        self._progress.check(step)
        return step

    def close(self) -> None:
        """Shut vLLM down."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None


@dataclass(frozen=True, slots=True)
class LiveSource:
    """Starts live engines from `vllm serve` configurations."""

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Let vLLM resolve the configuration. Raises: UsageError if it refuses it."""
        config = serve.resolve_config(serve.parse_serve_values(values))
        return EngineFacts(
            current_limits=serve.config_limits(config),
            max_model_len=serve.config_max_model_len(config),
            chunks_prefill=serve.config_chunks_prefill(config),
            vllm_version=serve.vllm_version(),
            device=serve.device_name(),
        )

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> LiveEngine:
        """Start vLLM at the ceiling.

        Raises: UsageError when vLLM refuses the values, or they need engines beside this one;
            EngineError when it cannot start.
        """
        engine_args = serve.parse_serve_values(values)
        serve.check_starts_alone(engine_args, values)
        return LiveEngine(engine_args, ceiling)
