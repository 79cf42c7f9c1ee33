"""Options that say how Prometheus is asked, and the credentials that they name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from tuner.cli.option_types import DURATION
from tuner.cli.options import Command, stacked
from tuner.errors import UsageError

TOKEN_VARIABLE = "PROMETHEUS_TOKEN"  # noqa: S105 - the name of a variable, not a token


def prometheus_options(since: str) -> Callable[[Command], Command]:
    """Return what adds the options; `since` is how far back to look unless it is said."""
    return stacked(
        click.option(
            "--since",
            type=DURATION,
            default=since,
            show_default=True,
            metavar="TIME",
            help="How far back Prometheus is asked.",
        ),
        click.option(
            "--step",
            type=DURATION,
            default="30s",
            show_default=True,
            metavar="TIME",
            help="Resolution of what Prometheus is asked.",
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
