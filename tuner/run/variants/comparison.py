"""What variants bring beside the configuration as it is, each at its own best limits.

Where the engines of both were predicted, by draws that share the traffic; where one could not
be, by what both were measured to do on the same windows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.errors import OF_THE_ENGINE
from tuner.replay.metrics import Measurement
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing, compare_engines
from tuner.run.evidence import change_bounds
from tuner.run.loads.capacity import draw_capacity
from tuner.run.predict import Predictions, capacity_per_s, per_s, predict_more
from tuner.run.result import RunResult
from tuner.run.variants.records import VariantComparison, VariantFinding
from tuner.search.draws import Draws
from tuner.search.objective import Tier
from tuner.search.trials import Trial, predictions
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile

SECONDS_AN_HOUR = 3600
SHOWN = ("e2e_s", "ttft_s", "tpot_s")
"""The latencies that are told of each."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration whose own run has ended, to be compared with others.

    `settings` are the keys that make it. `profile` is what the run has learnt of its engine,
    None where that cannot be predicted: then what its `result` measured speaks for it.
    """

    name: str
    settings: Mapping[str, object]
    result: RunResult
    profile: Profile | None

    @property
    def limits(self) -> EngineLimits | None:
        """Its own best limits, None where it meets the SLOs at none."""
        advice = self.result.recommendation
        return None if advice is None else advice.limits


@dataclass(frozen=True, slots=True)
class Comparing:
    """What contenders are compared on.

    `price` is what an hour of a device costs, None where nobody said.
    """

    workload: Workload
    seed: int
    confidence: float
    price: float | None = None

    def compare(
        self, as_it_is: Contender, others: Sequence[Contender | VariantFinding]
    ) -> VariantComparison:
        """Return what each brings; a finding, as of one that does not start, stays as it is.

        Raises: ShadowError, UsageError.
        """
        base = self._side(as_it_is, 0)
        sides = [
            one if isinstance(one, VariantFinding) else self._against(base, one, place)
            for place, one in enumerate(others, 1)
        ]
        return VariantComparison(as_it_is=base.finding, others=tuple(sides))

    def _against(self, base: _Side, other: Contender, place: int) -> VariantFinding:
        """Return what another brings over the configuration as it is."""
        side = self._side(other, place)
        if side.draws is not None and base.draws is not None:
            odds, metric, gain = compare_engines(
                side.draws, base.draws, self.seed, self.confidence
            )
            return replace(
                side.finding,
                metric=metric,
                gain_ratio=None if gain is None else gain.value - 1,
                gain_interval=None if gain is None else change_bounds(gain),
                p_better=odds.p_better,
                p_slo=odds.p_slo,
            )
        ours, theirs = _measured(side.contender), _measured(base.contender)
        costs = [_typical_cost(trials) for trials in (ours, theirs)]
        if costs[0] is None or costs[1] is None:
            return side.finding
        metric = theirs[0].observation.score.own_metric
        return replace(side.finding, metric=metric, gain_ratio=costs[0] / costs[1] - 1)

    def _side(self, contender: Contender, place: int) -> _Side:
        limits, profile = contender.limits, contender.profile
        finding = VariantFinding(
            name=contender.name,
            settings=dict(contender.settings),
            limits=limits,
            gpus=1 if profile is None else profile.shape.devices,
            doubts=tuple(c.text for c in contender.result.caveats if c.id in OF_THE_ENGINE),
        )
        if limits is None:
            return _Side(contender, finding)
        if profile is None:
            trials = _measured(contender)
            held = _latencies([t.measurement or {} for t in trials], contender.result.tail)
            return _Side(contender, replace(finding, latencies_s=held, are_live=True))
        predictor = Predictor(profile, seed=self.seed).as_deployed()
        found = predict_more(predictor, Predictions(self.workload), [limits])
        outcome = found.outcomes[limits]
        if not isinstance(outcome, Measurement):
            return _Side(contender, replace(finding, limits=None, failure=outcome.cause))
        capacity, where = self._capacity(contender, predictor, limits)
        lies = None
        if capacity:
            told = capacity / per_s(self.workload, 1.0)
            lies = draw_capacity(predictor, self.workload, where, told, place)
        finding = replace(
            finding,
            metric=self.workload.score(outcome).own_metric,
            latencies_s=_latencies([outcome.as_json()], self.workload.scoring.tail),
            capacity_per_s=capacity,
            capacity_interval=None
            if lies is None
            else (per_s(self.workload, lies[0]), per_s(self.workload, lies[1])),
            capacity_limits=where,
            cost_per_1000=self._cost(capacity, finding.gpus),
        )
        drawn = Drawing(predictor, found, place).draws([limits], FEW_DRAWS)
        return _Side(contender, finding, drawn)

    def _capacity(
        self, contender: Contender, predictor: Predictor, limits: EngineLimits
    ) -> tuple[float | None, EngineLimits]:
        """Return the most requests a second that hold, and with which of the caps tried.

        What is best at the recorded load need not bear most.
        """
        budget = limits.max_num_batched_tokens
        tried = (t.limits for t in predictions(contender.result.trials))
        caps = [x for x in tried if x.max_num_batched_tokens == budget]
        asked = [limits, *caps] if not predictor.doubt else [limits]
        found = {x: capacity_per_s(predictor, self.workload, x) for x in dict.fromkeys(asked)}
        best = max(found, key=lambda x: (found[x] or 0.0, x == limits))
        return found[best], best

    def _cost(self, capacity: float | None, gpus: int) -> float | None:
        """Return what a thousand requests cost on devices that are as loaded as they may be."""
        if self.price is None or not capacity:
            return None
        return 1000 * self.price * gpus / SECONDS_AN_HOUR / capacity


@dataclass(frozen=True, slots=True)
class _Side:
    """A contender, what is known of it, and draws of it where it was predicted."""

    contender: Contender
    finding: VariantFinding
    draws: Draws | None = None


def _measured(contender: Contender) -> list[Trial]:
    """Return the live replays of a contender's limits on the windows of its run."""
    return [
        t
        for t in contender.result.trials
        if t.measurement and t.phase.is_on_windows and t.limits == contender.limits
    ]


def _typical_cost(trials: Sequence[Trial]) -> float | None:
    """Return the middle cost of replays, None where there is none that has one."""
    values = [t.observation.score.value_in(Tier.GOOD) for t in trials]
    known = [value for value in values if 0 < value < math.inf]
    return statistics.median(known) if known else None


def _latencies(measured: Sequence[Mapping[str, Any]], tail: str) -> dict[str, float | None]:
    """Return the middle and the tail of each latency, in the median of the replays."""
    found: dict[str, float | None] = {}
    for name in SHOWN:
        for statistic in dict.fromkeys(("p50", tail)):
            values = [(m.get(name) or {}).get(statistic) for m in measured]
            known = [value for value in values if value is not None]
            key = f"{name.removesuffix('_s')}_{statistic}"
            found[key] = statistics.median(known) if known else None
    return found
