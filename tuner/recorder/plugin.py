"""The first door: a stat logger that vLLM loads by itself where this package is installed.

It reports what the engine counted, and if asked how long its steps took, for `vllm serve` and
for any service that embeds AsyncLLM. vLLM promises no stability for the arguments of stat
loggers, so names are looked up first.
"""

from __future__ import annotations

import time
from dataclasses import fields
from inspect import isabstract
from typing import TYPE_CHECKING, Final, cast

import vllm
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from tuner.recorder.messages import Finished, FinishedRequest
from tuner.recorder.recorder import Recorder, process_recorder
from tuner.recorder.steps import StepTap, quiet_iterations
from tuner.recorder.tap import served_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NEEDED: Final = frozenset(
    {*FinishedRequest.__annotations__, "finished_requests", "iteration_timestamp"}
)
"""What `record` reads of an iteration and of each request that it finished."""


class RecordingStatLogger(StatLoggerBase):  # type: ignore[misc] # vLLM is untyped in the check
    """Hands finished requests to the recorder; one per engine, all with one recorder.

    vLLM ends its engine at an exception of a stat logger. So whatever it passes is taken, and
    read under the recorder's guard.
    """

    def __init__(self, *args: object, **keywords: object) -> None:
        self._recorder = process_recorder()
        self._steps: StepTap | None = None
        if self._recorder is None:
            return
        with self._recorder.opening:
            self._taking = self._recorder.guard()
            self._open(self._recorder, *args, **keywords)

    def _open(
        self, recorder: Recorder, vllm_config: VllmConfig, *_more: object, **_keywords: object
    ) -> None:
        reported = {one.name for one in fields(FinishedRequestStats)} | vars(
            IterationStats()
        ).keys()
        lacking = NEEDED - reported
        if lacking:
            names = ", ".join(sorted(lacking))
            recorder.stop(f"vLLM {vllm.__version__} does not report {names}")
        recorder.source.vllm = vllm.__version__
        recorder.source.model = served_model(vllm_config)
        recorder.source.has_engine_counts = True
        if recorder.has_steps:
            from tuner.engine.compat.shape import described_server

            recorder.source.server = described_server(vllm_config, vllm.__version__)
            self._steps = StepTap(recorder.offer)
            recorder.before_close.append(self._steps.flush)
            quiet_iterations()

    def record(self, *args: object, **keywords: object) -> None:
        """Take the requests that this iteration finished; most finish none."""
        recorder = self._recorder
        if recorder is None or not recorder.is_on:
            return
        with self._taking:
            found = keywords["iteration_stats"] if "iteration_stats" in keywords else args[1]
            stats = cast("IterationStats | None", found)
            if stats is not None and stats.finished_requests:
                recorder.offer(Finished(stats.iteration_timestamp, stats.finished_requests))
            if self._steps is not None:
                known = (
                    keywords["scheduler_stats"] if "scheduler_stats" in keywords else args[0]
                )
                scheduled = cast("SchedulerStats | None", known)
                # Before 0.24 or so a step says nothing of what was in it.
                details = getattr(scheduled, "iteration_details", None)
                self._steps.take(stats, details, time.time())

    def log_engine_initialized(self) -> None:
        """Do nothing: recording begins with the first request."""


if isabstract(RecordingStatLogger):
    # vLLM would not start with it; a plugin that fails to import it logs and leaves out.
    raise ImportError(f"vLLM {vllm.__version__} asks its stat loggers for methods we lack")
