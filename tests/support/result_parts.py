"""Results of runs with an invented outcome."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import Caveat
from tuner.run.outcome import Given, RunFindings, make_outcome
from tuner.run.records import (
    CaveatRecord,
    CurrentConfiguration,
    EngineRecord,
    Provenance,
    TraceRecord,
)
from tuner.run.result import RunResult
from tuner.search.objective import Objective, Score, Scoring, Tier
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.trials import Phase, Trial
from tuner.stats import Estimate

WINNER, CURRENT = EngineLimits(8, 2048), EngineLimits(32, 4096)
GOAL = Scoring(Objective.BALANCED, (), "p99")
CHANGE = RaceDecision(
    RaceVerdict.CHANGE, WINNER, WINNER, (WINNER,), Estimate(0.8, 0.75, 0.85, 3), 3, "better"
)
INFO = EngineInfo(
    *("toy", "cpu", "float32", "0.32.0", 100, 4096, 16, 64, CURRENT),
    can_change_limits=True,
    asynchronous=False,
    sampling="tokens are sampled greedily",
)


def given(current: EngineLimits, info: EngineInfo, **of_trace: Any) -> Given:
    """Return what an invented run was given, on an engine that was started once."""
    facts = {"source": "toy.jsonl", "format": "toy", "sha256": "0123456789abcdef"}
    replayed = {"replayed_requests": 1234, "window": "the whole trace, 9 s"}
    return Given(
        Provenance(
            made_at="2026-11-20T14:03:00+00:00",
            tuner_version="0.1.0",
            python="3.11.7",
            trace=TraceRecord(**{**facts, "rows": 2, "requests": 2, **replayed, **of_trace}),
            engine=EngineRecord.of(info),
            cold_engines=(),
            model="m",
            options={"method": "live"},
            engine_starts=1,
            wall_s=9.0,
            stages_s={},
            profile=None,
        ),
        CurrentConfiguration(**asdict(current), source="configuration"),
        serve_values={},
        description={},
        ladder=(),
    )


GIVEN = given(CURRENT, INFO)
WINDOWED = CaveatRecord("windowed", Caveat.WINDOWED.text)


MEASURED: dict[str, Any] = {
    "e2e_s": {"p50": 1.0, "p99": 2.0},
    "tpot_s": {"p50": 0.01, "p99": 0.02},
    "requests_per_s": 1.0,
    "gpu_cache_usage_perc": {"max": 0.3},
    "preemptions": 0,
    "running": {"mean": 2.0, "max": 8},
    "queue_depth": {"mean": 0.0, "max": 0},
    "cut_reason": None,
}
"""What an invented replay measured."""


def a_record(limits: EngineLimits, tier: Tier = Tier.GOOD, round_: int = 0) -> Trial:
    phase = Phase.RACE if round_ else Phase.LADDER
    return Trial.of(0, limits, phase, round_, Score(tier, 2.0, "e2e_p99"), MEASURED)


def made(
    decision: RaceDecision = CHANGE, tier: Tier = Tier.GOOD, state: str = "complete"
) -> RunResult:
    records = [a_record(limits, tier, n) for limits in (WINNER, CURRENT) for n in (0, 1, 2)]
    return make_outcome(decision, GOAL, records, [WINDOWED], RunFindings(), GIVEN, state)
