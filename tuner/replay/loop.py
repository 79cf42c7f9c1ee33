"""Replay a trace through any engine and note the instants of every request.

The loop owns the clock. On the virtual clock it adds what each step took and, when the engine
is idle, jumps to the next arrival: hours of quiet traffic cost nothing and no sleep blurs a
measurement. On the wall clock it waits for real. Latency counts from the instant a request
was due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

import numpy as np

from tuner.engine.gpu import GpuLog
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Emitted, Engine, Prompt, Step
from tuner.engine.steps import StepColumns, StepLog, StepSummary
from tuner.errors import ReplayError
from tuner.replay.arrivals import (
    Ahead,
    CausalArrivals,
    ClockKind,
    ReplayClock,
    check_priorities,
)
from tuner.replay.load import offered_work_s
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome, TimelineRecorder, Timelines
from tuner.stats import Ints
from tuner.traffic.traces import LoadModel, Trace

# How often the caller receives progress and may stop the replay, in wall seconds: ours.
PROGRESS_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a running replay stands."""

    sent: int
    ended: int
    offered: int
    clock_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class ReplayLog:
    """Everything one replay brought out.

    `cut_reason` is None when the replay ran to its end. `kept_steps` is every step where
    the plan asked for them. A closed loop offers what the engine takes, so that nothing can be
    told of a load; `unserved_ratio` is the share of what its recording has in flight that was
    left when no request was. `gpu` is what the driver said meanwhile. `brought` counts the
    steps of answers that brought out one token, two, three and so on, for as many as drafts
    can bring: without the first, and those near an end, where fewer are left. Empty of a
    simulation, which was told.

    Units: seconds; clock_s on the replay's clock, wall_s real.
    """

    timelines: Timelines
    steps: StepSummary
    clock_s: float
    wall_s: float
    cut_reason: str | None
    kept_steps: StepColumns | None = None
    is_closed_loop: bool = False
    gpu: GpuLog | None = None
    unserved_ratio: float = 0.0
    brought: tuple[int, ...] = ()


def log_of(
    trace: Trace,
    timelines: Timelines,
    steps: StepSummary,
    limits: EngineLimits,
    plan: ReplayPlan,
    *,
    clock_s: float,
    wall_s: float,
    cut_reason: str | None,
    kept_steps: StepColumns | None,
) -> ReplayLog:
    """Return the log of a replay that has ended, without its lead-in.

    Of requests it holds those that were recorded after it, also one that a fast engine has
    begun by then; of steps, and of the gaps between tokens, those that came after it.

    Raises: ReplayError if nothing was due after the lead-in.
    """
    lead_in_s, is_closed = trace.lead_in_s, plan.load_model is LoadModel.CLOSED
    if plan.gate is not None:
        timelines = _with_truncated(timelines, trace)
    if not is_closed:
        most = math.inf if plan.batches is None else plan.batches.size
        work_s = offered_work_s(trace, timelines, steps, limits, most)
        timelines = replace(timelines, work_s=work_s)
    if lead_in_s:
        timelines = timelines.rows(_after(trace), lead_in_s)
        if kept_steps is not None:
            kept_steps = replace(kept_steps, end_s=kept_steps.end_s - lead_in_s)
    return ReplayLog(
        timelines,
        steps,
        max(0.0, clock_s - lead_in_s),
        wall_s,
        cut_reason,
        kept_steps,
        is_closed,
        unserved_ratio=_unserved_ratio(trace, plan, clock_s) if cut_reason is None else 0.0,
    )


def _unserved_ratio(trace: Trace, plan: ReplayPlan, clock_s: float) -> float:
    """Return the share of what a recording has in flight that it has after the clock's end."""
    if plan.load_model is not LoadModel.CLOSED or plan.concurrency is not None:
        return 0.0
    times_s, in_flight = trace.recorded_concurrency()
    left_s = np.diff(np.maximum(times_s, clock_s))
    total_s = float(in_flight[:-1] @ np.diff(times_s))
    return float(in_flight[:-1] @ left_s) / total_s if total_s > 0 else 0.0


def _after(trace: Trace) -> Ints:
    """Return the rows that are measured. Raises: ReplayError if there are none."""
    rows = np.arange(trace.led_in, len(trace))
    if not rows.size:
        raise ReplayError(
            f"no request is due after the lead-in of {trace.lead_in_s:g} s",
            "choose a shorter one, or a longer part of the trace",
        )
    return rows


def _with_truncated(timelines: Timelines, trace: Trace) -> Timelines:
    """Return the timelines with answers that ended before their recorded length marked so."""
    cut_off = timelines.completed & (timelines.output_tokens < trace.output_tokens)
    outcome = np.where(cut_off, int(Outcome.TRUNCATED), timelines.outcome)
    return replace(timelines, outcome=outcome)


class Prompts(Protocol):
    """Where a replay takes its prompts from."""

    def begin(self, *, turns_wait: bool) -> None:
        """Begin a replay, in which next turns wait for answers or do not."""

    def answered(self, index: int, ids: Sequence[int]) -> None:
        """Take tokens of an answer, in order, which a next turn may begin with."""

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of the trace's row."""


class _Replay:
    """One run of the loop."""

    def __init__(
        self, engine: Engine, trace: Trace, prompts: Prompts, plan: ReplayPlan
    ) -> None:
        self._engine, self._trace, self._prompts, self._plan = engine, trace, prompts, plan
        outputs = plan.answered_tokens(trace.output_tokens)
        self._too_long = trace.prompt_tokens + outputs > engine.info.max_model_len
        self._outputs = outputs.tolist()
        self._record = TimelineRecorder(trace.due_s)
        self._steps = self._new_steps()
        self._measures, self._led_in = trace.lead_in_s == 0, trace.led_in
        self._arrivals = plan.arrivals(trace)
        prompts.begin(turns_wait=isinstance(self._arrivals, CausalArrivals))
        self._ahead = Ahead(
            self._arrivals,
            self._prepare,
            lambda row: int(trace.prompt_tokens[row]),
            len(trace),
            pauses=plan.clock is ClockKind.VIRTUAL,
        )
        self._ahead.fill(0.0)
        self._clock = ReplayClock(plan.clock)
        self._sent = 0
        self._ended = 0
        self._first_due_s: float | None = None
        # By when they were due, the oldest first.
        self._in_flight: dict[int, float] = {}
        self._at_gate: deque[tuple[float, int]] = deque()
        self._late: set[int] = set()
        self._brought = [0] * (1 + engine.info.draft_tokens)

    def _prepare(self, row: int) -> None:
        """Make a request ready; one that is too long will be refused."""
        if not self._too_long[row]:
            self._engine.prepare(row, self._prompts.prompt(row), self._outputs[row])

    def _new_steps(self) -> StepLog:
        info, keep = self._engine.info, self._plan.keep_steps
        is_predicted = info.kind == "shadow"
        return StepLog(keep=keep, predicted=is_predicted, draft_slots=info.draft_slots)

    def run(self, on_progress: Callable[[Progress], bool] | None) -> ReplayLog:
        """Replay to the end, or until a cut rule or the caller stops it."""
        heard_s = 0.0
        cut: str | None = None
        while cut is None and self._turn():
            cut = self._cut_reason()
            wall_s = self._clock.wall_s
            if cut is None and wall_s - heard_s >= PROGRESS_EVERY_S and on_progress is not None:
                heard_s = wall_s
                if not on_progress(self._progress(wall_s)):
                    cut = "stopped by the caller"
        wall_s = self._clock.wall_s
        self._clear()
        steps, step_columns = self._steps.finish()
        log = log_of(
            self._trace,
            self._record.finish(),
            steps,
            self._engine.limits,
            self._plan,
            clock_s=self._clock.now_s,
            wall_s=wall_s,
            cut_reason=cut,
            kept_steps=step_columns,
        )
        return replace(log, brought=tuple(self._brought))

    def _turn(self) -> bool:
        """Admit what is due, then step or let idle time pass; False when all is done."""
        if not self._measures and self._clock.now_s >= self._trace.lead_in_s:
            self._measures = True
            self._steps = self._new_steps()
            self._record.begin_to_measure()
        if self._clock.now_s >= self._arrivals.end_s:
            self._leave_unfinished()
            return False
        self._admit()
        if self._engine.has_work():
            self._take(self._engine.step())
            self._time_out()
            self._ahead.fill(self._clock.now_s)
            return True
        due_s = self._arrivals.next_due_s(self._clock.now_s, len(self._in_flight))
        if due_s is None:
            if self._in_flight:
                raise ReplayError(
                    f"{len(self._in_flight)} requests are in flight but the engine has no work",
                    "this is a defect of the engine or of its adapter; see the engine's log",
                )
            return False
        self._ahead.fill(self._clock.now_s)
        self._clock.idle_until(due_s)
        return True

    def _admit(self) -> None:
        """Hand over every request that is due by now, or leave it to the gate."""
        self._let_in()
        gate = self._plan.gate
        while True:
            now_s = self._clock.now_s
            next_s = self._arrivals.next_due_s(now_s, len(self._in_flight))
            if next_s is None or next_s > now_s:
                return
            row, due_s = self._arrivals.pop(now_s)
            self._ahead.went(row)
            self._sent += 1
            self._record.due(row, due_s)
            if self._first_due_s is None and row >= self._led_in:
                self._first_due_s = due_s
            if self._too_long[row]:
                self._end(row, Outcome.REFUSED)
                continue
            self._record.sent(row, now_s)
            if gate is None or len(self._in_flight) < gate.max_in_flight:
                self._hand_over(row, due_s)
            elif len(self._at_gate) < gate.max_queued:
                self._at_gate.append((due_s, row))
            else:
                self._end(row, Outcome.TURNED_AWAY)

    def _let_in(self) -> None:
        """Drop who has waited at the gate for too long, and let in whom there is room for."""
        gate, now_s, patience_s = self._plan.gate, self._clock.now_s, self._plan.timeout_s
        while gate is not None and self._at_gate:
            due_s, row = self._at_gate[0]
            if now_s - due_s > self._plan.wait_s:
                is_gone = patience_s is not None and now_s - due_s > patience_s
                self._end(row, Outcome.TIMED_OUT if is_gone else Outcome.TURNED_AWAY)
            elif len(self._in_flight) < gate.max_in_flight:
                self._hand_over(row, due_s)
            else:
                return
            self._at_gate.popleft()

    def _hand_over(self, row: int, due_s: float) -> None:
        """Hand a request over to the engine."""
        self._engine.add(row, self._prompts.prompt(row), self._outputs[row])
        self._in_flight[row] = due_s

    def _take(self, step: Step) -> None:
        """Move the clock and stamp what the step brought out."""
        self._clock.step(step.duration_s)
        now_s = self._clock.now_s
        self._steps.append(step, now_s)
        for out in step.emitted:
            if out.row not in self._in_flight:
                continue
            if out.tokens:
                if len(self._brought) > 1:
                    self._count(out)
                self._record.tokens(out.row, out.tokens, now_s)
                self._prompts.answered(out.row, out.ids)
            if out.is_last:
                self._answered(out.row, self._in_flight[out.row])

    def _count(self, out: Emitted) -> None:
        """Count what a step brought out of a request, if it might have been any number."""
        before = self._record.answered(out.row)
        if before and self._outputs[out.row] - before >= len(self._brought):
            self._brought[min(out.tokens, len(self._brought)) - 1] += 1

    def _answered(self, row: int, due_s: float) -> None:
        """Note an answer: one that the engine failed midway, or whose client has gone, is none.

        vLLM ends a request so whose blocks a KV connector could not bring.
        """
        if self._record.answered(row) < self._outputs[row]:
            self._end(row, Outcome.ABORTED)
            return
        e2e_s = self._clock.now_s - due_s
        patience_s, late_s = self._plan.timeout_s, self._plan.cut.late_s
        if patience_s is not None and e2e_s > patience_s:
            self._end(row, Outcome.TIMED_OUT)
            return
        if late_s is not None and e2e_s > late_s and row >= self._led_in:
            self._late.add(row)
        self._end(row, Outcome.COMPLETED)

    def _end(self, row: int, outcome: Outcome) -> None:
        """Close a request's book."""
        self._in_flight.pop(row, None)
        self._record.ended(row, outcome)
        self._ended += 1
        self._arrivals.ended(row, self._clock.now_s)

    def _time_out(self) -> None:
        """Drop requests whose client would have gone."""
        if self._plan.timeout_s is None:
            return
        gone = list(self._older_than(self._plan.timeout_s))
        if gone:
            self._engine.abort(gone)
            for row in gone:
                self._end(row, Outcome.TIMED_OUT)

    def _leave_unfinished(self) -> None:
        """Close the books where the recording ends: of what is in flight, and of the rest.

        The rest was not requested before: it becomes due only now.
        """
        now_s = self._clock.now_s
        if in_flight := list(self._in_flight):
            self._engine.abort(in_flight)
        for row in in_flight:
            self._end(row, Outcome.UNFINISHED)
        for row in range(self._sent, len(self._trace)):
            self._record.due(row, now_s)
            self._record.ended(row, Outcome.UNFINISHED)

    def _cut_reason(self) -> str | None:
        """Return why going on is pointless, or None."""
        cut, now_s = self._plan.cut, self._clock.now_s
        span_s = 0.0 if self._first_due_s is None else now_s - self._first_due_s
        if cut.max_clock_s is not None and span_s > cut.max_clock_s:
            return cut.clock_text
        if cut.max_wall_s is not None and self._clock.wall_s > cut.max_wall_s:
            return cut.wall_text
        if cut.late_s is None:
            return None
        self._note_overdue(cut.late_s)
        if len(self._late) > cut.allowed_late:
            return cut.late_text
        return None

    def _note_overdue(self, late_s: float) -> None:
        """Count what is in flight for longer than late_s, where that is certain to stay.

        Ages only grow, hence a row that was late once stays late, unless its client may yet
        leave.
        """
        if self._plan.timeout_s is None:
            self._late.update(row for row in self._older_than(late_s) if row >= self._led_in)

    def _older_than(self, age_s: float) -> Iterator[int]:
        """Return what is in flight for longer."""
        now_s = self._clock.now_s
        overdue = takewhile(lambda sent: now_s - sent[1] > age_s, self._in_flight.items())
        return (row for row, _ in overdue)

    def _progress(self, wall_s: float) -> Progress:
        return Progress(self._sent, self._ended, len(self._trace), self._clock.now_s, wall_s)

    def _clear(self) -> None:
        """Leave the engine idle; what was in flight stays aborted."""
        if self._in_flight:
            self._engine.abort(list(self._in_flight))
        while self._engine.has_work():
            self._engine.step()


def replay(
    engine: Engine,
    trace: Trace,
    prompts: Prompts,
    plan: ReplayPlan,
    on_progress: Callable[[Progress], bool] | None = None,
) -> ReplayLog:
    """Replay the trace on the engine at its current limits and return every instant.

    The engine starts with an empty prefix cache and is idle again afterwards. on_progress is
    called a few times a second; when it returns False the replay stops and what was in flight
    counts as aborted. A closed loop after a recorded concurrency stops where the recording
    does, and what was in flight or not sent by then counts as unfinished.

    The trace is taken as it is; whoever plans another load hands over that one.

    Units: seconds on the replay's clock, zero at the trace's own zero.
    Raises: EngineError when the engine fails; ReplayError when the replay itself is void;
        TraceError when a closed loop asks for a concurrency that was not recorded; UsageError
        for a lead-in of one, and for priorities on an engine that serves by arrival.
    """
    check_priorities(trace, has_priorities=engine.info.has_priorities)
    engine.reset()
    return _Replay(engine, trace, prompts, plan).run(on_progress)
