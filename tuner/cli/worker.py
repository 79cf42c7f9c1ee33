"""`tune worker`: take shadow replays from a run's queue until the run is over."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from tuner.cli.console import say
from tuner.cli.inputs import read_traffic
from tuner.cli.inputs import replay_plan as plan_of
from tuner.cli.resume import check_begun_here, with_tuning
from tuner.engine.limits import EngineLimits
from tuner.errors import TraceError, UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.run.directory import PROFILE_FILE, RUN_FILE
from tuner.run.forecast import Forecast
from tuner.run.inputs import fit_lengths
from tuner.run.journal import Journal
from tuner.run.options import DEFAULT_BUDGET_S
from tuner.run.state import judged
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER, PAST_LADDER
from tuner.search.trials import Phase
from tuner.shadow.pool import ReplayTask, ShadowPool, default_jobs
from tuner.shadow.profiles import Profile, read_profile
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window

# How often a worker without work looks for some, and after how long without any it goes:
# ours; a run asks for shadows within minutes, and a dead run never does.
POLL_S = 0.5
PATIENCE_S = 900.0


def run_worker(command: click.Command, options: Mapping[str, Any]) -> int:
    """Work for the run until it is over. Raises: TunerError, KeyboardInterrupt."""
    folder = Path(options["run_dir"])
    stored = _stored(folder)
    check_begun_here(stored["arguments"], folder)
    context = command.make_context("tune", [str(a) for a in stored["arguments"]])
    asked = with_tuning(context.params)
    if options["trace"]:
        asked["trace"] = options["trace"]
    largest_cap = max(asked["max_num_seqs"] or DEFAULT_LADDER) * PAST_LADDER
    trace = read_traffic(asked, largest_cap).trace
    if trace.sha256 != stored["trace_sha256"]:
        raise TraceError(
            f"{' '.join(asked['trace'])} is not the trace that the run was begun with",
            "name its place on this machine with --trace",
        )
    journal = Journal(options["storage"], str(stored["study"]), join=True)
    try:
        done = _Worker(folder, journal, asked, trace, options["jobs"] or default_jobs()).work()
    finally:
        journal.close()
    say(f"the run is over; {done} settings were replayed here")
    return 0


def _stored(folder: Path) -> dict[str, Any]:
    """Return what the run's main process keeps there, without its lock."""
    path = folder / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}",
            "--run names the directory of a run that has begun, shared with this machine",
        ) from error


class _Worker:
    """One process's share of a run's forecast."""

    def __init__(
        self, folder: Path, journal: Journal, asked: Mapping[str, Any], trace: Trace, jobs: int
    ) -> None:
        self._folder, self._journal, self._asked = folder, journal, asked
        self._trace, self._jobs = trace, jobs
        self._done = 0

    def work(self) -> int:
        """Take part in every forecast of the run and return how many settings were done."""
        idle_since_s, finished = time.monotonic(), ""
        while True:
            state = self._journal.state
            if state == "done":
                return self._done
            if state.startswith("forecast") and state != finished:
                before = self._done
                self._take_part(state)
                finished = state if self._journal.state != state else ""
                if self._done > before:
                    idle_since_s = time.monotonic()
            if time.monotonic() - idle_since_s > PATIENCE_S:
                say(f"nothing to do for {PATIENCE_S / 60:.0f} minutes")
                return self._done
            time.sleep(POLL_S)

    def _take_part(self, state: str) -> None:
        """Replay what waits in the queue, until the run asks for something else."""
        if self._journal.waiting(Phase.SHADOW) == 0:
            return
        generation = int(state.split()[1])
        profile = read_profile(self._folder / PROFILE_FILE)
        with self._shadows(profile) as shadows:
            shadows.start_all()
            forecast = self._forecast(profile, shadows, generation)

            def next_task() -> ReplayTask | None:
                claimed = self._journal.claim(Phase.SHADOW)
                if claimed is None:
                    return None
                number, limits = claimed
                return forecast.task(limits, number, self._journal.cut_of(number))

            def is_over() -> bool:
                return self._journal.state != state

            for task, outcome in shadows.drain(next_task, is_over):
                self._finish(task, outcome, forecast)

    def _shadows(self, profile: Profile) -> ShadowPool:
        limits = _stored(self._folder)["ceiling"]
        log = self._folder / f"worker-{socket.gethostname()}-{os.getpid()}.log"
        asked = self._asked
        forced = bool(asked["force_profile"])
        ceiling = EngineLimits(limits["max_num_seqs"], limits["max_num_batched_tokens"])
        return ShadowPool(profile, ceiling, self._jobs, log, asked["seed"], is_forced=forced)

    def _forecast(self, profile: Profile, shadows: ShadowPool, generation: int) -> Forecast:
        """Return the forecast that the main process makes, on the same parts of the trace."""
        asked, stored = self._asked, _stored(self._folder)
        trace, _ = fit_lengths(self._trace, profile.shape.max_model_len, asked["too_long"])
        aim = Aim(
            Objective(asked["objective"]),
            tuple(asked["slo"]),
            plan_of(asked, trace),
            Budget(asked["budget"] or DEFAULT_BUDGET_S),
            None,
        )
        parts = tuple(Window(p["start_s"], p["end_s"]) for p in stored["forecast_parts"])
        forecast = Forecast(trace, aim, shadows, generation, parts)
        forecast.load_parts()
        return forecast

    def _finish(
        self, task: ReplayTask, outcome: Measurement | Failure, forecast: Forecast
    ) -> None:
        record, score, slacks = judged(
            task.number,
            task.limits,
            Phase.SHADOW,
            outcome,
            forecast.goal,
            forecast.generation,
        )
        if self._journal.finish(task.number, score, slacks, record):
            self._done += 1
            say(f"{task.limits}: {str(score.tier)[2:]}")
