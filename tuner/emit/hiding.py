"""Show lines of a user's file without the secrets that stand in them."""

from __future__ import annotations

import re
from typing import Final

from tuner.redact import REDACTED, is_secret, redacted

_FLAG: Final = re.compile(r"--(?P<key>[\w-]+)['\"]?(?:=|,?[ \t]+)['\"]?(?P<value>[^\s'\",\]]+)")
_PAIR: Final = re.compile(r"[\s'\"-]*(?P<key>[\w.-]+)['\"]?\s*[:=]\s*(?P<value>[^\s#].*)")
# What says on a line of its own what the next line holds: a flag, the name of a variable.
_ANNOUNCED: Final = re.compile(r"[\s-]*(?:name\s*:\s*)?['\"]?(?:--)?(?P<key>[\w.-]+)['\"]?\s*")
# A variable that Kubernetes, Compose or a shell puts the secret in for.
_REFERENCE: Final = re.compile(r"\$(?:\(\w+\)|\{\w+\}|\w+)")
_VALUE: Final = re.compile(r"[^\s-][^\n]*")


def hidden(lines: list[str]) -> list[str]:
    r"""Return the lines as a log may hold them: secrets known by the names beside them.

    >>> hidden(["- --api-key=abc\n", "- --hf-token\n", "- abc\n", "- --max-num-seqs=8\n"])
    ['- --api-key=<redacted>\n', '- --hf-token\n', '- <redacted>\n', '- --max-num-seqs=8\n']
    """
    shown: list[str] = []
    is_announced = False
    for line in lines:
        announced = _ANNOUNCED.fullmatch(line)
        is_value = is_announced and not (announced and announced["key"].startswith("-"))
        shown.append(_VALUE.sub(REDACTED, line, count=1) if is_value else _shown(line))
        is_announced = announced is not None and not is_value and is_secret(announced["key"])
    return shown


def has_secret(text: str) -> bool:
    """Return whether a text holds a secret itself, and not just where to find one.

    >>> has_secret("vllm serve m --api-key abc"), has_secret("vllm serve m --api-key $KEY")
    (True, False)
    """
    lines = _REFERENCE.sub(REDACTED, text).splitlines(keepends=True)
    return hidden(lines) != lines


def _shown(line: str) -> str:
    """Return one line without what its own names call a secret, and without logins of URLs."""
    line = _FLAG.sub(_without_value, line)
    line = _PAIR.sub(_without_value, line, count=1) if _PAIR.match(line) else line
    return str(redacted({"line": line})["line"])


def _without_value(found: re.Match[str]) -> str:
    if not is_secret(found["key"]):
        return found.group()
    return found.group()[: found.start("value") - found.start()] + REDACTED
