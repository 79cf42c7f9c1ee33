"""Inputs made of real samples by changing their structure: values, keys, rows, cells, nodes.

What a byte flipped at random hardly ever reaches: a file that still parses, and in which one
thing is not as its reader expects. One input in seven is damaged as bytes all the same.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import sys
from collections.abc import Callable
from typing import Any, Final

import yaml

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, 1e-300, 1e16, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", " ", "0", "-1", "nan", "1e999", "1_000", "NaN", "inf", "true", "null", "\0", "\n"),
    *("\ud800", "\u202e", "[red]", "[/]", "<b>", "../../etc/passwd", "%s%n", "a" * 5000),
    *([], {}, [[]], [None], {"": None}, {"__proto__": 1}, [0] * 300, "1" * 5000),
)
CELLS: Final = (
    *("", "-1", "0", "1e308", "inf", "nan", "9" * 400, "1.5.2", '"', '""', "'", "=1+1", "\0"),
    *("2023-11-16 18:15:46.6805900", "2023-13-45 99:99:99", "0001-01-01", "x" * 3000, "1,5"),
    *("\ufeff", "\ud83d\ude00", "1e-400", "0x10", "١٢٣", "None", "-0", "+5", "1_0"),
)
YAML_TEXTS: Final = (
    *("!!python/object/apply:os.system ['true']\n", "? [a, b]\n: c\n", "<<: *x\n", "\t- a\n"),
    *("a: &a [x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n", "--- \n...\n---\n"),
    *(
        "- - - - - - - - - -\n",
        "key: |2\n x\n",
        "a: 1\na: 2\n",
        "%YAML 9.9\n---\n",
        "a: !!int x\n",
    ),
    "".join(
        f"k{n}: &n{n} [{', '.join([f'*n{n - 1}'] * 9) if n else '1'}]\n" for n in range(12)
    ),
    "[" * 2000,
    "{a: " * 800,
)

Change = Callable[[random.Random, Any], Any]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return an input made of a sample, as its kind asks for."""
    rounds = 1 if rng.random() < 0.7 else rng.randrange(2, 6)
    for _ in range(rounds):
        data = _once(rng, data)
    kind = rng.random()
    if kind >= 0.02:
        return data
    packed = gzip.compress(data, mtime=0) if kind < 0.01 else zstd.compress(data)
    return _damaged(rng, packed) if rng.random() < 0.5 else packed


def _once(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 1 / 7:
        return _damaged(rng, data)
    head = data.lstrip()[:1]
    try:
        text = data.decode()
        if head in (b"{", b"["):
            return _document(rng, text) if _is_document(text) else _lines(rng, text)
        if head and b"," in data.split(b"\n", 1)[0] and b": " not in data.split(b"\n", 1)[0]:
            return _table(rng, text)
        return _yaml(rng, text)
    except (ValueError, yaml.YAMLError, RecursionError, csv.Error):
        return _damaged(rng, data)


def _is_document(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _document(rng: random.Random, text: str) -> bytes:
    return _encoded(changed(rng, json.loads(text)))


def changed(rng: random.Random, tree: Any) -> Any:
    """Return a tree of values in which one node is another."""
    nodes = _nodes(tree)
    if not nodes:
        return rng.choice(HOSTILE)
    parent, key = rng.choice(nodes)
    change = rng.choice(CHANGES)
    change(rng, (parent, key))
    return tree


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Return every place of a tree, as its parent and the key there."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        node = left.pop()
        keys = (
            list(node) if isinstance(node, dict) else range(len(node)) if _is_list(node) else ()
        )
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _replace(rng: random.Random, place: Any) -> None:
    place[0][place[1]] = rng.choice(HOSTILE)


def _drop(_: random.Random, place: Any) -> None:
    del place[0][place[1]]


def _scale(rng: random.Random, place: Any) -> None:
    value = place[0][place[1]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        place[0][place[1]] = value * rng.choice((-1, 0, 2, 10, 1000, 10**6, 10**12, 1e-6))
    else:
        _replace(rng, place)


def _as_text(_: random.Random, place: Any) -> None:
    value = place[0][place[1]]
    place[0][place[1]] = value if isinstance(value, str) else json.dumps(value)[:2000]


def _rename(rng: random.Random, place: Any) -> None:
    parent, key = place
    if isinstance(parent, dict):
        parent[rng.choice(("", "x", str(key).upper(), f"{key}s", " ", str(key)[:-1]))] = (
            parent.pop(key)
        )
    else:
        rng.shuffle(parent)


def _repeat(rng: random.Random, place: Any) -> None:
    parent, key = place
    if _is_list(parent):
        parent[key:key] = [parent[key]] * rng.choice((1, 2, 40))
    else:
        parent[f"{key}{rng.randrange(9)}"] = parent[key]


def _swap(rng: random.Random, place: Any) -> None:
    parent, key = place
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def _nest(rng: random.Random, place: Any) -> None:
    value = place[0][place[1]]
    for _ in range(rng.choice((1, 2, 500))):
        value = [value] if rng.random() < 0.5 else {"x": value}
    place[0][place[1]] = value


CHANGES: Final[tuple[Change, ...]] = (
    *(_replace, _replace, _replace, _drop, _scale, _scale, _as_text, _rename, _repeat, _swap),
    _nest,
)


def _lines(rng: random.Random, text: str) -> bytes:
    """Return JSON Lines with a line changed within, or lines that are not as they were."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        case 2:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        case 3:
            lines.insert(at, rng.choice(("", "null", "[]", "{}", "x", "\0", "{" * 900, '"')))
        case 4:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            row = json.loads(lines[at])
            lines[at] = _encoded(changed(rng, row)).decode("utf-8", "surrogatepass")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _table(rng: random.Random, text: str) -> bytes:
    """Return CSV with cells, columns, rows or the way they are written changed."""
    rows = list(csv.reader(io.StringIO(text)))
    at = rng.randrange(len(rows))
    column = rng.randrange(max(1, len(rows[0])))
    delimiter, is_quoted, end = ",", False, "\n"
    match rng.randrange(11):
        case 0:
            rows = [row[:column] + row[column + 1 :] for row in rows]
        case 1:
            rows = [row + row[column : column + 1] for row in rows]
        case 2:
            extra = rng.choice((1, 40, 400))
            rows = [
                row + [f"x{n}" if not y else "1" for n in range(extra)]
                for y, row in enumerate(rows)
            ]
        case 3:
            rows[at] = rows[at][: rng.randrange(len(rows[at]) + 1)]
        case 4:
            rows.insert(at, rows[0])
        case 5:
            rng.shuffle(rows)
        case 6:
            delimiter = rng.choice((";", "\t", "|"))
        case 7:
            is_quoted, end = True, rng.choice(("\r\n", "\r", "\n"))
        case _:
            if column < len(rows[at]):
                rows[at][column] = rng.choice(CELLS)
    written = io.StringIO()
    csv.writer(
        written,
        delimiter=delimiter,
        quoting=csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL,
        lineterminator=end,
        escapechar="\\",
    ).writerows(rows)
    return written.getvalue().encode("utf-8", "surrogatepass")


def _yaml(rng: random.Random, text: str) -> bytes:
    """Return YAML with a node changed, or with what YAML has and JSON has not."""
    if rng.random() < 0.3:
        lines = text.splitlines(keepends=True)
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(YAML_TEXTS))
        return "".join(lines).encode()
    if "&" in text and "*" in text:  # a bomb of aliases, which must not go off here
        return _damaged(rng, text.encode())
    documents = list(yaml.safe_load_all(text))
    at = rng.randrange(len(documents) or 1)
    if documents:
        documents[at] = changed(rng, documents[at])
    return yaml.safe_dump_all(documents, sort_keys=False).encode("utf-8", "surrogatepass")


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """Return bytes of which some are others, gone, or there twice."""
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 2, 8, 200))
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + size :]
        case 2:
            return data[:at] + data[at : at + size] * rng.choice((2, 50)) + data[at:]
        case 3:
            return data[:at] + rng.randbytes(size) + data[at + size :]
        case 4:
            return data[:at] + rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"\r")) + data[at:]
        case _:
            flipped = bytearray(data)
            if flipped:
                flipped[at % len(flipped)] ^= 1 << rng.randrange(8)
            return bytes(flipped)
