"""`tune gate`: what to let in under overload, predicted, and written for what lets it in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import (
    LimitOptions,
    ShadowOptions,
    TrafficOptions,
    announce,
    check_output,
    say_missed,
)
from tuner.cli.options import Params, path_of
from tuner.emit.gate import NO_GATE, WRITERS, evidence
from tuner.emit.names import GateFormat
from tuner.errors import UsageError
from tuner.files import write_atomic
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.inputs import engine_of_profile
from tuner.run.loads.gate import GateAnswer, GatedLoad, find_gate, goodput_per_s
from tuner.search.budget import Aim, asked_window
from tuner.search.objective import Objective
from tuner.shadow.predictor import Predictor
from tuner.stats import short


@dataclass(frozen=True, slots=True)
class GateOptions:
    """For which engine, traffic and loads a gate is searched for, and what is written.

    With no `format` a table for people goes to standard output.
    """

    shadow: ShadowOptions
    traffic: TrafficOptions
    limits: LimitOptions
    loads: tuple[float, ...]
    slos: tuple[Slo, ...]
    format: GateFormat | None
    output: Path | None
    as_json: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        chosen, output = params["gate_format"], path_of(params["output"])
        if output is not None and chosen is None:
            raise UsageError(
                "-o says where a gate is written and needs --format",
                f"--format, one of {', '.join(GateFormat)}",
            )
        if params["as_json"] and chosen is not None and output is None:
            raise UsageError(
                "--json and --format both go to standard output",
                f"leave one of them out, or write the gate to a file: -o gate.{chosen}",
            )
        slos = tuple(params["slo"])
        if not any(slo.is_per_request for slo in slos):
            raise UsageError(
                "a gate is judged by requests within their SLOs: --slo is missing",
                "--slo ttft_p95=500ms, or a bound on tpot or e2e",
            )
        return cls(
            shadow=ShadowOptions.parse(params),
            traffic=TrafficOptions.parse(params),
            limits=LimitOptions.parse(params),
            loads=params["loads"],
            slos=slos,
            format=GateFormat(chosen) if chosen else None,
            output=output,
            as_json=params["as_json"],
        )


def run_gate(options: GateOptions) -> int:
    """Search for a gate, and print the table or write it. Raises: TunerError."""
    check_output(options.output)
    answer = _found(options)
    if options.format is None:
        show_result(answer.as_json(), _table(answer), as_json=options.as_json)
        return 0
    text = WRITERS[options.format](answer)
    if options.output is not None:
        write_atomic(options.output, text)
        say(f"gate written to {options.output}")
        if not answer.pays:
            say(NO_GATE)
    if options.as_json:
        show_result(answer.as_json(), (), as_json=True)
    elif options.output is None:
        sys.stdout.write(text)
    return 0


def _found(options: GateOptions) -> GateAnswer:
    source = options.shadow.load()
    facts = source.facts(engine_of_profile(source.profile).values)
    limits = options.limits.over(facts.current_limits)
    traffic = options.traffic.read(limits.max_num_seqs)
    announce(traffic)
    trace = options.traffic.fitted(traffic.trace, facts.max_model_len)
    seed, is_forced = options.traffic.seed, options.shadow.is_forced
    predictor = Predictor(source.profile, seed=seed, is_forced=is_forced)
    if remark := predictor.info(limits).remark:
        say(remark)
    plan = options.traffic.plan(trace)
    window = asked_window(options.traffic.window, trace, plan)
    aim = Aim(Objective.GOODPUT, options.slos, plan, window)
    say_missed(trace, options.loads)
    return find_gate(predictor, limits, Workload.of_whole(trace, aim), options.loads, say)


def _table(answer: GateAnswer) -> Iterator[str]:
    """Yield the table for people: the gate, what it gains, who suffers."""
    gate = answer.gate
    yield f"{evidence(answer)[0]}; predicted, {answer.error.words()}"
    yield from answer.error.lines()
    yield from (
        f"  {gate.max_in_flight} requests in the engine at most, running or waiting there",
        f"  {gate.max_queued} more wait before it"
        + (f", {gate.queue_timeout_s:g} s at most" if gate.queue_timeout_s else ""),
        f"  answers end after {gate.max_output_tokens} tokens"
        if gate.max_output_tokens
        else "  answers are not cut off",
    )
    slos = ", ".join(map(str, answer.slos))
    yield f"requests within {slos}, per second in which requests came:"
    yield (
        f"{'load':>6} {'offered':>9} {'no gate':>9} {'gate':>9} {'gained':>8}"
        f"  {'on other traffic':>17}  P(better)  turned away  cut off  replicas"
    )
    yield from map(_load_line, answer.loads)
    yield f"who suffers at {answer.shown_load:g}x: shares of the requests with such lengths"
    yield f"{'':32}{'no gate':>9}{'gate':>9}  turned away  cut off"
    for group in answer.affected:
        lengths = f"{group.first_tokens:,} … {group.last_tokens:,} tokens"
        yield (
            f"  {group.what} of {lengths:<20}{group.good_before:>9.0%}{group.good:>9.0%}"
            f"{group.turned_away:>13.0%}{group.truncated:>9.0%}"
        )
    if not answer.pays:
        yield NO_GATE


def _load_line(at: GatedLoad) -> str:
    gated, elsewhere = at.gated, at.elsewhere
    interval = f"{elsewhere.low:+.3g} … {elsewhere.high:+.3g}"
    offered = max(gated.offered, 1)
    return (
        f"{at.load:>5g}x {short(at.before.offered_per_s or 0.0):>8}/s"
        f"{short(goodput_per_s(at.before)):>8}/s {short(goodput_per_s(gated)):>7}/s"
        f" {at.gained_per_s:>+8.3g}  {interval:>17}  {at.odds:>9.2f}"
        f"{gated.turned_away / offered:>13.1%}{gated.truncated / offered:>9.1%}"
        f"{at.replicas or '-':>10}"
    )
