"""What a run came to, made into the content of `result.json`."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import Caveat
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
from tuner.run.result import (
    Advice,
    CapacityRecord,
    CaveatRecord,
    ColdConfirmation,
    ColdEngine,
    Compared,
    CurrentConfiguration,
    EngineRecord,
    Nearest,
    ProfileRecord,
    Provenance,
    Restlessness,
    RunResult,
    StartFinding,
    TraceRecord,
)
from tuner.search.judging import LIKELY
from tuner.search.objective import (
    Scoring,
    Tier,
    moved,
    moved_bounds,
)
from tuner.search.race import RaceDecision
from tuner.search.trials import Trial, decisive, leader, predictions
from tuner.traffic.traces import Trace
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
class RunProvenance:
    """What surrounds a decision when its result is made; without secrets.

    `found` is what the run found beside it, `ladder` the caps that were to be tried.
    `caveat_texts` are the texts of caveats that say it with its figures.
    """

    trace: Trace
    replayed_requests: int
    window: str
    current_source: str
    model: str
    options: Mapping[str, Any]
    wall_s: float
    found: RunFindings
    method: str = "live"
    predicted_requests: int = 0
    predicted_window: str = ""
    walls_s: Mapping[str, float] = field(default_factory=dict)
    serve_values: Mapping[str, object] = field(default_factory=dict)
    description: Mapping[str, object] = field(default_factory=dict)
    ladder: Sequence[int] = ()
    caveat_texts: Mapping[Caveat, str] = field(default_factory=dict)

    def caveat(self, caveat: Caveat) -> CaveatRecord:
        """Return a caveat for the result."""
        return CaveatRecord(str(caveat), self.caveat_texts.get(caveat, caveat.text))


def make_outcome(
    decision: RaceDecision,
    current: EngineLimits,
    goal: Scoring,
    records: Sequence[Trial],
    caveats: Sequence[Caveat],
    around: RunProvenance,
    state: str,
) -> RunResult:
    """Return everything there is to say about a run."""
    trials = predictions(records) if decision.is_predicted else records
    is_part = around.replayed_requests < len(around.trace) and not decision.is_predicted
    changes = _with_gain(metric_changes(trials, decision.shown, current, goal.tail), decision)
    is_feasible = _is_feasible(decision, trials)
    return RunResult(
        state=state,
        method=around.method,
        objective=goal.objective,
        tail=goal.tail,
        slos=tuple(str(slo) for slo in goal.slos),
        recommendation=_advice(decision) if is_feasible else None,
        baseline=CurrentConfiguration(**asdict(current), source=around.current_source),
        evidence=tuple(changes),
        limited_by=limited_by(trials, decision.winner, goal.slos, goal.tail, is_part=is_part),
        load=load_text(trials, decision.shown, is_part=is_part),
        confirmed_cold=around.found.cold,
        capacity=around.found.capacity,
        provenance=_provenance(around),
        serve_values=dict(around.serve_values),
        trace_description=dict(around.description),
        live_against_shadow=_compared(around.found.compared),
        ladder=tuple(around.ladder),
        caveats=tuple(map(around.caveat, caveats)),
        trials=tuple(records),
        knobs=around.found.knobs,
        starting_points=around.found.starting_points,
        clients=around.found.clients,
        nearest=None if is_feasible else nearest_of(decision),
        restlessness=around.found.restlessness,
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
    return Nearest(**asdict(decision.best), p_slo=decision.odds.p_slo)


def _is_feasible(decision: RaceDecision, trials: Sequence[Trial]) -> bool:
    """Whether the decision is more likely than not to meet every SLO.

    By the best that was measured where the run ended before there were probabilities.
    """
    if decision.odds is not None:
        return decision.odds.p_slo is None or decision.odds.p_slo >= LIKELY
    best = leader([t.observation for t in decisive(trials)])
    return best is not None and best.score.tier is not Tier.BREAKS_SLO


def _with_gain(changes: Sequence[MetricChange], decision: RaceDecision) -> list[MetricChange]:
    """Return the changes, that of the metric that decides by all that is known of it."""
    gain = decision.gain_here or decision.gain
    if gain is None:
        return [*changes]
    metric = decision.metric
    ratio, bounds = moved(metric, gain.value - 1), moved_bounds(metric, change_bounds(gain))
    return [
        replace(row, change_ratio=ratio, change_interval=bounds)
        if row.metric == metric
        else row
        for row in changes
    ]


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


def _provenance(around: RunProvenance) -> Provenance:
    trace, found = around.trace, around.found
    return Provenance(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tuner_version=own_version(),
        python=platform.python_version(),
        trace=TraceRecord(
            source=trace.source,
            format=trace.format,
            sha256=trace.sha256,
            rows=trace.notes.rows,
            requests=len(trace),
            replayed_requests=around.replayed_requests,
            window=around.window,
            predicted_requests=around.predicted_requests,
            predicted=around.predicted_window,
        ),
        engine=None if found.info is None else _engine(found.info),
        cold_engines=tuple(
            ColdEngine(**asdict(limits), num_blocks=blocks)
            for limits, blocks in found.cold_blocks.items()
        ),
        model=around.model,
        options=dict(around.options),
        engine_starts=found.engine_starts,
        wall_s=around.wall_s,
        stages_s=dict(around.walls_s),
        profile=found.profile,
    )


def _engine(info: EngineInfo) -> EngineRecord:
    return EngineRecord(
        kind=info.kind,
        vllm_version=info.vllm_version,
        device=info.device,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        started_at_limits=info.ceiling,
        sampling=info.sampling,
    )
