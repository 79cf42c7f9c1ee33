"""Token ids for requests of which only lengths and prefix hashes were recorded.

Equal hash ids give equal tokens, so that the engine's prefix cache finds what the recorded
one found. Where nothing was hashed nothing may be shared: such tokens begin with the request's
own number, so no two prompts have a first block in common by accident. A next turn holds the
answer before it as the engine gave it. Nothing here is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from tuner.errors import UsageError
from tuner.stats import Ints
from tuner.traffic.answers import HeldAnswers, held_answers
from tuner.traffic.prefixes import GOLDEN, mixed
from tuner.traffic.traces import Trace

SPECIAL_IDS = 10
"""Ours: padding, start, end and unknown are among the first ten ids of many vocabularies."""

_BLOCK_DOMAIN, _TAIL_DOMAIN, _ANSWER_DOMAIN = 1, 2, 3


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of which the tokens are at hand.

    >>> a, b = TokenPrompt((1, 2, 3, 4, 5)), TokenPrompt((1, 2, 3, 9))
    >>> a.block_keys(2)[0] == b.block_keys(2)[0], a.block_keys(2)[1] == b.block_keys(2)[1]
    (True, False)
    """

    ids: Sequence[int]
    priority: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def token_ids(self) -> list[int]:
        """Return the tokens."""
        return list(self.ids)

    def block_keys(self, block_size: int, ahead: int = 0) -> list[bytes]:
        """Return a key for each full block; it tells the tokens up to so many behind it."""
        keys, chain = [], 0
        for end in range(block_size, len(self.ids) - ahead + 1, block_size):
            chain = hash((chain, *self.ids[end - block_size : end]))
            told = hash((chain, *self.ids[end : end + ahead])) if ahead else chain
            keys.append(b"%d:%d" % (told, end))
        return keys

    def answer_key(self, row: int, end: int) -> bytes:
        """Return a key that no other prompt has: of its answer nothing is known."""
        return b"out%d:%d" % (row, end)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """The prompt of one request of a trace, made when its tokens are asked for."""

    source: PromptSource
    index: int

    def __len__(self) -> int:
        return self.source.length(self.index)

    @property
    def priority(self) -> int:
        """Return the recorded priority, 0 where there is none."""
        return self.source.priority(self.index)

    def token_ids(self) -> list[int]:
        """Return the tokens."""
        return self.source.tokens(self.index)

    def block_keys(self, block_size: int, ahead: int = 0) -> list[bytes]:
        """Return a key for each full block that equal beginnings share."""
        return self.source.block_keys(self.index, block_size, ahead)

    def answer_key(self, row: int, end: int) -> bytes:  # noqa: ARG002 - the row is the index
        """Return the key that a next turn that holds the answer has there too."""
        return own_key(self.index, end)


class PromptSource:
    """Prompts of one trace, made when asked for and the same every time but for answers.

    In a replay in which turns wait for answers, a next turn holds the turn before it and then
    what the engine answered, as far as the trace has it so. What was not answered, or by an
    engine without tokens, is made up.

    Each stretch (a hash block, or what no hash covers) starts with its own number written in
    the usable token ids and goes on with words of a counter-based generator. So blocks of
    different ids differ from the start, unhashed prompts too, and making one needs no other.

    Raises: UsageError if the vocabulary has fewer than two usable ids.
    Source: the generator's finaliser is SplitMix64, Steele, Lea and Flood (2014).
    """

    def __init__(self, trace: Trace, vocab_size: int, seed: int = 0) -> None:
        self._trace = trace
        self._usable = vocab_size - SPECIAL_IDS
        if self._usable < 2:
            raise UsageError(
                f"vocab_size must leave at least 2 usable token ids, got {vocab_size} with "
                f"{SPECIAL_IDS} reserved",
                "check the model's vocab_size",
            )
        self._seed = mixed(np.array([seed % (1 << 64)], np.uint64) + GOLDEN)
        self._digits = _digits_needed(len(trace), self._usable)
        self._held: HeldAnswers | None = None
        self._answers: dict[int, list[int]] = {}

    def begin(self, *, turns_wait: bool) -> None:
        """Begin a replay: forget answers, and hold new ones where turns wait for them."""
        self._held = self._all_held if turns_wait else None
        self._answers = {}

    @cached_property
    def _all_held(self) -> HeldAnswers | None:
        return held_answers(self._trace)

    def answered(self, index: int, ids: Sequence[int]) -> None:
        """Take tokens that a request was answered with, if another prompt will hold them."""
        if ids and self._held is not None and self._held.reached[index]:
            self._answers.setdefault(index, []).extend(ids)

    def prompt(self, index: int) -> RecordedPrompt:
        """Return the prompt of one request, not made before it is needed."""
        return RecordedPrompt(self, index)

    def length(self, index: int) -> int:
        """Return the prompt's number of tokens."""
        return int(self._trace.prompt_tokens[index])

    def priority(self, index: int) -> int:
        """Return the request's priority, 0 where none is recorded."""
        priorities = self._trace.priorities
        return 0 if priorities is None else int(priorities[index])

    def block_keys(self, index: int, block_size: int, ahead: int = 0) -> list[bytes]:
        """Return a key for each full block of block_size tokens of the prompt.

        Two prompts have a key in common exactly if what was recorded of them agrees up to that
        block's end, and so many tokens `ahead` of it: hashed blocks by their chained ids, all
        else is the request's own, and so is its answer (`own_key`).
        """
        end = (self.length(index) - ahead) // block_size * block_size + ahead
        keys: list[bytes] = []
        for row, _, stop in self._parts(index, end):
            # A block that ends in another's tokens is that one's, wherever it begins.
            keys += self._keys(row, len(keys) * block_size, stop - ahead, block_size, ahead)
        return keys

    def _parts(self, index: int, end: int) -> list[tuple[int, int, int]]:
        """Return whose tokens the first `end` of a prompt are, as `HeldAnswers.parts` does."""
        return [(index, 0, end)] if self._held is None else self._held.parts(index, end)

    def _keys(
        self, index: int, begin: int, stop: int, block_size: int, ahead: int
    ) -> list[bytes]:
        """Return the keys of blocks between two tokens of a prompt and its answer."""
        n, hashes = self.length(index), self._trace.hashes
        ids: list[int] = [] if hashes is None else hashes.row_array(index).tolist()
        recorded = 1 if hashes is None else hashes.block_size
        covered, keys = min(len(ids) * recorded, n), list[bytes]()
        chain, taken = b"", 0
        for end in range(begin + block_size, stop + 1, block_size):
            if end + ahead > covered:
                keys.append(own_key(index, end))
                continue
            needed = (end + ahead - 1) // recorded + 1
            while taken < needed:
                # Python's own hash takes -1 for -2, and numbers modulo a prime.
                link = ids[taken].to_bytes(8, "little", signed=True)
                chain = blake2b(chain + link, digest_size=16).digest()
                taken += 1
            keys.append(b"%b:%d" % (chain, end))
        return keys

    def tokens(self, index: int) -> list[int]:
        """Return the prompt of one request as token ids."""
        parts = []
        for row, begin, end in self._parts(index, self.length(index)):
            prompt = self.length(row)
            if begin < prompt:
                parts.append(self._recorded(row, begin, min(end, prompt)))
            if end > prompt:
                parts.append(self._answer(row, max(begin - prompt, 0), end - prompt))
        tokens: list[int] = np.concatenate(parts).tolist()
        return tokens

    def _recorded(self, index: int, begin: int, end: int) -> Ints:
        """Return tokens of a prompt as its own record has them.

        Shapes: [end - begin].
        """
        hashes, covered = self._trace.hashes, 0
        parts = []
        if hashes is not None and (ids := hashes.row_array(index)).size:
            size = hashes.block_size
            covered = min(ids.size * size, self.length(index))
            if begin < covered:
                first = begin // size
                ids = ids[first : -(-min(end, covered) // size)]
                blocks = self._stretches(ids, 0, size, _BLOCK_DOMAIN).ravel()
                parts.append(blocks[begin - first * size : min(end, covered) - first * size])
        if end > covered:
            begin = max(begin, covered) - covered
            row = np.array([index])
            parts.append(self._stretches(row, begin, end - covered, _TAIL_DOMAIN).ravel())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _answer(self, index: int, begin: int, end: int) -> Ints:
        """Return tokens that a request was answered with, made up where it was not.

        Shapes: [end - begin].
        """
        given = np.array(self._answers.get(index, ())[begin:end], dtype=np.int64)
        if given.size == end - begin:
            return given
        row, begin = np.array([index]), begin + given.size
        made_up = self._stretches(row, begin, end, _ANSWER_DOMAIN).ravel()
        return np.concatenate([given, made_up])

    def _stretches(self, numbers: Ints, begin: int, end: int, domain: int) -> Ints:
        """Return part of a row of tokens for each number; equal numbers, equal rows.

        Shapes: numbers is [k], the result [k, end - begin].
        """
        keys = mixed(numbers.astype(np.uint64) ^ mixed(self._seed + np.uint64(domain)))
        counters = np.arange(begin + 1, end + 1, dtype=np.uint64) * GOLDEN
        words = mixed(keys[:, np.newaxis] + counters[np.newaxis, :])
        base = np.uint64(self._usable)
        places = ((words >> np.uint64(32)) * base) >> np.uint64(32)
        is_block = domain == _BLOCK_DOMAIN
        digits = _digits_needed(1 << 64, int(base)) if is_block else self._digits
        if not is_block or digits <= end:
            rest = numbers.astype(np.uint64)
            for place in range(min(digits, end)):
                if place >= begin:
                    places[:, place - begin] = rest % base
                rest = rest // base
        return places.astype(np.int64) + SPECIAL_IDS


def own_key(row: int, end: int) -> bytes:
    """Return the key of a block that only this request has, of its prompt or its answer."""
    return b"row%d:%d" % (row, end)


def _digits_needed(count: int, base: int) -> int:
    """Return how many digits in `base` tell `count` numbers apart."""
    digits = 1
    while base**digits < count:
        digits += 1
    return digits
