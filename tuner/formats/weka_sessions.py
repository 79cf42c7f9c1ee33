"""Agent sessions laid out in time: nested lists of requests as rows that know whom they await.

Answers when each request of a session and of its sub-agents was sent, and which answer it
followed. What stands in a file, and what is wrong there, is the business of `weka`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.turns import Turns, pauses_of

CLOCK_S = 1.0
"""Source: the sessions' own t is in whole seconds, while that of sub-agents has fractions."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One recorded request, in the terms of the list that it stands in.

    Units: t_s from the start of the list; api_s, ttft_s and think_s are nan where missing.
    """

    t_s: float
    prompt_tokens: int
    output_tokens: int
    ids: Ints | None
    api_s: float
    ttft_s: float
    think_s: float
    model: str | None

    @property
    def end_s(self) -> float:
        """When its answer ended, or where that is not known, when it was sent."""
        return self.t_s if math.isnan(self.api_s) else self.t_s + self.api_s


@dataclass(frozen=True, slots=True, eq=False)
class SubAgent:
    """Requests that another agent sent on behalf of the session; duration_s may be nan."""

    t_s: float
    duration_s: float
    items: tuple[Request | SubAgent, ...]


Item = Request | SubAgent


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The requests of a session in file order, when they were sent, and whom they awaited.

    Shapes: requests, start_s and turns are [n].
    Units: seconds from the session's start.
    """

    requests: tuple[Request, ...]
    start_s: Floats
    turns: Turns
    remarks: tuple[str, ...]


def lay_out(items: Sequence[Item]) -> Layout:
    """Return all requests of a session and of its sub-agents on the session's clock.

    A request follows the answer before it in its list, or the last answer of a sub-agent
    started in between if that ended later. A sub-agent's first request follows its parent's
    last request before it. Who awaits whom was always sent later, so there is no circle.
    """
    timeline = _Timeline()
    timeline.lay(items, 0.0, -1)
    return timeline.layout()


class _Timeline:
    """The rows so far; `after` and its like hold row numbers, -1 for none."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.start_s: list[float] = []
        self.after: list[int] = []
        self.is_next: list[bool] = []
        self.moved_agents = 0
        self.unawaited_agents = 0

    def lay(self, items: Sequence[Item], zero_s: float, anchor: int) -> None:
        """Add a list whose t counts from zero_s and whose first request follows `anchor`."""
        t_is_end = _t_is_the_end(items)
        mine: list[int] = []
        agents: list[int] = []
        for item in items:
            if isinstance(item, SubAgent):
                agents += self._lay_agent(item, zero_s, (anchor, *mine), t_is_end=t_is_end)
                continue
            start_s = zero_s + item.t_s
            previous = mine[-1] if mine else anchor
            after = self._awaited(start_s, previous, agents)
            self.is_next.append(bool(mine) and after == previous)
            mine.append(len(self.requests))
            self.requests.append(item)
            self.start_s.append(start_s)
            self.after.append(after)
            agents = []

    def _lay_agent(
        self, agent: SubAgent, zero_s: float, before: Iterable[int], *, t_is_end: bool
    ) -> list[int]:
        """Add a sub-agent's requests, and return the one that ended last, if there is any."""
        start_s = zero_s + agent.t_s
        inner_zero_s = start_s
        if _is_absolute(agent, start_s):
            inner_zero_s = 0.0
        elif t_is_end and not math.isnan(agent.duration_s):
            start_s -= agent.duration_s
            inner_zero_s = start_s
            self.moved_agents += 1
        earlier = [row for row in before if row >= 0 and self.start_s[row] <= start_s]
        first = len(self.requests)
        self.lay(agent.items, inner_zero_s, earlier[-1] if earlier else -1)
        rows = range(first, len(self.requests))
        return [max(rows, key=self._end_s)] if rows else []

    def _awaited(self, start_s: float, previous: int, agents: Sequence[int]) -> int:
        """Choose of the request before and the sub-agents since what ended last.

        A sub-agent that went on longer than the clocks are coarse was not waited for.
        """
        in_time = [
            row
            for row in agents
            if self.start_s[row] <= start_s and self._end_s(row) <= start_s + CLOCK_S
        ]
        self.unawaited_agents += len(agents) - len(in_time)
        known = [previous, *in_time] if previous >= 0 else in_time
        return max(known, key=self._end_s, default=-1)

    def _end_s(self, row: int) -> float:
        request = self.requests[row]
        return self.start_s[row] + (request.end_s - request.t_s)

    def layout(self) -> Layout:
        """Return the rows with the pause before each.

        A recorded think_time is the pause after the request before. Where that one's end is
        unknown it was counted from an older answer, so it cannot exceed the time between both.
        """
        start_s = np.array(self.start_s, dtype=np.float64)
        after = np.array(self.after, dtype=np.int64)
        api_s = np.array([request.api_s for request in self.requests], dtype=np.float64)
        think_s = np.array([request.think_s for request in self.requests], dtype=np.float64)
        gaps_s = np.where(after >= 0, start_s - start_s[after], 0.0)
        is_told = np.array(self.is_next, dtype=np.bool_) & ~np.isnan(think_s)
        pauses_s = pauses_of(after, start_s, api_s).pause_s
        pauses_s = np.where(is_told, np.minimum(think_s, gaps_s), pauses_s)
        is_unknown = (after >= 0) & np.isnan(api_s[after]) & (gaps_s > 0) & (pauses_s >= gaps_s)
        remarks = self._remarks(int(is_unknown.sum()))
        return Layout(tuple(self.requests), start_s, Turns(after, pauses_s), remarks)

    def _remarks(self, unknown_ends: int) -> tuple[str, ...]:
        told = (
            (
                unknown_ends,
                "answers without a recorded end (api_time): {:,}; the pause after each counts "
                "from when its request was sent",
            ),
            (
                self.moved_agents,
                "sub-agents placed by their end: {:,}; were their t the start, duration_ms "
                "would reach past the requests that came after them",
            ),
            (
                self.unawaited_agents,
                "sub-agents that went on after their parent's next request: {:,}; nobody waits "
                "for their answers",
            ),
        )
        return tuple(text.format(count) for count, text in told if count)


def _is_absolute(agent: SubAgent, start_s: float) -> bool:
    """Say whether a sub-agent's requests count from the session's start.

    Some captures write them so. Requests that count from the sub-agent begin before its t.
    """
    first = next((item for item in agent.items if isinstance(item, Request)), None)
    return first is not None and start_s > 0 and first.t_s >= start_s


def _t_is_the_end(items: Sequence[Item]) -> bool:
    """Say whether the t of a list's sub-agents is when they ended.

    Published sessions log a sub-agent when its result comes back: t less duration_ms is when
    the answer that started it had ended. Other captures log its start. It is taken for the
    start unless that runs past the next request, and the end fits everywhere.
    """
    next_s, upcoming_s = [], math.inf
    for item in reversed(items):
        next_s.append(upcoming_s)
        upcoming_s = item.t_s if isinstance(item, Request) else upcoming_s
    fits_start = fits_end = True
    ended_s = -CLOCK_S
    for item, until_s in zip(items, reversed(next_s), strict=True):
        if isinstance(item, Request):
            ended_s = item.end_s
        elif not math.isnan(item.duration_s) and not _is_absolute(item, item.t_s):
            fits_start &= item.t_s + item.duration_s <= until_s + CLOCK_S
            fits_end &= ended_s - CLOCK_S <= item.t_s - item.duration_s
            fits_end &= item.t_s <= until_s + CLOCK_S
    return fits_end and not fits_start
