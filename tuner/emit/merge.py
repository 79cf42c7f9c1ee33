"""Change both limits in a YAML file of the user's, and leave all else as it stands there.

Comments, order, quotes and indentation survive: the file is read and written by ruamel.yaml,
and where that would still write a line anew that nobody changed, the user's line stays. A file
of JSON stays one. The change is shown as a diff in which secrets are hidden.
"""

from __future__ import annotations

import difflib
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import TaggedScalar
from ruamel.yaml.error import ReusedAnchorWarning, YAMLError

from tuner.emit.hiding import Secrets, hidden, in_comment, secrets_in
from tuner.emit.json_patch import operations
from tuner.errors import UsageError
from tuner.files import check_references

# YAML lets an anchor be given anew, which some generators do.
warnings.filterwarnings("ignore", category=ReusedAnchorWarning)

# How people indent a sequence below its key: (indent of its items, offset of the hyphen), and
# both again for mappings that are indented by four. The first that gives the file back is it.
_INDENTS: Final = ((2, 2, 0), (2, 4, 2), (2, 3, 1), (4, 4, 0), (4, 4, 2), (4, 6, 4), (4, 2, 0))
_OWN_REMARK: Final = re.compile(r"# tuned \d{4}-\d\d-\d\d\b")
_COMMENT: Final = re.compile(r"(?:^|(?<=\s))#[^\r\n]*", re.MULTILINE)
_UNKNOWN_TAG: Final = re.compile(r"a constructor for the tag '([^']+)'( in line \d+)?")
# Longer than any line of a command: the library would fold it otherwise. Ours.
_WIDTH: Final = 1_000_000

Edit = Callable[[list[Any]], list[str]]
"""Change documents in place and return what has to be said."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A file before and after the change, with notes on it."""

    name: str
    before: str
    after: str
    secrets: Secrets
    notes: tuple[str, ...]

    @property
    def diff(self) -> str:
        """The change as a unified diff; a secret beside it is hidden, and how lines end."""
        before, after = (
            hidden(_with_line_feeds(text), self.secrets) for text in (self.before, self.after)
        )
        lines = difflib.unified_diff(before, after, self.name, self.name, n=2)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    @property
    def has_secrets(self) -> bool:
        """Whether the file holds a secret itself, and not just where to find one."""
        return bool(self.secrets) or any(map(in_comment, _comments(self.after)))


def merge(path: Path, edit: Edit) -> Merged:
    """Return the file as it would be after the edit of its documents; nothing is written.

    Raises: UsageError if it cannot be read, is not YAML, or has no place for our keys.
    """
    before = _read(path)
    text = _with_line_feeds(before)
    write, documents = _loaded(path, text)
    plain = write(documents)
    secrets = secrets_in(*documents)
    notes = edit_named(path, edit, documents)
    wanted = write(documents)
    after = _kept(text, plain, wanted)
    if _values(after) != _values(wanted):
        after = wanted
    if not all(map(own_remark, _comments(text) - _comments(after))):
        raise UsageError(
            f"{path} cannot be changed without losing a comment of yours: expected one setting "
            "a line",
            "set both limits there by hand, or write its flow mappings as blocks",
        )
    return Merged(str(path), before, _with_ends_of(before, after), secrets, tuple(notes))


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file, without comments. Raises: UsageError."""
    try:
        return list(YAML(typ="safe", pure=True).load_all(_read(path)))
    except (YAMLError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _no_yaml(path, error) from None


def edit_named(path: Path, edit: Edit, documents: list[Any]) -> list[str]:
    """Edit a file's documents and return notes on it. Raises: UsageError, naming the file."""
    alone = _unshared(documents)
    try:
        edit(alone)
        notes = edit(documents)
    except UsageError as error:
        raise UsageError(f"{path} {error.message}", error.hint) from error
    made = [each for each in operations(alone, _unshared(documents)) if each["op"] != "test"]
    parts = dict.fromkeys(".".join(each["path"].split("/")[2:-1]) for each in made)
    # A template of Compose's counts where something refers to it, and not by itself.
    if also := [part for part in parts if not part.startswith("x-")]:
        notes.append(f"what refers to the same lines changes as well: {', '.join(also)}")
    return notes


def _unshared(node: Any) -> Any:  # noqa: ANN401 - any YAML
    """Return a document in which what stands there by reference (*name) is written out."""
    if isinstance(node, dict):
        return {key: _unshared(value) for key, value in node.items()}
    return [_unshared(value) for value in node] if isinstance(node, list) else node


def _with_line_feeds(text: str) -> str:
    """Return a text whose lines all end as those of Unix do."""
    return text.replace("\r\n", "\n")


def _with_ends_of(before: str, text: str) -> str:
    r"""Return a text in which lines end as they did before, and new ones as those above.

    >>> _with_ends_of("a\r\nb\nc", "a\nb\nc\nd\n")
    'a\r\nb\nc\nd\n'
    >>> _with_ends_of("a\nb\r\n", "a\nx\ny\n")
    'a\nx\r\ny\r\n'
    """
    theirs, ours = (re.split(r"(?<=\n)", each) for each in (before, text))
    ends = ["\r\n" if line.endswith("\r\n") else "\n" for line in theirs]
    # The last may have none.
    ends[-1] = ends[-2] if len(ends) > 1 else "\n"
    matcher = difflib.SequenceMatcher(
        None, [_with_line_feeds(line) for line in theirs], ours, autojunk=False
    )
    made: list[str] = []
    for _, i1, i2, j1, j2 in matcher.get_opcodes():
        for j in range(j1, j2):
            end = ends[max(0, min(i1 + j - j1, i2 - 1))]
            made.append(ours[j].replace("\n", end))
    return "".join(made)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _read(path: Path) -> str:
    hint = "name the YAML file that is to be changed after --merge"
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            text = handle.read()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not YAML: it is no text in UTF-8", hint) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error
    try:
        check_references(text)
    except ValueError as error:
        raise UsageError(f"{path} cannot be changed: {error}", hint) from None
    return text


def _loaded(path: Path, text: str) -> tuple[Callable[[list[Any]], str], list[Any]]:
    """Return the documents, and the writer that gives the file back best.

    Raises: UsageError if the text is not YAML.
    """
    if (document := _json_in(text)) is not None:
        return partial(_json_like, text), [document]
    tried: list[tuple[int, YAML, list[Any]]] = []
    for indents in _INDENTS:
        yaml = _library(text, indents)
        try:
            documents = list(yaml.load_all(text))
            dumped = _dumped(yaml, documents)
        except (YAMLError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise _no_yaml(path, error) from None
        changed = sum(1 for _ in difflib.unified_diff(_lines(text), _lines(dumped), n=0))
        tried.append((changed, yaml, documents))
        if not changed:
            break
    _, yaml, documents = min(tried, key=itemgetter(0))
    return partial(_dumped, yaml), documents


def _json_in(text: str) -> dict[str, Any] | None:
    """Return the mapping that a text is in JSON, None where it is none with each key once."""
    try:
        found = json.loads(text, object_pairs_hook=_with_each_key_once)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a mapping. Raises: ValueError if a key stands there twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands there twice")
    return made


def _json_like(text: str, documents: Sequence[Any]) -> str:
    r"""Return a document as JSON that is indented, and ends, as a text is.

    >>> _json_like('{\n\t"a": 1\n}\n', [{"b": 2}]), _json_like('{"a":1}', [{"b": 2}])
    ('{\n\t"b": 2\n}\n', '{"b":2}')
    """
    depth = re.search(r"\n([ \t]+)\S", text)
    blank = " " if re.match(r'\s*\{\s*"[^"]*":\s', text) else ""
    signs = ("," if depth else f",{blank}", f":{blank}")
    indent = depth and depth[1]
    made = json.dumps(documents[0], indent=indent, separators=signs, ensure_ascii=False)
    return made + text[len(text.rstrip()) :]


def _no_yaml(path: Path, error: Exception) -> UsageError:
    reason = _reason(error)
    if tag := _UNKNOWN_TAG.search(reason):
        return UsageError(
            f"{path} has the tag {tag[1]}{tag[2] or ''}, which only its own tool can read",
            "name what that tool makes of the file; a tag stays where --merge without --patch "
            "changes a file",
        )
    return UsageError(
        f"{path} is not YAML: {reason}",
        "a template is no YAML before it is filled in; name a file that is",
    )


def _library(text: str, indents: tuple[int, int, int]) -> YAML:
    yaml = YAML()
    mapping, sequence, offset = indents
    yaml.indent(mapping=mapping, sequence=sequence, offset=offset)
    yaml.width = _WIDTH
    yaml.preserve_quotes = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # takes a bool
    first = next((s for s in map(str.strip, text.split("\n")) if s and s[0] != "#"), "")
    yaml.explicit_start = first == "---" or first.startswith("--- ")
    return yaml


def _dumped(yaml: YAML, documents: Sequence[Any]) -> str:
    out = io.StringIO()
    yaml.dump_all(documents, out)
    return out.getvalue()


def _values(text: str) -> dict[str, Any] | list[Any]:
    """Return the mapping that a text is in JSON, else its documents of YAML, if any."""
    if (document := _json_in(text)) is not None:
        return document
    try:
        return [_comparable(each) for each in YAML().load_all(text)]
    except YAMLError:
        return []


def _comparable(node: Any) -> Any:  # noqa: ANN401 - any YAML
    """Return a document in which equal values with a tag are equal, too."""
    if isinstance(node, dict):
        return {key: _comparable(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_comparable(value) for value in node]
    if isinstance(node, TaggedScalar):
        return str(node.tag), str(node.value)
    return node


def own_remark(comment: str) -> bool:
    """Whether a comment at the end of a line is of this tool, which the next edit replaces.

    >>> own_remark("# tuned 2026-11-24, gain 12 %"), own_remark("# tuned for summer by Ann")
    (True, False)
    """
    return _OWN_REMARK.match(comment.lstrip()) is not None


def _comments(text: str) -> Counter[str]:
    """Return all comments, and what looks like one within a text: a hash behind a blank.

    JSON has none.
    """
    if _json_in(text) is not None:
        return Counter()
    return Counter(found.rstrip() for found in _COMMENT.findall(text))


def _reason(error: Exception) -> str:
    """Return the reason with its line, without the file's text: a secret may stand in it."""
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}" if mark is not None else ""
    problem = str(getattr(error, "problem", "") or "it cannot be read").split("\n")[0]
    if problem.startswith("found duplicate key"):
        problem = "a key stands there twice"
    return f"{problem}{place}"


def _kept(text: str, plain: str, wanted: str) -> str:
    """Return the user's text with the lines exchanged in which `wanted` differs from `plain`.

    `plain` is the text as the library writes it unchanged: what it wrote otherwise there, in
    indentation, blanks or breaks of a line, the user keeps around what is ours.
    """
    ours, theirs, new = _lines(plain), _lines(text), _lines(wanted)
    place = _places(ours, theirs)
    made: list[str] = []
    done = 0
    for i1, i2, j1, j2 in _hunks(ours, new, place):
        start, end = _span(i1, i2, place, theirs)
        moved = [_moved(line, ours[:i2], theirs, place) for line in new[j1:j2]]
        made.extend([*theirs[done:start], *moved])
        done = max(start, end)
    return "".join([*made, *theirs[done:]])


def _places(ours: list[str], theirs: list[str]) -> dict[int, int]:
    """Return where each line stands in the other text, alike but for its blanks.

    Between the signs of a flow mapping the user may have more of them, or none.
    """
    a, b = (["".join(line.split()) for line in lines] for lines in (ours, theirs))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return {block.a + i: block.b + i for block in blocks for i in range(block.size)}


def _hunks(
    ours: list[str], new: list[str], place: dict[int, int]
) -> list[tuple[int, int, int, int]]:
    """Return what differs, widened to lines that stand in the user's text as well."""
    hunks: list[tuple[int, int, int, int]] = []
    matcher = difflib.SequenceMatcher(None, ours, new, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        first, last = i1, i2
        while first > 0 and not (first in place and first < i2) and first - 1 not in place:
            first -= 1
        while first < last < len(ours) and last - 1 not in place and last not in place:
            last += 1
        wide = (first, last, j1 - (i1 - first), j2 + (last - i2))
        if hunks and wide[0] < hunks[-1][1]:
            before = hunks.pop()
            wide = (before[0], wide[1], before[2], wide[3])
        hunks.append(wide)
    return hunks


def _span(i1: int, i2: int, place: dict[int, int], theirs: list[str]) -> tuple[int, int]:
    """Return which of the user's lines a hunk replaces: none of their comments behind it."""
    behind = place.get(i1 - 1, -1) + 1
    if i1 == i2:
        return behind, behind
    start = place.get(i1, behind)
    if i2 - 1 in place:
        return start, place[i2 - 1] + 1
    end = place.get(i2, len(theirs))
    while end > start and theirs[end - 1].strip()[:1] in {"", "#"}:
        end -= 1
    return start, end


def _moved(line: str, above: list[str], theirs: list[str], place: dict[int, int]) -> str:
    """Return a new line with the indentation that the user gives its neighbours."""
    depth = _depth(line)
    known = [i for i in range(len(above)) if i in place and above[i].strip()]
    alike = [i for i in known if _depth(above[i]) == depth]
    # Items may stand as deep as the key below them, and the user's deeper than that.
    alike = [i for i in alike if _is_item(above[i]) == _is_item(line)] or alike or known
    if not alike or not line.strip():
        return line
    shift = _depth(theirs[place[alike[-1]]]) - _depth(above[alike[-1]])
    return " " * max(depth + shift, 0) + line.lstrip(" ")


def _is_item(line: str) -> bool:
    return line.lstrip(" ").startswith("- ")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
