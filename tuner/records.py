"""A trial as JSON, as `trials.jsonl` and `result.json` hold it, and back.

Answers what a record says to the search and the race. Where records are kept is left to
`journal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.engine.protocol import EngineLimits
from tuner.objective import Score, Tier
from tuner.observation import Observation, Phase


def record_of(
    number: int,
    limits: EngineLimits,
    phase: Phase,
    race_round: int,
    score: Score,
    measurement: Mapping[str, Any] | None,
    cause: str = "",
) -> dict[str, Any]:
    """Return a trial as JSON: what `trials.jsonl` and `result.json` hold."""
    return {
        "number": number,
        "engine": "shadow" if phase is Phase.SHADOW else "live",
        "phase": str(phase),
        "race_round": race_round,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "tier": str(score.tier),
        "value": score.value if score.tier not in (Tier.CUT, Tier.FAILED) else None,
        "metric": score.metric,
        "others": dict(score.others),
        "cause": cause,
        "measurement": measurement,
    }


def observation_of(record: Mapping[str, Any]) -> Observation:
    """Return a record as the search sees it."""
    measured = record["measurement"] or {}
    value = record["value"]
    step = measured.get("decode_step_s") or {}
    return Observation(
        number=int(record["number"]),
        limits=EngineLimits(int(record["max_num_seqs"]), int(record["max_num_batched_tokens"])),
        phase=Phase(record["phase"]),
        score=Score(
            Tier(record["tier"]),
            float("inf") if value is None else float(value),
            str(record["metric"]),
            tuple(record.get("others", {}).items()),
        ),
        peak_running=int((measured.get("running") or {}).get("max") or 0),
        peak_step_tokens=int(measured.get("max_step_tokens") or 0),
        decode_step_s=step.get("p50"),
        race_round=int(record["race_round"]),
    )


def race_records(
    records: Sequence[Mapping[str, Any]], limits: EngineLimits
) -> dict[int, Mapping[str, Any]]:
    """Return the race's measurements of one configuration by round."""
    return {
        int(r["race_round"]): r["measurement"]
        for r in records
        if r["phase"] == str(Phase.RACE)
        and r["measurement"] is not None
        and EngineLimits(r["max_num_seqs"], r["max_num_batched_tokens"]) == limits
    }


def decisive(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records that a decision rests on: live ones, shadow ones only without them."""
    live = [r for r in records if Phase(r["phase"]).is_on_windows]
    return live or ranked(records)


def ranked(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records that can be ranked with each other over the whole space.

    The live search's where there was one, else what the shadow foretold last.
    """
    live = [r for r in records if Phase(r["phase"]).is_search]
    if live:
        return live
    foretold = [r for r in records if r["phase"] == str(Phase.SHADOW)]
    last = max((int(r["race_round"]) for r in foretold), default=0)
    return [r for r in foretold if int(r["race_round"]) == last]
