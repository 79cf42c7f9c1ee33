"""The prompts whose answers are still to come, found by the engine's request id.

Clients may choose that id, and so any number of prompts may bear the same at one time: then
the prompt's length distinguishes them, or their blocks are left out. Every step takes the same
time however many there are.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tuner.recorder.messages import Asked

MAX_OPEN_BYTES: Final = 1 << 26
"""Ours: 64 MiB, a thousand prompts of 131,072 tokens in blocks of 16, or some 50,000 short
ones; many times what one server has in flight."""

PROMPT_BYTES: Final = 1200
"""What an open prompt takes beside its id and its blocks; measured by a test."""


@dataclass(slots=True, eq=False)
class OpenPrompt:
    """A prompt whose answers are not all reported; length is None where it is not known.

    `ids` are those of its blocks, None where they are not known.
    """

    request_id: str
    number: int
    order: int
    length: int | None
    ids: array[int] | None
    answers_left: int

    @property
    def weight_bytes(self) -> int:
        """What it takes in memory, about."""
        blocks = 0 if self.ids is None else self.ids.itemsize * len(self.ids)
        return PROMPT_BYTES + sys.getsizeof(self.request_id) + blocks

    def fits(self, length: int) -> bool:
        """Return whether a request of this many prompt tokens can be the one that was asked."""
        return self.length is None or self.length == length


@dataclass(slots=True, eq=False)
class _Alike:
    """The open prompts of one id and one length, in the order in which they were asked.

    `kinds` counts how many of them have which blocks. The last block stands for all before it,
    so its hash is enough; None stands for unknown blocks. Up to the order `unknown_to` their
    blocks are no longer distinguished.
    """

    prompts: OrderedDict[int, OpenPrompt] = field(default_factory=OrderedDict)
    kinds: Counter[int | None] = field(default_factory=Counter)
    unknown_to: int = -1

    def add(self, prompt: OpenPrompt) -> None:
        self.prompts[prompt.order] = prompt
        self.kinds[self._kind(prompt)] += 1

    def remove(self, prompt: OpenPrompt) -> None:
        del self.prompts[prompt.order]
        kind = self._kind(prompt)
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]

    def first(self) -> OpenPrompt:
        return next(iter(self.prompts.values()))

    def confuse(self) -> None:
        """Forget the blocks of all that are open now."""
        self.unknown_to = next(reversed(self.prompts))
        self.kinds = Counter({None: len(self.prompts)})

    def blocks(self, prompt: OpenPrompt) -> array[int] | None:
        return None if prompt.order <= self.unknown_to else prompt.ids

    def _kind(self, prompt: OpenPrompt) -> int | None:
        ids = self.blocks(prompt)
        if ids is None:
            return None
        return ids[-1] if ids else -1


class OpenPrompts:
    """What is open, in the order in which it was asked; beyond its bound the oldest go."""

    def __init__(self, most_bytes: int = MAX_OPEN_BYTES) -> None:
        self._most_bytes = most_bytes
        self._all: OrderedDict[tuple[str, int], OpenPrompt] = OrderedDict()
        self._alike: dict[tuple[str, int | None], _Alike] = {}
        self._asked = 0
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, asked: Asked, ids: array[int] | None) -> None:
        """Take a prompt and the ids of its blocks, None where they are not known."""
        self.close([(asked.request_id, asked.number)])
        length = None if asked.token_ids is None else len(asked.token_ids)
        prompt = OpenPrompt(
            asked.request_id, asked.number, self._asked, length, ids, asked.answers
        )
        self._asked += 1
        self._all[prompt.request_id, prompt.number] = prompt
        self._alike.setdefault((prompt.request_id, length), _Alike()).add(prompt)
        self.held_bytes += prompt.weight_bytes
        while self.held_bytes > self._most_bytes and self._all:
            self._drop_oldest()

    def answered(self, request_id: str, length: int) -> array[int] | None:
        """Return the blocks of the prompt that one more answer is reported for.

        None where they are not known, or where the prompt cannot be identified.
        """
        both = [self._alike.get((request_id, one)) for one in (length, None)]
        fitting = [one for one in both if one is not None]
        if not fitting:
            return None
        if len({kind for one in fitting for kind in one.kinds}) > 1:
            # Which of them this is, is unknown; so none of them has blocks from here on.
            for one in fitting:
                one.confuse()
        alike = min(fitting, key=lambda one: one.first().order)
        prompt = alike.first()
        ids = alike.blocks(prompt)
        prompt.answers_left -= 1
        if not prompt.answers_left:
            self._remove(prompt)
        return ids

    def find(self, request_id: str, number: int) -> OpenPrompt | None:
        """Return the prompt if it is still open."""
        return self._all.get((request_id, number))

    def blocks(self, prompt: OpenPrompt) -> array[int] | None:
        """Return the ids of an open prompt's blocks, None where they are not known."""
        return self._alike[prompt.request_id, prompt.length].blocks(prompt)

    def close(self, asked: Iterable[tuple[str, int]]) -> None:
        """Let go of prompts by id and number, those that are still open."""
        for key in asked:
            prompt = self._all.get(key)
            if prompt is not None:
                self._remove(prompt)

    def clear(self) -> None:
        """Let go of all prompts: nothing is recorded any more."""
        self._all.clear()
        self._alike.clear()
        self.held_bytes = 0

    def _drop_oldest(self) -> None:
        prompt = next(iter(self._all.values()))
        alike = self._alike[prompt.request_id, prompt.length]
        self._remove(prompt)
        if alike.prompts:
            # Its answer may yet be reported, and would be taken for one of theirs.
            alike.confuse()

    def _remove(self, prompt: OpenPrompt) -> None:
        del self._all[prompt.request_id, prompt.number]
        key = (prompt.request_id, prompt.length)
        alike = self._alike[key]
        alike.remove(prompt)
        if not alike.prompts:
            del self._alike[key]
        self.held_bytes -= prompt.weight_bytes
