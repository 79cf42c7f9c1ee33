"""How the time of a run is divided, and which part of the trace it can afford to replay.

Pure: facts of trace and engine in, choices out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tuner.errors import UsageError
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.search.objective import Objective
from tuner.search.race import CONFIDENCE, MAX_ROUNDS
from tuner.stats import short
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import Window, WindowChoice, busiest, typical, whole

# How many replays of its windows a run may take: after a prediction ours, as each then takes
# but a part of the time, so that what one shows of the engine's steps is seen early. Without
# one its windows are all that is known of the trace: fewer replays of longer ones were right
# more often on planted machines, though a search and its race may then lack some at the end.
REPLAYS, REPLAYS_UNPREDICTED = 30, 16
# The share of the time after which the race begins although the search is not done: ours.
SEARCH_SHARE = 0.6
# Less than this cannot hold one start of an engine and two replays: ours, seconds.
MIN_BUDGET_S = 20.0
# Two windows, a busy and a typical one, only when each is at least this long: ours; shorter
# ones would be mostly filling and draining.
MIN_HALF_S = 20.0
# How many times as long as its middle request a window that is not the whole trace lasts at
# least: ours, so that most of it is past what it begins with. It begins with a lead-in of as
# long as one, as far as the trace goes back.
LIFETIMES = 3.0
# Fewer requests than these cannot even carry a median: twice what tail_statistic demands.
MIN_REQUESTS = 40
# What is said where that is not what was asked for.
RATE_INSTEAD = (
    "closed loop: it offers no load that could be missed, so balanced is for most requests "
    "per second"
)
# A current configuration, two others and one round against each other: ours, with fewer there
# is nothing to recommend.
MIN_REPLAYS = 5


@dataclass(frozen=True, slots=True)
class Budget:
    """How the time of a run is divided.

    Raises: UsageError if it cannot hold one trial.
    """

    total_s: float

    def __post_init__(self) -> None:
        """Refuse a budget in which nothing could be measured."""
        if not math.isfinite(self.total_s):
            raise UsageError(f"--budget must end, got {self.total_s:g} s", "for example 45m")
        if self.total_s < MIN_BUDGET_S:
            raise UsageError(
                f"--budget {self.total_s:g}s is too short for one trial, "
                f"at least {MIN_BUDGET_S:g} s are needed",
                "give it minutes: a start of the engine, thirty replays and a race must fit",
            )

    @property
    def pilot_s(self) -> float:
        """Return how long the pilot replay may take."""
        return min(15.0, max(1.0, 0.02 * self.total_s))


def choose_windows(
    trace: Trace,
    wall_ratio: float,
    left_s: float,
    least: int = MIN_REQUESTS,
    replays: int = REPLAYS,
) -> tuple[Window, ...]:
    """Return the windows to replay so that so many replays fit into the time that is left.

    All of the trace if it fits; else its busiest and a typical stretch, both begun warm; only
    the busiest when halves would be too short to mean anything. `wall_ratio` is how much real
    time a second of the trace costs at the current configuration, and `least` how many requests
    they hold at least.

    Raises: UsageError if not even a handful of the shortest useful replays would fit.
    """
    length_s = 0.85 * left_s / replays / max(wall_ratio, 1e-6)
    enough_s = least / len(trace) * trace.duration_s if len(trace) else 0.0
    length_s = max(length_s, enough_s)
    min_s = MIN_REPLAYS * wall_ratio * min(length_s, trace.duration_s)
    if min_s > left_s:
        raise UsageError(
            f"the budget leaves {max(left_s, 0.0):.0f} s, but {MIN_REPLAYS} replays of "
            f"{least} requests take about {min_s:.0f} s on this engine",
            "give --budget more, lower --load, or shorten requests with max-model-len and "
            "--too-long clip",
        )
    if length_s >= 0.9 * trace.duration_s:
        return (whole(trace),)
    length_s = max(length_s / (1 + 1 / LIFETIMES), enough_s)
    if length_s >= 2 * MIN_HALF_S:
        busy, usual = busiest(trace, length_s / 2), typical(trace, length_s / 2)
        held = sum(window.of(trace).measured for window in (busy, usual))
        if not busy.overlaps(usual) and held >= least:
            return warmed(busy), warmed(usual)
    return (warmed(busiest(trace, length_s)),)


def least_window(trace: Trace, least: int = MIN_REQUESTS) -> Window:
    """Return the busiest stretch with about as few requests as show anything, or so many."""
    return busiest(trace, whole(trace).length_s * least / len(trace))


def warmed(window: Window) -> Window:
    """Return the window with a lead-in as long as a request may live in one of that length."""
    return window.with_lead_in(window.length_s / LIFETIMES)


def asked_window(choice: WindowChoice | None, trace: Trace, plan: ReplayPlan) -> Window | None:
    """Return the window that was asked for, begun warm; None where none was.

    In a closed loop it begins as it is, and so does all of a trace. A session that goes on from
    before the lead-in begins with the first of its turns that is replayed.

    Raises: TraceError, UsageError.
    """
    if choice is None:
        return None
    return warmed(choice.resolve(trace)).led_in_by(plan.most_lead_in_s)


def shorter_window(
    trace: Trace, windows: tuple[Window, ...], ratio: float, least: int = MIN_REQUESTS
) -> Window | None:
    """Return the busiest stretch of the first window of so much of its length, begun warm.

    None where it would hold too few requests to show anything, or fewer than so many.
    """
    window = windows[0]
    low, high = np.searchsorted(trace.due_s, (window.start_s, window.end_s))
    # As they are due, since an instant counted from another one is rounded otherwise.
    inside = trace.slice_rows(np.arange(low, high))
    if inside.duration_s <= 0:
        return None
    busy = busiest(inside, ratio * min(window.length_s, inside.duration_s))
    shorter = Window(busy.start_s, min(busy.end_s, window.end_s))
    return warmed(shorter) if len(shorter.of(trace)) >= least else None


def outlook(
    budget: Budget, left_s: float, calibration_share: float, replay_s: float, cold_s: float
) -> str:
    """Return how long a run will take, what it can answer and which option would help.

    `replay_s` is what one replay of the wanted window takes at the current limits, `cold_s`
    what starting two engines cold takes besides. Others may be faster, so this is careful.
    """
    calibration_s = min(calibration_share * budget.total_s, max(left_s, 0.0))
    race_s, round_s = left_s - calibration_s, 2 * replay_s
    needed_s = (budget.total_s - left_s + 3 * round_s + cold_s + round_s) / (
        1 - calibration_share
    )
    if left_s < 1.0:
        return (
            f"outlook: the time of {budget.total_s:.0f} s is spent before calibrating; "
            f"--budget {math.ceil(needed_s / 60)}m holds that, a race and cold engines"
        )
    rounds = MAX_ROUNDS if race_s >= MAX_ROUNDS * round_s else int(race_s / round_s)
    cost = (
        f"outlook: calibrating takes up to {calibration_s:.0f} s of the {left_s:.0f} s left, "
        f"then a replay of the window takes about {short(replay_s)} s"
    )
    if rounds < 2:
        return (
            f"{cost}: a stretch of it will race; --budget {math.ceil(needed_s / 60)}m would "
            "race all of it, --window peak:LENGTH says which stretch"
        )
    if race_s < 3 * round_s + cold_s + round_s:
        return (
            f"{cost}: {rounds} rounds of two settings fit, cold engines may not; "
            f"--budget {math.ceil(needed_s / 60)}m holds both"
        )
    return f"{cost}: {rounds} rounds of two settings and cold engines fit"


def window_text(windows: tuple[Window, ...], trace: Trace) -> str:
    """Return in words what is replayed."""
    if windows == (whole(trace),):
        return f"the whole trace, {trace.duration_s:.0f} s"
    bare = windows[0].with_lead_in(0.0)
    alone = len(windows) == 1 and bare == busiest(trace, bare.length_s)
    names = ("busiest", "typical") if len(windows) == 2 else ("busiest" if alone else "window",)
    parts = [
        f"{name} {w.start_s:.0f} s to {w.end_s:.0f} s"
        for name, w in zip(names, windows, strict=True)
    ]
    total_s, lead_in_s = sum(w.length_s for w in windows), sum(w.lead_in_s for w in windows)
    warm = f", after {lead_in_s:.2g} s to warm up" if lead_in_s else ""
    return f"{' and '.join(parts)} ({total_s:.0f} of {trace.duration_s:.0f} s{warm})"


@dataclass(frozen=True, slots=True)
class Aim:
    """What the user requested of a run.

    `confidence` is how probable it must be that a change is better and that the SLOs are met.
    A closed loop offers no load that could be missed, and who takes fewer at once has a shorter
    tail there at the cost of the rate: what is asked to be balanced is for most requests per
    second.

    Raises: UsageError if a capacity is asked for where every load is the same number in flight.
    """

    objective: Objective
    slos: tuple[Slo, ...]
    plan: ReplayPlan
    window: Window | None
    confidence: float = CONFIDENCE

    @property
    def least_requests(self) -> int:
        """How many requests a window holds at least: what shows anything, and each SLO."""
        needed = (slo.needed_samples for slo in self.slos if slo.is_per_request)
        return max(MIN_REQUESTS, *needed, 0)

    def __post_init__(self) -> None:
        """Refuse a contradiction, and make of balanced what it is in a closed loop."""
        is_closed = self.plan.load_model is LoadModel.CLOSED
        if is_closed and self.objective is Objective.BALANCED:
            object.__setattr__(self, "objective", Objective.THROUGHPUT)
        if self.objective is Objective.CAPACITY and not self.plan.bears_loads:
            raise UsageError(
                "--objective capacity asks for the largest load, and --concurrency keeps the "
                "same number in flight at every load",
                "leave --concurrency out, or choose another objective",
            )
