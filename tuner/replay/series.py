"""What a replay looked like over time, in a record whose size does not grow with the replay.

Answers how many requests came, ran and waited, how full the KV cache was and how many were
preempted, from bin to bin.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.replay.loop import ReplayLog
from tuner.replay.timeline import Outcome
from tuner.stats import Floats

SCHEMA = 1
# Bins of one replay at most: ours, what half the width of a page has pixels for.
MAX_POINTS = 500
# Digits that are kept of a number: ours, finer than a pixel.
_DIGITS = 4


class TimelineRecord(msgspec.Struct, frozen=True):
    """One replay in bins of equal width.

    `running`, `waiting` and `kv_usage_ratio` are means over a bin, weighted by time, idle time
    counting as nothing; `kv_peak_ratio` is the largest usage in it; `arrivals` and
    `preemptions` are counts.

    Shapes: every series is [bins].
    Units: start_s and bin_s in seconds on the replay's clock; ratios in 0 to 1.
    """

    start_s: float
    bin_s: float
    arrivals: list[float]
    running: list[float]
    waiting: list[float]
    kv_usage_ratio: list[float]
    kv_peak_ratio: list[float]
    preemptions: list[float]


class ReplayTimelines(msgspec.Struct, frozen=True):
    """A replay's timelines, one for each window, by a live engine or the shadow."""

    engine: str
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: list[TimelineRecord]

    @property
    def limits(self) -> EngineLimits:
        """At which limits it was replayed."""
        return EngineLimits(self.max_num_seqs, self.max_num_batched_tokens)


class SavedTimelines(msgspec.Struct, frozen=True):
    """What the file of a run's timelines holds."""

    schema: int = SCHEMA
    replays: tuple[ReplayTimelines, ...] = ()

    def with_replay(self, added: ReplayTimelines) -> SavedTimelines:
        """Return these with a replay in place of the same engine's at the same limits."""
        key = (added.engine, added.limits)
        others = [r for r in self.replays if (r.engine, r.limits) != key]
        return SavedTimelines(replays=(*others, added))


def _short(values: Floats) -> list[float]:
    """Return numbers without the digits that no plot shows."""
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def timeline_record(log: ReplayLog, most_points: int = MAX_POINTS) -> TimelineRecord:
    """Return a replay in at most so many bins. Raises: ValueError if the log holds no steps."""
    steps = log.kept_steps
    if steps is None:
        raise ValueError("the replay's plan did not ask for its steps to be kept")
    line = log.timelines
    never = (line.outcome == int(Outcome.UNFINISHED)) & np.isnan(line.sent_s)
    due_s = line.due_s[~never & (line.due_s <= log.clock_s)]
    # One that follows an answer may be sent before the lead-in is over.
    start_s = max(0.0, float(due_s.min())) if due_s.size else 0.0
    span_s = max(log.clock_s - start_s, 1e-6)
    bin_s = round_width(span_s / most_points)
    bins = max(1, math.ceil(span_s / bin_s - 1e-9))
    edges_s = start_s + bin_s * np.arange(bins + 1, dtype=np.float64)
    peaks = np.zeros(bins)
    at = _bins_of(steps.end_s, start_s, bin_s, bins)
    np.maximum.at(peaks, at, steps.kv_peak_ratio)
    usage = _means(steps, steps.kv_usage_ratio, edges_s)
    arrivals = _bins_of(due_s, start_s, bin_s, bins)
    return TimelineRecord(
        start_s=start_s,
        bin_s=bin_s,
        arrivals=_short(np.bincount(arrivals, minlength=bins).astype(np.float64)),
        running=_short(_means(steps, steps.running, edges_s)),
        waiting=_short(_means(steps, steps.waiting, edges_s)),
        kv_usage_ratio=_short(usage),
        kv_peak_ratio=_short(np.maximum(peaks, usage)),
        preemptions=_short(np.bincount(at, steps.preempted, bins).astype(np.float64)),
    )


def round_width(least_s: float) -> float:
    """Return the least of 1, 2, 5, 10, … times a power of ten that is not below.

    >>> round_width(0.013), round_width(2.0), round_width(60.0)
    (0.02, 2.0, 100.0)
    """
    exponent = math.floor(math.log10(least_s))
    for times in (1, 2, 5, 10):
        width = float(f"{times}e{exponent}")
        if width >= least_s * (1 - 1e-9):
            return width
    return float(f"2e{exponent + 1}")


def _bins_of(instants_s: Floats, start_s: float, bin_s: float, bins: int) -> NDArray[np.int64]:
    """Return in which bin each instant lies; the last edge belongs to the last bin."""
    at = np.floor((instants_s - start_s) / bin_s).astype(np.int64)
    return np.clip(at, 0, bins - 1)


def _means(steps: StepColumns, values: Floats, edges_s: Floats) -> Floats:
    """Return the mean of what held during the steps, bin by bin."""
    if not len(steps):
        return np.zeros(edges_s.size - 1)
    # On a wall clock a step may be noted as longer than the time since the last one.
    before_s = np.concatenate([[-math.inf], steps.end_s[:-1]])
    begins_s = np.maximum(steps.end_s - steps.duration_s, before_s)
    reached = np.concatenate([[0.0], np.cumsum(values * (steps.end_s - begins_s))])
    instants_s = np.column_stack([begins_s, steps.end_s]).ravel()
    areas = np.column_stack([reached[:-1], reached[1:]]).ravel()
    means: Floats = np.diff(np.interp(edges_s, instants_s, areas)) / np.diff(edges_s)
    return means
