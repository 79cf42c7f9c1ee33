"""Several recordings into one: files of one data set, sessions side by side, two workloads.

Answers when each of them starts on the common clock, and keeps apart what must not mix: hash
ids of different scope, and who waits for whom.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.errors import TraceError
from tuner.hashes import HashIds, offsets_of
from tuner.read_notes import ReadNotes
from tuner.traces import ClockOrigin, Trace
from tuner.turns import Turns


def merge(traces: Sequence[Trace], starts_s: Sequence[float] | None = None) -> Trace:
    """Return all requests of several traces, in due order.

    Traces whose clock is the calendar, or one that they share, keep their distance in time.
    Others start together, or at `starts_s` [traces] on the common clock.

    Raises: TraceError if there is none, if one records requests in flight in place of
        arrivals, or if hash blocks differ in size.
    """
    if not traces:
        raise TraceError("there is no trace to merge", "name at least one file")
    if len(traces) == 1:
        return traces[0]
    for trace in traces:
        if trace.concurrency is not None:
            raise TraceError(
                f"{trace.source} records requests in flight, which cannot be merged",
                "replay it alone with --load-model closed",
            )
    starts, zero_s = (list(starts_s), 0.0) if starts_s is not None else _starts(traces)
    due_s = np.concatenate([t.due_s + s for t, s in zip(traces, starts, strict=True)])
    order = np.argsort(due_s, kind="stable")
    hashes, turns = _hashes(traces), _turns(traces)
    origins = {trace.origin for trace in traces}
    return Trace(
        due_s=due_s[order] - due_s[order[0]],
        prompt_tokens=np.concatenate([t.prompt_tokens for t in traces])[order],
        output_tokens=np.concatenate([t.output_tokens for t in traces])[order],
        hashes=hashes.take(order) if hashes is not None else None,
        e2e_s=_latencies(traces, lambda t: t.e2e_s, order),
        ttft_s=_latencies(traces, lambda t: t.ttft_s, order),
        turns=turns.take(order) if turns is not None else None,
        request_ids=_request_ids(traces, order),
        source=f"{traces[0].source} and {len(traces) - 1} more",
        format="+".join(sorted({trace.format for trace in traces})),
        sha256=hashlib.sha256("".join(t.sha256 for t in traces).encode()).hexdigest(),
        notes=reduce(ReadNotes.and_those_of, [trace.notes for trace in traces]),
        origin=origins.pop() if len(origins) == 1 else ClockOrigin.OWN,
        zero_s=zero_s + float(due_s[order[0]]),
        hash_scope=_scope(traces),
    )


def have_one_clock(traces: Sequence[Trace]) -> bool:
    """Say whether the traces' own clocks tell when each of them starts."""
    origins = {trace.origin for trace in traces}
    return len(origins) == 1 and ClockOrigin.OWN not in origins


def _starts(traces: Sequence[Trace]) -> tuple[list[float], float]:
    """Return when each trace starts, and what the common clock showed at 0."""
    if not have_one_clock(traces):
        return [0.0] * len(traces), 0.0
    first_s = min(trace.zero_s for trace in traces)
    return [trace.zero_s - first_s for trace in traces], first_s


def _hashes(traces: Sequence[Trace]) -> HashIds | None:
    """Join the ids; those of different scopes are renumbered, so that they stay different."""
    known = [trace.hashes for trace in traces if trace.hashes is not None]
    if not known:
        return None
    sizes = sorted({hashes.block_size for hashes in known})
    if len(sizes) > 1:
        raise TraceError(
            f"hash blocks differ in size ({', '.join(map(str, sizes))} tokens): which prompts "
            "share a prefix across the files is not known",
            "merge traces of one block size, or drop hash_ids from one of them",
        )
    counts = [
        np.zeros(len(t), dtype=np.int64) if t.hashes is None else t.hashes.counts
        for t in traces
    ]
    ids = np.concatenate([hashes.ids for hashes in known])
    scopes = [trace.hash_scope for trace in traces if trace.hashes is not None]
    if len(set(scopes)) > 1:
        ids = _kept_apart(ids, np.repeat(scopes, [hashes.ids.size for hashes in known]))
    return HashIds(offsets_of(np.concatenate(counts)), ids, sizes[0])


def _kept_apart(ids: Ints, scopes: npt.NDArray[np.str_]) -> Ints:
    """Return dense numbers that differ wherever id or scope does; ids may be any 64 bits."""
    apart, used = np.empty_like(ids), 0
    for scope in np.unique(scopes):
        mine = scopes == scope
        names, places = np.unique(ids[mine], return_inverse=True)
        apart[mine] = places + used
        used += len(names)
    return apart


def _scope(traces: Sequence[Trace]) -> str:
    """Return the scope of the joined ids: the common one, or a new one of all together."""
    scopes = sorted({trace.hash_scope for trace in traces if trace.hashes is not None})
    if len(scopes) < 2:
        return scopes[0] if scopes else ""
    return hashlib.sha256(" ".join(scopes).encode()).hexdigest()


def _turns(traces: Sequence[Trace]) -> Turns | None:
    if all(trace.turns is None for trace in traces):
        return None
    after, pause_s, rows = [], [], 0
    for trace in traces:
        if trace.turns is None:
            after.append(np.full(len(trace), -1, dtype=np.int64))
            pause_s.append(np.zeros(len(trace)))
        else:
            after.append(np.where(trace.turns.after >= 0, trace.turns.after + rows, -1))
            pause_s.append(trace.turns.pause_s)
        rows += len(trace)
    return Turns(np.concatenate(after), np.concatenate(pause_s))


def _latencies(
    traces: Sequence[Trace], of: Callable[[Trace], Floats | None], order: Ints
) -> Floats | None:
    columns = [of(trace) for trace in traces]
    if all(column is None for column in columns):
        return None
    filled = [
        np.full(len(trace), np.nan) if column is None else column
        for trace, column in zip(traces, columns, strict=True)
    ]
    joined: Floats = np.concatenate(filled)[order]
    return joined


def _request_ids(traces: Sequence[Trace], order: Ints) -> tuple[str, ...] | None:
    if all(trace.request_ids is None for trace in traces):
        return None
    names = [name for t in traces for name in (t.request_ids or ("",) * len(t))]
    return tuple(names[i] for i in order.tolist())
