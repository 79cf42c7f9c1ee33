"""The first door: a stat logger that vLLM loads by itself where this package is installed.

It reports what the engine counted, for `vllm serve` and for any service that embeds AsyncLLM.
vLLM promises no stability for what stat loggers are told, so the names are looked up first.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

import vllm
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

from tuner.recorder.messages import Finished, FinishedRequest
from tuner.recorder.recorder import process_recorder
from tuner.recorder.tap import served_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import MultiModalCacheStats, SchedulerStats

NEEDED: Final = frozenset(
    {*FinishedRequest.__annotations__, "finished_requests", "iteration_timestamp"}
)
"""What `record` reads of an iteration and of each request that it finished."""


class RecordingStatLogger(StatLoggerBase):  # type: ignore[misc] # vLLM is untyped in the check
    """Hands finished requests to the recorder; one per engine, all with one recorder."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self._recorder = process_recorder()
        if self._recorder is None:
            return
        with self._recorder.harmless():
            told = {one.name for one in fields(FinishedRequestStats)} | vars(
                IterationStats()
            ).keys()
            lacking = NEEDED - told
            if lacking:
                names = ", ".join(sorted(lacking))
                self._recorder.stop(f"vLLM {vllm.__version__} does not report {names}")
            self._recorder.source.vllm = vllm.__version__
            self._recorder.source.model = served_model(vllm_config)
            self._recorder.source.has_engine_counts = True

    def record(
        self,
        scheduler_stats: SchedulerStats | None,  # noqa: ARG002 - vLLM's interface
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Take the requests that this iteration finished; most finish none."""
        recorder = self._recorder
        if recorder is None or iteration_stats is None or not recorder.is_on:
            return
        finished = iteration_stats.finished_requests
        if finished:
            recorder.offer(Finished(iteration_stats.iteration_timestamp, finished))

    def log_engine_initialized(self) -> None:
        """Say nothing: recording begins with the first request."""
