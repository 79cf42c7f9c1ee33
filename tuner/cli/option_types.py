"""What the values of options are: durations, windows, bounds, lists and shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tuner.errors import UsageError


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
