"""`tune trace`: look at recorded traffic, reshape it, and get it from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import cloup

from tuner.cli.options import (
    BAD_INPUT,
    CONTEXT,
    LOAD_MEANS,
    ROUTER,
    command,
    count_option,
    ending,
    file_option,
    prometheus_options,
    reading_options,
)
from tuner.cli.values import FILE, LOAD, WINDOW

if TYPE_CHECKING:
    from tuner.traffic.windows import WindowChoice

_FILES = click.argument("files", type=FILE, nargs=-1, required=True, metavar="FILE...")
_OUTPUT = file_option(
    "-o",
    "--output",
    help="Where the JSON Lines go, packed if it ends in .gz or .zst; default: stdout.",
)


@cloup.group(
    "trace",
    context_settings=CONTEXT,
    epilog=ending("tune trace inspect prod.jsonl", exits=BAD_INPUT),
)
def trace() -> None:
    """Look at recorded traffic, reshape it, or get it from elsewhere.

    A FILE may be packed with gzip or zstd, - is standard input, and a folder stands for the
    trace files in it.
    """


@command("inspect", "tune trace inspect prod.jsonl", exits=BAD_INPUT)
@_FILES
@cloup.option_group(
    "Main options",
    click.option("--together", is_flag=True, help="Describe all files as one trace."),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print one JSON object, or a list for several files.",
    ),
)
@reading_options
def inspect(**params: Any) -> int:
    """Describe the load of a trace, and where the recording would mislead."""
    from tuner.cli.inputs import reading_of
    from tuner.cli.traces import run_inspect

    return run_inspect(
        params["files"],
        reading_of(params),
        is_together=params["together"],
        as_json=params["as_json"],
    )


@command("convert", "tune trace convert azure.csv.gz -o prod.jsonl", exits=BAD_INPUT)
@_FILES
@cloup.option_group("Main options", _OUTPUT)
@reading_options
def convert(**params: Any) -> int:
    """Write a trace of any format as native JSON Lines."""
    from tuner.cli.traces import run_reshape

    return run_reshape(params)


@command("merge", "tune trace merge day1.jsonl day2.jsonl -o both.jsonl", exits=BAD_INPUT)
@_FILES
@cloup.option_group("Main options", _OUTPUT)
@reading_options
def merge(**params: Any) -> int:
    """Write several recordings as one.

    Those on one clock, or dated, keep their distance in time; others start together. Hash ids
    that do not say where they hold are the same blocks in the files of a named folder alone.
    """
    from tuner.cli.traces import run_reshape

    return run_reshape(params)


@command(
    "slice", "tune trace slice prod.jsonl --window peak:300s -o peak.jsonl", exits=BAD_INPUT
)
@_FILES
@cloup.option_group(
    "Main options",
    click.option(
        "--window", type=WINDOW, metavar="SPAN", help="5m:10m, peak:300s, typical:300s or all."
    ),
    click.option("--rows", metavar="A:B", help="Requests A to B - 1, counted from 0."),
    _OUTPUT,
)
@reading_options
def slice_(window: WindowChoice | None, rows: str | None, **params: Any) -> int:
    """Write a part of a trace: a span of time, its busiest stretch, or some rows."""
    from tuner.cli.traces import part_of, run_reshape

    return run_reshape(params, lambda read: part_of(read, window, rows))


@command("scale", "tune trace scale prod.jsonl --load 1.5 -o busier.jsonl", exits=BAD_INPUT)
@_FILES
@cloup.option_group(
    "Main options",
    click.option("--load", type=LOAD, required=True, metavar="X", help=f"{LOAD_MEANS}."),
    _OUTPUT,
)
@reading_options
def scale(load: float, **params: Any) -> int:
    """Write a trace with a multiple of its arrivals, over the same time.

    Sessions are copied or left out whole.
    """
    from tuner.cli.traces import run_reshape
    from tuner.traffic.resample import at_load

    return run_reshape(params, lambda read: at_load(read, load))


@command(
    "thin",
    "tune trace thin fleet.jsonl --replicas 8 --router prefix -o replica.jsonl",
    exits=BAD_INPUT,
)
@_FILES
@cloup.option_group(
    "Main options",
    count_option("--replicas", required=True, help="Size of the fleet."),
    ROUTER,
    count_option("--replica", least=0, default=0, metavar="K", help="Whose share, from 0."),
    _OUTPUT,
)
@reading_options
def thin(replicas: int, router: str, replica: int, **params: Any) -> int:
    """Write the share of a fleet's traffic that reaches one of its replicas."""
    from tuner.cli.traces import run_reshape, share_of
    from tuner.traffic.reshape import Router

    return run_reshape(params, lambda read: share_of(read, replicas, Router(router), replica))


@command(
    "from-prometheus",
    "tune trace from-prometheus --url http://prometheus:9090 --since 24h -o prod.jsonl",
    exits=BAD_INPUT,
)
@cloup.option_group(
    "Main options",
    click.option(
        "--url", metavar="URL", required=True, help="Address of the Prometheus server."
    ),
    click.option(
        "--model", metavar="NAME", help="Which model, where the server knows several."
    ),
    click.option("--engine", metavar="N", help="Which engine, where the server knows several."),
    click.option(
        "--concurrency", is_flag=True, help="Take requests in flight instead of arrivals."
    ),
    count_option("--seed", least=0, default=0, help="Seed of the sample."),
    _OUTPUT,
)
@prometheus_options("24h")
def from_prometheus(**params: Any) -> int:
    """Sample a trace from the metrics of a vLLM server that Prometheus has kept.

    Arrival rates and token histograms are recorded, single requests are not: they are drawn
    at random, and the trace says so. A bearer token is read from PROMETHEUS_TOKEN or
    --token-file.
    """
    from tuner.cli.prometheus import PrometheusOptions
    from tuner.cli.traces import write_described

    server = PrometheusOptions.parse(params, params["url"], params["model"])
    sampled = server.sampled(
        params["seed"], is_closed=params["concurrency"], engine=params["engine"]
    )
    return write_described(sampled, params["output"])


@command(
    "from-concurrency",
    "tune trace from-concurrency in_flight.csv --lengths prod.jsonl -o closed.jsonl",
    exits=BAD_INPUT,
)
@click.argument("file", type=FILE, metavar="FILE")
@cloup.option_group(
    "Main options",
    file_option(
        "--lengths",
        metavar="TRACE",
        required=True,
        help="Trace whose lengths the requests have.",
    ),
    _OUTPUT,
)
@reading_options
def from_concurrency(**params: Any) -> int:
    """Turn a recording of requests in flight (CSV) into a closed-loop trace."""
    from tuner.cli.inputs import reading_of
    from tuner.cli.traces import run_from_concurrency

    return run_from_concurrency(
        params["file"], params["lengths"], reading_of(params), params["output"]
    )


trace.section("Look", inspect)
trace.section("Reshape", convert, merge, slice_, scale, thin)
trace.section("Get from elsewhere", from_prometheus, from_concurrency)
