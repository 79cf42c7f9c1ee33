"""Whoever hears of a run while it goes on."""

from __future__ import annotations

from typing import Protocol

from tuner.engine.limits import EngineLimits
from tuner.replay.loop import Progress
from tuner.search.trials import Phase, Trial


class Listener(Protocol):
    """Who hears what the run is doing."""

    def note(self, text: str) -> None:
        """Hear a sentence worth reading."""

    def trial_started(self, number: int, limits: EngineLimits, phase: Phase) -> None:
        """Hear that a replay begins."""

    def progress(self, progress: Progress) -> None:
        """Hear how far a replay is."""

    def trial_ended(self, trial: Trial, left_s: float) -> None:
        """Hear that a replay ended and is on disk."""


class NullListener:
    """A listener who does nothing."""

    def note(self, text: str) -> None:
        """Hear a sentence."""

    def trial_started(self, number: int, limits: EngineLimits, phase: Phase) -> None:
        """Hear that a replay begins."""

    def progress(self, progress: Progress) -> None:
        """Hear how far a replay is."""

    def trial_ended(self, trial: Trial, left_s: float) -> None:
        """Hear that a replay ended."""
