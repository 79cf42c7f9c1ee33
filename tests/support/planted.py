"""An engine on a machine whose truth is known: what the tool decides can be held to it.

It schedules as vLLM does, step for step, without a prefix cache; what a step takes is what its
machine says in the mood of the moment. Where its host launches ahead it schedules as vLLM's
asynchronous scheduler does, and the end of a batch may be noticed late. It may draft tokens,
which are accepted at rates by draws of its own. Time passes on a clock that the engine alone
moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from support.planted_machine import Machine, Mood, MoodSizes, StepFormula
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
from tuner.engine.shape import Drafts, EngineShape, Graphs
from tuner.engine.steps import NO_WAIT_S
from tuner.errors import EngineError

VLLM_VERSION: Final = "0.20.2"
VOCAB_SIZE: Final = 1000

BLOCK_BYTES: Final = 1 << 20
# Activations at a start are more than what smaller budgets leave to the KV cache: ours; some
# 128 kB a token of a 7B, of which a budget gave back 100 on an H200 (results/gpu_h200).
ACTIVATION_TIMES: Final = 1.25
NONE_TOLD: Final = 0.0
"""Activations of an engine whose workers tell none, as a CPU's."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds that pass only where somebody lets them pass."""

    now_s: float = 0.0

    def read(self) -> float:
        """Return the time, as `time.monotonic` and `time.perf_counter` do."""
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@dataclass(frozen=True, slots=True, eq=False)
class PlantedSource:
    """Starts engines on a machine; all of them share its clock and its mood.

    Without a mood every step takes `times`, of its fixed and of its growing part, what the
    formula says: the truth at the mean of a mood. `num_blocks` is the KV cache of an engine
    whose token budget takes no memory, and a start's activations are told to be
    `activation_times` what it takes. With `asynchronous` the host launches ahead, and unless it
    `says_late` nobody knows which batches it noticed late. Where drafts are `accepted` at rates
    each decode verifies one for each of them.
    """

    formula: StepFormula
    current: EngineLimits
    num_blocks: int
    mood: Mood | None = None
    times: tuple[float, float] = (1.0, 1.0)
    clock: VirtualClock = field(default_factory=VirtualClock)
    start_s: float = 45.0
    blocks_per_token: float = 0.0
    activation_times: float = ACTIVATION_TIMES
    max_model_len: int = 32768
    block_size: int = 16
    asynchronous: bool = False
    says_late: bool = True
    accepted: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        machine: Machine,
        current: EngineLimits,
        num_blocks: int,
        sizes: MoodSizes,
        seed: int | None,
    ) -> Self:
        """Return a machine in a mood, or without a seed at the mean of it: the truth."""
        return cls(
            formula=machine,
            current=current,
            num_blocks=num_blocks,
            mood=None if seed is None else Mood(sizes, seed),
            times=sizes.mean_ratios() if seed is None else (1.0, 1.0),
            start_s=machine.start_s,
            blocks_per_token=machine.blocks_per_token,
            asynchronous=machine.host is not None,
        )

    def prepare(self) -> None:
        """Import nothing."""

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Return what is known before a start: the current limits stand in the source."""
        _ = values
        return EngineFacts(self.current, self.max_model_len, True, VLLM_VERSION, "planted")

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> PlantedEngine:
        """Start an engine, which takes its time."""
        self.facts(values)
        speed = 1.0 if self.mood is None else self.mood.of_a_start()
        self.clock.pass_s(self.start_s * speed)
        return PlantedEngine(self, ceiling, speed)

    @property
    def token_bytes(self) -> int:
        """Activations of a token of the budget, as a start tells them."""
        return int(self.activation_times * self.blocks_per_token * BLOCK_BYTES)

    def blocks_at(self, ceiling: EngineLimits) -> int:
        """Return the KV blocks that are left beside the buffers for the token budget."""
        return self.num_blocks - int(self.blocks_per_token * ceiling.max_num_batched_tokens)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request inside the engine; `computed` counts tokens that were scheduled.

    Of its answer `answered` tokens are out and `ahead` on their way; `preempted` counts how
    often it was, for what was on its way then still comes out.
    """

    row: int
    prompt_tokens: int
    output_tokens: int
    out: Emitted
    computed: int = 0
    answered: int = 0
    ahead: int = 0
    blocks: int = 0
    preempted: int = 0
    is_gone: bool = False
    drafted: int = 0
    rounds: int = 0

    @property
    def scheduled(self) -> int:
        """Tokens of the answer that are out or on their way."""
        return self.answered + self.ahead

    @property
    def missing(self) -> int:
        """Tokens to schedule before the next one comes out."""
        return self.prompt_tokens + self.answered + self.ahead - self.computed


@dataclass(slots=True)
class _Plan:
    """What one step is going to compute."""

    budget: int
    chunks: list[tuple[_Sequence, int]] = field(default_factory=list)
    preempted: int = 0

    def take(self, seq: _Sequence, tokens: int) -> None:
        self.chunks.append((seq, tokens))
        self.budget -= tokens


@dataclass(slots=True)
class _Sent:
    """A batch on its way, done at `ends_s`; nothing is computed where `batch` is None.

    `answers` are the sequences that a token comes out of, each with how often it had been
    preempted; None where it is every one of a stretch.
    """

    batch: Batch | None
    answers: list[tuple[_Sequence, int]] | None
    running: int
    waiting: int
    usage: float
    launch_s: float
    ends_s: float


@dataclass(slots=True)
class _Stretch:
    """Steps in which the same sequences decode and none ends, of which some were taken.

    `blocks_at` tells how many sequences begin a block in each step, which repeats; `total`
    and `longest` are of the next step's contexts, `spread` of all steps' alike.
    """

    emitted: list[Emitted]
    left: int
    blocks_at: list[int]
    total: int
    spread: float
    longest: int
    taken: int = 0


class PlantedEngine(GuardedEngine):
    """The Engine protocol over a formula: first come first served, chunked prefill, preemption.

    Source: vllm/v1/core/sched/scheduler.py, Scheduler.schedule, and async_scheduler.py;
        vllm/v1/engine/core.py, EngineCore.step_with_batch_queue; held to the simulator.
    """

    def __init__(self, source: PlantedSource, ceiling: EngineLimits, speed: float) -> None:
        self._source, self._limits, self._speed = source, ceiling, speed
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        # One block is never given to a request.
        self._blocks = source.blocks_at(ceiling) - 1
        self._free = self._blocks
        self._stretch: _Stretch | None = None
        self._sent: deque[_Sent] = deque()
        self._queue = 2 if source.asynchronous else 1
        self._idle_from_s = 0.0
        self._has_to_tidy = False
        self._info = EngineInfo(
            kind="planted",
            device="planted",
            dtype="bfloat16",
            vllm_version=VLLM_VERSION,
            vocab_size=VOCAB_SIZE,
            max_model_len=source.max_model_len,
            block_size=source.block_size,
            num_blocks=source.blocks_at(ceiling),
            ceiling=ceiling,
            can_change_limits=True,
            asynchronous=source.asynchronous,
            draft_tokens=len(source.accepted),
        )
        self._shape = self._made_shape()

    def shape(self) -> EngineShape:
        """Return what a shadow has to know."""
        return self._shape

    @property
    def _graphs(self) -> Graphs:
        return self._shape.graphs

    def _made_shape(self) -> EngineShape:
        info, graphs = self._info, self._source.formula.graphs
        shape = EngineShape(
            model="planted",
            device=info.device,
            dtype=info.dtype,
            vllm_version=info.vllm_version,
            parallelism={"tensor_parallel_size": 1},
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            kv_kind="full_attention",
            prefix_caching=False,
            asynchronous=info.asynchronous,
            captured_sizes=(),
            scheduler={"policy": "fcfs", "enable_chunked_prefill": True},
            block_bytes=BLOCK_BYTES,
            token_bytes=self._source.token_bytes,
            drafts=Drafts("eagle", info.draft_tokens) if info.draft_tokens else None,
        )
        graphs = graphs or Graphs(shape.chosen_sizes(info.ceiling))
        return replace(shape, captured_sizes=graphs.sizes, captures_mixed=graphs.has_mixed)

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request."""
        if len(self._running) < self._limits.max_num_seqs:
            self._end_stretch()
        self._waiting.append(
            _Sequence(row, len(prompt), output_tokens, Emitted(row, 1, is_last=False))
        )

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests; unknown rows are ignored."""
        self._end_stretch()
        gone = set(rows)
        for seq in (*self._running, *self._waiting):
            if seq.row in gone:
                self._end(seq)
        self._forget_ended()

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return bool(self._sent) or self._has_requests()

    def _has_requests(self) -> bool:
        return bool(self._running or self._waiting or self._has_to_tidy)

    def close(self) -> None:
        """Let go of every request."""
        self._running.clear()
        self._waiting.clear()
        self._sent.clear()

    def _turn(self) -> Step:
        """Launch a batch, and let the time pass until the one whose turn it is is noticed.

        The device computes one batch after the other, none before its launch has ended.
        """
        clock = self._source.clock
        began_s, has_launched = clock.now_s, self._has_requests()
        if has_launched:
            sent = self._launched()
            self._sent.append(sent)
            clock.pass_s(sent.launch_s)
            goes_on = sent.batch is not None or self._has_requests()
            if len(self._sent) < self._queue and goes_on:
                is_late = self._source.says_late
                return Step(sent.launch_s, (), None, 0, 0, 0.0, is_late=is_late)
        done = self._sent.popleft()
        waited_s = done.ends_s - clock.now_s
        if waited_s > 0:
            clock.pass_s(waited_s)
        is_late = bool(self._sent) and has_launched and waited_s < NO_WAIT_S
        return Step(
            clock.now_s - began_s,
            self._answered(done),
            *(done.batch, done.running, done.waiting, done.usage, done.launch_s),
            is_late=is_late and self._source.says_late,
        )

    def _launched(self) -> _Sent:
        """Schedule a batch, or nothing where everything is on its way or to be tidied up."""
        if self._stretch is None:
            self._begin_stretch()
        if self._stretch is not None and (sent := self._next_of(self._stretch)) is not None:
            return sent
        self._has_to_tidy = False
        plan = _Plan(budget=self._limits.max_num_batched_tokens)
        self._go_on(plan)
        if not plan.preempted:
            self._admit(plan)
        if not plan.chunks:
            if self._waiting and not (self._sent or self._running):
                raise EngineError("a request is larger than the KV cache")
            return self._timed(None, 0, [])
        batch, longest = _batch_of(plan, self._info.draft_tokens)
        answers = []
        for seq, tokens in plan.chunks:
            seq.computed += tokens
            if seq.missing <= 0:
                seq.drafted, seq.ahead = -seq.missing, seq.ahead + 1
                answers.append((seq, seq.preempted))
        return self._timed(batch, longest, answers)

    def _timed(
        self, batch: Batch | None, longest: int, answers: list[tuple[_Sequence, int]] | None
    ) -> _Sent:
        """Return a batch with what launching it takes from now on, and when it is done."""
        source, now_s = self._source, self._source.clock.now_s
        launch_s, took_s = self._takes_s(batch, longest)
        done_s = max(self._idle_from_s, now_s) + took_s
        if source.asynchronous:
            done_s = max(done_s, now_s + launch_s)
        self._idle_from_s = done_s
        return _Sent(
            *(batch, answers, len(self._running), len(self._waiting)),
            usage=1 - self._free / self._blocks,
            launch_s=launch_s,
            ends_s=done_s,
        )

    def _takes_s(self, batch: Batch | None, longest: int) -> tuple[float, float]:
        """Return what a batch takes now, of the host to launch it and of the device."""
        source, mood = self._source, self._source.mood
        formula = source.formula
        if batch is None:
            return 0.0, formula.tidy_s
        fixed_s, grows_s = formula.parts_s(batch, longest, self._graphs)
        launch_s = formula.launch_s(batch, self._graphs) if source.asynchronous else 0.0
        if mood is None:
            fixed, grows = source.times
            return fixed * launch_s, fixed * fixed_s + grows * grows_s
        fixed, grows = mood.at(source.clock.now_s)
        took_s = (fixed * fixed_s + grows * grows_s) * self._speed * mood.of_a_step()
        return fixed * launch_s * self._speed, took_s

    def _go_on(self, plan: _Plan) -> None:
        """Give what runs its next tokens; the last to come is the first to be preempted."""
        at = 0
        while at < len(self._running) and plan.budget > 0:
            seq = self._running[at]
            if seq.ahead and seq.scheduled >= seq.output_tokens:
                at += 1
                continue
            tokens = min(seq.missing + self._drafts_of(seq), plan.budget)
            while at < len(self._running) and not self._reserve(seq, tokens):
                victim = self._running.pop()
                self._give_back(victim)
                victim.computed = victim.ahead = 0
                victim.preempted += 1
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
            tokens = min(seq.missing, plan.budget)
            if not self._reserve(seq, tokens):
                return
            self._running.append(self._waiting.popleft())
            plan.take(seq, tokens)

    def _drafts_of(self, seq: _Sequence) -> int:
        """Return how many drafts of a request are verified beside its next token."""
        if seq.missing != 1 or not seq.answered:
            return 0
        return min(self._info.draft_tokens, self._info.max_model_len - 2 - seq.computed)

    def _reserve(self, seq: _Sequence, tokens: int) -> bool:
        # A head that drafts writes as far ahead as it drafts.
        last = min(seq.computed + tokens + self._info.draft_tokens, self._info.max_model_len)
        more = max(0, -(-last // self._source.block_size) - seq.blocks)
        if more > self._free:
            return False
        seq.blocks += more
        self._free -= more
        return True

    def _give_back(self, seq: _Sequence) -> None:
        self._free += seq.blocks
        seq.blocks = 0

    def _answered(self, done: _Sent) -> Sequence[Emitted]:
        """Say which tokens came out of a batch, and let go of the requests that they end."""
        if done.answers is None:
            assert self._stretch is not None, "what a stretch sent is told apart at its end"
            return self._stretch.emitted
        emitted, has_ended = [], False
        for seq, preempted in done.answers:
            if seq.is_gone:
                continue
            seq.ahead -= seq.preempted == preempted
            tokens = min(1 + self._accepts(seq), seq.output_tokens - seq.answered)
            seq.answered += tokens
            if seq.answered < seq.output_tokens:
                out = seq.out if tokens == 1 else Emitted(seq.row, tokens, is_last=False)
                emitted.append(out)
                continue
            emitted.append(Emitted(seq.row, tokens, is_last=True))
            self._end(seq)
            has_ended = True
        if has_ended:
            self._end_stretch()
            self._forget_ended()
        return emitted

    def _accepts(self, seq: _Sequence) -> int:
        """Return how many drafts a request had accepted, and take back what was computed more.

        At all settings the same, as in traffic whose text is the same.
        """
        if not self._source.accepted:
            return 0
        drafted, seq.drafted, seq.rounds = seq.drafted, 0, seq.rounds + 1
        drawn = _DRAWN[(seq.row * 7919 + seq.rounds * 104_729) % len(_DRAWN)]
        accepted = sum(drawn < rate for rate in self._source.accepted[:drafted])
        seq.computed -= drafted - accepted
        return accepted

    def _end(self, seq: _Sequence) -> None:
        self._give_back(seq)
        seq.is_gone = self._has_to_tidy = True

    def _forget_ended(self) -> None:
        self._running = [seq for seq in self._running if not seq.is_gone]
        if any(seq.is_gone for seq in self._waiting):
            self._waiting = deque(seq for seq in self._waiting if not seq.is_gone)

    # Most steps differ in their contexts alone, and go without a look at each sequence.

    def _begin_stretch(self) -> None:
        """Begin a stretch if nothing but decoding can happen in the next steps."""
        running, size = self._running, self._source.block_size
        if not running or self._may_admit() or self._info.draft_tokens:
            return
        if any(seq.missing != 1 or not seq.scheduled for seq in running):
            return
        # Who launches ahead may send the last tokens out, which end nothing yet.
        left = min(seq.output_tokens - seq.scheduled for seq in running) - (self._queue == 1)
        if left < 1:
            return
        blocks_at = [0] * size
        for seq in running:
            blocks_at[-seq.computed % size] += 1
        contexts = [seq.computed + 1 for seq in running]
        self._stretch = _Stretch(
            emitted=[seq.out for seq in running],
            left=left,
            blocks_at=blocks_at,
            total=sum(contexts),
            spread=spread_tokens(contexts),
            longest=max(contexts),
        )

    def _may_admit(self) -> bool:
        """Whether who waits first could be let in; what is free only falls until one ends."""
        if not self._waiting or len(self._running) >= self._limits.max_num_seqs:
            return False
        seq = self._waiting[0]
        tokens = min(seq.missing, self._limits.max_num_batched_tokens - len(self._running))
        return tokens > 0 and -(-tokens // self._source.block_size) <= self._free

    def _next_of(self, stretch: _Stretch) -> _Sent | None:
        """Return the next step of a stretch; None, and no stretch, where it is over."""
        more = stretch.blocks_at[stretch.taken % self._source.block_size]
        if stretch.taken == stretch.left or more > self._free:
            self._end_stretch()
            return None
        self._free -= more
        seqs, total = len(stretch.emitted), stretch.total
        batch = Batch(seqs, 0, 0, total, 0, 0, 0, stretch.spread)
        sent = self._timed(batch, stretch.longest, None)
        self._has_to_tidy = False
        stretch.taken += 1
        stretch.total += seqs
        stretch.longest += 1
        return sent

    def _end_stretch(self) -> None:
        """Write down what the steps of a stretch came to, and what of them is on its way."""
        stretch, self._stretch = self._stretch, None
        if stretch is None or not stretch.taken:
            return
        size, ahead = self._source.block_size, 0
        for sent in self._sent:
            if sent.answers is None:
                sent.answers = [(seq, seq.preempted) for seq in self._running]
                ahead += 1
        for seq in self._running:
            seq.computed += stretch.taken
            seq.answered += stretch.taken - ahead
            seq.ahead += ahead
            seq.blocks = -(-seq.computed // size)


_DRAWN: Final[list[float]] = np.random.default_rng(11).random(65_537).tolist()


def _batch_of(plan: _Plan, drafts: int) -> tuple[Batch, int]:
    """Put a plan into the protocol's words, and return the longest context of its decodes.

    Source: BatchReader in tuner/engine/compat/core.py.
    """
    prefill = prefill_seqs = pairs = verified = 0
    contexts = []
    for seq, tokens in plan.chunks:
        if seq.scheduled and tokens <= 1 + drafts * (seq.missing == 1):
            contexts.append(seq.computed + tokens)
            verified += tokens - 1
        else:
            prefill += tokens
            prefill_seqs += 1
            pairs += tokens * seq.computed + tokens * (tokens + 1) // 2
    seqs, total = len(contexts), sum(contexts)
    batch = Batch(
        *(seqs, prefill, prefill_seqs, total, pairs, plan.preempted, 0),
        *(spread_tokens(contexts), verified),
    )
    return batch, max(contexts, default=0)
