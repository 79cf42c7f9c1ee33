"""`tune report`, `tune verify` and `tune compare`: the answer shown and put to the test."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.option_types import DURATION, SLO
from tuner.cli.options import (
    CONTEXT,
    engine_options,
    shadow_options,
    traffic_options,
)


@click.command("report", context_settings=CONTEXT)
@click.argument("run_dir", metavar="RUN")
@click.option(
    "-o", "--output", metavar="FILE", help="Where the page goes; default: into the run."
)
def report(**options: Any) -> int:
    """Write a run as one page that needs nothing else.

    \b
        tune report runs/2026-11-20T14-03-00 -o report.html

    Every run writes its own when it ends; a run that still goes on can be looked at too.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.report_command import run_report

    return run_report(options)


@click.command("verify", context_settings=CONTEXT)
@traffic_options
@engine_options
@click.option("--url", metavar="URL", help="A server that runs; default: start one.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port to start it on; default: free."
)
@click.option(
    "--predict",
    type=click.Choice(["live", "shadow", "none"]),
    default="live",
    show_default=True,
    help="What the server is compared with: a replay inside an engine's process, the shadow "
    "of --profile, or nothing.",
)
@shadow_options
@click.option("--slo", type=SLO, multiple=True, metavar="SLO", help="As in `tune`; repeatable.")
@click.option(
    "--max-send-lag",
    type=DURATION,
    default="50ms",
    show_default=True,
    metavar="TIME",
    help="How far sending may fall behind at its p99 before the run is void.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(**options: Any) -> int:
    """Try a configuration on the real API server, over HTTP and in real time.

    \b
        tune verify --config best.yaml --trace prod.jsonl --window peak:60s

    Starts `vllm serve --config`, replays the trace with streaming, and prints what was measured
    beside what was predicted. The server is stopped again. Exit code 3 if an --slo breaks, for
    which a request that fails is infinitely late; 4 if more than 1 % of them fail.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.verify_command import run_verify

    return run_verify(options)


@click.command("compare", context_settings=CONTEXT)
@traffic_options
@engine_options
@click.option("--tuned", metavar="FILE", help="YAML with the tuned limits; default: --config.")
@click.option("--max-num-seqs", type=click.IntRange(1), metavar="N", help="The tuned cap.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), metavar="N", help="The tuned budget."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="N",
    help="Size of the static batches.",
)
@click.option(
    "--batch-wait",
    type=DURATION,
    default="100ms",
    show_default=True,
    metavar="TIME",
    help="How long the first request of a static batch waits for others.",
)
@click.option("--uniform", is_flag=True, help="Repeat with every length replaced by the mean.")
@click.option("--run", metavar="DIR", help="Keep the result in this run's directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(**options: Any) -> int:
    """Measure the strategies of the field side by side on your own trace.

    \b
        tune compare --trace prod.jsonl --config current.yaml --tuned best.yaml

    One request at a time; static batches that wait for their slowest answer; continuous
    batching with vLLM's defaults; and with the tuned limits. All on one live engine.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.compare_command import run_compare

    return run_compare(options)
