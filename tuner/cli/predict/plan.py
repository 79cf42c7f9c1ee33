"""`tune plan`: the best configuration by load or by hour of day, predicted from a profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import check_named
from tuner.cli.options import Params
from tuner.cli.predict.options import LoadsOptions
from tuner.drift.by_hour import (
    MIN_REQUESTS,
    Calendar,
    Hour,
    calendar_of,
    hours_of,
    parse_offset,
)
from tuner.errors import UsageError
from tuner.run.loads.clients import advise
from tuner.run.loads.surface import AtLoad, Reached, Surface
from tuner.search.objective import RATE, Objective
from tuner.shadow.profiled import ProfiledEngine
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """For which loads, or hours of the day, the best configuration is predicted, and how.

    With `utc_offset_s`, by how much the clock of the hours is ahead of UTC, the plan is by hour
    of day and not by load. With `for_clients` it is what clients of the current configuration
    should hold to instead.

    Units: seconds.
    """

    inputs: LoadsOptions
    utc_offset_s: float | None
    for_clients: bool
    as_json: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        is_by_hour = params["by"] == "hour"
        if is_by_hour and params["clients"]:
            raise UsageError(
                "--clients is for the load as recorded, --by hour for hours: one of them"
            )
        return cls(
            inputs=LoadsOptions.parse(params),
            utc_offset_s=parse_offset(params["timezone"]) if is_by_hour else None,
            for_clients=params["clients"],
            as_json=params["as_json"],
        )


def run_plan(options: PlanOptions) -> int:
    """Predict every load, or hour of day, and print the table. Raises: TunerError."""
    _, source = options.inputs.shadow.load()
    if options.utc_offset_s is not None:
        calendar = _calendar(options.inputs, source, options.utc_offset_s)
        show_result(calendar.as_json(), calendar.lines(), as_json=options.as_json)
        return 0
    if options.for_clients:
        advice = advise(*options.inputs.current(source))
        show_result(advice.as_json(), advice.lines(), as_json=options.as_json)
        return 0
    _, surface = options.inputs.surface(source)
    lines = _table(surface, options.inputs.objective)
    show_result(surface.as_json(), lines, as_json=options.as_json)
    return 0


def _table(surface: Surface, objective: Objective) -> list[str]:
    """Return the table for people: what the best and the current one reach, and what to do."""
    latency = "e2e_p50" if objective is Objective.LATENCY else f"e2e_{surface.tail}"
    rate = "goodput_per_s" if objective is Objective.GOODPUT else RATE
    heads = f"{latency:>9} {rate:>14}"
    lines = [
        f"current {surface.current} (max_num_seqs/max_num_batched_tokens); predicted, "
        f"wrong by {surface.wrong_ratio:.0%} on what was measured",
        f"{'':22}{'at the best':>24}  {'at the current':>24}",
        f"{'load':>6}  {'best':>12}  {heads}  {heads}  advice",
    ]
    for at in surface.loads:
        best, current = at.best, at.reached(surface.current)
        cells = (
            f"{at.load:>5g}x  {at.decision.best!s:>12}",
            *(
                f"{_seconds(reached, latency):>9} {_per_s(reached, rate):>14}"
                for reached in (best, current)
            ),
            _advice(at, best, current),
        )
        lines.append("  ".join(cells))
    return lines


def _seconds(reached: Reached, metric: str) -> str:
    value_s = reached.value(metric)
    return "-" if value_s is None else f"{value_s:.3g} s"


def _per_s(reached: Reached, metric: str) -> str:
    value = reached.value(metric)
    return "-" if value is None else f"{value:.3g}/s"


def _advice(at: AtLoad, best: Reached, current: Reached) -> str:
    """Return what to do at a load, and whose figures do not hold."""
    advice = "re-tune" if at.change_pays else f"keep ({at.decision.why})"
    faults = {"best": best.fault, "current": current.fault}
    if best.fault == current.fault:
        faults = {"both": best.fault}
    shown = "; ".join(f"{whose}: {fault}" for whose, fault in faults.items() if fault)
    return f"{advice} [{shown}]" if shown else advice


def _calendar(inputs: LoadsOptions, source: ProfiledEngine, utc_offset_s: float) -> Calendar:
    """Return what is best at each hour of the day. Raises: TunerError."""
    check_named(inputs.traffic.files)
    recorded = inputs.traffic.part_of(inputs.traffic.reading.read(inputs.traffic.files))
    load = inputs.traffic.load
    trace, retune = inputs.retune(source, recorded, load)
    aim = inputs.aim(trace)
    aim = replace(aim, plan=replace(aim.plan, load=load))
    return calendar_of(trace, _hours(trace, utc_offset_s), retune, aim, say)


def _hours(trace: Trace, utc_offset_s: float) -> tuple[Hour, ...]:
    """Return the hours with traffic. Raises: UsageError if there is none."""
    hours = tuple(hours_of(trace, utc_offset_s))
    if not hours:
        raise UsageError(
            f"no hour of {trace.source} holds {MIN_REQUESTS} requests", "record more traffic"
        )
    return hours
