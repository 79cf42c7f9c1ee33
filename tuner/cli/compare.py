"""`tune compare`: the strategies of the field side by side on the user's own trace."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.console import ReplayDisplay, say
from tuner.cli.inputs import choose_engine, read_traffic, replay_plan
from tuner.cli.report import write_report
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineSource
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, read_config
from tuner.engine.serve_config import limits as limits_of
from tuner.errors import UsageError
from tuner.files import write_atomic
from tuner.replay.arrivals import StaticBatches
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, Failure
from tuner.report.page import REPORT_FILE
from tuner.report.run_files import read_run
from tuner.run.directory import COMPARE_FILE
from tuner.run.inputs import DEMO_NOTE, EngineChoice, fit_lengths
from tuner.run.strategies import Strategy, StrategyRow, strategies, table, uniform
from tuner.traffic.traces import LoadModel, Trace

RECORDED, UNIFORM = "recorded", "uniform"


def run_compare(options: Mapping[str, Any], source: EngineSource | None = None) -> int:
    """Measure every strategy and print the table. Raises: TunerError."""
    if options["run"]:
        # What could not be kept in the end is refused now.
        read_run(Path(options["run"]))
    engine = choose_engine(options)
    traffic = read_traffic(options, largest_cap=256)
    plan = replay_plan(options, traffic.trace)
    if plan.load_model is LoadModel.CLOSED:
        raise UsageError("strategies are compared on arrivals: leave --load-model closed out")
    for line in traffic.lines:
        say(line)
    if engine.is_demo:
        say(DEMO_NOTE)
    log_path = Path(tempfile.mkdtemp(prefix="tune-compare-")) / "engine.log"
    with EngineProcess(source or LiveSource(), log_path) as host:
        # What vLLM does by itself: the configuration without its limits.
        facts = host.facts(_without_limits(engine))
        tuned = _tuned(options, facts.present_limits)
        batches = StaticBatches(options["batch_size"], options["batch_wait"])
        asked = strategies(facts.present_limits, tuned, batches)
        trace, told = fit_lengths(traffic.trace, facts.max_model_len, options["too_long"])
        if told:
            say(told)
        if options["window"]:
            trace = options["window"].resolve(trace).of(trace)
        ceiling = asked[0].limits
        for strategy in asked:
            ceiling = ceiling.covering(strategy.limits)
        bench = EngineRunner(host, engine.values, ceiling, options["seed"])
        traces = {RECORDED: trace}
        if options["uniform"]:
            traces[UNIFORM] = uniform(trace)
        found = {name: _rows(bench, name, one, asked, plan) for name, one in traces.items()}
    _print(options, found)
    return 0


def _rows(
    bench: EngineRunner, name: str, trace: Trace, asked: Sequence[Strategy], plan: Any
) -> list[StrategyRow]:
    """Measure every strategy on one trace."""
    bench.use(name, trace)
    rows = []
    for strategy in asked:
        say(f"{name} lengths: {strategy.name}, {strategy.limits}")
        with ReplayDisplay() as display:
            outcome = bench.measure(
                [name], strategy.limits, strategy.plan(plan), (), display.progress
            )
        failed = outcome.cause if isinstance(outcome, Failure) else ""
        rows.append(
            StrategyRow(strategy, None if isinstance(outcome, Failure) else outcome, failed)
        )
    return rows


def _without_limits(engine: EngineChoice) -> dict[str, object]:
    return {
        key: value
        for key, value in engine.values.items()
        if key not in (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    }


def _tuned(options: Mapping[str, Any], default: EngineLimits) -> EngineLimits:
    """Return the tuned limits: those of --tuned, else of the configuration.

    Raises: UsageError if neither names any.
    """
    path = options["tuned"] or options["config"]
    seqs, tokens = limits_of(read_config(Path(path)).values) if path else (None, None)
    seqs = options["max_num_seqs"] or seqs
    tokens = options["max_num_batched_tokens"] or tokens
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


def _print(options: Mapping[str, Any], found: Mapping[str, Sequence[StrategyRow]]) -> None:
    content = {name: [row.as_json() for row in rows] for name, rows in found.items()}
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    if options["run"]:
        folder = Path(options["run"])
        write_atomic(folder / COMPARE_FILE, encoded.decode() + "\n", secret=False)
        write_report(folder, folder / REPORT_FILE)
        say(f"kept in {folder / COMPARE_FILE}, and shown in {folder / REPORT_FILE}")
    if options["as_json"]:
        sys.stdout.write(encoded.decode() + "\n")
        return
    for name, rows in found.items():
        lines = [f"{name} lengths, latencies in ms", *table(rows), ""]
        sys.stdout.write("\n".join(lines) + "\n")
