"""Options that more than one command takes, and how a command is made of its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import cloup
from click.core import ParameterSource

from tuner.cli.values import (
    DURATION,
    FILE,
    LADDER,
    LOAD,
    LOADS,
    NAME,
    NAMES,
    PRICE,
    SIZE,
    SLO,
    WINDOW,
)
from tuner.emit.names import Format
from tuner.errors import TunerError, UsageError

Params = Mapping[str, Any]
"""What click has read of a command line, by the names of the parameters."""


def path_of(named: str | None) -> Path | None:
    """Return the path that an option names, None where it is left out."""
    return Path(named) if named else None


def profile_at(named: str) -> Path:
    """Return where a profile goes. Raises: UsageError for standard output, which is taken."""
    if named == "-":
        raise UsageError(
            "-o - is standard output, which says what was learnt; a profile needs a file",
            "for example -o profile.yaml",
        )
    return Path(named)


def given_in(ctx: click.Context) -> dict[str, Any]:
    """Return the parameters that the command line names, with their values."""
    return {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


Added = Callable[[Any], Any]
"""What adds options to a command."""


CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
"""How every command is asked for its help, which shows the defaults of its options."""

BAD_INPUT = "0 done; 2 bad input"
"""Exit codes of a command that starts no engine."""
ENGINE_FAILED = f"{BAD_INPUT}; 4 the engine failed"
SHADOW_FAILED = f"{BAD_INPUT}; 4 the shadow failed"


def ending(
    *examples: str, exits: str, interrupted: str = "130 interrupted", note: str = ""
) -> str:
    """Return how a command's help ends: its exit codes, a note, and what can be typed."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    typed = "\n".join(f"  {line}" for example in examples for line in example.splitlines())
    parts = [f"Exit codes: {exits}; {interrupted}.", note, f"\b\n{title}\n{typed}"]
    return "\n\n".join(part for part in parts if part)


def command(
    name: str, *examples: str, exits: str, interrupted: str = "130 interrupted"
) -> Callable[[Callable[..., Any]], cloup.Command]:
    """Return what makes a command of a function, whose help ends with the examples."""
    epilog = ending(*examples, exits=exits, interrupted=interrupted)
    return cloup.command(name, context_settings=CONTEXT, epilog=epilog)


def file_option(*names: str, metavar: str = "FILE", **more: Any) -> Added:
    """Return what adds an option that names a file or a folder."""
    return click.option(*names, type=FILE, metavar=metavar, **more)


def time_option(*names: str, **more: Any) -> Added:
    """Return what adds an option that is a length of time, in seconds as its value."""
    return click.option(*names, type=DURATION, metavar="TIME", **more)


def choice_option(*names: str, among: Sequence[str], **more: Any) -> Added:
    """Return what adds an option that is one of several words."""
    return click.option(*names, type=click.Choice(among), **more)


def count_option(
    *names: str, least: int = 1, most: int | None = None, metavar: str = "N", **more: Any
) -> Added:
    """Return what adds an option that is a whole number from `least`, up to `most` if given."""
    return click.option(*names, type=click.IntRange(least, most), metavar=metavar, **more)


def format_option(*without: Format, **more: Any) -> Added:
    """Return what adds the option of what is written, in any form but those."""
    among = [str(form) for form in Format if form not in without]
    return choice_option(
        "--format", "emit_format", among=among, default=str(Format.VLLM), **more
    )


ROUTER = choice_option(
    "--router",
    among=["round-robin", "least-loaded", "prefix"],
    default="least-loaded",
    help="How the fleet routes requests.",
)
KNOBS = click.option(
    "--knobs",
    type=NAMES,
    default="",
    show_default=False,
    metavar="LIST",
    help="What else to turn beside the two limits, for example prefix-caching,long-prefill: "
    "tune explain lists them. What gains under 2 % is left alone; default: none.",
)
GPU_HOUR_PRICE = click.option(
    "--gpu-hour-price",
    type=PRICE,
    metavar="PRICE",
    help="What a GPU costs for an hour, to compare by cost; default: no cost is told.",
)
LOAD_MEANS = "Multiple of the recorded arrivals, over the same time"
TRACE = file_option(
    "--trace",
    multiple=True,
    help="Recorded traffic to replay: a file, a folder, or - for standard input; repeatable.",
)
CONFIG = file_option(
    "--config", help="Current configuration, as `vllm serve --config` takes it (YAML)."
)


def _slo_option(ending: str) -> Added:
    text = f"A bound that must hold, for example ttft_p99=500ms; {ending}"
    return click.option("--slo", type=SLO, multiple=True, metavar="SLO", help=text)


SLOS = _slo_option("repeatable.")
CAPS = click.option(
    "--max-num-seqs",
    type=LADDER,
    metavar="LIST",
    help="Values of max_num_seqs to try  [default: 1,2,4,8,16,32]",
)
PROFILE = file_option(
    "--profile",
    help="Profile of the engine that the shadow predicts: profile.yaml of a run, or the name "
    "of one of profiles/gpu, as meta-llama-3.1-8b.1xh200_sxm.",
)
FORCE_PROFILE = click.option(
    "--force-profile",
    is_flag=True,
    help="Use a profile of another vLLM, device or configuration; the result gets a caveat.",
)
SHADOW = (PROFILE, FORCE_PROFILE)
"""Of which engine a shadow is made."""
GREEDY = click.option(
    "--greedy",
    is_flag=True,
    help="Sample the likeliest token; default: as a server of the model would, by its "
    "generation_config, at temperature 1 where that says nothing.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
TOO_LONG = choice_option(
    "--too-long",
    among=["refuse", "clip", "drop"],
    default="refuse",
    help="What to do with requests above max_model_len.",
)


def one_setting(whose: str, default: str) -> tuple[Added, Added]:
    """Return the options that name one value of each limit."""
    return (
        count_option(
            "--max-num-seqs", help=f"The {whose} cap on requests per step; default: {default}."
        ),
        count_option(
            "--max-num-batched-tokens",
            help=f"The {whose} token budget per step; default: {default}.",
        ),
    )


def loads_option(default: str) -> Added:
    """Return what adds the option of the loads that are predicted."""
    return click.option(
        "--loads",
        type=LOADS,
        default=default,
        metavar="LIST",
        help=f"Loads to predict, each a {LOAD_MEANS[0].lower()}{LOAD_MEANS[1:]}; a range is "
        "FROM:TO:STEP.",
    )


reading_options = cloup.option_group(
    "Reading the trace",
    click.option(
        "--trace-format", metavar="NAME", help="Format of the trace; default: by content."
    ),
    click.option(
        "--only-model",
        type=NAME,
        metavar="NAME",
        help="Only the requests of this model; default: all.",
    ),
    choice_option(
        "--time-unit",
        among=["s", "ms", "us", "ns"],
        help="Unit of arrivals that are plain numbers; default: the format's.",
    ),
    count_option(
        "--hash-block-size",
        help="Tokens that one of the hash ids stands for; default: the format's.",
    ),
    click.option(
        "--spread",
        is_flag=True,
        help="Spread arrivals evenly within the ticks of a coarse clock, with --seed.",
    ),
    time_option(
        "--sessions-over",
        help="Start sessions without a common clock at random within this time; default: "
        "their median length.",
    ),
    time_option(
        "--sample", help="How much time to sample from aggregates; default: all of it."
    ),
    choice_option(
        "--zero-output",
        among=["drop", "one", "refuse"],
        default="drop",
        help="What to do with recorded requests without output tokens; one: give them one.",
    ),
    choice_option(
        "--aborted",
        among=["draw", "keep", "drop"],
        help="What to do with answers that were cut short because their clients left. draw: "
        "draw the rest of their length from longer answers; keep: leave them short; drop: "
        "leave them out  [default: draw; for calibrate keep]",
    ),
    click.option(
        "--skip-invalid", is_flag=True, help="Count and skip wrong rows, up to --max-invalid."
    ),
    click.option(
        "--max-invalid",
        type=click.FloatRange(0, 100),
        metavar="PERCENT",
        help="Largest share of wrong rows to skip  [default: 5]",
    ),
    click.option(
        "--max-unpacked",
        type=SIZE,
        default="64GiB",
        metavar="SIZE",
        help="Largest size to which a packed or piped trace may unpack.",
    ),
    count_option(
        "--seed",
        least=0,
        default=0,
        help="Seed of everything that is drawn at random: prompts, samples, spreading.",
    ),
)
"""How recorded traffic is read."""

_REPLAY_OPTIONS = (
    click.option("--load", type=LOAD, default="1", metavar="X", help=f"{LOAD_MEANS}."),
    choice_option(
        "--load-model",
        among=["open", "closed"],
        help="open: requests go when due [default]; closed: a number is kept in flight "
        "[default for a recording of that number].",
    ),
    click.option(
        "--concurrency",
        type=int,
        metavar="N",
        help="Requests that a closed loop keeps in flight; default: as recorded.",
    ),
    choice_option(
        "--sessions",
        among=["causal", "recorded"],
        default="causal",
        help="causal: a session's next turn waits for the answer; recorded: it goes when it "
        "was recorded.",
    ),
    choice_option(
        "--clock",
        among=["virtual", "wall"],
        default="virtual",
        help="virtual: skip idle time; wall: wait it out.",
    ),
    time_option(
        "--request-timeout",
        help="How long a client waits for its answer, for example 60s; default: forever.",
    ),
    TOO_LONG,
)


def traffic_options(part: str = "Part of the trace", default: str = "all") -> Added:
    """Return what adds the options of what is replayed and how; --trace stands with the first.

    `part` says of what --window is a part, `default` which part that is where it is left out.
    """
    window = click.option(
        "--window",
        type=WINDOW,
        metavar="SPAN",
        help=f"{part}: all, 5m:10m, peak:300s or typical:300s; default: {default}.",
    )
    replaying = cloup.option_group("Replaying the trace", window, *_REPLAY_OPTIONS)
    return lambda command: reading_options(replaying(command))


engine_options = cloup.option_group(
    "Engine",
    click.option(
        "--model",
        type=NAME,
        metavar="NAME",
        help="Model name or folder; default: the bundled demo model.",
    ),
    click.option(
        "--engine-arg",
        "engine_args",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any option of `vllm serve`, for example dtype=bfloat16; repeatable.",
    ),
    time_option(
        "--start-timeout",
        default="30m",
        help="How long an engine may take to start before the start counts as failed.",
    ),
)
"""Which engine is measured, besides --config."""

predicted_options = cloup.option_group(
    "Search",
    choice_option(
        "--objective",
        among=["balanced", "throughput", "latency", "goodput"],
        default="balanced",
        help="What is best.",
    ),
    CAPS,
)
"""What is tried, and what is best, where nothing but a profile says so."""

retune_options = cloup.option_group(
    "Re-tune in the shadow",
    choice_option(
        "--objective",
        among=["balanced", "throughput", "latency", "goodput"],
        help="What is best; default: the run's, else balanced.",
    ),
    _slo_option("default: the run's. Repeatable."),
    CAPS,
)
"""What a re-tune by prediction aims at."""


def as_usage_error(error: click.ClickException) -> TunerError:
    """Return click's complaint in our form."""
    hint = "see --help"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"see {error.ctx.command_path} --help"
    text = error.format_message().rstrip(".")
    return UsageError(text[:1].lower() + text[1:], hint)


TOKEN_VARIABLE = "PROMETHEUS_TOKEN"  # noqa: S105 - the name of a variable, not a token


def prometheus_options(since: str) -> Added:
    """Return what adds the options of a query; `since` is how far back it looks by default."""
    return cloup.option_group(
        "Prometheus",
        time_option("--since", default=since, help="How far back to query Prometheus."),
        time_option("--step", default="30s", help="Resolution of the queries."),
        click.option(
            "--label",
            "labels",
            multiple=True,
            metavar="NAME=VALUE",
            help="Only series with this label, for example job=vllm: whoever is scraped may "
            "name your model; repeatable.",
        ),
        click.option(
            "--header",
            "headers",
            multiple=True,
            metavar="'NAME: VALUE'",
            help="Sent to Prometheus with every request; repeatable.",
        ),
        file_option(
            "--token-file",
            help=f"Bearer token for Prometheus; default: that of {TOKEN_VARIABLE}, if any.",
        ),
        click.option(
            "--no-verify", is_flag=True, help="Do not check Prometheus's certificate."
        ),
    )
