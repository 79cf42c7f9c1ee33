"""Which part of a long trace to replay: a span, the busiest stretch, or a typical one.

Long traces are not replayed whole: the busiest window shows what must be survived, a typical
one what is usual. Cutting itself is `Trace.between`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from tuner.errors import UsageError
from tuner.stats import Floats, Ints
from tuner.traffic.traces import Trace

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h)", re.ASCII)
_DURATION_HINT = "write a number with its unit: 500ms, 30s, 5m or 2h"


def parse_duration(text: str) -> float:
    """Return a duration in seconds.

    Raises: UsageError if it is not a number with a unit.

    >>> parse_duration("500ms"), parse_duration("1.5h")
    (0.5, 5400.0)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f'duration must be a number with its unit, got "{text}"', _DURATION_HINT
        )
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if not math.isfinite(seconds):
        raise UsageError(f'duration must be finite, got "{text}"', _DURATION_HINT)
    return seconds


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a trace: requests due in [start_s, end_s).

    Those of the `lead_in_s` before are replayed with it, and not measured: they warm the
    engine up, its queue and its prefix cache.

    Raises: UsageError if it does not start at or after 0 and end after its start.
    """

    start_s: float
    end_s: float
    lead_in_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < math.inf:
            raise UsageError(
                f"window must end after it starts, got {self.start_s:g} s to {self.end_s:g} s",
                "write START:END, for example 5m:10m",
            )

    @property
    def length_s(self) -> float:
        """How long the window is."""
        return self.end_s - self.start_s

    def of(self, trace: Trace) -> Trace:
        """Return the requests of the window and its lead-in, counted from where that starts."""
        return trace.between(self.start_s, self.end_s, self.lead_in_s)

    def with_lead_in(self, lead_in_s: float) -> Window:
        """Return the window after a lead-in of so long, or since the trace begins.

        >>> Window(20.0, 50.0).with_lead_in(10.0).lead_in_s
        10.0
        >>> Window(2.0, 50.0).with_lead_in(10.0).lead_in_s
        2.0
        """
        return replace(self, lead_in_s=min(self.start_s, lead_in_s))

    def led_in_by(self, most_s: float) -> Window:
        """Return the window with no longer a lead-in than that."""
        return replace(self, lead_in_s=min(self.lead_in_s, most_s))

    def overlaps(self, other: Window) -> bool:
        """Return whether an instant belongs to both."""
        return self.start_s < other.end_s and other.start_s < self.end_s


class WindowKind(StrEnum):
    """How a window is chosen."""

    ALL = "all"
    SPAN = "span"
    PEAK = "peak"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True)
class WindowChoice:
    """What the user asked for; which instants it means depends on the trace.

    `span` is set for SPAN, length_s for PEAK and TYPICAL.
    """

    kind: WindowKind
    length_s: float = 0.0
    span: Window | None = None

    def resolve(self, trace: Trace) -> Window:
        """Return the instants that the choice means in this trace; it ends with the trace."""
        if self.span is not None:
            end_s = whole(trace).end_s
            reaches = self.span.start_s < end_s < self.span.end_s
            return replace(self.span, end_s=end_s) if reaches else self.span
        if self.kind is WindowKind.PEAK:
            return busiest(trace, self.length_s)
        if self.kind is WindowKind.TYPICAL:
            return typical(trace, self.length_s)
        return whole(trace)


def parse_window(text: str) -> WindowChoice:
    """Return the choice that `all`, `peak:300s`, `typical:300s` or `5m:10m` stands for.

    Raises: UsageError for anything else.

    >>> parse_window("peak:300s").length_s
    300.0
    """
    text = text.strip()
    if text == WindowKind.ALL:
        return WindowChoice(WindowKind.ALL)
    first, colon, second = text.partition(":")
    if not colon:
        raise UsageError(
            f'window must be all, peak:LENGTH, typical:LENGTH or START:END, got "{text}"',
            "for example peak:300s or 5m:10m",
        )
    end_s = parse_duration(second)
    if first not in (WindowKind.PEAK, WindowKind.TYPICAL):
        return WindowChoice(WindowKind.SPAN, span=Window(parse_duration(first), end_s))
    if end_s <= 0:
        raise UsageError(f'window must be longer than 0 s, got "{text}"', _DURATION_HINT)
    return WindowChoice(WindowKind(first), length_s=end_s)


INSTANT_S: Final = 1e-3
"""Ours: how much of a trace's time requests take that all come at once; it has a price then."""


def whole(trace: Trace) -> Window:
    """Return the window that holds every request; it ends just past the last due time."""
    return Window(0.0, max(float(np.nextafter(trace.due_s[-1], math.inf)), INSTANT_S))


def busiest(trace: Trace, length_s: float) -> Window:
    """Return the window of this length with the most token work due in it.

    Work is prompt and output tokens. Some best window starts at a request, so only those are
    tried; one that would reach past the last request is moved back to end there. Of a shorter
    trace it is all.
    """
    before = np.concatenate([[0], np.cumsum(_work(trace))])
    ends = np.searchsorted(trace.due_s, trace.due_s + length_s, side="left")
    best = int(np.argmax(before[ends] - before[:-1]))
    start_s, end_s = float(trace.due_s[best]), whole(trace).end_s
    if start_s + length_s <= end_s:
        return Window(start_s, start_s + length_s)
    return Window(max(0.0, end_s - length_s), end_s)


def busy_part(trace: Trace, requests: int) -> Trace:
    """Return the busiest stretch, as long as so many requests take in the mean, or all."""
    share = requests / len(trace)
    if share >= 1:
        return trace
    return busiest(trace, max(share * trace.duration_s, INSTANT_S)).of(trace)


def typical(trace: Trace, length_s: float) -> Window:
    """Return the window of this length whose token work is nearest the median.

    Candidates are the whole windows laid end to end from 0 that hold requests; one that
    overlaps the busiest is taken only when there is no other.
    """
    places, first = np.unique(_places(trace.due_s, length_s), return_index=True)
    work = np.add.reduceat(_work(trace), first)
    is_full = (places + 1) * length_s <= whole(trace).end_s
    if not is_full.any():
        return busiest(trace, length_s)
    places, work = places[is_full], work[is_full]
    starts_s, ends_s = places * length_s, (places + 1) * length_s
    distance = np.abs(work - np.median(work))
    peak = busiest(trace, length_s)
    overlaps = (starts_s < peak.end_s) & (peak.start_s < ends_s)
    if not overlaps.all():
        distance = np.where(overlaps, np.inf, distance)
    chosen = np.argmin(distance)
    return Window(float(starts_s[chosen]), float(ends_s[chosen]))


def _places(due_s: Floats, length_s: float) -> Ints:
    """Return in which of the windows laid end to end from 0 each instant lies.

    As they are rounded: 1.0 is in [1.0, 1.2), where 1.0 // 0.2 is 4.

    Shapes: as due_s.
    """
    places = (due_s // length_s).astype(np.int64)
    places -= due_s < places * length_s
    places += due_s >= (places + 1) * length_s
    return places


def _work(trace: Trace) -> Ints:
    return trace.prompt_tokens + trace.output_tokens
