"""A run directory as the page reads it.

Answers what `result.json`, `run.json` and `timelines.json` hold, with types, and says which
file is missing or damaged. Nothing is written here and no lock is taken: every file of a run is
replaced whole, so a run that goes on can be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.run.directory import COMPARE_FILE, RESULT_FILE, RUN_FILE, TIMELINES_FILE
from tuner.run.result import SCHEMA
from tuner.search.trials import Phase, observation_of

T = TypeVar("T")
Bounds = tuple[float | None, float | None]


class Limits(msgspec.Struct, frozen=True):
    """A pair of limits."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def limits(self) -> EngineLimits:
        """Return them as the engine knows them."""
        return EngineLimits(self.max_num_seqs, self.max_num_batched_tokens)


class Recommendation(Limits, frozen=True):
    """What the run says to do; gains are those of the score, of which less is better."""

    verdict: str
    why: str
    best_measured: Limits
    tied: list[Limits]
    rounds: int
    gain_ratio: float | None
    gain_interval: Bounds | None
    gain_metric: str = ""
    is_predicted: bool = False


class EvidenceRow(msgspec.Struct, frozen=True):
    """One metric of the winner beside the present configuration's."""

    metric: str
    unit: str
    before: float
    after: float
    change_ratio: float | None
    change_interval: Bounds | None
    rounds: int
    is_helped: bool = False


class CaveatText(msgspec.Struct, frozen=True):
    """A caveat as the result holds it."""

    id: str
    text: str


class TraceSource(msgspec.Struct, frozen=True):
    """Which trace was replayed, and how much of it."""

    source: str
    format: str
    sha256: str
    requests: int
    replayed_requests: int
    window: str


class Provenance(msgspec.Struct, frozen=True):
    """Where, when and with what the run was made."""

    made_at: str
    tuner_version: str
    python: str
    trace: TraceSource
    engine: dict[str, Any] | None
    model: str
    options: dict[str, Any]
    engine_starts: int
    wall_s: float
    stages_s: dict[str, float] = {}
    profile: dict[str, Any] | None = None


class Trial(TypedDict):
    """One line of the trials; what a measurement holds is `metrics.Measurement.as_json`."""

    number: int
    engine: str
    phase: str
    race_round: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tier: str
    value: float | None
    metric: str
    others: NotRequired[dict[str, float]]
    attempt: NotRequired[str]
    slo_used: NotRequired[float | str | None]
    load_used: NotRequired[float | None]
    cause: str
    measurement: dict[str, Any] | None


class Compared(Limits, frozen=True):
    """One metric of one configuration, live and foretold, on the same requests."""

    metric: str
    live: float
    shadow: float


class Result(msgspec.Struct, frozen=True):
    """What `result.json` holds."""

    state: str
    method: str
    objective: str
    tail: str
    slos: list[str]
    recommendation: Recommendation | None
    baseline: Limits
    evidence: list[EvidenceRow]
    limited_by: str
    confirmed_cold: dict[str, Any] | None
    capacity: dict[str, Any] | None
    caveats: list[CaveatText]
    provenance: Provenance
    trials: list[Trial]
    trace_description: dict[str, Any] | None = None
    live_against_shadow: list[Compared] | None = None
    ladder: list[int] = []


class SavedTimeline(msgspec.Struct, frozen=True):
    """One window of a replay in bins, as `timeline_record` describes it."""

    start_s: float
    bin_s: float
    arrivals: list[float]
    running: list[float]
    waiting: list[float]
    kv_usage_ratio: list[float]
    kv_peak_ratio: list[float]
    preemptions: list[float]


class SavedReplay(Limits, frozen=True):
    """A replay's timelines, one for each window."""

    engine: str
    windows: list[SavedTimeline]


class SavedStrategy(Limits, frozen=True):
    """One strategy of the field, as `strategies.Row` keeps it."""

    strategy: str
    measurement: dict[str, Any] | None
    failure: str | None = None


class _Timelines(msgspec.Struct, frozen=True):
    replays: list[SavedReplay]


class _Schema(msgspec.Struct, frozen=True):
    schema: int


class _Run(msgspec.Struct, frozen=True):
    windows: list[dict[str, float]] = []
    forecast_parts: list[dict[str, float]] = []


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run as its files tell it."""

    name: str
    result: Result
    timelines: tuple[SavedReplay, ...]
    foretold_same_requests: bool
    strategies: Mapping[str, Sequence[SavedStrategy]] = field(default_factory=dict)

    @property
    def present(self) -> EngineLimits:
        """The configuration that the run began with."""
        return self.result.baseline.limits

    @property
    def shown(self) -> EngineLimits:
        """Whose gain is told: the one to change to, or the best there was to keep from."""
        advice = self.result.recommendation
        if advice is None:
            return self.present
        is_change = advice.verdict == "change"
        return advice.limits if is_change else advice.best_measured.limits

    @property
    def shown_as(self) -> str:
        """What the page calls the one whose gain is told."""
        advice = self.result.recommendation
        is_change = advice is not None and advice.verdict == "change"
        return "recommended" if is_change else "best found"


def read_run(path: Path) -> RunFiles:
    """Return what a run directory holds.

    Raises: UsageError if there is no result, or a file is damaged or of another version.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a run directory", "name one, as runs/2026-11-20T14-03-00"
        )
    if not (path / RESULT_FILE).is_file():
        raise UsageError(
            f"{path} holds no result: {RESULT_FILE} is missing",
            f"if the run was cut off before its first trial, go on with --resume {path}",
        )
    schema = _read(path / RESULT_FILE, _Schema).schema
    if schema != SCHEMA:
        raise UsageError(
            f"{path / RESULT_FILE} has schema {schema}, expected {SCHEMA}",
            "write the report with the version of tune that made the run",
        )
    result = _read(path / RESULT_FILE, Result)
    _check_trials(path / RESULT_FILE, result)
    run = _read(path / RUN_FILE, _Run) if (path / RUN_FILE).is_file() else _Run()
    saved, compared = path / TIMELINES_FILE, path / COMPARE_FILE
    return RunFiles(
        name=path.resolve().name,
        result=result,
        timelines=tuple(_read(saved, _Timelines).replays) if saved.is_file() else (),
        foretold_same_requests=bool(run.windows) and run.windows == run.forecast_parts,
        strategies=_read(compared, dict[str, list[SavedStrategy]])
        if compared.is_file()
        else {},
    )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(path, str(error)) from error


def _check_trials(path: Path, result: Result) -> None:
    """Refuse trials that the search could not have made."""
    try:
        for trial in result.trials:
            observation_of(trial)
    except (ValueError, TypeError, AttributeError, UsageError) as error:
        raise _damaged(path, f"a trial is not one: {error}") from error


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} cannot be read: {why}", "the file is damaged, or another version wrote it"
    )


def live_trials(result: Result) -> list[Trial]:
    """Return the trials that replayed the run's windows live, to their end."""
    return [t for t in result.trials if Phase(t["phase"]).is_on_windows and _is_whole(t)]


def shadow_trials(result: Result) -> list[Trial]:
    """Return what the shadow foretold last."""
    foretold = [t for t in result.trials if t["phase"] == str(Phase.SHADOW)]
    last = max((t["race_round"] for t in foretold), default=0)
    return [t for t in foretold if t["race_round"] == last and _is_whole(t)]


def _is_whole(trial: Trial) -> bool:
    measured = trial["measurement"]
    return measured is not None and not measured.get("cut_reason")


def shadow_error(result: Result) -> float | None:
    """Return how wrong the shadow said it may be, None where none spoke."""
    found = (result.provenance.profile or {}).get("error_ratio")
    return float(found) if isinstance(found, int | float) else None
