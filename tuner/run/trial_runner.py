"""Live trials: each is measured, judged and on disk before anything else happens.

What to try is decided by the stages of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, StorageError
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.runner import EngineRunner, Failure
from tuner.run.context import RunContext, Workload
from tuner.run.directory import TRIALS_FILE
from tuner.search.objective import Score
from tuner.search.trials import Phase, Trial

# Engine deaths after which the run gives up, in a row and below what has worked: ours; one may
# be chance, three are the engine's fault.
MAX_DEATHS = 3


@dataclass(slots=True)
class TrialRunner:
    """Replays settings on the run's engine and keeps what came out."""

    context: RunContext
    engine: EngineRunner
    _deaths: int = field(default=0, init=False)
    _announced: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        """Leave out what an earlier process of the run has announced."""
        self._announced |= {trial.number for trial in self.context.journal.records()}

    def measure(
        self,
        limits: EngineLimits,
        phase: Phase,
        workload: Workload,
        cut: CutRule,
        race_round: int = 0,
        on_log: Callable[[ReplayLog], None] | None = None,
        *,
        failure: Failure | None = None,
    ) -> tuple[Measurement | Failure, Trial]:
        """Measure once and put it on disk, whatever came out; return it and its record.

        on_log receives each piece's log, with every step in it. What is a failure already is
        kept as one, and nothing is replayed.

        Raises: EngineError when the engine cannot be kept alive.
        """
        context = self.context
        number = context.journal.begin(limits)
        context.listener.trial_started(number, limits, phase)
        outcome = failure or workload.replay_on(
            self.engine, limits, cut, self.progressed, on_log
        )
        record = judged(number, limits, phase, outcome, workload, race_round, context.attempt)
        context.run_dir.is_measured = True
        try:
            counts = context.journal.finish(number, record)
        except StorageError:
            # What was measured goes on with --resume.
            context.run_dir.append_line(TRIALS_FILE, record)
            raise
        if counts:
            self.announce()
        self._check_alive(limits, outcome)
        return outcome, record

    def measure_cold(
        self,
        limits: EngineLimits,
        workload: Workload,
        start: int,
        wants_more: Callable[[Sequence[Score]], bool],
    ) -> None:
        """Replay on an engine started with the limits, while more is wanted, each put on disk.

        `wants_more` is asked of what it has shown by then. The trials' round is the number of
        the start. What fails or is cut ends it.

        Raises: EngineError when the engine cannot be kept alive.
        """
        self.context.listener.note(f"starting {limits} as it would be deployed")
        shown: list[Score] = []
        with self.engine.cold(limits) as failure:
            while not shown or wants_more(shown):
                cut = self.context.within_time
                _, trial = self.measure(
                    limits, Phase.COLD, workload, cut, start, failure=failure
                )
                if not trial.is_whole:
                    break
                shown.append(trial.score)

    def announce(self) -> None:
        """Put on disk and announce every live trial that has ended since, also elsewhere."""
        context = self.context
        new = [
            t
            for t in context.journal.records()
            if t.number not in self._announced and t.is_live
        ]
        if not new:
            return
        context.keep_trials()
        for trial in new:
            self._announced.add(trial.number)
            context.listener.trial_ended(trial, context.left_s)

    def _check_alive(self, limits: EngineLimits, outcome: Measurement | Failure) -> None:
        """Give up on an engine that died too often where it should have lived."""
        if not isinstance(outcome, Failure):
            self._deaths = 0
            return
        self._deaths += self._should_live(limits)
        if self._deaths >= MAX_DEATHS:
            raise EngineError(
                f"the engine died {MAX_DEATHS} times in a row: {outcome.cause}",
                f"see {self.context.run_dir.engine_log}",
            )

    def _should_live(self, limits: EngineLimits) -> bool:
        """Whether a failure here speaks against the engine, not against these limits."""
        trials = self.context.journal.records()
        lived = [t.limits for t in trials if t.is_live and t.is_whole]
        return not lived or any(limits.within(others) for others in lived)

    def progressed(self, progress: Progress) -> bool:
        """Tell how far a replay is; it goes on."""
        self.context.listener.progress(progress)
        return True


def judged(
    number: int,
    limits: EngineLimits,
    phase: Phase,
    outcome: Measurement | Failure,
    workload: Workload,
    race_round: int = 0,
    attempt: str = "",
    prediction: int = 0,
) -> Trial:
    """Return a trial's record."""
    score, cause, measured = workload.score(outcome), "", None
    if isinstance(outcome, Failure):
        cause = outcome.cause
    else:
        measured = outcome.as_json()
    return Trial.of(
        number, limits, phase, race_round, score, measured, cause, attempt, prediction
    )
