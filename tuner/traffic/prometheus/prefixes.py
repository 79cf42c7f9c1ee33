"""Prefixes that drawn prompts share, so that as many of their tokens hit as on the server.

Counters tell how many prompt tokens the server's own prefix cache had, not which. Without any
sharing a replay would compute several times the server's prefill; so each prompt begins as
others of about its length do, for such a share of itself that an engine's cache finds as much
as the server's found. There are as many groups of prompts that begin alike as requests ran at
once, so that those that run together mostly hold blocks of their own.

Tried and given up: one prefix for all, which fills the KV cache with next to nothing; and
groups of prompts of any length, whose rare long ones keep long prefixes that hardly ever hit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.stats import Bools, Floats, Ints
from tuner.traffic.prefixes import HashIds, offsets_of, places_of

MIN_RATIO: Final = 0.01
"""Ours: fewer hits change no step's time by what could be measured."""

MAX_COLD_RATIO: Final = 0.02
"""Ours: by how much more prefill the first prompts of all groups may cost, whose prefixes no
cache holds yet when a replay begins."""

BLOCK_TOKENS: Final = 16
"""vLLM's usual block (CacheConfig.DEFAULT_BLOCK_SIZE); what is shared is whole blocks of it."""

MAX_IDS: Final = 20_000_000
"""Ours: 160 MB; the prompts of longer traces share larger blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Hash ids of drawn prompts, and how much of the prompts an unbounded cache finds.

    Units: hit_ratio is a share of all prompt tokens.
    """

    hashes: HashIds
    hit_ratio: float
    groups: int


def shared_prefixes(
    prompt_tokens: Ints,
    ratios: Floats,
    hit_ratio: float,
    running: float,
    rng: np.random.Generator,
) -> SharedPrefixes:
    """Return prefixes for prompts in the order in which they come.

    `ratios` says how much hit when each of them came, `hit_ratio` how much in all: it is met,
    or come near to where prompts of few blocks cannot share so much. `running` is how many
    requests ran at once.

    Shapes: prompt_tokens and ratios are [n].
    """
    size = _block_tokens(prompt_tokens)
    groups = _groups(len(prompt_tokens), hit_ratio, running)
    of_group = _of_alike_lengths(prompt_tokens, groups, rng)
    whole = prompt_tokens // size
    # A share of a block is a block for that share of the prompts.
    rounding = rng.random(len(prompt_tokens))

    def blocks(times: float) -> Ints:
        wanted = np.minimum(times * ratios, 1.0) * prompt_tokens / size
        return np.minimum(np.floor(wanted + rounding).astype(np.int64), whole)

    def found(shared: Ints) -> float:
        hits = _hit_blocks(shared, of_group, (prompt_tokens - 1) // size)
        return float(hits.sum()) * size / float(prompt_tokens.sum())

    low, high = 0.0, 1.0 / max(float(ratios[ratios > 0].min(initial=1.0)), MIN_RATIO)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if found(blocks(middle)) < hit_ratio else (low, middle)
    shared = blocks(high)
    return SharedPrefixes(_ids(whole, shared, of_group, size), found(shared), groups)


def _block_tokens(prompt_tokens: Ints) -> int:
    """Return a block size with which all prompts have no more ids than is bearable."""
    size = BLOCK_TOKENS
    while int((prompt_tokens // size).sum()) > MAX_IDS:
        size *= 2
    return size


def _groups(n: int, hit_ratio: float, running: float) -> int:
    """Return how many groups there are: as many as run at once, unless few requests come."""
    most = MAX_COLD_RATIO * (1 - hit_ratio) / hit_ratio * n
    return max(1, math.floor(min(running, most)))


def _of_alike_lengths(prompt_tokens: Ints, groups: int, rng: np.random.Generator) -> Ints:
    """Return the group of each prompt: as many prompts each, of neighbouring lengths."""
    n = len(prompt_tokens)
    # Equal lengths in random order, so that no group has them all at one time.
    order = np.lexsort((rng.random(n), prompt_tokens))
    found = np.empty(n, dtype=np.int64)
    found[order] = np.arange(n) * groups // n
    return found


def _hit_blocks(shared: Ints, of_group: Ints, most: Ints) -> Ints:
    """Return how many leading blocks of each prompt an earlier one of its group has brought.

    The last token of a prompt is always computed, and with it its block: no more than `most`.
    """
    order = np.argsort(of_group, kind="stable")
    group, blocks = of_group[order], shared[order]
    above = group * (int(shared.max(initial=0)) + 1)
    longest = np.maximum.accumulate(blocks + above) - above
    before = np.concatenate([[0], longest[:-1]])
    is_first: Bools = np.concatenate([[True], group[1:] != group[:-1]])
    before[is_first] = 0
    hits = np.empty_like(shared)
    hits[order] = np.minimum(blocks, before)
    return np.minimum(hits, most)


def _ids(whole: Ints, shared: Ints, of_group: Ints, size: int) -> HashIds:
    """Return the ids: those of the group for the shared blocks, new ones for all others."""
    prompt, place = places_of(whole)
    longest = int(whole.max(initial=0)) + 1
    own = (int(of_group.max(initial=0)) + 1) * longest + np.arange(place.size)
    ids = np.where(place < shared[prompt], of_group[prompt] * longest + place, own)
    return HashIds(offsets_of(whole), ids, size)
