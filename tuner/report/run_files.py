"""A run directory as the page reads it.

Answers what a run left beside its result, with types, and says which file is missing or
damaged. Nothing is written here and no lock is taken: every file of a run is
replaced whole, so a run that goes on can be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, UsageError
from tuner.files import read_json
from tuner.replay.series import ReplayTimelines, SavedTimelines
from tuner.report.words import percent
from tuner.run.directory import COMPARE_FILE, RUN_FILE, TIMELINES_FILE
from tuner.run.records import LimitsRecord
from tuner.run.result import RunResult, read_result
from tuner.shadow.calibration import error_words

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStrategy(LimitsRecord):
    """One strategy of the field, as `tune compare` keeps it.

    `load` is the multiple of the recorded arrivals, `window` says of which part of the trace.
    """

    strategy: str
    measurement: dict[str, Any] | None
    failure: str | None = None
    engine: str = ""
    load: float = 1.0
    window: str = ""


class _Stretch(msgspec.Struct, frozen=True):
    """What is measured of a window, whatever warms it up."""

    start_s: float
    end_s: float


class _Run(msgspec.Struct, frozen=True):
    windows: list[_Stretch] = []
    predicted_windows: list[_Stretch] = []


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run as its files tell it."""

    name: str
    result: RunResult
    timelines: tuple[ReplayTimelines, ...]
    predicted_same_requests: bool
    strategies: Mapping[str, Sequence[SavedStrategy]]

    @property
    def current(self) -> EngineLimits:
        """The configuration that the run began with."""
        return self.result.current

    @property
    def shown(self) -> EngineLimits:
        """Whose gain is told: the one to change to, or the best there was to keep from."""
        return self.result.shown

    @property
    def shown_as(self) -> str:
        """What the page calls the one whose gain is told."""
        advice = self.result.recommendation
        return "recommended" if advice is not None and advice.is_change else "best found"


def read_run(path: Path) -> RunFiles:
    """Return what a run directory holds.

    Raises: UsageError if there is no result, or a file is damaged or of another version.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a run directory", "name one, as runs/2026-11-20T14-03-00"
        )
    result = read_result(path)
    run = _read(path / RUN_FILE, _Run, _Run())
    return RunFiles(
        # A folder that the path leads to may have a name that is no text.
        name=os.fsencode(path.resolve().name).decode(errors="replace"),
        result=result,
        timelines=_read(path / TIMELINES_FILE, SavedTimelines, SavedTimelines()).replays,
        predicted_same_requests=bool(run.windows) and run.windows == run.predicted_windows,
        strategies=_read(path / COMPARE_FILE, dict[str, list[SavedStrategy]], {}),
    )


def _read(path: Path, kind: type[T], missing: T) -> T:
    hint = "the file is damaged, or another version wrote it"
    return read_json(path, kind, hint) if path.is_file() else missing


def shadow_error_words(result: RunResult) -> str:
    """Return how wrong the shadow said it may be and on what; empty where none spoke."""
    wrong = shadow_error(result)
    if wrong is None:
        return ""
    is_derived = Caveat.DERIVED in {caveat.id for caveat in result.caveats}
    return error_words(percent(wrong), is_derived=is_derived)


def shadow_error(result: RunResult) -> float | None:
    """Return how wrong the shadow said it may be, None where none spoke."""
    profile = result.provenance.profile
    return None if profile is None else profile.error_ratio
