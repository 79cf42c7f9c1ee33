"""Find the secrets in a user's file, and show its lines without them.

A secret is known by the name beside it: that of its key, of the variable that it is the value
of, of the flag before it in a list or in a shell's line. Where to find a secret is none: the
name of a Kubernetes Secret, a variable that a shell or Compose puts in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tuner.emit.script import commands, starts
from tuner.redact import LOGIN_OPTIONS, REDACTED, is_login, is_secret, redacted, redacted_text

_FLAG: Final = re.compile(
    r"--(?P<key>[\w-]+)['\"]?(?:=|,?[ \t]+)['\"]?(?P<value>(?!\\$)[^\s'\",\]]+)"
)
_PAIR: Final = re.compile(r"[\s'\"-]*(?P<key>[\w.-]+)['\"]?\s*[:=]\s*(?P<value>[^\s#].*)")
# What says on a line of its own what the next line holds: a flag, the name of a variable.
_ANNOUNCED: Final = re.compile(r"[\s-]*(?:name\s*:\s*)?['\"]?(?:--)?(?P<key>[\w.-]+)['\"]?\s*")
_NAME: Final = re.compile(r"[\w.-]+")
_JSON: Final = re.compile(r"(?:--[\w-]+=)?['\"]?(?P<text>\s*[\[{].*?)['\"]?", re.DOTALL)
_VALUE: Final = re.compile(r"[^\s-][^\n]*")
# What Kubernetes, Compose or a shell puts the secret in for, or stops at: $A, $(A), ${A:?why}.
_REFERENCE: Final = re.compile(r"\$?\$(?:\([^()]*\)|\{\w+(?::?\?[^{}]*)?\}|\w+)")
_QUOTED_REDACTED: Final = re.compile(rf"(['\"]?){REDACTED}\1")
_POINTERS: Final = frozenset(
    {"secretKeyRef", "secretRef", "valueFrom", "secretName", "existingSecret"}
    | {"imagePullSecrets", "secretProviderClass", "key", "keys", "topologyKey"}
    | {"matchLabelKeys", "mismatchLabelKeys"}
)
"""Keys that say where a secret lies, or name something else. Source: Kubernetes, core/v1."""
_NO_VALUES: Final = frozenset({"", "none", "null", "true", "false", REDACTED})
_LISTS: Final = frozenset({"api-key"})
"""Flags that take more than one word. Source: vLLM, FrontendArgs, api_key."""


@dataclass(slots=True)
class Secrets:
    """What was found in a file: its secrets, and whether a text has others within.

    `seen` are the mappings and lists that were read, by identity and whether a secret's name
    stood before them.
    """

    values: set[str] = field(default_factory=set)
    has_others: bool = False
    seen: dict[tuple[int, bool], object] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.values) or self.has_others

    def are_in(self, text: str) -> bool:
        """Return whether a text has one of these, or another within."""
        return self.without(text) != text or _shows_others(text)

    def without(self, text: str) -> str:
        """Return a text in which each of the secrets is hidden, also where a line ends in it.

        >>> secrets_in({"api-key": "abc d"}).without("--api-key 'abc d' --seed 1")
        "--api-key '<redacted>' --seed 1"
        """
        parts = {part for each in self.values for part in _parts(each)}
        if not parts:
            return text
        longest_first = sorted(parts, key=len, reverse=True)
        found = "|".join(map(re.escape, longest_first))
        return re.sub(rf"(?<!\w)(?:{found})(?!\w)", REDACTED, text)


def secrets_in(*nodes: object) -> Secrets:
    """Return the secrets in documents of YAML, whatever library read them.

    >>> env = [{"name": "HF_TOKEN", "value": "abc"}, {"name": "KEY", "value": "$(A)"}]
    >>> secrets_in({"env": env, "args": ["--api-key", "d"]}).values == {"abc", "d"}
    True
    >>> bool(secrets_in({"secretKeyRef": {"name": "chat", "key": "api-key"}}))
    False
    """
    found = Secrets()
    for node in nodes:
        _read(node, found, named=False)
    return found


def hidden(text: str, secrets: Secrets) -> list[str]:
    r"""Return a text's lines as a log may hold them, comments too.

    >>> hidden("- --hf-token\n- abc\n# --api-key=d\n", Secrets())
    ['- --hf-token\n', '- <redacted>\n', '# --api-key=<redacted>\n']
    """
    shown: list[str] = []
    is_announced = False
    for line in secrets.without(text).splitlines(keepends=True):
        announced = _ANNOUNCED.fullmatch(line)
        is_value = is_announced and not (announced and announced["key"].startswith("-"))
        shown.append(_VALUE.sub(REDACTED, line, count=1) if is_value else _shown(line))
        is_announced = announced is not None and not is_value and is_secret(announced["key"])
    return shown


def in_comment(comment: str) -> bool:
    """Return whether a comment holds a secret itself, and not just where to find one.

    >>> in_comment("# --api-key abc"), in_comment("# --from-literal=api-key=$KEY")
    (True, False)
    """
    known = _REFERENCE.sub(REDACTED, comment)
    return _FLAG.sub(_without_value, known) != known or _shows_others(comment)


def _shown(line: str) -> str:
    """Return one line without what its own names call a secret, and without logins of URLs."""
    line = _FLAG.sub(_without_value, line)
    line = _PAIR.sub(_without_value, line, count=1) if _PAIR.match(line) else line
    return str(redacted({"line": line})["line"])


def _without_value(found: re.Match[str]) -> str:
    if not is_secret(found["key"]):
        return found.group()
    return found.group()[: found.start("value") - found.start()] + REDACTED


def _read(node: Any, found: Secrets, *, named: bool) -> None:  # noqa: ANN401 - any YAML
    """Note the secrets in a value; `named` says that its own key names a secret."""
    node = getattr(node, "value", node)  # as ruamel.yaml holds a text with a tag
    if isinstance(node, Mapping | list):
        if (id(node), named) in found.seen:
            return
        found.seen[id(node), named] = node
    if isinstance(node, Mapping):
        _read_mapping(node, found)
    elif isinstance(node, list):
        words = [str(item) for item in node if isinstance(item, str | int)]
        words = [word for word in words if not starts(word)]
        _note(_behind_names(words), found)
        for item in node:
            _read(item, found, named=named)
    elif isinstance(node, str | int | float) and not isinstance(node, bool):
        if named:
            _note([str(node)], found)
        if isinstance(node, str):
            _read_text(node, found)


def _read_mapping(node: Mapping[Any, Any], found: Secrets) -> None:
    is_variable = isinstance(node.get("name"), str) and is_secret(node["name"])
    for key, value in node.items():
        name = str(key)
        if name in _POINTERS or (name == "secrets" and isinstance(value, list)):
            continue
        if name == "secretKey" and "secretName" in node:
            continue
        if node.get("kind") == "Secret" and name in {"data", "stringData"}:
            _read([*value.values()] if isinstance(value, Mapping) else value, found, named=True)
            continue
        is_named = is_secret(name) or (is_variable and name == "value")
        _read(value, found, named=is_named and not isinstance(value, Mapping))


def _read_text(text: str, found: Secrets) -> None:
    """Note the secrets in a text: the words of a command line, or JSON."""
    if json_text := _JSON.fullmatch(text):
        try:
            _read(json.loads(json_text["text"]), found, named=False)
        except (ValueError, RecursionError):
            pass
        else:
            return
    for words in commands(text):
        bare = [_bare(word) for word in words]
        _note(_behind_names(bare), found)
        for word in bare:
            if word != text and (len(word.split()) > 1 or _JSON.fullmatch(word)):
                _read_text(word, found)
    found.has_others = found.has_others or _shows_others(text)


def _note(values: Iterable[str], found: Secrets) -> None:
    """Note values that are secrets themselves."""
    for value in map(_bare, values):
        if value.lower() not in _NO_VALUES and _REFERENCE.sub("", value).strip("'\"\\ "):
            found.values.add(value.strip())


def _behind_names(words: Sequence[str]) -> Iterator[str]:
    """Yield the words behind a flag that names a secret, and the values of variables."""
    taken, before = 0, ""
    for word in words:
        if before in LOGIN_OPTIONS and is_login(word):
            yield word
        before = word
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("_", "-")
        if equals and _NAME.fullmatch(key) and is_secret(key):
            yield value
        if name.startswith("-"):
            most = len(words) if key in _LISTS else 1
            taken = most if is_secret(key) and not equals else 0
        elif taken:
            yield word
            taken -= 1


def _shows_others(text: str) -> bool:
    """Whether a text has a login, a token or a header in it, and not just a reference."""
    known = _QUOTED_REDACTED.sub(REDACTED, _REFERENCE.sub(REDACTED, text))
    return _QUOTED_REDACTED.sub(REDACTED, redacted_text(known)) != known


def _bare(word: str) -> str:
    """Return a word without the pair of quotes around it."""
    is_quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if is_quoted else word


def _parts(value: str) -> list[str]:
    """Return a value and what of it stands on one line, wherever YAML folds or quotes it."""
    parts = [part for part in re.split(r"[\s'\"\\]+", value) if part]
    return parts if "\n" in value else [value, *parts]
