"""`tune plan`: the best configuration by load, by hour of day or for a fleet, predicted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final, Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import check_named, say_missed
from tuner.cli.options import Params
from tuner.cli.predict.options import LoadsOptions
from tuner.drift.by_hour import Calendar, Hour, calendar_of, hours_of, parse_offset
from tuner.drift.retune import Retune
from tuner.errors import ShadowError, UsageError
from tuner.report.words import counted
from tuner.run.loads.clients import advise
from tuner.run.loads.fleet import plan_fleet
from tuner.run.loads.fleet_plan import FleetAim, FleetPlan, Way
from tuner.run.loads.surface import AtLoad, Reached, Surface
from tuner.search.budget import MIN_REQUESTS
from tuner.search.objective import RATE, Objective
from tuner.shadow.profiled import ProfiledEngine
from tuner.stats import short
from tuner.traffic.reshape import Router
from tuner.traffic.traces import Trace

_BY_LOAD, _BY_HOUR, _FLEET = "", "--by hour", "--fleet"
_READ_BY: Final = {
    "loads": (_BY_LOAD,),
    "knobs": (_BY_LOAD,),
    "objective": (_BY_LOAD, _BY_HOUR),
    "max_num_seqs": (_BY_LOAD, _BY_HOUR, _FLEET),
    "timezone": (_BY_HOUR,),
    "router": (_FLEET,),
    "gpu_hour_price": (_FLEET,),
    "start_time": (_FLEET,),
    "stretch": (_FLEET,),
    "most_replicas": (_FLEET,),
}
"""The kinds of plan that read an option, the first of them of whoever gives it alone."""
_LEAST_STRETCH_S = 1.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """For which loads, hours or fleet the best configuration is predicted, and how.

    With `utc_offset_s`, by how much the clock of the hours is ahead of UTC, the plan is by hour
    of day and not by load; with `fleet` it is of replicas, whose devices are counted then. With
    `for_clients` it is what clients of the current configuration should hold to instead.

    Units: seconds.
    """

    inputs: LoadsOptions
    utc_offset_s: float | None
    fleet: FleetAim | None
    for_clients: bool
    as_json: bool

    @classmethod
    def parse(cls, params: Params, given: Collection[str]) -> Self:
        """Return what the command line says; `given` are those it names. Raises: UsageError."""
        is_by_hour = params["by"] == "hour"
        _check_alone(params, given)
        return cls(
            inputs=LoadsOptions.parse(params),
            utc_offset_s=parse_offset(params["timezone"]) if is_by_hour else None,
            fleet=_fleet_aim(params),
            for_clients=params["clients"],
            as_json=params["as_json"],
        )


def _check_alone(params: Params, given: Collection[str]) -> None:
    """Refuse two kinds of plan at once, and options that the asked one does not read."""
    kinds = {_BY_HOUR: params["by"], _FLEET: params["fleet"], "--clients": params["clients"]}
    asked = [kind for kind, is_asked in kinds.items() if is_asked]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are two plans", "give one of them")
    kind = asked[0] if asked else _BY_LOAD
    for name, readers in _READ_BY.items():
        option = f"--{name.replace('_', '-')}"
        if name not in given or kind in readers:
            continue
        if readers[0]:
            raise UsageError(
                f"{option} is for {readers[0]}, which is not asked for",
                f"add {readers[0]}, or leave {option} out",
            )
        raise UsageError(
            f"{option} is for the plan by load, got {kind}",
            "leave one of them out; --load multiplies the traffic of every plan",
        )


def _fleet_aim(params: Params) -> FleetAim | None:
    """Return what a fleet is asked for, None where none is. Raises: UsageError."""
    if not params["fleet"]:
        return None
    if not params["slo"]:
        raise UsageError(
            "--fleet needs an SLO that replicas are to keep",
            "add --slo, for example --slo ttft_p99=2s",
        )
    if params["stretch"] < _LEAST_STRETCH_S:
        raise UsageError(
            f"--stretch must be at least {_LEAST_STRETCH_S:g}s, got {params['stretch']:g}s",
            "replicas are planned for minutes or hours: --stretch 1h",
        )
    return FleetAim(
        slos=tuple(params["slo"]),
        router=Router(params["router"]),
        devices=1,
        gpu_hour_price=params["gpu_hour_price"],
        most=params["most_replicas"],
        start_s=params["start_time"],
        stretch_s=params["stretch"],
    )


def run_plan(options: PlanOptions) -> int:
    """Predict every load, or hour of day, and print the table. Raises: TunerError."""
    content, lines = _planned(options, options.inputs.shadow.load())
    show_result(content, lines, as_json=options.as_json)
    return 0


def _planned(options: PlanOptions, source: ProfiledEngine) -> tuple[object, list[str]]:
    """Return the plan that is asked for, and its lines for people. Raises: TunerError."""
    inputs = options.inputs
    if options.fleet is not None:
        found = _fleet(inputs, source, options.fleet)
        return found.as_json(), _fleet_lines(found)
    if options.utc_offset_s is not None:
        calendar = _calendar(inputs, source, options.utc_offset_s)
        return calendar.as_json(), calendar.lines()
    if options.for_clients:
        predictor, limits, workload = inputs.current(source)
        advice, error = advise(predictor, limits, workload), predictor.error
        return {**advice.as_json(), **error.as_json()}, [*advice.lines(), *error.lines()]
    _, surface = inputs.surface(source)
    return surface.as_json(), _table(surface, inputs.objective)


def _table(surface: Surface, objective: Objective) -> list[str]:
    """Return the table for people: what the best and the current one reach, and what to do."""
    latency = "e2e_p50" if objective is Objective.LATENCY else f"e2e_{surface.tail}"
    rate = "goodput_per_s" if objective is Objective.GOODPUT else RATE
    heads = f"{latency:>9} {rate:>14}"
    lines = [
        f"current {surface.current} (max_num_seqs/max_num_batched_tokens); predicted, "
        f"{surface.error.words()}",
        *surface.error.lines(),
        f"{'':22}{'at the best':>24}  {'at the current':>24}",
        f"{'load':>6}  {'best':>12}  {heads}  {heads}  advice",
    ]
    for at in surface.loads:
        best, current = at.best, at.reached(surface.current)
        cells = (
            f"{at.load:>5g}x  {at.decision.best!s:>12}",
            *(
                f"{_short(reached, latency, ' s'):>9} {_short(reached, rate, '/s'):>14}"
                for reached in (best, current)
            ),
            _advice(at, best, current),
        )
        lines.append("  ".join(cells))
        lines += [f"{'':8}{line}" for line in (at.knobs.lines if at.knobs else ())]
    return lines


def _short(reached: Reached, metric: str, unit: str) -> str:
    value = reached.value(metric)
    return "-" if value is None else f"{short(value)}{unit}"


def _advice(at: AtLoad, best: Reached, current: Reached) -> str:
    """Return what to do at a load, and whose figures do not hold."""
    advice = "re-tune" if at.change_pays else f"keep ({at.why})"
    faults = {"best": best.fault, "current": current.fault}
    if best.fault == current.fault:
        faults = {"both": best.fault}
    shown = "; ".join(f"{whose}: {fault}" for whose, fault in faults.items() if fault)
    return f"{advice} [{shown}]" if shown else advice


def _read(inputs: LoadsOptions, source: ProfiledEngine, load: float) -> tuple[Trace, Retune]:
    """Return the part in the window as the engine takes it, and what predicts it up to a load.

    Raises: TunerError.
    """
    check_named(inputs.traffic.files)
    recorded = inputs.traffic.part_of(inputs.traffic.reading.read(inputs.traffic.files))
    return inputs.retune(source, recorded, load)


def _fleet(inputs: LoadsOptions, source: ProfiledEngine, aim: FleetAim) -> FleetPlan:
    """Return how many replicas serve the traffic, and how; it begins when they do, empty.

    Raises: TunerError.
    """
    trace, retune = _read(inputs, source, 1.0)
    predictor = retune.predictor
    if predictor.doubt:
        raise ShadowError(
            f"a fleet cannot be simulated: {predictor.doubt}",
            "plan one replica: tune trace thin",
        )
    aim = replace(aim, devices=predictor.profile.shape.devices)
    plan = replace(inputs.traffic.plan(trace), load=inputs.traffic.load)
    say_missed(trace, [plan.load])
    return plan_fleet(predictor, retune.space, trace, plan, aim, say)


def _calendar(inputs: LoadsOptions, source: ProfiledEngine, utc_offset_s: float) -> Calendar:
    """Return what is best at each hour of the day. Raises: TunerError."""
    load = inputs.traffic.load
    trace, retune = _read(inputs, source, load)
    aim = inputs.aim(trace)
    aim = replace(aim, plan=replace(aim.plan, load=load))
    say_missed(trace, [load])
    return calendar_of(trace, _hours(trace, utc_offset_s), retune, aim, say)


def _hours(trace: Trace, utc_offset_s: float) -> tuple[Hour, ...]:
    """Return the hours with traffic. Raises: UsageError if there is none."""
    hours = tuple(hours_of(trace, utc_offset_s))
    if not hours:
        raise UsageError(
            f"no hour of {trace.source} holds {MIN_REQUESTS} requests", "record more traffic"
        )
    return hours


def _fleet_lines(found: FleetPlan) -> list[str]:
    """Return for people how many replicas there are, how they run, and what comes of it."""
    aim, fixed = found.aim, found.ways[0]
    slos = ", ".join(map(str, aim.slos))
    gpus = f", {aim.devices} GPUs each" if aim.devices > 1 else ""
    keep = "keeps" if fixed.replicas == 1 else "keep"
    missed = (
        f" but in {_stretches_of(fixed)}, where up to {aim.most} do not" if fixed.breaks else ""
    )
    lines = [
        f"{counted(fixed.replicas, 'replica')}{gpus} at {found.limits} "
        f"(max_num_seqs/max_num_batched_tokens) behind a {aim.router} router {keep} "
        f"{slos}{missed}; predicted, {found.error.words()}",
        *found.error.lines(),
        f"the busiest stretch by itself needs {_count(found.needed[found.limits], aim.most)}, "
        f"at the current {found.current} {_count(found.needed[found.current], aim.most)}",
        found.odds.text(aim.most),
        "",
        f"{'':12}{'most':>6}{'GPU hours':>12}{'cost':>12}{'within SLOs':>14}  what breaks",
    ]
    lines += [_way_line(way) for way in found.ways]
    names = "".join(f"{way.name:>16}" for way in found.ways)
    lines += ["", f"{'from':>8}{'requests/s':>12}{names}"]
    for each in zip(*(way.stretches for way in found.ways), strict=True):
        cells = "".join(f"{one.replicas:>8g}{one.slo_attainment_ratio:>8.1%}" for one in each)
        lines.append(f"{_instant(each[0].start_s):>8}{short(each[0].offered_per_s):>12}{cells}")
    return lines


def _count(replicas: int | None, most: int) -> str:
    return f"more than {most}" if replicas is None else f"{replicas}"


def _way_line(way: Way) -> str:
    cost = "-" if way.cost is None else f"{way.cost:,.2f}"
    target = (
        "" if way.autoscaler is None else f"{short(way.autoscaler.target)} in flight each; "
    )
    return (
        f"{way.name:<12}{way.replicas:>6}{short(way.gpu_hours, 4):>12}{cost:>12}"
        f"{way.slo_attainment_ratio:>14.2%}  {target}{_broken(way)}"
    )


def _broken(way: Way) -> str:
    if not way.breaks:
        return "nothing"
    names = sorted({slo for one in way.breaks for slo in one.broken or ()})
    return f"{', '.join(names)} in {_stretches_of(way)}"


def _stretches_of(way: Way) -> str:
    return f"{len(way.breaks)} of {len(way.stretches)} stretches"


def _instant(start_s: float) -> str:
    return f"{start_s / 3600:g} h" if start_s % 3600 == 0 else f"{start_s / 60:g} min"
