"""What is kept of a replay: an observation for the search, a record for the disk.

A replay is reduced to its score and to whether a limit ever bound; records of one
configuration are paired by round, and predicted ones are compared with live ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.search.objective import RATE_TIE_RATIO, Score, Tier

# What a shadow is compared with live on: the metrics that rank configurations.
COMPARED = ("requests_per_s", "tpot_p50", "e2e_p50")
# Single replays differ by a few percent on a quiet machine; closer ones tie here, and only the
# race may separate them: ours.
TIE_RATIO = 0.03
# A cap that exceeds the most ever running by a quarter cannot have bound: ours, the margin
# covers run-to-run variation of the peak.
NEVER_BOUND_RATIO = 1.25


class Phase(StrEnum):
    """Why a configuration is measured."""

    PRESENT = "present"
    LADDER = "ladder"
    EXTEND = "extend"
    REFINE = "refine"
    BUDGET = "budget"
    RACE = "race"
    CALIBRATE = "calibrate"
    SHADOW = "shadow"
    COLD = "cold"
    CAPACITY = "capacity"

    @property
    def is_search(self) -> bool:
        """Whether the live search asked for it."""
        return self in _SEARCH

    @property
    def is_on_windows(self) -> bool:
        """Whether the run's windows were replayed live, as they are."""
        return self in _SEARCH or self is Phase.RACE


_SEARCH = frozenset({Phase.PRESENT, Phase.LADDER, Phase.EXTEND, Phase.REFINE, Phase.BUDGET})


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replay measured of a configuration, reduced to what the search needs.

    `peak_running` and `peak_step_tokens` show whether a limit ever bound; those of a replay
    that failed show nothing. Those of one that was cut short do: where a limit had not bound
    until then, a larger one would have come to the same place.
    """

    number: int
    limits: EngineLimits
    phase: Phase
    score: Score
    peak_running: int
    peak_step_tokens: int
    decode_step_s: float | None
    race_round: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the replay ran to its end."""
        return self.score.tier not in (Tier.CUT, Tier.FAILED)

    @property
    def cap_bound(self) -> bool:
        """Whether the cap was reached, so that it may have kept a request waiting."""
        return self.peak_running >= self.limits.max_num_seqs

    @property
    def cap_never_bound(self) -> bool:
        """Whether any higher cap would have led to the same batches."""
        was_measured = self.score.tier is not Tier.FAILED and self.peak_running > 0
        return was_measured and not self.cap_bound and self.has_room(self.limits.max_num_seqs)

    def has_room(self, cap: int) -> bool:
        """Whether a cap is beyond what ran at once: in the shadow exactly, live by a margin."""
        margin = 1.0 if self.phase is Phase.SHADOW else NEVER_BOUND_RATIO
        return cap >= self.peak_running * margin

    @property
    def budget_never_bound(self) -> bool:
        """Whether any higher token budget would have led to the same batches."""
        was_measured = self.score.tier is not Tier.FAILED and self.peak_step_tokens > 0
        return was_measured and self.peak_step_tokens < self.limits.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration to measure, and why."""

    limits: EngineLimits
    phase: Phase


def leader(
    observations: Sequence[Observation], rate_tie: float = RATE_TIE_RATIO
) -> Observation | None:
    """Return the best observation; among ties the smallest limits.

    Of settings that all do not sustain the load those within `rate_tie` of the best rate are
    told apart by their tails.
    """
    whole = [o for o in observations if o.is_whole]
    if not whole:
        return None
    best = min(whole, key=lambda o: o.score.order)
    if best.score.tier is Tier.NOT_SUSTAINED:
        whole = [
            o
            for o in whole
            if o.score.tier is best.score.tier
            and o.score.value <= best.score.value * (1 + rate_tie)
        ]
        best = min(whole, key=lambda o: o.score.value_in(Tier.GOOD))
    tied = [o for o in whole if not o.score.clearly_worse_than(best.score, TIE_RATIO)]
    return min(tied, key=lambda o: o.limits)


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
        "value": _finite(score.value),
        "metric": score.metric,
        "others": {name: value for name, value in score.others if math.isfinite(value)},
        # Without end where a bound falls on a lost request, which JSON has no number for.
        "slo_used": "inf" if score.slo_used == math.inf else score.slo_used,
        "load_used": score.load_used,
        "cause": cause,
        "measurement": measurement,
    }


def _finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: nothing for one without end."""
    return value if value is not None and math.isfinite(value) else None


def _used(value: object) -> float | None:
    return None if value is None else float(str(value))


def observation_of(record: Mapping[str, Any]) -> Observation:
    """Return a record reduced to what the search needs."""
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

    The live search's where there was one, else what the shadow predicted last.
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


def read_metric(measurement: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric such as `e2e_p99` or `requests_per_s` of a recorded measurement."""
    name, _, statistic = metric.rpartition("_")
    spread = measurement.get(f"{name}_s")
    value = spread.get(statistic) if isinstance(spread, dict) else measurement.get(metric)
    return float(value) if isinstance(value, int | float) else None


def measured_and_predicted(
    live: Sequence[Mapping[str, Any]],
    shadow: Mapping[str, Any],
    metrics: Sequence[str] = COMPARED,
) -> dict[str, tuple[float, float]]:
    """Return each metric's median over live replays of the same, and its prediction."""
    compared = {}
    for metric in metrics:
        measured = [value for m in live if (value := read_metric(m, metric))]
        predicted = read_metric(shadow, metric)
        if measured and predicted:
            compared[metric] = median(measured), predicted
    return compared


def relative_errors(
    live: Sequence[Mapping[str, Any]],
    shadow: Mapping[str, Any],
    metrics: Sequence[str] = COMPARED,
) -> dict[str, float]:
    """Return how far a shadow's metrics are from the live ones, relative and signed."""
    pairs = measured_and_predicted(live, shadow, metrics)
    return {metric: predicted / measured - 1 for metric, (measured, predicted) in pairs.items()}


def metric_error(differences: Sequence[Mapping[str, float]]) -> float | None:
    """Return the largest of the metrics' median absolute errors, None without a comparison."""
    by_metric: dict[str, list[float]] = {}
    for difference in differences:
        for metric, off in difference.items():
            by_metric.setdefault(metric, []).append(abs(off))
    return max((median(offs) for offs in by_metric.values()), default=None)
