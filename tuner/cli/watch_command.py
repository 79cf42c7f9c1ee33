"""`tune watch`: keep a configuration tuned while traffic moves."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import CONTEXT, DURATION, SHARE, prometheus_options, retune_options
from tuner.emit.names import Format

_EPILOG = (
    "Exit codes: 0 stopped, or with --once a round that ended well, with a change or without; "
    "2 bad input, no data, or a hook that failed; 4 the shadow failed."
)


@click.command("watch", context_settings=CONTEXT, epilog=_EPILOG)
@click.option(
    "--prometheus",
    metavar="URL",
    help="The server that scrapes vLLM; its past is the present traffic.",
)
@click.option(
    "--profile",
    metavar="RUN_OR_PROFILE",
    help="What the configuration was tuned with: a run directory, or its profile.yaml with "
    "traffic.json beside it.",
)
@click.option(
    "--emit",
    "output",
    metavar="FILE",
    help="The file that is served from; written anew when a re-tune pays.",
)
@click.option(
    "--every",
    type=DURATION,
    default="15m",
    show_default=True,
    metavar="TIME",
    help="From one check to the next.",
)
@click.option("--once", is_flag=True, help="One round, as for cron; the state carries on.")
@click.option(
    "--state",
    metavar="DIR",
    help="What is remembered from round to round; one watch at a time owns it; default: FILE "
    "with .watch behind it.",
)
@click.option(
    "--format",
    "emit_format",
    type=click.Choice([str(name) for name in Format if name is not Format.VLLM_EXACT]),
    default=str(Format.VLLM),
    show_default=True,
    help="What is written; a YAML file that exists is edited in place.",
)
@click.option(
    "--min-gain",
    type=SHARE,
    default="5%",
    show_default=True,
    metavar="SHARE",
    help="Smaller gains change nothing.",
)
@click.option(
    "--min-interval",
    type=DURATION,
    default="6h",
    show_default=True,
    metavar="TIME",
    help="Least time between two changes.",
)
@click.option(
    "--confirmations",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Verdicts that it takes to act. Each after the first is on later traffic alone, which "
    "begins a sixth of --since after the one before.",
)
@click.option(
    "--hook",
    multiple=True,
    metavar="WORD",
    help="A word of the command that hands the file over; repeated for each word. No shell; "
    "TUNE_FILE, TUNE_EVENT (change or rollback), TUNE_WHY and both limits are in its "
    "environment.",
)
@click.option(
    "--hook-timeout",
    type=DURATION,
    default="2m",
    show_default=True,
    metavar="TIME",
    help="After it the hook is killed; it runs again in the next round.",
)
@click.option(
    "--guard",
    type=DURATION,
    default="30m",
    show_default=True,
    metavar="TIME",
    help="How long a change is compared with what was foretold before it stands.",
)
@click.option("--no-guard", is_flag=True, help="Let every change stand.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Show /healthz and /metrics there; default: nowhere.",
)
@click.option(
    "--model",
    "--only-model",
    "only_model",
    metavar="NAME",
    help="Which model, where Prometheus knows several.",
)
@prometheus_options("6h")
@click.option(
    "--baseline-trace",
    multiple=True,
    metavar="FILE",
    help="The traffic that was tuned for, where traffic.json is missing; repeatable.",
)
@click.option(
    "--config",
    metavar="FILE",
    help="Configuration that is served now (YAML), while the file of --emit is not there; "
    "default: what the run recommends.",
)
@click.option("--force-profile", is_flag=True, help="Use a profile that was made elsewhere.")
@retune_options
@click.option(
    "--too-long",
    type=click.Choice(["refuse", "clip", "drop"]),
    default="refuse",
    show_default=True,
    help="What becomes of requests above max_model_len.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of what is drawn at random.",
)
def watch(**options: Any) -> int:
    """Keep a configuration tuned: check traffic, re-tune in the shadow, hand the file over.

    \b
        tune watch --prometheus http://prometheus:9090 --profile runs/2026-11-20T14-03-00 \\
            --emit best.yaml --every 15m --hook kubectl --hook apply --hook -f --hook best.yaml

    A new file is written only when a re-tune pays enough, also by later traffic alone, not too
    soon after the last, and never over what somebody else wrote meanwhile; then it is on
    probation, and the old one comes back if it does worse. No engine is started, and the
    serving process is never talked to.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.watch import run_watch

    return run_watch(options)
