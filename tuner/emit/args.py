"""A command line: one setting a line, in a file that a POSIX shell runs."""

from __future__ import annotations

import shlex

from tuner.emit.flags import flags
from tuner.emit.recommendation import Recommendation
from tuner.emit.target import Names


def write(rec: Recommendation, names: Names) -> str:
    """Return the command that serves the model, below its evidence as comments."""
    above = [line for text in rec.lines(f"sh {names.file}") for line in text.splitlines()]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in above)
    words = [f"vllm serve {shlex.quote(rec.model)}"]
    words.extend(shlex.quote(word) for word in flags(rec.flags_but()))
    return comments + " \\\n  ".join(words) + "\n"
