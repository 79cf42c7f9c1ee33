"""State-space layers: where they leave a state, and who finds it, as vLLM does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.same_replay import compare_many
from support.shadow_parts import a_shape, simulated
from support.traffic import a_trace, kept
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import RETENTION, Drafts, EngineShape, KvGroup
from tuner.errors import EngineError
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.shadow.simulated import unknown_options
from tuner.shadow.step_model import StepModel

STEPS = StepModel.linear(1.0, 0.5, 0.25)
FULL: KvGroup = {"kind": "FullAttentionSpec", "block_size": 4}
SHARED: KvGroup = {
    "kind": "MambaSpec",
    "block_size": 4,
    "mamba_cache_mode": "align",
    "num_speculative_blocks": 0,
    "num_prefill_checkpoint_blocks": 0,
    "tokens_per_state": -1,
}
OWN: KvGroup = {**SHARED, "block_size": 4096, "mamba_cache_mode": "none"}
TWO: KvGroup = {
    **SHARED,
    "num_prefill_checkpoint_blocks": 1,
    "prefill_checkpoint_alignment": 1,
}


def with_groups(*groups: KvGroup, **more: Any) -> EngineShape:
    kinds = " and ".join(str(group["kind"]) for group in groups)
    is_shared = all(group.get("mamba_cache_mode") != "none" for group in groups)
    shape = a_shape(block_size=4, prefix_caching=is_shared, **more)
    return replace(shape, kv_kind=kinds, kv_groups=groups)


def replayed(shape: EngineShape, budget: int, prompt: int, output: int) -> ReplayLog:
    trace, plan = a_trace([0.0], [prompt], output), ReplayPlan(keep_steps=True)
    return simulated(trace, EngineLimits(1, budget), STEPS, plan, shape=shape, num_blocks=101)


@pytest.mark.parametrize(
    ("groups", "asynchronous", "most"),
    [
        ((FULL,), False, 12),
        # Of each state what is there and what comes; one more that is being computed.
        ((FULL, SHARED, SHARED), False, 12 + 2 * 2),
        ((SHARED,), False, 2),
        ((SHARED,), True, 3),
        ((FULL, OWN, OWN), False, 12 + 2),
        ((FULL, {**OWN, "num_speculative_blocks": 3}), True, 12 + 4),
    ],
)
def test_a_request_holds_its_last_states(
    groups: tuple[KvGroup, ...], *, asynchronous: bool, most: int
) -> None:
    """Forty tokens in pieces of eight, and seven more one by one."""
    log = replayed(with_groups(*groups, asynchronous=asynchronous), 8, 40, 8)
    assert round(100 * log.steps.peaks["kv_usage_ratio"]) == most


@pytest.mark.parametrize(
    ("groups", "budget", "parts"),
    [
        ((FULL,), 10, [10, 10, 3]),
        ((FULL, OWN), 10, [10, 10, 3]),
        # Up to the end of a block, and to the last one that leaves a token to compute.
        ((FULL, SHARED), 10, [8, 8, 4, 3]),
        ((FULL, SHARED), 64, [20, 3]),
        # A budget that no block fits goes on within it, up to its end.
        ((FULL, SHARED), 3, [3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3]),
        # What leaves two states has no need to end there.
        ((FULL, TWO), 10, [8, 8, 7]),
        ((FULL, TWO), 64, [23]),
    ],
)
def test_a_part_of_a_prompt_ends_where_a_state_is_found(
    groups: tuple[KvGroup, ...], budget: int, parts: list[int]
) -> None:
    steps = kept(replayed(with_groups(*groups), budget, 23, 1))
    assert steps.prefill_tokens[steps.prefill_tokens > 0].tolist() == parts


@pytest.mark.parametrize(
    ("groups", "is_known"),
    [
        ((SHARED, FULL), True),
        ((OWN, FULL), True),
        ((OWN, {"kind": "SlidingWindowSpec", "block_size": 4, "sliding_window": 8}), True),
        ((TWO, TWO, FULL), True),
        ((TWO, SHARED, FULL), False),
        (({**SHARED, "num_speculative_blocks": 2}, FULL), True),
        (({**TWO, "num_speculative_blocks": 2}, FULL), False),
        (({**SHARED, "mamba_cache_mode": "all"}, FULL), False),
        (({**SHARED, "block_size": 8}, FULL), False),
        (({**TWO, "prefill_checkpoint_alignment": None}, FULL), False),
        (({**SHARED, RETENTION: 8}, {**FULL, RETENTION: 8}), True),
        ((SHARED, {"kind": "SlidingWindowSpec", "block_size": 4, "sliding_window": 8}), False),
    ],
)
def test_states_that_are_kept_otherwise_are_vllms_matter(
    groups: tuple[KvGroup, ...], *, is_known: bool
) -> None:
    unknown = unknown_options(with_groups(*groups))
    assert not unknown if is_known else "a KV cache of" in unknown[0]


@pytest.mark.parametrize(
    ("group", "version", "is_known"),
    [
        (SHARED, "0.29.0", False),
        (SHARED, "0.30.0", True),
        (TWO, "0.31.0", False),
        (TWO, "0.32.0", True),
        (OWN, "0.20.0", True),
    ],
)
def test_releases_that_give_back_states_otherwise_are_asked(
    group: KvGroup, version: str, *, is_known: bool
) -> None:
    shape = replace(with_groups(group, FULL), vllm_version=version)
    assert (not unknown_options(shape)) is is_known


def test_states_that_drafts_may_read_are_vllms_matter() -> None:
    drafts, state = Drafts("mtp", 2), {**SHARED, "num_speculative_blocks": 2}
    shared = replace(with_groups(state, FULL), drafts=drafts, vllm_version="0.32.0")
    assert unknown_options(shared) == [
        "drafts of which vLLM does not say that they read no states"
    ]
    told = with_groups(state, {**FULL, "is_eagle_group": True})
    assert not unknown_options(replace(told, drafts=drafts, vllm_version="0.32.0"))
    # Since then nothing is cut off a hit.
    assert not unknown_options(replace(shared, vllm_version="0.33.0"))
    older = replace(told, drafts=drafts, vllm_version="0.31.0")
    assert "a KV cache of" in unknown_options(older)[0]
    assert not unknown_options(replace(shared, drafts=Drafts("medusa", 2)))
    own = replace(with_groups({**OWN, "num_speculative_blocks": 2}, FULL), drafts=drafts)
    assert not unknown_options(own)


def test_a_request_whose_states_do_not_fit_is_refused() -> None:
    trace, shape = a_trace([0.0], [40], 8), with_groups(SHARED, FULL)
    with pytest.raises(EngineError, match="takes 14 blocks of 4 tokens, there are 13"):
        simulated(trace, EngineLimits(1, 8), STEPS, shape=shape, num_blocks=14)
    assert shape.held_blocks(np.array([47, 4])).tolist() == [12 + 1, 1 + 1]
    own = with_groups(OWN, OWN, FULL)
    assert own.held_blocks(np.array([47, 4])).tolist() == [12 + 2, 1 + 2]


@pytest.mark.engine
def test_random_replays_of_layers_that_keep_states_are_vllms_too() -> None:
    compare_many(range(200, 260), has_states=True)


@pytest.mark.engine
def test_the_stand_in_knows_which_group_drafts_and_how_states_are_kept() -> None:
    """Hits are cut by a block in the first alone, and parts of prompts end by the second."""
    from tuner.engine.compat import serve
    from tuner.engine.compat.scheduler import kv_cache_config, stand_in_config

    serve.prepare_environment()
    shape = with_groups(SHARED, {**FULL, "is_eagle_group": True})
    groups = kv_cache_config(shape, 20).kv_cache_groups
    assert [group.is_eagle_group for group in groups] == [False, True]
    assert stand_in_config(shape, EngineLimits(1, 8)).cache_config.mamba_cache_mode == "align"
