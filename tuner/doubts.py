"""Why a recording may mislead: what the clock, the lengths or the load of a trace cannot show.

Each doubt is a warning with its numbers; none stops anything. The numbers of the trace
themselves are the business of `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.errors import Caveat
from tuner.hashes import Floats, Ints
from tuner.traces import Trace

_MANY_ROWS = 50
"""Ours: below it, equal lengths and shared instants happen by chance or by hand."""

_UNIFORM_SPREAD = 1.1
"""Ours: p90 within 10 % of p10; the narrowest public trace has a ratio above 5."""

_TICK_S = 0.010
"""Ours: a coarser clock delays a request by more than a decode step; a finer one does not."""

_TIED_RATIO = 0.1
"""Ours: one request in ten shares its instant with another."""

_ON_TICK_RATIO = 0.95
"""Ours: leaves room for late rows; gaps of a free clock are near a multiple 4 % of the time."""

_TICK_TOLERANCE = 0.02
"""Ours: Mooncake's 3 s clock strays by 3 ms, a twentieth of this."""

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
        _order_warning(trace),
        _clock_warning(trace.due_s),
        _uniform_warning(trace),
        _silence_warning(trace.due_s),
        _latency_warning(recorded_ratio),
        _demand_warning(peak_in_flight, largest_cap),
    ]
    return tuple(warning for warning in found if warning is not None)


def _order_warning(trace: Trace) -> TraceWarning | None:
    if not trace.notes.moved:
        return None
    return TraceWarning(
        "unsorted",
        f"{trace.notes.moved:,} rows were out of order in the file and have been sorted",
    )


def _clock_warning(due_s: Floats) -> TraceWarning | None:
    """Find a clock with coarse ticks: many shared instants, and gaps that are whole ticks."""
    gaps = np.diff(due_s)
    steps = gaps[gaps > 0]
    tied_ratio = 1 - (steps.size + 1) / len(due_s)
    if len(due_s) < _MANY_ROWS or tied_ratio < _TIED_RATIO or steps.size < 2:
        return None
    tick_s = float(np.quantile(steps, 0.05))
    if tick_s < _TICK_S:
        return None
    ticks = steps / tick_s
    on_tick = np.abs(ticks - np.round(ticks)) <= _TICK_TOLERANCE
    if on_tick.mean() < _ON_TICK_RATIO:
        return None
    tick_s = float(np.median(steps[np.round(ticks) == 1]))
    return TraceWarning(
        Caveat.QUANTISED_CLOCK,
        f"the clock ticks every {tick_s:.3g} s and {tied_ratio:.0%} of the requests share an "
        "instant: these bursts may be the clock's, not the users'",
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
    if tokens.size < _MANY_ROWS:
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
