"""`tune check`: whether traffic has shifted, and whether a re-tune would pay."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import DURATION, LADDER, SLO, shadow_options, traffic_options

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 96}
_EPILOG = (
    "Exit codes: 0 unchanged, the present configuration is still best, or too little data; "
    "10 a re-tune pays; 2 bad input; 4 the shadow failed."
)


@click.command("check", context_settings=_CONTEXT, epilog=_EPILOG)
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
@click.option(
    "--since",
    type=DURATION,
    default="6h",
    show_default=True,
    metavar="TIME",
    help="How far back, with --prometheus.",
)
@click.option(
    "--step",
    type=DURATION,
    default="30s",
    show_default=True,
    metavar="TIME",
    help="Resolution, with --prometheus.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="Sent to Prometheus with every request; repeatable.",
)
@click.option("--no-verify", is_flag=True, help="Do not check Prometheus's certificate.")
@click.option(
    "--config",
    metavar="FILE",
    help="Configuration that is served now (YAML); default: what the run recommends.",
)
@traffic_options
@shadow_options
@click.option(
    "--objective",
    type=click.Choice(["balanced", "throughput", "latency", "goodput"]),
    help="What is best; default: the run's, else balanced.",
)
@click.option(
    "--slo",
    type=SLO,
    multiple=True,
    metavar="SLO",
    help="As in `tune`; default: the run's. Repeatable.",
)
@click.option(
    "--max-num-seqs",
    type=LADDER,
    metavar="LIST",
    help="Caps to try, in requests  [default: 1,2,4,8,16,32]",
)
@click.option(
    "--budget",
    type=DURATION,
    default="2m",
    show_default=True,
    metavar="TIME",
    help="Real time for the replays; of longer traffic parts are replayed.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Replays beside each other.")
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
