"""Every command with its options and help; what a command does is imported when it runs."""

from __future__ import annotations

from typing import Any

import click
import cloup

from tuner.cli.options import (
    BAD_INPUT,
    CAPS,
    CONFIG,
    CONTEXT,
    DURATION,
    ENGINE_FAILED,
    FILE,
    JOBS,
    JSON,
    LOAD_MEANS,
    LOADS,
    SHADOW,
    SHADOW_FAILED,
    SLOS,
    TRACE,
    command,
    ending,
    engine_options,
    one_setting,
    prometheus_options,
    retune_options,
    traffic_options,
)
from tuner.cli.trace_commands import trace
from tuner.cli.watch_command import watch
from tuner.emit.names import Format, PatchKind


@command("report", "tune report runs/2026-11-20T14-03-00 -o report.html", exits=BAD_INPUT)
@click.argument("run_dir", metavar="RUN", type=FILE)
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="Where the page goes; default: into the run.",
)
def report(**options: Any) -> int:
    """Write a run as one page that needs nothing else.

    Every run writes its own when it ends; a run that still goes on can be looked at too.
    """
    from tuner.cli.report import run_report

    return run_report(options)


@command(
    "verify",
    "tune verify --config best.yaml --trace prod.jsonl --window peak:60s",
    exits=f"{BAD_INPUT}; 3 an --slo breaks, for which a request that fails is infinitely late; "
    "4 the engine failed, more than 1 % of the requests did, or sending fell behind",
)
@cloup.option_group(
    "Main options",
    TRACE,
    CONFIG,
    SLOS,
    click.option("--url", metavar="URL", help="A server that runs; default: start one."),
    JSON,
)
@cloup.option_group(
    "Serving and predicting",
    click.option(
        "--port",
        type=click.IntRange(1, 65535),
        metavar="N",
        help="Port to start it on; default: free.",
    ),
    click.option(
        "--predict",
        type=click.Choice(["live", "shadow", "none"]),
        default="live",
        show_default=True,
        help="What the server is compared with: a replay inside an engine's process, the "
        "shadow of --profile, or nothing.",
    ),
    *SHADOW,
    click.option(
        "--max-send-lag",
        type=DURATION,
        default="50ms",
        show_default=True,
        metavar="TIME",
        help="How far sending may fall behind at its p99 before the run is void.",
    ),
)
@traffic_options
@engine_options
def verify(**options: Any) -> int:
    """Try a configuration on the real API server, over HTTP and in real time.

    Starts `vllm serve --config`, replays the trace with streaming, and prints what was measured
    beside what was predicted. The server is stopped again.
    """
    from tuner.cli.verify import run_verify

    return run_verify(options)


@command(
    "compare",
    "tune compare --trace prod.jsonl --config current.yaml --tuned best.yaml",
    exits=ENGINE_FAILED,
)
@cloup.option_group(
    "Main options",
    TRACE,
    CONFIG,
    click.option(
        "--tuned",
        type=FILE,
        metavar="FILE",
        help="YAML with the tuned limits; default: --config.",
    ),
    click.option(
        "--run", type=FILE, metavar="DIR", help="Keep the result in this run's directory."
    ),
    JSON,
)
@cloup.option_group(
    "Strategies",
    *one_setting("tuned", "that of --tuned"),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        default=8,
        show_default=True,
        metavar="N",
        help="Size of the static batches.",
    ),
    click.option(
        "--batch-wait",
        type=DURATION,
        default="100ms",
        show_default=True,
        metavar="TIME",
        help="How long the first request of a static batch waits for others.",
    ),
    click.option(
        "--uniform", is_flag=True, help="Repeat with every length replaced by the mean."
    ),
)
@traffic_options
@engine_options
def compare(**options: Any) -> int:
    """Measure the strategies of the field side by side on your own trace.

    One request at a time; static batches that wait for their slowest answer; continuous
    batching with vLLM's defaults; and with the tuned limits. All on one live engine.
    """
    from tuner.cli.compare import run_compare

    return run_compare(options)


@command(
    "calibrate",
    "tune calibrate --profile runs/…/profile.yaml --trace prod.jsonl -o served.profile.yaml",
    exits=SHADOW_FAILED,
)
@cloup.option_group(
    "Main options",
    TRACE,
    *SHADOW,
    click.option(
        "-o",
        "--output",
        type=FILE,
        metavar="FILE",
        help="Where the corrected profile goes; has no default.",
    ),
    JSON,
)
@cloup.option_group(
    "What was served",
    click.option(
        "--config",
        type=FILE,
        metavar="FILE",
        help="Configuration that was served (YAML); default: the profile's.",
    ),
    *one_setting("served", "that of --config"),
)
@traffic_options
def calibrate(**options: Any) -> int:
    """Correct a profile by a recording of the engine as it is served.

    Steps take longer behind an API server than in process. The profile's shadow replays the
    recording; what is missing in its steps goes into the new profile, which says how far it is
    off on requests that it was not fitted to. Needs a recording with first-token and end times,
    as this tool's recorder writes, of one server at known limits.
    """
    from tuner.cli.calibrate import run_calibrate

    return run_calibrate(options)


@command(
    "check",
    "tune check --baseline runs/2026-11-20T14-03-00 --trace today.jsonl",
    "tune check --baseline runs/… --prometheus http://prometheus:9090 --since 6h",
    exits="0 no shift, the current configuration still best, or too little data; "
    "10 a re-tune pays; 2 bad input; 4 the shadow failed",
)
@cloup.option_group(
    "Main options",
    click.option(
        "--baseline",
        type=FILE,
        metavar="RUN_OR_PROFILE",
        help="What the current configuration was tuned for: a run directory, live or shadow, "
        "or a profile.yaml.",
    ),
    TRACE,
    click.option(
        "--prometheus",
        metavar="URL",
        help="Sample the current traffic from this server's metrics instead of --trace.",
    ),
    click.option(
        "--config",
        type=FILE,
        metavar="FILE",
        help="Configuration that is served now (YAML); default: what the run recommends.",
    ),
    JSON,
)
@retune_options
@cloup.option_group(
    "Baseline",
    click.option(
        "--baseline-trace",
        type=FILE,
        multiple=True,
        metavar="FILE",
        help="The traffic that was tuned for; default: what the run keeps of it. Repeatable.",
    ),
    *SHADOW,
)
@prometheus_options("6h")
@traffic_options
def check(**options: Any) -> int:
    """Say whether traffic has shifted, and whether a re-tune would pay.

    Compares rate, bursts, lengths, requests in flight and prefix reuse with what the
    configuration was tuned for. If the shift is large enough to matter, the run's profile
    replays the new traffic; no engine is started, and nothing is changed.
    """
    from tuner.cli.check import run_check

    return run_check(options)


@command("doctor", "tune doctor", exits="0 all that is required is there; 2 something is not")
def doctor() -> int:
    """Show what is installed, what is missing, and the command that fixes it."""
    from tuner.cli.doctor import checks

    found = checks()
    for one in found:
        state = "ok" if one.ok else "MISSING" if one.is_required else "absent"
        click.echo(f"{state:<8} {one.name:<24} {one.found}")
        if not one.ok and one.fix:
            click.echo(f"{'':8} {'':24} {one.fix}")
    return 0 if all(one.ok for one in found if one.is_required) else 2


@cloup.group(
    invoke_without_command=True,
    context_settings=CONTEXT,
    epilog=ending(
        "tune --trace prod.jsonl --config current.yaml --slo ttft_p99=500ms -o best.yaml",
        exits=f"{BAD_INPUT}; 3 nothing meets the SLOs; 4 the engine failed; "
        "10 tune check: a re-tune pays",
        note='Shell completion: eval "$(_TUNE_COMPLETE=bash_source tune)" in ~/.bashrc; '
        "zsh_source and fish_source are there too.",
    ),
)
@cloup.option_group(
    "Main options",
    TRACE,
    CONFIG,
    SLOS,
    click.option(
        "--budget",
        type=DURATION,
        metavar="TIME",
        help="Real time the whole run may take, for example 45m  [default: 30m]",
    ),
    click.option(
        "-o",
        "--output",
        type=FILE,
        metavar="FILE",
        help="Where the YAML goes; default: stdout.",
    ),
)
@traffic_options
@engine_options
@cloup.option_group(
    "Search",
    click.option(
        "--method",
        type=click.Choice(["auto", "live", "shadow"]),
        default="auto",
        show_default=True,
        help="auto: measure a few settings live, predict all of them in the shadow, which is "
        "vLLM's own scheduler with predicted step times, and compare the best live (with "
        "--profile the first part is skipped); live: measure all of them; shadow: only "
        "predict, without an engine; needs --profile.",
    ),
    CAPS,
    *SHADOW,
    JOBS,
)
@cloup.option_group(
    "Goals",
    click.option(
        "--objective",
        type=click.Choice(["balanced", "throughput", "latency", "goodput", "capacity"]),
        help="balanced: smallest tail latency that sustains the load [default]; throughput: "
        "most requests per second; latency: smallest median; goodput: most requests within "
        "the SLOs; capacity: largest multiple of the load at which the SLOs hold.",
    ),
    click.option(
        "--tuning",
        metavar="NAME",
        help="Tuning profile: interactive, batch, or a YAML file with objective, slo and "
        "max-num-seqs.",
    ),
)
@cloup.option_group(
    "Output",
    click.option(
        "--format",
        "emit_format",
        type=click.Choice([str(name) for name in Format if name is not Format.VLLM_RUNTIME]),
        default=str(Format.VLLM),
        show_default=True,
        help="What is written; tune emit writes the others later, or into your file.",
    ),
    click.option(
        "--run-dir",
        type=FILE,
        metavar="DIR",
        help="Where trials, report and profile are kept; default: runs/<time>.",
    ),
    click.option(
        "--resume", type=FILE, metavar="DIR", help="Continue the run in this directory."
    ),
    click.option(
        "--storage", metavar="URL", help="Optuna storage; default: SQLite in the run directory."
    ),
)
@click.version_option(package_name="max-num-seqs-tuner", prog_name="tune")
@click.pass_context
def tune(ctx: click.Context, /, **options: Any) -> int | None:
    """Find the best max_num_seqs and max_num_batched_tokens for your own traffic.

    Replays a recorded trace against vLLM in this machine's own process, sweeps both limits on
    one engine, and writes what `vllm serve --config` takes.
    """
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


@command(
    "replay", "tune replay --trace prod.jsonl --max-num-seqs 16 --json", exits=ENGINE_FAILED
)
@cloup.option_group(
    "Main options",
    TRACE,
    CONFIG,
    *one_setting("measured", "that of the current configuration"),
    JSON,
)
@cloup.option_group(
    "Live or shadow",
    click.option(
        "--engine",
        "engine_kind",
        type=click.Choice(["live", "shadow"]),
        default="live",
        show_default=True,
        help="live: measure on vLLM; shadow: predict with --profile.",
    ),
    *SHADOW,
)
@traffic_options
@engine_options
def replay(**options: Any) -> int:
    """Measure one configuration and print it."""
    from tuner.cli.replay import run_replay

    return run_replay(options)


@command(
    "plan",
    "tune plan --profile runs/…/profile.yaml --trace prod.jsonl --loads 0.5,1,1.5,2",
    "tune plan --profile runs/…/profile.yaml --trace week.jsonl --by hour",
    exits=SHADOW_FAILED,
)
@cloup.option_group(
    "Main options",
    *SHADOW,
    TRACE,
    click.option(
        "--loads",
        type=LOADS,
        default="0.5,1,1.5,2",
        show_default=True,
        metavar="LIST",
        help=f"Loads to plan for, each a {LOAD_MEANS[0].lower()}{LOAD_MEANS[1:]}.",
    ),
    SLOS,
    JSON,
)
@cloup.option_group(
    "Search",
    click.option(
        "--objective",
        type=click.Choice(["balanced", "throughput", "latency", "goodput"]),
        default="balanced",
        show_default=True,
        help="What is best.",
    ),
    CAPS,
    JOBS,
)
@cloup.option_group(
    "Hours of the day",
    click.option(
        "--by",
        type=click.Choice(["hour"]),
        help="Instead of loads: the best configuration by hour of day, from a week of traffic.",
    ),
    click.option(
        "--timezone",
        default="UTC",
        show_default=True,
        metavar="OFFSET",
        help="Whose hours, with --by: UTC or an offset as +02:00.",
    ),
)
@traffic_options
def plan(**options: Any) -> int:
    """Say which configuration is best at which load, and when a re-tune will pay.

    Predicted from a profile; no engine is started.
    """
    if options["by"] == "hour":
        from tuner.cli.plan import run_calendar

        return run_calendar(options)
    from tuner.cli.plan import run_plan

    return run_plan(options)


@command(
    "worker",
    "tune worker --storage postgresql+psycopg://me@db/tune --run runs/2026-11-20T14-03-00",
    exits=SHADOW_FAILED,
)
@click.option("--storage", metavar="URL", help="Optuna storage of the run.", required=True)
@click.option(
    "--run", "run_dir", type=FILE, metavar="DIR", help="Run directory.", required=True
)
@click.option(
    "--trace",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Where the run's trace is on this machine; repeatable.",
)
@JOBS
def worker(**options: Any) -> int:
    """Help a run on another machine with its shadow replays.

    Takes settings from the run's queue until the run is over. It may start late and stop early.
    """
    from tuner.cli.worker import run_worker

    return run_worker(tune, options)


@command(
    "emit",
    "tune emit runs/2026-11-20T14-03-00 --format kubernetes -o deployment.yaml",
    exits=BAD_INPUT,
)
@click.argument("source", metavar="RUN_OR_YAML", type=FILE)
@cloup.option_group(
    "Main options",
    click.option(
        "--format",
        "chosen",
        type=click.Choice([str(name) for name in Format]),
        default=str(Format.VLLM),
        show_default=True,
        help="What to write. vllm-exact: four limits that repeat the measured point; args: a "
        "command line.",
    ),
    click.option(
        "-o", "--output", type=FILE, metavar="FILE", help="Where it goes; default: stdout."
    ),
)
@cloup.option_group(
    "A file of yours",
    click.option(
        "--merge",
        type=FILE,
        metavar="FILE",
        help="Set both limits in this file and show the difference; with -o, leave it and "
        "write the result there; default: a new file.",
    ),
    click.option(
        "--patch",
        type=click.Choice([str(kind) for kind in PatchKind]),
        is_flag=False,
        flag_value=str(PatchKind.OBJECT),
        help="Only what changes of the object in --merge FILE, which stays as it is: for "
        "kubectl patch, or as a Kustomize component; default: the whole object.",
    ),
)
@cloup.option_group(
    "The deployment",
    click.option(
        "--name", metavar="NAME", help="Name of the object or service; default: the model's."
    ),
    click.option(
        "--container",
        metavar="NAME",
        help="Container that runs vLLM; default: vllm, or the only one.",
    ),
    click.option(
        "--model",
        metavar="NAME",
        help="Model as it is named where it is served; default: as tuned.",
    ),
    click.option(
        "--allow-unauthenticated",
        is_flag=True,
        help="Write a server that answers without the api-key of the configuration; default: "
        "it reads the key when it starts, or is not written.",
    ),
)
def emit(**options: Any) -> int:
    """Write a recommendation as the file that a deployment takes.

    Takes a run directory, or a YAML file that tune wrote, whose comments are the evidence then.
    """
    from tuner.cli.emit import run_emit

    return run_emit(options)


tune.section("Measure", replay, compare, verify)
tune.section("Predict", plan, calibrate, worker)
tune.section("Use the result", emit, report)
tune.section("Keep it tuned", check, watch)
tune.section("Traffic and setup", trace, doctor)
