"""What vLLM's scheduler needs to know of an engine, and nothing else.

Read off a running engine and kept in a profile; from it the shadow engine builds the same
scheduler and KV-cache manager on a machine that has neither the model nor the device.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, UsageError
from tuner.stats import Floats, Ints

# The kind of KV cache of a model whose layers all see the whole context.
FULL_ATTENTION: Final = "full_attention"

RETENTION: Final = "prefix_cache_retention_interval"
"""The field of a group, and the option of vLLM, that is `KvLayout.retention`."""

DRAFTS_IN: Final = "is_eagle_group"
"""Whether layers that draft are in a group: its hits alone are cut by a block.

Source: vllm/v1/kv_cache_interface.py, KVCacheGroupSpec.
"""

KvGroup = Mapping[str, bool | int | str | None]
"""A group of a model's KV cache: vLLM's class of it as `kind`, and its plain fields."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Groups of layers that each hold blocks for the same tokens.

    `looks_back` says of each whether its layers need the past no more: those of sliding-window
    attention, which sees the last `window` tokens alone, or where `keeps_states` state-space
    layers, which go on from their last state and leave one where a part of a prompt ends; 0
    where none do. Of what such groups hold the prefix cache keeps what serves at the end of a
    prompt, where prompts part, and before every multiple of `retention` tokens, none of these
    where it is 0; all where it is None. Where `leaves_two_every` is not 0, a batch that
    computes a multiple of it may leave the state before its last block of tokens too. Groups of
    states that nobody else can go on from are in none of these: they are `fixed` blocks of each
    request, however long it is. Blocks of layers whose keys and values are smaller hold more
    tokens: those of layers that look back `back_span` times the cache's block_size, those of
    others `full_span` times. Where a cached prefix loses its last block to drafts, groups that
    see all do if `full_drops`, and those that look back if `back_drops`. For drafts a request
    holds `scratch` blocks more of each group of states.

    Units: tokens, of `fixed` blocks.
    """

    looks_back: tuple[bool, ...] = (False,)
    window: int = 0
    retention: int | None = None
    keeps_states: bool = False
    leaves_two_every: int = 0
    fixed: int = 0
    full_span: int = 1
    back_span: int = 1
    full_drops: bool = True
    back_drops: bool = True
    scratch: int = 0

    @property
    def aligned(self) -> int:
        """At a multiple of how many blocks of block_size tokens a cached prefix ends.

        Source: vllm/v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes.
        """
        return math.lcm(self.full_span, self.back_span)

    @classmethod
    def of_groups(cls, groups: Sequence[KvGroup], block_size: int) -> Self | None:
        """Return that of a model's groups; None of some that hold their blocks otherwise.

        As of chunked attention, windows of several lengths, blocks of several sizes or drafts
        beside states that are shared, or of anything that vLLM would not start with.
        """
        alone = [group for group in groups if _is_state(group, "none")]
        shared = [group for group in groups if group not in alone]
        fixed = [_count(group.get(_DRAFTED), 0) for group in alone]
        if None in fixed or not _hold_alike(shared):
            return None
        looks_back = tuple(_LOOKS_BACK[str(group["kind"])] for group in shared)
        blocks = sum(1 + (drafted or 0) for drafted in fixed)
        back = [group for group, looks in zip(shared, looks_back, strict=True) if looks]
        has_states = any(group.get("kind") == STATE for group in back)
        spans = _spans(shared, looks_back, block_size)
        if spans is None or (has_states and spans != (1, 1)):
            return None
        drops = _drops(shared, looks_back)
        if not back:
            return cls(looks_back, fixed=blocks)
        (window, two_every, scratch), *others = {_past(group) for group in back}
        kept = shared[0].get(RETENTION)
        retention = None if kept is None else _count(kept, 0)
        past = (window or 0, retention, has_states, two_every)
        known = cls(looks_back, *past, blocks, *spans, *drops, scratch)
        whole = known.aligned * block_size
        is_whole = kept is None or (retention is not None and retention % whole == 0)
        return None if others or window is None or not is_whole else known


STATE: Final = "MambaSpec"
"""vLLM's class of a group of state-space layers."""

_DRAFTED: Final = "num_speculative_blocks"
"""The field of such a group that is how many blocks more a request holds for its drafts."""


def _is_state(group: KvGroup, mode: str) -> bool:
    """Whether a group is of state-space layers that keep their states in a way of vLLM's."""
    return group.get("kind") == STATE and group.get("mamba_cache_mode") == mode


def _spans(
    groups: Sequence[KvGroup], looks_back: Sequence[bool], block_size: int
) -> tuple[int, int] | None:
    """Return how many times as large blocks are of groups that see all, and that look back.

    None where it is not one number each, or block_size is not what all have in common.
    """
    spans = []
    for kind in (False, True):
        sizes = [
            _count(group.get("block_size"), 1)
            for group, looks in zip(groups, looks_back, strict=True)
            if looks == kind
        ]
        size, *others = {*(sizes or [block_size])}
        if others or size is None or size % block_size:
            return None
        spans.append(size // block_size)
    full, back = spans
    return (full, back) if math.gcd(full, back) == 1 else None


def _drops(groups: Sequence[KvGroup], looks_back: Sequence[bool]) -> tuple[bool, bool]:
    """Return whether drafts read a group that sees all, and one that looks back.

    Where vLLM does not say which, all.
    """
    kinds = {
        looks for group, looks in zip(groups, looks_back, strict=True) if group.get(DRAFTS_IN)
    }
    return (False in kinds or not kinds, True in kinds or not kinds)


def _hold_alike(groups: Sequence[KvGroup]) -> bool:
    """Whether groups hold blocks for the same tokens each, in ways that are known."""
    return (
        {group.get("kind") for group in groups} <= _LOOKS_BACK.keys()
        and len({group.get(RETENTION) for group in groups}) == 1
        and all(group.get(name) in given for group in groups for name, given in _AS_THESE)
    )


def _past(group: KvGroup) -> tuple[int | None, int, int]:
    """Return how many tokens a group looks back, None where that is not known.

    A state holds all before the last of two. Then comes of how many tokens a batch is a
    multiple that may leave two states, 0 where none may, and how many states drafts take.

    Source: vllm/v1/kv_cache_interface.py, is_mamba_prefill_checkpoint_valid.
    """
    if group.get("kind") != STATE:
        return _count(group.get("sliding_window"), 2), 0, 0
    drafted = _count(group.get(_DRAFTED), 0)
    may_leave_two = group.get("num_prefill_checkpoint_blocks")
    every = _count(group.get("prefill_checkpoint_alignment"), 1) if may_leave_two else 0
    is_known = _is_state(group, "align") and drafted is not None and not (drafted and every)
    return 2 if is_known and every is not None else None, every or 0, drafted or 0


def _count(value: object, least: int) -> int | None:
    """Return a value that is a whole number of so many tokens or more; None of any other."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 40:
        return value
    return None


# Whether vLLM's kinds of groups give back what lies behind a window. One of full attention
# keeps every block, also where a window stands in it (without the hybrid KV cache manager).
_LOOKS_BACK: Final = {"FullAttentionSpec": False, "SlidingWindowSpec": True, STATE: True}
# What else is known of a group has to be one of these; of states, -1 tokens each.
_AS_THESE: Final = (
    ("extra_retained_tokens", (None, 0)),
    ("attention_chunk_size", (None,)),
    ("tokens_per_state", (None, 1, -1)),
)


@dataclass(frozen=True, slots=True)
class Graphs:
    """Which batches an engine runs as a captured graph, padded to its size.

    `sizes` are in tokens, ascending, empty where nothing is captured; `has_mixed` says whether
    batches with a prompt have graphs too, or those alone that only decode. What is larger than
    the largest, or has none, is launched eagerly as it is.

    Source: vllm/v1/cudagraph_dispatcher.py, CudagraphDispatcher.dispatch.
    Raises: UsageError if sizes do not ascend from 1.
    """

    sizes: tuple[int, ...] = ()
    has_mixed: bool = True

    def __post_init__(self) -> None:
        """Check the sizes."""
        if not all(a < b for a, b in pairwise((0, *self.sizes))):
            raise UsageError(f"captured_sizes must ascend from 1, got {self.sizes}")

    def padded(self, tokens: int, *, has_prompt: bool) -> int | None:
        """Return the size of the graph that so many tokens run in, None where none does.

        >>> Graphs((1, 2, 4, 8)).padded(5, has_prompt=True)
        8
        """
        at = bisect_left(self.sizes, tokens)
        has_graph = at < len(self.sizes) and (self.has_mixed or not has_prompt)
        return self.sizes[at] if has_graph else None

    def padded_along(
        self, tokens: Floats, has_prompt: NDArray[np.bool_]
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the tokens that batches compute once padded, and which run in a graph.

        Shapes: those of tokens.
        """
        if not self.sizes:
            return tokens, np.zeros(tokens.shape, dtype=np.bool_)
        at = np.searchsorted(self.sizes, tokens, "left")
        sizes = np.asarray(self.sizes, dtype=np.float64)[np.minimum(at, len(self.sizes) - 1)]
        has_graph = (at < len(self.sizes)) & (self.has_mixed | ~has_prompt)
        return np.where(has_graph & (tokens > 0), sizes, tokens), has_graph


NO_GRAPHS = Graphs()


MTP: Final = "mtp"
"""Drafting by a layer that models bring for it."""

EAGLES: Final = ("eagle", "eagle3", MTP, "dflash", "dspark")
"""Methods that draft from hidden states: these take blocks ahead.

Source: vllm/config/speculative.py, SpeculativeConfig.use_eagle.
"""

FILLING: Final = ("dflash", "dspark")
"""Those of them that draft all tokens at once, of which some read one more."""

HEADS: Final = tuple(method for method in EAGLES if method not in FILLING)
"""Those that draft token by token."""

DRAFT_MODEL: Final = "draft_model"
"""Drafting by a model of its own, which takes blocks ahead too."""

SLOTS_BY_STEP: Final = 28
"""Since vLLM 0.28 what drafts takes of a step's budget goes by the requests in the step."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """How an engine drafts tokens ahead: always so many, which its next step verifies.

    `method` is vLLM's name of it. Each request takes `slots` of a step's token budget beside
    its tokens, for what is computed to draft. Who `fills_in` reads a token further ahead.

    Source: vllm/config/speculative.py, SpeculativeConfig.
    Raises: UsageError without a token.
    """

    method: str
    tokens: int
    slots: int = 0
    fills_in: bool = False

    def __post_init__(self) -> None:
        """Check the tokens."""
        if self.tokens < 1:
            raise UsageError(f"drafts.tokens must be 1 or more, got {self.tokens}")

    @property
    def is_eagle(self) -> bool:
        """Whether it drafts from hidden states."""
        return self.method in EAGLES

    @property
    def lookahead_tokens(self) -> int:
        """For how many tokens ahead of a batch what drafts writes keys and values.

        Source: vllm/config/vllm.py, VllmConfig.num_lookahead_tokens.
        """
        reads_ahead = self.is_eagle or self.method == DRAFT_MODEL
        return self.tokens + self.fills_in if reads_ahead else 0


def left_for_tokens(limits: EngineLimits, slots: int, *, by_step: bool) -> int:
    """Return how many tokens of the budget a step has left where requests take slots of it.

    `by_step` who is in a step takes its slots of it, else each of max_num_seqs, of every step.

    Source: vllm/config/vllm.py, VllmConfig._set_max_num_scheduled_tokens;
        vllm/v1/core/sched/scheduler.py, schedule.
    Raises: EngineError where nothing is left: such an engine does not start.
    """
    taken = slots * (1 if by_step else limits.max_num_seqs)
    if taken >= limits.max_num_batched_tokens:
        raise EngineError(
            f"what drafts takes {taken} of {limits.max_num_batched_tokens} tokens "
            "(max_num_batched_tokens), and leaves none to compute",
            "raise max_num_batched_tokens, or draft fewer tokens",
        )
    return limits.max_num_batched_tokens - (0 if by_step else taken)


def accepted_rates(brought: Sequence[int]) -> tuple[float, ...]:
    """Return how often the first draft was accepted, the first two, and so on; empty of none.

    `brought` counts the steps of answers that brought out one token, two, three and so on.

    >>> accepted_rates((2, 3, 5))
    (0.8, 0.5)
    """
    total = sum(brought)
    at_least = list(accumulate(reversed(brought)))
    return tuple(count / total for count in reversed(at_least[:-1])) if total else ()


def check_rates(rates: Sequence[float], tokens: int) -> None:
    """Refuse rates of accepted drafts that cannot be: there is one for each, none above 1.

    Raises: UsageError.
    """
    can_be = all(1 >= a >= b >= 0 for a, b in pairwise((1.0, *rates, 0.0)))
    if len(rates) != tokens or not can_be:
        want = f"must be {tokens} from 1 down to 0 that never rise, a rate for each draft"
        raise UsageError(f"rates of accepted drafts {want}, got {list(rates)}")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine without its model: identity, KV-cache geometry and scheduler options.

    `scheduler` holds the plain options of vLLM's SchedulerConfig under vLLM's names, the two
    tuned limits excepted. `captured_sizes` are the batch sizes in tokens for which graphs were
    captured, ascending, empty where there are none, of batches with prompts too if
    `captures_mixed`; `model_sets_graphs` says whether the model chooses the largest of them,
    as gpt-oss does whatever max_num_seqs is. `kv_kind` is FULL_ATTENTION, or what else the
    model's KV cache is made of, whose groups then are in `kv_groups`. `block_bytes` is what a
    block takes of the memory of a device, `token_bytes` what a start leaves free of it for a
    token of the budget, 0 where nobody knows. `drafts` are what decoding sequences verify in
    every step, None where none are.

    Units: tokens, blocks of block_size tokens.
    """

    model: str
    device: str
    dtype: str
    vllm_version: str
    parallelism: Mapping[str, int]
    vocab_size: int
    max_model_len: int
    block_size: int
    kv_kind: str
    prefix_caching: bool
    asynchronous: bool
    captured_sizes: tuple[int, ...]
    scheduler: Mapping[str, bool | int | float | str | None]
    captures_mixed: bool = True
    model_sets_graphs: bool = False
    kv_groups: tuple[KvGroup, ...] = ()
    block_bytes: int = 0
    token_bytes: int = 0
    drafts: Drafts | None = None

    def __post_init__(self) -> None:
        """Check the captured sizes."""
        _ = self.graphs

    @property
    def kv_layout(self) -> KvLayout | None:
        """What requests hold of its KV cache; None where nothing but vLLM knows."""
        if self.kv_kind == FULL_ATTENTION:
            return KvLayout()
        layout = KvLayout.of_groups(self.kv_groups, self.block_size)
        if layout is None or not (layout.fixed or layout.keeps_states):
            return layout
        # Whether others go on from a state is the prefix cache's doing; up to 0.29 what nobody
        # needs any more is given back in other ways, up to 0.31 a batch leaves two in others.
        is_usual = self.prefix_caching == layout.keeps_states
        since = 32 if layout.leaves_two_every or self.drafts is not None else 30
        return layout if is_usual and (layout.fixed or self.is_since(since)) else None

    def in_flight_tokens(self, limits: EngineLimits) -> int:
        """Return how many tokens are scheduled and not yet computed at most.

        What lies behind a window is kept for these: for those of the batch that is scheduled
        alone up to 0.25.

        Source: vllm/config/vllm.py, VllmConfig.max_in_flight_tokens.
        """
        batches = 2 if self.asynchronous and self.is_since(26) else 1
        return batches * limits.max_num_batched_tokens

    def most_in_window(self, in_flight_tokens: int) -> int:
        """Return how many blocks a group that looks back holds of a request at most.

        Of states the last that is computed, and one of each batch that begins another block.

        Source: vllm/v1/kv_cache_interface.py, SlidingWindowSpec.
        """
        layout = self.kv_layout or KvLayout()
        if layout.keeps_states:
            each = 2 if layout.leaves_two_every else 1
            return 1 + min(in_flight_tokens - 1, each * (2 if self.asynchronous else 1))
        tokens = min(layout.window - 1 + in_flight_tokens, self.max_model_len)
        return -(-tokens // (self.block_size * layout.back_span)) + 1

    def held_blocks(self, tokens: Ints, in_flight_tokens: int = 1) -> Ints:
        """Return how many blocks requests hold of which so many tokens are computed.

        Groups of sliding windows hold the window and what is in flight, of which there are so
        many tokens; by one the least that a request holds. Where only vLLM knows the groups
        each request holds what full attention does.

        Shapes: those of tokens.
        """
        layout = self.kv_layout or KvLayout()
        size, back = self.block_size, layout.looks_back.count(True)
        spans = (layout.full_span, layout.back_span)
        in_full, in_back = (-(-tokens // (size * span)) for span in spans)
        in_back = np.minimum(in_back, self.most_in_window(in_flight_tokens)) + layout.scratch
        held: Ints = (len(layout.looks_back) - back) * in_full + back * in_back + layout.fixed
        return held

    @property
    def has_priorities(self) -> bool:
        """Whether requests of a smaller priority are served first."""
        return self.scheduler.get("policy") == "priority"

    @property
    def parallel_values(self) -> dict[str, object]:
        """Over how many devices a configuration spreads it, by vLLM's keys; nothing of one."""
        return {name.replace("_", "-"): n for name, n in self.parallelism.items() if n > 1}

    @property
    def draft_tokens(self) -> int:
        """How many drafts a decoding sequence verifies in a step, 0 without any."""
        return 0 if self.drafts is None else self.drafts.tokens

    @property
    def draft_slots(self) -> int:
        """What each request takes of a step's token budget beside its tokens."""
        return 0 if self.drafts is None else self.drafts.slots

    @property
    def lookahead_tokens(self) -> int:
        """For how many tokens ahead of a batch what drafts writes keys and values."""
        return 0 if self.drafts is None else self.drafts.lookahead_tokens

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return any(group.get("kind") == STATE for group in self.kv_groups)

    @property
    def drops_hit(self) -> bool:
        """Whether the last block of a prefix that is found cached is computed anew.

        Up to 0.32, since what drafts reads the token behind it. Source: of `hashed_ahead`.
        """
        return self.drafts is not None and self.drafts.is_eagle and not self.is_since(33)

    @property
    def hashed_ahead(self) -> int:
        """How many tokens behind a block it is found by too, which what drafts reads with it.

        Source: vllm/config/vllm.py, VllmConfig.num_hash_lookahead_tokens;
            vllm/config/speculative.py, SpeculativeConfig.use_eagle_block_drop.
        """
        reads = self.drafts is not None and self.drafts.method in HEADS
        return int(reads and self.is_since(33))

    @property
    def counts_slots_by_step(self) -> bool:
        """Whether what drafts takes of a step's budget goes by who is in the step."""
        return self.is_since(SLOTS_BY_STEP)

    @property
    def devices(self) -> int:
        """How many devices one replica takes."""
        return math.prod(self.parallelism.values())

    @property
    def graphs(self) -> Graphs:
        """What was captured on this engine, at the limits that it was started with."""
        return Graphs(self.captured_sizes, self.captures_mixed)

    def is_since(self, minor: int) -> bool:
        """Whether the engine's vLLM is 0.`minor` or later; of an unknown one, yes."""
        return is_since(self.vllm_version, minor)

    def graphs_at(self, limits: EngineLimits, starts: Sequence[EngineLimits]) -> Graphs:
        """Return what such an engine captures when it is started with the limits.

        Where the sizes are those that vLLM chooses by itself for one of the `starts`, it
        chooses for the limits too; sizes that somebody has set stay, as far as the token budget
        lets them.
        """
        for top in (self._largest, LARGE_GRAPH):
            for is_fine in (False, True):
                chosen = [self.chosen_sizes(at, top=top, is_fine=is_fine) for at in starts]
                if self.captured_sizes in chosen:
                    sizes = self.chosen_sizes(limits, top=top, is_fine=is_fine)
                    return Graphs(sizes, self.captures_mixed)
        fitting = (n for n in self.captured_sizes if n <= limits.max_num_batched_tokens)
        return Graphs(tuple(fitting), self.captures_mixed)

    @property
    def _largest(self) -> int:
        """The largest size that vLLM captures by itself of this model, on this device."""
        # Compute capability 10.x, by the device's name.
        is_large = self.is_since(28) and re.search(r"\bG?B[23]00\b", self.device)
        return 2 * LARGE_GRAPH if is_large or self.model_sets_graphs else LARGE_GRAPH

    def chosen_sizes(
        self, limits: EngineLimits, *, top: int | None = None, is_fine: bool = False
    ) -> tuple[int, ...]:
        """Return the sizes that vLLM captures by itself for an engine of some limits.

        None above `top`; `is_fine` is `--performance-mode interactivity`. Since 0.31 the cap
        itself is one of them, where drafts are verified the tokens of like numbers of requests.

        Source: vllm/config/vllm.py, VllmConfig._set_cudagraph_sizes, 0.20 to 0.32;
            vllm/model_executor/models/config.py, GptOssForCausalLMConfig.
        """
        top, each = top or self._largest, 1 + self.draft_tokens
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        most = top if self.model_sets_graphs else min(2 * seqs * each, top)
        largest = min(most, tokens)
        few = range(1, min(largest, 32) + 1) if is_fine else (1, 2, 4)
        sizes = {*few, *_strides(largest)}
        if tokens <= largest:
            sizes.add(tokens)
        if self.is_since(31) and not self.model_sets_graphs:
            requests = min(seqs, top)
            counts = {1, 2, 4, *_strides(requests)} if each > 1 else ()
            sizes |= {each * n for n in (*counts, requests) if n <= requests}
        return tuple(sorted(size for size in sizes if size <= largest))


def _strides(largest: int) -> tuple[int, ...]:
    """Return the numbers from 8 on for which vLLM captures graphs by itself."""
    return (*range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16))


def is_since(vllm_version: str, minor: int) -> bool:
    """Return whether a vLLM is 0.`minor` or later; of an unknown one, yes.

    >>> is_since("0.27.1", 28), is_since("0.32.0", 28)
    (False, True)
    """
    found = re.match(r"0\.(\d+)", vllm_version)
    return found is None or int(found[1]) >= minor


LARGE_GRAPH: Final = 512
"""The largest size that vLLM captures by itself, twice that since 0.28 on devices of compute
capability 10.x, and where the model sets it. Source: as of `chosen_sizes`."""

SETTING_GRAPHS: Final = frozenset({"GptOssForCausalLM"})
"""Architectures that set the largest size that is captured. Source: as of `chosen_sizes`."""
