"""Parts of shadow engines for tests: a closed-form timer, shapes of no engine, random traffic.

The numbers resemble no device; they are such that no two instants of a replay agree by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch
from tuner.engine.shape import EngineShape
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.reference import ReferenceEngine, StepTimer
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.shadow.step_model import StepModel
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class LinearTimer:
    """A step-time model linear in what the batch holds."""

    base_s: float = 0.003
    per_seq_s: float = 0.0001
    per_prefill_token_s: float = 0.00003
    per_context_token_s: float = 1e-8
    tidy_s: float = 0.0005
    launching_s: float = 0.0

    def step_s(self, batch: Batch) -> float:
        """Return the seconds of one batch."""
        seqs_s = self.per_seq_s * batch.decode_seqs
        context_s = self.per_context_token_s * batch.decode_context_tokens
        return (
            self.base_s + seqs_s + context_s + self.per_prefill_token_s * batch.prefill_tokens
        )

    def launch_s(self, batch: Batch) -> float:
        """Return the seconds of an asynchronous host."""
        _ = batch
        return self.launching_s


def a_shape(
    *,
    block_size: int = 16,
    prefix_caching: bool = True,
    asynchronous: bool = False,
    kv_kind: str = "full_attention",
    scheduler: Mapping[str, bool | int | float | str | None] | None = None,
    max_model_len: int = 4096,
) -> EngineShape:
    """Return the shape of an engine that there is not."""
    return EngineShape(
        model="none",
        device="none",
        dtype="bfloat16",
        vllm_version="0",
        parallelism={"tensor_parallel_size": 1},
        vocab_size=1000,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_kind=kv_kind,
        prefix_caching=prefix_caching,
        asynchronous=asynchronous,
        captured_sizes=(),
        scheduler=scheduler or {},
    )


def a_reference(
    shape: EngineShape,
    ceiling: EngineLimits,
    num_blocks: int = 1000,
    timer: StepTimer | None = None,
    accepted: Sequence[float] = (),
) -> ReferenceEngine:
    """Return vLLM's scheduler for the shape; needs vLLM, but neither model nor device."""
    serve.prepare_environment()
    return ReferenceEngine(shape, ceiling, num_blocks, timer or LinearTimer(), accepted)


def simulated(
    trace: Trace,
    limits: EngineLimits,
    model: StepModel,
    plan: ReplayPlan | None = None,
    *,
    shape: EngineShape | None = None,
    num_blocks: int = 1000,
) -> ReplayLog:
    """Replay a trace on a simulated engine that was started at the limits."""
    plan = plan or ReplayPlan()
    engine = SimulatedEngine(shape or a_shape(), num_blocks, model, limits)
    return simulate(engine, PreparedTrace(trace, plan), limits, plan)


@dataclass(frozen=True, slots=True)
class RandomTraffic:
    """n requests at a rate, with lengths uniform from 1 up to the longest.

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
