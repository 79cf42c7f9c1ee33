"""Token ids for requests of which only lengths and prefix hashes were recorded.

Equal hash ids give equal tokens, so that the engine's prefix cache finds what the recorded
one found. Where nothing was hashed nothing may be shared: such tokens begin with the request's
own number, so no two prompts have a first block in common by accident. Nothing here is text.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.hashes import Ints
from tuner.traces import Trace

SPECIAL_IDS = range(10)
"""Ours: padding, start, end and unknown are among the first ten ids of many vocabularies."""

_Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_DOMAIN, _TAIL_DOMAIN = 1, 2


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
