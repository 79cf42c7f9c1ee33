"""What receives the progress of a run while it goes on."""

from __future__ import annotations

from pathlib import Path

from tuner.engine.limits import EngineLimits
from tuner.replay.loop import Progress
from tuner.run.result import RunResult
from tuner.search.trials import Phase, Trial


def clock_text(seconds: float) -> str:
    """Write a duration as people say it.

    >>> clock_text(75), clock_text(-3)
    ('1:15', '0:00')
    """
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


class Listener:
    """Who receives what the run is doing; as it stands it does nothing with it."""

    def note(self, text: str) -> None:
        """Receive a sentence worth reading."""

    def current_known(self, current: EngineLimits) -> None:
        """Receive the limits that are run with now, before any trial."""

    def trial_recalled(self, trial: Trial) -> None:
        """Receive a trial that an earlier process of a resumed run has made."""

    def trial_started(self, number: int, limits: EngineLimits, phase: Phase) -> None:
        """Receive that a replay begins."""

    def progress(self, progress: Progress) -> None:
        """Receive how far a replay is."""

    def trial_ended(self, trial: Trial, left_s: float) -> None:
        """Receive a trial that ended and is on disk."""

    def result_written(self, result: RunResult, run_dir: Path) -> None:
        """Receive the result on disk: complete, interrupted or failed, as it says."""
