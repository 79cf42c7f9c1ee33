"""Every setting at several loads, as a profile predicts it, and what is best at each.

At each load the grid is predicted and what lies between its best and their neighbours. The caps
that came out best at any load are then predicted at all of them, so that loads can be compared
and none is judged by other settings than the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing
from tuner.run.knobs.advice import advise
from tuner.run.knobs.records import KnobAdvice
from tuner.run.predict import Outcome, Predictions, predict, predict_more
from tuner.search.objective import WORST_SLACK, Score, named
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.space import SearchSpace
from tuner.search.trials import leader, read_metric
from tuner.shadow.calibration import StatedError
from tuner.shadow.predictor import Predictor

LATENCIES = ("e2e", "ttft", "tpot")
# What stands in JSON of each setting, beside its latencies.
_RATES = ("offered_per_s", "requests_per_s", "output_tokens_per_s", "goodput_per_s")
_LEVELS = ("utilisation", "slo_attainment_ratio", "preemptions", "completed", "offered")


@dataclass(frozen=True, slots=True)
class Reached:
    """What one setting reaches at one load, by the prediction.

    `figures` are those of a measurement, None where the replay failed for `cause`; `broken` are
    those of the SLOs that do not hold.
    """

    limits: EngineLimits
    figures: Mapping[str, Any] | None
    slos: tuple[Slo, ...]
    broken: tuple[Slo, ...]
    cause: str = ""

    @classmethod
    def of(cls, limits: EngineLimits, outcome: Outcome, slos: tuple[Slo, ...]) -> Reached:
        """Return what an outcome says of a setting."""
        if not isinstance(outcome, Measurement):
            return cls(limits, None, slos, slos, outcome.cause)
        broken = tuple(slo for slo in slos if slo.is_broken_by(outcome))
        return cls(limits, outcome.as_json(), slos, broken)

    @property
    def is_sustained(self) -> bool:
        """Whether it keeps up with the load."""
        return self.figures is not None and bool(self.figures["sustained"])

    @property
    def holds(self) -> bool:
        """Whether it keeps up with the load within every SLO."""
        return self.is_sustained and not self.broken

    @property
    def faults(self) -> list[str]:
        """What does not hold, in a few words each."""
        if self.figures is None:
            return ["failed"]
        unsustained = [] if self.is_sustained else ["not sustained"]
        return [*unsustained, *(f"breaks {slo.name}" for slo in self.broken)]

    @property
    def fault(self) -> str:
        """All that does not hold in a line; empty where all does."""
        return ", ".join(self.faults)

    def value(self, metric: str) -> float | None:
        """Return a metric such as `e2e_p99` or `requests_per_s`, None where it has no end."""
        return None if self.figures is None else read_metric(self.figures, metric)

    def as_json(self, tail: str) -> dict[str, Any]:
        """Return the figures for --json, latencies at the median and at the tail."""
        found = self.figures or {}
        latencies = {
            f"{name}_s": {s: self.value(f"{name}_{s}") for s in dict.fromkeys(("p50", tail))}
            for name in LATENCIES
        }
        return {
            **asdict(self.limits),
            "sustained": self.is_sustained,
            "slos_met": not self.broken if self.slos else None,
            "slos_broken": [str(slo) for slo in self.broken],
            **latencies,
            **{name: found.get(name) for name in (*_RATES, *_LEVELS)},
            "kv_cache_usage_perc": (found.get("kv_cache_usage_perc") or {}).get("max"),
            "queue_depth": (found.get("queue_depth") or {}).get("mean"),
            "cause": self.cause,
        }


@dataclass(frozen=True, slots=True)
class AtLoad:
    """What was predicted at one load, and what is best there.

    `load` is a multiple of the recorded arrivals, whatever the workload is already at.
    """

    load: float
    decision: RaceDecision
    predictions: Predictions
    knobs: KnobAdvice | None = None

    def reached(self, limits: EngineLimits) -> Reached:
        """Return what a setting reaches. Raises: KeyError if it was not predicted."""
        outcome = self.predictions.outcomes[limits]
        return Reached.of(limits, outcome, self.predictions.workload.slos)

    @property
    def best(self) -> Reached:
        """What the best setting reaches."""
        return self.reached(self.decision.best)

    @property
    def is_hopeless(self) -> bool:
        """Whether no setting meets the SLOs: the best is then the nearest to them."""
        every = map(self.reached, self.predictions.outcomes)
        return bool(self.best.slos) and all(reached.broken for reached in every)

    def score(self, limits: EngineLimits) -> Score:
        """Return a setting's place among those of this load. Raises: KeyError as `reached`."""
        return self.predictions.workload.score(self.predictions.outcomes[limits])

    @property
    def change_pays(self) -> bool:
        """Whether the best is surely better than the current one."""
        return self.decision.verdict is RaceVerdict.CHANGE

    @property
    def why(self) -> str:
        """Why the best is so, and by what where that is no latency or rate that is shown."""
        metric, why = self.decision.metric, self.decision.why
        return f"by {named(metric)}: {why}" if metric == WORST_SLACK else why

    def as_json(self, current: EngineLimits, tail: str) -> dict[str, Any]:
        """Return what is best for --json, and what it and the current configuration reach."""
        gain, metric = self.decision.gain, self.decision.metric
        best, before = self.score(self.decision.best), self.score(current)
        return {
            "load": self.load,
            "best": self.decision.best,
            "change_pays": self.change_pays,
            "state": str(best.tier)[2:],
            "metric": metric,
            "value": best.value_of(metric),
            "current_value": before.value_of(metric),
            "ratio": None if gain is None else gain.value,
            "ratio_interval": None if gain is None else [gain.low, gain.high],
            "odds": None if self.decision.odds is None else asdict(self.decision.odds),
            "at_best": self.best.as_json(tail),
            "at_current": self.reached(current).as_json(tail),
            "knobs": self.knobs,
        }


@dataclass(frozen=True, slots=True)
class Surface:
    """What a profile predicts of every setting at every load; the loads ascend.

    `doubt` says why vLLM's own scheduler was asked and not the simulator, empty where it was
    not.
    """

    current: EngineLimits
    error: StatedError
    doubt: str
    loads: tuple[AtLoad, ...]

    @property
    def workload(self) -> Workload:
        """What was replayed, at the first of the loads."""
        return self.loads[0].predictions.workload

    @property
    def tail(self) -> str:
        """The tail quantile that the traffic carries."""
        return self.workload.scoring.tail

    @property
    def settings(self) -> list[EngineLimits]:
        """Every setting, ascending; the same ones at each load."""
        return sorted(self.loads[0].predictions.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Return for --json what is best at each load."""
        return {
            "engine": "shadow",
            "current": self.current,
            **self.error.as_json(),
            "tail": self.tail,
            "loads": [at.as_json(self.current, self.tail) for at in self.loads],
        }


def predict_surface(
    predictor: Predictor,
    space: SearchSpace,
    workload: Workload,
    loads: Sequence[float],
    note: Callable[[str], None] = lambda _: None,
    knobs: Sequence[str] = (),
) -> Surface:
    """Predict the space at each multiple of the load that the workload's pieces are at.

    `note` receives a sentence when a load is predicted, and when it is decided by draws.
    `knobs` are turned beside the best of each load.

    Shapes: loads is [n], n >= 1, ascending.
    Raises: NoFeasibleConfigError if at a load there is no value to compare settings by;
        ShadowError, UsageError.
    """
    searched, base = [], workload.pieces[0].load
    for load in loads:
        there = replace(workload, plan=replace(workload.plan, load=load))
        searched.append(predict(predictor, space, there))
        note(f"load {load * base:g} x: {len(searched[-1].outcomes)} settings predicted")
    settings = _compared(space, searched, predictor.wrong_ratio)
    found_at = []
    for load, found in zip(loads, searched, strict=True):
        whole = predict_more(predictor, found, settings)
        compared = replace(whole, outcomes={x: whole.outcomes[x] for x in settings})
        try:
            decision = Drawing(predictor, compared).decide(space.current, FEW_DRAWS)
        except NoFeasibleConfigError as error:
            raise _undecided(compared, load * base) from error
        turned = advise(predictor, compared, decision.best, space, knobs)
        found_at.append(at := AtLoad(load * base, decision, compared, turned))
        head = "no setting meets the SLOs, nearest" if at.is_hopeless else "best"
        note(f"load {at.load:g} x: {head} {decision.best}")
    return Surface(space.current, predictor.error, predictor.doubt, tuple(found_at))


def _undecided(found: Predictions, load: float) -> NoFeasibleConfigError:
    """Say why no setting has the value that settings are compared by."""
    outcomes = found.outcomes
    where = f"at {load:g} x the recorded load"
    measured = {x: m for x, m in outcomes.items() if isinstance(m, Measurement)}
    if not measured:
        limits, failed = next(iter(outcomes.items()))
        cause = failed.cause if isinstance(failed, Failure) else ""
        return NoFeasibleConfigError(f"{where} every setting fails, {limits} with: {cause}")
    limits, m = max(measured.items(), key=lambda pair: pair[1].completed)
    answered = f"{m.completed:,} of {m.offered:,} requests are answered at {limits}"
    return NoFeasibleConfigError(
        f"{where} no setting answers enough requests to have an E2E latency to compare by: "
        f"at most {answered}, {m.timed_out:,} time out",
        "allow more time with --request-timeout, plan a lower load, or try larger caps with "
        "--max-num-seqs",
    )


def _compared(
    space: SearchSpace, searched: Sequence[Predictions], wrong_ratio: float
) -> list[EngineLimits]:
    """Return the settings that every load is judged by, the current one first."""
    leaders = [leader(found.observations, wrong_ratio) for found in searched]
    best = [o.limits for o in leaders if o is not None]
    own = [space.current, *best, *space.grid()]
    caps = sorted({limits.max_num_seqs for limits in own})
    budgets = sorted({limits.max_num_batched_tokens for limits in own})
    crossed = [space.at(cap, budget) for cap in caps for budget in budgets]
    return list(dict.fromkeys([*own, *(x for x in crossed if x.within(space.ceiling))]))
