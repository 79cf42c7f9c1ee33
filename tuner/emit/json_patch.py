"""The difference between two documents as a JSON patch that refuses any other document.

Kubernetes replaces a list of arguments whole wherever a patch is merged, so that what the
writer of the patch did not know of is gone: an api-key, say. The operations of a JSON patch
name single words of a list. Each word that is replaced is tested before, and the name of the
object in a list that it belongs to; a new list or mapping is tested to be missing. Where the
document has changed there since, the patch is refused as a whole and nothing happens.

Source: RFC 6902; evanphx/json-patch, by which kubectl, the API server and Kustomize apply one
    and a test for null holds where there is no such member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Final

Operation = dict[str, Any]

_APPEND: Final = "-"
_NAME: Final = "name"


def operations(before: object, after: object, path: str = "") -> list[Operation]:
    """Return the operations that make one document of another.

    >>> for each in operations({"args": ["-a", "--n", "4"]}, {"args": ["-a", "--n", "8"]}):
    ...     print(*each.values())
    test /args/1 --n
    test /args/2 4
    replace /args/2 8
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return _of_mapping(before, after, path)
    if isinstance(before, list) and isinstance(after, list):
        return _of_list(before, after, path)
    if before == after:
        return []
    return [_test(path, before), {"op": "replace", "path": path, "value": after}]


def _of_mapping(
    before: Mapping[str, object], after: Mapping[str, object], path: str
) -> list[Operation]:
    made: list[Operation] = []
    for key in dict.fromkeys([*before, *after]):
        at = f"{path}/{_escaped(str(key))}"
        if key not in after:
            made += [_test(at, before[key]), {"op": "remove", "path": at}]
        elif key in before:
            made += operations(before[key], after[key], at)
        else:
            # One that has come since would be replaced, with all that lies in it.
            whole = isinstance(after[key], Mapping | list)
            made += [_test(at, None)] if whole else []
            made.append({"op": "add", "path": at, "value": after[key]})
    return made


def _of_list(before: Sequence[Any], after: Sequence[Any], path: str) -> list[Operation]:
    """Return the operations on a list, the last place first: none moves the next one's."""
    texts = [repr(item) for item in before], [repr(item) for item in after]
    matcher = SequenceMatcher(None, *texts, autojunk=False)
    made: list[Operation] = []
    for kind, i1, i2, j1, j2 in reversed(matcher.get_opcodes()):
        if kind == "equal":
            continue
        old, new = before[i1:i2], after[j1:j2]
        both = min(len(old), len(new))
        made += _inserted(new[both:], i1 + both, before, path)
        made += _removed(before, range(i1 + both, i2), path)
        for place in reversed(range(both)):
            made += _changed(before, i1 + place, new[place], path)
    return made


def _changed(before: Sequence[Any], place: int, new: object, path: str) -> list[Operation]:
    """Return the operations on one item, behind a test of what it is known by."""
    at, old = f"{path}/{place}", before[place]
    if isinstance(old, Mapping) and _NAME in old:
        known = [_test(f"{at}/{_NAME}", old[_NAME])]
    else:
        known = _flag_before(before, place, path)
    return [*known, *operations(old, new, at)]


def _removed(before: Sequence[Any], places: range, path: str) -> list[Operation]:
    made: list[Operation] = []
    for place in reversed(places):
        at = f"{path}/{place}"
        made += [_test(at, before[place]), {"op": "remove", "path": at}]
    return made


def _inserted(
    items: Sequence[Any], place: int, before: Sequence[Any], path: str
) -> list[Operation]:
    """Return the operations that put items in before a place, or behind the last one."""
    if place >= len(before):
        return [{"op": "add", "path": f"{path}/{_APPEND}", "value": item} for item in items]
    at = f"{path}/{place}"
    added = [{"op": "add", "path": at, "value": item} for item in reversed(items)]
    return [_test(at, before[place]), *added] if added else []


def _flag_before(before: Sequence[Any], place: int, path: str) -> list[Operation]:
    """Return the test of the flag that a value belongs to: `256` alone may be any flag's."""
    word, flag = before[place], before[place - 1] if place else None
    if not isinstance(word, str) or word.startswith("-"):
        return []
    if not isinstance(flag, str) or not flag.startswith("--") or "=" in flag:
        return []
    return [_test(f"{path}/{place - 1}", flag)]


def _test(path: str, value: object) -> Operation:
    return {"op": "test", "path": path, "value": value}


def _escaped(key: str) -> str:
    """Return a key as a JSON pointer holds it. Source: RFC 6901."""
    return key.replace("~", "~0").replace("/", "~1")
