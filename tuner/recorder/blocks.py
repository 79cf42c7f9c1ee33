"""Prompts as keyed hashes of their blocks: equal beginnings show, and nothing else does."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

BLOCKS_A_TURN: Final = 128
"""Ours: some 0.2 ms of hashing, so that the server's own thread never waits longer for us."""

TURN_S: Final = 1e-4
"""Ours: long enough for a waiting thread to wake up and take the interpreter."""

_TOKEN_BYTES: Final = array("I").itemsize


class KeyedHashes:
    """Hash ids and names that only holders of the key could recompute.

    >>> hashes = KeyedHashes(bytes(32))
    >>> one, two = hashes.block_ids([1, 2, 3, 4, 5], 2), hashes.block_ids([1, 2, 3, 9], 2)
    >>> len(one), one[0] == two[0], one[1] == two[1]
    (2, True, False)
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def scope(self) -> str:
        """A name of the key: hash ids of two files can be compared if theirs is the same."""
        return blake2b(key=self._key, digest_size=8, person=b"scope").hexdigest()

    def name(self, text: str) -> str:
        """Return what stands for an identifier in the trace."""
        data = text.encode("utf-8", "surrogatepass")
        return blake2b(data, key=self._key, digest_size=8, person=b"name").hexdigest()

    def block_ids(
        self, token_ids: Sequence[int], block_size: int, salt: str = ""
    ) -> array[int]:
        """Return one id for each whole block, which stands for the prompt up to its end.

        vLLM caches whole blocks only, so tokens past the last one have no id. Prompts of
        different `salt` share nothing, as vLLM keeps the cache of adapters and tenants apart.

        Shapes: [len(token_ids) // block_size], each within 63 bits.
        """
        state = blake2b(key=self._key, digest_size=8, person=b"blocks")
        if salt:
            state.update(blake2b(salt.encode("utf-8", "surrogatepass")).digest())
        # Made at its full size: one that grows keeps room for more, as long as it lives.
        ids = array("q", bytes(8 * (len(token_ids) // block_size)))
        whole, block = len(ids) * block_size, 0
        turn, width = block_size * BLOCKS_A_TURN, block_size * _TOKEN_BYTES
        for start in range(0, whole, turn):
            if start:
                time.sleep(TURN_S)
            data = array("I", token_ids[start : min(start + turn, whole)]).tobytes()
            for at in range(0, len(data), width):
                state.update(data[at : at + width])
                # One state runs through all blocks: each digest covers all before it.
                ids[block] = int.from_bytes(state.copy().digest(), "little") >> 1
                block += 1
        return ids
