"""Sliding windows: what lies behind them is given back, and found again, as vLLM does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.same_replay import (
    assert_same_result,
    compare_many,
    referenced_case,
    simulated_case,
)
from support.schedule_cases import Case
from support.shadow_parts import a_shape, simulated
from support.traffic import a_trace
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import RETENTION, EngineShape, KvGroup
from tuner.errors import EngineError
from tuner.replay.plan import ReplayPlan
from tuner.shadow.simulated import SimulatedEngine, unknown_options
from tuner.shadow.step_model import StepModel
from tuner.traffic.prefixes import HashIds

STEPS = StepModel.linear(1.0, 0.5, 0.25)
FULL: KvGroup = {"kind": "FullAttentionSpec", "block_size": 4}
WINDOW: KvGroup = {"kind": "SlidingWindowSpec", "block_size": 4, "sliding_window": 8}


def with_groups(*groups: KvGroup, **more: Any) -> EngineShape:
    kinds = " and ".join(str(group["kind"]) for group in groups)
    return replace(a_shape(**more), block_size=4, kv_kind=kinds, kv_groups=groups)


@pytest.mark.parametrize(
    ("asynchronous", "with_all", "windows_alone"),
    [(False, 12 + 3, 2 * 4), (True, 10 + 6, 2 * 6)],
)
def test_what_lies_behind_a_window_is_given_back(
    *, asynchronous: bool, with_all: int, windows_alone: int
) -> None:
    """Twelve blocks of 47 tokens; of the last eight of them three, more while prompts come.

    In pieces of eight: then four, and two more that a batch on its way may read.
    """
    peaks = []
    for groups in ((FULL,), (WINDOW, FULL), (WINDOW, WINDOW)):
        shape = with_groups(*groups, asynchronous=asynchronous)
        trace = a_trace([0.0], [40], 8)
        log = simulated(trace, EngineLimits(1, 8), STEPS, shape=shape, num_blocks=101)
        peaks.append(round(100 * log.steps.peaks["kv_usage_ratio"]))
    assert peaks == [12, with_all, windows_alone]


@pytest.mark.parametrize(
    ("of_window", "of_all", "most", "hit"),
    [(4, 4, 12 + 3, 56), (4, 8, 6 + 3, 56), (8, 4, 12 + 2, 56), (12, 8, 6 + 2, 48)],
)
def test_blocks_of_some_layers_hold_more_tokens(
    of_window: int, of_all: int, most: int, hit: int
) -> None:
    """What is found again ends where blocks of all layers end."""
    groups = ({**WINDOW, "block_size": of_window}, {**FULL, "block_size": of_all})
    shape = with_groups(*groups, asynchronous=False, prefix_caching=True)
    log = simulated(
        a_trace([0.0], [40], 8), EngineLimits(1, 8), STEPS, shape=shape, num_blocks=101
    )
    assert round(100 * log.steps.peaks["kv_usage_ratio"]) == most
    same = HashIds.from_rows([list(range(15))] * 2, 4)
    trace = replace(a_trace([0.0, 1e4], [60, 60], 1), hashes=same)
    log = simulated(trace, EngineLimits(1, 8), STEPS, shape=shape, num_blocks=101)
    assert log.steps.cached_tokens == hit


@pytest.mark.parametrize(
    ("groups", "is_known"),
    [
        ((WINDOW, FULL), True),
        ((WINDOW, {**WINDOW, "sliding_window": 16}), False),
        ((WINDOW, {**FULL, "block_size": 8}), True),
        (({**WINDOW, "block_size": 8}, {**FULL, "block_size": 12}), True),
        # None of a size that all have in common, or more than one of a kind.
        (({**WINDOW, "block_size": 8}, {**FULL, "block_size": 8}), False),
        ((WINDOW, {**FULL, "block_size": 6}), False),
        ((WINDOW, FULL, {**FULL, "block_size": 8}), False),
        ((WINDOW, {**WINDOW, "block_size": 8}, FULL), False),
        ((WINDOW, {"kind": "MambaSpec", "block_size": 4}), False),
        (({"kind": "ChunkedLocalAttentionSpec", "block_size": 4},), False),
        (({**WINDOW, "extra_retained_tokens": 2}, FULL), False),
        # What vLLM would not start with, or nobody can read.
        (({"kind": "SlidingWindowSpec", "block_size": 4}, FULL), False),
        (({**WINDOW, "sliding_window": "x"}, FULL), False),
        (({**WINDOW, "sliding_window": True}, FULL), False),
        ((WINDOW, {**WINDOW, "sliding_window": None}), False),
        (({**WINDOW, RETENTION: 6}, {**FULL, RETENTION: 6}), False),
        (({**WINDOW, RETENTION: -4}, {**FULL, RETENTION: -4}), False),
        (({**WINDOW, RETENTION: 8}, FULL), False),
        (({**WINDOW, RETENTION: 8}, {**FULL, RETENTION: 8}), True),
        (({**WINDOW, RETENTION: 12}, {**FULL, RETENTION: 12, "block_size": 8}), False),
        # Without the hybrid manager: a window that nothing is given back behind.
        (({**FULL, "sliding_window": 8}, FULL), True),
    ],
)
def test_groups_that_hold_blocks_otherwise_are_vllms_matter(
    groups: tuple[KvGroup, ...], *, is_known: bool
) -> None:
    unknown = unknown_options(with_groups(*groups))
    assert not unknown if is_known else "a KV cache of" in unknown[0]


def test_a_request_that_no_window_makes_small_enough_is_refused() -> None:
    trace, shape = a_trace([0.0], [40], 8), with_groups(WINDOW, FULL)
    # All of it, and a window with the eight tokens of a step.
    with pytest.raises(EngineError, match="takes 17 blocks of 4 tokens, there are 16"):
        simulated(trace, EngineLimits(1, 8), STEPS, shape=shape, num_blocks=17)
    assert shape.held_blocks(np.array([47, 4])).tolist() == [12 + 3, 1 + 1]
    # Preempted for its own next piece, it would begin anew for ever.
    long = a_trace([0.0], [1000], 3)
    with pytest.raises(EngineError, match="request 0 is larger than the KV cache"):
        simulated(long, EngineLimits(1, 512), STEPS, shape=shape, num_blocks=300)


@pytest.mark.engine
def test_requests_that_are_left_out_for_hundreds_of_steps_are_counted_once() -> None:
    """A long prompt has all of the budget while those who decode behind it wait."""
    options = {"long_prefill_token_threshold": 8, "long_prefill_token_threshold_adaptive": True}
    shape = with_groups(WINDOW, FULL, asynchronous=True, scheduler=options)
    shape = replace(shape, prefix_caching=False, max_model_len=30_000)
    prompts = [20_000, 4, 4, *[2] * 5, *[4] * 35]
    trace = a_trace([0.0] * 43, prompts, [2, 2000, 2000, *[40] * 5, *[2] * 35])
    engine = SimulatedEngine(shape, 100_000, STEPS, EngineLimits(64, 2048))
    case = Case(engine, trace, EngineLimits(8, 64), ReplayPlan(keep_steps=True))
    assert_same_result(simulated_case(case), referenced_case(case))


@pytest.mark.engine
def test_random_replays_of_layers_that_look_back_a_window_are_vllms_too() -> None:
    compare_many(range(230, 290), has_windows=True)
