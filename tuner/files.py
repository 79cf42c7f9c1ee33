"""Files as every part treats them: replaced whole, locked, and YAML without a key twice.

Of the system's own files it reads how much memory is free.

Owns YAML's reading, so that a key that stands twice is refused wherever it stands.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec
import yaml
from filelock import FileLock, Timeout

from tuner.errors import UsageError

# What PyYAML's constructors run into and let through, as with `!!int x`.
_RAN_INTO: Final = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)

UNREADABLE: Final = (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError)
"""What msgspec raises for a text that it cannot decode, or not as what it was to be."""

_T = TypeVar("_T")

MAX_REFERRED: Final = 10_000
"""Ours: many times what people repeat by a reference; each line may stand for ten times the one
before, and what is made of it is written out."""

MAX_NESTING: Final = 100
"""Ours: manifests nest twenty deep, and YAML's readers take time by the square."""
_BRACKETS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}

_COPY: Final = ".tune-copy"
_SCRATCH: Final = "tune-scratch-"
LEFT_AFTER_S: Final = 600.0
"""Ours: between making a folder and locking it lie microseconds."""


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


def read_json(path: Path, kind: type[_T], hint: str) -> _T:
    """Return a JSON file's content.

    Raises: UsageError, with the hint, if the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint) from error


def write_atomic(
    path: Path,
    content: str | bytes,
    *,
    secret: bool = False,
    source: Path | None = None,
    expected: ExpectedText | None = None,
    hint: str = "name another file after -o, or free space there",
) -> None:
    """Write the file whole or not at all: what stood there before survives a full disk.

    Raises: UsageError, with the hint, if the file cannot be written; ChangedMeanwhileError if
        it is not as expected.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, secret=secret, source=source, expected=expected, hint=hint) as file:
        file.write(data)


_STREAMS: Final = {"-": 1, "/dev/stdout": 1, "/dev/fd/1": 1, "/dev/stderr": 2, "/dev/fd/2": 2}


def is_no_file(path: Path) -> bool:
    """Whether a path stands for a stream or another device, which has no name of its own."""
    return str(path) in _STREAMS or str(path).startswith("/dev/")


@contextlib.contextmanager
def replacing(
    path: Path,
    *,
    secret: bool = False,
    source: Path | None = None,
    expected: ExpectedText | None = None,
    hint: str = "name another file after -o, or free space there",
) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of the named one once the block has ended well.

    With a secret inside, only the owner may read it (mode 0600), from the first byte on, and a
    changed copy of a `source` is open to nobody to whom that is closed. A target that is no
    regular file is written to as it is; "-" is standard output, and that, as /dev/stdout too,
    is written to behind what stands where it leads. Where a text is `expected`, the file is
    read again right before the new one takes its place; an edit within the microseconds
    between the two would be lost, as no file system compares and renames in one.

    Raises: UsageError, with the hint, if the file cannot be written; ChangedMeanwhileError if
        it is not as expected.
    """
    stream = _STREAMS.get(str(path))
    try:
        if stream is not None:
            sys.stdout.flush()
            with os.fdopen(os.dup(stream), "wb") as file:
                yield file
        elif path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
        else:
            target = _resolved(path)
            mode = 0o600 if secret else _usual_mode(target)
            if source is not None:
                mode &= 0o600 | stat.S_IMODE(source.stat().st_mode)
            with _copy_for(target, mode, expected) as copy:
                yield copy
    except OSError as error:
        if stream is not None and isinstance(error, BrokenPipeError):
            raise
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", hint
        ) from error


def _resolved(path: Path) -> Path:
    """Return where links lead to. Raises: OSError if that is nowhere."""
    try:
        return path.resolve()
    except RuntimeError as loop:  # as Python before 3.13 calls it
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from loop


@contextlib.contextmanager
def _copy_for(target: Path, mode: int, expected: ExpectedText | None) -> Iterator[IO[bytes]]:
    """Give a copy that is put in the target's place, from its folder so that a rename does it.

    The folder is on disk too when the block has ended, so that no power loss takes it back.
    """
    handle, name = _own_copy(target)
    try:
        with os.fdopen(handle, "wb") as copy:
            yield copy
            copy.flush()
            os.fchmod(copy.fileno(), mode)
            os.fsync(copy.fileno())
            _check_still(target, expected)
            Path(name).replace(target)  # while it is locked
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Where a file system cannot, the file is no less whole.
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)


def _own_copy(target: Path) -> tuple[int, str]:
    """Return a new copy, open and locked, and its path; remove what killed processes left.

    No lock outlives its process: a copy that can be locked is nobody's any more.
    """
    prefix = f".{target.name}."
    for left in target.parent.glob(f"{glob.escape(prefix)}*{_COPY}"):
        # One that stays is somebody else's, in use, or gone by now.
        with contextlib.suppress(OSError), _locked(left, os.O_NONBLOCK):
            left.unlink()
    while True:
        handle, name = tempfile.mkstemp(_COPY, prefix, target.parent)
        if _is_kept(handle):
            return handle, name
        os.close(handle)


def _is_kept(handle: int) -> bool:
    """Lock a new copy; return whether nobody else took it for left before it was locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # without locks, nobody takes a copy for left either
        return True
    return os.fstat(handle).st_nlink > 0


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


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a folder for temporary files; those of processes that were killed are removed.

    The folder is locked for as long as it is used, and no lock outlives its process.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or gone by now
            _remove_left(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH) as name:
        folder = Path(name)
        with _locked(folder, os.O_DIRECTORY):
            yield folder


@contextlib.contextmanager
def log_folder(prefix: str) -> Iterator[Path]:
    """Give a folder for logs, which stays only if the block fails: then messages name it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """Remove a folder that nothing uses. Raises: OSError, BlockingIOError if something does."""
    made = folder.lstat()
    is_own = stat.S_ISDIR(made.st_mode) and made.st_uid == os.geteuid()
    if is_own and time.time() - made.st_mtime > LEFT_AFTER_S:
        with _locked(folder, os.O_DIRECTORY):
            shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | kind)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


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

    Raises: ValueError with the reason and its line, without the text: a secret may stand in it;
        and for what nests too deep, or references that stand for too much.

    >>> parse_yaml("max-num-seqs: 8")
    {'max-num-seqs': 8}
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        _check_nesting(text)
        loader = _UniqueKeyLoader(text)
        try:
            root = loader.get_single_node()
            _check_references([root] if root is not None else [])
            return None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except (yaml.YAMLError, *_RAN_INTO) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        unknown = "it holds a character, a date or a nesting that YAML cannot read"
        raise ValueError(f"{getattr(error, 'problem', None) or unknown}{place}") from None


def check_references(text: str) -> None:
    """Refuse YAML that nests deep, or whose references stand for very many values.

    What is no YAML passes: who reads it says so.

    Raises: ValueError.
    """
    try:
        _check_nesting(text)
        try:
            roots = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        except (yaml.YAMLError, *_RAN_INTO):
            return
        _check_references(roots)
    except yaml.YAMLError as error:
        raise ValueError(str(getattr(error, "problem", error))) from None


def _check_nesting(text: str) -> None:
    """Refuse brackets within brackets beyond what people write. Raises: ConstructorError.

    Those in texts count as well, which are closed there as a rule.
    """
    depth = 0
    for bracket in re.findall(r"[\[{}\]]", text):
        depth = max(0, depth + _BRACKETS[bracket])
        if depth > MAX_NESTING:
            raise yaml.constructor.ConstructorError(
                problem=f"it nests deeper than {MAX_NESTING} levels"
            )


def _check_references(roots: Sequence[yaml.Node]) -> None:
    """Refuse what a few lines stand for if it is much. Raises: ConstructorError."""
    sizes: dict[int, int] = {}
    total = sum(_size(root, sizes) for root in roots)
    if total - len(sizes) > MAX_REFERRED:
        raise yaml.constructor.ConstructorError(
            problem=f"its references (*name) stand for more than {MAX_REFERRED:,} values",
            problem_mark=roots[0].start_mark,
        )


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many values a node stands for. Raises: ConstructorError if it holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = 0
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inside = [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            inside = node.value
        sizes[id(node)] = 1 + sum(_size(one, sizes) for one in inside)
    if not sizes[id(node)]:
        raise yaml.constructor.ConstructorError(
            problem="a reference (*name) stands within what it refers to",
            problem_mark=node.start_mark,
        )
    return sizes[id(node)]


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, but a key that stands twice is an error and not the last one."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 - PyYAML's own signature
    ) -> dict[Any, Any]:
        """Return the mapping, or refuse it if a key stands in it twice."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        mapping = super().construct_mapping(node, deep=deep)
        seen = {"<<"}
        for key in keys:
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value} stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return mapping


# What holds the limit of a container and what is used of it; of that a part can be dropped.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return how much memory this process may still take, of the machine or its container.

    Without end where the system does not tell.

    Source: proc(5), MemAvailable; cgroups(7), version 2 and 1: a container sees its own.
    """
    free = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # there is none
        free.append(1024.0 * _field(meminfo, "MemAvailable:"))
    for limit, used, parts, droppable in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            left = int((groups / limit).read_text()) - int((groups / used).read_text())
            free.append(float(left + _field(groups / parts, droppable)))
    return max(0.0, min(free))


def _field(path: Path, name: str) -> int:
    """Return the number behind a name. Raises: OSError, ValueError."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")
