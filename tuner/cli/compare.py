"""`tune compare`: the strategies of the field side by side on the user's own trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.console import json_text, say, show_result
from tuner.cli.displays import ReplayDisplay
from tuner.cli.inputs import EngineOptions, LimitOptions, TrafficOptions, announce
from tuner.cli.options import Params, path_of
from tuner.cli.report import write_report
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineSource
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, read_config
from tuner.engine.serve_config import limits as limits_of
from tuner.errors import UsageError
from tuner.files import log_folder, write_atomic
from tuner.replay.arrivals import StaticBatches
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, Failure
from tuner.report.page import REPORT_FILE
from tuner.report.run_files import read_run
from tuner.run.directory import COMPARE_FILE
from tuner.run.inputs import EngineChoice
from tuner.run.strategies import Strategy, StrategyRow, strategies, table, uniform
from tuner.traffic.traces import LoadModel, Trace

RECORDED, UNIFORM = "recorded", "uniform"


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Which strategies are measured on which traffic, and where the result is kept.

    The tuned limits are those of `limits`, else of the file `tuned`, else of the configuration.
    With `is_uniform` every length is replaced by the mean in a second comparison. `run_dir` is
    the run that keeps the result, if any.
    """

    traffic: TrafficOptions
    engine: EngineOptions
    tuned: Path | None
    limits: LimitOptions
    batches: StaticBatches
    is_uniform: bool
    run_dir: Path | None
    as_json: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        return cls(
            traffic=TrafficOptions.parse(params),
            engine=EngineOptions.parse(params),
            tuned=path_of(params["tuned"]),
            limits=LimitOptions.parse(params),
            batches=StaticBatches(params["batch_size"], params["batch_wait"]),
            is_uniform=params["uniform"],
            run_dir=path_of(params["run"]),
            as_json=params["as_json"],
        )


def run_compare(options: CompareOptions, source: EngineSource | None = None) -> int:
    """Measure every strategy and print the table. Raises: TunerError."""
    if options.run_dir is not None:
        # What could not be kept in the end is refused now.
        read_run(options.run_dir)
    engine = options.engine.choose()
    traffic = options.traffic.read()
    plan = options.traffic.plan(traffic.trace)
    if plan.load_model is LoadModel.CLOSED:
        raise UsageError("strategies are compared on arrivals: leave --load-model closed out")
    announce(traffic, is_demo=engine.is_demo)
    with (
        log_folder("tune-compare-") as folder,
        EngineProcess(source or LiveSource(), folder / "engine.log") as host,
    ):
        rows = _compared(host, options, engine, traffic.trace, plan)
    _show(options, rows)
    return 0


def _compared(
    host: EngineProcess,
    options: CompareOptions,
    engine: EngineChoice,
    recorded: Trace,
    plan: ReplayPlan,
) -> dict[str, list[StrategyRow]]:
    """Measure every strategy on one engine, on the lengths as recorded and if asked uniform."""
    # What vLLM does by itself: the configuration without its limits.
    facts = host.facts(_without_limits(engine))
    tuned = _tuned(options, facts.current_limits)
    compared = strategies(facts.current_limits, tuned, options.batches)
    trace = options.traffic.fitted(recorded, facts.max_model_len)
    trace = options.traffic.part_of(trace)
    ceiling = compared[0].limits
    for strategy in compared:
        ceiling = ceiling.covering(strategy.limits)
    runner = EngineRunner(host, engine.values, ceiling, options.traffic.seed)
    traces = {RECORDED: trace}
    if options.is_uniform:
        traces[UNIFORM] = uniform(trace)
    return {name: _rows(runner, name, one, compared, plan) for name, one in traces.items()}


def _rows(
    runner: EngineRunner,
    name: str,
    trace: Trace,
    compared: Sequence[Strategy],
    plan: ReplayPlan,
) -> list[StrategyRow]:
    """Measure every strategy on one trace."""
    runner.use(name, trace)
    rows = []
    for strategy in compared:
        say(f"{name} lengths: {strategy.name}, {strategy.limits}")
        with ReplayDisplay() as display:
            outcome = runner.measure(
                [name], strategy.limits, strategy.plan(plan), (), display.progress
            )
        if isinstance(outcome, Failure):
            rows.append(StrategyRow(strategy, None, outcome.cause))
        else:
            rows.append(StrategyRow(strategy, outcome))
    return rows


def _without_limits(engine: EngineChoice) -> dict[str, object]:
    return {
        key: value
        for key, value in engine.values.items()
        if key not in (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    }


def _tuned(options: CompareOptions, default: EngineLimits) -> EngineLimits:
    """Return the tuned limits: those that are named, else of the files.

    Raises: UsageError if neither names any.
    """
    path = options.tuned or options.engine.config
    seqs, tokens = limits_of(read_config(path).values) if path else (None, None)
    seqs = options.limits.max_num_seqs or seqs
    tokens = options.limits.max_num_batched_tokens or tokens
    if seqs is None and tokens is None:
        raise UsageError(
            "no tuned limits are named to compare with vLLM's defaults",
            "add --tuned best.yaml, or --max-num-seqs N and --max-num-batched-tokens N",
        )
    tuned = replace(
        default, max_num_batched_tokens=max(default.max_num_batched_tokens, seqs or 1)
    )
    tuned = replace(tuned, max_num_seqs=seqs or default.max_num_seqs)
    return replace(tuned, max_num_batched_tokens=tokens or tuned.max_num_batched_tokens)


def _show(options: CompareOptions, rows_of: Mapping[str, Sequence[StrategyRow]]) -> None:
    """Keep the comparison in its run, if it has one, and print it."""
    content = {name: [row.as_json() for row in rows] for name, rows in rows_of.items()}
    if options.run_dir is not None:
        target, page = options.run_dir / COMPARE_FILE, options.run_dir / REPORT_FILE
        write_atomic(target, json_text(content), secret=False)
        write_report(options.run_dir, page)
        say(f"kept in {target}, and shown in {page}")
    lines = []
    for name, rows in rows_of.items():
        lines += [f"{name} lengths, latencies in ms", *table(rows), ""]
    show_result(content, lines, as_json=options.as_json)
