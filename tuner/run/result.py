"""The result of a run: what `result.json` holds, and what everybody reads of it.

One schema, written and read here alone: decision, evidence, trials, caveats and provenance.
What is said of the winner is worked out in `evidence`, wording for a terminal in `displays`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.files import UNREADABLE
from tuner.run.directory import RESULT_FILE, RUN_FILE
from tuner.run.evidence import MetricChange, kv_text, metric_changes
from tuner.run.knobs.records import KnobAdvice
from tuner.run.loads.records import ClientAdvice
from tuner.run.records import (
    Advice,
    CapacityRecord,
    CaveatRecord,
    ColdConfirmation,
    Compared,
    CurrentConfiguration,
    Nearest,
    Provenance,
    Restlessness,
    StartFinding,
)
from tuner.run.variants.records import VariantComparison
from tuner.search.objective import Objective, moved, moved_bounds
from tuner.search.race import UNFINISHED
from tuner.search.trials import Phase, Trial, predictions
from tuner.stats import Estimate

SCHEMA: Final = 2
NOTHING_FEASIBLE: Final = "no configuration met the SLOs"
_RELAX: Final = "relax an SLO, or lower --load, and run again"
_RELAX_ONLY: Final = "relax an SLO and run again: predicted, they hold at no load, however low"
_NAME_A_RUN: Final = "name a run directory, as runs/2026-11-20T14-03-00"
_RESTORE: Final = "restore it, or use the YAML file that the run wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished or interrupted run came to: the content of `result.json`, in its order.

    `recommendation` is None where no configuration meets the SLOs; `nearest` is who is nearest
    then, None where its probability is not known; `restlessness` is told where the machine was
    noisy. `serve_values` is the engine's configuration without secrets.
    """

    schema: int = SCHEMA
    state: str
    method: str
    objective: Objective
    tail: str
    slos: tuple[str, ...]
    recommendation: Advice | None
    baseline: CurrentConfiguration
    evidence: tuple[MetricChange, ...]
    limited_by: str
    load: str
    confirmed_cold: ColdConfirmation | None
    capacity: CapacityRecord | None
    provenance: Provenance
    serve_values: dict[str, Any]
    trace_description: dict[str, Any]
    live_against_shadow: tuple[Compared, ...]
    ladder: tuple[int, ...]
    caveats: tuple[CaveatRecord, ...]
    trials: tuple[Trial, ...]
    knobs: KnobAdvice | None = None
    starting_points: tuple[StartFinding, ...] = ()
    variants: VariantComparison | None = None
    clients: ClientAdvice | None = None
    nearest: Nearest | None = None
    restlessness: Restlessness | None = None

    @property
    def has_replays(self) -> bool:
        """Whether the run's windows were replayed live, not predicted alone."""
        return any(trial.phase.is_on_windows for trial in self.trials)

    @property
    def feasible(self) -> bool:
        """Whether there is anything to recommend."""
        return self.recommendation is not None

    @property
    def way_out(self) -> str:
        """What to do where nothing is recommended."""
        holds_nowhere = self.capacity is not None and self.capacity.winner is None
        return _RELAX_ONLY if holds_nowhere else _RELAX

    @property
    def current(self) -> EngineLimits:
        """The configuration that the run began with."""
        return self.baseline.limits

    @property
    def shown(self) -> EngineLimits:
        """Whose gain is shown: the current configuration where nothing is recommended."""
        advice = self.recommendation
        return self.current if advice is None else advice.shown

    @property
    def is_raced(self) -> bool:
        """Whether whose gain is shown was replayed live beside the current configuration.

        What a round has shown of others may make best who did not race.
        """
        advice = self.recommendation
        if advice is None or self.evidence:
            return any(row.rounds for row in self.evidence)
        return bool(advice.rounds)

    @property
    def cut_off(self) -> str:
        """What a run that has not come to its end leaves open, empty for one that has."""
        advice = self.recommendation
        if self.state == "complete" or advice is None:
            return ""
        if advice.why != UNFINISHED:
            return f"{self.state} once this was decided: not all may be told beside it"
        not_raced = "not raced against the current values"
        left = "it had yet to decide" if self.is_raced else not_raced
        return f"{self.state}: best so far, {left}"

    @property
    def decisive_row(self) -> MetricChange | None:
        """The row of the evidence that tells what decided, None where none does.

        Not one of a stretch that raced, where all of the trace was predicted and decided.
        """
        advice, is_part = self.recommendation, self.provenance.trace.is_predicted_of_more
        metric = "" if advice is None else advice.gain_metric
        mine = (row for row in self.evidence if row.metric == metric)
        return next((row for row in mine if not (row.rounds and is_part)), None)

    @property
    def at_which_load(self) -> str:
        """At which load levels stand beside each other, empty for the one that was replayed."""
        advice = self.recommendation
        if advice is None or advice.rounds or advice.gain_metric != Objective.CAPACITY:
            return ""
        return ", each at the largest load at which it keeps the SLOs"

    @property
    def how_raced(self) -> str:
        """On which live replays the gain that is shown rests, in words."""
        advice = self.recommendation
        # Rounds of others are none of the pair that is shown.
        own = max((row.rounds for row in self.evidence), default=0)
        n = own or (0 if advice is None else advice.rounds)
        if not n:
            return "predicted, not raced"
        rounds = f"{n} round{'' if n == 1 else 's'}"
        if self.is_raced:
            return f"{rounds} in turns"
        trace = self.provenance.trace
        of = f" of {trace.predicted}" if trace.is_predicted_of_more else ""
        return f"predicted{of}, corrected by {rounds} of others"

    @property
    def how_confirmed(self) -> str:
        """What the race and engines started cold have shown, empty where those showed nothing.

        Each by itself; the gain that is told is by both.
        """
        cold = self.confirmed_cold
        if cold is None or cold.ratio is None:
            return ""
        metric, there = cold.metric, f"{moved(cold.metric, cold.ratio - 1):+.1%} there"
        rows = metric_changes(self.trials, self.shown, self.current, self.tail)
        raced = [row.moved_ratio for row in rows if row.rounds and row.metric == metric]
        in_race = f"{raced[0]:+.1%} in the race, " if raced else ""
        is_change = self.recommendation is not None and self.recommendation.is_change
        how = "confirmed" if is_change else "tried"
        return f"{how} on engines started cold: {metric} {in_race}{there}"

    @property
    def turned(self) -> KnobAdvice | None:
        """The knobs that are turned in what is emitted, None where none is."""
        return self.knobs if self.knobs is not None and self.knobs.is_deployed else None

    @property
    def deployed(self) -> EngineLimits:
        """The limits that are deployed: others than were found alone where knobs want them."""
        if self.turned is not None:
            return self.turned.limits
        return self.current if self.recommendation is None else self.recommendation.limits

    @property
    def gain(self) -> Estimate | None:
        """By how much the recommendation changes the metric that decided, with its interval.

        None where it is the current configuration, or nothing was there to compare.

        Units: a share of the metric's current value, -0.28 for 28 % less of a latency, 0.25 for
            25 % more requests a second.
        """
        advice = self.recommendation
        if advice is None or not advice.is_change or advice.gain_ratio is None:
            return None
        metric = advice.gain_metric
        low, high = moved_bounds(metric, advice.gain_interval or (None, None))
        return Estimate(moved(metric, advice.gain_ratio), low, high, advice.rounds)

    @property
    def kv(self) -> str:
        """How full the KV cache became with what is recommended, in words."""
        advice = self.recommendation
        if advice is None:
            return kv_text(self.trials, self.current)
        if not advice.is_predicted:
            return kv_text(self.trials, advice.limits)
        cold = [t for t in self.trials if t.phase is Phase.COLD]
        return kv_text([*predictions(self.trials), *cold], advice.limits)


@dataclass(frozen=True, slots=True)
class _Version:
    schema: int | None = None


def read_result(folder: Path) -> RunResult:
    """Return the result in a run directory.

    Raises: UsageError if there is none, or it is damaged or of another version.
    """
    path = folder / RESULT_FILE
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Version).schema
        if found == SCHEMA:
            return msgspec.json.decode(content, type=RunResult)
    except FileNotFoundError:
        began = (folder / RUN_FILE).is_file()
        raise UsageError(
            f"{folder} holds no result: {RESULT_FILE} is missing",
            f"go on with tune --resume {folder}" if began else _NAME_A_RUN,
        ) from None
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{path} is damaged: {error}", _RESTORE) from error
    except (OSError, *UNREADABLE) as error:
        raise UsageError(f"{path} cannot be read: {error}", _RESTORE) from error
    raise UsageError(
        f"{path}: schema must be {SCHEMA}, got {found}",
        "read it with the version of tune that made the run",
    )
