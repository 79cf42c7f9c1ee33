"""Every command with its options and help; what a command does is imported when it runs."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import (
    CONTEXT,
    DURATION,
    LADDER,
    LOADS,
    SLO,
    engine_options,
    prometheus_options,
    retune_options,
    shadow_options,
    traffic_options,
)
from tuner.cli.trace_commands import trace
from tuner.cli.watch_command import watch
from tuner.emit.names import Format, PatchKind

_TUNE_EPILOG = (
    "Exit codes: 0 done; 2 bad input; 3 nothing meets the SLOs; 4 the engine failed; "
    "10 tune check: a re-tune pays; 130 interrupted."
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
    from tuner.cli.report import run_report

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
    from tuner.cli.verify import run_verify

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
    from tuner.cli.compare import run_compare

    return run_compare(options)


@click.command("calibrate", context_settings=CONTEXT)
@traffic_options
@shadow_options
@click.option(
    "--config",
    metavar="FILE",
    help="Configuration that was served (YAML); default: the profile's.",
)
@click.option("--max-num-seqs", type=click.IntRange(1), metavar="N", help="The served cap.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), metavar="N", help="The served budget."
)
@click.option("-o", "--output", metavar="FILE", help="Where the corrected profile goes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(**options: Any) -> int:
    """Correct a profile by a recording of the engine as it is served.

    \b
        tune calibrate --profile runs/…/profile.yaml --trace prod.jsonl -o served.profile.yaml

    Steps take longer behind an API server than in process. The profile's shadow replays the
    recording; what is missing in its steps goes into the new profile, which says how far it is
    off on requests that taught nothing. Needs a recording with first-token and end times, as
    this tool's recorder writes, of one server at known limits.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.calibrate import run_calibrate

    return run_calibrate(options)


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
    from tuner.cli.check import run_check

    return run_check(options)


@click.command("doctor", context_settings=CONTEXT)
def doctor() -> int:
    """Say what is installed, what is missing, and the command that mends it.

    \b
        tune doctor
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.doctor import checks

    found = checks()
    for one in found:
        state = "ok" if one.ok else "MISSING" if one.is_required else "absent"
        click.echo(f"{state:<8} {one.name:<24} {one.found}")
        if not one.ok and one.fix:
            click.echo(f"{'':8} {'':24} {one.fix}")
    return 0 if all(one.ok for one in found if one.is_required) else 2


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
    from tuner.cli.tune import run_job

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
    from tuner.cli.replay import run_replay

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
        from tuner.cli.plan import run_calendar

        return run_calendar(options)
    from tuner.cli.plan import run_plan

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
    from tuner.cli.worker import run_worker

    return run_worker(tune, options)


@click.command("emit", context_settings=CONTEXT)
@click.argument("source", metavar="RUN_OR_YAML")
@click.option(
    "--format",
    "chosen",
    type=click.Choice([str(name) for name in Format]),
    default=str(Format.VLLM),
    show_default=True,
    help="What to write. vllm-exact: four limits that repeat the measured point; args: a "
    "command line.",
)
@click.option("-o", "--output", metavar="FILE", help="Where it goes; default: stdout.")
@click.option(
    "--patch",
    type=click.Choice([str(kind) for kind in PatchKind]),
    is_flag=False,
    flag_value=str(PatchKind.OBJECT),
    help="Only what changes of the object in --merge FILE, which stays as it is: for kubectl "
    "patch, or as a Kustomize component; default: the whole object.",
)
@click.option(
    "--merge",
    metavar="FILE",
    help="Set both limits in this file of yours and show the difference; with -o, leave it and "
    "write the result there; default: a file of its own.",
)
@click.option(
    "--allow-unauthenticated",
    is_flag=True,
    help="Write a server that answers without the api-key of the configuration; default: it "
    "asks for the key at its start, or is not written.",
)
@click.option(
    "--name", metavar="NAME", help="Name of the object or service; default: the model's."
)
@click.option(
    "--container",
    metavar="NAME",
    help="Container that runs vLLM; default: vllm, or the only one.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model as it is named where it is served; default: as tuned.",
)
def emit(**options: Any) -> int:
    """Write a recommendation as the file that a deployment takes.

    \b
        tune emit runs/2026-11-20T14-03-00 --format kubernetes -o deployment.yaml

    Takes a run directory, or a YAML file that tune wrote, whose comments are the evidence then.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.emit import run_emit

    return run_emit(options)


for _command in (trace, emit, report, verify, compare, calibrate, check, watch, doctor):
    tune.add_command(_command)
