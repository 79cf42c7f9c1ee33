"""Measure configurations on one engine: start it when needed, replay, survive its failures.

The engine starts once at the ceiling; it starts again only after it died, or before every
configuration where the engine cannot change its limits. The largest load that a configuration
carries is found by bisection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.engine.serve_config import changed
from tuner.errors import EngineError
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.process import WORTH_S, EngineProcess, EngineStart
from tuner.replay.slo import Slo
from tuner.traffic.resample import at_load, multiple_of
from tuner.traffic.traces import Trace

# Loads are resolved to this share: ours, about what two live replays differ by.
LOAD_RATIO = 0.02
# Beyond any demand; and below it a trace carries too little: ours.
LARGEST_LOAD = 64.0
# The first step from where an edge is thought to be, in doublings: ours, a fifth more or less.
NEAR_STEP = 0.25
MIN_LOAD = 1 / 64


def loads_to_try(
    start: float, near: float | None = None
) -> Generator[float, bool, float | None]:
    """Yield loads, take whether the SLOs held at each, and return the largest that is borne.

    None where they did not hold at the least. Doubles or halves from the start until the edge
    lies between two loads, then halves the gap in logarithms; assumes that what breaks at a
    load breaks at every larger one. Where the edge is thought to be `near` a load it begins
    there with a smaller step, each twice the one before, at loads that it may ask for without.
    """
    good: float | None = None
    bad: float | None = None
    load, step = start, 1.0
    if near is not None:
        step = NEAR_STEP
        load = start * 2 ** (step * round(math.log2(near / start) / step))
    while good is None or bad is None:
        if (yield load):
            good = load
            if load >= LARGEST_LOAD:
                return good
            load = load * 2**step
        else:
            bad = load
            if load <= MIN_LOAD:
                return None
            load = load / 2**step
        step = min(2 * step, 1.0)
    while bad / good > 1 + LOAD_RATIO:
        middle = (good * bad) ** 0.5
        if (yield middle):
            good = middle
        else:
            bad = middle
    return good


# What vLLM and the system say where memory was short, of the device's or the machine's.
_OF_MEMORY: Final = re.compile(
    r"out.?of.?memory|KV.cache|cache blocks|ALLOC_FAILED|MemoryAllocation|allocate memory",
    re.IGNORECASE,
)


def lowered(ceiling: EngineLimits, least: EngineLimits) -> Iterator[EngineLimits]:
    """Yield what to start at instead of a ceiling that does not start, down to the least.

    Half the token budget first, again and again, then half the cap: a step's activations take
    more than its sequences do.

    >>> print(*lowered(EngineLimits(64, 4096), EngineLimits(24, 1024)))
    64/2048 64/1024 32/1024 24/1024
    """
    seqs, budget = ceiling.max_num_seqs, ceiling.max_num_batched_tokens
    while budget > max(least.max_num_batched_tokens, seqs):
        budget = max(budget // 2, least.max_num_batched_tokens, seqs)
        yield EngineLimits(seqs, budget)
    while seqs > least.max_num_seqs:
        seqs = max(seqs // 2, least.max_num_seqs)
        budget = max(seqs, least.max_num_batched_tokens)
        yield EngineLimits(seqs, budget)


@dataclass(frozen=True, slots=True)
class Failure:
    """A replay that the engine did not survive: an outcome of that configuration."""

    cause: str


class EngineRunner:
    """The engine's process together with the traces that are replayed on it.

    `note` receives what is to be said of an engine that was started, the same only once.

    Raises: EngineError when the engine cannot be started; a failure during a replay is
        returned, not raised.
    """

    def __init__(
        self,
        process: EngineProcess,
        values: Mapping[str, object],
        ceiling: EngineLimits,
        seed: int,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.process = process
        self._note = note
        self._noted: set[str] = set()
        self._values = values
        self.seed = seed
        self._traces: dict[str, Trace] = {}
        self.ceiling = ceiling
        self.started: EngineStart | None = None
        self.info: EngineInfo | None = None
        """The engine that configurations are measured on; those started cold are others."""
        self.start_s = 0.0
        """What starting and warming up that engine took."""
        self.warm_up_s = 0.0
        """The part of that which warming up took."""
        self.starts = 0
        self.cold_blocks: dict[EngineLimits, int] = {}

    def use(self, name: str, trace: Trace) -> None:
        """Make a trace replayable under a name."""
        if self._traces.get(name) is trace:
            return
        self._traces[name] = trace
        if self.started is not None:
            self.process.load(name, trace, self.seed)

    def ensure_started(self, limits: EngineLimits | None = None) -> EngineStart:
        """Return the running engine, starting it if there is none.

        Limits above the ceiling raise it; an engine that cannot change them starts at them.
        """
        if limits is not None and not limits.within(self.ceiling):
            self.ceiling = self.ceiling.covering(limits)
            self.started = None
        started = self.started or self._start(self.ceiling)
        is_fixed = not started.info.can_change_limits
        if limits is not None and is_fixed and started.info.ceiling != limits:
            started = self._start(limits)
        self.info, self.warm_up_s = started.info, started.warm_up_s
        self.start_s = started.start_s + started.warm_up_s
        return started

    def start_below(self, least: EngineLimits) -> EngineStart:
        """Start at the ceiling, or at the largest below it that starts, which is one from then.

        What else than memory keeps it from starting is no smaller at half the size: then
        nothing but the least is tried.

        Raises: EngineError if it does not start at the least either.
        """
        tried = [self.ceiling, *lowered(self.ceiling, least)]
        while True:
            self.ceiling = tried.pop(0)
            try:
                return self.ensure_started()
            except EngineError as error:
                if not tried:
                    raise
                if not _OF_MEMORY.search(error.message):
                    del tried[:-1]
                self._note(
                    f"the engine does not start at {self.ceiling}: {error.message}; "
                    f"trying {tried[0]}"
                )

    def _start(
        self, ceiling: EngineLimits, changes: Mapping[str, object] | None = None
    ) -> EngineStart:
        values = changed(self._values, changes) if changes else self._values
        self.started = self.process.start(values, ceiling)
        self.starts += 1
        for line in self.started.notes:
            if line not in self._noted:
                self._noted.add(line)
                self._note(line)
        for name, trace in self._traces.items():
            self.process.load(name, trace, self.seed)
        return self.started

    def cold_start_s(self, limits: EngineLimits) -> float:
        """Return what starting at the limits in a process of its own should take.

        As it took at the ceiling, but for batches that such an engine is not warmed up with.
        Its process has begun before, where that is worth it, and another's begins meanwhile.
        """
        top = self.ceiling
        share = max(
            limits.max_num_seqs / top.max_num_seqs,
            limits.max_num_batched_tokens / top.max_num_batched_tokens,
        )
        start_s = self.start_s - self.warm_up_s * (1 - min(1.0, share))
        process_s = self.process.first_answer_s
        return max(process_s, start_s) if process_s > WORTH_S else process_s + start_s

    @property
    def restarts_per_config(self) -> bool:
        """Whether the engine cannot change its limits."""
        return self.info is not None and not self.info.can_change_limits

    def measure(
        self,
        names: Sequence[str],
        limits: EngineLimits,
        plan: ReplayPlan,
        slos: Sequence[Slo],
        on_progress: Callable[[Progress], bool] | None = None,
        on_log: Callable[[ReplayLog], None] | None = None,
    ) -> Measurement | Failure:
        """Replay the named traces one after the other and pool the results.

        At the plan's load, where that is another than theirs. on_log receives each trace's log
        before it is pooled.
        """
        self.ensure_started(limits)
        recorded = self._traces[names[0]].load
        names = [self._at_load(name, plan.load) for name in names]
        logs: list[ReplayLog] = []
        cut = plan.cut
        try:
            for name in names:
                log = self.process.replay(name, limits, replace(plan, cut=cut), on_progress)
                logs.append(log)
                if on_log is not None:
                    on_log(log)
                if log.cut_reason is not None:
                    break
                cut = _what_is_left(cut, log)
        except EngineError as error:
            self.started = None
            return Failure(error.message)
        return replace(measure(logs, slos), load=plan.load * recorded)

    def _at_load(self, name: str, load: float) -> str:
        """Return the name under which a trace is replayable at a load."""
        if load == 1:
            return name
        scaled = f"{name} at another load"
        trace = at_load(self._traces[name], load)
        # Not kept among the traces: a later load takes its place.
        self.process.load(scaled, trace, self.seed)
        return scaled

    @contextmanager
    def cold(
        self, limits: EngineLimits, changes: Mapping[str, object] | None = None
    ) -> Iterator[Failure | None]:
        """Have what replays meanwhile do so on an engine started as it would be deployed.

        It starts once more if it does not start, and then gives what went wrong. How many
        KV-cache blocks such a start has is kept in `cold_blocks`, unless the configuration has
        `changes`.
        """
        before = self.info, self.start_s, self.warm_up_s
        started = self._start_cold(limits, changes)
        if isinstance(started, EngineError):
            started = self._start_cold(limits, changes)
        failure = Failure(started.message) if isinstance(started, EngineError) else None
        if isinstance(started, EngineStart) and not changes:
            self.cold_blocks[limits] = started.info.num_blocks
        try:
            yield failure
        finally:
            # The next replay needs an engine that can take any limits again.
            self.started = None
            self.info, self.start_s, self.warm_up_s = before

    def _start_cold(
        self, limits: EngineLimits, changes: Mapping[str, object] | None
    ) -> EngineStart | EngineError:
        """Start; return what went wrong if it does not start."""
        try:
            return self._start(limits, changes)
        except EngineError as error:
            self.started = None
            return error


def measure_capacity(
    measure_at: Callable[[float], Measurement | Failure],
    traces: Sequence[Trace],
    start: float,
    slos: Sequence[Slo],
    near: float | None = None,
) -> Measurement | Failure:
    """Return the measurement at the largest load at which the SLOs hold, and that load.

    `measure_at` replays the traces at a multiple of their load, `start` is the first to try,
    or what of its doublings is `near` where that is known to be about the edge.
    Capacity is a multiple of the recorded load, whatever load the traces already are at: what
    their whole sessions come to at the load that is borne. It is never above what the engine
    finishes when it is never idle, since more is not sustained.
    Where the SLOs hold at no load, the measurement at the first, and capacity 0.
    """
    measured: dict[float, Measurement] = {}
    loads = loads_to_try(start, near)
    try:
        load = next(loads)
        while True:
            outcome = measure_at(load)
            if isinstance(outcome, Failure):
                return outcome
            measured[load] = outcome
            load = loads.send(holds(outcome, slos))
    except StopIteration as end:
        borne: float | None = end.value
    if borne is None:
        return replace(next(iter(measured.values())), capacity=0.0)
    offered = [at_load(trace, borne) for trace in traces]
    return replace(measured[borne], capacity=multiple_of(offered))


def holds(measured: Measurement, slos: Sequence[Slo]) -> bool:
    """Whether every SLO holds and the load is sustained."""
    is_within = not any(slo.is_broken_by(measured) for slo in slos)
    return is_within and measured.is_sustained and measured.completed > 0


def _what_is_left(cut: CutRule, log: ReplayLog) -> CutRule:
    """Return what of a cut rule remains after one of several windows."""
    left = cut
    if cut.late_s is not None:
        late = int((log.timelines.e2e_s > cut.late_s).sum())
        left = replace(left, allowed_late=cut.allowed_late - late)
    if cut.max_clock_s is not None:
        span_s = log.clock_s - float(log.timelines.due_s.min())
        left = replace(left, max_clock_s=cut.max_clock_s - span_s)
    if cut.max_wall_s is not None:
        left = replace(left, max_wall_s=cut.max_wall_s - log.wall_s)
    return left
