"""`tune watch`: keep a configuration tuned while traffic moves."""

from __future__ import annotations

from typing import Any

import click
import cloup

from tuner.cli.options import (
    FORCE_PROFILE,
    TOO_LONG,
    command,
    count_option,
    file_option,
    format_option,
    given_in,
    prometheus_options,
    retune_options,
    time_option,
)
from tuner.cli.values import LOAD, SHARE
from tuner.emit.names import Format


@command(
    "watch",
    "tune watch --prometheus http://prometheus:9090 --profile runs/2026-11-20T14-03-00 \\\n"
    "    --emit best.yaml --every 15m --hook kubectl --hook apply --hook -f --hook best.yaml",
    exits="0 stopped, or with --once a round that ended well, with a change or without; "
    "2 bad input, no data, or a hook that failed; 4 the shadow failed",
    interrupted="130 interrupted before the first round, or with --once",
)
@cloup.option_group(
    "Main options",
    click.option(
        "--prometheus",
        metavar="URL",
        help="The server that scrapes vLLM, for the current traffic.",
    ),
    file_option(
        "--profile",
        metavar="RUN_OR_PROFILE",
        help="What the configuration was tuned with: a run directory, or its profile.yaml with "
        "traffic.json beside it.",
    ),
    file_option(
        "--emit", "output", help="The file that is served from; rewritten when a re-tune pays."
    ),
    click.option(
        "--hook",
        multiple=True,
        metavar="WORD",
        help="A word of the command that rolls the file out; repeated for each word. No shell; "
        "TUNE_FILE, TUNE_EVENT (change or rollback), TUNE_WHY and both limits are in its "
        "environment.",
    ),
    time_option("--every", default="15m", help="From one check to the next."),
)
@cloup.option_group(
    "Rounds",
    click.option("--once", is_flag=True, help="One round, as for cron; the state is kept."),
    file_option(
        "--state",
        metavar="DIR",
        help="What is kept from round to round; only one watch at a time may use it; default: "
        "FILE with .watch appended.",
    ),
    click.option(
        "--listen",
        metavar="HOST:PORT",
        help="Show /healthz and /metrics there; default: nowhere.",
    ),
)
@cloup.option_group(
    "When to change",
    click.option(
        "--min-gain",
        type=SHARE,
        default="5%",
        metavar="SHARE",
        help="Smaller gains change nothing.",
    ),
    time_option("--min-interval", default="6h", help="Least time between two changes."),
    count_option(
        "--confirmations",
        default=2,
        help="Verdicts in favour before a change. Each after the first is on later traffic "
        "alone, which begins a sixth of --since after the one before.",
    ),
)
@cloup.option_group(
    "How far to change",
    click.option(
        "--max-change",
        type=LOAD,
        default="4x",
        metavar="X",
        help="Largest step of one change, up or down, for each of both limits.",
    ),
    count_option(
        "--min-max-num-seqs",
        help="Lowest max_num_seqs to write; default: a sixteenth of what was tuned.",
    ),
)
@cloup.option_group(
    "Rollout and rollback",
    format_option(
        Format.VLLM_EXACT,
        help="What is written; a manifest that exists is edited in place, a file of vLLM's own "
        "or of its arguments is written anew.",
    ),
    time_option(
        "--hook-timeout",
        default="2m",
        help="Kill the hook after this time; it runs again in the next round.",
    ),
    time_option(
        "--guard",
        default="30m",
        help="How long a change is compared with what was predicted before it is final.",
    ),
    click.option("--no-guard", is_flag=True, help="Keep every change."),
)
@prometheus_options("6h")
@cloup.option_group(
    "Baseline",
    click.option(
        "--model",
        "--only-model",
        "only_model",
        metavar="NAME",
        help="Which model, where Prometheus knows several.",
    ),
    file_option(
        "--baseline-trace",
        multiple=True,
        help="The traffic that was tuned for, where traffic.json is missing; repeatable.",
    ),
    file_option(
        "--config",
        help="Configuration that is served now (YAML), as long as the file of --emit does not "
        "exist; default: what the run recommends, or what a profile was made with.",
    ),
    FORCE_PROFILE,
)
@retune_options
@cloup.option_group(
    "Replay",
    TOO_LONG,
    count_option(
        "--seed", least=0, default=0, help="Seed of everything that is drawn at random."
    ),
)
@click.pass_context
def watch(ctx: click.Context, /, **params: Any) -> int:
    """Keep a configuration tuned: check traffic, re-tune, roll the file out.

    A new file is written only when a re-tune pays enough, also by later traffic alone, not too
    soon after the last, and never over what somebody else wrote meanwhile; then it is on
    probation, and the old one comes back if it does worse. No change goes
    further than --max-change, or below --min-max-num-seqs. Re-tunes run in
    the shadow: no engine is started, and the serving process is never contacted.
    """
    from tuner.cli.watch import WatchOptions, run_watch

    return run_watch(WatchOptions.parse(params, given_in(ctx)))
