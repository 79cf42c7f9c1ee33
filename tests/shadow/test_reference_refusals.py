"""What vLLM's scheduler without its engine cannot stand in for is refused, and named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.shadow_parts import a_reference, a_shape
from tuner.engine.compat.serve import parse_serve_values, resolve_config
from tuner.engine.compat.shape import _refuse_unsupported, read_shape
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.errors import ShadowError

CEILING = EngineLimits(16, 512)


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["sliding_window", "mamba", ""])
def test_a_kv_cache_of_another_kind_has_no_shadow(kind: str) -> None:
    with pytest.raises(ShadowError, match=f"KV cache of {kind}"):
        a_reference(a_shape(kv_kind=kind), CEILING)


@pytest.mark.engine
def test_a_scheduler_option_that_this_vllm_lacks_is_named() -> None:
    with pytest.raises(ShadowError, match="option no_such_option") as refused:
        a_reference(
            a_shape(scheduler={"policy": "fcfs", "no_such_option": 1}), EngineLimits(16, 512)
        )
    assert "vLLM 0" in str(refused.value.hint)


def full_attention() -> object:
    """Return vLLM's own account of a layer of full attention."""
    from torch import float16
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=float16)


def a_config(**parts: object) -> SimpleNamespace:
    """Return as much of a vLLM configuration as decides whether it has a shadow."""
    parallel = {
        name: parts.pop(name, 1)
        for name in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
        )
    }
    from vllm.config import SchedulerConfig

    plain = dict.fromkeys(("speculative_config", "lora_config", "kv_transfer_config"))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SchedulerConfig.default_factory(),
        **{**plain, **parts},
    )


def groups(*specs: object) -> SimpleNamespace:
    """Return a KV-cache configuration of such groups."""
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    )


@pytest.mark.engine
def test_one_group_of_full_attention_has_a_reference() -> None:
    _refuse_unsupported(a_config(), groups(full_attention()))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"kv_transfer_config": object()}, "a KV connector"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        (
            {"lora_config": object(), "data_parallel_size": 4},
            "LoRA and data parallelism",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_shadow_is_named(parts: dict[str, object], named: str) -> None:
    with pytest.raises(ShadowError, match=f"engine with {named}$") as refused:
        _refuse_unsupported(a_config(**parts), groups(full_attention()))
    assert "--method live" in str(refused.value.hint)


@pytest.mark.engine
def test_a_scheduler_that_is_not_vllms_has_no_shadow() -> None:
    def shape_of(**more: object) -> EngineShape:
        config = resolve_config(parse_serve_values({**demo_engine_args(), **more}))
        return read_shape(config, groups(full_attention()), "CPU", "0.32.0")

    with pytest.raises(ShadowError, match=r"\(support\.own_scheduler\.OwnScheduler\)$"):
        shape_of(**{"scheduler-cls": "support.own_scheduler.OwnScheduler"})
    # Its own may be named as well.
    named = {"scheduler-cls": "vllm.v1.core.sched.scheduler.Scheduler"}
    assert shape_of(**named) == shape_of()


@pytest.mark.engine
def test_kv_caches_that_are_not_one_group_of_full_attention_are_named() -> None:
    from torch import float16
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    full = full_attention()
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=float16, sliding_window=64
    )
    for specs, named in (
        ((full, full), "FullAttentionSpec, FullAttentionSpec"),
        ((full, sliding), "FullAttentionSpec, SlidingWindowSpec"),
        ((sliding,), "SlidingWindowSpec"),
        ((), "none"),
    ):
        with pytest.raises(ShadowError, match=f"KV-cache groups {named}$"):
            _refuse_unsupported(a_config(), groups(*specs))
