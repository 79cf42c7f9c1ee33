"""The values that options take, and how each is read from what was typed."""

from __future__ import annotations

import math
import os
import re
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
    from tuner.replay.slo import Slo

    return Slo.parse(text)


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


# Ours: far above what any engine bears of what another was recorded with.
_MOST_LOAD = 1_000_000


def _number(text: str) -> float:
    """Return a number, nan for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _load(text: str) -> float:
    load = _number(text.lower().removesuffix("x"))
    if not 0 < load < _MOST_LOAD:
        raise UsageError(
            f"must be a multiple above 0 and below {_MOST_LOAD:,}, got {text!r}",
            "for example 1.5",
        )
    return load


def _price(text: str) -> float:
    price = _number(text)
    if not 0 < price < math.inf:
        raise UsageError(f"must be a number above 0, got {text!r}", "for example 2.5")
    return price


# More would be no curve any more, but a slip of the pen: ours.
_MOST_LOADS = 200


def _loads(text: str) -> tuple[float, ...]:
    """Return the loads of a list of loads and ranges FROM:TO:STEP, ascending.

    >>> _loads("1,0.5:1:0.25,3x")
    (0.5, 0.75, 1.0, 3.0)
    """
    loads = sorted({load for part in text.split(",") for load in _load_range(part)})
    if len(loads) > _MOST_LOADS:
        raise UsageError(f"must be at most {_MOST_LOADS} loads, got {len(loads):,}")
    return tuple(loads)


def _load_range(text: str) -> list[float]:
    """Return the loads from the first to the last by a step, or the one that is named."""
    parts = [_load(part) for part in text.split(":")]
    if len(parts) == 1:
        return parts
    if len(parts) != 3 or parts[0] > parts[1]:
        raise UsageError(
            f"a range must be FROM:TO:STEP, got {text!r}", "for example 0.5:3:0.25"
        )
    first, last, step = parts
    steps = math.floor((last - first) / step + 1e-9)
    if steps > _MOST_LOADS:
        raise UsageError(f"must be at most {_MOST_LOADS} loads, got {text!r}")
    # Rounded, so that 0.1:1:0.1 holds 0.3 and not 0.30000000000000004.
    return [round(first + i * step, 9) for i in range(steps + 1)]


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def _size(text: str) -> int:
    """Return a number of bytes.

    >>> _size("64GiB"), _size("2 MB"), _size("512")
    (68719476736, 2000000, 512)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"must be a size, got {text!r}", "for example 64GiB")
    number, prefix, is_binary = found.groups()
    power = 0 if prefix is None else 1 + "KMGT".index(prefix.upper())
    return int(float(number) * (1024 if is_binary else 1000) ** power)


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


_UNSET = "a variable may be unset: leave the option out to go without it"


def _name(text: str) -> str:
    if not text.strip():
        raise UsageError("must not be empty", _UNSET)
    return text


class _NamedPath(click.Path):
    """A path with a name: an unset variable of a shell would stand for the folder it is in."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the path. Raises: UsageError for an empty name, or one that is no text."""
        names = param.opts if isinstance(param, click.Option) else ()
        what = max(names, key=len, default="") or (param and param.human_readable_name)
        if value == "":
            raise UsageError(f"{what} must not be empty", _UNSET)
        # What is no UTF-8 fits into no result, page or emitted file.
        if (told := os.fsencode(value).decode(errors="replace")) != os.fspath(value):
            raise UsageError(f"{what} must be a name in UTF-8, got {told}", "rename it")
        return super().convert(value, param, ctx)


DURATION = Parsed("duration", _duration)
WINDOW = Parsed("window", _window)
SLO = Parsed("slo", _slo)
LADDER = Parsed("caps", _ladder)
LOAD = Parsed("multiple", _load)
LOADS = Parsed("multiples", _loads)
PRICE = Parsed("price", _price)
SHARE = Parsed("share", _share)
SIZE = Parsed("size", _size)
NAMES = Parsed("names", lambda text: tuple(filter(None, map(str.strip, text.split(",")))))
NAME = Parsed("name", _name)
"""A name of something; an empty one would pass for an option that is left out."""
FILE = _NamedPath(readable=False)
"""A path as it was typed; a shell completes it, and who opens it says what is wrong with it."""
