"""`tune compare`: the answer put to the test."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import (
    DURATION,
    engine_options,
    traffic_options,
)

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 96}


@click.command("compare", context_settings=_CONTEXT)
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
