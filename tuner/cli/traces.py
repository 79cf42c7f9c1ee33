"""What the `tune trace` commands do: describe recorded traffic, reshape it, and make more."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace

import click
import numpy as np

from tuner.cli.console import say, showable
from tuner.cli.inputs import reading_of
from tuner.cli.options import Params
from tuner.errors import UsageError
from tuner.report.words import counted
from tuner.run.options import TraceReading
from tuner.traffic.concurrency import SECONDS_PER_OUTPUT_TOKEN
from tuner.traffic.describe import describe
from tuner.traffic.formats.in_flight import trace_from_concurrency
from tuner.traffic.formats.sources import expand, is_private, write_trace
from tuner.traffic.reshape import Router, thin
from tuner.traffic.traces import Trace, counts_text
from tuner.traffic.windows import WindowChoice


def run_inspect(
    files: tuple[str, ...], reading: TraceReading, *, is_together: bool, as_json: bool
) -> int:
    """Describe each file by itself, or all as one trace. Raises: TraceError, UsageError."""
    groups = [files] if is_together else [(str(path),) for path in expand(files)]
    if as_json:
        traces = [describe(reading.read(group)) for group in groups]
        named = [{"source": trace.source, **trace.as_json()} for trace in traces]
        click.echo(json.dumps(traces[0].as_json() if len(named) == 1 else named, indent=2))
        return 0
    for number, group in enumerate(groups):
        if number:
            click.echo()
        _show(reading.read(group))
    return 0


def _show(trace: Trace) -> None:
    """Print a description; on a terminal with small plots."""
    for line in describe(trace).lines():
        click.echo(showable(line))
    if sys.stdout.isatty():
        from tuner.cli.plots import trace_plots

        for plot in trace_plots(trace, width=shutil.get_terminal_size().columns):
            click.echo()
            click.echo(plot)


def run_reshape(params: Params, change: Callable[[Trace], Trace] = lambda read: read) -> int:
    """Read, change and write a trace. Raises: TraceError, UsageError."""
    files = params["files"]
    trace = change(reading_of(params).read(files))
    return write_described(trace, params["output"], secret=is_private(expand(files)))


def write_described(trace: Trace, output: str | None, *, secret: bool = False) -> int:
    """Write the trace, and say where it would mislead.

    `output` is None for standard output. Raises: UsageError.
    """
    write_trace(trace, output, secret=secret)
    where = output or "standard output"
    say(f"{counted(len(trace), 'request')} in {trace.duration_s:,.1f} s written to {where}")
    _say_dropped(trace)
    for line in describe(trace).warnings:
        say(f"warning: {line.text}")
    return 0


def _say_dropped(trace: Trace) -> None:
    """Say how many rows a trace lacks of those that were read, and why."""
    if trace.notes.dropped:
        say(f"dropped from {trace.source}: {counts_text(trace.notes.dropped)}")


def part_of(trace: Trace, window: WindowChoice | None, rows: str | None) -> Trace:
    """Return the part that --window or --rows names. Raises: TraceError, UsageError."""
    if window is not None and rows is None:
        return window.resolve(trace).of(trace)
    if window is not None or rows is None:
        raise UsageError("name either --window or --rows", "for example --window peak:300s")
    match = re.fullmatch(r"(\d*):(\d*)", rows)
    if match is None:
        raise UsageError(f"--rows must look like 0:1000, got {rows}", "rows count from 0")
    first = min(int(match[1] or 0), len(trace))
    last = min(int(match[2] or len(trace)), len(trace))
    if first >= last:
        raise UsageError(f"--rows {rows} holds no request of {len(trace)}", "rows count from 0")
    part = trace.slice_rows(np.arange(first, last)).shifted()
    flow = trace.concurrency
    if flow is None or last == len(trace):
        return part
    start_s, end_s = float(trace.due_s[first]), float(trace.due_s[last])
    return replace(part, concurrency=flow.between(start_s, end_s))


def share_of(trace: Trace, replicas: int, router: Router, replica: int) -> Trace:
    """Return one replica's share. Raises: TraceError, UsageError."""
    return thin(trace, replicas, router, replica, SECONDS_PER_OUTPUT_TOKEN)


def run_from_concurrency(
    recording: str, lengths_of: str, given: TraceReading, output: str | None
) -> int:
    """Turn a recording of requests in flight into a closed-loop trace and write it.

    The requests have the lengths of a trace. Raises: TraceError, UsageError.
    """
    rows = given.rows
    # Of the trace the lengths count and not when they came: the clock is the recording's.
    reading = replace(given, rows=replace(rows, time_unit=None))
    lengths = reading.read([lengths_of])
    of_all = replace(rows, only_model=None)  # a recording of requests in flight names no model
    trace = trace_from_concurrency(recording, lengths, rows.seed, of_all)
    _say_dropped(lengths)
    return write_described(trace, output, secret=is_private([recording, lengths_of]))
