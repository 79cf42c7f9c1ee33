"""The first door: a stat logger that vLLM loads by itself where this package is installed.

It reports what the engine counted, and if asked how long its steps took, for `vllm serve` and
for any service that embeds AsyncLLM. vLLM promises no stability for the arguments of stat
loggers, so names are looked up first.
"""

from __future__ import annotations

import os
import platform
import time
from copy import copy
from dataclasses import fields
from inspect import isabstract
from typing import TYPE_CHECKING, Any, Final, cast

import vllm
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from tuner.recorder.messages import Finished, FinishedRequest
from tuner.recorder.recorder import Recorder, process_recorder
from tuner.recorder.steps import StepTap, quiet_iterations
from tuner.recorder.tap import served_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

NEEDED: Final = frozenset(
    {*FinishedRequest.__annotations__, "finished_requests", "iteration_timestamp"}
)
"""What `record` reads of an iteration and of each request that it finished."""


KEPT: Final = {
    "model_config": ("architecture", "dtype", "max_model_len", "model", "quantization"),
    "parallel_config": (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        "decode_context_parallel_size",
    ),
    "cache_config": (
        *("block_size", "enable_prefix_caching", "prefix_cache_retention_interval"),
        *("cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        *("num_gpu_blocks_override", "mamba_cache_mode", "use_replayssm"),
        "prefix_match_unit",
    ),
    "compilation_config": ("cudagraph_capture_sizes", "cudagraph_mode"),
}
"""What is kept of vLLM's configuration beside the scheduler's, by section.

Source: vLLM config/vllm.py, VllmConfig.
"""

UNEVEN: Final = ("is_heterogeneous", "global_head_dim", "swa_head_dim")
"""Options of a model's configuration by which heads of some layers have another size.

Source: Transformers, configuration_utils.py and models/gemma4.
"""

PLAIN: Final = (bool, int, float, str, list, type(None))

PRESENCE: Final = ("lora_config", "kv_transfer_config")
"""Sections of which is kept whether they are there."""

DRAFTING: Final = (
    *("method", "num_speculative_tokens", "max_num_new_slots_for_drafting"),
    *("num_speculative_tokens_per_batch_size", "disable_eagle_block_drop"),
    "disable_lookahead_block_hashes",
)
"""What is kept of how an engine drafts, where it does.

Source: vLLM config/speculative.py, SpeculativeConfig.
"""


def described_server(vllm_config: Any, version: str) -> dict[str, Any]:  # noqa: ANN401
    """Return what an API server knows of its engine: limits, blocks and configuration.

    Names are vLLM's and values plain. Whether such an engine can be predicted is decided by who
    reads it: that changes more often than what runs in production should.
    """
    scheduler, observed = vllm_config.scheduler_config, vllm_config.observability_config
    parallel = vllm_config.parallel_config
    return {
        "vllm": version,
        "model": str(vllm_config.model_config.model),
        "limits": {
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        },
        "num_blocks": int(vllm_config.cache_config.num_gpu_blocks or 0),
        "engines": int(parallel.data_parallel_size),
        "api_servers": int(getattr(parallel, "_api_process_count", 1)),
        "has_details": bool(getattr(observed, "enable_logging_iteration_details", False)),
        "device": _device(),
        "config": _kept_config(vllm_config),
    }


def _kept_config(vllm_config: Any) -> dict[str, Any]:  # noqa: ANN401
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    kept: dict[str, Any] = {}
    for section, names in KEPT.items():
        kept[section] = _plain(getattr(vllm_config, section), names)
    text = getattr(model, "hf_text_config", None)
    kept["model_config"] |= {
        "is_hybrid": bool(getattr(model, "is_hybrid", False)),
        "layers": list(getattr(text, "layer_types", None) or ()),
        "has_uneven_layers": any(getattr(text, name, None) for name in UNEVEN),
        "kv_shared_layers": int(getattr(text, "num_kv_shared_layers", None) or 0),
        "kv_heads": _kv_heads(model, vllm_config.parallel_config),
        "sliding_window": model.get_sliding_window(),
        "vocab_size": int(model.get_vocab_size()),
    }
    kept["scheduler_config"] = {
        name: value
        for name, value in vars(scheduler).items()
        if isinstance(value, PLAIN) and not name.startswith("_")
    }
    usual = copy(scheduler)
    usual.scheduler_cls = None
    kept["scheduler_classes"] = [
        f"{cls.__module__}.{cls.__qualname__}"
        for cls in (scheduler.get_scheduler_cls(), usual.get_scheduler_cls())
    ]
    kept["speculative_config"] = _kept_drafting(vllm_config.speculative_config)
    return kept | {name: getattr(vllm_config, name) is not None for name in PRESENCE}


def _kv_heads(model: Any, parallel: Any) -> list[list[int]]:  # noqa: ANN401
    """Return of how many heads each layer keeps keys on a device, and the size of one.

    Empty where all are alike, or this vLLM's configuration does not tell.

    Source: vllm/config/model_arch.py, ModelArchitectureConfig.
    """
    whole: Any = getattr(model, "model_arch_config", None)
    layers = range(len(getattr(whole, "per_layer_overrides", None) or ()))
    return [
        [int(model.get_num_kv_heads(parallel, whole[at])), int(whole[at].head_size)]
        for at in layers
    ]


def _kept_drafting(drafting: Any) -> dict[str, Any] | None:  # noqa: ANN401
    if drafting is None:
        return None
    has_modules = getattr(drafting, "use_multi_module_mtp", None)
    model = getattr(getattr(drafting, "draft_model_config", None), "hf_config", None)
    return _plain(drafting, DRAFTING) | {
        "use_multi_module_mtp": has_modules is not None and bool(has_modules()),
        "sample_from_anchor": bool(getattr(model, "sample_from_anchor", True)),
    }


def _plain(part: Any, names: Iterable[str]) -> dict[str, Any]:  # noqa: ANN401
    """Return what a section says of names, those of its version."""
    return {
        name: value if isinstance(value := getattr(part, name), PLAIN) else str(value)
        for name in names
        if hasattr(part, name)
    }


def _device() -> str:
    """Return the device's name without touching it: an API server computes nothing on it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    return f"CPU ({os.cpu_count()} cores, {platform.machine()})"


class RecordingStatLogger(StatLoggerBase):  # type: ignore[misc] # vLLM is untyped in the check
    """Hands finished requests to the recorder; one per engine, all with one recorder.

    vLLM ends its engine at an exception of a stat logger. So whatever it passes is taken, and
    read under the recorder's guard.
    """

    def __init__(self, *args: object, **keywords: object) -> None:
        self._recorder = process_recorder()
        self._steps: StepTap | None = None
        self._engine_index = 0
        if self._recorder is None:
            return
        with self._recorder.opening:
            self._taking = self._recorder.guard()
            self._open(self._recorder, *args, **keywords)

    def _open(
        self, recorder: Recorder, vllm_config: VllmConfig, *more: object, **keywords: object
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
        recorder.source.engines += 1
        index = keywords["engine_index"] if "engine_index" in keywords else (*more, 0)[0]
        self._engine_index = cast("int", index)
        if recorder.has_steps:
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
                at_s, ended = stats.iteration_timestamp, stats.finished_requests
                index = self._engine_index if recorder.source.engines > 1 else None
                recorder.offer(Finished(at_s, ended, index))
            if self._steps is not None:
                known = (
                    keywords["scheduler_stats"] if "scheduler_stats" in keywords else args[0]
                )
                scheduled = cast("SchedulerStats | None", known)
                # Before 0.24 or so a step says nothing of what was in it.
                details = getattr(scheduled, "iteration_details", None)
                drafting = getattr(scheduled, "spec_decoding_stats", None)
                self._steps.take(stats, details, drafting, time.time())

    def log_engine_initialized(self) -> None:
        """Do nothing: recording begins with the first request."""


if isabstract(RecordingStatLogger):
    # vLLM would not start with it; a plugin that fails to import it logs and leaves out.
    raise ImportError(f"vLLM {vllm.__version__} asks its stat loggers for methods we lack")
