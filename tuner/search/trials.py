"""What is kept of a replay: an observation for the search, a record for the disk.

A replay is reduced to its score and to whether a limit ever bound; records of one
configuration are paired by round, and predicted ones are compared with live ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, Literal, Self

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

    CURRENT = "current"
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


_SEARCH = frozenset({Phase.CURRENT, Phase.LADDER, Phase.EXTEND, Phase.REFINE, Phase.BUDGET})


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replay measured of a configuration, reduced to what the search needs.

    `peak_running` and `peak_step_tokens` show whether a limit ever bound; those of a replay
    that failed show nothing. Those of one that was cut short do: where a limit had not bound
    until then, a larger one would have come to the same place.
    """

    limits: EngineLimits
    phase: Phase
    score: Score
    peak_running: int
    peak_step_tokens: int
    decode_step_s: float | None

    @property
    def is_whole(self) -> bool:
        """Whether the replay ran to its end, and completed anything."""
        return self.score.is_whole

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One replay of one configuration: why, what came of it, and how that is judged.

    A line of `trials.jsonl` and of `result.json`, in its order. `attempt` names the process
    that measured it, which a run has several of where it was resumed or had workers;
    `prediction` counts the profiles that the run predicted by, 0 for what was measured; `cause`
    says why nothing was measured.
    `value` is None where it has no end, for which JSON has no number; others are "inf" then.

    Raises: UsageError if vLLM would refuse the limits.
    """

    number: int
    engine: str
    phase: Phase
    race_round: int
    attempt: str = ""
    prediction: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    tier: Tier
    value: float | None
    metric: str
    others: dict[str, float | Literal["inf"]] = field(default_factory=dict)
    slo_used: float | Literal["inf"] | None = None
    load_used: float | None = None
    cause: str
    measurement: dict[str, Any] | None

    def __post_init__(self) -> None:
        """Refuse what vLLM would refuse."""
        _ = self.limits

    @classmethod
    def of(
        cls,
        number: int,
        limits: EngineLimits,
        phase: Phase,
        race_round: int,
        score: Score,
        measurement: Mapping[str, Any] | None,
        cause: str = "",
        attempt: str = "",
        prediction: int = 0,
    ) -> Self:
        """Return the trial that a replay was."""
        return cls(
            number=number,
            engine="shadow" if phase is Phase.SHADOW else "live",
            phase=phase,
            race_round=race_round,
            attempt=attempt,
            prediction=prediction,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            tier=score.tier,
            value=score.value if math.isfinite(score.value) else None,
            metric=score.metric,
            others={name: _with_end(value) for name, value in score.others},
            # Without end where a bound falls on a lost request.
            slo_used=None if score.slo_used is None else _with_end(score.slo_used),
            load_used=score.load_used,
            cause=cause,
            measurement=None if measurement is None else dict(measurement),
        )

    @property
    def limits(self) -> EngineLimits:
        """What was replayed."""
        return EngineLimits(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def is_live(self) -> bool:
        """Whether it was measured, not predicted."""
        return self.engine == "live"

    @property
    def cut_reason(self) -> str:
        """Why the replay was cut short, empty where it was not."""
        return str((self.measurement or {}).get("cut_reason") or "")

    @property
    def is_whole(self) -> bool:
        """Whether the replay ran to its end, and completed anything."""
        return self.score.is_whole

    @property
    def score(self) -> Score:
        """Its place in the order of configurations."""
        return Score(
            self.tier,
            math.inf if self.value is None else self.value,
            self.metric,
            tuple((name, float(value)) for name, value in self.others.items()),
            None if self.slo_used is None else float(self.slo_used),
            self.load_used,
        )

    @property
    def observation(self) -> Observation:
        """What the search needs to know of it."""
        measured = self.measurement or {}
        return Observation(
            limits=self.limits,
            phase=self.phase,
            score=self.score,
            peak_running=int((measured.get("running") or {}).get("max") or 0),
            peak_step_tokens=int(measured.get("max_step_tokens") or 0),
            decode_step_s=(measured.get("decode_step_s") or {}).get("p50"),
        )


def _with_end(value: float) -> float | Literal["inf"]:
    """Return a number, or its name where JSON has no number for it."""
    return "inf" if value == math.inf else value


def race_records(trials: Sequence[Trial], limits: EngineLimits) -> dict[int, dict[str, Any]]:
    """Return the race's whole measurements of one configuration by round, the last of each."""
    return {t.race_round: t.measurement for t in _raced(trials, limits) if t.measurement}


def paired_records(
    trials: Sequence[Trial], a: EngineLimits, b: EngineLimits
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the race's whole measurements of two configurations, round by round.

    Of rounds that both ran in one process.
    """
    ours, theirs = (
        {(t.race_round, t.attempt): t.measurement or {} for t in _raced(trials, limits)}
        for limits in (a, b)
    )
    return [(ours[key], theirs[key]) for key in sorted(set(ours) & set(theirs))]


def _raced(trials: Sequence[Trial], limits: EngineLimits) -> list[Trial]:
    return [t for t in trials if t.phase is Phase.RACE and t.is_whole and t.limits == limits]


def decisive(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that a decision rests on: live ones, shadow ones only without them."""
    return [t for t in trials if t.phase.is_on_windows] or ranked(trials)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that can be ranked with each other over the whole space.

    The live search's where there was one, else what the shadow predicted last.
    """
    return [t for t in trials if t.phase.is_search] or predictions(trials)


def predictions(trials: Sequence[Trial]) -> list[Trial]:
    """Return what the shadow predicted last, by the profile that was corrected last."""
    made = [t for t in trials if t.phase is Phase.SHADOW]
    last = max((t.prediction for t in made), default=0)
    return [t for t in made if t.prediction == last]


def read_metric(measurement: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric such as `e2e_p99` or `requests_per_s` of a recorded measurement."""
    name, _, statistic = metric.rpartition("_")
    spread = measurement.get(f"{name}_s")
    value = spread.get(statistic) if isinstance(spread, dict) else measurement.get(metric)
    return float(value) if isinstance(value, int | float) else None


def measured_and_predicted(
    live: Sequence[Mapping[str, Any]], shadow: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Return each compared metric's median over live replays, and its prediction."""
    compared = {}
    for metric in COMPARED:
        measured = [value for m in live if (value := read_metric(m, metric))]
        predicted = read_metric(shadow, metric)
        if measured and predicted:
            compared[metric] = median(measured), predicted
    return compared
