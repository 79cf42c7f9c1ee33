"""The shadow engine's short cuts change nothing, and its schedules are those of a live vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
from shadow_parts import LinearTimer, a_shadow, a_shape

from tuner.demo import demo_engine_args
from tuner.engine.compat.shape import _refuse_unsupported
from tuner.engine.live import LiveEngine, LiveSource
from tuner.engine.protocol import Batch, Engine, EngineLimits
from tuner.engine.shadow import _is_foreseeable, _steps_within
from tuner.engine.shape import EngineShape
from tuner.errors import ShadowError
from tuner.hashes import HashIds
from tuner.prompts import PromptSource, TokenPrompt
from tuner.replay import ReplayLog, replay
from tuner.replay_plan import ReplayPlan
from tuner.timeline import Outcome
from tuner.traces import LoadModel, Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Random traffic: n requests at a rate, with lengths uniform from 1 up to the longest.

    With `families` each prompt begins with some blocks of one of so many recorded prompts.
    """

    seed: int
    n: int
    per_s: float
    longest_prompt: int
    longest_output: int
    families: int = 0
    hash_block: int = 16

    def trace(self) -> Trace:
        """Return the trace, the same every time."""
        rng = np.random.default_rng(self.seed)
        prompts = rng.integers(1, self.longest_prompt + 1, self.n)
        outputs = rng.integers(1, self.longest_output + 1, self.n)
        due_s = np.cumsum(rng.exponential(1 / self.per_s, self.n))
        hashes = self._hashes(rng, prompts.tolist()) if self.families else None
        return Trace(due_s, prompts, outputs, hashes, source="random")

    def _hashes(self, rng: np.random.Generator, prompts: list[int]) -> HashIds:
        """Chain ids as stores do that round down: shared up to a point, then new ones."""
        fresh = count(1_000_000)
        rows = []
        for tokens in prompts:
            blocks = tokens // self.hash_block
            family = int(rng.integers(self.families))
            shared = int(rng.integers(blocks + 1))
            rows.append(
                [1000 * family + i if i < shared else next(fresh) for i in range(blocks)]
            )
        return HashIds.from_rows(rows, self.hash_block)


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

    def replay(self, *, fast: bool) -> ReplayLog:
        """Replay it on a shadow."""
        trace = self.workload.trace()
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        engine = a_shadow(
            a_shape(block_size=self.block_size, prefix_caching=self.prefix_caching),
            self.limits,
            2 + longest // self.block_size + self.spare_blocks,
            fast=fast,
        )
        return replay(engine, trace, PromptSource(trace, 1000), self.plan)


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
        ),
    )


def assert_same(fast: ReplayLog, plain: ReplayLog) -> None:
    """Compare all that comes of a replay."""
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
        found = fast.steps.levels[name].mean().value
        assert found == pytest.approx(level.mean().value, rel=1e-6, abs=1e-9), name
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
@settings(max_examples=40, deadline=None, database=None)
@given(cases())
@example(CROWDED)
@example(CROWDED_AND_CACHED)
def test_taking_like_steps_at_once_comes_to_the_same_as_one_by_one(case: Case) -> None:
    assert_same(case.replay(fast=True), case.replay(fast=False))


@pytest.mark.engine
def test_the_cases_given_do_preempt_hit_the_cache_and_lose_clients() -> None:
    crowded, cached = CROWDED.replay(fast=True), CROWDED_AND_CACHED.replay(fast=True)
    assert crowded.steps.preempted > 5
    assert cached.steps.preempted > 5
    assert cached.steps.cached_tokens > 16
    assert cached.timelines.count(Outcome.TIMED_OUT) > 1
    assert cached.timelines.count(Outcome.COMPLETED) > 1


@pytest.mark.engine
def test_a_fast_shadow_spares_most_turns_where_there_is_room() -> None:
    case = Case(BUSY, EngineLimits(16, 512), 10_000, 16, True, ReplayPlan(keep_steps=True))
    log = case.replay(fast=True)
    assert log.kept_steps is not None
    assert len(log.kept_steps) < 0.5 * log.steps.steps


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What vLLM's scheduler decided in one turn, requests in its order."""

    tokens: tuple[tuple[str, int], ...]
    preempted: frozenset[str]
    admitted: tuple[tuple[str, int], ...]
    finished: frozenset[str]


def record(scheduler: Any) -> list[Scheduled]:
    """Let a scheduler's decisions be noted from now on."""
    seen: list[Scheduled] = []
    schedule = scheduler.schedule

    def noting(*args: object, **kwargs: object) -> Any:
        out = schedule(*args, **kwargs)
        seen.append(
            Scheduled(
                tuple(out.num_scheduled_tokens.items()),
                frozenset(out.preempted_req_ids or ()),
                tuple((new.req_id, new.num_computed_tokens) for new in out.scheduled_new_reqs),
                frozenset(out.finished_req_ids),
            )
        )
        return out

    scheduler.schedule = noting
    return seen


@dataclass(slots=True)
class RecordedTimer:
    """Says of each turn what it took on another engine, one after the other."""

    durations_s: list[float]
    asked: int = field(default=0)

    def _next(self) -> float:
        self.asked += 1
        return self.durations_s[self.asked - 1]

    @property
    def tidy_s(self) -> float:
        """Return what the next turn took."""
        return self._next()

    def step_s(self, batch: Batch) -> float:  # noqa: ARG002 - it was measured, not worked out
        """Return what the next turn took."""
        return self._next()

    def decode_run_s(self, seqs: int, context_tokens: int) -> tuple[float, float]:
        """Refuse: a recording knows single steps."""
        raise NotImplementedError


LIVE_CEILING = EngineLimits(16, 512)
LIVE_LONGEST = 384
# Of the demo model, in float32 or wider: keys and values, 6 layers, 2 heads of 64, 16 tokens.
LIVE_BLOCK_BYTES = 2 * 6 * 2 * 64 * 16 * 2


@pytest.fixture(scope="module")
def live() -> Iterator[LiveEngine]:
    """Start vLLM on the demo model with 32 blocks, and see it closed; takes seconds."""
    values = {
        **demo_engine_args(),
        "max-model-len": LIVE_LONGEST,
        "block-size": 16,
        "kv-cache-memory-bytes": 32 * LIVE_BLOCK_BYTES,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        engine = LiveSource().start(values, LIVE_CEILING)
    yield engine
    engine.close()
