"""The reference schedules, step for step, what a live vLLM scheduled that took as long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from support.live_parts import GEMMA, GEMMA_4, LFM, start_live
from support.shadow_parts import RandomTraffic, a_reference
from tuner.engine.compat.scheduler import with_layers
from tuner.engine.compat.shape import recorded_layers, recorded_shape
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveEngine
from tuner.engine.protocol import Batch, Engine
from tuner.engine.shape import RETENTION
from tuner.replay.arrivals import Sessions
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.plan import ReplayPlan
from tuner.shadow.simulated import unknown_options
from tuner.traffic.prefixes import HashIds
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace, Turns


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What vLLM's scheduler decided in one turn, requests in its order."""

    tokens: tuple[tuple[str, int], ...]
    preempted: frozenset[str]
    admitted: tuple[tuple[str, int], ...]
    finished: frozenset[str]


class _Scheduler(Protocol):
    """What is watched of vLLM's scheduler."""

    schedule: Callable[..., Any]


def record(scheduler: _Scheduler, patch: pytest.MonkeyPatch) -> list[Scheduled]:
    """Let a scheduler's decisions be noted for as long as the patch lasts."""
    seen: list[Scheduled] = []
    schedule = scheduler.schedule

    def noting(*args: object, **kwargs: object) -> object:
        out = schedule(*args, **kwargs)
        scheduled, new = out.num_scheduled_tokens.items(), out.scheduled_new_reqs
        seen.append(
            Scheduled(
                tuple((_row(name), tokens) for name, tokens in scheduled),
                frozenset(map(_row, out.preempted_req_ids or ())),
                tuple((_row(each.req_id), each.num_computed_tokens) for each in new),
                frozenset(map(_row, out.finished_req_ids)),
            )
        )
        return out

    patch.setattr(scheduler, "schedule", noting)
    return seen


def _row(request_id: str) -> str:
    """Return a request's row; live ones have a number of their own behind it."""
    return request_id.partition(".")[0]


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

    def launch_s(self, batch: Batch) -> float:  # noqa: ARG002 - the turns hold it
        """Return nothing: what turns took holds it."""
        return 0.0


pytestmark = [pytest.mark.engine, pytest.mark.model]

LIVE_CEILING = EngineLimits(16, 512)
LIVE_BLOCKS = 24
# The block size that vLLM's attention takes on a CPU as on a GPU, in tokens.
LIVE_BLOCK_TOKENS = 32
# Keys and values of 6 layers with 2 heads of 64 in bfloat16: the demo model's.
LIVE_BLOCK_BYTES = LIVE_BLOCK_TOKENS * 6 * 2 * 2 * 64 * 2


@pytest.fixture(scope="module")
def live() -> Iterator[LiveEngine]:
    """Start vLLM on the demo model with few blocks, and see it closed; takes seconds."""
    values = {
        **demo_engine_args(),
        "max-model-len": 384,
        "block-size": LIVE_BLOCK_TOKENS,
        "kv-cache-memory-bytes": LIVE_BLOCKS * LIVE_BLOCK_BYTES,
    }
    engine = start_live(values, LIVE_CEILING)
    yield engine
    engine.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((GEMMA, 1, 60, 384), id="blocks of a size"),
        pytest.param((GEMMA_4, 2, 28, 256), id="blocks of two sizes", marks=pytest.mark.slow),
    ],
)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    """Start vLLM on a model with KV-cache groups of two kinds and few blocks."""
    config, span, blocks, longest = request.param
    folder = tmp_path_factory.mktemp("gemma")
    more = {"max-model-len": longest, "block-size": LIVE_BLOCK_TOKENS}
    for engine in _started(config, folder, num_blocks=blocks, **more):
        layout = engine.shape().kv_layout
        assert layout is not None
        assert (layout.full_span, layout.back_span) == (1, span)
        assert engine.info.block_size == LIVE_BLOCK_TOKENS
        yield engine


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="shared states"),
        pytest.param(False, id="own states", marks=pytest.mark.slow),
    ],
)
def recurrent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    """Start vLLM on a model with state-space layers, with a prefix cache and without."""
    more = {"max-model-len": 1024, "enable-prefix-caching": request.param}
    yield from _started(LFM, tmp_path_factory.mktemp("lfm"), num_blocks=22, **more)


def _started(
    config: Mapping[str, object], folder: Path, num_blocks: int, **more: object
) -> Iterator[LiveEngine]:
    """Start vLLM on random weights, and see it closed."""
    (folder / "config.json").write_text(json.dumps(config))
    values = {
        **demo_engine_args(),
        "model": str(folder),
        "load-format": "dummy",
        "skip-tokenizer-init": True,
        "num-gpu-blocks-override": num_blocks,
        **more,
    }
    engine = start_live(values, LIVE_CEILING)
    yield engine
    engine.close()


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a workload is there to bring about, and must."""

    preempts: bool
    hits: bool


NONE = Pressure(preempts=False, hits=False)
PREEMPTS = Pressure(preempts=True, hits=False)
BOTH = Pressure(preempts=True, hits=True)

ROOMY = RandomTraffic(seed=3, n=12, per_s=20.0, longest_prompt=40, longest_output=12)
# All due within ten milliseconds, so that how fast the machine is changes little.
PRESSED = RandomTraffic(seed=4, n=16, per_s=2000.0, longest_prompt=150, longest_output=60)
CHATTY = replace(PRESSED, longest_prompt=30, longest_output=120)
SHARED = replace(PRESSED, seed=5, families=2, hash_block=LIVE_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Chats:
    """Sessions of three turns, each of which begins with the turn before and its answer.

    With `is_hashed` the trace has ids of blocks of 32 tokens, else lengths alone.
    """

    sessions: int
    per_s: float
    is_hashed: bool

    def trace(self) -> Trace:
        """Return the trace; every turn comes 10 ms after the answer before it."""
        prompts, outputs = [50, 110, 190], [30, 45, 20]
        order = np.argsort(np.tile([0.0, 1.0, 2.0], self.sessions), kind="stable")
        session, turn = np.divmod(order, 3)
        rows = np.arange(order.size)
        after = np.where(turn > 0, rows - self.sessions, -1)
        ids = [
            [1000 * s + block for block in range(prompts[t] // 32)]
            for s, t in zip(session.tolist(), turn.tolist(), strict=True)
        ]
        return Trace(
            due_s=turn + session / self.per_s,
            prompt_tokens=np.array(prompts)[turn],
            output_tokens=np.array(outputs)[turn],
            hashes=HashIds.from_rows(ids, 32) if self.is_hashed else None,
            turns=Turns(after, np.where(turn > 0, 0.01, 0.0)),
        )


HITS = Pressure(preempts=False, hits=True)


EVERY_MODEL = [
    pytest.param(ROOMY, EngineLimits(4, 64), NONE, id="room"),
    pytest.param(PRESSED, EngineLimits(16, 128), PREEMPTS, id="pressure"),
    pytest.param(SHARED, LIVE_CEILING, BOTH, id="shared prefixes"),
]


@pytest.mark.parametrize(
    ("workload", "limits", "wanted"),
    [
        *EVERY_MODEL,
        pytest.param(CHATTY, EngineLimits(16, 16), PREEMPTS, id="small budget"),
        pytest.param(Chats(2, 50.0, True), LIVE_CEILING, HITS, id="chats"),
        pytest.param(Chats(2, 50.0, False), LIVE_CEILING, HITS, id="chats without ids"),
        pytest.param(Chats(8, 2000.0, True), EngineLimits(16, 128), BOTH, id="many chats"),
    ],
)
def test_every_step_schedules_what_a_live_engine_did(
    live: LiveEngine, workload: RandomTraffic | Chats, limits: EngineLimits, wanted: Pressure
) -> None:
    schedules_alike(live, workload, limits, wanted)


@pytest.mark.parametrize(("workload", "limits", "wanted"), EVERY_MODEL)
def test_every_step_of_a_model_with_windows_is_scheduled_alike_too(
    hybrid: LiveEngine, workload: RandomTraffic | Chats, limits: EngineLimits, wanted: Pressure
) -> None:
    kinds = [group["kind"] for group in hybrid.shape().kv_groups]
    assert set(kinds) == {"SlidingWindowSpec", "FullAttentionSpec"}
    schedules_alike(hybrid, workload, limits, wanted)


SAME_STATES = RandomTraffic(5, 24, 2000.0, 600, 200, families=2, hash_block=128)


@pytest.mark.parametrize(
    ("workload", "limits"),
    [
        pytest.param(ROOMY, EngineLimits(4, 64), id="room"),
        pytest.param(SAME_STATES, LIVE_CEILING, id="shared prefixes"),
        # No part of a prompt is as long as a block.
        pytest.param(
            SAME_STATES, EngineLimits(16, 100), id="small budget", marks=pytest.mark.slow
        ),
    ],
)
def test_every_step_of_a_model_with_states_is_scheduled_alike_too(
    recurrent: LiveEngine, workload: RandomTraffic, limits: EngineLimits
) -> None:
    shape, presses = recurrent.shape(), workload is SAME_STATES
    assert {group["kind"] for group in shape.kv_groups} == {"MambaSpec", "FullAttentionSpec"}
    assert not unknown_options(shape)
    schedules_alike(
        recurrent, workload, limits, Pressure(presses, hits=presses and shape.prefix_caching)
    )


def test_groups_of_a_recorded_server_are_those_of_the_engine(hybrid: LiveEngine) -> None:
    """An API server holds no list of them, but which layers look back a window."""
    assert_same_groups(hybrid)


def test_a_recorded_servers_states_are_those_of_the_engine(recurrent: LiveEngine) -> None:
    assert_same_groups(recurrent)


def assert_same_groups(live: LiveEngine) -> None:
    from tuner.recorder.plugin import described_server

    core = live._running_core
    config = described_server(core._core.vllm_config, "0")["config"]
    there = json.loads(json.dumps(config))
    kept = there["cache_config"].get(RETENTION)
    made = with_layers(recorded_shape(there, "toy", "0"), recorded_layers(there), kept)
    found = live.shape()
    assert (made.kv_layout, made.block_size) == (found.kv_layout, found.block_size)
    assert sorted(made.kv_kind.split()) == sorted(found.kv_kind.split())


def schedules_alike(
    live: LiveEngine, workload: RandomTraffic | Chats, limits: EngineLimits, wanted: Pressure
) -> None:
    trace = workload.trace()
    prompts = PromptSource(trace, live.info.vocab_size)
    live.set_limits(limits)
    measured, live_turns = recorded(live, live._running_core._scheduler, trace, prompts)
    assert measured.kept_steps is not None
    timer = RecordedTimer(measured.kept_steps.duration_s.tolist())
    # What a window keeps goes by the token budget of the start.
    reference = a_reference(live.shape(), live.info.ceiling, live.info.num_blocks, timer)
    reference.set_limits(limits)
    predicted, turns = recorded(reference, reference._open.scheduler, trace, prompts)

    for at, (turn, live_turn) in enumerate(zip(turns, live_turns, strict=False)):
        assert turn == live_turn, f"turn {at}"
    assert len(turns) == len(live_turns) == timer.asked
    np.testing.assert_allclose(predicted.timelines.last_s, measured.timelines.last_s, 0, 1e-6)
    assert predicted.steps.prefill_tokens == measured.steps.prefill_tokens
    assert predicted.steps.peaks == pytest.approx(measured.steps.peaks)
    assert (measured.steps.preempted > 2) == wanted.preempts
    assert any(computed for turn in live_turns for _, computed in turn.admitted) == wanted.hits


@pytest.mark.parametrize("is_hashed", [True, False])
def test_a_next_turn_finds_the_answer_that_was_generated_in_the_cache(
    live: LiveEngine, *, is_hashed: bool
) -> None:
    trace = Chats(1, 1.0, is_hashed).trace()
    prompts = PromptSource(trace, live.info.vocab_size)
    live.set_limits(LIVE_CEILING)
    measured = replay(live, trace, prompts, ReplayPlan())
    # Of 50 + 30 and of 110 + 45 tokens the whole blocks of 32; the prompts alone have 1 and 3.
    assert measured.steps.cached_tokens == 64 + 128
    recorded_s = replace(ReplayPlan(), sessions=Sessions.RECORDED)
    apart = replay(live, trace, prompts, recorded_s)
    assert apart.steps.cached_tokens == (32 + 96 if is_hashed else 0)


def recorded(
    engine: Engine, scheduler: _Scheduler, trace: Trace, prompts: PromptSource
) -> tuple[ReplayLog, list[Scheduled]]:
    """Replay a trace and return all that the scheduler decided meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        seen = record(scheduler, patch)
        return replay(engine, trace, prompts, ReplayPlan(keep_steps=True)), seen


def test_the_simulator_knows_every_option_of_an_engine_as_most_run_it(live: LiveEngine) -> None:
    assert unknown_options(live.shape()) == []
