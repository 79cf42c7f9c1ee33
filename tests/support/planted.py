"""An engine on a machine whose truth is known: what the tool decides can be held to it.

It schedules as vLLM does, step for step, without a prefix cache; what a step takes is what its
machine says in the mood of the moment. Time passes on a clock that the engine alone moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from support.planted_machine import Machine, Mood, MoodSizes, StepFormula
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
from tuner.engine.shape import EngineShape, Graphs
from tuner.errors import EngineError

VLLM_VERSION: Final = "0.20.2"
VOCAB_SIZE: Final = 1000


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
    whose token budget takes no memory.
    """

    formula: StepFormula
    current: EngineLimits
    num_blocks: int
    mood: Mood | None = None
    times: tuple[float, float] = (1.0, 1.0)
    clock: VirtualClock = field(default_factory=VirtualClock)
    start_s: float = 45.0
    blocks_per_token: float = 0.0
    max_model_len: int = 32768
    block_size: int = 16

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
        )

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

    def blocks_at(self, ceiling: EngineLimits) -> int:
        """Return the KV blocks that are left beside the buffers for the token budget."""
        return self.num_blocks - int(self.blocks_per_token * ceiling.max_num_batched_tokens)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request inside the engine; `computed` counts tokens whose attention is done."""

    row: int
    prompt_tokens: int
    output_tokens: int
    out: Emitted
    computed: int = 0
    answered: int = 0
    blocks: int = 0

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one comes out."""
        return self.prompt_tokens + self.answered - self.computed


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


class PlantedEngine:
    """The Engine protocol over a formula: first come first served, chunked prefill, preemption.

    Source: vllm/v1/core/sched/scheduler.py, Scheduler.schedule; held to the simulator.
    """

    def __init__(self, source: PlantedSource, ceiling: EngineLimits, speed: float) -> None:
        self._source, self._limits, self._speed = source, ceiling, speed
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        # One block is never given to a request.
        self._blocks = source.blocks_at(ceiling) - 1
        self._free = self._blocks
        self._stretch: _Stretch | None = None
        self._has_to_tidy = False
        self._info = EngineInfo(
            kind="planted",
            model="planted",
            device="planted",
            dtype="bfloat16",
            vllm_version=VLLM_VERSION,
            vocab_size=VOCAB_SIZE,
            max_model_len=source.max_model_len,
            block_size=source.block_size,
            num_blocks=source.blocks_at(ceiling),
            ceiling=ceiling,
            can_change_limits=True,
            asynchronous=False,
        )
        self._shape = self._made_shape()

    @property
    def info(self) -> EngineInfo:
        """What is known of this engine."""
        return self._info

    def shape(self) -> EngineShape:
        """Return what a shadow has to know."""
        return self._shape

    @property
    def _graphs(self) -> Graphs:
        return self._shape.graphs

    def _made_shape(self) -> EngineShape:
        info, graphs = self._info, self._source.formula.graphs
        shape = EngineShape(
            model=info.model,
            device=info.device,
            dtype=info.dtype,
            vllm_version=info.vllm_version,
            parallelism={"tensor_parallel_size": 1},
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            kv_kind="full_attention",
            prefix_caching=False,
            asynchronous=False,
            captured_sizes=(),
            scheduler={"policy": "fcfs", "enable_chunked_prefill": True},
        )
        graphs = graphs or Graphs(shape.chosen_sizes(info.ceiling))
        return replace(shape, captured_sizes=graphs.sizes, captures_mixed=graphs.has_mixed)

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold now."""
        return self._limits

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits. Raises: EngineError while busy or above the ceiling."""
        if self.has_work():
            raise EngineError("limits change only while the engine is idle")
        if not limits.within(self._info.ceiling):
            raise EngineError(f"limits {limits} lie above {self._info.ceiling}")
        self._limits = limits

    def reset(self) -> None:
        """Do nothing, there is no prefix cache. Raises: EngineError while busy."""
        if self.has_work():
            raise EngineError("the cache is cleared only while the engine is idle")

    def prepare(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Nothing: its steps take what the formula says, whatever happens between them."""

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
        known = {seq.row for seq in (*self._running, *self._waiting)}
        self._has_to_tidy |= not gone.isdisjoint(known)
        for seq in self._running:
            if seq.row in gone:
                self._give_back(seq)
        self._running = [seq for seq in self._running if seq.row not in gone]
        self._waiting = deque(seq for seq in self._waiting if seq.row not in gone)

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return bool(self._running or self._waiting or self._has_to_tidy)

    def close(self) -> None:
        """Let go of every request."""
        self._running.clear()
        self._waiting.clear()

    def step(self) -> Step:
        """Schedule one batch, and let the time pass that it takes."""
        if not self.has_work():
            raise EngineError("a step was asked of an engine without work")
        if self._stretch is None:
            self._begin_stretch()
        if self._stretch is not None and (step := self._next_of(self._stretch)) is not None:
            return step
        self._has_to_tidy = False
        if not (self._running or self._waiting):
            return self._tidied()
        plan = _Plan(budget=self._limits.max_num_batched_tokens)
        self._go_on(plan)
        if not plan.preempted:
            self._admit(plan)
        if not plan.chunks:
            raise EngineError("a request is larger than the KV cache")
        batch, longest = _batch_of(plan)
        took_s = self._timed(batch, longest)
        running, waiting = len(self._running), len(self._waiting)
        usage = 1 - self._free / self._blocks
        return Step(took_s, self._compute(plan), batch, running, waiting, usage)

    def _tidied(self) -> Step:
        """Take the turn in which vLLM forgets what has ended, where nothing else is to do."""
        took_s = self._source.formula.tidy_s
        self._source.clock.pass_s(took_s)
        return Step(took_s, (), None, 0, 0, 1 - self._free / self._blocks)

    def _timed(self, batch: Batch, longest: int) -> float:
        """Return how long a batch takes now, and let that time pass."""
        source, mood = self._source, self._source.mood
        fixed_s, grows_s = source.formula.parts_s(batch, longest, self._graphs)
        if mood is None:
            took_s = source.times[0] * fixed_s + source.times[1] * grows_s
        else:
            fixed, grows = mood.at(source.clock.now_s)
            took_s = (fixed * fixed_s + grows * grows_s) * self._speed * mood.of_a_step()
        source.clock.pass_s(took_s)
        return took_s

    def _go_on(self, plan: _Plan) -> None:
        """Give what runs its next tokens; the last to come is the first to be preempted."""
        at = 0
        while at < len(self._running) and plan.budget > 0:
            seq = self._running[at]
            tokens = min(seq.missing, plan.budget)
            while at < len(self._running) and not self._reserve(seq, tokens):
                victim = self._running.pop()
                self._give_back(victim)
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
            tokens = min(seq.missing, plan.budget)
            if not self._reserve(seq, tokens):
                return
            self._running.append(self._waiting.popleft())
            plan.take(seq, tokens)

    def _reserve(self, seq: _Sequence, tokens: int) -> bool:
        more = -(-(seq.computed + tokens) // self._source.block_size) - seq.blocks
        if more > self._free:
            return False
        seq.blocks += more
        self._free -= more
        return True

    def _give_back(self, seq: _Sequence) -> None:
        self._free += seq.blocks
        seq.blocks = 0

    def _compute(self, plan: _Plan) -> list[Emitted]:
        """Let the batch pass and say which tokens came out."""
        emitted, has_ended = [], False
        for seq, tokens in plan.chunks:
            seq.computed += tokens
            if seq.missing:
                continue
            seq.answered += 1
            if seq.answered < seq.output_tokens:
                emitted.append(seq.out)
                continue
            emitted.append(Emitted(seq.row, 1, is_last=True))
            self._give_back(seq)
            has_ended = True
        if has_ended:
            self._running = [s for s in self._running if s.answered < s.output_tokens]
            self._has_to_tidy = True
        return emitted

    # Most steps differ in their contexts alone, and go without a look at each sequence.

    def _begin_stretch(self) -> None:
        """Begin a stretch if nothing but decoding can happen in the next steps."""
        running, size = self._running, self._source.block_size
        if not running or self._may_admit():
            return
        if any(seq.prompt_tokens + seq.answered - seq.computed != 1 for seq in running):
            return
        left = min(seq.output_tokens - seq.answered for seq in running) - 1
        if left < 1 or any(not seq.answered for seq in running):
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
            spread=_spread(contexts),
            longest=max(contexts),
        )

    def _may_admit(self) -> bool:
        """Whether who waits first could be let in; what is free only falls until one ends."""
        if not self._waiting or len(self._running) >= self._limits.max_num_seqs:
            return False
        seq = self._waiting[0]
        tokens = min(seq.missing, self._limits.max_num_batched_tokens - len(self._running))
        return tokens > 0 and -(-tokens // self._source.block_size) <= self._free

    def _next_of(self, stretch: _Stretch) -> Step | None:
        """Return the next step of a stretch; None, and no stretch, where it is over."""
        more = stretch.blocks_at[stretch.taken % self._source.block_size]
        if stretch.taken == stretch.left or more > self._free:
            self._end_stretch()
            return None
        self._free -= more
        seqs, total = len(stretch.emitted), stretch.total
        batch = Batch(seqs, 0, 0, total, 0, 0, 0, stretch.spread)
        took_s = self._timed(batch, stretch.longest)
        stretch.taken += 1
        stretch.total += seqs
        stretch.longest += 1
        usage = 1 - self._free / self._blocks
        return Step(took_s, stretch.emitted, batch, seqs, len(self._waiting), usage)

    def _end_stretch(self) -> None:
        """Write down what the steps of a stretch came to."""
        stretch, self._stretch = self._stretch, None
        if stretch is None or not stretch.taken:
            return
        size = self._source.block_size
        for seq in self._running:
            seq.computed += stretch.taken
            seq.answered += stretch.taken
            seq.blocks = -(-seq.computed // size)


def _spread(contexts: Sequence[int]) -> float:
    """Return how far apart contexts are, as the protocol has it."""
    return spread_tokens(len(contexts), sum(contexts), sum(c * c for c in contexts))


def _batch_of(plan: _Plan) -> tuple[Batch, int]:
    """Put a plan into the protocol's words, and return the longest context of its decodes.

    Source: read_batch in tuner/engine/compat/core.py.
    """
    prefill = prefill_seqs = pairs = 0
    contexts = []
    for seq, tokens in plan.chunks:
        if seq.answered and tokens <= 1:
            contexts.append(seq.computed + tokens)
        else:
            prefill += tokens
            prefill_seqs += 1
            pairs += tokens * seq.computed + tokens * (tokens + 1) // 2
    seqs, total = len(contexts), sum(contexts)
    batch = Batch(
        *(seqs, prefill, prefill_seqs, total, pairs, plan.preempted, 0), _spread(contexts)
    )
    return batch, max(contexts, default=0)
