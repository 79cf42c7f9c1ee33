"""Read off a running vLLM what its scheduler needs to know, and refuse what has no shadow."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict
from typing import Any

from tuner.engine.compat.serve import device_name
from tuner.engine.shape import SUPPORTED_KV, EngineShape
from tuner.errors import ShadowError

# Options of SchedulerConfig that decide nothing about a text model's schedule, or that are
# set apart from the rest.
_NOT_COPIED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_active_seqs",
    "max_num_scheduled_tokens",
    "async_scheduling",
    "runner_type",
    "max_model_len",
    "scheduler_cls",
    "is_multimodal_model",
    "max_num_encoder_input_tokens",
    "encoder_cache_size",
    "stream_interval",
)


def read_shape(
    vllm_config: Any, kv_cache_config: Any, device: str, version: str
) -> EngineShape:
    """Read off a running engine what its scheduler needs.

    Raises: ShadowError naming what the shadow cannot stand in for.
    """
    _refuse_unsupported(vllm_config, kv_cache_config)
    block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    return _shape(vllm_config, block_size, device, version)


def _shape(vllm_config: Any, block_size: int, device: str, version: str) -> EngineShape:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return EngineShape(
        model=str(model.model),
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version=version,
        parallelism={
            "tensor_parallel_size": int(parallel.tensor_parallel_size),
            "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
            "data_parallel_size": int(parallel.data_parallel_size),
        },
        vocab_size=int(model.get_vocab_size()),
        max_model_len=int(model.max_model_len),
        block_size=block_size,
        kv_kind=SUPPORTED_KV[0],
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        asynchronous=bool(getattr(vllm_config.scheduler_config, "async_scheduling", False)),
        captured_sizes=captured_sizes(vllm_config),
        scheduler=_plain_options(vllm_config.scheduler_config),
        captures_mixed=_captures_mixed(vllm_config),
    )


def described_server(vllm_config: Any, version: str) -> dict[str, Any]:
    """Return what an API server knows of its engine: limits, blocks and shape, for a recording.

    `shape` is missing where the shadow cannot stand in for the engine, and `no_shadow` says
    why. The API server holds no list of KV-cache groups, so that whether there is but one of
    full attention is asked of the model's configuration.
    """
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    cache, observed = vllm_config.cache_config, vllm_config.observability_config
    server: dict[str, Any] = {
        "vllm": version,
        "model": str(vllm_config.model_config.model),
        "limits": {
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        },
        "num_blocks": int(cache.num_gpu_blocks or 0),
        "engines": int(parallel.data_parallel_size),
        "api_servers": int(getattr(parallel, "_api_process_count", 1)),
        "has_details": bool(getattr(observed, "enable_logging_iteration_details", False)),
    }
    notes = [*_unsupported(vllm_config), *_unusual_attention(vllm_config.model_config)]
    if notes:
        return {**server, "no_shadow": _cannot_stand_in(notes)}
    shape = _shape(vllm_config, int(cache.block_size), _served_device(), version)
    return {**server, "shape": asdict(shape)}


def _served_device() -> str:
    """Return the device's name without touching it: an API server computes nothing on it."""
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    return device_name() if is_cpu else str(current_platform.get_device_name())


def _unusual_attention(model_config: Any) -> list[str]:
    """Return what keeps another KV cache than one group of full attention, in words."""
    text = getattr(model_config, "hf_text_config", None)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    is_hybrid = bool(getattr(model_config, "is_hybrid", False))
    sliding = model_config.get_sliding_window()
    return [
        words
        for words, holds in (
            (f"layers of {', '.join(sorted(kinds))}", bool(kinds)),
            ("state-space layers", is_hybrid),
            ("a sliding window", bool(sliding) and not kinds),
        )
        if holds
    ]


def captured_sizes(vllm_config: Any) -> tuple[int, ...]:
    """Return the batch sizes in tokens for which graphs are captured, ascending."""
    compilation = vllm_config.compilation_config
    sizes = getattr(compilation, "cudagraph_capture_sizes", None) or ()
    mode = str(getattr(compilation, "cudagraph_mode", "NONE"))
    return () if mode.endswith("NONE") else tuple(sorted(int(size) for size in sizes))


def _captures_mixed(vllm_config: Any) -> bool:
    """Whether batches with a prompt run as graphs too.

    Source: vllm/config/compilation.py, CUDAGraphMode.mixed_mode.
    """
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    mixed = getattr(mode, "mixed_mode", None)
    return mixed is None or str(mixed().name) != "NONE"


def _plain_options(scheduler_config: Any) -> dict[str, bool | int | float | str | None]:
    return {
        name: value
        for name, value in sorted(vars(scheduler_config).items())
        if name not in _NOT_COPIED
        and not name.startswith("_")
        and (value is None or isinstance(value, bool | int | float | str))
    }


def _refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise for what makes a scheduler keep blocks or slots in another way."""
    notes = _unsupported(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or not _is_full_attention(groups[0].kv_cache_spec):
        notes.append(f"KV-cache groups {', '.join(kinds) or 'none'}")
    if notes:
        raise ShadowError(
            _cannot_stand_in(notes),
            "it keeps account of one group of full attention; use --method live",
        )


def _cannot_stand_in(notes: Sequence[str]) -> str:
    return f"the shadow cannot stand in for an engine with {' and '.join(notes)}"


def _unsupported(vllm_config: Any) -> list[str]:
    """Return what makes a scheduler keep blocks or slots in another way, in words."""
    parallel, own = vllm_config.parallel_config, _own_scheduler(vllm_config.scheduler_config)
    return [
        words
        for words, holds in (
            ("speculative decoding", vllm_config.speculative_config is not None),
            ("LoRA", vllm_config.lora_config is not None),
            ("a KV connector", vllm_config.kv_transfer_config is not None),
            (f"a scheduler of its own ({own})", bool(own)),
            ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
            ("data parallelism", parallel.data_parallel_size > 1),
            (
                "context parallelism",
                getattr(parallel, "decode_context_parallel_size", 1) > 1,
            ),
        )
        if holds
    ]


def _own_scheduler(scheduler_config: Any) -> str:
    """Return the name of a scheduler that is not vLLM's usual one, or nothing."""
    usual = copy(scheduler_config)
    usual.scheduler_cls = None
    chosen, expected = scheduler_config.get_scheduler_cls(), usual.get_scheduler_cls()
    return "" if chosen is expected else f"{chosen.__module__}.{chosen.__qualname__}"


def _is_full_attention(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return isinstance(spec, FullAttentionSpec)
