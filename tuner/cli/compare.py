"""`tune compare`: the strategies of the field side by side on the user's own trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Self

from tuner.cli.console import json_text, say, show_result
from tuner.cli.displays import ReplayDisplay
from tuner.cli.inputs import (
    EngineOptions,
    LimitOptions,
    ShadowOptions,
    TrafficOptions,
    announce,
)
from tuner.cli.options import Params, path_of
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineSource
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, read_config
from tuner.engine.serve_config import limits as limits_of
from tuner.errors import EngineError, ShadowError, UsageError
from tuner.files import log_folder, write_atomic
from tuner.replay.arrivals import StaticBatches
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.report.page import write_report
from tuner.report.run_files import read_run
from tuner.run.directory import COMPARE_FILE
from tuner.run.inputs import EngineChoice
from tuner.run.loads.strategies import (
    Strategy,
    StrategyRow,
    in_turns,
    pooled,
    predicted,
    row_of,
    saturated,
    strategies,
    table,
    told_by_saturation,
    uniform,
)
from tuner.search.budget import asked_window, window_text
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import whole

# What is replayed, by the name under which it is kept, and what the table is called.
RECORDED, SATURATED, UNIFORM = "recorded", "saturation", "uniform"
_TITLES = {
    SATURATED: "with all requests there at once",
    UNIFORM: "with every length replaced by the mean",
}
# How much of a card's memory an engine takes, and what vLLM takes where nothing is said.
_GPU_MEMORY, _USUAL_SHARE = "gpu-memory-utilization", 0.9


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Which strategies are measured on which traffic, and where the result is kept.

    The tuned limits are those of `limits`, else of the file `tuned`, else of the configuration.
    With `is_uniform` every length is replaced by the mean in a third comparison. With a shadow
    everything is predicted. `run_dir` is the run that keeps the result, if any.
    """

    traffic: TrafficOptions
    engine: EngineOptions
    shadow: ShadowOptions | None
    tuned: Path | None
    limits: LimitOptions
    batches: tuple[StaticBatches, ...]
    processes: int
    is_uniform: bool
    run_dir: Path | None
    as_json: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        return cls(
            traffic=TrafficOptions.parse(params),
            engine=EngineOptions.parse(params),
            shadow=ShadowOptions.parse(params) if params["profile"] else None,
            tuned=path_of(params["tuned"]),
            limits=LimitOptions.parse(params),
            batches=tuple(
                StaticBatches(size, params["batch_wait"]) for size in params["batch_size"]
            ),
            processes=params["processes"],
            is_uniform=params["uniform"],
            run_dir=path_of(params["run"]),
            as_json=params["as_json"],
        )


def run_compare(options: CompareOptions, source: EngineSource | None = None) -> int:
    """Measure every strategy and print the table. Raises: TunerError."""
    if options.run_dir is not None:
        # What could not be kept in the end is refused now.
        read_run(options.run_dir)
    shadow = None if options.shadow is None else options.shadow.load()
    engine = options.engine.choose(shadow)
    traffic = options.traffic.read()
    plan = options.traffic.plan(traffic.trace)
    if plan.load_model is LoadModel.CLOSED:
        raise UsageError("strategies are compared on arrivals: leave --load-model closed out")
    announce(traffic, is_demo=engine.is_demo and shadow is None)
    if shadow is not None:
        rows = _predicted(options, shadow, engine, traffic.trace, plan)
    else:
        start = source or LiveSource()
        with log_folder("tune-compare-") as folder:
            rows = _measured(options, start, folder, engine, traffic.trace, plan)
    rows[RECORDED] = told_by_saturation(rows[RECORDED], rows[SATURATED])
    window = asked_window(options.traffic.window, traffic.trace, plan) or whole(traffic.trace)
    told = {
        "engine": "live" if shadow is None else "shadow",
        "load": options.traffic.load,
        "window": window_text((window,), traffic.trace),
    }
    _show(options, rows, told)
    return 0


def _title(name: str, load: float) -> str:
    """Return what a kind of traffic is called; as recorded it comes at a load."""
    at = "the recorded load" if load == 1 else f"{load:g} x the recorded load"
    return _TITLES.get(name, f"at {at}")


def _predicted(
    options: CompareOptions,
    source: ProfiledEngine,
    engine: EngineChoice,
    recorded: Trace,
    plan: ReplayPlan,
) -> dict[str, list[StrategyRow]]:
    facts, default = source.facts(engine.values), source.profile.current_limits
    predictor = Predictor(source.profile, is_forced=source.is_forced)
    for line in predictor.error.lines():
        say(line)
    tuned = _tuned(options, default)
    if predictor.doubt:
        raise ShadowError(
            f"strategies cannot be predicted: {predictor.doubt}", "measure them: no --profile"
        )
    traces = _traces(options, recorded, facts.max_model_len, plan)
    whose = "limits as profiled"
    compared = strategies(default, tuned, options.batches, options.processes, whose)
    return {
        name: [predicted(predictor, trace, strategy, plan) for strategy in compared]
        for name, trace in traces.items()
    }


def _traces(
    options: CompareOptions, recorded: Trace, max_model_len: int, plan: ReplayPlan
) -> dict[str, Trace]:
    """Return what is replayed: as recorded, all at once, and if asked with even lengths.

    As recorded a window begins warm; who comes all at once comes to an empty engine.
    """
    whole = options.traffic.fitted(recorded, max_model_len)
    trace = options.traffic.part_of(whole)
    warm = options.traffic.warm_part_of(whole, plan)
    traces = {RECORDED: warm, SATURATED: saturated(trace)}
    if options.is_uniform:
        traces[UNIFORM] = uniform(trace)
    return traces


def _measured(
    options: CompareOptions,
    source: EngineSource,
    folder: Path,
    engine: EngineChoice,
    recorded: Trace,
    plan: ReplayPlan,
) -> dict[str, list[StrategyRow]]:
    """Measure every strategy: those of one engine on one, then those of several on several."""
    patience_s = options.traffic.start_timeout_s
    with EngineProcess(source, folder / "engine.log", patience_s) as host:
        # What vLLM does by itself: the configuration without its limits.
        facts = host.facts(_without_limits(engine))
        tuned = _tuned(options, facts.current_limits)
        compared = strategies(facts.current_limits, tuned, options.batches, options.processes)
        traces = _traces(options, recorded, facts.max_model_len, plan)
        ceiling = compared[0].limits
        for strategy in compared:
            ceiling = ceiling.covering(strategy.limits)
        runner = EngineRunner(host, engine.values, ceiling, options.traffic.seed)
        for name, trace in traces.items():
            runner.use(name, trace)
        found = {
            (name, strategy.name): _alone(runner, name, strategy, plan, options.traffic.load)
            for name in traces
            for strategy in compared
            if strategy.processes == 1
        }
        blocks = 0 if runner.info is None else runner.info.num_blocks
    for strategy in compared:
        if strategy.processes > 1:
            is_cpu = facts.device.startswith("CPU")
            shared = _share(engine.values, strategy.processes, blocks, is_cpu=is_cpu)
            hosts = [
                EngineProcess(source, folder / f"engine-{i}.log", patience_s)
                for i in range(strategy.processes)
            ]
            rows = _side_by_side(hosts, shared, strategy, traces, plan, options.traffic.seed)
            found |= {(name, strategy.name): row for name, row in rows.items()}
    return {name: [found[name, s.name] for s in compared] for name in traces}


def _alone(
    runner: EngineRunner, name: str, strategy: Strategy, plan: ReplayPlan, load: float
) -> StrategyRow:
    """Measure a strategy of one engine on a trace, which comes at a multiple of its load."""
    say(f"{_title(name, load)}: {strategy.name}, {strategy.limits}")
    with ReplayDisplay() as display:
        outcome = runner.measure(
            [name], strategy.limits, strategy.plan(plan), (), display.progress
        )
    return row_of(strategy, outcome)


def _share(
    values: Mapping[str, object], processes: int, blocks: int, *, is_cpu: bool
) -> dict[str, object]:
    """Return the configuration of an engine that has its share of the device."""
    shared = {**values, "num-gpu-blocks-override": max(2, blocks // processes)}
    share = values.get(_GPU_MEMORY, _USUAL_SHARE)
    if not is_cpu and isinstance(share, int | float):
        shared[_GPU_MEMORY] = float(share) / processes
    return shared


def _side_by_side(
    hosts: Sequence[EngineProcess],
    values: Mapping[str, object],
    strategy: Strategy,
    traces: Mapping[str, Trace],
    plan: ReplayPlan,
    seed: int,
) -> dict[str, StrategyRow]:
    """Measure engines that serve at the same time, each its share of the requests.

    Each keeps a clock of its own, which leaves out when it is idle; so they are in each other's
    way as they would be only while none is.
    """
    own = replace(strategy.plan(plan), keep_steps=False)
    rows = {
        name: StrategyRow(strategy, None, "engines side by side are measured at saturation")
        for name in traces
    }
    say(f"{_TITLES[SATURATED]}: {strategy.name}, {strategy.limits}")
    parts = in_turns(traces[SATURATED], len(hosts))

    def serve(i: int) -> ReplayLog:
        hosts[i].start(values, strategy.limits)
        hosts[i].load(SATURATED, parts[i], seed)
        begin.wait()
        return hosts[i].replay(SATURATED, strategy.limits, own)

    begin = Barrier(len(parts))
    with ExitStack() as stack, ThreadPoolExecutor(len(parts)) as pool:
        for host in hosts:
            stack.enter_context(host)
        asked = [pool.submit(_or_let_go, begin, serve, i) for i in range(len(parts))]
        try:
            rows[SATURATED] = StrategyRow(strategy, pooled([one.result() for one in asked]))
        except EngineError as error:
            rows[SATURATED] = StrategyRow(strategy, None, error.message)
    return rows


def _or_let_go(begin: Barrier, serve: Callable[[int], ReplayLog], i: int) -> ReplayLog:
    """Serve, and let nobody wait for one that failed. Raises: EngineError."""
    try:
        return serve(i)
    except BrokenBarrierError as broken:
        raise EngineError("another engine did not start beside it") from broken
    except BaseException:
        begin.abort()
        raise


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
    seqs, tokens = limits_of(read_config(path)) if path else (None, None)
    seqs = options.limits.max_num_seqs or seqs
    tokens = options.limits.max_num_batched_tokens or tokens
    if seqs is None and tokens is None:
        raise UsageError(
            "no tuned limits are named to compare with vLLM's defaults",
            "add --tuned best.yaml, or --max-num-seqs N and --max-num-batched-tokens N",
        )
    cap = seqs or default.max_num_seqs
    return EngineLimits(cap, tokens or max(default.max_num_batched_tokens, cap))


def _show(
    options: CompareOptions,
    rows_of: Mapping[str, Sequence[StrategyRow]],
    told: Mapping[str, object],
) -> None:
    """Keep the comparison in its run, if it has one, and print it.

    `told` is of what it is, and stands in every row.
    """
    content = {
        name: [{**row.as_json(), **told} for row in rows] for name, rows in rows_of.items()
    }
    if options.run_dir is not None:
        target = options.run_dir / COMPARE_FILE
        write_atomic(target, json_text(content), secret=False)
        say(f"kept in {target}, and shown in {write_report(options.run_dir)}")
    lines = []
    for name, rows in rows_of.items():
        title = f"{_title(name, options.traffic.load)}, {told['window']}, latencies in ms"
        lines += [title, *table(rows), ""]
    show_result(content, lines, as_json=options.as_json)
