"""Every trial in a table that sorts by any column."""

from __future__ import annotations

from tuner.report.parts import Cell, Section, Table, number
from tuner.report.points import value_of
from tuner.report.run_files import RunFiles
from tuner.report.words import counted, metric_name, percent, plain, seconds
from tuner.run.result import RunResult
from tuner.search.trials import Trial, read_metric


def trials(run: RunFiles) -> Section:
    """Return the table of all trials."""
    result = run.result
    measured = sum(t.is_live for t in result.trials)
    predicted = len(result.trials) - measured
    sentences = (
        f"{counted(measured, 'trial')} measured, {predicted:,} predicted. A column's button "
        "sorts by it, a second press turns the order round.",
    )
    heads = (
        *("trial", "engine", "phase", "round", "max_num_seqs", "max_num_batched_tokens"),
        *("requests/s", "output tokens/s"),
        *(metric_name(metric) for metric in _latencies(result)),
        *("gpu_cache_usage_perc", "preemptions", "running, most", "waiting, mean"),
        *("state", "why"),
    )
    rows = tuple(_row(result, trial) for trial in result.trials)
    table = Table("trials-table", "All trials", heads, rows, is_sortable=True, kind="wide")
    return Section("trials", "Every trial", sentences, tables=(table,))


def _latencies(result: RunResult) -> tuple[str, ...]:
    tail = result.tail
    names = ("ttft_p50", f"ttft_{tail}", "tpot_p50", f"tpot_{tail}", "e2e_p50", f"e2e_{tail}")
    return (*dict.fromkeys(names), "decode_step_p50")


def _row(result: RunResult, trial: Trial) -> tuple[Cell, ...]:
    measured = trial.measurement or {}
    rates = [read_metric(measured, name) for name in ("requests_per_s", "output_tokens_per_s")]
    latencies = [read_metric(measured, name) for name in _latencies(result)]
    held = [value_of(measured, name) for name in ("running", "queue_depth")]
    why = trial.cause or trial.cut_reason
    return (
        number(trial.number, str),
        Cell(trial.engine, trial.engine),
        Cell(trial.phase, trial.phase),
        number(trial.race_round or None, str),
        number(trial.max_num_seqs, str),
        number(trial.max_num_batched_tokens, "{:,}".format),
        *(number(rate, plain) for rate in rates),
        *(number(latency, seconds) for latency in latencies),
        number(value_of(measured, "gpu_cache_usage_perc"), percent),
        number(measured.get("preemptions"), "{:,}".format),
        *(number(level, plain) for level in held),
        Cell(trial.tier[2:], trial.tier),
        Cell(why, why or None),
    )
