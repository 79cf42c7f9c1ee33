"""Options that more than one command takes, and the values they stand for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import cloup

from tuner.errors import TunerError, UsageError


class Parsed(click.ParamType[Any]):
    """An option value read by one of our own parsers, so that its message is ours."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,  # noqa: ARG002 - click's own signature
    ) -> Any:
        """Return the parsed value; a value that is parsed already passes."""
        if not isinstance(value, str):
            return value
        option = f"--{param.name.replace('_', '-')} " if param and param.name else ""
        try:
            return self._parse(value)
        except UsageError as error:
            if option.strip() and option.strip() not in error.message:
                raise UsageError(f"{option}{error.message}", error.hint) from error
            raise


def _duration(text: str) -> float:
    from tuner.traffic.windows import parse_duration

    return parse_duration(text)


def _window(text: str) -> Any:
    from tuner.traffic.windows import parse_window

    return parse_window(text)


def _slo(text: str) -> Any:
    from tuner.replay.slo import parse_slo

    return parse_slo(text)


def _ladder(text: str) -> tuple[int, ...]:
    try:
        caps = tuple(int(part) for part in text.split(","))
    except ValueError:
        caps = ()
    if not caps or min(caps) < 1:
        raise UsageError(
            f"must list caps of at least 1, got {text!r}", "for example 1,2,4,8,16,32"
        )
    return caps


def _load(text: str) -> float:
    try:
        load = float(text.lower().removesuffix("x"))
    except ValueError:
        load = float("nan")
    if not 0 < load < 1e6:
        raise UsageError(f"must be a multiple above 0, got {text!r}", "for example 1.5")
    return load


def _loads(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_load(part) for part in text.split(",")))


def _share(text: str) -> float:
    """Return a share of 1.

    >>> _share("5%"), _share("0.05")
    (0.05, 0.05)
    """
    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"must be a share, got {text!r}", "for example 5%") from None
    return value / 100 if text.strip().endswith("%") else value


DURATION = Parsed("duration", _duration)
WINDOW = Parsed("window", _window)
SLO = Parsed("slo", _slo)
LADDER = Parsed("caps", _ladder)
LOAD = Parsed("multiple", _load)
LOADS = Parsed("multiples", _loads)
SHARE = Parsed("share", _share)
LOAD_MEANS = "Multiple of the recorded arrivals, over the same time"

FILE = click.Path(readable=False)
"""A path as it was typed; a shell completes it, and who opens it says what is wrong with it."""

Command = TypeVar("Command", bound=Callable[..., Any])
Added = Callable[[Command], Command]
"""What adds options to a command."""


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 96}
"""How every command shows its help."""

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


def stacked(*options: Added[Command]) -> Added[Command]:
    """Return what adds all these options, in this order, to a command."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


TRACE = click.option(
    "--trace",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Recorded traffic to replay: a file, a folder, or - for standard input; repeatable.",
)
CONFIG = click.option(
    "--config",
    type=FILE,
    metavar="FILE",
    help="Current configuration, as `vllm serve --config` takes it (YAML).",
)
SLOS = click.option(
    "--slo",
    type=SLO,
    multiple=True,
    metavar="SLO",
    help="A bound that must hold, for example ttft_p99=500ms; repeatable.",
)
CAPS = click.option(
    "--max-num-seqs",
    type=LADDER,
    metavar="LIST",
    help="Values of max_num_seqs to try  [default: 1,2,4,8,16,32]",
)
JOBS = click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Shadow replays at the same time  [default: one per core]",
)
PROFILE = click.option(
    "--profile",
    type=FILE,
    metavar="FILE",
    help="Profile of the engine that the shadow predicts: profile.yaml of a run.",
)
FORCE_PROFILE = click.option(
    "--force-profile",
    is_flag=True,
    help="Use a profile of another vLLM, device or configuration; the result gets a caveat.",
)
SHADOW = (PROFILE, FORCE_PROFILE)
"""Of which engine a shadow is made."""
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
TOO_LONG = click.option(
    "--too-long",
    type=click.Choice(["refuse", "clip", "drop"]),
    default="refuse",
    show_default=True,
    help="What to do with requests above max_model_len.",
)


def one_setting(whose: str, default: str) -> tuple[Added[Any], Added[Any]]:
    """Return the options that name one value of each limit."""
    return (
        click.option(
            "--max-num-seqs",
            type=click.IntRange(1),
            metavar="N",
            help=f"The {whose} cap on requests per step; default: {default}.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=click.IntRange(1),
            metavar="N",
            help=f"The {whose} token budget per step; default: {default}.",
        ),
    )


reading_options = cloup.option_group(
    "Reading the trace",
    click.option(
        "--trace-format", metavar="NAME", help="Format of the trace; default: by content."
    ),
    click.option(
        "--only-model", metavar="NAME", help="Only the requests of this model; default: all."
    ),
    click.option(
        "--time-unit",
        type=click.Choice(["s", "ms", "us", "ns"]),
        help="Unit of arrivals that are plain numbers; default: the format's.",
    ),
    click.option(
        "--hash-block-size",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens that one of the hash ids stands for; default: the format's.",
    ),
    click.option(
        "--spread",
        is_flag=True,
        help="Spread arrivals evenly within the ticks of a coarse clock, with --seed.",
    ),
    click.option(
        "--sessions-over",
        type=DURATION,
        metavar="TIME",
        help="Start sessions without a common clock at random within this time; default: "
        "their median length.",
    ),
    click.option(
        "--sample",
        type=DURATION,
        metavar="TIME",
        help="How much time to sample from aggregates; default: all of it.",
    ),
    click.option(
        "--zero-output",
        type=click.Choice(["drop", "one", "refuse"]),
        default="drop",
        show_default=True,
        help="What to do with recorded requests without output tokens; one: give them one.",
    ),
    click.option(
        "--aborted",
        type=click.Choice(["draw", "keep", "drop"]),
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
        "--seed",
        type=click.IntRange(0),
        metavar="N",
        default=0,
        show_default=True,
        help="Seed of everything that is drawn at random: prompts, samples, spreading.",
    ),
)
"""How recorded traffic is read."""

replay_options = cloup.option_group(
    "Replaying the trace",
    click.option(
        "--window",
        type=WINDOW,
        metavar="SPAN",
        help="Part of the trace: all, 5m:10m, peak:300s or typical:300s; default: what "
        "fits into the time.",
    ),
    click.option(
        "--load",
        type=LOAD,
        default="1",
        metavar="X",
        show_default=True,
        help=f"{LOAD_MEANS}.",
    ),
    click.option(
        "--load-model",
        type=click.Choice(["open", "closed"]),
        help="open: requests go when due [default]; closed: a number is kept in flight "
        "[default for a recording of that number].",
    ),
    click.option(
        "--concurrency",
        type=int,
        metavar="N",
        help="Requests that a closed loop keeps in flight; default: as recorded.",
    ),
    click.option(
        "--sessions",
        type=click.Choice(["causal", "recorded"]),
        default="causal",
        show_default=True,
        help="causal: a session's next turn waits for the answer; recorded: it goes when it "
        "was recorded.",
    ),
    click.option(
        "--clock",
        type=click.Choice(["virtual", "wall"]),
        default="virtual",
        show_default=True,
        help="virtual: skip idle time; wall: wait it out.",
    ),
    click.option(
        "--request-timeout",
        type=DURATION,
        metavar="TIME",
        help="How long a client waits for its answer, for example 60s; default: forever.",
    ),
    TOO_LONG,
)
"""Which part of the traffic is replayed, and how."""


def traffic_options(command: Command) -> Command:
    """Add the options that say what is replayed and how; --trace stands with the first ones."""
    return stacked(reading_options, replay_options)(command)


engine_options = cloup.option_group(
    "Engine",
    click.option(
        "--model",
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
)
"""Which engine is measured, besides --config."""

retune_options = cloup.option_group(
    "Re-tune in the shadow",
    click.option(
        "--objective",
        type=click.Choice(["balanced", "throughput", "latency", "goodput"]),
        help="What is best; default: the run's, else balanced.",
    ),
    click.option(
        "--slo",
        type=SLO,
        multiple=True,
        metavar="SLO",
        help="A bound that must hold, for example ttft_p99=500ms; default: the run's. "
        "Repeatable.",
    ),
    CAPS,
    click.option(
        "--budget",
        type=DURATION,
        default="2m",
        show_default=True,
        metavar="TIME",
        help="Real time for the replays; of longer traffic parts are replayed.",
    ),
    JOBS,
)
"""What a re-tune in the shadow aims at, and what it may take."""


def as_usage_error(error: click.ClickException) -> TunerError:
    """Return click's complaint in our form."""
    hint = "see --help"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"see {error.ctx.command_path} --help"
    text = error.format_message().rstrip(".")
    return UsageError(text[:1].lower() + text[1:], hint)


TOKEN_VARIABLE = "PROMETHEUS_TOKEN"  # noqa: S105 - the name of a variable, not a token


def prometheus_options(since: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what adds the options of a query; `since` is how far back it looks by default."""
    return cloup.option_group(
        "Prometheus",
        click.option(
            "--since",
            type=DURATION,
            default=since,
            show_default=True,
            metavar="TIME",
            help="How far back to query Prometheus.",
        ),
        click.option(
            "--step",
            type=DURATION,
            default="30s",
            show_default=True,
            metavar="TIME",
            help="Resolution of the queries.",
        ),
        click.option(
            "--header",
            "headers",
            multiple=True,
            metavar="'NAME: VALUE'",
            help="Sent to Prometheus with every request; repeatable.",
        ),
        click.option(
            "--token-file",
            type=FILE,
            metavar="FILE",
            help=f"Bearer token for Prometheus; default: that of {TOKEN_VARIABLE}, if any.",
        ),
        click.option(
            "--no-verify", is_flag=True, help="Do not check Prometheus's certificate."
        ),
    )


def credentials(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of --header with the token of --token-file or the environment.

    The file is read anew each time: the token in it may be another one by now.

    Raises: UsageError.
    """
    headers = {}
    if token := _token(options["token_file"]):
        headers["Authorization"] = f"Bearer {token}"
    for header in options["headers"]:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            # The value may be a secret, and is not shown.
            raise UsageError("--header must look like 'NAME: VALUE'", "quote it as one word")
        headers[name.strip()] = value.strip()
    return headers


def _token(path: str | None) -> str:
    if not path:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--token-file {path} cannot be read: {reason}") from error
    if not token:
        raise UsageError(f"--token-file {path} is empty", "it must hold the bearer token")
    return token
