"""A configuration as words of vLLM's command line, and the command as a file of its own.

The words serve every target that takes arguments; `--format args` writes them below their
evidence.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Final

from tuner.emit.recommendation import API_KEY, API_KEY_ENV, Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import commented
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


def one_key_note(rec: Recommendation) -> list[str]:
    """Return what becomes of a list of api-keys, which no variable can hold."""
    keys = rec.settings.get(API_KEY)
    if not isinstance(keys, list) or len(keys) < 2:
        return []
    return [f"{API_KEY} lists {len(keys)} keys, and {API_KEY_ENV} holds one of them"]


ASKED: Final = f"set it to the {API_KEY} that clients send"
"""What a shell, or Compose, says where the key is not set, or empty."""


def write(rec: Recommendation, names: Names) -> str:
    """Return the command that serves the model, below its evidence as comments.

    A required api-key is asked for within the command itself: a line of its own would not stop
    the next one where both are pasted into a terminal.
    """
    notes = one_key_note(rec) if rec.requires_api_key else []
    words = [f"vllm serve {shlex.quote(rec.model)}"]
    if rec.requires_api_key:
        words.insert(0, f'{API_KEY_ENV}="${{{API_KEY_ENV}:?{ASKED}}}"')
    words.extend(shlex.quote(word) for word in flags(rec.flags_but()))
    return commented(rec.lines(f"sh {names.file}", notes)) + " \\\n  ".join(words) + "\n"
