"""Whether a configuration still fits today's traffic, and whether a re-tune would pay.

Whether a shift matters is decided by prediction: the whole space on the new traffic, then the
best against the current configuration on draws of it. Nothing is changed by it.

Tried and given up: replaying as well what may be chance. Of two samples of the same traffic the
second is often served better by another configuration than was best for the first, so that
every check would move it; and no planted shift was found that was missed otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np

from tuner.drift.baseline import Baseline
from tuner.drift.compare import Drift, drift_between
from tuner.drift.retune import Ready, Retune, RetuneOptions, retune_on
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.replay.metrics import Measurement
from tuner.run.inputs import Config, engine_of_profile
from tuner.search.budget import Aim
from tuner.search.objective import Tier, is_rate, named
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.trials import Observation
from tuner.shadow.calibration import StatedError
from tuner.shadow.profiled import ProfiledEngine
from tuner.stats import Estimate
from tuner.traffic.describe import hits_differ, reused_tokens
from tuner.traffic.prometheus import known_in_part
from tuner.traffic.sketch import TrafficSketch
from tuner.traffic.traces import RemarkKind, Trace
from tuner.traffic.windows import Window


class DriftVerdict(StrEnum):
    """What to make of today's traffic."""

    TOO_LITTLE = "too little data"
    UNCHANGED = "unchanged"
    STILL_BEST = "shifted, current config still best"
    PAYS = "shifted, re-tune pays"


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a metric improves: a latency's fall, or a rate's rise.

    `ratio` is new / old of the score's value, of which less is better, with its interval over
    other traffic of the kind and the profile's error; `p_better` how sure it is. `meets_more`:
    the new one surely keeps bounds that the old one does not.
    """

    metric: str
    ratio: Estimate
    p_better: float
    meets_more: bool = False

    @classmethod
    def of(cls, decision: RaceDecision) -> Self | None:
        """Return the gain that was predicted, None where the two do not compare."""
        if decision.gain is None or decision.odds is None:
            return None
        odds = decision.odds
        return cls(decision.metric, decision.gain, odds.p_better, odds.meets_more)

    @property
    def is_rate(self) -> bool:
        """Whether more of the metric is better, so that its inverse was compared."""
        return is_rate(self.metric)

    @property
    def value(self) -> float:
        """The gain as a share of what there was."""
        return self._share(self.ratio.value)

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and upper end of the gain, which it lies between in 90 % of cases."""
        low, high = self.ratio.low or 0.0, self.ratio.high or math.inf
        return self._share(high), self._share(low)

    def _share(self, ratio: float) -> float:
        if not self.is_rate:
            return 1 - ratio
        return 1 / ratio - 1 if ratio > 0 else math.inf

    @property
    def text(self) -> str:
        """Return the gain in words."""
        low, high = self.interval
        verb = "rises" if self.is_rate else "falls"
        return f"{named(self.metric)} {verb} by {self.value:.1%} ({low:.1%} … {high:.1%})"

    def as_json(self) -> dict[str, Any]:
        """Return the gain for --json."""
        low, high = self.interval
        return {
            "metric": self.metric,
            "value": self.value,
            "interval": [low if math.isfinite(low) else None, high],
            "p_better": self.p_better,
            "draws": self.ratio.n,
        }


@dataclass(frozen=True, slots=True)
class Checked:
    """A verdict with its reasons.

    `current` is None where it is not known, `best`, the best on the new traffic by the shadows,
    and `error`, what is said of predictions by the profile, where nothing was replayed; `state`
    names the demand that even the best does not meet.
    """

    verdict: DriftVerdict
    why: str
    drift: Drift
    current: EngineLimits | None
    best: EngineLimits | None = None
    gain: Gain | None = None
    state: str = ""
    error: StatedError | None = None

    @property
    def exit_code(self) -> int:
        """What the command ends with: 10, which no error is, where a re-tune pays."""
        return 10 if self.verdict is DriftVerdict.PAYS else 0

    def but(self, differing: Sequence[str]) -> Self:
        """Return the verdict with how what is served is not what traffic is compared for.

        Only of traffic that is the same: of any other the profile predicts what is served.
        """
        if self.verdict is not DriftVerdict.UNCHANGED or not differing:
            return self
        return replace(self, why=f"{self.why}, but {'; '.join(differing)}")

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for --json."""
        return {
            "verdict": str(self.verdict),
            "why": self.why,
            "engine": "shadow",
            **({} if self.error is None else self.error.as_json()),
            "shifts": [shift.as_json() for shift in self.drift.shifts],
            "not_compared": list(self.drift.not_compared),
            "current": None if self.current is None else asdict(self.current),
            "best": None if self.best is None else asdict(self.best),
            "state": self.state or None,
            "gain": None if self.gain is None else self.gain.as_json(),
        }

    def lines(self) -> Iterator[str]:
        """Yield the verdict for people."""
        for shift in self.drift.shifts:
            yield shift.text
        for left_out in self.drift.not_compared:
            yield f"not compared: {left_out}"
        if self.error is not None:
            yield from self.error.lines()
        by = ""
        if self.verdict is DriftVerdict.PAYS and self.gain is not None:
            low, high = self.gain.interval
            # What is for the sake of a bound may cost latency, and says so behind this.
            is_of_bounds = self.gain.meets_more and low <= 0
            by = "" if is_of_bounds else f" {self.gain.value:.0%} ({low:.0%} … {high:.0%})"
        yield f"{self.verdict}{by}: {self.why}"


def without_replay(drift: Drift, current: EngineLimits | None) -> Checked | None:
    """Return the verdict that needs no shadow, None where it takes a replay."""
    if drift.too_little:
        return Checked(DriftVerdict.TOO_LITTLE, drift.too_little, drift, current)
    if not drift.relevant:
        why = "no difference is beyond chance and large enough to matter"
        return Checked(DriftVerdict.UNCHANGED, why, drift, current)
    return None


def check_traffic(
    trace: Trace,
    sketches: tuple[TrafficSketch, TrafficSketch],
    baseline: Baseline,
    current: EngineLimits | None,
    config: Config,
    options: RetuneOptions,
    note: Callable[[str], None] = lambda _: None,
) -> Checked:
    """Return whether traffic has shifted from before, and whether a re-tune would pay.

    `sketches` are of what was tuned for and of the trace. `current` is None where `config` says
    it; where traffic is the same it is told that the baseline has other limits, and that its
    profile was made with another configuration. The profile predicts only if something shifted
    that can be felt. `note` receives what there is to say meanwhile.

    Raises: ShadowError if the profile does not fit here; TooFewSamplesError; UsageError.
    """
    together = trace.notes.told(RemarkKind.ENGINES_TOGETHER)
    partial = together[0] if together else known_in_part(trace.notes)
    drift = Drift((), (), partial) if partial else drift_between(*sketches, options.seed)
    values = engine_of_profile(baseline.profile, config).values
    engine = ProfiledEngine(baseline.profile)
    served = current or engine.current_limits(values)
    found = without_replay(drift, served)
    if found is not None:
        limits = [] if current else other_limits(served, baseline.current)
        found = found.but([*limits, *(engine.unlike(values) if config is not None else ())])
    else:
        found = _predicted(
            drift,
            retune_on(trace, baseline, served, config, options, note),
            note,
            options.min_gain_ratio,
        )
    for middle in trace.notes.told(RemarkKind.MIDDLE_ENGINE)[:1]:
        found = replace(found, why=f"{found.why}; of {middle}")
    return found


def _predicted(
    drift: Drift, ready: Ready, note: Callable[[str], None], min_gain_ratio: float
) -> Checked:
    """Return what shifted traffic is worth, by predicting it at every setting."""
    space = ready.retune.space
    others = len(space.grid())
    note(f"traffic has shifted: predicting it at {space.current} and {others} others")
    checked = check(drift, ready.trace, ready.retune, ready.aim, min_gain_ratio)
    checked = replace(checked, error=ready.retune.predictor.error)
    if remark := ready.retune.predictor.info(space.ceiling).remark:
        note(remark)
    return checked


def other_limits(served: EngineLimits, tuned: EngineLimits) -> list[str]:
    """Return that what is served has other limits than what traffic is compared for, if so.

    >>> other_limits(EngineLimits(4, 512), EngineLimits(64, 512))
    ['the configuration has 4/512 and the baseline 64/512']
    """
    told = f"the configuration has {served} and the baseline {tuned}"
    return [] if served == tuned else [told]


def check(
    drift: Drift, trace: Trace, retune: Retune, aim: Aim, min_gain_ratio: float = 0.0
) -> Checked:
    """Return whether traffic that has shifted is better served by another configuration.

    `trace` is what of it is replayed. A gain below `min_gain_ratio` does not pay, unless the
    current one misses bounds that the other surely keeps.

    Raises: ShadowError, TooFewSamplesError, UsageError.
    """
    current = retune.space.current
    shifted = ", ".join(shift.name for shift in drift.relevant[:3]) + " shifted"
    predicted = retune.rank(trace, aim)
    now = predicted.outcomes[current]
    windows = predicted.workload.windows
    if isinstance(now, Measurement) and (reason := unlike_server(trace, windows, now)):
        return Checked(DriftVerdict.TOO_LITTLE, f"{shifted}, but {reason}", drift, current)
    try:
        decision = retune.decide(predicted)
    except NoFeasibleConfigError as error:
        why = f"{shifted}, and {error.message}"
        return Checked(DriftVerdict.STILL_BEST, why, drift, current)
    best = next(o for o in predicted.observations if o.limits == decision.best)
    state = _state(best)
    rest = f"; {state}" if state else ""
    if best.limits == current:
        why = f"{shifted}, and {current} is best for it too{rest}"
        return Checked(DriftVerdict.STILL_BEST, why, drift, current, current, None, state)
    gain = Gain.of(decision)
    where = f"at {best.limits} instead of {current}"
    text = decision.why if gain is None else f"{gain.text}, {decision.why}"
    pays = decision.verdict is RaceVerdict.CHANGE
    if pays and gain is not None and not gain.meets_more and gain.value < min_gain_ratio:
        pays, text = False, f"{text}, but by less than --min-gain {100 * min_gain_ratio:g}%"
    verdict = DriftVerdict.PAYS if pays else DriftVerdict.STILL_BEST
    why = f"{shifted}{':' if pays else ', but'} {where} {text}{rest}"
    return Checked(verdict, why, drift, current, best.limits, gain, state)


def unlike_server(trace: Trace, parts: Sequence[Window], predicted: Measurement) -> str:
    """Return how the shadow's prefix hits differ from the server's, empty where they do not.

    The server's are those that a sampled trace was given; a shadow of an engine without a
    prefix cache, with larger blocks or with too little memory has fewer. A recording shows what
    came again and not what the server's cache hit, so nothing is compared with it.
    """
    if not trace.notes.sampled_from or trace.hashes is None:
        return ""
    is_in = np.zeros(len(trace), dtype=np.bool_)
    for part in parts:
        is_in |= (trace.due_s >= part.start_s) & (trace.due_s < part.end_s)
    reused = reused_tokens(trace.hashes, trace.prompt_tokens)[is_in]
    served = float(reused.sum() / trace.prompt_tokens[is_in].sum())
    hit_ratio = predicted.prefix_cache_hit_ratio or 0.0
    if not hits_differ(hit_ratio, served):
        return ""
    return (
        f"the shadow's cache hits {hit_ratio:.0%} of the prompt tokens and the server's "
        f"{served:.0%}: it computes another load"
    )


def _state(best: Observation) -> str:
    """Return the demand that even the best does not meet, empty where it meets all."""
    if best.score.tier is Tier.GOOD:
        return ""
    return {
        Tier.NOT_SUSTAINED: "no setting keeps up with this load",
        Tier.BREAKS_SLO: "no setting meets the SLOs",
    }.get(best.score.tier, "no setting survives its replay")
