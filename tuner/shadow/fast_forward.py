"""Requests that do nothing but decode, taken out of the scheduler's sight for a while.

As long as blocks suffice, what vLLM's scheduler decides about such a request is known: one
token in every step. So it need not be asked. Hidden requests count against cap and budget,
their blocks are accounted for, and before anything could come out differently (blocks running
short) they are put back, with all they have done, for vLLM to decide.

Only the first requests of the running list are hidden, up to the first that does not decode:
the scheduler serves its list in order, so those behind a long prompt may have to wait.

With asynchronous scheduling a batch is scheduled while the one before is on its way. A request
whose last token is on its way is scheduled no more, but holds its place and its blocks until
that token is there: it lingers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.protocol import Rows
from tuner.engine.shape import EngineShape


@dataclass(slots=True)
class _Hidden:
    """One hidden request: its place, when it joined, and how much of it vLLM has been told."""

    request: Any
    row: int
    order: int
    joined: int
    computed: int
    told: int
    owed: int = 0
    until: int | None = None

    @property
    def lingers(self) -> bool:
        """Whether it has been scheduled to its last token, in the step `until`."""
        return self.until is not None


@dataclass(frozen=True, slots=True)
class Advance:
    """What several steps of the hidden requests come to.

    Units: blocks, of which used_mean is the mean over the steps, used_peak those of the last
        step and used_before those of the one before.
    """

    steps: int
    used_mean: float
    used_peak: int
    used_before: int


class HiddenDecodes:
    """The hidden requests, counted in steps since the engine began."""

    def __init__(self, core: SchedulerCore, max_model_len: int) -> None:
        self._core = core
        self._max_model_len = max_model_len
        self._hidden: dict[int, _Hidden] = {}
        self._ends: list[tuple[int, int, int]] = []
        self._growths: list[tuple[int, int, int]] = []
        self._now = self._order = 0
        self._owed = 0
        self._rows: Rows | None = None
        self._lingering = 0
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self._hidden)

    @property
    def decoding(self) -> int:
        """How many of them still have tokens to be scheduled."""
        return len(self._hidden) - self._lingering

    @property
    def rows(self) -> Rows:
        """Return the rows that the next step decodes."""
        if self._rows is None:
            found = (row for row, one in self._hidden.items() if not one.lingers)
            self._rows = np.fromiter(found, dtype=np.int64, count=self.decoding)
        return self._rows

    @property
    def free_blocks(self) -> int:
        """Blocks that are free, less those that hidden requests use but vLLM does not know."""
        return self._core.free_blocks - self._owed

    def hide(self) -> None:
        """Hide every request that only decodes, up to the first that does not."""
        found = 0
        for request in self._core.running:
            if not self._core.only_decodes(request):
                break
            self._hide(request)
            found += 1
        if found:
            self._core.hide_first(found)
            self._rows = None

    def _hide(self, request: Any) -> None:
        row, computed = int(request.request_id), int(request.num_computed_tokens)
        left = self._core.left_to_schedule(request, self._max_model_len)
        order = self._order = self._order + 1
        self._hidden[row] = _Hidden(request, row, order, self._now, computed, self._now)
        heapq.heappush(self._ends, (self._now + left, order, row))
        until_full = -computed % self._core.block_size
        heapq.heappush(self._growths, (self._now + until_full + 1, order, row))
        self.context_tokens += computed + 1

    def _living(self, entry: tuple[int, int, int]) -> _Hidden | None:
        """Return who an entry of a heap is about, unless it is gone or scheduled no more."""
        one = self._hidden.get(entry[2])
        if one is None or one.order != entry[1] or one.lingers:
            return None
        return one

    def steps_to_next_end(self) -> int:
        """Return after how many steps the next hidden request has all its tokens."""
        while self._living(self._ends[0]) is None:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._now

    def advance(self, most: int, spare: int = 0) -> Advance:
        """Let every hidden request decode as many steps as blocks allow, at most so many.

        Nobody ends on the way but with the last step. Steps are 0 if fewer than `spare` blocks
        would be left at once.
        """
        used = self._core.all_blocks - self.free_blocks
        free = max(0, self.free_blocks - spare)
        taken = self._growths_within(most)
        if len(taken) > free:
            # The block that is one too many is wanted in this step, which cannot be taken.
            most = taken[free][0] - self._now - 1
            self._undo([entry for entry in taken if entry[0] > self._now + most])
            taken = [entry for entry in taken if entry[0] <= self._now + most]
        if most <= 0:
            return Advance(0, used, used, used)
        before = used + sum(entry[0] < self._now + most for entry in taken)
        held = sum(self._now + most + 1 - entry[0] for entry in taken)
        for _, _, row in taken:
            self._grow(self._hidden[row])
        self._now += most
        self.context_tokens += most * self.decoding
        return Advance(most, used + held / most, used + len(taken), before)

    def _growths_within(self, steps: int) -> list[tuple[int, int, int]]:
        """Take out when which request wants one more block, and note when it wants the next."""
        taken, until = [], self._now + steps
        while self._growths and self._growths[0][0] <= until:
            entry = heapq.heappop(self._growths)
            if self._living(entry) is not None:
                taken.append(entry)
                heapq.heappush(self._growths, (entry[0] + self._core.block_size, *entry[1:]))
        return taken

    def _undo(self, taken: list[tuple[int, int, int]]) -> None:
        """Put back what was taken out, and forget what it led to."""
        gone = {(entry[0] + self._core.block_size, *entry[1:]) for entry in taken}
        self._growths = [e for e in {*self._growths, *taken} if e not in gone]
        heapq.heapify(self._growths)

    def _grow(self, one: _Hidden) -> None:
        """Let a request have one more block, at once where one that is cached may go for it."""
        if self._core.caches:
            self._core.take_block(one.request)
        else:
            one.owed += 1
            self._owed += 1

    def _tell(self, one: _Hidden, step: int) -> None:
        """Bring vLLM's books about a request up to date with a step that it has taken."""
        if step > one.told:
            self._core.decode(one.request, step - one.told)
            one.told = step
            self._owed -= one.owed
            one.owed = 0

    def take_last(self) -> list[int]:
        """Return the rows that have been scheduled to their last token; they linger now."""
        taken = []
        while self._ends and self._ends[0][0] <= self._now:
            one = self._living(heapq.heappop(self._ends))
            if one is not None:
                taken.append(one.row)
                self._let_linger(one)
        return taken

    def _let_linger(self, one: _Hidden) -> None:
        one.until = self._now
        self._lingering += 1
        self.context_tokens -= one.computed + self._now - one.joined + 1
        self._rows = None

    def end(self, rows: list[int]) -> None:
        """Let vLLM end rows whose last token is there."""
        for row in rows:
            one = self._hidden[row]
            if self._core.caches and one.until is not None:
                self._tell(one, one.until)
            self._forget(one)
        if rows:
            self._core.end(rows)

    def _forget(self, one: _Hidden) -> None:
        if one.lingers:
            self._lingering -= 1
        else:
            self.context_tokens -= one.computed + self._now - one.joined + 1
        del self._hidden[one.row]
        self._owed -= one.owed
        self._rows = None

    def drop(self, rows: list[int]) -> None:
        """Forget requests that are going to be aborted."""
        # Of the step that is on its way with asynchronous scheduling nothing is kept.
        upto = self._now - (self._core.queue_size > 1)
        for row in rows:
            if row in self._hidden:
                if self._core.caches:
                    self._tell(self._hidden[row], upto)
                self._forget(self._hidden[row])

    def pay(self) -> None:
        """Bring vLLM's books up to date; requests stay hidden."""
        for one in self._hidden.values():
            self._tell(one, self._now)

    def show(self, *, on_its_way: bool) -> Any:
        """Put all hidden requests back into the scheduler's sight.

        Where their last step is still on its way, vLLM schedules that step anew, as it would
        have, and its batch is returned; else None.
        """
        upto = self._now - 1 if on_its_way else self._now
        for one in self._hidden.values():
            self._tell(one, upto)
        everybody = [one.request for one in self._hidden.values()]
        again = [one.request for one in self._hidden.values() if one.joined < self._now]
        scheduled = self._core.schedule_again(again) if on_its_way and again else None
        self._core.show_first(everybody)
        self._hidden.clear()
        self._ends.clear()
        self._growths.clear()
        self._rows = None
        self._owed = self._lingering = self.context_tokens = 0
        return scheduled

    def is_short_for(self, room: int) -> bool:
        """Whether the scheduler might take blocks that hidden requests are about to.

        `room` is how many more it could admit.
        """
        size = self._core.block_size
        seen: Iterator[Any] = iter((*self._core.running, *self._core.first_waiting(room)))
        wanted = sum(request.num_tokens // size + 2 for request in seen)
        if self._core.queue_size > 1:
            # What the step after takes cannot be told vLLM before it is completed.
            wanted += 2 * len(self._hidden)
        return bool(self.free_blocks < wanted)


def is_foreseeable(shape: EngineShape) -> bool:
    """Whether requests are served in order, whatever else is in the scheduler's sight."""
    options: Mapping[str, object] = shape.scheduler
    return (
        options.get("policy") in (None, "fcfs")
        and not options.get("long_prefill_token_threshold")
        and not options.get("watermark")
        and options.get("prefill_schedule_interval") in (None, 1)
    )
