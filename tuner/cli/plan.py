"""`tune plan`: the best configuration by load or by hour of day, predicted from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import ShadowOptions, TrafficOptions, announce, check_named
from tuner.cli.options import Params
from tuner.drift.by_hour import (
    MIN_REQUESTS,
    Calendar,
    Hour,
    calendar_of,
    hours_of,
    parse_offset,
)
from tuner.drift.retune import Retune
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.slo import Slo
from tuner.run.inputs import engine_of_profile
from tuner.run.predict import Predictions
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.space import DEFAULT_LADDER, PAST_LADDER, search_space
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.traffic.reshape import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """For which loads, or hours of the day, the best configuration is predicted, and how.

    `ladder` are the caps of max_num_seqs to try, `loads` multiples of the recorded arrivals.
    With `utc_offset_s`, by how much the clock of the hours is ahead of UTC, the plan is by hour
    of day and not by load.

    Units: seconds.
    """

    shadow: ShadowOptions
    traffic: TrafficOptions
    loads: tuple[float, ...]
    slos: tuple[Slo, ...]
    objective: Objective
    ladder: tuple[int, ...]
    utc_offset_s: float | None
    as_json: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        hint = "name a profile, as profile.yaml in the directory of every live run"
        is_by_hour = params["by"] == "hour"
        return cls(
            shadow=ShadowOptions.parse(params, UsageError("--profile is missing", hint)),
            traffic=TrafficOptions.parse(params),
            loads=params["loads"],
            slos=tuple(params["slo"]),
            objective=Objective(params["objective"]),
            ladder=params["max_num_seqs"] or DEFAULT_LADDER,
            utc_offset_s=parse_offset(params["timezone"]) if is_by_hour else None,
            as_json=params["as_json"],
        )

    def aim(self, trace: Trace, load: float, window: Window | None = None) -> Aim:
        """Return what is aimed at for this multiple of a trace. Raises: UsageError."""
        plan = replace(self.traffic.plan(trace), load=load)
        return Aim(self.objective, self.slos, plan, window)

    def retune(
        self, source: ProfiledEngine, recorded: Trace, load: float
    ) -> tuple[Trace, Retune]:
        """Return the trace as the engine takes it, and what predicts it up to a load.

        Raises: ShadowError if the profile does not fit here; TraceError, UsageError.
        """
        profile = source.profile
        facts = source.facts(engine_of_profile(profile, None, None, {}).values)
        trace = self.traffic.fitted(recorded, facts.max_model_len)
        busiest = at_load(trace, load)
        space = search_space(facts, busiest, self.ladder, facts.current_limits)
        return trace, Retune(space, Predictor(profile, space.ceiling, self.traffic.seed))


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What is best at one load."""

    load: float
    decision: RaceDecision
    tier: str
    metric: str
    best: float | None
    current: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the row for --json."""
        gain = self.decision.gain
        interval = None if gain is None else [gain.low, gain.high]
        return {
            "load": self.load,
            "best": self.decision.best,
            "change_pays": self.decision.verdict is RaceVerdict.CHANGE,
            "state": self.tier,
            "metric": self.metric,
            "value": self.best,
            "current_value": self.current,
            "ratio": None if gain is None else gain.value,
            "ratio_interval": interval,
            "odds": None if self.decision.odds is None else asdict(self.decision.odds),
        }


def run_plan(options: PlanOptions) -> int:
    """Predict every load, or hour of day, and print the table. Raises: TunerError."""
    _, source = options.shadow.load()
    if options.utc_offset_s is not None:
        calendar = _calendar(options, source, options.utc_offset_s)
        show_result(calendar.as_json(), calendar.lines(), as_json=options.as_json)
        return 0
    rows, retune = _planned(options, source)
    current, wrong_ratio = retune.space.current, retune.wrong_ratio
    content = {
        "engine": "shadow",
        "current": current,
        "error_ratio": wrong_ratio,
        "loads": [row.as_json() for row in rows],
    }
    show_result(content, _table(rows, current, wrong_ratio), as_json=options.as_json)
    return 0


def _planned(options: PlanOptions, source: ProfiledEngine) -> tuple[list[PlanRow], Retune]:
    """Return what is best at each load, and what predicted it. Raises: TunerError."""
    traffic = options.traffic.read(max(options.ladder) * PAST_LADDER)
    announce(traffic)
    trace, retune = options.retune(source, traffic.trace, max(options.loads))
    chosen = options.traffic.window
    window = None if chosen is None else chosen.resolve(trace)
    rows: list[PlanRow] = []
    for load in options.loads:
        rows.append(_row(retune, retune.rank(trace, options.aim(trace, load, window)), load))
        say(f"load {load:g} x: best {rows[-1].decision.best}")
    return rows, retune


def _row(retune: Retune, predicted: Predictions, load: float) -> PlanRow:
    decision, observations = retune.decide(predicted), predicted.observations
    best = next(o for o in observations if o.limits == decision.best)
    before = next((o for o in observations if o.limits == retune.space.current), None)
    comparable = before is not None and before.score.metric == best.score.metric
    return PlanRow(
        load,
        decision,
        str(best.score.tier)[2:],
        best.score.metric,
        best.score.value,
        before.score.value if before is not None and comparable else None,
    )


def _table(rows: Sequence[PlanRow], current: EngineLimits, wrong_ratio: float) -> list[str]:
    """Return the table for people; a rate stands as such, not as its inverse."""
    lines = [
        f"current {current} (max_num_seqs/max_num_batched_tokens); predicted, "
        f"wrong by {wrong_ratio:.0%} on what was measured",
        f"{'load':>6}  {'best':>12}  {'metric':<16} {'there':>10} {'current':>10}  advice",
    ]
    for row in rows:
        pays = row.decision.verdict is RaceVerdict.CHANGE
        advice = "re-tune" if pays else f"keep ({row.decision.why})"
        state = "" if row.tier == "good" else f" [{row.tier}]"
        lines.append(
            f"{row.load:>5g}x  {row.decision.best!s:>12}  {row.metric:<16} "
            f"{_value(row.best, row.metric):>10} {_value(row.current, row.metric):>10}  "
            f"{advice}{state}"
        )
    return lines


def _value(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    if metric.endswith("_per_s"):
        return f"{1 / value:.3g}/s"
    return f"{value:.3g} s" if metric.startswith("e2e") else f"{value:.3g}"


def _calendar(options: PlanOptions, source: ProfiledEngine, utc_offset_s: float) -> Calendar:
    """Return what is best at each hour of the day. Raises: TunerError."""
    check_named(options.traffic.files)
    recorded = options.traffic.part_of(options.traffic.reading.read(options.traffic.files))
    load = options.traffic.load
    trace, retune = options.retune(source, recorded, load)
    return calendar_of(
        trace, _hours(trace, utc_offset_s), retune, options.aim(trace, load), say
    )


def _hours(trace: Trace, utc_offset_s: float) -> tuple[Hour, ...]:
    """Return the hours with traffic. Raises: UsageError if there is none."""
    hours = tuple(hours_of(trace, utc_offset_s))
    if not hours:
        raise UsageError(
            f"no hour of {trace.source} holds {MIN_REQUESTS} requests", "record more traffic"
        )
    return hours
