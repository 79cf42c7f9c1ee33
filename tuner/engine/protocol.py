"""What every engine promises to the replay loop.

Two implementations stand behind it: the live engine measures, the reference predicts through
vLLM's own scheduler. Whatever is true of a replay on one is true of the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.errors import Caveat


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known of an engine once it runs.

    `ceiling` holds the start-up values, above which limits never go. `can_change_limits` is
    false where that is not done, so that every configuration needs a restart. `remark` is a
    sentence on it for the user, or empty. `captured_sizes` are the batch sizes in tokens for
    which graphs were captured; with `has_own_graphs` lower limits use those alone that an
    engine started with them would have. `sampling` is a sentence on how tokens are.
    `has_priorities` tells whether requests of a smaller priority are served first.
    `draft_tokens` is how many drafts each decoding sequence verifies in a step, 0 where their
    number is not the same in all, `draft_slots` what each request takes of the token budget
    beside its tokens.
    """

    kind: str
    device: str
    dtype: str
    vllm_version: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    ceiling: EngineLimits
    can_change_limits: bool
    asynchronous: bool
    remark: str = ""
    captured_sizes: tuple[int, ...] = ()
    has_own_graphs: bool = True
    sampling: str = ""
    has_priorities: bool = False
    draft_tokens: int = 0
    draft_slots: int = 0

    @classmethod
    def of_shadow(
        cls, shape: EngineShape, ceiling: EngineLimits, num_blocks: int, remark: str = ""
    ) -> Self:
        """Return what is known of the engine that a shadow stands in for."""
        names = ["device", "dtype", "vllm_version", "vocab_size", "max_model_len"]
        names += ["block_size", "asynchronous", "has_priorities", "draft_tokens", "draft_slots"]
        return cls(
            kind="shadow",
            num_blocks=num_blocks,
            ceiling=ceiling,
            can_change_limits=True,
            remark=remark,
            **{name: getattr(shape, name) for name in names},
        )


def spread_tokens(contexts: Sequence[int]) -> float:
    """Return the root of the summed squares of how far contexts are from their mean.

    No context is further from the mean than that, and in the traffic of `traces` it goes with
    how much longer the longest is than the mean more closely than the standard deviation or
    that times the number. It stays as it is while the same requests decode on.

    >>> round(spread_tokens([100, 100, 100, 700]), 3), spread_tokens([])
    (519.615, 0.0)
    """
    seqs, total = len(contexts), sum(contexts)
    squares = sum(context * context for context in contexts)
    return math.sqrt((seqs * squares - total * total) / seqs) if seqs else 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computed.

    Units: sequences and tokens. decode_context_tokens sums the context that each decoding
    sequence attends to; prefill_context_tokens sums it over every prefilled token, so it grows
    with the square of a prompt. decode_spread_tokens is how far apart the contexts of the
    decoding sequences are, as `spread_tokens` has it. draft_tokens are verified beside the one
    token of each decoding sequence.
    """

    decode_seqs: int
    prefill_tokens: int
    prefill_seqs: int
    decode_context_tokens: int
    prefill_context_tokens: int
    preempted: int
    cached_tokens: int
    decode_spread_tokens: float = 0.0
    draft_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the step as the token budget counts them."""
        return self.decode_seqs + self.draft_tokens + self.prefill_tokens

    @property
    def is_decode_only(self) -> bool:
        """Whether nothing but decoding happened."""
        return self.prefill_tokens == 0 and self.decode_seqs > 0


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens of one request that a step brought out; their ids where an engine has any.

    Two are equal if the same was computed, whatever was drawn.
    """

    row: int
    tokens: int
    is_last: bool
    ids: Sequence[int] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the engine's loop.

    `batch` is None when the turn completed no batch: an asynchronous engine returns before
    its first batch is done, and every engine takes a turn to tidy up after the last.
    `launch_s` is how long the host was busy with launching the batch, 0 where nobody knows.
    With `is_late` it was done before the host, who launched the next one, came to look; or the
    turn completed none and launched the first.

    Units: duration_s and launch_s in seconds; kv_usage_ratio in 0 to 1.
    """

    duration_s: float
    emitted: Sequence[Emitted]
    batch: Batch | None
    running: int
    waiting: int
    kv_usage_ratio: float
    launch_s: float = 0.0
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a configuration comes to before any engine is started with it.

    `current_limits` are those of the user's configuration, vLLM's own default where it says
    nothing. `caveats` are reasons to doubt whatever is measured with it.
    """

    current_limits: EngineLimits
    max_model_len: int
    chunks_prefill: bool
    vllm_version: str
    device: str
    caveats: frozenset[Caveat] = frozenset()


class Prompt(Protocol):
    """A request's prompt, of which each engine takes what it needs."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    @property
    def priority(self) -> int:
        """Return vLLM's priority, of which the smallest is served first."""

    def token_ids(self) -> list[int]:
        """Return the tokens themselves."""

    def block_keys(self, block_size: int, ahead: int = 0) -> list[bytes]:
        """Return a key for each full block that two prompts share if they agree up to it.

        And up to so many tokens `ahead` of it, which there have to be.
        """

    def answer_key(self, row: int, end: int) -> bytes:
        """Return the key of a block that ends in the answer, as a next turn may have it."""


class EngineSource(Protocol):
    """Where engines come from; travels to the engine's process, so it must pickle."""

    def prepare(self) -> None:
        """Import what takes long and the rest needs, without a touch of the device."""

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a `vllm serve` configuration. Raises: UsageError if vLLM refuses it."""

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> Engine:
        """Start an engine. Raises: UsageError or EngineError."""


class Engine(Protocol):
    """A vLLM engine as the replay loop sees it.

    Ordering: requests are admitted in the order of `add`. Limits change, and the prefix cache
    is cleared, only while the engine has no work. A step's duration is the time until its
    tokens were out; with asynchronous scheduling it belongs to the batch that completed.
    """

    @property
    def info(self) -> EngineInfo:
        """What is known of this engine."""

    def shape(self) -> EngineShape:
        """Return what a shadow of this engine has to know. Raises: ShadowError."""

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold now; the start-up values at first."""

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits. Raises: EngineError while busy or above the ceiling."""

    def reset(self) -> None:
        """Forget the prefix cache, and what was prepared. Raises: EngineError while busy."""

    def prepare(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Make what `add` will need of a request, which may never come."""

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request that answers with exactly output_tokens tokens.

        Of a row that was prepared since the last `reset` it is the request prepared then.
        """

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, whether queued or running; unknown rows are ignored."""

    def has_work(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""

    def step(self) -> Step:
        """Take one turn. Raises: EngineError if there is no work or the engine fails."""

    def close(self) -> None:
        """Give back memory and processes; a second call does nothing."""
