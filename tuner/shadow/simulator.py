"""Replays of a trace on vLLM's scheduler compiled, without vLLM: an hour in milliseconds.

Has `schedule` work on the arrays of `simulated`, and makes of them the same log as a replay on
an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import FULL_ATTENTION, EngineShape, KvLayout
from tuner.engine.steps import CostSums, StepColumns, StepSummary, joined
from tuner.errors import EngineError, ReplayError, UsageError
from tuner.files import free_bytes
from tuner.replay.arrivals import check_priorities
from tuner.replay.loop import PROGRESS_EVERY_S, Progress, ReplayLog, log_of
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome, Timelines
from tuner.shadow import simulated
from tuner.shadow.compiled import warms_up
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.replay import advance, stop_all
from tuner.shadow.simulated import (
    SimulatedEngine,
    check_sizes,
    first_slots,
    keeps_each_block,
)
from tuner.shadow.step_model import StepModel
from tuner.stats import Floats, Ints, WeightedSamples
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace

# Compiled for the arrays that they are called with.
_advance: Any = advance
_stop_all: Any = stop_all

# Turns between two looks at the clock: ours, some hundredths of a second.
_TURNS: Final = 1 << 16
# Steps that are kept before they are read out: ours, some megabytes.
_LOG_ROWS: Final = 1 << 16
# Histograms of replays that have ended, zeros again: ours, since clearing six megabytes for
# each replay takes as long as scheduling thousands of requests.
_EMPTIED: Final[list[Floats]] = []


def simulate(
    engine: SimulatedEngine,
    prepared: PreparedTrace,
    limits: EngineLimits,
    plan: ReplayPlan,
    on_progress: Callable[[Progress], bool] | None = None,
) -> ReplayLog:
    """Replay a prepared trace on a simulated engine and return every instant, as `replay` does.

    The schedule is vLLM's, step for step. The prefix cache is empty at first.

    Raises: EngineError for a request that is larger than the KV cache, or when nothing can be
        scheduled; ReplayError when the replay itself is void; UsageError for priorities on an
        engine that serves by arrival.
    """
    check_sizes(engine, prepared, limits)
    check_priorities(prepared.trace, has_priorities=engine.shape.has_priorities)
    began_s = time.perf_counter()
    caches = keeps_each_block(engine, prepared)
    slots = first_slots(engine, prepared, limits)
    while True:
        replay = Simulation(engine, prepared, limits, plan, slots, began_s, caches=caches)
        status = replay.run(on_progress)
        if status == s.NEEDS_CACHE:
            caches = True
        elif status == s.NO_SLOT:
            slots = min(2 * slots, len(prepared.trace) + 1)
        else:
            return replay.log()


# Bytes of memory that a replay and its measurement take for each request and, with a prefix
# cache, for each id of a block: ours, 184 and 76 were measured on 600,000 requests, beside the
# keys of the blocks, four bytes each in every group of layers.
REQUEST_BYTES, ID_BYTES, KEY_BYTES = 190, 80, 4


def room_for(trace: Trace, shape: EngineShape) -> int:
    """Return how many replays of a trace may run at once with the memory that is free.

    Raises: UsageError, with the size, where not even one may.
    """
    needed = REQUEST_BYTES * len(trace)
    if shape.prefix_caching and trace.hashes is not None:
        keys = trace.hashes.block_size // shape.block_size + 1
        keys *= len((shape.kv_layout or KvLayout()).looks_back)
        needed += (ID_BYTES + KEY_BYTES * keys) * trace.hashes.ids.size
    free = free_bytes()
    if needed > free:
        raise UsageError(
            f"a replay of {len(trace):,} requests takes {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free",
            "replay a part of the trace: --window, or a day of it",
        )
    return int(min(free // max(needed, 1), 1 << 16))


class Simulation:
    """One replay: its arrays, and what is read from them."""

    def __init__(
        self,
        engine: SimulatedEngine,
        prepared: PreparedTrace,
        limits: EngineLimits,
        plan: ReplayPlan,
        slots: int,
        began_s: float,
        *,
        caches: bool,
    ) -> None:
        self._prepared, self._limits, self._plan = prepared, limits, plan
        self._began_s, self._reported_s = began_s, 0.0
        self._stopped: str | None = None
        self._kept: list[StepColumns] = []
        trace = prepared.trace
        self._measures = trace.lead_in_s == 0
        n = len(trace)
        self._g = simulated.integers(engine, prepared, limits, plan, slots, caches=caches)
        self._x = simulated.seconds(engine.step_model, prepared, plan)
        self._t = simulated.table(engine.step_model, self._g, engine.accepted)
        self._w = simulated.work(self._g)
        self._slots = np.zeros((slots, s.SLOT_FIELDS), np.int64)
        # One row alone would be contiguous both ways, another type to numba: compiled anew.
        rows = max(n, 2)
        self._instants = np.full((rows, 4), np.nan, order="F")
        self._instants[:n, s.DUE] = trace.due_s
        self._answers = np.zeros((rows, 2), np.int64, order="F")
        self._answers[:, s.OUTCOME] = s.ABORTED
        self._refs = np.zeros((rows, s.REFERENCES), np.int32, order="F")
        self._refs[:, s.SLOT_OF] = -1
        self._histograms = _histograms()
        self._log = np.empty((_LOG_ROWS if plan.keep_steps else 1, s.LOG_FIELDS))
        self._ready = simulated.ready(prepared, self._g)
        self._cache = simulated.cache(prepared, self._g, engine.layout, caches=caches)

    def run(self, on_progress: Callable[[Progress], bool] | None) -> int:
        """Go on to the end, or until the caller stops it; return the status.

        Raises: EngineError, ReplayError.
        """
        while _advance(*self._arrays(), _TURNS):
            self._read_log()
            if not self._goes_on(on_progress):
                break
        self._read_log()
        status = int(self._g[s.STATUS])
        if status == s.IS_STUCK:
            raise EngineError(
                f"the engine took {s.STUCK_TURNS} turns without scheduling anything",
                "a request may be larger than the KV cache",
            )
        if status == s.LOST_WORK:
            raise ReplayError("requests are in flight but the engine has no work")
        return status

    def _arrays(self) -> tuple[Any, ...]:
        traffic = self._requests(self._ready, self._prepared.follows)
        return (
            *(self._g, self._x, self._w, self._t, self._slots, self._instants, self._refs),
            *(self._answers, self._histograms, self._log, traffic, self._cache),
        )

    def _requests(self, ready: Floats, follows: Ints) -> s.Requests:
        w = self._prepared
        books = (w.prompts, w.outputs, w.priorities, ready, follows, w.followers, w.pauses_s)
        return s.Requests(*books, w.targets)

    def _goes_on(self, on_progress: Callable[[Progress], bool] | None) -> bool:
        """Tell how far the replay is; False when the caller or its time ends it."""
        wall_s, most_s = time.perf_counter() - self._began_s, self._plan.cut.max_wall_s
        if most_s is not None and wall_s > most_s:
            self._stopped = self._plan.cut.wall_text
        if on_progress is not None and wall_s - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s = wall_s
            n, g = len(self._prepared.trace), self._g
            now_s = float(self._x[s.NOW])
            if not on_progress(Progress(int(g[s.SENT]), int(g[s.ENDED]), n, now_s, wall_s)):
                self._stopped = "stopped by the caller"
        if self._stopped is not None:
            _stop_all(self._g, self._x, self._w, self._slots, self._instants, self._answers)
        return self._stopped is None

    def _read_log(self) -> None:
        rows = int(self._g[s.LOGGED])
        if self._g[s.MEASURES] and not self._measures:
            self._kept.clear()
            self._measures = True
        if rows:
            columns = [self._log[:rows, i].copy() for i in range(s.LOG_FIELDS)]
            for used in s.USED_COLUMNS:
                columns[used] /= float(self._g[s.ALL_BLOCKS])
            self._kept.append(StepColumns(*columns))
            self._g[s.LOGGED] = 0

    def log(self) -> ReplayLog:
        """Return the finished replay; nothing can be asked of it afterwards."""
        counted = self._counted()
        return log_of(
            self._prepared.trace,
            self._timelines(counted),
            self._summary(counted),
            self._limits,
            self._plan,
            clock_s=float(self._x[s.NOW]),
            wall_s=time.perf_counter() - self._began_s,
            cut_reason=self._cut_reason(),
            kept_steps=joined(self._kept) if self._plan.keep_steps else None,
        )

    def _cut_reason(self) -> str | None:
        status, cut = int(self._g[s.STATUS]), self._plan.cut
        if status == s.LATE_CUT:
            return cut.late_text
        if status == s.CLOCK_CUT:
            return cut.clock_text
        return self._stopped

    def _timelines(self, counted: Sequence[WeightedSamples]) -> Timelines:
        n = len(self._prepared.trace)
        outcome = self._answers[:n, s.OUTCOME]
        outcome[outcome == s.GOES_ON] = s.ABORTED
        return Timelines(
            due_s=self._instants[:n, s.DUE],
            sent_s=self._instants[:n, s.SENT_AT],
            first_s=self._instants[:n, s.FIRST],
            last_s=self._instants[:n, s.LAST],
            output_tokens=self._answers[:n, s.TOKENS],
            outcome=outcome,
            gap_s=counted[s.GAPS],
            work_s=np.full(n, np.nan),
        )

    def _counted(self) -> list[WeightedSamples]:
        """Return what each histogram has counted, ascending, and leave them to another one."""
        table = self._histograms.reshape(s.HISTOGRAMS, s.ROOM)
        which, stretch = np.nonzero(table[:, 2 * s.BINS :])
        bins = table[:, : 2 * s.BINS].reshape(s.HISTOGRAMS, -1, 1 << s.STRETCH_SHIFT, 2)
        rows = bins[which, stretch]
        bins[which, stretch] = 0.0
        table[which, 2 * s.BINS + stretch] = 0.0
        _EMPTIED.append(self._histograms)
        seen = rows[..., 0] > 0
        ends = np.cumsum(np.bincount(which, seen.sum(axis=1), s.HISTOGRAMS)).astype(np.int64)
        weights, totals = rows[seen].T.copy()
        values = totals / weights
        return [
            WeightedSamples(values[first:end], weights[first:end])
            for first, end in pairwise((0, *ends.tolist()))
        ]

    def _summary(self, counted: Sequence[WeightedSamples]) -> StepSummary:
        x, blocks = self._x, float(self._g[s.ALL_BLOCKS])
        used = counted[s.H_USED]
        costs = CostSums(x[s.ALONE_N : s.ALONE_N + 5], x[s.MIXED_N : s.MIXED_N + 4])
        return StepSummary(
            steps=int(x[s.STEPS_N]),
            duration_s=float(x[s.STEPS_S]),
            decode_steps=counted[s.DECODE_STEPS],
            by_batch={},
            levels={
                "running": counted[s.H_RUNNING],
                "waiting": counted[s.H_WAITING],
                "kv_usage_ratio": WeightedSamples(used.values / blocks, used.weights),
            },
            peaks={
                "running": float(x[s.PEAK_RUNNING]),
                "waiting": float(x[s.PEAK_WAITING]),
                "kv_usage_ratio": float(x[s.PEAK_USED]) / blocks,
            },
            prefill_tokens=int(x[s.MIXED_TOKENS]),
            cached_tokens=int(x[s.CACHED_N]),
            preempted=int(x[s.PREEMPTED_N]),
            max_step_tokens=int(x[s.FULLEST]),
            costs=costs.fit(),
            host_bound_s=float(x[s.HOST_BOUND_S]),
        )


def _histograms() -> Floats:
    """Return room to count in, empty."""
    try:
        return _EMPTIED.pop()
    except IndexError:
        return np.zeros(s.HISTOGRAMS * s.ROOM)


OUTCOMES: Final = {
    Outcome.COMPLETED: s.COMPLETED,
    Outcome.REFUSED: s.REFUSED,
    Outcome.TIMED_OUT: s.TIMED_OUT,
    Outcome.ABORTED: s.ABORTED,
    Outcome.UNFINISHED: s.UNFINISHED,
    Outcome.TURNED_AWAY: s.TURNED_AWAY,
    Outcome.TRUNCATED: s.TRUNCATED,
}
assert all(outcome == code for outcome, code in OUTCOMES.items())  # noqa: S101 - both are fixed


def tiny_replay() -> tuple[SimulatedEngine, PreparedTrace, EngineLimits, ReplayPlan]:
    """Return two requests and an engine: what is replayed to have everything compiled."""
    trace = Trace(
        due_s=np.zeros(2),
        prompt_tokens=np.full(2, 4),
        output_tokens=np.full(2, 2),
        hashes=HashIds.from_rows([(1,), (1,)], 4),
    )
    shape = EngineShape(
        model="",
        device="",
        dtype="",
        vllm_version="",
        parallelism={},
        vocab_size=100,
        max_model_len=16,
        block_size=4,
        kv_kind=FULL_ATTENTION,
        prefix_caching=True,
        asynchronous=True,
        captured_sizes=(),
        scheduler={},
    )
    limits, plan = EngineLimits(2, 8), ReplayPlan()
    engine = SimulatedEngine(shape, 16, StepModel.linear(0.01, 0.0, 0.0), limits)
    return engine, PreparedTrace(trace, plan), limits, plan


@warms_up
def warm_up() -> None:
    """Replay next to nothing, so that everything is compiled."""
    simulate(*tiny_replay())
