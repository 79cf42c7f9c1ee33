"""Files as every part treats them: replaced whole, locked, and YAML without a key twice.

Owns YAML's reading, so that a key that stands twice is refused wherever it stands.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from filelock import FileLock, Timeout

from tuner.errors import UsageError

# What PyYAML's constructors run into and let through, as with `!!int x`.
_RAN_INTO: Final = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)

UNREADABLE: Final = (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeDecodeError)
"""What msgspec raises for a text that it cannot decode, or not as what it was to be."""


class ChangedMeanwhileError(UsageError):
    """The file is no longer what the new text was made from; it was left alone."""


@dataclass(frozen=True, slots=True)
class ExpectedText:
    """The text that a file must still have; None where there must be no file."""

    text: str | None

    def is_in(self, path: Path) -> bool:
        """Return whether the file has just this text."""
        if self.text is None:
            return not path.exists()
        try:
            return path.read_bytes() == self.text.encode()
        except OSError:
            return False


def write_atomic(
    path: Path,
    content: str | bytes,
    *,
    secret: bool = False,
    expected: ExpectedText | None = None,
    hint: str = "name another file after -o, or free space there",
) -> None:
    """Write the file whole or not at all: what stood there before survives a full disk.

    With a secret inside, only the owner may read it (mode 0600), from the first byte on. A
    target that is no regular file, as /dev/stdout, is written to as it is. Where a text is
    `expected`, the file is read again right before the new one takes its place; an edit within
    the microseconds between the two would be lost, as no file system compares and renames in
    one.

    Raises: UsageError, with the hint, if the file cannot be written; ChangedMeanwhileError if
        it is not as expected.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            target = path.resolve()
            _replace(target, data, 0o600 if secret else _usual_mode(target), expected)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", hint
        ) from error


def _replace(target: Path, data: bytes, mode: int, expected: ExpectedText | None) -> None:
    """Put a finished copy in the target's place, within its folder so that a rename does it."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as copy:
            copy.write(data)
            copy.flush()
            os.fchmod(copy.fileno(), mode)
            os.fsync(copy.fileno())
        _check_still(target, expected)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _check_still(target: Path, expected: ExpectedText | None) -> None:
    """Refuse a file that is not as expected. Raises: ChangedMeanwhileError."""
    if expected is not None and not expected.is_in(target):
        raise ChangedMeanwhileError(
            f"{target} was changed by others meanwhile and is left alone",
            "run it again: it starts from the file as it is now",
        )


def _usual_mode(target: Path) -> int:
    """Return the mode the file has, or the one a new file gets."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def lock(path: Path, taken: str, hint: str) -> FileLock:
    """Return a lock that others cannot have until it is released, or this process ends.

    Raises: UsageError that says it is taken, with the hint; OSError if it cannot be made.
    """
    held = FileLock(path, timeout=0, mode=0o600, thread_local=False)
    try:
        held.acquire()
    except Timeout as error:
        raise UsageError(taken, hint) from error
    return held


def parse_yaml(content: str | bytes) -> Any:  # noqa: ANN401 - whatever it holds
    """Return what YAML says, as UTF-8; a key that stands twice is an error, not the last one.

    Raises: ValueError with the reason and its line, without the text: a secret may stand in it.

    >>> parse_yaml("max-num-seqs: 8")
    {'max-num-seqs': 8}
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, *_RAN_INTO) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        unknown = "it holds a character, a date or a nesting that YAML cannot read"
        raise ValueError(f"{getattr(error, 'problem', None) or unknown}{place}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, but a key that stands twice is an error and not the last one."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 - PyYAML's own signature
    ) -> dict[Any, Any]:
        """Return the mapping, or refuse it if a key stands in it twice."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        mapping = super().construct_mapping(node, deep=deep)
        for name in names:
            if name != "<<" and names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {name} stands twice", problem_mark=node.start_mark
                )
        return mapping
