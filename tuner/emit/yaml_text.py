"""Write values as YAML that people edit afterwards: block style, no anchors, comments above."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import yaml

_FOLDED = re.compile("[\x85\u2028\u2029\ufeff]")
# What YAML 1.2 and Go's readers take for a number, a switch or nothing, and PyYAML for a text.
# Source: YAML 1.2.2, section 10.3.2; gopkg.in/yaml.v2, resolve.go.
_TYPED = re.compile(
    r"[-+]?(?:\.\d[\d_]*|\d[\d_]*(?:\.[\d_]*)?)(?:e[-+]?[\d_]+)?"
    r"|[-+]?0(?:b[01_]+|o[0-7_]+|x[\da-f_]+)|[-+]?\.inf|\.nan"
    r"|y|n|yes|no|on|off|true|false|null|~",
    re.ASCII | re.IGNORECASE,
)


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
    style = "'" if _TYPED.fullmatch(text) else None
    # PyYAML folds these unless they are escaped: YAML 1.1 takes them for ends of a line.
    style = '"' if _FOLDED.search(text) else style
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
