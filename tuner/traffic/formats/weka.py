"""Recorded agent sessions: one JSON object per file, hash ids, and sub-agents in nested lists.

Other tools call the format "weka". Its times are seconds from the start of the session, and
its hash ids stand for blocks of the file's own block_size, in published files only within it.
A session and its sub-agents are laid out on one clock: when each request was sent, and which
answer it awaited.

Source: callanjfox/kv-cache-tester, docs/trace_replay_tester.md and traces/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.errors import TraceError
from tuner.stats import Floats, Ints
from tuner.traffic.formats.columns import (
    Columns,
    Labels,
    ReadOptions,
    Skipped,
    TraceFormat,
    no_time_unit,
    recorded,
    shown,
    starts_object,
    tokens_fault,
)
from tuner.traffic.formats.json_document import (
    MAX_SECONDS,
    number_or_nan,
    read_object,
    seconds_fault,
)
from tuner.traffic.formats.jsonl_rows import ZERO_HINT, Fault, ids_faults
from tuner.traffic.prefixes import MAX_SIZE, HashIds, offsets_of
from tuner.traffic.traces import ClockOrigin, Turns, ZeroOutput, pauses_of

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
    """The requests of a session in file order, when they were sent, what they awaited.

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
    last request before it. A request is always sent later than what it awaits: no circle.
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
        notes = (
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
        return tuple(text.format(count) for count, text in notes if count)


def _is_absolute(agent: SubAgent, start_s: float) -> bool:
    """Return whether a sub-agent's requests count from the session's start.

    Some captures write them so. Requests that count from the sub-agent begin before its t.
    """
    first = next((item for item in agent.items if isinstance(item, Request)), None)
    return first is not None and start_s > 0 and first.t_s >= start_s


def _t_is_the_end(items: Sequence[Item]) -> bool:
    """Return whether the t of a list's sub-agents is when they ended.

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


MAX_DEPTH = 32
"""Ours: published sub-agents start no others; deeper nesting is no session."""

_REQUESTS = re.compile(rb'"requests"\s*:\s*\[')
_MARKS = (b'"hash_id_scope"', b'"block_size"', b'"tool_tokens"')
_LOCAL_SCOPES = {"local": True, "global": False}


def matches(head: bytes) -> bool:
    """Return whether the file starts like one object that holds a session's requests."""
    has_requests = _REQUESTS.search(head) is not None
    return starts_object(head) and has_requests and any(mark in head for mark in _MARKS)


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns, sub-agents' requests included.

    Raises: TraceError that names the first wrong request by its number in the file.
    """
    no_time_unit(path, options)
    return _Reader(path, options, read_object(path)).read()


class _Reader:
    """One session being read; requests are numbered from 1, with those of sub-agents."""

    def __init__(self, path: Path, options: ReadOptions, session: dict[str, object]) -> None:
        self._path, self._session = path, session
        self._zero_is_fault = options.zero_output is ZeroOutput.REFUSE
        self._block_size = self._checked_block_size(options)
        self._skipped = Skipped(path, options)
        self._requests = self._agents = 0

    def read(self) -> Columns:
        """Return the columns."""
        scope = self._session.get("hash_id_scope", "local")
        if not isinstance(scope, str) or scope not in _LOCAL_SCOPES:
            reason = f'hash_id_scope must be "local" or "global", got {shown(scope)}'
            raise TraceError(f"{self._path}: {reason}", "convert it with --trace-format native")
        items = self._items(self._session.get("requests"), 0)
        self._skipped.check(self._requests)
        if not self._requests:
            raise TraceError(f"{self._path} holds no request", "record some traffic first")
        return self._columns(lay_out(items), is_local=_LOCAL_SCOPES[scope])

    def _columns(self, layout: Layout, *, is_local: bool) -> Columns:
        requests = layout.requests
        e2e_s = np.array([request.api_s for request in requests], dtype=np.float64)
        ttft_s = np.array([request.ttft_s for request in requests], dtype=np.float64)
        models = Labels.of(request.model for request in requests)
        return Columns(
            arrived=layout.start_s,
            ticks_per_s=1.0,
            prompt_tokens=np.array([r.prompt_tokens for r in requests], dtype=np.int64),
            output_tokens=np.array([r.output_tokens for r in requests], dtype=np.int64),
            hashes=self._hashes([request.ids for request in requests]),
            e2e_s=recorded(e2e_s),
            ttft_s=recorded(ttft_s),
            models=models if models.names else None,
            turns=layout.turns,
            origin=ClockOrigin.OWN,
            local_hashes=is_local,
            skipped=self._skipped.by_reason,
            remarks=layout.remarks,
        )

    def _hashes(self, rows: list[Ints | None]) -> HashIds | None:
        known = [ids for ids in rows if ids is not None]
        if not known:
            return None
        counts = np.array([0 if ids is None else len(ids) for ids in rows], dtype=np.int64)
        return HashIds(offsets_of(counts), np.concatenate(known), self._block_size)

    def _checked_block_size(self, options: ReadOptions) -> int:
        size = options.hash_block_size or self._session.get("block_size")
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < MAX_SIZE:
            reason = f"block_size must be a whole number above 0, got {shown(size)}"
            hint = "pass --hash-block-size with the one that the ids were recorded with"
            raise TraceError(f"{self._path}: {reason}", hint)
        return size

    def _items(self, rows: object, depth: int) -> tuple[Item, ...]:
        """Return the right ones of a list; t must not fall within it."""
        if not isinstance(rows, list):
            reason = f"requests must be a list, got {shown(rows)}"
            raise TraceError(f"{self._path}: {reason}", "give one session per file")
        if depth > MAX_DEPTH:
            reason = f"sub-agents must be nested at most {MAX_DEPTH} deep"
            raise TraceError(f"{self._path}: {reason}", "give the session as it was published")
        items: list[Item] = []
        reached_s = 0.0
        for row in rows:
            if isinstance(row, dict) and row.get("type") == "subagent":
                item: Item | None = self._agent(row, depth)
            else:
                item = self._request(row, reached_s)
                reached_s = reached_s if item is None else item.t_s
            if item is not None:
                items.append(item)
        return tuple(items)

    def _agent(self, row: dict[str, object], depth: int) -> SubAgent | None:
        self._agents += 1
        t, duration_ms = row.get("t"), row.get("duration_ms")
        fault = seconds_fault("t", t) if "t" in row else "lacks t"
        if fault is None and duration_ms is not None and not _is_duration_ms(duration_ms):
            got = shown(duration_ms)
            fault = f"duration_ms must be a number of milliseconds, at least 0, got {got}"
        if fault is not None:
            self._skipped.add(f"sub-agent {self._agents}", fault)
            return None
        items = self._items(row.get("requests", []), depth + 1)
        return SubAgent(number_or_nan(t), number_or_nan(duration_ms) / 1000, items)

    def _request(self, row: object, reached_s: float) -> Request | None:
        self._requests += 1
        place = f"request {self._requests}"
        if not isinstance(row, dict):
            self._skipped.add(place, f"must be a JSON object, got {shown(row)}")
            return None
        fault = next(self._faults(row, reached_s), None)
        if fault is not None:
            self._skipped.add(place, *fault)
            return None
        ids = row.get("hash_ids")
        return Request(
            t_s=number_or_nan(row["t"]),
            prompt_tokens=row["in"],
            output_tokens=row["out"],
            ids=None if ids is None else np.array(ids, dtype=np.int64),
            api_s=number_or_nan(row.get("api_time")),
            ttft_s=number_or_nan(row.get("ttft")),
            think_s=number_or_nan(row.get("think_time")),
            model=row.get("model"),
        )

    def _faults(self, row: dict[str, Any], reached_s: float) -> Iterator[Fault]:
        """Yield (reason, hint) of each fault of one request; only the first is sure."""
        yield from ((f"lacks {name}", "") for name in ("t", "in", "out") if name not in row)
        for name in ("t", "api_time", "ttft", "think_time"):
            if (row.get(name) is not None or name == "t") and (
                fault := seconds_fault(name, row[name])
            ):
                yield fault, ""
        if row["t"] < reached_s:
            before = f"{reached_s:g}, that of the request before it"
            yield f"t must not be less than {before}, got {shown(row['t'])}", ""
        for name in ("in", "out"):
            if fault := tokens_fault(name, row[name], zero_is_fault=self._zero_is_fault):
                yield fault, ZERO_HINT if row[name] == 0 else ""
        if not isinstance(row.get("model"), str | None):
            yield f"model must be text, got {shown(row['model'])}", ""
        if row.get("hash_ids") is not None:
            yield from ids_faults(row["hash_ids"], row["in"], self._block_size)


def _is_duration_ms(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= MAX_SECONDS * 1000


WEKA = TraceFormat(name="weka", matches=matches, read=read)
