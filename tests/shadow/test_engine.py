"""What the shadow engine takes at once comes to the same as what it takes one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from support.shadow_parts import LinearTimer, MaybeShared, Workload, a_shadow, a_shape
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.timeline import Outcome
from tuner.shadow.engine import ShadowEngine
from tuner.shadow.fast_forward import is_foreseeable
from tuner.shadow.pipeline import steps_within
from tuner.traffic.prompts import PromptSource, TokenPrompt
from tuner.traffic.traces import LoadModel


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and an engine and a plan to replay it with.

    `spare_blocks` are those beyond what the largest request needs, and vLLM's own one.
    """

    workload: Workload
    limits: EngineLimits
    spare_blocks: int
    block_size: int
    prefix_caching: bool
    plan: ReplayPlan
    per_context_token_s: float = 0.0
    asynchronous: bool = False

    def engine(self, ceiling: EngineLimits | None = None, *, fast: bool = True) -> ShadowEngine:
        """Return a shadow for it, at the ceiling."""
        trace = self.workload.trace()
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        return a_shadow(
            a_shape(
                block_size=self.block_size,
                prefix_caching=self.prefix_caching,
                asynchronous=self.asynchronous,
            ),
            ceiling or self.limits,
            2 + longest // self.block_size + self.spare_blocks,
            LinearTimer(per_context_token_s=self.per_context_token_s),
            fast=fast,
        )

    def replay(self, engine: ShadowEngine, *, knows_sharing: bool = True) -> ReplayLog:
        """Replay it; the engine keeps a cache in any case unless it knows what is shared."""
        engine.set_limits(self.limits)
        trace = self.workload.trace()
        prompts = PromptSource(trace, 1000) if knows_sharing else MaybeShared(trace, 1000)
        return replay(engine, trace, prompts, self.plan)


CUTS = (CutRule(late_s=0.2, allowed_late=2), CutRule(max_clock_s=0.5))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw traffic that fits or does not, on engines with and without room."""
    workload = Workload(
        seed=draw(st.integers(0, 1 << 16)),
        n=draw(st.integers(1, 30)),
        per_s=draw(st.sampled_from((1.0, 10.0, 40.0, 400.0))),
        longest_prompt=draw(st.sampled_from((1, 20, 120, 300))),
        longest_output=draw(st.sampled_from((1, 8, 60, 150))),
        families=draw(st.sampled_from((0, 1, 3))),
        hash_block=draw(st.sampled_from((8, 16, 40))),
    )
    cap = draw(st.sampled_from((1, 2, 5, 8, 16)))
    budget = draw(st.sampled_from((cap, cap + 1, 2 * cap + 3, 64, 512)))
    closed = draw(st.sampled_from((None, None, 1, 4, 12)))
    return Case(
        workload,
        EngineLimits(cap, max(cap, budget)),
        spare_blocks=draw(st.sampled_from((0, 3, 10, 10_000))),
        block_size=draw(st.sampled_from((4, 16))),
        prefix_caching=draw(st.booleans()),
        plan=ReplayPlan(
            load_model=LoadModel.OPEN if closed is None else LoadModel.CLOSED,
            concurrency=closed,
            timeout_s=draw(st.sampled_from((None, None, 0.03, 0.3))),
            cut=draw(st.sampled_from((CutRule(), CutRule(), *CUTS))),
        ),
        per_context_token_s=draw(st.sampled_from((0.0, 1e-8))),
        asynchronous=draw(st.booleans()),
    )


def assert_same(fast: ReplayLog, plain: ReplayLog, usage_rel: float = 1e-6) -> None:
    """Compare all that comes of a replay.

    The mean usage over like steps counts each step once, whereas one by one counts for as long
    as it takes. Where later steps take longer the two differ by a little, hence usage_rel.
    """
    assert fast.cut_reason == plain.cut_reason
    for column in ("due_s", "sent_s", "first_s", "last_s"):
        found, wanted = getattr(fast.timelines, column), getattr(plain.timelines, column)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=column)
    for column in ("output_tokens", "outcome"):
        found, wanted = getattr(fast.timelines, column), getattr(plain.timelines, column)
        np.testing.assert_array_equal(found, wanted, err_msg=column)
    for total in ("steps", "preempted", "cached_tokens", "prefill_tokens", "max_step_tokens"):
        assert getattr(fast.steps, total) == getattr(plain.steps, total), total
    assert fast.steps.duration_s == pytest.approx(plain.steps.duration_s)
    assert fast.clock_s == pytest.approx(plain.clock_s)
    assert fast.steps.peaks == pytest.approx(plain.steps.peaks, abs=1e-9)
    for name, level in plain.steps.levels.items():
        rel = usage_rel if name == "kv_usage_ratio" else 1e-6
        found = fast.steps.levels[name].mean().value
        assert found == pytest.approx(level.mean().value, rel=rel, abs=1e-9), name
    gaps, plain_gaps = fast.timelines.gap_s, plain.timelines.gap_s
    assert gaps.total_weight == pytest.approx(plain_gaps.total_weight)
    if plain_gaps.total_weight:
        assert gaps.mean().value == pytest.approx(plain_gaps.mean().value, rel=1e-9)


BUSY = Workload(seed=1, n=40, per_s=60.0, longest_prompt=150, longest_output=80)
CROWDED = Case(BUSY, EngineLimits(16, 64), 6, 16, False, ReplayPlan())
CROWDED_AND_CACHED = Case(
    Workload(seed=2, n=40, per_s=60.0, longest_prompt=150, longest_output=80, families=2),
    EngineLimits(8, 8),
    6,
    16,
    True,
    ReplayPlan(timeout_s=0.4),
)


@pytest.mark.engine
@seed(0)
@settings(max_examples=80, deadline=None, database=None)
@given(cases())
@example(CROWDED)
@example(replace(CROWDED, asynchronous=True))
@example(replace(CROWDED, asynchronous=True, spare_blocks=10_000))
@example(replace(CROWDED, prefix_caching=True))
@example(CROWDED_AND_CACHED)
@example(replace(CROWDED_AND_CACHED, asynchronous=True))
def test_what_is_saved_makes_no_difference(case: Case) -> None:
    """Neither like steps taken at once nor a cache that nobody would hit."""
    usage_rel = 1e-3 if case.per_context_token_s else 1e-6
    fast = case.replay(case.engine())
    plain = case.replay(case.engine(fast=False), knows_sharing=False)
    assert_same(fast, plain, usage_rel)


@pytest.mark.engine
@pytest.mark.parametrize("spare_blocks", [10_000, 6], ids=["room", "preemption"])
def test_a_cache_is_kept_only_where_something_could_be_found_in_it(spare_blocks: int) -> None:
    case = replace(CROWDED, prefix_caching=True, spare_blocks=spare_blocks)
    engine = case.engine()
    log = case.replay(engine)
    assert (log.steps.preempted > 0) == (spare_blocks == 6)
    # A preempted request finds what it had computed itself, so the replay begins anew.
    assert engine._open.core.caches == (spare_blocks == 6)
    assert_same(log, case.replay(case.engine(), knows_sharing=False))
    assert_same(log, case.replay(engine))


# vLLM's finish_requests ends several in the order of a set of strings, so each ends by itself.
ENDING_TOGETHER = Case(
    Workload(29, 29, 400.0, longest_prompt=300, longest_output=8, families=3),
    EngineLimits(16, 64),
    spare_blocks=10,
    block_size=4,
    prefix_caching=True,
    plan=ReplayPlan(),
)
# In a mixed turn the hidden ones end first, because they come first in vLLM's list.
ENDING_BESIDE = replace(
    ENDING_TOGETHER,
    workload=Workload(24393, 20, 400.0, 60, 8, families=3, hash_block=8),
    limits=EngineLimits(16, 256),
    spare_blocks=20,
    block_size=8,
)


@pytest.mark.engine
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", [ENDING_TOGETHER, ENDING_BESIDE], ids=["set", "mixed"])
def test_which_prefixes_are_kept_does_not_depend_on_taking_like_steps_at_once(
    case: Case, *, asynchronous: bool
) -> None:
    case = replace(case, asynchronous=asynchronous)
    assert_same(case.replay(case.engine()), case.replay(case.engine(fast=False)))


@pytest.mark.engine
def test_requests_that_end_together_give_back_their_blocks_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, rows = a_shadow(a_shape(), EngineLimits(16, 512))._open.core, list(range(12))
    for row in rows:
        core.add(row, TokenPrompt([11 + row] * 20), 30, float(row))
    scheduled = core.schedule()
    core.update(scheduled, core.sampled(scheduled))
    freed: list[int] = []
    monkeypatch.setattr(core._manager, "free", lambda one: freed.append(int(one.request_id)))
    core.end(rows)
    assert freed == rows


@pytest.mark.engine
def test_the_cases_given_do_preempt_hit_the_cache_and_lose_clients() -> None:
    crowded = CROWDED.replay(CROWDED.engine())
    cached = CROWDED_AND_CACHED.replay(CROWDED_AND_CACHED.engine())
    assert crowded.steps.preempted > 5
    assert cached.steps.preempted > 2
    assert cached.steps.cached_tokens > 16
    assert cached.timelines.count(Outcome.TIMED_OUT) > 1
    assert cached.timelines.count(Outcome.COMPLETED) > 1


@pytest.mark.engine
@pytest.mark.parametrize("case", [CROWDED, CROWDED_AND_CACHED], ids=["crowded", "cached"])
def test_a_shadow_that_was_broken_off_before_is_as_good_as_new(case: Case) -> None:
    engine = case.engine(EngineLimits(32, 512))
    broken_off = replace(
        case, limits=EngineLimits(32, 512), plan=ReplayPlan(cut=CutRule(max_clock_s=0.2))
    )
    assert broken_off.replay(engine).cut_reason is not None
    assert_same(case.replay(engine), case.replay(case.engine()))


@pytest.mark.engine
@pytest.mark.parametrize("may_share", [False, True])
@pytest.mark.parametrize(("asynchronous", "share"), [(False, 0.5), (True, 0.75)])
def test_a_fast_shadow_spares_many_turns_where_there_is_room(
    asynchronous: bool, share: float, *, may_share: bool
) -> None:
    case = Case(BUSY, EngineLimits(16, 512), 10_000, 16, True, ReplayPlan(keep_steps=True))
    case = replace(case, asynchronous=asynchronous)
    log = case.replay(case.engine(), knows_sharing=not may_share)
    assert log.kept_steps is not None
    assert len(log.kept_steps) < share * log.steps.steps


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy", "priority"),
        ("long_prefill_token_threshold", 16),
        ("watermark", 0.01),
        ("prefill_schedule_interval", 2),
    ],
)
@pytest.mark.engine
def test_a_scheduler_that_may_do_otherwise_is_asked_about_every_step(
    option: str, value: str | float
) -> None:
    shape = a_shape(scheduler={option: value})
    assert not is_foreseeable(shape)
    engine = a_shadow(shape, EngineLimits(4, 64))
    engine.add(0, TokenPrompt([11] * 20), 30)
    steps = []
    while engine.has_work():
        steps.append(engine.step(math.inf))
    assert all(step.run is None for step in steps)
    assert sum(step.batch is not None for step in steps) >= 30


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"policy": "fcfs", "long_prefill_token_threshold": 0, "watermark": 0.0},
        {"policy": None, "prefill_schedule_interval": 1, "enable_chunked_prefill": True},
    ],
)
def test_a_scheduler_that_serves_in_order_is_foreseeable(
    scheduler: Mapping[str, bool | int | float | str | None],
) -> None:
    assert is_foreseeable(a_shape(scheduler=scheduler))


# Sums of a power of two are exact, so a step that ends just at the horizon does so in the
# formula as in the loop.
TICK_S = 1 / 4096


@given(st.integers(-5, 4000), st.integers(1, 300), st.integers(0, 40))
def test_as_many_steps_are_taken_as_begin_before_the_horizon(
    horizon: int, first: int, growth: int
) -> None:
    steps, begins = 1, first
    while begins < horizon:
        steps, begins = steps + 1, begins + first + steps * growth
    found = steps_within(horizon * TICK_S, first * TICK_S, growth * TICK_S)
    assert found == steps


@given(st.floats(1e-6, 100.0), st.floats(1e-3, 0.5), st.just(0.0) | st.floats(1e-12, 1e-3))
def test_the_steps_within_any_horizon_end_around_it(
    horizon_s: float, first_s: float, growth_s: float
) -> None:
    steps = steps_within(horizon_s, first_s, growth_s)
    spans_s = first_s + growth_s * np.arange(steps)
    assert steps == 1 or spans_s[:-1].sum() < horizon_s * (1 + 1e-9)
    assert spans_s.sum() >= horizon_s * (1 - 1e-9)


def test_a_growth_next_to_nothing_is_as_none() -> None:
    assert steps_within(1.0, 0.3, 1e-200) == steps_within(1.0, 0.3, 0.0)


def test_without_a_horizon_no_end_is_near() -> None:
    assert steps_within(math.inf, 0.01, 1e-9) > 1_000_000_000
