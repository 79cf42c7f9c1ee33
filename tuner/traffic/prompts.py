"""Token ids for requests of which only lengths and prefix hashes were recorded.

Equal hash ids give equal tokens, so that the engine's prefix cache finds what the recorded
one found. Where nothing was hashed nothing may be shared: such tokens begin with the request's
own number, so no two prompts have a first block in common by accident. Nothing here is text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.arrays import Ints
from tuner.errors import UsageError
from tuner.traffic.traces import Trace

SPECIAL_IDS = range(10)
"""Ours: padding, start, end and unknown are among the first ten ids of many vocabularies."""

_Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_DOMAIN, _TAIL_DOMAIN = 1, 2


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of which the tokens are at hand.

    >>> a, b = TokenPrompt((1, 2, 3, 4, 5)), TokenPrompt((1, 2, 3, 9))
    >>> a.block_keys(2)[0] == b.block_keys(2)[0], a.block_keys(2)[1] == b.block_keys(2)[1]
    (True, False)
    """

    ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)

    def token_ids(self) -> list[int]:
        """Return the tokens."""
        return list(self.ids)

    def block_keys(self, block_size: int) -> list[bytes]:
        """Return a key for each full block; it tells the tokens up to the block's end."""
        keys, chain = [], 0
        for end in range(block_size, len(self.ids) + 1, block_size):
            chain = hash((chain, *self.ids[end - block_size : end]))
            keys.append(b"%d:%d" % (chain, end))
        return keys


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """The prompt of one request of a trace, made when its tokens are asked for."""

    source: PromptSource
    index: int

    def __len__(self) -> int:
        return self.source.length(self.index)

    def token_ids(self) -> list[int]:
        """Return the tokens."""
        return self.source.tokens(self.index)

    def block_keys(self, block_size: int) -> list[bytes]:
        """Return a key for each full block that equal beginnings share."""
        return self.source.block_keys(self.index, block_size)


class PromptSource:
    """Prompts of one trace, made when asked for and the same every time.

    Each stretch (a hash block, or what no hash covers) starts with its own number written in
    the usable token ids and goes on with words of a counter-based generator. So blocks of
    different ids differ from the start, unhashed prompts too, and making one needs no other.

    Raises: UsageError if the vocabulary has fewer than two usable ids.
    Source: the generator's finaliser is SplitMix64, Steele, Lea and Flood (2014).
    """

    def __init__(
        self,
        trace: Trace,
        vocab_size: int,
        seed: int = 0,
        reserved: Collection[int] = SPECIAL_IDS,
    ) -> None:
        self._trace = trace
        usable = np.setdiff1d(np.arange(max(vocab_size, 0)), np.array(list(reserved), np.int64))
        if usable.size < 2:
            raise UsageError(
                f"vocab_size must leave at least 2 usable token ids, got {vocab_size} with "
                f"{len(reserved)} reserved",
                "check the model's vocab_size",
            )
        self._usable = usable
        self._seed = _mixed(np.array([seed % (1 << 64)], np.uint64) + _GOLDEN)
        self._digits = _digits_needed(len(trace), usable.size)

    def prompt(self, index: int) -> RecordedPrompt:
        """Return the prompt of one request, not made before it is needed."""
        return RecordedPrompt(self, index)

    def length(self, index: int) -> int:
        """Return the prompt's number of tokens."""
        return int(self._trace.prompt_tokens[index])

    def block_keys(self, index: int, block_size: int) -> list[bytes]:
        """Return a key for each full block of block_size tokens of the prompt.

        Two prompts have a key in common exactly if what was recorded of them agrees up to that
        block's end: hashed blocks by their chained ids, all else is the request's own.
        """
        n, hashes = self.length(index), self._trace.hashes
        ids: list[int] = [] if hashes is None else hashes.row_array(index).tolist()
        recorded = 1 if hashes is None else hashes.block_size
        covered, keys = min(len(ids) * recorded, n), []
        chain, taken = 0, 0
        for end in range(block_size, n + 1, block_size):
            if end > covered:
                keys.append(b"row%d:%d" % (index, end))
                continue
            needed = (end - 1) // recorded + 1
            while taken < needed:
                chain = hash((chain, ids[taken]))
                taken += 1
            keys.append(b"%d:%d" % (chain, end))
        return keys

    def tokens(self, index: int) -> list[int]:
        """Return the prompt of one request as token ids."""
        tokens: list[int] = self.token_array(index).tolist()
        return tokens

    def token_array(self, index: int) -> Ints:
        """Return the prompt of one request as a column.

        Shapes: [prompt_tokens of the request].
        """
        n = int(self._trace.prompt_tokens[index])
        hashes = self._trace.hashes
        if hashes is None or not (ids := hashes.row_array(index)).size:
            return self._stretches(np.array([index]), n, _TAIL_DOMAIN).ravel()
        covered = self._stretches(ids, hashes.block_size, _BLOCK_DOMAIN).ravel()[:n]
        if covered.size == n:
            return covered
        tail = self._stretches(np.array([index]), n - covered.size, _TAIL_DOMAIN).ravel()
        return np.concatenate([covered, tail])

    def _stretches(self, numbers: Ints, length: int, domain: int) -> Ints:
        """Return one row of tokens for each number; equal numbers, equal rows.

        Shapes: numbers is [k], the result [k, length].
        """
        keys = _mixed(numbers.astype(np.uint64) ^ _mixed(self._seed + np.uint64(domain)))
        counters = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
        words = _mixed(keys[:, np.newaxis] + counters[np.newaxis, :])
        base = np.uint64(self._usable.size)
        places = ((words >> np.uint64(32)) * base) >> np.uint64(32)
        digits = self._digits if domain == _TAIL_DOMAIN else _digits_needed(1 << 64, int(base))
        if domain == _TAIL_DOMAIN or digits <= length:
            rest = numbers.astype(np.uint64)
            for place in range(min(digits, length)):
                places[:, place] = rest % base
                rest = rest // base
        return self._usable[places.astype(np.int64)]


def _mixed(words: _Words) -> _Words:
    """Scramble 64-bit words so that neighbours have nothing in common."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed


def _digits_needed(count: int, base: int) -> int:
    """Return how many digits in `base` tell `count` numbers apart."""
    digits = 1
    while base**digits < count:
        digits += 1
    return digits
