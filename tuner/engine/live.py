"""The live engine: a real vLLM in this process, measured.

Starts once at the largest limits of the sweep; afterwards limits change while it is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.engine.compat import core as compat_core
from tuner.engine.compat import serve
from tuner.engine.guards import GuardedEngine
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts, Prompt, Step
from tuner.engine.serve_config import check_length
from tuner.engine.shape import EngineShape
from tuner.errors import EngineError


class LiveEngine(GuardedEngine):
    """vLLM's engine core behind the Engine protocol.

    A step's duration is wall time around the core's own turn. What the replay does between
    two turns is not charged, unless the device computes meanwhile (asynchronous scheduling):
    then the time since the last turn belongs to the step for as long as it computes, or the
    device would work for free.
    """

    def __init__(
        self, engine_args: Any, ceiling: EngineLimits, *, is_greedy: bool = False
    ) -> None:
        """Start at the ceiling. Raises: EngineError when vLLM does not start."""
        engine_args.max_num_seqs = ceiling.max_num_seqs
        engine_args.max_num_batched_tokens = ceiling.max_num_batched_tokens
        for cap in ("max_num_active_seqs", "max_num_scheduled_tokens"):
            if hasattr(engine_args, cap):
                setattr(engine_args, cap, None)
        core = compat_core.Core(engine_args, is_greedy=is_greedy)
        self._core: compat_core.Core | None = core
        self._info = self._core.info()
        self._limits = self._info.ceiling
        self._between = DeviceTime(core.is_computing)
        self._prepared: dict[int, Any] = {}
        self._batches = compat_core.BatchReader()

    def shape(self) -> EngineShape:
        """Return what the scheduler knows of this engine. Raises: ShadowError."""
        return self._running_core.shape()

    @property
    def _running_core(self) -> compat_core.Core:
        if self._core is None:
            raise EngineError("the engine is closed")
        return self._core

    def _take(self, limits: EngineLimits) -> None:
        self._running_core.set_limits(limits)

    def _forget(self) -> None:
        self._prepared.clear()
        if not self._running_core.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache although it is idle")

    def prepare(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Make the tokens, block hashes and request object that `add` will hand over."""
        self._between.look()
        self._prepared[row] = self._running_core.request(
            row, prompt.token_ids(), output_tokens, prompt.priority
        )

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request that answers with exactly output_tokens tokens."""
        if row not in self._prepared:
            self.prepare(row, prompt, output_tokens)
        self._running_core.add(self._prepared.pop(row))

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running."""
        self._running_core.abort(rows)

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return self._running_core.has_work()

    def _turn(self) -> Step:
        """Take one turn of the core's loop and time it."""
        between_s = self._between.stop()
        turn = self._running_core.turn()
        self._between.start(turn.ended_s, is_on_its_way=turn.is_on_its_way)
        return compat_core.step_of(turn, between_s, self._batches)

    def close(self) -> None:
        """Shut vLLM down."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None


class DeviceTime:
    """How long the device was seen to compute between two turns of an asynchronous core.

    The host's work meanwhile costs nothing as long as the device computes too. Once it was
    seen to be done the device waits for the replay, which no server would let it: that time
    is nobody's.
    """

    def __init__(
        self, is_computing: Callable[[], bool], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._is_computing, self._now = is_computing, now
        self._started_s: float | None = None
        self._done_s: float | None = None

    def start(self, ended_s: float, *, is_on_its_way: bool) -> None:
        """Begin to count from a turn's end where it has left a batch on its way.

        From there, not from now: else what the host does meanwhile is in no step's time.
        """
        self._started_s = ended_s if is_on_its_way else None
        self._done_s = None
        self.look()

    def look(self) -> None:
        """Note whether the device is done by now."""
        if self._started_s is not None and self._done_s is None and not self._is_computing():
            self._done_s = self._now()

    def stop(self) -> float:
        """Return the seconds that the next turn's step is charged with."""
        if self._started_s is None:
            return 0.0
        ended_s = self._now() if self._done_s is None else self._done_s
        return ended_s - self._started_s


@dataclass(frozen=True, slots=True)
class LiveSource:
    """Starts live engines from `vllm serve` configurations.

    They sample as a server of the model would, or if `is_greedy` the likeliest token.
    """

    is_greedy: bool = False

    def prepare(self) -> None:
        """Import vLLM, which makes no CUDA context."""
        serve.import_engine()

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Let vLLM resolve the configuration.

        Raises: UsageError if it refuses it, it leaves the longest request to the start, or
            the model does not generate text.
        """
        check_length(values)
        engine_args = serve.parse_serve_values(values)
        config = serve.resolve_config(engine_args)
        serve.check_generates(config)
        return EngineFacts(
            current_limits=serve.config_limits(config, engine_args),
            max_model_len=int(config.model_config.max_model_len),
            chunks_prefill=bool(config.scheduler_config.enable_chunked_prefill),
            vllm_version=serve.vllm_version(),
            device=serve.device_name(),
            caveats=serve.config_caveats(config),
        )

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> LiveEngine:
        """Start vLLM at the ceiling.

        Raises: UsageError when vLLM refuses the values, or they need engines beside this one;
            EngineError when it cannot start.
        """
        engine_args = serve.parse_serve_values(values)
        serve.check_starts_alone(engine_args, values)
        return LiveEngine(engine_args, ceiling, is_greedy=self.is_greedy)
