"""The commands that predict, with their options and help; what one does is imported later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import cloup

from tuner.cli.options import (
    BAD_INPUT,
    CONTEXT,
    GPU_HOUR_PRICE,
    JSON,
    KNOBS,
    ROUTER,
    SHADOW,
    SHADOW_FAILED,
    SLOS,
    TRACE,
    choice_option,
    command,
    count_option,
    ending,
    file_option,
    given_in,
    loads_option,
    one_setting,
    path_of,
    predicted_options,
    profile_at,
    prometheus_options,
    time_option,
    traffic_options,
)
from tuner.emit.names import GateFormat


@command(
    "plan",
    "tune plan --profile runs/…/profile.yaml --trace prod.jsonl --loads 0.5:2:0.25",
    "tune plan --profile runs/…/profile.yaml --trace week.jsonl --by hour",
    "tune plan --profile runs/…/profile.yaml --trace day.jsonl --fleet --slo ttft_p99=2s",
    "tune plan --profile runs/…/profile.yaml --trace prod.jsonl --slo e2e_p95=9s --clients",
    exits=f"{BAD_INPUT}; 3 no setting answers enough requests, or no fleet keeps the SLOs in "
    "the busiest stretch; 4 the shadow failed",
)
@cloup.option_group(
    "Main options",
    *SHADOW,
    TRACE,
    loads_option("0.5,1,1.5,2"),
    SLOS,
    KNOBS,
    click.option(
        "--clients",
        is_flag=True,
        help="Instead of configurations: what clients of the current one should hold to, "
        "connections, time-outs, retries, and what their prompts could share.",
    ),
    JSON,
)
@predicted_options
@cloup.option_group(
    "Hours of the day",
    choice_option(
        "--by",
        among=["hour"],
        help="Instead of loads: the best configuration by hour of day, from a week of traffic.",
    ),
    click.option(
        "--timezone",
        default="UTC",
        metavar="OFFSET",
        help="Whose hours, with --by: UTC or an offset as +02:00.",
    ),
)
@cloup.option_group(
    "Fleet",
    click.option(
        "--fleet",
        is_flag=True,
        help="How many replicas keep the SLOs, fixed, by plan or autoscaled, and their cost.",
    ),
    ROUTER,
    GPU_HOUR_PRICE,
    time_option("--start-time", default="2m", help="How long a replica takes to start."),
    time_option(
        "--stretch", default="1h", help="How long a number of replicas is planned for."
    ),
    count_option("--most-replicas", default=64, help="How many are tried."),
)
@traffic_options()
@click.pass_context
def plan(ctx: click.Context, /, **params: Any) -> int:
    """Say which configuration is best at which load, and when a re-tune will pay.

    Predicted from a profile; no engine is started.
    """
    from tuner.cli.predict.plan import PlanOptions, run_plan

    return run_plan(PlanOptions.parse(params, given_in(ctx)))


@command(
    "explore",
    "tune explore --profile runs/…/profile.yaml --trace prod.jsonl --slo ttft_p99=500ms",
    exits=f"{BAD_INPUT}; 3 no setting answers enough requests; 4 the shadow failed",
)
@cloup.option_group(
    "Main options",
    *SHADOW,
    TRACE,
    loads_option("0.5,0.75,1,1.25,1.5,2,3"),
    SLOS,
    file_option(
        "-o",
        "--output",
        help="Where the page goes; default: explore.html, and none with --json.",
    ),
    JSON,
)
@predicted_options
@traffic_options()
def explore(**params: Any) -> int:
    """Write a page of what every setting reaches at every load.

    Latency and throughput over both limits and load, on one page that needs no network.
    Predicted from a profile; no engine is started.
    """
    from tuner.cli.predict.explore import run_explore
    from tuner.cli.predict.options import LoadsOptions

    output = path_of(params["output"])
    return run_explore(LoadsOptions.parse(params), output, as_json=params["as_json"])


@command(
    "gate",
    "tune gate --profile runs/…/profile.yaml --trace prod.jsonl --slo ttft_p95=500ms",
    "tune gate --profile runs/…/profile.yaml --trace t.jsonl --slo e2e_p95=9s --format nginx",
    exits=f"{BAD_INPUT}; 3 a gate would refuse everything; 4 the shadow failed",
)
@cloup.option_group(
    "Main options",
    *SHADOW,
    TRACE,
    loads_option("1,1.5,2,3"),
    SLOS,
    *one_setting("gated", "the current one"),
    choice_option(
        "--format",
        "gate_format",
        among=[str(form) for form in GateFormat],
        help="Write the gate for this, or an autoscaler's target; default: a table for people.",
    ),
    file_option("-o", "--output", help="Where it is written; default: standard output."),
    JSON,
)
@traffic_options()
def gate(**params: Any) -> int:
    """Say what to let in under overload: how many, who waits, and for how long.

    Finds the cap on requests in flight, the queue before it with its time-out, and the cap on
    answers that keep goodput within every --slo highest at all loads, against no gate, and who
    suffers from them. Predicted from a profile; no engine is started.
    """
    from tuner.cli.predict.gate import GateOptions, run_gate

    return run_gate(GateOptions.parse(params))


@cloup.group(
    "profile",
    context_settings=CONTEXT,
    epilog=ending(
        "tune profile fit --recording prod.jsonl -o profile.yaml", exits=SHADOW_FAILED
    ),
)
def profile() -> None:
    """Make a profile without a spare machine.

    With it every command that takes --profile predicts for the engine that it speaks for.
    """


@command(
    "fit",
    "tune profile fit --recording prod.jsonl --config current.yaml -o profile.yaml",
    exits=SHADOW_FAILED,
)
@cloup.option_group(
    "Main options",
    file_option(
        "--recording",
        multiple=True,
        help="Requests that the recorder wrote while the server served; repeatable.",
    ),
    file_option("-o", "--output", default="profile.yaml", help="Where the profile goes."),
    JSON,
)
@cloup.option_group(
    "What was served",
    file_option(
        "--steps",
        multiple=True,
        help="Steps that the recorder wrote with TUNE_RECORD_STEPS=1; repeatable; default: "
        "those beside --recording.",
    ),
    file_option(
        "--config",
        help="Configuration that was served (YAML), for what is emitted later; default: the "
        "model alone.",
    ),
)
def fit(**params: Any) -> int:
    """Learn a profile from a server in production, which goes on serving.

    From the steps that its recorder kept beside its requests: how long batches take with
    production's own traffic, the server's overhead included.
    """
    from tuner.cli.production import run_profile_fit

    return run_profile_fit(
        tuple(map(Path, params["recording"])),
        tuple(map(Path, params["steps"])),
        path_of(params["config"]),
        profile_at(params["output"]),
        as_json=params["as_json"],
    )


@command(
    "derive",
    "tune profile derive --gpu h200_sxm --model meta-llama/Meta-Llama-3.1-8B -o h200.yaml",
    exits=BAD_INPUT,
)
@cloup.option_group(
    "Main options",
    click.option("--gpu", metavar="NAME", help="GPU, as h200_sxm or l40s."),
    click.option(
        "--model",
        metavar="DIR_OR_ID",
        help="Folder with the model's config.json, or a name that the tables know; default: "
        "the model of --config.",
    ),
    count_option(
        "--tp", help="How many GPUs share the model; default: that of --config, or 1."
    ),
    file_option("-o", "--output", default="profile.yaml", help="Where the profile goes."),
    JSON,
)
@cloup.option_group(
    "What would be served",
    file_option(
        "--config",
        help="Configuration (YAML): limits, lengths, share of the memory; default: vLLM's own.",
    ),
    click.option(
        "--vllm",
        metavar="VERSION",
        default="0.32.0",
        help="Release whose scheduling is predicted.",
    ),
)
def derive(**params: Any) -> int:
    """Derive a profile of a GPU that is not at hand, from published tables.

    Of NVIDIA's AIConfigurator, which is asked about batches of all kinds. What comes of it is
    marked as derived and not measured, with the error to expect.
    """
    from tuner.cli.production import run_profile_derive, wanted_of

    target = profile_at(params["output"])
    return run_profile_derive(wanted_of(params), target, as_json=params["as_json"])


profile.add_command(fit)
profile.add_command(derive)


@command(
    "calibrate",
    "tune calibrate --profile runs/…/profile.yaml --trace prod.jsonl -o served.profile.yaml",
    "tune calibrate --profile h200.yaml --prometheus http://prometheus:9090 -o mine.yaml",
    exits=SHADOW_FAILED,
)
@cloup.option_group(
    "Main options",
    TRACE,
    *SHADOW,
    file_option("-o", "--output", help="Where the corrected profile goes; has no default."),
    JSON,
)
@cloup.option_group(
    "What was served",
    file_option(
        "--config", help="Configuration that was served (YAML); default: the profile's."
    ),
    *one_setting("served", "that of --config"),
    file_option(
        "--steps",
        multiple=True,
        help="Steps that the recorder wrote beside --trace; repeatable. They are corrected by, "
        "and not the times of the requests.",
    ),
)
@cloup.option_group(
    "Without a recording",
    click.option(
        "--anchor",
        metavar="itl=TIME@running=N",
        help="The time between tokens that was measured while so many requests ran, as "
        "itl=12.3ms@running=14; with ,prompt=TOKENS,output=TOKENS of the mean request it "
        "counts prompts computed beside them.",
    ),
    click.option(
        "--prometheus",
        metavar="URL",
        help="Take that point from the last hour of production's metrics.",
    ),
    click.option(
        "--model",
        "only_model",
        metavar="NAME",
        help="Whose metrics, where there are several models.",
    ),
)
@prometheus_options("1h")
@traffic_options()
@click.pass_context
def calibrate(ctx: click.Context, /, **params: Any) -> int:
    """Correct a profile by what production does.

    By a point of its metrics every step takes as much longer as a token did; by recorded steps
    as much longer as these did. By a recording of requests, with first-token and end times as
    this tool's recorder writes them, of one server at known limits: its shadow replays them,
    and what is missing goes into every step and into prefills. How far the corrected profile is
    off what did not teach it is told, and kept in it.
    """
    from tuner.cli.calibrate import CalibrateOptions, run_calibrate

    return run_calibrate(CalibrateOptions.parse(params, given_in(ctx)))


@command("explain", "tune explain", "tune explain long-prefill", exits=BAD_INPUT)
@click.argument("knob", required=False)
def explain(knob: str | None) -> int:
    """Say what each of --knobs does, which vLLM has it and when it is read.

    Without a name all of them are listed; of one vLLM's own help is shown too, if installed.
    """
    from tuner.cli.predict.explain import run_explain

    return run_explain(knob)
