"""`tune trace`: look at recorded traffic, reshape it, and get it from elsewhere."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import CONTEXT, LOAD, WINDOW, prometheus_options, reading_options

_FILES = click.argument("files", nargs=-1, required=True, metavar="FILE...")
_OUTPUT = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where the JSON Lines go, packed if it ends in .gz or .zst; default: stdout.",
)


@click.group("trace", context_settings=CONTEXT)
def trace() -> None:
    """Look at recorded traffic, reshape it, or get it from elsewhere.

    A FILE may be packed with gzip or zstd, - is standard input, and a folder stands for the
    trace files in it.
    """


@trace.command("inspect", context_settings=CONTEXT)
@_FILES
@reading_options
@click.option("--together", is_flag=True, help="Describe all files as one trace.")
@click.option("--json", "as_json", is_flag=True, help="One object, or a list for several.")
def inspect(**options: Any) -> int:
    """Say what a trace asks of a server, and where the recording would mislead.

    \b
        tune trace inspect prod.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_inspect

    return run_inspect(options)


@trace.command("convert", context_settings=CONTEXT)
@_FILES
@reading_options
@_OUTPUT
def convert(**options: Any) -> int:
    """Write a trace of any format as native JSON Lines.

    \b
        tune trace convert azure.csv.gz -o prod.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_reshape

    return run_reshape(options, lambda read: read)


@trace.command("merge", context_settings=CONTEXT)
@_FILES
@reading_options
@_OUTPUT
def merge(**options: Any) -> int:
    """Write several recordings as one; their own clocks say when each begins, if they can.

    \b
        tune trace merge day1.jsonl day2.jsonl -o both.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_reshape

    return run_reshape(options, lambda read: read)


@trace.command("slice", context_settings=CONTEXT)
@_FILES
@click.option(
    "--window",
    type=WINDOW,
    metavar="SPAN",
    help="5m:10m, peak:300s, typical:300s or all.",
)
@click.option("--rows", metavar="A:B", help="Requests A to B - 1, counted from 0.")
@reading_options
@_OUTPUT
def slice_(**options: Any) -> int:
    """Write a part of a trace: a span of time, its busiest stretch, or some rows.

    \b
        tune trace slice prod.jsonl --window peak:300s -o peak.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import part_of, run_reshape

    return run_reshape(options, lambda read: part_of(read, options))


@trace.command("scale", context_settings=CONTEXT)
@_FILES
@click.option(
    "--load",
    type=LOAD,
    required=True,
    metavar="X",
    help="Multiple of the recorded arrivals, over the same time.",
)
@reading_options
@_OUTPUT
def scale(**options: Any) -> int:
    """Write a trace with a multiple of its arrivals over the same time, whole sessions each.

    \b
        tune trace scale prod.jsonl --load 1.5 -o busier.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_reshape
    from tuner.traffic.reshape import at_load

    return run_reshape(options, lambda read: at_load(read, options["load"]))


@trace.command("thin", context_settings=CONTEXT)
@_FILES
@click.option(
    "--replicas", type=click.IntRange(1), required=True, metavar="N", help="Size of the fleet."
)
@click.option(
    "--router",
    type=click.Choice(["round-robin", "least-loaded", "prefix"]),
    default="least-loaded",
    show_default=True,
    help="How the fleet deals out requests.",
)
@click.option(
    "--replica",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="K",
    help="Whose share, from 0.",
)
@reading_options
@_OUTPUT
def thin(**options: Any) -> int:
    """Write the share of a fleet's traffic that reaches one of its replicas.

    \b
        tune trace thin fleet.jsonl --replicas 8 --router prefix -o replica.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_reshape, share_of

    return run_reshape(options, lambda read: share_of(read, options))


@trace.command("from-prometheus", context_settings=CONTEXT)
@click.option("--url", metavar="URL", required=True, help="Address of the Prometheus server.")
@click.option("--model", metavar="NAME", help="Which model, where the server knows several.")
@click.option("--engine", metavar="N", help="Which engine, where the server knows several.")
@click.option(
    "--concurrency", is_flag=True, help="Take requests in flight in place of arrivals."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sample.")
@prometheus_options("24h")
@_OUTPUT
def from_prometheus(**options: Any) -> int:
    """Sample a trace from the metrics of a vLLM server that Prometheus has kept.

    \b
        tune trace from-prometheus --url http://prometheus:9090 --since 24h -o prod.jsonl

    Arrival rates and token histograms are recorded, single requests are not: they are drawn
    at random, and the trace says so. A bearer token is read from PROMETHEUS_TOKEN or
    --token-file.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_from_prometheus

    return run_from_prometheus(options)


@trace.command("from-concurrency", context_settings=CONTEXT)
@click.argument("file", metavar="FILE")
@click.option(
    "--lengths", metavar="TRACE", required=True, help="Trace whose lengths the requests have."
)
@reading_options
@_OUTPUT
def from_concurrency(**options: Any) -> int:
    """Turn a recording of requests in flight (CSV) into a closed-loop trace.

    \b
        tune trace from-concurrency in_flight.csv --lengths prod.jsonl -o closed.jsonl
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.traces import run_from_concurrency

    return run_from_concurrency(options)
