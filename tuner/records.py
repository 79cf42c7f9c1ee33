"""A trial as JSON, as `trials.jsonl` and `result.json` hold it, and back.

Answers what a record says to the search and the race. Where records are kept is left to
`journal`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.engine.limits import EngineLimits
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
    attempt: str = "",
) -> dict[str, Any]:
    """Return a trial as JSON: what `trials.jsonl` and `result.json` hold.

    `attempt` names the process that measured it, which a resumed run has several of.
    """
    return {
        "number": number,
        "engine": "shadow" if phase is Phase.SHADOW else "live",
        "phase": str(phase),
        "race_round": race_round,
        "attempt": attempt,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "tier": str(score.tier),
        "value": _known(score.value),
        "metric": score.metric,
        "others": {name: value for name, value in score.others if math.isfinite(value)},
        # Without end where a bound falls on a lost request, which JSON has no number for.
        "slo_used": "inf" if score.slo_used == math.inf else score.slo_used,
        "load_used": score.load_used,
        "cause": cause,
        "measurement": measurement,
    }


def _known(value: float | None) -> float | None:
    """Return a number as JSON can hold it: nothing for one without end."""
    return value if value is not None and math.isfinite(value) else None


def _used(value: object) -> float | None:
    return None if value is None else float(str(value))


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
            _used(record.get("slo_used")),
            _used(record.get("load_used")),
        ),
        peak_running=int((measured.get("running") or {}).get("max") or 0),
        peak_step_tokens=int(measured.get("max_step_tokens") or 0),
        decode_step_s=step.get("p50"),
        race_round=int(record["race_round"]),
    )


def race_records(
    records: Sequence[Mapping[str, Any]], limits: EngineLimits
) -> dict[int, Mapping[str, Any]]:
    """Return the race's whole measurements of one configuration by round, the last of each."""
    return {int(r["race_round"]): r["measurement"] for r in records if _raced(r, limits)}


def paired_records(
    records: Sequence[Mapping[str, Any]], a: EngineLimits, b: EngineLimits
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the race's whole measurements of two configurations, round by round.

    Of rounds that both ran in one process.
    """
    ours = {(r["race_round"], r.get("attempt", "")): r for r in records if _raced(r, a)}
    theirs = {(r["race_round"], r.get("attempt", "")): r for r in records if _raced(r, b)}
    shared = sorted(set(ours) & set(theirs))
    return [(ours[key]["measurement"], theirs[key]["measurement"]) for key in shared]


def _raced(record: Mapping[str, Any], limits: EngineLimits) -> bool:
    measured = record["measurement"]
    return (
        record["phase"] == str(Phase.RACE)
        and measured is not None
        and not measured.get("cut_reason")
        and EngineLimits(record["max_num_seqs"], record["max_num_batched_tokens"]) == limits
    )


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
    return predictions(records)


def predictions(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what the shadow predicted last, by the profile that was corrected last."""
    made = [r for r in records if r["phase"] == str(Phase.SHADOW)]
    last = max((int(r["race_round"]) for r in made), default=0)
    return [r for r in made if int(r["race_round"]) == last]
