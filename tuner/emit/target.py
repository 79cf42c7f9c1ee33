"""What every deployment target offers: a file, an edit of one that exists, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from tuner.emit.recommendation import Recommendation

NAME: Final = "--name"
CONTAINER: Final = "--container"


@dataclass(frozen=True, slots=True)
class Names:
    """How the user calls things; empty: as the target would call them itself."""

    file: str = ""
    workload: str = ""
    container: str = ""

    def given(self) -> dict[str, str]:
        """Return the names that the user gave, by the options that give them."""
        named = {NAME: self.workload, CONTAINER: self.container}
        return {option: name for option, name in named.items() if name}


Write = Callable[[Recommendation, Names], str]
"""Return the text of the target's file. Raises: UsageError if it cannot hold this."""

Edit = Callable[[list[Any], Recommendation, Names], list[str]]
"""Set both limits in a file's YAML documents, in place, and return what has to be said.

Nothing but our own keys changes. Raises: UsageError, whose message goes on after the file's
name, if there is no place for them.
"""


class ApiKey(Enum):
    """What the server of a target's file does with an api-key that the configuration has."""

    HELD = auto()
    """The file holds the key itself."""
    REQUIRED = auto()
    """The file refers to a place outside, and the server does not start without the key."""
    IGNORED = auto()
    """Nothing in the file can bring the server to ask for one."""


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment target; None where it has no such form."""

    file_name: str
    """What its file is usually called."""
    write: Write | None
    edit: Edit | None = None
    api_key: ApiKey = ApiKey.REQUIRED
    is_object: bool = False
    """Whether what is edited is an object of Kubernetes, which can be patched."""
    names: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Options of names: those that go into a file that is written, and those that choose what
    of an existing one is edited."""
