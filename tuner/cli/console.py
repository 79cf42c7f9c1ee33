"""What the commands say: lines for people on standard error, the result on standard output.

The result is lines for people or one JSON object for programs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from tuner.errors import TunerError


def say(text: str) -> None:
    """Write one line to standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - this module is where we print


def say_error(error: TunerError) -> None:
    """Write an error and its hint."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint:  {error.hint}")


def json_text(content: object) -> str:
    """Return the content as JSON, indented, with a line's end."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def show_result(content: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Write the result to standard output: the content as JSON, or else the lines."""
    sys.stdout.write(json_text(content) if as_json else "\n".join(lines) + "\n")
