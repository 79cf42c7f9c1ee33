"""`tune check`: whether traffic has shifted, and whether a re-tune would pay."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import CONTEXT, retune_options, shadow_options, traffic_options
from tuner.cli.prometheus_options import prometheus_options

_CHECK_EPILOG = (
    "Exit codes: 0 unchanged, the present configuration is still best, or too little data; "
    "10 a re-tune pays; 2 bad input; 4 the shadow failed."
)


@click.command("check", context_settings=CONTEXT, epilog=_CHECK_EPILOG)
@click.option(
    "--baseline",
    metavar="RUN_OR_PROFILE",
    help="What the present configuration was tuned for: a run directory, live or shadow, or a "
    "profile.yaml.",
)
@click.option(
    "--baseline-trace",
    multiple=True,
    metavar="FILE",
    help="The traffic of that time; default: what the run keeps of it. Repeatable.",
)
@click.option(
    "--prometheus",
    metavar="URL",
    help="Sample the present traffic from this server's metrics in place of --trace.",
)
@prometheus_options("6h")
@click.option(
    "--config",
    metavar="FILE",
    help="Configuration that is served now (YAML); default: what the run recommends.",
)
@traffic_options
@shadow_options
@retune_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(**options: Any) -> int:
    """Say whether traffic has shifted, and whether a re-tune would pay.

    \b
        tune check --baseline runs/2026-11-20T14-03-00 --trace today.jsonl
        tune check --baseline runs/… --prometheus http://prometheus:9090 --since 6h

    Compares rate, bursts, lengths, requests in flight and prefix reuse with what the
    configuration was tuned for. If something shifted that can be felt, the run's profile
    replays the new traffic; no engine is started, and nothing is changed.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.check_job import run_check

    return run_check(options)
