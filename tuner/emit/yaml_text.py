"""Write values as YAML that people edit afterwards: block style, no anchors, comments above."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import yaml

_FOLDED = re.compile("[\x85\u2028\u2029\ufeff]")


class BlockText(str):
    """A text of several lines that stands in the file as a literal block."""

    __slots__ = ()


class _PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper without anchors: people edit the file."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's own signature
        """Write a value out in full wherever it stands."""
        return True


def _as_block(dumper: _PlainDumper, text: BlockText) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


def _as_text(dumper: _PlainDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these unless they are escaped: YAML 1.1 takes them for ends of a line.
    style = '"' if _FOLDED.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_PlainDumper.add_representer(BlockText, _as_block)
_PlainDumper.add_representer(str, _as_text)


def yaml_text(
    body: Mapping[str, object] | Sequence[object], comments: Sequence[str] = ()
) -> str:
    r"""Return the comments and, below them, the mapping in its own order, or the list.

    >>> yaml_text({"b": ["1"], "a": {}}, ["why"])
    "# why\nb:\n- '1'\na: {}\n"
    """
    text = yaml.dump(
        dict(body) if isinstance(body, Mapping) else list(body),
        Dumper=_PlainDumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=10_000,
    )
    return commented(comments) + text


def commented(lines: Sequence[str]) -> str:
    """Return the lines as comments; a character YAML cannot hold becomes a question mark."""
    single = [part for line in lines for part in (line.splitlines() or [""])]
    shown = ["".join(c if c.isprintable() else "?" for c in line) for line in single]
    return "".join(f"# {line}".rstrip() + "\n" for line in shown)
