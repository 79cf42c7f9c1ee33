"""The command `tune`: options in, exit codes out. Owns click."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any

import click

from tuner.cli.calibrate_command import calibrate
from tuner.cli.check_command import check
from tuner.cli.doctor_command import doctor
from tuner.cli.emit_command import emit
from tuner.cli.option_types import DURATION, LADDER, LOADS, SLO
from tuner.cli.options import (
    CONTEXT,
    as_usage_error,
    engine_options,
    shadow_options,
    traffic_options,
)
from tuner.cli.proof_commands import compare, report, verify
from tuner.cli.trace_commands import trace
from tuner.cli.watch_command import watch
from tuner.emit.names import Format
from tuner.errors import TunerError

_TUNE_EPILOG = (
    "Exit codes: 0 done; 2 bad input; 3 nothing meets the SLOs; 4 the engine failed; "
    "10 tune check: a re-tune pays; 130 interrupted."
)


@click.group(invoke_without_command=True, context_settings=CONTEXT, epilog=_TUNE_EPILOG)
@traffic_options
@engine_options
@click.option(
    "--method",
    type=click.Choice(["auto", "live", "shadow"]),
    default="auto",
    show_default=True,
    help="auto: learn a few settings live, rank all in vLLM's own scheduler with predicted "
    "steps, judge the best live (with --profile nothing has to be learnt); live: everything "
    "live; shadow: no engine, needs --profile.",
)
@shadow_options
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Shadow replays beside each other  [default: one per core]",
)
@click.option(
    "--tuning",
    metavar="NAME",
    help="Tuning profile: interactive, batch, or a YAML file with objective, slo and "
    "max-num-seqs.",
)
@click.option(
    "--objective",
    type=click.Choice(["balanced", "throughput", "latency", "goodput", "capacity"]),
    help="balanced: smallest tail latency that sustains the load [default]; throughput: most "
    "requests per second; latency: smallest median; goodput: most requests within the SLOs; "
    "capacity: largest multiple of the load at which the SLOs hold.",
)
@click.option(
    "--slo",
    type=SLO,
    multiple=True,
    metavar="SLO",
    help="A bound that must hold, for example ttft_p99=500ms; repeatable.",
)
@click.option(
    "--max-num-seqs",
    type=LADDER,
    metavar="LIST",
    help="Caps to climb, in requests  [default: 1,2,4,8,16,32]",
)
@click.option(
    "--budget",
    type=DURATION,
    metavar="TIME",
    help="Real time the whole run may take, for example 45m  [default: 30m]",
)
@click.option("-o", "--output", metavar="FILE", help="Where the YAML goes; default: stdout.")
@click.option(
    "--format",
    "emit_format",
    type=click.Choice([str(name) for name in Format if name is not Format.VLLM_RUNTIME]),
    default=str(Format.VLLM),
    show_default=True,
    help="What is written; tune emit writes the others later, or into your file.",
)
@click.option("--run-dir", metavar="DIR", help="Where evidence is kept; default: runs/<time>.")
@click.option("--resume", metavar="DIR", help="Go on with the run kept in this directory.")
@click.option(
    "--storage", metavar="URL", help="Optuna storage; default: SQLite in the run directory."
)
@click.version_option(package_name="max-num-seqs-tuner", prog_name="tune")
@click.pass_context
def tune(ctx: click.Context, /, **options: Any) -> int | None:
    """Find the best max_num_seqs and max_num_batched_tokens for your own traffic.

    \b
        tune --trace prod.jsonl --config current.yaml -o best.yaml

    Replays a recorded trace against vLLM in this machine's own process, sweeps both limits on
    one engine, and writes what `vllm serve --config` takes.
    """  # noqa: D301 - click looks for the character that \b stands for
    if ctx.invoked_subcommand is not None:
        return None
    if not ctx.args and not sys_arguments(ctx):
        click.echo(ctx.get_help())
        return 0
    from tuner.cli.job import read_job
    from tuner.cli.resume import with_stored, with_tuning
    from tuner.cli.run_command import run_job

    arguments, options = with_stored(tune, sys_arguments(ctx), options)
    return run_job(read_job(with_tuning(options), arguments))


def sys_arguments(ctx: click.Context) -> list[str]:
    """Return the arguments as they were typed."""
    arguments: list[str] = ctx.meta.get("tuner.arguments", [])
    return arguments


@tune.command("replay", context_settings=CONTEXT)
@traffic_options
@engine_options
@click.option(
    "--engine",
    "engine_kind",
    type=click.Choice(["live", "shadow"]),
    default="live",
    show_default=True,
    help="live: measure on vLLM; shadow: predict with --profile.",
)
@shadow_options
@click.option(
    "--max-num-seqs", type=click.IntRange(1), metavar="N", help="Cap; default: the present one."
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Token budget per step; default: the present one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(**options: Any) -> int:
    """Measure one configuration and print it.

    \b
        tune replay --trace prod.jsonl --max-num-seqs 16 --json
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.replay_command import run_replay

    return run_replay(options)


@tune.command("plan", context_settings=CONTEXT)
@traffic_options
@shadow_options
@click.option(
    "--loads",
    type=LOADS,
    default="0.5,1,1.5,2",
    show_default=True,
    metavar="LIST",
    help="Multiples of the recorded load.",
)
@click.option(
    "--objective",
    type=click.Choice(["balanced", "throughput", "latency", "goodput"]),
    default="balanced",
    show_default=True,
    help="What is best.",
)
@click.option("--slo", type=SLO, multiple=True, metavar="SLO", help="As in `tune`; repeatable.")
@click.option(
    "--by",
    type=click.Choice(["hour"]),
    help="In place of loads: the best configuration by hour of day, from a week of traffic.",
)
@click.option(
    "--timezone",
    default="UTC",
    show_default=True,
    metavar="OFFSET",
    help="Whose hours, with --by: UTC or an offset as +02:00.",
)
@click.option(
    "--max-num-seqs",
    type=LADDER,
    metavar="LIST",
    help="Caps to try, in requests  [default: 1,2,4,8,16,32]",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Replays beside each other.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(**options: Any) -> int:
    """Say which configuration is best at which load, and when a re-tune will pay.

    \b
        tune plan --profile runs/…/profile.yaml --trace prod.jsonl --loads 0.5,1,1.5,2
        tune plan --profile runs/…/profile.yaml --trace week.jsonl --by hour

    Predicted from a profile; no engine is started.
    """  # noqa: D301 - click looks for the character that \b stands for
    if options["by"] == "hour":
        from tuner.cli.calendar_job import run_calendar

        return run_calendar(options)
    from tuner.cli.plan_command import run_plan

    return run_plan(options)


@tune.command("worker", context_settings=CONTEXT)
@click.option("--storage", metavar="URL", help="Optuna storage of the run.", required=True)
@click.option("--run", "run_dir", metavar="DIR", help="Run directory.", required=True)
@click.option(
    "--trace",
    multiple=True,
    metavar="FILE",
    help="Where the run's trace lies on this machine; repeatable.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Replays beside each other.")
def worker(**options: Any) -> int:
    """Help a run on another machine with its shadow replays.

    \b
        tune worker --storage postgresql+psycopg://me@db/tune --run runs/2026-11-20T14-03-00

    Takes settings from the run's queue until the run is over. May come, go and die at will.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.worker_command import run_worker

    return run_worker(tune, options)


for _command in (trace, emit, report, verify, compare, calibrate, check, watch, doctor):
    tune.add_command(_command)


def run(arguments: list[str]) -> int:  # noqa: PLR0911 - one return per way to end
    """Run the command and return its exit code; every error ends here."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.default_int_handler)
    try:
        context = tune.make_context("tune", list(arguments))
        context.meta["tuner.arguments"] = list(arguments)
        with context:
            code = tune.invoke(context)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as complaint:
        return _told(as_usage_error(complaint))
    except TunerError as error:
        return _told(error)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:  # noqa: BLE001 - the one place where a defect of ours may surface
        traceback.print_exc()
        click.echo("error: this is a defect of tune, not of your input", err=True)
        click.echo("hint:  report it together with the lines above", err=True)
        return 1
    return int(code or 0)


def _told(error: TunerError) -> int:
    """Write an error and return its exit code."""
    from tuner.console import say_error

    say_error(error)
    return error.exit_code


def main() -> None:
    """Run `tune` on the process's own arguments."""
    sys.exit(run(sys.argv[1:]))
