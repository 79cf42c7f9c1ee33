"""Why a recording may mislead: what the clock, the lengths or the load of a trace cannot show.

Each doubt is a warning with its numbers; none stops anything. The numbers of the trace
themselves are the business of `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.errors import Caveat
from tuner.spreading import MANY_ROWS, clock_tick_s, tied_ratio
from tuner.traces import Trace

_UNIFORM_SPREAD = 1.1
"""Ours: p90 within 10 % of p10; the narrowest public trace has a ratio above 5."""

_MANY_ABORTED = 0.01
"""Ours: the share past which a p99 of all answers may hang on lengths that nobody recorded."""

_SILENCE_S = 30.0
_SILENCE_GAPS = 20.0
"""Ours: a silence is worth a word when it is half a minute and twenty mean gaps long."""


@dataclass(frozen=True, slots=True)
class TraceWarning:
    """A reason to doubt what the trace shows: a short code, and a sentence with its numbers."""

    code: str
    text: str

    @property
    def caveat(self) -> Caveat | None:
        """The caveat that the result must carry, if this is one."""
        return Caveat(self.code) if self.code in set(Caveat) else None


def doubts(
    trace: Trace, *, peak_in_flight: int, recorded_ratio: float, largest_cap: int
) -> tuple[TraceWarning, ...]:
    """Return every reason to doubt the trace, the gravest about reading first."""
    found = [
        _sampled_warning(trace),
        _closed_warning(trace),
        _aborted_warning(trace),
        *(TraceWarning("remark", remark) for remark in trace.notes.remarks),
        _order_warning(trace),
        _clock_warning(trace.due_s),
        _uniform_warning(trace),
        _silence_warning(trace.due_s),
        _latency_warning(recorded_ratio),
        _demand_warning(peak_in_flight, largest_cap),
    ]
    return tuple(warning for warning in found if warning is not None)


def _sampled_warning(trace: Trace) -> TraceWarning | None:
    if not trace.notes.sampled_from:
        return None
    return TraceWarning(
        Caveat.SAMPLED_TRACE,
        f"sampled from {trace.notes.sampled_from}, not recorded: bursts within its windows and "
        "which prompt came with which answer are drawn at random",
    )


def _closed_warning(trace: Trace) -> TraceWarning | None:
    if trace.concurrency is None:
        return None
    return TraceWarning(
        Caveat.CLOSED_LOOP,
        "a recording of requests in flight, not of arrivals: it is replayed in a closed loop, "
        "whose latencies never compare with an open one",
    )


def _aborted_warning(trace: Trace) -> TraceWarning | None:
    if trace.notes.aborted <= _MANY_ABORTED * trace.notes.rows:
        return None
    return TraceWarning(
        Caveat.ANSWERS_CUT,
        f"clients left before {trace.notes.aborted:,} answers were whole: what they asked for "
        "is not recorded, compare with --aborted keep, which is the least that it was",
    )


def _order_warning(trace: Trace) -> TraceWarning | None:
    if not trace.notes.moved:
        return None
    return TraceWarning(
        "unsorted",
        f"{trace.notes.moved:,} rows were out of order in the file and have been sorted",
    )


def _clock_warning(due_s: Floats) -> TraceWarning | None:
    tick_s = clock_tick_s(due_s)
    if tick_s is None:
        return None
    return TraceWarning(
        Caveat.QUANTISED_CLOCK,
        f"the clock ticks every {tick_s:.3g} s and {tied_ratio(due_s):.0%} of the requests "
        "share an instant: these bursts may be the clock's, not the users'; --spread undoes it",
    )


def _uniform_warning(trace: Trace) -> TraceWarning | None:
    columns = {"prompt": trace.prompt_tokens, "output": trace.output_tokens}
    uniform = [name for name, tokens in columns.items() if _is_uniform(tokens)]
    if not uniform:
        return None
    return TraceWarning(
        Caveat.UNIFORM_TRACE,
        f"{' and '.join(uniform)} lengths are nearly all equal: uniform data misleads, "
        "replay recorded lengths",
    )


def _is_uniform(tokens: Ints) -> bool:
    if tokens.size < MANY_ROWS:
        return False
    low, high = np.quantile(tokens, (0.1, 0.9))
    return bool(high <= _UNIFORM_SPREAD * low)


def _silence_warning(due_s: Floats) -> TraceWarning | None:
    gaps = np.diff(due_s)
    longest_s = float(gaps.max(initial=0.0))
    if longest_s < _SILENCE_S or longest_s < _SILENCE_GAPS * gaps.mean():
        return None
    return TraceWarning(
        "long_silence",
        f"the longest silence is {longest_s:,.0f} s: the mean rate hides how busy the rest is",
    )


def _latency_warning(recorded_ratio: float) -> TraceWarning | None:
    if recorded_ratio in (0.0, 1.0):
        return None
    return TraceWarning(
        "latency_gaps",
        f"{1 - recorded_ratio:.1%} of the requests have no recorded latency; theirs "
        "is estimated from their output tokens",
    )


def _demand_warning(peak: int, largest_cap: int) -> TraceWarning | None:
    if peak >= largest_cap:
        return None
    return TraceWarning(
        Caveat.LOW_DEMAND,
        f"at most {peak} requests are in flight at once: caps above "
        f"{peak} cannot be told apart at this load",
    )
