"""A trace as it is simulated again and again: laid out once for all settings.

Columns as compiled code takes them, who follows whom, and which beginnings prompts share.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.replay.arrivals import Sessions, StaticBatches, check_arrivals
from tuner.replay.plan import ReplayPlan
from tuner.shadow.compiled import compiled
from tuner.shadow.schedule import layout as s
from tuner.stats import Floats
from tuner.traffic.answers import HeldAnswers, held_answers
from tuner.traffic.traces import LoadModel, Trace


class PreparedTrace:
    """A trace as it is replayed again and again: what does not depend on the setting.

    `of` is the trace that was brought to the plan's load, the trace itself where none is given.

    Raises: TraceError when a closed loop asks for a concurrency that was not recorded, or an
        open one for arrivals that were not; UsageError for a lead-in of a closed loop.
    """

    def __init__(self, trace: Trace, plan: ReplayPlan, *, of: Trace | None = None) -> None:
        check_arrivals(trace, plan.load_model)
        self.trace = trace
        self._of, self._way = trace if of is None else of, _way(trace, plan)
        self.load_model, self.concurrency = plan.load_model, plan.concurrency
        self.batches: StaticBatches | None = plan.batches
        self.prompts = fixed(trace.prompt_tokens, np.int64)
        self.outputs = fixed(plan.answered_tokens(trace.output_tokens), np.int64)
        self.priorities = fixed(
            np.empty(0) if trace.priorities is None else trace.priorities, np.int64
        )
        self.is_causal = _is_causal(trace, plan)
        self.follows, self.followers, self.pauses_s = self._sessions()
        self.end_s, self.targets = self._targets()
        self._longest: dict[int, tuple[int, int]] = {}

    def longest(self, max_model_len: int) -> tuple[int, int]:
        """Return the tokens of the longest request that an engine takes, and of an answer."""
        if max_model_len not in self._longest:
            tokens = self.prompts + self.outputs
            fits = tokens <= max_model_len
            self._longest[max_model_len] = (
                int(tokens[fits].max(initial=0)),
                int(self.outputs[fits].max(initial=0)),
            )
        return self._longest[max_model_len]

    def fits(self, trace: Trace, plan: ReplayPlan) -> bool:
        """Whether a replay of the trace by the plan is one of this trace."""
        return trace is self._of and _way(trace, plan) == self._way

    @property
    def arrivals(self) -> int:
        """How requests arrive, in the words of `schedule`."""
        if self.load_model is LoadModel.CLOSED:
            return s.CLOSED
        if self.batches is not None:
            return s.BATCHES
        return s.CAUSAL if self.is_causal else s.OPEN

    def _sessions(self) -> tuple[NDArray[Any], NDArray[Any], Floats]:
        turns = self.trace.turns
        if not self.is_causal or turns is None:
            nobody = fixed(np.empty(0), np.int64)
            return nobody, nobody, fixed(np.empty(0), np.float64)
        waits = np.flatnonzero(turns.after >= 0)
        followers = waits[np.argsort(turns.after[waits], kind="stable")]
        counts = np.bincount(turns.after[waits], minlength=len(self.trace))
        follows = np.concatenate([[0], np.cumsum(counts)])
        return (
            fixed(follows, np.int64),
            fixed(followers, np.int64),
            fixed(turns.pause_s, np.float64),
        )

    def _targets(self) -> tuple[float, Floats]:
        """Return when a closed loop's recording ends, and how many are to be in flight."""
        if self.load_model is not LoadModel.CLOSED:
            return math.inf, fixed(np.empty((0, 2)), np.float64)
        if self.concurrency is not None:
            return math.inf, fixed(np.array([[0.0, self.concurrency]]), np.float64)
        times_s, in_flight = self.trace.recorded_concurrency()
        end_s = max(float(times_s[-1]), float(self.trace.due_s[-1]))
        return end_s, fixed(np.column_stack([times_s, in_flight]), np.float64)

    @cached_property
    def chains(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]:
        """Number beginnings of prompts: the same number for what is the same up to there.

        Returns the numbers, where each request's begin, how many tokens of each prompt they
        cover, and how many there are.
        """
        hashes = self.trace.hashes
        if hashes is None:
            n = len(self.trace)
            nothing = fixed(np.zeros(1), np.int32)
            return nothing, fixed(np.zeros(n + 1), np.int64), fixed(np.zeros(n), np.int64), 0
        links = np.empty(max(1, hashes.ids.size), dtype=np.int32)
        size = max(16, 1 << (2 * hashes.ids.size - 1).bit_length())
        count = _number_chains(
            fixed(hashes.offsets, np.int64),
            fixed(hashes.ids, np.int64),
            links,
            np.full(size, -1, np.int32),
            np.empty(size, np.int32),
            np.empty(size, np.int64),
        )
        covered = np.minimum(hashes.counts * hashes.block_size, self.trace.prompt_tokens)
        return (
            fixed(links, np.int32),
            fixed(hashes.offsets, np.int64),
            fixed(covered, np.int64),
            int(count),
        )

    @cached_property
    def held(self) -> HeldAnswers | None:
        """Which prompts hold the turn before them, answer included, where turns wait for it."""
        return held_answers(self.trace) if self.is_causal else None

    def own_keys(self, block: int, ahead: int, first_key: int) -> tuple[NDArray[Any], int]:
        """Give keys to the blocks that others hold of a row and that are no beginning.

        A block is one with so many tokens `ahead` of it. Returns for each row the key that its
        first block would have, and how many keys there are with those before `first_key`.

        Shapes: [n].
        """
        firsts = np.zeros(len(self.trace), np.int64)
        if self.held is None:
            return fixed(firsts, np.int64), first_key
        known = np.maximum(np.maximum(self.chains[2], self.held.held) - ahead, 0)
        begins = known // block
        counts = np.maximum((self.held.reached - ahead) // block - begins, 0)
        rows = np.flatnonzero(counts)
        ends = first_key + np.cumsum(counts[rows])
        firsts[rows] = ends - counts[rows] - begins[rows]
        return fixed(firsts, np.int64), int(ends[-1]) if rows.size else first_key

    @cached_property
    def may_share(self) -> bool:
        """Whether any two prompts may begin alike: by their ids, or as turns of a session."""
        if self.held is not None:
            return True
        hashes = self.trace.hashes
        if hashes is None:
            return False
        begun = np.flatnonzero(np.diff(hashes.offsets) > 0)
        first = hashes.ids[hashes.offsets[begun]]
        return bool(np.unique(first).size < first.size)


def _is_causal(trace: Trace, plan: ReplayPlan) -> bool:
    """Whether turns of the trace wait for answers."""
    has_turns = plan.sessions is Sessions.CAUSAL and trace.turns is not None
    return has_turns and plan.load_model is LoadModel.OPEN and plan.batches is None


def _way(trace: Trace, plan: ReplayPlan) -> tuple[object, ...]:
    """Return all of a plan that what is laid out of a trace depends on."""
    answer_cap = None if plan.gate is None else plan.gate.max_output_tokens
    arrivals = (plan.load, plan.load_model, plan.concurrency, plan.batches)
    return (*arrivals, _is_causal(trace, plan), answer_cap)


def fixed(column: NDArray[Any], dtype: type) -> NDArray[Any]:
    """Return a column as compiled code takes it: contiguous, of one type, read-only."""
    fixed: NDArray[Any] = np.ascontiguousarray(column, dtype=dtype).view()
    fixed.flags.writeable = False
    return fixed


@compiled
def _number_chains(
    offsets: NDArray[Any],
    ids: NDArray[Any],
    links: NDArray[Any],
    number: NDArray[Any],
    before: NDArray[Any],
    added: NDArray[Any],
) -> int:
    """Give a number to each beginning of a prompt, by the one before and its last block.

    The last three are a hash table, of a power of two; numbers in it begin with -1.
    """
    size, count = number.size, 0
    for row in range(offsets.size - 1):
        chain = -1
        for i in range(offsets[row], offsets[row + 1]):
            mixed = np.uint64(ids[i]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= np.uint64(chain + 1) * np.uint64(0xC2B2AE3D27D4EB4F)
            mixed ^= mixed >> np.uint64(29)
            at = np.int64((mixed * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(20)) & (size - 1)
            while number[at] >= 0 and not (before[at] == chain and added[at] == ids[i]):
                at = (at + 1) & (size - 1)
            if number[at] < 0:
                before[at], added[at], number[at] = chain, ids[i], count
                count += 1
            chain = number[at]
            links[i] = chain
    return count
