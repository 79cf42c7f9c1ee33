"""A whole run of the tool on a planted machine, and its answer held to what is true."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.planted import PlantedSource
from support.planted_cases import LADDER, SPEEDS, PlantedCase, Truth
from support.virtual_time import on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.run.listener import Listener
from tuner.run.options import Method, TuningOptions
from tuner.run.result import RunResult, read_result
from tuner.run.tune import tune
from tuner.search.objective import MISSED_LOAD, WORST_SLACK, Score, Tier, moved, moved_bounds

# What makes a change worth its trouble: as in `tune check`.
PAYS_RATIO = 0.05
INFEASIBLE = "nothing feasible"


# What a run may think to be met that truly is not: ours, as in `SPEEDS`.
NEAR_SLO = 0.02


@dataclass(frozen=True, slots=True)
class Said:
    """What a run said. Gains are shares of the metric's current value, below 0 for less of it.

    `limits` are those to run with from now on, None where it said that none will do;
    `stages_s` is where the engine's seconds went.
    """

    verdict: str = "none"
    limits: EngineLimits | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    gain_metric: str = ""
    is_predicted: bool = False
    rounds: int = 0
    cold_ratio: float | None = None
    caveats: tuple[str, ...] = ()
    engine_starts: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: RunResult) -> Said:
        """Return what a result says."""
        caveats = tuple(caveat.id for caveat in result.caveats)
        starts, advice = result.provenance.engine_starts, result.recommendation
        stages_s = {name: round(s, 1) for name, s in result.provenance.stages_s.items()}
        if advice is None:
            return cls(caveats=caveats, engine_starts=starts, stages_s=stages_s)
        gain, cold = result.gain, result.confirmed_cold
        # The truth is of the traffic that was recorded, not of other hours.
        told = (None, None) if gain is None else (gain.low, gain.high)
        here = told
        if advice.gain_here_interval is not None:
            here = moved_bounds(advice.gain_metric, advice.gain_here_interval)
        return cls(
            verdict="keep" if advice.limits == result.current else "change",
            limits=advice.limits,
            gain=None if gain is None else gain.value,
            gain_low=None if gain is None else here[0],
            gain_high=None if gain is None else here[1],
            gain_metric=advice.gain_metric,
            is_predicted=advice.is_predicted,
            rounds=advice.rounds,
            cold_ratio=None if cold is None else cold.ratio,
            caveats=caveats,
            engine_starts=starts,
            stages_s=stages_s,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """What is true of the settings that a run said.

    `best` is of the grid and of what was said. `loss` is of what was said to run with against
    it and `could_gain` of the current setting; `sure_…` is what stays of each on machines 2 %
    faster and slower. `gain` is that of a change by the metric that it was told by, and
    `rate_loss` how much of the requests a second is lost where no setting sustains the load.
    """

    best: EngineLimits
    best_tier: Tier
    could_gain: float
    surely_could_gain: float
    tier: Tier | None = None
    loss: float | None = None
    sure_loss: float | None = None
    gain: float | None = None
    is_better: bool | None = None
    is_ever_better: bool | None = None
    breaks_slo: bool | None = None
    surely_breaks_slo: bool | None = None
    rate_loss: float | None = None

    @classmethod
    def of(cls, truth: Truth[Any], said: Said) -> Known:
        """Return what is true of what was said."""
        limits, current = said.limits, truth.case.current
        best = truth.best() if limits is None else truth.best(limits)
        to_gain = [_to_be_had(truth, best, times) for times in SPEEDS]
        tier = truth.score(best).tier
        if limits is None:
            return cls(best, tier, to_gain[0], min(to_gain))
        losses = [truth.loss(limits, best, times) for times in SPEEDS]
        better = [_is_better(truth, limits, current, times) for times in SPEEDS]
        tiers = [truth.score(limits, times).tier for times in SPEEDS]
        breaks = [own is Tier.BREAKS_SLO for own in tiers]
        is_change, has_slo = limits != current, bool(truth.slos)
        return cls(
            best=best,
            best_tier=tier,
            could_gain=to_gain[0],
            surely_could_gain=min(to_gain),
            tier=tiers[0],
            loss=losses[0],
            sure_loss=min(losses),
            gain=_gain(truth, limits, said.gain_metric) if is_change else None,
            is_better=better[0] if is_change else None,
            is_ever_better=any(better) if is_change else None,
            breaks_slo=breaks[0] if has_slo else None,
            surely_breaks_slo=all(breaks) if has_slo else None,
            rate_loss=truth.rate_loss(limits) if tier is Tier.NOT_SUSTAINED else None,
        )


def _to_be_had(truth: Truth[Any], best: EngineLimits, times: float) -> float:
    """Return what the current setting loses; enough to pay where it alone breaks an SLO."""
    current = truth.case.current
    mine, its = truth.score(current, times), truth.score(best, times)
    if Tier.BREAKS_SLO in (mine.tier, its.tier):
        is_lower = mine.tier > its.tier
        return max(PAYS_RATIO if is_lower else 0.0, truth.loss(current, best, times))
    return max(0.0, _charged(mine, its) / _charged(its, mine) - 1)


def _is_better(
    truth: Truth[Any], limits: EngineLimits, other: EngineLimits, times: float
) -> bool:
    """Whether a setting is truly better than another by what is optimised."""
    mine, its = truth.score(limits, times), truth.score(other, times)
    if Tier.BREAKS_SLO in (mine.tier, its.tier):
        return truth.is_better(limits, other, times)
    return _charged(mine, its) < _charged(its, mine)


def _charged(score: Score, other: Score) -> float:
    """Return what a setting costs, with what it costs not to sustain what another does."""
    over = (score.load_used or 0.0) - 1
    missed = over > 0 and (other.load_used or 0.0) <= 1
    return score.value_in(Tier.GOOD) * (1 + max(over, MISSED_LOAD) * missed)


def _gain(truth: Truth[Any], limits: EngineLimits, metric: str) -> float | None:
    """Return the true gain by a metric as a run names it.

    Bounds are the load's too where one of the two bears it and, within NEAR_SLO, keeps its SLO.
    """
    pair = (limits, truth.case.current)
    mine, its = (truth.value(of, metric) for of in pair)
    if not mine or not its:
        return None
    loads = [truth.score(of).load_used or 0.0 for of in pair]
    if metric == WORST_SLACK:
        sides = list(zip((mine, its), loads, strict=True))
        if any(used <= 1 + NEAR_SLO and load <= 1 for used, load in sides):
            mine, its = map(max, sides)
    return moved(metric, mine / its - 1)


@dataclass(frozen=True, slots=True)
class Judged:
    """One run: what it said, what is true, and what it took. Units: seconds; `took_s` real."""

    case: str
    seed: int
    ended: str
    current: EngineLimits
    said: Said
    true: Known
    budget_s: float
    engine_s: float
    took_s: float

    @property
    def is_windowed(self) -> bool:
        """Whether what is said rests on part of the traffic; a prediction is of all of it."""
        return "windowed" in self.said.caveats

    @property
    def is_change(self) -> bool:
        """Whether another setting was recommended."""
        return self.said.verdict == "change"

    @property
    def told_off(self) -> float | None:
        """By how much the told gain is above the true one, None unless both are known."""
        told, true = self.said.gain, self.true.gain
        return None if told is None or true is None else told - true

    @property
    def is_covered(self) -> bool | None:
        """Whether the true gain lies within the told interval, None where there is none."""
        low, high, true = self.said.gain_low, self.said.gain_high, self.true.gain
        return None if low is None or high is None or true is None else low <= true <= high


def judged_run(
    truth: Truth[PlantedCase],
    seed: int,
    listener: Listener | None = None,
    method: Method = Method.AUTO,
) -> Judged:
    """Tune once in the mood of a seed, and hold the answer to the truth."""
    source = truth.case.source(seed)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = _options(truth, seed, run_dir, method)
        ended, result = _tuned(options, run_dir, source, listener)
    took_s = time.perf_counter() - began_s
    said = Said() if result is None else Said.of(result)
    case = truth.case
    return Judged(
        case=case.name,
        seed=seed,
        ended=ended,
        current=case.current,
        said=said,
        true=Known.of(truth, said),
        budget_s=case.budget_s,
        engine_s=source.clock.now_s,
        took_s=took_s,
    )


def _options(
    truth: Truth[PlantedCase], seed: int, run_dir: Path, method: Method
) -> TuningOptions:
    current = truth.case.current
    return TuningOptions(
        trace=truth.case.trace,
        config={
            "model": "planted",
            "max-num-seqs": current.max_num_seqs,
            "max-num-batched-tokens": current.max_num_batched_tokens,
        },
        slos=truth.slos,
        objective=truth.case.objective,
        load_model=truth.case.plan.load_model,
        concurrency=truth.case.concurrency,
        budget_s=truth.case.budget_s,
        method=method,
        ladder=LADDER,
        run_dir=run_dir,
        seed=seed,
    )


def _tuned(
    options: TuningOptions, run_dir: Path, source: PlantedSource, listener: Listener | None
) -> tuple[str, RunResult | None]:
    """Return how a run ended, and its result if it has one."""
    try:
        with on_virtual_time(source.clock):
            return "complete", tune(options, listener, source=source)
    except NoFeasibleConfigError:
        return INFEASIBLE, read_result(run_dir)
    except Exception as error:  # noqa: BLE001 - how it ended is what is counted
        return f"{type(error).__name__}: {error}", None
