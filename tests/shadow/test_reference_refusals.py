"""What vLLM's scheduler without its engine cannot stand in for is refused, and named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from support.shadow_parts import a_reference, a_shape
from tuner.engine.compat.scheduler import _spec
from tuner.engine.compat.serve import parse_serve_values, resolve_config
from tuner.engine.compat.shape import read_shape
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.errors import ShadowError
from tuner.shadow.simulated import unknown_options

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


def full_attention() -> Any:
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
        cache_config=SimpleNamespace(block_size=16),
        **{**plain, **parts},
    )


def groups(*specs: object) -> SimpleNamespace:
    """Return a KV-cache configuration of such groups."""
    return SimpleNamespace(
        num_blocks=100,
        kv_cache_tensors=[SimpleNamespace(size=100 * 4096)],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
    )


NGRAMS = SimpleNamespace(method="ngram")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"speculative_config": NGRAMS}, "speculative decoding by ngram, which .* is"),
        ({"kv_transfer_config": object()}, "a KV connector"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        (
            {"speculative_config": NGRAMS, "data_parallel_size": 4},
            "speculative decoding by ngram, .* and data parallelism",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_shadow_is_named(parts: dict[str, object], named: str) -> None:
    with pytest.raises(ShadowError, match=f"engine with {named}$") as refused:
        read_shape(a_config(**parts), groups(full_attention()), "CPU", "0.32.0")
    assert "--method live" in str(refused.value.hint)


@pytest.mark.engine
def test_adapters_that_no_request_has_change_no_schedule() -> None:
    """Source: vllm/v1/core/sched/scheduler.py, which asks each request for its adapter."""

    def shape_of(**more: object) -> EngineShape:
        config = resolve_config(parse_serve_values({**demo_engine_args(), **more}))
        return read_shape(config, groups(full_attention()), "CPU", "0.32.0")

    assert shape_of(**{"enable-lora": True}) == shape_of()


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
def test_an_engine_without_a_kv_cache_has_no_shadow() -> None:
    with pytest.raises(ShadowError, match=r"engine with no KV cache$"):
        read_shape(a_config(), groups(), "CPU", "0.32.0")


@pytest.mark.engine
def test_a_kv_group_that_this_vllm_does_not_know_is_named() -> None:
    shape = replace(a_shape(kv_kind="FutureSpec"), kv_groups=({"kind": "FutureSpec"},))
    with pytest.raises(ShadowError, match="knows no KV cache of FutureSpec"):
        a_reference(shape, CEILING)


@pytest.mark.engine
def test_groups_of_several_kinds_are_read_and_made_again() -> None:
    """As of Gemma or gpt-oss, and of Qwen-Next; a device's bytes are not among it."""
    from torch import bfloat16, float32
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    sliding = SlidingWindowSpec(
        block_size=32, num_kv_heads=8, head_size=128, dtype=bfloat16, sliding_window=1024
    )
    linear = MambaSpec(
        block_size=544, shapes=((32, 128, 128), (3, 8192)), dtypes=(bfloat16, float32)
    )
    config = resolve_config(parse_serve_values(demo_engine_args()))
    for specs in ((full_attention(), sliding), (full_attention(), linear), (sliding,)):
        shape = read_shape(config, groups(*specs), "CPU", "0.32.0")
        assert [group["kind"] for group in shape.kv_groups] == [
            type(spec).__name__ for spec in specs
        ]
        assert unknown_options(shape)
        made = [_spec(group) for group in shape.kv_groups]
        assert [one.block_size for one in made] == [spec.block_size for spec in specs]
        windows = [getattr(one, "sliding_window", None) for one in made]
        assert windows == [getattr(spec, "sliding_window", None) for spec in specs]
