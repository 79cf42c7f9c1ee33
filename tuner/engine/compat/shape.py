"""Read off a running vLLM what its scheduler needs to know, and refuse what has no shadow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final

from tuner.engine.shape import (
    DRAFTS_IN,
    FULL_ATTENTION,
    MTP,
    RETENTION,
    SETTING_GRAPHS,
    STATE,
    Drafts,
    EngineShape,
    KvGroup,
    is_since,
)
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
_RECORDED: Final = ("parallel_config", "cache_config", "compilation_config", "scheduler_config")
_EXTENSIONS: Final = ("lora_config", "kv_transfer_config")
_VARYING: Final = ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
"""Methods that draft by what the text is, or for a purpose of their own."""


def read_shape(
    vllm_config: Any, kv_cache_config: Any, device: str, version: str
) -> EngineShape:
    """Read off a running engine what its scheduler needs.

    LoRA decides nothing about requests without an adapter, and none is replayed with one.

    Raises: ShadowError naming what the shadow cannot stand in for.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    notes = _unsupported(vllm_config, _own_scheduler(vllm_config.scheduler_config))
    if notes := [*notes, *([] if specs else ["no KV cache"])]:
        raise ShadowError(_cannot_stand_in(notes), "use --method live")
    held = sum(int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors)
    bytes_each = held // max(1, int(kv_cache_config.num_blocks))
    if len(specs) == 1 and _is_full_attention(specs[0]):
        shape = _shape(vllm_config, int(specs[0].block_size), device, version)
        return replace(shape, block_bytes=bytes_each)
    shape = _shape(vllm_config, int(vllm_config.cache_config.block_size), device, version)
    kinds = " and ".join(type(spec).__name__ for spec in specs)
    kept = getattr(kv_cache_config, RETENTION, None)
    groups = tuple(
        plain_group(spec, kept, drafts=_has(group, DRAFTS_IN))
        for spec, group in zip(specs, kv_cache_config.kv_cache_groups, strict=True)
    )
    return replace(shape, kv_kind=kinds, kv_groups=groups, block_bytes=bytes_each)


def plain_group(spec: Any, retention: int | None, *, drafts: bool = False) -> KvGroup:
    """Return what decides how a group keeps its blocks; what else is in one is bytes.

    How much of a window's past the prefix cache retains is one number for all groups. Whether
    layers are in it that draft is said of those alone.
    """
    return {
        **({DRAFTS_IN: True} if drafts else {}),
        "kind": type(spec).__name__,
        RETENTION: retention,
        **{
            each.name: value
            for each in fields(spec)
            if isinstance(value := getattr(spec, each.name), bool | int | str | None)
            and "page_size" not in each.name
            and not isinstance(value, Enum)
        },
    }


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
        kv_kind=FULL_ATTENTION,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        asynchronous=bool(getattr(vllm_config.scheduler_config, "async_scheduling", False)),
        captured_sizes=captured_sizes(vllm_config),
        scheduler=_plain_options(vllm_config.scheduler_config),
        captures_mixed=_captures_mixed(vllm_config),
        model_sets_graphs=str(model.architecture) in SETTING_GRAPHS,
        drafts=drafts_of(vllm_config.speculative_config, version),
    )


def drafts_of(config: Any, version: str) -> Drafts | None:
    """Return how an engine drafts, None where it does not, or where their number varies."""
    if config is None or _varies(config):
        return None
    slots = int(getattr(config, "max_num_new_slots_for_drafting", 0))
    method, tokens = str(config.method), int(config.num_speculative_tokens)
    return Drafts(method, tokens, slots, fills_in=_fills_in(config, version))


def _fills_in(config: Any, version: str) -> bool:
    """Whether what drafts reads one token more than it drafts, in a version of vLLM.

    Source: vllm/config/vllm.py, VllmConfig.num_lookahead_tokens; before 0.28
        vllm/v1/core/sched/scheduler.py.
    """
    if config.method == "dspark" and is_since(version, 32):
        model = config.draft_model_config.hf_config
        return not getattr(model, "sample_from_anchor", True)
    return bool(config.method == "dflash" and is_since(version, 23))


def _varies(config: Any) -> str:
    """Return why how much is drafted is not the same in every step, in words, if it is not."""
    if config is None:
        return ""
    method = getattr(config, "method", None)
    named = f"speculative decoding by {method}"
    has_modules = getattr(config, "use_multi_module_mtp", None)
    reasons = (
        (f"{named}, which drafts by what the text is", method in _VARYING),
        (
            f"{named} of as many tokens as fit the batch",
            _has(config, "num_speculative_tokens_per_batch_size"),
        ),
        (f"{named} that keeps its last block", _has(config, "disable_eagle_block_drop")),
        (
            f"{named} with disable-lookahead-block-hashes",
            _has(config, "disable_lookahead_block_hashes"),
        ),
        # Several modules read further ahead, and no part of a prompt ends near its end.
        (f"{named} by several modules", has_modules is not None and has_modules()),
    )
    return next((words for words, holds in reasons if holds), "")


def _has(config: Any, name: str) -> bool:
    return bool(getattr(config, name, None))


def recorded_shape(config: Mapping[str, Any], device: str, version: str) -> EngineShape:
    """Return the shape of a server from the configuration that its recorder kept.

    An API server holds no list of KV-cache groups: the shape has one of full attention, which
    `compat.scheduler.with_layers` replaces where `recorded_layers` has others.

    Raises: ShadowError naming what the shadow cannot stand in for; AttributeError, LookupError,
        TypeError or ValueError for what no recorder wrote.
    """
    model, (chosen, usual) = config["model_config"], config["scheduler_classes"]
    drafting = config["speculative_config"]
    known = SimpleNamespace(
        speculative_config=None if drafting is None else _recorded_drafting(drafting),
        model_config=SimpleNamespace(**model, get_vocab_size=lambda: model["vocab_size"]),
        **{name: SimpleNamespace(**config[name]) for name in _RECORDED},
        # Whether there is one is all that is kept of these.
        **{name: config[name] or None for name in _EXTENSIONS},
    )
    notes = _unsupported(known, "" if chosen == usual else chosen)
    # Recorded requests may have had an adapter, and max-loras made them wait.
    notes += ["LoRA"] if known.lora_config is not None else []
    notes += _unusual_layers(model)
    if notes:
        raise ShadowError(_cannot_stand_in(notes), "tune a spare machine with --method live")
    return _shape(known, int(known.cache_config.block_size), device, version)


def _recorded_drafting(kept: Mapping[str, Any]) -> SimpleNamespace:
    """Return what vLLM's own configuration says, where methods are asked."""
    has_modules = bool(kept["use_multi_module_mtp"])
    model = SimpleNamespace(sample_from_anchor=bool(kept["sample_from_anchor"]))
    asked = {
        "use_multi_module_mtp": lambda: has_modules,
        "draft_model_config": SimpleNamespace(hf_config=model),
    }
    return SimpleNamespace(**{**kept, **asked})


_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers by their names in Transformers' configurations."""

_STATES: Final = {"linear_attention": ("Qwen3Next", "Qwen3_5"), "conv": ("Lfm2",)}
"""Those that keep a state, and the models of which it is known that they leave no two."""

_SIZES: Final = ("Gemma4",)
"""Models of whose layers nothing but heads and their size decides how much they keep."""


def recorded_layers(config: Mapping[str, Any]) -> tuple[KvGroup, ...]:
    """Return how each layer keeps keys and values, as a group of it alone.

    Of a model whose layers are all alike, one layer. Those that read another layer's keys and
    values keep none of their own. Where heads differ each has its number and size of them. Last
    comes the layer that drafts, of a model that brings one for it.
    """
    model, cache = config["model_config"], config["cache_config"]
    size, window = int(cache["block_size"]), int(model["sliding_window"] or 0)
    full: KvGroup = {"kind": "FullAttentionSpec", "block_size": size}
    back = {**full, "kind": "SlidingWindowSpec", "sliding_window": window} if window else full
    kinds = list(model["layers"] or [_SLIDING])
    own = kinds[: len(kinds) - int(model["kv_shared_layers"])]
    by_kind: dict[str, KvGroup] = {_FULL: full, _SLIDING: back}
    if not by_kind.keys() >= {*own}:
        state = _recorded_state(config)
        by_kind |= dict.fromkeys(_STATES, state)
    drafting = config["speculative_config"]
    if drafting is not None and drafting["method"] == MTP:
        own.append(_FULL)
    heads = model["kv_heads"] or [()] * len(own)
    sizes = [dict(zip(("num_kv_heads", "head_size"), each, strict=False)) for each in heads]
    return tuple({**by_kind[kind], **size} for kind, size in zip(own, sizes, strict=False))


def _recorded_state(config: Mapping[str, Any]) -> KvGroup:
    """Return how a layer keeps its state, in a block for all tokens where nobody shares it.

    Source: vllm/model_executor/layers/mamba/abstract.py, MambaBase.get_kv_cache_spec;
        vllm/model_executor/models/config.py, MambaModelConfig.
    """
    cache, drafting = config["cache_config"], config["speculative_config"]
    is_shared = cache["mamba_cache_mode"] != "none"
    size = cache["block_size"] if is_shared else config["model_config"]["max_model_len"]
    has_own = drafting is not None and not cache["use_replayssm"]
    return {
        "kind": STATE,
        "block_size": int(size),
        "mamba_cache_mode": str(cache["mamba_cache_mode"]),
        "num_speculative_blocks": int(drafting["num_speculative_tokens"]) if has_own else 0,
    }


def _unusual_layers(model: Mapping[str, Any]) -> list[str]:
    """Return what keeps keys and values in a way that no configuration tells, in words."""
    kinds, architecture = {*model["layers"]}, str(model["architecture"])
    tells_sizes = architecture.startswith(_SIZES) and bool(model["kv_heads"])
    known = {kind for kind, names in _STATES.items() if architecture.startswith(names)}
    others = kinds - {_FULL, _SLIDING} - known
    return [
        words
        for words, holds in (
            (f"layers of {', '.join(sorted(others))}", bool(others)),
            ("state-space layers", bool(model["is_hybrid"]) and not kinds & known),
            # vLLM groups those by their bytes.
            ("layers of several sizes", bool(model["has_uneven_layers"]) and not tells_sizes),
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

    Source: vllm/config/compilation.py, CUDAGraphMode.mixed_mode; by name, for a recorder keeps
    no more of it.
    """
    mode = str(getattr(vllm_config.compilation_config, "cudagraph_mode", None))
    return not mode.endswith(("NONE", "FULL_DECODE_ONLY"))


def _plain_options(scheduler_config: Any) -> dict[str, bool | int | float | str | None]:
    return {
        name: value
        for name, value in sorted(vars(scheduler_config).items())
        if name not in _NOT_COPIED
        and not name.startswith("_")
        and (value is None or isinstance(value, bool | int | float | str))
    }


def _cannot_stand_in(notes: Sequence[str]) -> str:
    return f"the shadow cannot stand in for an engine with {' and '.join(notes)}"


def _unsupported(vllm_config: Any, own: str) -> list[str]:
    """Return what makes a scheduler keep blocks or slots in another way, in words."""
    parallel, drafting = vllm_config.parallel_config, _varies(vllm_config.speculative_config)
    cache = vllm_config.cache_config
    unit = getattr(cache, "prefix_match_unit", None)
    return [
        words
        for words, holds in (
            (drafting, bool(drafting)),
            # By which a prefix ends within a block, and a state is copied.
            (f"prefix-match-unit {unit}", unit not in (None, cache.block_size)),
            ("a KV connector", vllm_config.kv_transfer_config is not None),
            (f"a scheduler of its own ({own})", bool(own)),
            ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
            ("data parallelism", parallel.data_parallel_size > 1),
            ("context parallelism", getattr(parallel, "decode_context_parallel_size", 1) > 1),
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

    # One that keeps a window of the answer frees blocks as full attention does not.
    return isinstance(spec, FullAttentionSpec) and not hasattr(spec, "rswa_window")
