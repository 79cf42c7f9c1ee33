"""Rounds of replays that several engines share: each is made whole, by one process.

A round is all its settings in turns on the same engine, so that they can be paired whatever the
speed of its machine is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.runner import EngineRunner
from tuner.run.context import WINDOW, Workload
from tuner.run.journal import Round
from tuner.run.trial_runner import TrialRunner, judged
from tuner.search.budget import Aim
from tuner.search.trials import Phase, Trial
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace

# How often a process without a round looks for one: ours.
POLL_S = 0.5
# Under which name the steps of a round are kept beside it.
STEPS = "steps"

Steps = Sequence[tuple[EngineLimits, StepColumns]]
"""The steps of replays, with the limits of each."""


@dataclass(slots=True)
class RoundReplay:
    """What a round brought out: the records of its replays, and its steps."""

    records: list[Trial] = field(default_factory=list)
    steps: list[tuple[EngineLimits, StepColumns]] = field(default_factory=list)


def replay_round(
    engine: EngineRunner,
    one: Round,
    workloads: Sequence[Workload],
    attempt: str,
    on_progress: Callable[[Progress], bool] | None = None,
) -> RoundReplay:
    """Replay the settings of a round one after the other, each its own. Raises: EngineError."""
    found = RoundReplay()
    for limits, wall_s, workload in zip(one.settings, one.max_wall_s, workloads, strict=True):

        def keep(log: ReplayLog, limits: EngineLimits = limits) -> None:
            if log.kept_steps is not None:
                found.steps.append((limits, log.kept_steps))

        on_log = keep if one.phase is Phase.CALIBRATE else None
        cut = CutRule(max_wall_s=wall_s)
        outcome = workload.replay_on(engine, limits, cut, on_progress, on_log)
        number = one.number if one.phase is Phase.RACE else 0
        found.records.append(judged(0, limits, one.phase, outcome, workload, number, attempt))
    return found


def workloads_of(one: Round, trace: Trace, aim: Aim) -> list[Workload]:
    """Return what a round replays at each of its settings. Raises: TooFewSamplesError."""
    if one.phase is Phase.CALIBRATE:
        part = predicted_part(trace, aim)
        loaded = {load: at_load(part, load) for load in {block.load for block in one.blocks}}
        return [
            Workload.of_piece(block.of(loaded[block.load]), ReplayPlan(), aim)
            for block in one.blocks
        ]
    loaded_aim = replace(aim, plan=replace(aim.plan, load=one.load))
    return [Workload.of(WINDOW, trace, one.windows, loaded_aim)] * len(one.settings)


def predicted_part(trace: Trace, aim: Aim) -> Trace:
    """Return what is predicted of a trace, its lead-in too."""
    recorded = aim.plan.on(trace)
    return recorded if aim.window is None else aim.window.of(recorded).all_measured()


def share_round(
    runner: TrialRunner, workloads: Callable[[Round], Sequence[Workload]], phase: Phase
) -> RoundReplay | None:
    """Replay a round of the queue on the run's own engine; None if nobody has left one.

    Raises: EngineError.
    """
    context = runner.context
    claimed = context.journal.claim(phase)
    if claimed is None:
        runner.announce()
        return None
    number, one = claimed
    context.listener.trial_started(number, one.settings[0], phase)
    found = replay_round(runner.engine, one, workloads(one), context.attempt, runner.progressed)
    context.run_dir.is_measured = True
    context.journal.finish_round(number, found.records)
    runner.announce()
    return found


def packed(steps: Steps) -> list[dict[str, Any]]:
    """Return steps as JSON can hold them."""
    made = []
    for limits, columns in steps:
        file = io.BytesIO()
        np.savez_compressed(file, **{f: getattr(columns, f) for f in _COLUMNS})
        made.append({**asdict(limits), "columns": base64.b85encode(file.getvalue()).decode()})
    return made


def unpacked(content: Sequence[Mapping[str, Any]]) -> Steps:
    """Return the steps that `packed` has packed."""
    found = []
    for one in content:
        limits = EngineLimits(one["max_num_seqs"], one["max_num_batched_tokens"])
        with np.load(io.BytesIO(base64.b85decode(one["columns"]))) as columns:
            found.append((limits, StepColumns(*(columns[name] for name in _COLUMNS))))
    return found


_COLUMNS = tuple(StepColumns.__dataclass_fields__)
