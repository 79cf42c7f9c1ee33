"""One point for each configuration: the medians of its replays.

Live and predicted replays are kept apart, so that no prediction is shown as a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.report.words import listed
from tuner.run.result import RunResult
from tuner.search.objective import RATE
from tuner.search.trials import Trial, predictions, read_metric

# Where a level stands in a recorded measurement, and by which of its statistics.
_LEVELS = {"gpu_cache_usage_perc": "max", "queue_depth": "mean", "running": "max"}


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration with the measurements of its whole replays, at least one."""

    limits: EngineLimits
    is_live: bool
    measurements: tuple[Mapping[str, Any], ...]
    twin: EngineLimits | None = None
    """The configuration that was replayed, where another stands for it: the same batches."""
    is_cut: bool = False
    """Whether no replay came to its end: the values are those until then."""

    def value(self, metric: str) -> float | None:
        """Return the middle of the replays, None where nothing was measured."""
        values = [value_of(m, metric) for m in self.measurements]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    def needed(self, metric: str) -> float:
        """Return the middle of the replays. Raises: KeyError where nothing was measured."""
        value = self.value(metric)
        if value is None:
            raise KeyError(metric)
        return value

    @property
    def how(self) -> str:
        """Return whether it was measured, and how often."""
        n = len(self.measurements)
        how = "predicted"
        if self.is_live:
            how = "measured once" if n == 1 else f"measured {n} times, the middle is shown"
        if self.is_cut:
            how = f"{how}, cut short: latencies are at least that"
        return how if self.twin is None else f"{how} at {self.twin}, the same batches"


def value_of(measurement: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric or the telling statistic of a level; None where nothing was measured."""
    if metric not in _LEVELS:
        return read_metric(measurement, metric)
    level = measurement.get(metric)
    value = level.get(_LEVELS[metric]) if isinstance(level, dict) else None
    return float(value) if isinstance(value, int | float) else None


def live_points(result: RunResult) -> list[Point]:
    """Return what was measured live on the run's windows, by limits."""
    return _points([t for t in result.trials if t.phase.is_on_windows], is_live=True)


def shadow_points(result: RunResult) -> list[Point]:
    """Return what was predicted last, by limits."""
    return _points(predictions(result.trials), is_live=False)


def ranked_points(result: RunResult) -> list[Point]:
    """Return the points of the one kind that ranked the whole space."""
    searched_live = any(t.phase.is_search for t in result.trials)
    return live_points(result) if searched_live else shadow_points(result)


def _points(trials: Sequence[Trial], *, is_live: bool) -> list[Point]:
    """Return a point of each limits whose replays came to their end, of these replays."""
    by_limits: dict[EngineLimits, list[Mapping[str, Any]]] = {}
    for trial in (trial for trial in trials if trial.is_whole):
        by_limits.setdefault(trial.limits, []).append(trial.measurement or {})
    return [
        Point(limits, is_live, tuple(measured))
        for limits, measured in sorted(by_limits.items())
    ]


def loads_words(points: Sequence[Point]) -> list[str]:
    """Say that points stand at loads of their own, where the largest was looked for."""
    own = dict.fromkeys(
        "measured" if p.is_live else "predicted"
        for p in points
        if any(m.get("capacity") is not None for m in p.measurements)
    )
    if not own:
        return []
    return [
        f"What was {listed(list(own))} stands at the largest load at which it keeps the SLOs, "
        "or at the load of the run where it keeps them at none: at loads that differ."
    ]


def with_values(points: Sequence[Point], *metrics: str) -> list[Point]:
    """Return the points at which all the metrics were measured."""
    return [p for p in points if all(p.value(metric) is not None for metric in metrics)]


def frontier(points: Sequence[Point], latency: str) -> list[Point]:
    """Return the points that no other beats in both latency and rate, the fastest first.

    Shapes: every point has both metrics.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.needed(RATE), p.needed(latency))):
        if not best or point.needed(latency) < best[-1].needed(latency):
            best.append(point)
    return best
