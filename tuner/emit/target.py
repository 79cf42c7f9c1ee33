"""What every deployment target offers: a file, perhaps a patch, perhaps an edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tuner.emit.recommendation import Recommendation


@dataclass(frozen=True, slots=True)
class Names:
    """How the user calls things; empty: as the target would call them itself."""

    file: str = ""
    workload: str = ""
    container: str = ""


Write = Callable[[Recommendation, Names], str]
"""Return the text of the target's file. Raises: UsageError if it cannot hold this."""

Patch = Callable[[Recommendation, Names], dict[str, Any]]
"""Return the changed fields of an existing object, with its apiVersion, kind and name."""

Edit = Callable[[list[Any], Recommendation, Names], list[str]]
"""Set both limits in a file's YAML documents, in place, and return what has to be said.

Nothing but our own keys changes. Raises: UsageError, whose message goes on after the file's
name, if there is no place for them.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment target; None where it has no such form."""

    file_name: str
    """What its file is usually called."""
    write: Write
    patch: Patch | None = None
    edit: Edit | None = None
