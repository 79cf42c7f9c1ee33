"""A configuration as the words of vLLM's command line, for targets that take arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tuner.engine.serve_config import to_argv


def flags(values: Mapping[str, object]) -> list[str]:
    """Return the words of a command line, each value in one word with its flag.

    One line of a file is then one setting, and a value that begins with a hyphen is no flag.

    >>> flags({"max-num-seqs": 8, "enforce-eager": True, "middleware": ["a", "b"]})
    ['--max-num-seqs=8', '--enforce-eager', '--middleware', 'a', 'b']
    """
    made: list[str] = []
    for key, value in values.items():
        words = to_argv({key: _compact(value)})
        made.extend(["=".join(words)] if len(words) == 2 else words)
    return made


def _compact(value: object) -> object:
    """Return a mapping as JSON without spaces: some targets split their line at them."""
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    return value


def without_expansion(words: list[str]) -> list[str]:
    """Return the words with every dollar doubled, so that $(NAME) reaches vLLM as it stands.

    Source: Kubernetes, k8s.io/kubernetes/third_party/forked/golang/expansion; Docker Compose,
        interpolation of the Compose specification. Both read $$ as one dollar.

    >>> without_expansion(["--chat-template=$(A)"])
    ['--chat-template=$$(A)']
    """
    return [word.replace("$", "$$") for word in words]
