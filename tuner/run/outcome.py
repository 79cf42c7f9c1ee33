"""What a run came to, made into the content of `result.json`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.run.evidence import (
    MetricChange,
    change_bounds,
    limited_by,
    load_text,
    metric_changes,
)
from tuner.run.knobs.records import KnobAdvice
from tuner.run.loads.records import ClientAdvice
from tuner.run.predict import Differences
from tuner.run.records import (
    Advice,
    CapacityRecord,
    CaveatRecord,
    ColdConfirmation,
    Compared,
    CurrentConfiguration,
    Nearest,
    ProfileRecord,
    Provenance,
    Restlessness,
    StartFinding,
)
from tuner.run.result import RunResult
from tuner.search.objective import Scoring, Tier, moved, moved_bounds
from tuner.search.race import LIKELY, RaceDecision
from tuner.search.trials import Trial, decisive, leader, predictions
from tuner.traffic.windows import Window


@dataclass(slots=True)
class RunFindings:
    """What a run found beside its decision and its trials, filled in as it is found.

    `windows` are those that were replayed live, or predicted where none were; `scoring` is how
    they are judged, None before they are chosen. `compared` holds what was measured live and
    predicted of the same requests. `info` is of the engine that was measured or predicted on,
    `cold_blocks` how many KV blocks cold ones had, `knobs` what may be turned beside the
    limits, `starting_points` how far those are from it, `clients` what its clients should hold
    to, `restlessness` how restless a noisy machine was.
    """

    windows: tuple[Window, ...] = ()
    scoring: Scoring | None = None
    cold: ColdConfirmation | None = None
    capacity: CapacityRecord | None = None
    profile: ProfileRecord | None = None
    compared: Differences = field(default_factory=dict)
    info: EngineInfo | None = None
    engine_starts: int = 0
    cold_blocks: Mapping[EngineLimits, int] = field(default_factory=dict)
    knobs: KnobAdvice | None = None
    starting_points: tuple[StartFinding, ...] = ()
    clients: ClientAdvice | None = None
    restlessness: Restlessness | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What a run was given, as its result keeps it: without secrets.

    `description` is of the trace, `ladder` the caps that were to be tried.
    """

    provenance: Provenance
    current: CurrentConfiguration
    serve_values: dict[str, Any]
    description: dict[str, object]
    ladder: tuple[int, ...]


def make_outcome(
    decision: RaceDecision,
    goal: Scoring,
    records: Sequence[Trial],
    caveats: Sequence[CaveatRecord],
    found: RunFindings,
    given: Given,
    state: str,
) -> RunResult:
    """Return everything there is to say: of what is deployed, or else of who is nearest."""
    trials = predictions(records) if decision.is_predicted else records
    is_part = given.provenance.trace.is_part and not decision.is_predicted
    is_feasible = _is_feasible(decision, trials)
    told = decision.winner if is_feasible else decision.best
    same = ("capacity", "knobs", "starting_points", "clients", "restlessness")
    return RunResult(
        state=state,
        method=given.provenance.options["method"],
        objective=goal.objective,
        tail=goal.tail,
        slos=tuple(str(slo) for slo in goal.slos),
        recommendation=_advice(decision) if is_feasible else None,
        baseline=given.current,
        evidence=_evidence(trials, decision, given, goal),
        limited_by=limited_by(trials, told, goal.slos, goal.tail, is_part=is_part),
        load=load_text(trials, told, is_part=is_part),
        confirmed_cold=found.cold,
        provenance=given.provenance,
        serve_values=given.serve_values,
        trace_description=given.description,
        live_against_shadow=_compared(found.compared),
        ladder=given.ladder,
        caveats=tuple(caveats),
        trials=tuple(records),
        nearest=None if is_feasible else nearest_of(decision),
        **{name: getattr(found, name) for name in same},
    )


def _compared(differences: Differences) -> tuple[Compared, ...]:
    return tuple(
        Compared(**asdict(limits), metric=metric, live=live, shadow=shadow)
        for (limits, metric), (live, shadow) in differences.items()
    )


def nearest_of(decision: RaceDecision) -> Nearest | None:
    """Return who is nearest to the SLOs, None where no probability of it is known."""
    if decision.odds is None or decision.odds.p_slo is None:
        return None
    others_meet = any((s.p_slo or 0.0) >= LIKELY for s in decision.standings)
    return Nearest(**asdict(decision.best), p_slo=decision.odds.p_slo, others_meet=others_meet)


def _is_feasible(decision: RaceDecision, trials: Sequence[Trial]) -> bool:
    """Whether the decision is more likely than not to meet every SLO.

    By the best that was measured where the run ended before there were probabilities.
    """
    if decision.odds is not None:
        return decision.odds.meets_slos
    best = leader([t.observation for t in decisive(trials)])
    return best is not None and best.score.tier is not Tier.BREAKS_SLO


def _evidence(
    trials: Sequence[Trial], decision: RaceDecision, given: Given, goal: Scoring
) -> tuple[MetricChange, ...]:
    """Return the changes, that of the metric that decides by all that is known of it.

    Where a part of what decided was replayed, its levels are not those of that gain.
    """
    current, is_part = given.current.limits, given.provenance.trace.is_predicted_of_more
    changes = metric_changes(trials, decision.shown, current, goal.tail, goal.slos)
    gain = decision.gain_here or decision.gain
    if gain is None:
        return tuple(changes)
    metric = decision.metric
    ratio, bounds = moved(metric, gain.value - 1), moved_bounds(metric, change_bounds(gain))
    return tuple(
        replace(row, change_ratio=ratio, change_interval=bounds)
        if row.metric == metric and not (row.rounds and is_part)
        else row
        for row in changes
    )


def _advice(decision: RaceDecision) -> Advice:
    gain = decision.gain
    is_open = gain is None or gain.low is None or gain.high is None
    here = decision.gain_here
    return Advice(
        **asdict(decision.winner),
        verdict=decision.verdict,
        why=decision.why,
        best_measured=decision.best,
        tied=decision.tied,
        rounds=decision.rounds,
        gain_ratio=None if gain is None else gain.value - 1,
        gain_interval=None if gain is None or is_open else change_bounds(gain),
        gain_metric=decision.metric,
        is_predicted=decision.is_predicted,
        gain_here_interval=None if here is None else change_bounds(here),
        odds=decision.odds,
        standings=decision.standings,
    )


def own_version() -> str:
    """Return this package's version, "unknown" where it runs from a folder, not installed."""
    try:
        return importlib.metadata.version("max-num-seqs-tuner")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
