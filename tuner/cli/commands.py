"""Every command with its options and help; what a command does is imported when it runs.

Those that predict are declared in `predict.commands`, those of traces in `trace_commands`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import cloup

from tuner.cli.options import (
    BAD_INPUT,
    CAPS,
    CONFIG,
    CONTEXT,
    ENGINE_FAILED,
    GPU_HOUR_PRICE,
    GREEDY,
    JSON,
    KNOBS,
    SHADOW,
    SHADOW_FAILED,
    SLOS,
    TRACE,
    choice_option,
    command,
    count_option,
    ending,
    engine_options,
    file_option,
    format_option,
    given_in,
    one_setting,
    path_of,
    prometheus_options,
    retune_options,
    time_option,
    traffic_options,
)
from tuner.cli.predict.commands import calibrate, explain, explore, gate, plan, profile
from tuner.cli.trace_commands import trace
from tuner.cli.values import FILE, LADDER, NAME, SHARE
from tuner.cli.watch_command import watch
from tuner.emit.names import Format, PatchKind


@command("report", "tune report runs/2026-11-20T14-03-00 -o report.html", exits=BAD_INPUT)
@click.argument("run_dir", metavar="RUN", type=FILE)
@file_option("-o", "--output", help="Where the page goes, - for stdout; default: into the run.")
def report(run_dir: str, output: str | None) -> int:
    """Write a run as one page that needs nothing else.

    Every run writes its own when it ends; a run that still goes on can be looked at too.
    """
    from tuner.cli.console import say
    from tuner.report.page import write_report

    say(f"report written to {write_report(Path(run_dir), path_of(output))}")
    return 0


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
    click.option(
        "--url", type=NAME, metavar="URL", help="A server that runs; default: start one."
    ),
    JSON,
)
@cloup.option_group(
    "Serving and predicting",
    count_option("--port", most=65535, help="Port to start it on; default: free."),
    choice_option(
        "--predict",
        among=["live", "shadow", "none"],
        default="live",
        help="What the server is compared with: a replay inside an engine's process, the "
        "shadow of --profile, or nothing.",
    ),
    *SHADOW,
    time_option(
        "--max-send-lag",
        default="50ms",
        help="How far sending may fall behind at its p99 before the run is void.",
    ),
)
@traffic_options()
@engine_options
def verify(**params: Any) -> int:
    """Try a configuration on the real API server, over HTTP and in real time.

    Starts `vllm serve --config`, replays the trace with streaming, and prints what was measured
    beside what was predicted. The server is stopped again.
    """
    from tuner.cli.verify import VerifyOptions, run_verify

    return run_verify(VerifyOptions.parse(params))


@command(
    "compare",
    "tune compare --trace prod.jsonl --config current.yaml --tuned best.yaml",
    exits=ENGINE_FAILED,
)
@cloup.option_group(
    "Main options",
    TRACE,
    CONFIG,
    file_option("--tuned", help="YAML with the tuned limits; default: --config."),
    *SHADOW,
    file_option("--run", metavar="DIR", help="Keep the result in this run's directory."),
    JSON,
)
@cloup.option_group(
    "Strategies",
    *one_setting("tuned", "that of --tuned"),
    count_option(
        "--processes", default=2, help="Engines with a share of the device each, 1 for none."
    ),
    click.option(
        "--batch-size",
        type=LADDER,
        default="4,8,16",
        metavar="LIST",
        help="Sizes of static batches.",
    ),
    time_option(
        "--batch-wait",
        default="50ms",
        help="How long the first request of a static batch waits for others.",
    ),
    click.option(
        "--uniform", is_flag=True, help="Repeat with every length replaced by the mean."
    ),
)
@traffic_options()
@engine_options
def compare(**params: Any) -> int:
    """Measure the strategies of the field side by side on your own trace.

    One request at a time, on one engine and on several that share the device; static batches
    that wait for their slowest answer; continuous batching with vLLM's defaults, and with the
    tuned limits. At the recorded load, and with all requests there at once, where the order
    shows. On a live engine, or predicted from a profile.
    """
    from tuner.cli.compare import CompareOptions, run_compare

    return run_compare(CompareOptions.parse(params))


@command(
    "check",
    "tune check --baseline runs/2026-11-20T14-03-00 --trace today.jsonl",
    "tune check --baseline runs/… --prometheus http://prometheus:9090 --since 6h",
    exits="0 no shift, the current configuration still best, or too little data; "
    "10 a re-tune pays; 2 bad input; 4 the shadow failed",
)
@cloup.option_group(
    "Main options",
    file_option(
        "--baseline",
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
    file_option(
        "--config",
        help="Configuration that is served now (YAML); default: what the run recommends, or "
        "what a profile was made with.",
    ),
    click.option(
        "--min-gain",
        type=SHARE,
        default="5%",
        metavar="SHARE",
        help="Smaller gains are no reason for a re-tune.",
    ),
    JSON,
)
@retune_options
@cloup.option_group(
    "Baseline",
    file_option(
        "--baseline-trace",
        multiple=True,
        help="The traffic that was tuned for; default: what the run keeps of it. Repeatable.",
    ),
    *SHADOW,
)
@prometheus_options("6h")
@traffic_options("Part of the current traffic to predict, if all of it has shifted")
@click.pass_context
def check(ctx: click.Context, /, **params: Any) -> int:
    """Say whether traffic has shifted, and whether a re-tune would pay.

    Compares rate, bursts, lengths, requests in flight and prefix reuse with what the
    configuration was tuned for. If the shift is large enough to matter, the run's profile
    replays the new traffic; no engine is started, and nothing is changed.
    """
    from tuner.cli.check import CheckOptions, run_check

    return run_check(CheckOptions.parse(params, given_in(ctx)))


@command("doctor", "tune doctor", exits="0 all that is required is there; 2 something is not")
def doctor() -> int:
    """Show what this installation can do, and what to install for more."""
    from tuner.cli.doctor import diagnosis

    found = diagnosis()
    for heading, checks in (("can do", found.abilities), ("rests on", found.parts)):
        click.echo(f"{heading}:")
        for one in checks:
            state = "ok" if one.ok else "MISSING" if one.is_required else "absent"
            click.echo(f"{state:<8} {one.name:<27} {one.found}")
            if not one.ok and one.fix:
                click.echo(f"{'':8} {'':27} {one.fix}")
    return 0 if found.is_sound else 2


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
    time_option(
        "--budget", help="Real time the whole run may take, for example 45m  [default: 30m]"
    ),
    file_option("-o", "--output", help="Where the YAML goes; default: stdout."),
)
@traffic_options(default="all, or what fits into the time")
@engine_options
@cloup.option_group(
    "Search",
    choice_option(
        "--method",
        among=["auto", "calibrated", "live", "shadow"],
        default="auto",
        help="auto: measure a few settings live, predict all of them in the shadow, which is "
        "vLLM's own scheduler with predicted step times, and compare the best live (with "
        "--profile the first part is skipped); calibrated: leave that last part out; live: "
        "measure all of them; shadow: only predict, without an engine; needs --profile.",
    ),
    CAPS,
    KNOBS,
    click.option(
        "--variant",
        "variants",
        multiple=True,
        metavar="NAME:KEY=VALUE",
        help="Another configuration to compare at its own best limits, for example "
        "fp8:quantization=fp8; started once. May be repeated; NAME again adds a key, NAME "
        "alone takes one that --profile knows; default: none.",
    ),
    GPU_HOUR_PRICE,
    choice_option(
        "--start",
        among=["high-throughput", "low-latency"],
        help="Begin at 512/65536 and 0.92 of the GPU's memory, or at 64/8192 and 0.85; "
        "default: where --config says.",
    ),
    *SHADOW,
    GREEDY,
)
@cloup.option_group(
    "Goals",
    choice_option(
        "--objective",
        among=["balanced", "throughput", "latency", "goodput", "capacity"],
        help="balanced [default]: smallest tail latency that sustains the load, in a closed "
        "loop throughput; throughput: most requests per second; latency: smallest median; "
        "goodput: most requests within the SLOs; capacity: largest multiple of the load at "
        "which the SLOs hold.",
    ),
    click.option(
        "--confidence",
        type=float,
        default=0.9,
        help="How probable it must be that a change is better, and that the SLOs are met.",
    ),
    click.option(
        "--tuning",
        metavar="NAME",
        help="Tuning profile: interactive, batch, or a YAML file with objective, slo and "
        "max-num-seqs. What is typed takes its place: one --slo that of all its SLOs.",
    ),
)
@cloup.option_group(
    "Output",
    format_option(
        Format.VLLM_RUNTIME,
        help="What is written; tune emit writes the others later, or into your file.",
    ),
    file_option(
        "--run-dir",
        metavar="DIR",
        help="Where trials, report and profile are kept; default: runs/<time>.",
    ),
    file_option("--resume", metavar="DIR", help="Continue the run in this directory."),
    click.option(
        "--storage", metavar="URL", help="Optuna storage; default: SQLite in the run directory."
    ),
)
@click.version_option(package_name="max-num-seqs-tuner", prog_name="tune")
@click.pass_context
def tune(ctx: click.Context, /, **_: Any) -> int | None:
    """Find the best max_num_seqs and max_num_batched_tokens for your own traffic.

    Replays a recorded trace against vLLM in a process of its own, sweeps both limits on
    one engine, and writes what `vllm serve --config` takes.
    """
    if ctx.invoked_subcommand is not None:
        return None
    if not given_in(ctx):
        click.echo(ctx.get_help())
        return 0
    from tuner.cli.tune import read_job, run_job

    return run_job(read_job(ctx))


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
    choice_option(
        "--engine",
        "engine_kind",
        among=["live", "shadow"],
        default="live",
        help="live: measure on vLLM; shadow: predict with --profile.",
    ),
    *SHADOW,
    GREEDY,
    time_option(
        "--lead-in",
        default="0s",
        help="How much of the trace before the window is replayed too and not measured, so "
        "that the engine is warm; not in a closed loop.",
    ),
)
@traffic_options()
@engine_options
def replay(**params: Any) -> int:
    """Measure one configuration and print it."""
    from tuner.cli.replay import ReplayOptions, run_replay

    return run_replay(ReplayOptions.parse(params))


@command(
    "worker",
    "tune worker --storage postgresql+psycopg://me@db/tune --run runs/2026-11-20T14-03-00",
    exits=SHADOW_FAILED,
)
@click.option("--storage", metavar="URL", help="Optuna storage of the run.", required=True)
@file_option("--run", "run_dir", metavar="DIR", help="Run directory.", required=True)
@file_option(
    "--trace", multiple=True, help="Where the run's trace is on this machine; repeatable."
)
@file_option("--config", help="Where the run's configuration is on this machine.")
def worker(storage: str, run_dir: str, trace: tuple[str, ...], config: str | None) -> int:
    """Help a run from another machine of the same kind, with an engine of its own.

    Takes whole rounds of calibration and race until the run, begun with the same --storage, is
    over. It may start late and stop early.
    """
    from tuner.cli.console import say
    from tuner.run.worker import work

    work(Path(run_dir), storage, trace, say, config=path_of(config))
    return 0


@command(
    "emit",
    "tune emit runs/2026-11-20T14-03-00 --format kubernetes -o deployment.yaml",
    exits=BAD_INPUT,
)
@click.argument("source", metavar="RUN_OR_YAML", type=FILE)
@cloup.option_group(
    "Main options",
    format_option(
        help="What to write. vllm-exact: four limits that repeat the measured point; args: a "
        "command line."
    ),
    file_option("-o", "--output", help="Where it goes; default: stdout."),
)
@cloup.option_group(
    "A file of yours",
    file_option(
        "--merge",
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
        "--name",
        type=NAME,
        metavar="NAME",
        help="Name of the object or service; default: the model's.",
    ),
    click.option(
        "--container",
        type=NAME,
        metavar="NAME",
        help="Container that runs vLLM; default: vllm, or the only one.",
    ),
    click.option(
        "--model",
        type=NAME,
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
def emit(**params: Any) -> int:
    """Write a recommendation as the file that a deployment takes.

    Takes a run directory, or a YAML file that tune wrote, whose comments are the evidence then.
    """
    from tuner.cli.emit import EmitOptions, run_emit

    return run_emit(EmitOptions.parse(params))


tune.section("Measure", replay, compare, verify)
tune.section("Predict", plan, explore, gate, explain, profile, calibrate, worker)
tune.section("Use the result", emit, report)
tune.section("Keep it tuned", check, watch)
tune.section("Traffic and setup", trace, doctor)
