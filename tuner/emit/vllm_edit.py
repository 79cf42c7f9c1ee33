"""Edit the user's own `vllm serve --config` file: both limits, or all four."""

from __future__ import annotations

from typing import Any, Final

from tuner.emit.edits import limit_flags, no_place
from tuner.emit.recommendation import LIVE_LIMIT_KEYS, Recommendation
from tuner.emit.target import Names
from tuner.emit.vllm import exact_limits, exact_start
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, hyphenated

_TELLING: Final = ("model", MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
"""Keys that a configuration of vLLM has at its top, and other files do not: ours."""

_OURS: Final = "# tuned "
"""How our remark at the end of a line begins, so that the next edit replaces it."""


def edit(documents: list[Any], rec: Recommendation, _: Names) -> list[str]:
    """Set the two limits at the top level, and take out what would cap them."""
    root = _root(documents)
    for key in [key for key in root if hyphenated(str(key)) in LIVE_LIMIT_KEYS]:
        del root[key]
    _set(root, limit_flags(rec.limits))
    _remark(root, rec)
    return []


def edit_exact(documents: list[Any], rec: Recommendation, _: Names) -> list[str]:
    """Set the four limits at the top level that repeat the measured point."""
    root = _root(documents)
    _set(root, exact_limits(rec, exact_start(rec)))
    _remark(root, rec)
    return []


def _root(documents: list[Any]) -> dict[str, Any]:
    """Return the mapping that the file holds. Raises: UsageError if it is no such file."""
    root = documents[0] if len(documents) == 1 else None
    expected = f"a configuration of vLLM with {', '.join(_TELLING)} at its top"
    if not isinstance(root, dict):
        many = len(documents) > 1
        raise no_place(expected, f"{len(documents)} documents" if many else "no mapping")
    if not any(hyphenated(str(key)) in _TELLING for key in root):
        got = ", ".join(key for key in root if isinstance(key, str))
        raise no_place(expected, f"keys {got or 'none'}")
    return root


def _set(root: dict[str, Any], values: dict[str, int]) -> None:
    """Set each key in the spelling it has there, or put it behind the one before it."""
    spelled = {hyphenated(str(key)): key for key in root}
    behind: str | None = None
    for key, value in values.items():
        if key in spelled:
            root[spelled[key]] = value
        else:
            _put_behind(root, behind, key, value)
            spelled[key] = key
        behind = spelled[key]


def _put_behind(root: dict[str, Any], behind: str | None, key: str, value: int) -> None:
    """Put a key behind another; blank lines that follow that one then follow the new one."""
    held = getattr(root, "ca", None)
    if behind is None or held is None:
        root[key] = value
        return
    root.insert(list(root).index(behind) + 1, key, value)  # type: ignore[attr-defined]
    slots = held.items.get(behind)
    if slots and slots[2] is not None and slots[2].value.startswith("\n"):
        held.items[key] = held.items.pop(behind)


def _remark(root: dict[str, Any], rec: Recommendation) -> None:
    """Say at the end of the cap's line where it comes from, unless the user says something."""
    parts = [rec.facts.get("tuned-at", "")[:10], rec.facts.get("gain", "")]
    text = ", ".join(part for part in [*parts, _run(rec)] if part)
    key = next(key for key in root if hyphenated(str(key)) == MAX_NUM_SEQS)
    held = getattr(root, "ca", None)
    if not text or held is None or root.fa.flow_style():  # type: ignore[attr-defined]
        return
    token = (held.items.get(key) or [None, None, None])[2]
    if token is None:
        root.yaml_add_eol_comment(f"{_OURS}{text}", key)  # type: ignore[attr-defined]
    elif token.value.startswith("\n"):
        token.value = f"{_OURS}{text}{token.value}"
    elif token.value.lstrip().startswith(_OURS):
        old, newline, rest = token.value.partition("\n")
        blanks = old[: len(old) - len(old.lstrip())]
        token.value = f"{blanks}{_OURS}{text}{newline}{rest}"


def _run(rec: Recommendation) -> str:
    return f"run {rec.facts['run-id']}" if "run-id" in rec.facts else ""
