"""Traces made for tests, and the short way to replay one on the toy engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.toy import ToySource
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns, StepLog
from tuner.replay.loop import ReplayLog, replay
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome, TimelineRecorder
from tuner.traffic.prompts import TokenPrompt
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace, Turns


class OneRequest(NamedTuple):
    """One request of a trace."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    request_id: str


def request_at(trace: Trace, index: int) -> OneRequest:
    """Return one request of a trace; index counts from 0 in due order."""
    return OneRequest(
        due_s=float(trace.due_s[index]),
        prompt_tokens=int(trace.prompt_tokens[index]),
        output_tokens=int(trace.output_tokens[index]),
        hash_ids=trace.hashes.row(index) if trace.hashes is not None else (),
        request_id=trace.request_ids[index] if trace.request_ids is not None else "",
    )


@dataclass(frozen=True, slots=True)
class ToyPrompts:
    """Prompts that share nothing: each repeats its own row number."""

    trace: Trace

    def begin(self, *, turns_wait: bool) -> None:
        """Begin a replay."""

    def answered(self, index: int, ids: Sequence[int]) -> None:
        """Take the tokens of an answer, which a toy has none of."""

    def prompt(self, index: int) -> TokenPrompt:
        """Return the prompt of a row."""
        return TokenPrompt([index] * int(self.trace.prompt_tokens[index]))


def a_trace(
    due_s: Sequence[float] | NDArray[np.float64],
    prompt: int | Sequence[int] = 10,
    output: int | Sequence[int] = 5,
    e2e_s: Sequence[float] | None = None,
) -> Trace:
    """Return a trace of requests due then; one length stands for all."""
    n = len(due_s)
    return Trace(
        due_s=np.array(due_s, dtype=np.float64),
        prompt_tokens=np.broadcast_to(np.array(prompt, dtype=np.int64), n).copy(),
        output_tokens=np.broadcast_to(np.array(output, dtype=np.int64), n).copy(),
        e2e_s=None if e2e_s is None else np.array(e2e_s, dtype=np.float64),
        source="toy.jsonl",
    )


def steady(n: int, per_s: float, prompt: int = 10, output: int = 20, seed: int = 0) -> Trace:
    """Return n Poisson arrivals at a rate, with lengths that vary by half around theirs."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / per_s, n))
    lengths = rng.uniform(0.5, 1.5, (2, n)) * np.array([[prompt], [output]])
    prompts, outputs = np.maximum(1, lengths.round()).astype(int).tolist()
    return a_trace(due_s, prompts, outputs)


def warm_session() -> Trace:
    """Return a request and its next turn, both of a lead-in of 4 s, and one that is measured.

    Where a request takes 2 s the turn is sent at 5 s, the measured one at 6 s.
    """
    turns = Turns(np.array([-1, 0, -1]), np.array([0.0, 3.0, 0.0]))
    return replace(a_trace([0.0, 1.0, 6.0], 4, 1), turns=turns, lead_in_s=4.0)


def replay_toy(
    trace: Trace,
    limits: EngineLimits,
    source: ToySource | None = None,
    plan: ReplayPlan | None = None,
) -> ReplayLog:
    """Replay a trace on a fresh toy at the limits."""
    engine = (source or ToySource()).start({}, limits)
    plan = plan or ReplayPlan()
    loaded = at_load(trace, plan.load)
    return replay(engine, loaded, ToyPrompts(loaded), plan)


def kept(log: ReplayLog) -> StepColumns:
    """Return every step of a replay whose plan asked for them."""
    assert log.kept_steps is not None
    return log.kept_steps


def a_log(
    lives: Sequence[tuple[float, Sequence[float], Outcome]], cut_reason: str | None = None
) -> ReplayLog:
    """Return the log of requests with these due times, token times and ends, without steps."""
    record = TimelineRecorder(np.array([due_s for due_s, _, _ in lives]))
    clock_s = 0.0
    for row, (due_s, token_s, outcome) in enumerate(lives):
        for at_s in token_s:
            record.tokens(row, 1, at_s)
        record.ended(row, outcome)
        clock_s = max(clock_s, due_s, *token_s)
    return ReplayLog(record.finish(), StepLog().finish()[0], clock_s, 0.0, cut_reason)
