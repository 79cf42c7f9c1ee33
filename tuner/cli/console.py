"""What the commands say: lines for people on standard error, the result on standard output.

The result is lines for people or one JSON object for programs. Secrets are left out of both,
and what a terminal would obey is shown and not sent: names of files and an engine's last words
come from strangers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import msgspec

from tuner.errors import TunerError
from tuner.redact import redacted_content, redacted_text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def showable(text: str) -> str:
    r"""Return a text as it may be shown.

    >>> showable("\x1b]0;title\x07 http://me:pw@host")
    '\\x1b]0;title\\x07 http://<redacted>@host'
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", redacted_text(text))


def say(text: str) -> None:
    """Write one line to standard error."""
    print(showable(text), file=sys.stderr, flush=True)  # noqa: T201 - this module is where we print


def say_error(error: TunerError) -> None:
    """Write an error and its hint."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint:  {error.hint}")


def json_text(content: object) -> str:
    """Return the content as JSON, indented, with a line's end."""
    shown = redacted_content(msgspec.to_builtins(content))
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n"


def show_result(content: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Write the result to standard output: the content as JSON, or else the lines."""
    text = json_text(content) if as_json else "".join(f"{showable(one)}\n" for one in lines)
    sys.stdout.write(text)
