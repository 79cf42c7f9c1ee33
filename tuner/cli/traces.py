"""What the `tune trace` commands do, once their options are read."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click
import numpy as np

from tuner.cli.console import say
from tuner.cli.inputs import read_named
from tuner.cli.options import credentials
from tuner.errors import UsageError
from tuner.traffic.concurrency import SECONDS_PER_OUTPUT_TOKEN
from tuner.traffic.describe import describe
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.reshape import Router, thin
from tuner.traffic.traces import Trace


def run_inspect(options: Mapping[str, Any]) -> int:
    """Describe each file, or all together. Raises: TraceError, UsageError."""
    from tuner.traffic.formats.sources import expand

    files = list(options["files"])
    groups = [files] if options["together"] else [[str(f)] for f in expand(files)]
    if options["as_json"]:
        found = [describe(read_named(group, options)).as_json() for group in groups]
        click.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
        return 0
    for number, group in enumerate(groups):
        if number:
            click.echo()
        _show(read_named(group, options))
    return 0


def _show(trace: Trace) -> None:
    """Print a description; on a terminal with small plots."""
    for line in describe(trace).lines():
        click.echo(line)
    if sys.stdout.isatty():
        from tuner.cli.plots import trace_plots

        for plot in trace_plots(trace, width=shutil.get_terminal_size().columns):
            click.echo()
            click.echo(plot)


def run_reshape(options: Mapping[str, Any], change: Callable[[Trace], Trace]) -> int:
    """Read, change and write a trace. Raises: TraceError, UsageError."""
    read = read_named(list(options["files"]), options)
    return _write(change(read), options)


def _write(trace: Trace, options: Mapping[str, Any]) -> int:
    write_trace(trace, options["output"])
    where = options["output"] or "standard output"
    say(f"{len(trace):,} requests in {trace.duration_s:,.1f} s written to {where}")
    for line in describe(trace).warnings:
        say(f"warning: {line.text}")
    return 0


def part_of(trace: Trace, options: Mapping[str, Any]) -> Trace:
    """Return the part that --window or --rows names. Raises: TraceError, UsageError."""
    window, rows = options["window"], options["rows"]
    if (window is None) == (rows is None):
        raise UsageError("name either --window or --rows", "for example --window peak:300s")
    if window is not None:
        part: Trace = window.resolve(trace).of(trace)
        return part
    match = re.fullmatch(r"(\d*):(\d*)", rows)
    if match is None:
        raise UsageError(f"--rows must look like 0:1000, got {rows}", "rows count from 0")
    first = min(int(match[1] or 0), len(trace))
    last = min(int(match[2] or len(trace)), len(trace))
    if first >= last:
        raise UsageError(f"--rows {rows} holds no request of {len(trace)}", "rows count from 0")
    return trace.slice_rows(np.arange(first, last)).shifted()


def share_of(trace: Trace, options: Mapping[str, Any]) -> Trace:
    """Return one replica's share. Raises: TraceError, UsageError."""
    return thin(
        trace,
        options["replicas"],
        Router(options["router"]),
        options["replica"],
        SECONDS_PER_OUTPUT_TOKEN,
    )


def run_from_prometheus(options: Mapping[str, Any]) -> int:
    """Sample a trace from metrics and write it. Raises: UsageError."""
    from tuner.traffic.prometheus.sampled import trace_from_prometheus

    sampled = trace_from_prometheus(
        options["url"],
        options["since"],
        options["step"],
        model=options["model"],
        engine=options["engine"],
        seed=options["seed"],
        concurrency=options["concurrency"],
        headers=credentials(options),
        verify=not options["no_verify"],
    )
    return _write(sampled, options)


def run_from_concurrency(options: Mapping[str, Any]) -> int:
    """Turn a recording of requests in flight into a closed-loop trace and write it.

    Raises: TraceError, UsageError.
    """
    from tuner.traffic.formats.in_flight import trace_from_concurrency

    lengths = read_named([options["lengths"]], options)
    return _write(trace_from_concurrency(options["file"], lengths, options["seed"]), options)
