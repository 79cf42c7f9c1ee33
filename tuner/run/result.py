"""The result of a run: what `result.json` holds, and what everybody reads of it.

One schema, written and read here alone: decision, evidence, trials, caveats and provenance.
What is said of the winner is worked out in `evidence`, wording for a terminal in `displays`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import UsageError
from tuner.files import UNREADABLE
from tuner.replay.slo import LATENCIES
from tuner.run.directory import RESULT_FILE, RUN_FILE
from tuner.run.evidence import (
    MetricChange,
    kv_text,
    metric_changes,
)
from tuner.run.knobs.records import KnobAdvice
from tuner.run.loads.records import ClientAdvice
from tuner.run.variants.records import VariantComparison
from tuner.search.objective import (
    WORST_SLACK,
    Bounds,
    Objective,
    is_rate,
    moved,
    moved_bounds,
    named,
)
from tuner.search.race import UNFINISHED, Odds, RaceVerdict, Standing
from tuner.search.trials import Phase, Trial, predictions
from tuner.stats import Estimate

SCHEMA: Final = 2
MOST_MORE_S: Final = 3600.0
"""Ours: whoever would have to wait longer for a restless machine needs another one."""
OWN_RATIO: Final = 0.0163
"""What of the ratio of two settings stays open however long the machine is watched: steps of
each have a speed that no model knows, `drawing.OWN_SPEED`, here as an interval of 90 %."""
KNOWN_RATIO: Final = 0.02
"""Ours: well enough to tell what is worth a restart, and somewhat beyond OWN_RATIO."""
NOTHING_FEASIBLE: Final = "no configuration met the SLOs"
_RELAX: Final = "relax an SLO, or lower --load, and run again"
_RELAX_ONLY: Final = "relax an SLO and run again: predicted, they hold at no load, however low"
_NAME_A_RUN: Final = "name a run directory, as runs/2026-11-20T14-03-00"
_RESTORE: Final = "restore it, or use the YAML file that the run wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsRecord:
    """A pair of limits among other keys. Raises: UsageError if vLLM would refuse the pair."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        """Refuse what vLLM would refuse."""
        _ = self.limits

    @property
    def limits(self) -> EngineLimits:
        """Both as the engine knows them."""
        return EngineLimits(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(LimitsRecord):
    """What the run says to do; gains are those of the score, of which less is better.

    As `RaceDecision`, whose ratio stands here minus one.
    """

    verdict: RaceVerdict
    why: str
    best_measured: EngineLimits
    tied: tuple[EngineLimits, ...]
    rounds: int
    gain_ratio: float | None
    gain_interval: Bounds | None
    gain_metric: str
    is_predicted: bool
    gain_here_interval: Bounds | None = None
    odds: Odds | None
    standings: tuple[Standing, ...] = ()

    def __str__(self) -> str:
        """Return what to run with, in a line."""
        return f"{self.verdict} {self.limits} (max_num_seqs/max_num_batched_tokens)"

    @property
    def is_change(self) -> bool:
        """Whether the current configuration should go."""
        return self.verdict is RaceVerdict.CHANGE

    @property
    def shown(self) -> EngineLimits:
        """Whose gain is shown: the one to change to, or the best there was to keep from."""
        return self.limits if self.is_change else self.best_measured

    @property
    def for_bounds(self) -> str:
        """Why to change where what decides does not surely gain by it; empty where it does."""
        if not self.is_change or self.odds is None or not self.odds.meets_more:
            return ""
        _, worst = self.gain_interval or (None, None)
        return "" if worst is not None and worst < 0 else f"it {self.why}"

    @property
    def gain_text(self) -> str:
        """By how much the latency, rate or share of an SLO that decided changes, if one did."""
        metric = self.gain_metric
        is_latency = f"{metric.rpartition('_')[0]}_s" in LATENCIES
        is_told = is_latency or is_rate(metric) or metric == WORST_SLACK
        if self.gain_ratio is None or self.odds is None or not is_told:
            return ""
        low, high = moved_bounds(metric, self.gain_interval or (None, None))
        known = low is not None and high is not None
        within = f"90% interval {low:+.1%} … {high:+.1%} over " if known else "over "
        change = f"{moved(metric, self.gain_ratio):+.1%}"
        return f"{named(metric)}: {change} ({within}{self.odds.basis})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(LimitsRecord):
    """Who is nearest to SLOs that nothing is likely to meet, and how probably it meets them."""

    p_slo: float

    @property
    def text(self) -> str:
        """Return the probability in words."""
        return f"meets them with probability {self.p_slo:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentConfiguration(LimitsRecord):
    """What the run began with, and who had set it."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdConfirmation:
    """Scores on engines that were started as they would be deployed; less is better."""

    metric: str
    winner: float | None
    current_metric: str
    current: float | None
    ratio: float | None
    p_better: float | None = None
    starts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRecord:
    """At which multiples of the recorded load the SLOs hold, and the sentence that says so.

    `interval` is where the winner's lies on other traffic of the kind, nine times in ten; None
    where nothing was drawn.
    """

    winner: float | None
    current: float | None
    confirmed_live: bool | None
    is_shown: bool
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class CaveatRecord:
    """A caveat as it was shown; a tuple of them prints as their sentences.

    >>> print((CaveatRecord("windowed", "part of the trace was replayed"),))
    (windowed: part of the trace was replayed,)
    """

    id: str
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{self.id}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """Which trace was replayed, and how much of it; `predicted` of how much is foretold."""

    source: str
    format: str
    sha256: str
    rows: int
    requests: int
    replayed_requests: int
    window: str
    predicted_requests: int = 0
    predicted: str = ""

    @property
    def is_part(self) -> bool:
        """Whether not all of it was replayed."""
        return self.replayed_requests < self.requests

    @property
    def is_predicted_of_more(self) -> bool:
        """Whether what was predicted is of more than was replayed."""
        return self.predicted_requests > self.replayed_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """The engine that was measured on; `sampling` says how it sampled tokens, if it did."""

    kind: str
    vllm_version: str
    device: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    started_at_limits: EngineLimits
    sampling: str = ""

    @classmethod
    def of(cls, info: EngineInfo) -> Self:
        """Return what the result keeps of an engine."""
        return cls(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdEngine(LimitsRecord):
    """How many KV blocks an engine had that was started cold."""

    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """Where a prediction comes from, and by how much it may be wrong."""

    made_at: str
    device: str
    vllm_version: str
    calibrated_on: tuple[str, ...]
    error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where, when and with what the run was made."""

    made_at: str
    tuner_version: str
    python: str
    trace: TraceRecord
    engine: EngineRecord | None
    cold_engines: tuple[ColdEngine, ...]
    model: str
    options: dict[str, Any]
    engine_starts: int
    wall_s: float
    stages_s: dict[str, float]
    profile: ProfileRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restlessness:
    """How restless the machine was, and how much longer a run it would take to know well.

    `apart_ratio` is by how much like steps differ from one moment to another, `open_ratio` how
    far off the ratio of the two best may be, None where nothing is known of that. `more_s` is
    how much more calibrating and racing would bring it below KNOWN_RATIO, since what is beyond
    OWN_RATIO shrinks as the root of the time grows; 0 where the answer is sure without, None
    where that is too long.
    """

    apart_ratio: float
    open_ratio: float | None
    more_s: float | None

    @classmethod
    def of(
        cls, apart_ratio: float, open_ratio: float | None, spent_s: float, *, is_sure: bool
    ) -> Self:
        """Return it of a run that has calibrated and raced for so long, and is sure or not."""
        more_s = 0.0 if is_sure else None
        if open_ratio is not None and not is_sure:
            shrinks = max(0.0, open_ratio**2 - OWN_RATIO**2)
            more_s = spent_s * max(0.0, shrinks / (KNOWN_RATIO**2 - OWN_RATIO**2) - 1)
        is_long = more_s is not None and more_s > MOST_MORE_S
        return cls(
            apart_ratio=apart_ratio,
            open_ratio=open_ratio,
            more_s=None if is_long else more_s,
        )

    @property
    def text(self) -> str:
        """Return it as a line."""
        said = f"like steps of this machine differ by {self.apart_ratio:.1%} between moments"
        if self.open_ratio is None:
            return said
        said += f", and the ratio of the two best is known to within {self.open_ratio:.1%}"
        if self.more_s is None:
            return f"{said}: more time does not help, a machine that is left alone would"
        if self.more_s <= 0:
            return said
        minutes = math.ceil(self.more_s / 60)
        return f"{said}: about {minutes} min more would bring that below {KNOWN_RATIO:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFinding(LimitsRecord):
    """How far a starting point is from what is recommended, by the prediction of both.

    `ratio` is what it costs over the recommendation, a rate as its inverse, None where it
    fails;
    `state` is its tier where that is worse, empty where it is not.
    """

    name: str
    metric: str
    ratio: float | None
    state: str

    @property
    def text(self) -> str:
        """Return it as a line."""
        by = (
            "it fails"
            if self.ratio is None
            else f"{named(self.metric)} {moved(self.metric, self.ratio - 1):+.1%}"
        )
        state = f", {self.state}" if self.state else ""
        return (
            f"starting point {self.name} ({self.limits}) against this, predicted: {by}{state}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(LimitsRecord):
    """One metric of one configuration, live and predicted, on the same requests."""

    metric: str
    live: float
    shadow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished or interrupted run came to: the content of `result.json`, in its order.

    `recommendation` is None where no configuration meets the SLOs; `nearest` is who is nearest
    then, None where its probability is not known; `restlessness` is told where the machine was
    noisy. `serve_values` is the
    engine's configuration without secrets.
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
        left = (
            "it had yet to decide" if self.is_raced else "not raced against the current values"
        )
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
        mine = (t for t in self.trials if t.phase is Phase.COLD and t.measurement)
        metric = next((t.score.own_metric for t in mine), cold.metric)
        there = f"{moved(metric, cold.ratio - 1):+.1%} there"
        rows = metric_changes(self.trials, self.shown, self.current, self.tail)
        raced = [row.moved_ratio for row in rows if row.rounds and row.metric == metric]
        in_race = f"{raced[0]:+.1%} in the race, " if raced else ""
        is_change = self.recommendation is not None and self.recommendation.is_change
        how = "confirmed" if is_change else "tried"
        return f"{how} on engines started cold: {metric} {in_race}{there}"

    @property
    def deployed(self) -> EngineLimits:
        """The limits that are deployed: others than were found alone where knobs want them."""
        if self.knobs is not None and self.knobs.is_deployed:
            return self.knobs.limits
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
