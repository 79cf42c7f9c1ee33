"""How a trace is to be replayed, and when a replay may stop early, as the user chose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tuner.engine.protocol import EngineFacts
from tuner.errors import Caveat, UsageError
from tuner.gate import GateLimits
from tuner.replay.arrivals import (
    Arrivals,
    BatchArrivals,
    CausalArrivals,
    ClockKind,
    ClosedArrivals,
    OpenArrivals,
    Sessions,
    StaticBatches,
    check_arrivals,
)
from tuner.stats import Ints, short
from tuner.traffic.traces import LoadModel, Trace


@dataclass(frozen=True, slots=True)
class CutRule:
    """When a replay can no longer matter, with certainty rather than by guess.

    `allowed_late` requests may take longer than `late_s` end to end; one more, and the tail
    is worse than that whatever follows. `max_clock_s` bounds the replay's own clock, counted
    from the first due time as rates are, and `max_wall_s` real time. None switches a rule off.
    """

    late_s: float | None = None
    allowed_late: int = 0
    max_clock_s: float | None = None
    max_wall_s: float | None = None

    @property
    def late_text(self) -> str:
        """Why a replay was cut of which too many requests were late."""
        return f"more than {self.allowed_late} requests took over {_seconds(self.late_s)}"

    @property
    def clock_text(self) -> str:
        """Why a replay was cut that took too long on its own clock."""
        return f"took longer than {_seconds(self.max_clock_s)} on the replay's clock"

    @property
    def wall_text(self) -> str:
        """Why a replay was cut that took too long."""
        return f"took longer than {_seconds(self.max_wall_s)}"


def _seconds(bound_s: float | None) -> str:
    return f"{short(bound_s or 0.0)} s"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How a trace is replayed.

    `concurrency` is the number in flight that a closed loop holds; None takes the one that
    the trace recorded. `timeout_s` is the patience of a client, None for no end of it. With
    `keep_steps` the log holds every step, to fit a step-time model to. `load` is a multiple of
    the trace's arrivals, over the same time. `sessions` says whether the turns of a session
    wait for answers; with `batches` requests go in static batches, in an open loop only.
    `gate` is what stands in front of the engine; it turns away and lets in between two steps.

    Units: seconds.
    Raises: UsageError if the parts contradict each other.
    """

    load_model: LoadModel = LoadModel.OPEN
    concurrency: int | None = None
    clock: ClockKind = ClockKind.VIRTUAL
    timeout_s: float | None = None
    cut: CutRule = CutRule()
    keep_steps: bool = False
    load: float = 1.0
    sessions: Sessions = Sessions.CAUSAL
    batches: StaticBatches | None = None
    gate: GateLimits | None = None

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if self.concurrency is not None and self.load_model is LoadModel.OPEN:
            raise UsageError(
                "--concurrency holds requests in flight and needs --load-model closed"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.batches is not None and self.load_model is LoadModel.CLOSED:
            raise UsageError("static batches gather arrivals and need --load-model open")
        is_open = self.load_model is LoadModel.OPEN and self.batches is None
        if self.gate is not None and not is_open:
            raise UsageError(
                "a gate turns away arrivals, and needs --load-model open without static batches"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"the request time-out must be above 0 s, got {self.timeout_s:g}")

    @property
    def bears_loads(self) -> bool:
        """Whether more load is more in flight: not where that number is given."""
        return self.concurrency is None

    def on(self, trace: Trace) -> Trace:
        """Return the trace as windows of it are replayed by this plan.

        Raises: TraceError if it recorded no latency for a closed loop that follows them.
        """
        follows = self.load_model is LoadModel.CLOSED and self.concurrency is None
        return trace.in_flight_as_recorded() if follows else trace

    def arrivals(self, trace: Trace) -> Arrivals:
        """Choose how the trace's requests arrive; no concurrency means the recorded one.

        A recorded one ends with its last change, which is its last answer where it follows from
        latencies; a given number is held until every request has gone.

        Raises: TraceError when a closed loop asks for a concurrency that was not recorded, or
            an open one for arrivals that were not; UsageError for a lead-in of a closed loop.
        """
        check_arrivals(trace, self.load_model)
        if self.load_model is LoadModel.OPEN:
            if self.batches is not None:
                return BatchArrivals(trace.due_s, self.batches)
            if trace.turns is not None and self.sessions is Sessions.CAUSAL:
                return CausalArrivals(trace.due_s, trace.turns)
            return OpenArrivals(trace.due_s)
        if self.concurrency is not None:
            return ClosedArrivals([0.0], [self.concurrency], len(trace))
        times_s, in_flight = trace.recorded_concurrency()
        end_s = max(float(times_s[-1]), float(trace.due_s[-1]))
        return ClosedArrivals(times_s.tolist(), [int(c) for c in in_flight], len(trace), end_s)

    @property
    def most_lead_in_s(self) -> float:
        """For how long what came before a window can warm it up.

        Not at all in a closed loop: which requests come after it, if any, is the engine's
        speed, so that no two settings would be measured on the same ones.
        """
        return 0.0 if self.load_model is LoadModel.CLOSED else math.inf

    @property
    def wait_s(self) -> float:
        """For how long a request waits before the gate at most: its time-out, or its client."""
        queue_s = None if self.gate is None else self.gate.queue_timeout_s
        return min(math.inf if s is None else s for s in (queue_s, self.timeout_s))

    def answered_tokens(self, output_tokens: Ints) -> Ints:
        """Return how long answers become that were recorded so long."""
        most = None if self.gate is None else self.gate.max_output_tokens
        return output_tokens if most is None else np.minimum(output_tokens, most)


# One step more than answers of so many tokens take is a twentieth of what decodes: ours.
SHORT_ANSWER_TOKENS = 20


def doubts(facts: EngineFacts, plan: ReplayPlan, output_tokens: Ints) -> frozenset[Caveat]:
    """Return what is doubtful of all replays of such answers on an engine.

    The clocks of a GPU depend on what it is idle for, which only the wall clock waits out.
    """
    unfounded = set()
    if plan.clock is ClockKind.WALL:
        unfounded.add(Caveat.FULL_CLOCKS)
    answered = plan.answered_tokens(output_tokens)
    if answered.size == 0 or answered.mean() >= SHORT_ANSWER_TOKENS:
        unfounded.add(Caveat.SHORT_ANSWERS)
    return facts.caveats - unfounded
