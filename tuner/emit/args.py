"""A command line: one setting a line, in a file that a POSIX shell runs."""

from __future__ import annotations

import shlex
from typing import Final

from tuner.emit import container
from tuner.emit.flags import flags
from tuner.emit.recommendation import API_KEY, API_KEY_ENV, Recommendation
from tuner.emit.target import Names

ASKED: Final = f"set it to the {API_KEY} that clients send"
"""What a shell, or Compose, says where the key is not set, or empty."""


def write(rec: Recommendation, names: Names) -> str:
    """Return the command that serves the model, below its evidence as comments.

    A required api-key is asked for within the command itself: a line of its own would not stop
    the next one where somebody pastes both into a terminal.
    """
    notes = container.one_key_note(rec) if rec.requires_api_key else []
    above = [
        line for text in rec.lines(f"sh {names.file}", notes) for line in text.splitlines()
    ]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in above)
    words = [f"vllm serve {shlex.quote(rec.model)}"]
    if rec.requires_api_key:
        words.insert(0, f'{API_KEY_ENV}="${{{API_KEY_ENV}:?{ASKED}}}"')
    words.extend(shlex.quote(word) for word in flags(rec.flags_but()))
    return comments + " \\\n  ".join(words) + "\n"
