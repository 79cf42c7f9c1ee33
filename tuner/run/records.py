"""What `result.json` holds beside trials and evidence, a record each.

`tuner.run.result` puts them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.replay.slo import LATENCIES
from tuner.search.objective import WORST_SLACK, Bounds, is_rate, moved, moved_bounds, named
from tuner.search.race import Odds, RaceVerdict, Standing

MOST_MORE_S: Final = 3600.0
"""Ours: whoever would have to wait longer for a restless machine needs another one."""
OWN_RATIO: Final = 0.0163
"""What of the ratio of two settings stays open however long the machine is watched: steps of
each have a speed that no model knows, `speed.SETTING`, here as an interval of 90 % of two that
make no like batches."""
KNOWN_RATIO: Final = 0.02
"""Ours: well enough to tell what is worth a restart, and somewhat beyond OWN_RATIO."""


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
    """Who is nearest to SLOs that nothing is likely to meet, and how probably it meets them.

    With `others_meet` there are settings that meet them, but do not sustain the load.
    """

    p_slo: float
    others_meet: bool = False

    @property
    def missed(self) -> str:
        """Return what nothing is likely to do."""
        return "meet the SLOs" + " and sustain the load" * self.others_meet

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
    """What engines showed that were started as they would be deployed; less is better.

    `metric` is what is optimised, whatever bound one of them breaks; None stands for a value
    without end.
    """

    metric: str
    winner: float | None
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
        names = {field.name for field in fields(cls)} - {"started_at_limits"}
        same = {name: getattr(info, name) for name in names}
        return cls(started_at_limits=info.ceiling, **same)


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
        if more_s is not None and more_s > MOST_MORE_S:
            more_s = None
        return cls(apart_ratio=apart_ratio, open_ratio=open_ratio, more_s=more_s)

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
    fails; `state` is its tier where that is worse, empty where it is not.
    """

    name: str
    metric: str
    ratio: float | None
    state: str

    @property
    def text(self) -> str:
        """Return it as a line."""
        by = "it fails"
        if self.ratio is not None:
            by = f"{named(self.metric)} {moved(self.metric, self.ratio - 1):+.1%}"
        state = f", {self.state}" if self.state else ""
        against = f"starting point {self.name} ({self.limits}) against this"
        return f"{against}, predicted: {by}{state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(LimitsRecord):
    """One metric of one configuration, live and predicted, on the same requests."""

    metric: str
    live: float
    shadow: float
