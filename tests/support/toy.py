"""A toy engine with closed-form answers, so that what the tool finds can be known beforehand.

It batches continuously like vLLM, first come first served, with a cap, a token budget, chunked
prefill, blocks, preemption and a prefix cache, and takes as long as a formula says. It is no
model of any real engine: nothing measured on it says anything about one.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.engine.guards import GuardedEngine
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import (
    Batch,
    Emitted,
    EngineFacts,
    EngineInfo,
    Prompt,
    Step,
    spread_tokens,
)
from tuner.engine.shape import EngineShape
from tuner.errors import Caveat, EngineError, ShadowError, UsageError

LAST_WORDS = "ToyMemoryError: the toy died of its limits"
EXIT_CODE = 7
CURRENT = EngineLimits(16, 2048)


@dataclass(frozen=True, slots=True)
class ToyCosts:
    """What a step takes, in closed form.

    `crowd_s` is paid for the square of the sequences beyond `knee`, so that too high a cap
    hurts; `flood_s` for each prefill token beyond `flood_tokens`, so that too high a budget
    does.
    """

    base_s: float = 0.010
    per_seq_s: float = 0.0005
    per_prefill_token_s: float = 0.0001
    knee: int = 1_000_000
    crowd_s: float = 0.0
    flood_tokens: int = 1_000_000
    flood_s: float = 0.0

    def seconds(self, decodes: int, prefill_tokens: int) -> float:
        """Return what a step of such a batch takes without noise."""
        crowd, flood = max(0, decodes - self.knee), max(0, prefill_tokens - self.flood_tokens)
        return (
            self.base_s
            + self.per_seq_s * decodes
            + self.per_prefill_token_s * prefill_tokens
            + self.crowd_s * crowd * crowd
            + self.flood_s * flood
        )

    def scaled(self, times: float) -> ToyCosts:
        """Return the costs of a machine that takes so many times as long."""
        return replace(
            self,
            base_s=self.base_s * times,
            per_seq_s=self.per_seq_s * times,
            per_prefill_token_s=self.per_prefill_token_s * times,
            crowd_s=self.crowd_s * times,
            flood_s=self.flood_s * times,
        )


@dataclass(frozen=True, slots=True)
class ToySource:
    """Starts toys; pickles, so that it can travel to the engine's process.

    `noise_ratio` is the sigma of the logarithm of a step's noise. Above `no_memory_above`
    sequences a step raises EngineError, above `dies_above` and at the caps `dies_at` it takes
    the process with it.
    """

    costs: ToyCosts = ToyCosts()
    noise_ratio: float = 0.0
    seed: int = 0
    max_model_len: int = 4096
    vocab_size: int = 1000
    block_size: int = 16
    num_blocks: int = 1_000_000
    current: EngineLimits = CURRENT
    no_memory_above: int = 1_000_000
    dies_above: int = 1_000_000
    dies_at: tuple[int, ...] = ()
    hides_limits: bool = False
    has_shadow: bool = True
    caveats: frozenset[Caveat] = frozenset()

    def prepare(self) -> None:
        """Import nothing."""

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration; the key `toy-refuses` is refused, to see that this is told.

        Raises: UsageError for that key.
        """
        if "toy-refuses" in values:
            raise UsageError("the toy refuses the key toy-refuses", "leave it out")
        return EngineFacts(self.current, self.max_model_len, True, "0.0", "toy", self.caveats)

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> ToyEngine:
        """Start a toy at the ceiling."""
        self.facts(values)
        return ToyEngine(self, ceiling)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request inside the toy; `computed` counts tokens whose attention is done."""

    row: int
    prompt_tokens: int
    output_tokens: int
    block_hashes: list[bytes]
    computed: int = 0
    answered: int = 0
    blocks: int = 0
    was_admitted: bool = False

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one comes out."""
        return self.prompt_tokens + self.answered - self.computed


@dataclass(slots=True)
class _Plan:
    """What one step is going to compute."""

    chunks: list[tuple[_Sequence, int]] = field(default_factory=list)
    budget: int = 0
    preempted: int = 0
    cached_tokens: int = 0

    def take(self, seq: _Sequence, tokens: int) -> None:
        self.chunks.append((seq, tokens))
        self.budget -= tokens


class ToyEngine(GuardedEngine):
    """The Engine protocol over a formula instead of a model."""

    def __init__(self, source: ToySource, ceiling: EngineLimits) -> None:
        self._source = source
        self._limits = ceiling
        self._rng = np.random.default_rng(source.seed)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._used_blocks = 0
        self._cache: set[bytes] = set()
        self._is_closed = False
        self._info = EngineInfo(
            kind="toy",
            device="toy",
            dtype="float32",
            vllm_version="0.0",
            vocab_size=source.vocab_size,
            max_model_len=source.max_model_len,
            block_size=source.block_size,
            num_blocks=source.num_blocks,
            ceiling=ceiling,
            can_change_limits=not source.hides_limits,
            asynchronous=False,
        )

    def shape(self) -> EngineShape:
        """Return what a shadow has to know: the toy schedules as vLLM does."""
        source = self._source
        if not source.has_shadow:
            raise ShadowError("the shadow cannot stand in for a toy that is told so")
        return EngineShape(
            model="toy",
            device="toy",
            dtype="float32",
            vllm_version="0.0",
            parallelism={"tensor_parallel_size": 1},
            vocab_size=source.vocab_size,
            max_model_len=source.max_model_len,
            block_size=source.block_size,
            kv_kind="full_attention",
            prefix_caching=True,
            asynchronous=False,
            captured_sizes=(),
            scheduler={"enable_chunked_prefill": True},
        )

    def _take(self, limits: EngineLimits) -> None:
        if not self._info.can_change_limits:
            raise EngineError(f"this toy hides its limits and takes no {limits}")

    def _forget(self) -> None:
        self._cache.clear()

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request."""
        keys = prompt.block_keys(self._source.block_size)
        self._waiting.append(_Sequence(row, len(prompt), output_tokens, keys))

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests; unknown rows are ignored."""
        gone = set(rows)
        for seq in self._running:
            if seq.row in gone:
                self._free(seq)
        self._running = [seq for seq in self._running if seq.row not in gone]
        self._waiting = deque(seq for seq in self._waiting if seq.row not in gone)

    def has_work(self) -> bool:
        """Whether anything is queued or running. Raises: EngineError once closed."""
        if self._is_closed:
            raise EngineError("the toy is closed")
        return bool(self._running or self._waiting)

    def close(self) -> None:
        """Be gone."""
        self._is_closed = True

    def _turn(self) -> Step:
        """Schedule one batch and say what it took by the formula."""
        self._fail_if_told()
        plan = _Plan(budget=self._limits.max_num_batched_tokens)
        self._go_on(plan)
        if not plan.preempted:
            self._admit(plan)
        if not plan.chunks:
            raise EngineError("a request is larger than all the toy's blocks")
        batch = _batch_of(plan)
        duration_s = self._source.costs.seconds(batch.decode_seqs, batch.prefill_tokens)
        if self._source.noise_ratio:
            duration_s *= math.exp(self._source.noise_ratio * self._rng.standard_normal())
        running, waiting = len(self._running), len(self._waiting)
        usage = self._used_blocks / self._source.num_blocks
        return Step(duration_s, self._compute(plan), batch, running, waiting, usage)

    def _fail_if_told(self) -> None:
        cap = self._limits.max_num_seqs
        if cap > self._source.dies_above or cap in self._source.dies_at:
            os.write(2, f"INFO toy: all is well\n{LAST_WORDS}\n".encode())
            os._exit(EXIT_CODE)
        if cap > self._source.no_memory_above:
            raise EngineError(f"the toy has no memory for {cap} sequences")

    def _go_on(self, plan: _Plan) -> None:
        """Give what runs its next tokens; the last to come is the first to be preempted."""
        at = 0
        while at < len(self._running) and plan.budget > 0:
            seq = self._running[at]
            tokens = min(seq.missing, plan.budget)
            while at < len(self._running) and not self._reserve(seq, tokens):
                victim = self._running.pop()
                self._free(victim)
                victim.computed = 0
                self._waiting.appendleft(victim)
                plan.preempted += 1
            if at < len(self._running):
                plan.take(seq, tokens)
            at += 1

    def _admit(self, plan: _Plan) -> None:
        """Let in who waits, in order, while cap, budget and blocks allow."""
        cap = self._limits.max_num_seqs
        while self._waiting and len(self._running) < cap and plan.budget > 0:
            seq = self._waiting[0]
            cached = 0 if seq.was_admitted else self._cached_tokens(seq)
            seq.computed = cached
            tokens = min(seq.missing, plan.budget)
            if not self._reserve(seq, tokens):
                return
            seq.was_admitted = True
            plan.cached_tokens += cached
            self._running.append(self._waiting.popleft())
            plan.take(seq, tokens)

    def _cached_tokens(self, seq: _Sequence) -> int:
        """Return the leading tokens found in the cache; the last one is always computed."""
        size, hits = self._source.block_size, 0
        for known in seq.block_hashes[: (seq.prompt_tokens - 1) // size]:
            if known not in self._cache:
                break
            hits += 1
        return hits * size

    def _reserve(self, seq: _Sequence, tokens: int) -> bool:
        more = -(-(seq.computed + tokens) // self._source.block_size) - seq.blocks
        if self._used_blocks + more > self._source.num_blocks:
            return False
        seq.blocks += more
        self._used_blocks += more
        return True

    def _free(self, seq: _Sequence) -> None:
        self._used_blocks -= seq.blocks
        seq.blocks = 0

    def _compute(self, plan: _Plan) -> list[Emitted]:
        """Let the batch pass and say which tokens came out."""
        emitted = []
        for seq, tokens in plan.chunks:
            seq.computed += tokens
            if seq.missing:
                continue
            self._cache.update(seq.block_hashes)
            seq.answered += 1
            is_last = seq.answered == seq.output_tokens
            emitted.append(Emitted(seq.row, 1, is_last))
            if is_last:
                self._free(seq)
                self._running.remove(seq)
        return emitted


def _batch_of(plan: _Plan) -> Batch:
    """Put a plan into the protocol's words, with its contexts before the step."""
    decodes = [s for s, n in plan.chunks if s.answered and n == s.missing == 1]
    contexts = [seq.computed + 1 for seq in decodes]
    prefills = [(s, n) for s, n in plan.chunks if not (s.answered and n == s.missing == 1)]
    return Batch(
        decode_seqs=len(decodes),
        prefill_tokens=sum(tokens for _, tokens in prefills),
        prefill_seqs=len(prefills),
        decode_context_tokens=sum(contexts),
        prefill_context_tokens=sum(n * s.computed + n * (n + 1) // 2 for s, n in prefills),
        preempted=plan.preempted,
        cached_tokens=plan.cached_tokens,
        decode_spread_tokens=spread_tokens(contexts),
    )
