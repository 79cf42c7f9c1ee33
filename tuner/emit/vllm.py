"""The files that `vllm serve --config` takes: with the two classic limits, or with four.

Two limits are what every vLLM reads; four repeat the measured point exactly. The user's values
become YAML that vLLM reads as they were meant, whole or edited in place, below the evidence as
comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

from ruamel.yaml.comments import CommentedSeq

from tuner.emit.edits import no_place
from tuner.emit.merge import own_remark
from tuner.emit.recommendation import EXACT, Recommendation, dropped
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import (
    LIVE_LIMIT_KEYS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    ON_OR_CHOSEN,
    changed,
    false_says_nothing,
    hyphenated,
    negated,
    twin,
)
from tuner.engine.shape import is_since
from tuner.errors import UsageError


def render(values: Mapping[str, object], limits: EngineLimits, comments: Sequence[str]) -> str:
    """Return the file's text: comments, then the user's values with the two limits set.

    A false becomes `no-KEY: true`, because `vllm serve` drops a false in silence. Keys that
    would cap the limits from below are left out, and a comment says so.

    Raises: ValueError if a value is null.
    Source: vLLM vllm/utils/argparse_utils.py, FlexibleArgumentParser.load_config_file.

    >>> values = {"model": "m", "enable-prefix-caching": False}
    >>> print(render(values, EngineLimits(16, 2048), ["why"]), end="")
    # why
    model: m
    no-enable-prefix-caching: true
    max-num-seqs: 16
    max-num-batched-tokens: 2048
    """
    settings = Recommendation(values, limits).settings
    return yaml_text(_as_vllm_reads(settings), [*comments, *dropped(values)])


def render_plain(rec: Recommendation, names: Names) -> str:
    """Return the file with the two classic limits, which every vLLM reads."""
    values = changed(rec.values, rec.knobs)
    return render(values, rec.limits, rec.whole_lines(names.file))


def render_exact(rec: Recommendation, names: Names) -> str:
    """Return the file with the four limits that repeat the measured point.

    The engine that was measured had buffers, captured graphs and a KV cache for larger limits
    than it was tuned to; a start at the tuned limits themselves sizes them anew.

    Raises: UsageError if the limits at which the engine was started are unknown, or nothing was
        measured.
    Source: SchedulerConfig in vLLM's vllm/config/scheduler.py, 0.32 and later.
    """
    four = exact_limits(rec)
    settings = {key: value for key, value in rec.settings.items() if key not in four}
    above = [
        *rec.whole_lines(names.file),
        "the measured point exactly: buffers of the engine's start, admission and step budget "
        f"{EXACT}",
        *dropped(rec.values),
    ]
    return yaml_text(_as_vllm_reads({**settings, **four}), above)


def exact_limits(rec: Recommendation) -> dict[str, int]:
    """Return the four limits by key. Raises: UsageError where no measured point is known."""
    hint = "leave --format vllm-exact out: --format vllm holds the two limits that were tuned"
    version = rec.facts.get("vllm-version", "")
    if rec.facts.get("method") in ("shadow", "calibrated"):
        raise UsageError(
            "vllm-exact repeats a measured point, and this one was predicted", hint
        )
    if rec.started_at is None:
        raise UsageError(
            "vllm-exact needs the limits that the engine was started with, which the source "
            "does not hold",
            "name the run directory in place of the YAML file",
        )
    if version and not is_since(version, 32):
        raise UsageError(f"vllm-exact needs vLLM 0.32 or later, the run had {version}", hint)
    tuned = astuple(rec.limits)
    buffers = astuple(rec.started_at.covering(rec.limits))
    keys = (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, *LIVE_LIMIT_KEYS)
    return dict(zip(keys, (*buffers, *tuned), strict=True))


def _as_vllm_reads(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with every false turned into the flag that says so."""
    shown: dict[str, object] = {}
    for key, value in values.items():
        if value is None:
            raise ValueError(f"{key} must have a value, got None")
        if value is not False:
            shown[key] = value
        elif (flag := negated(key)) is not None:
            shown[flag] = True
    return shown


_TELLING: Final = ("model", MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
"""Keys that a configuration of vLLM has at its top, and other files do not: ours."""

_OURS: Final = "# tuned "
"""How our remark at the end of a line begins; its date follows, see `merge.own_remark`."""


def edit(documents: list[Any], rec: Recommendation, _: Names) -> list[str]:
    """Set what was tuned at the top level, and take out what would cap the limits."""
    root = _root(documents)
    for key in [key for key in root if hyphenated(str(key)) in LIVE_LIMIT_KEYS]:
        del root[key]
    _set(root, rec.tuned)
    _remark(root, rec)
    return _without_effect(root)


def edit_exact(documents: list[Any], rec: Recommendation, _: Names) -> list[str]:
    """Set the four limits at the top level that repeat the measured point."""
    root = _root(documents)
    _set(root, {**rec.knobs, **exact_limits(rec)})
    _remark(root, rec)
    return _without_effect(root)


def _without_effect(root: Mapping[str, object]) -> list[str]:
    """Return notes on what is false there and vLLM does not take for false."""
    # PyYAML, by which vLLM reads, takes these words for false, and ruamel.yaml for texts.
    false = [
        hyphenated(str(key))
        for key, value in root.items()
        if value is False or (type(value) is str and value.lower() in {"off", "no"})
    ]
    return [false_says_nothing(key) for key in false if key in ON_OR_CHOSEN]


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


def _set(root: dict[str, Any], values: Mapping[str, object]) -> None:
    """Set each key in the spelling it has there, or put it behind the one before it."""
    for key in [key for key in root if twin(hyphenated(str(key))) in values]:
        del root[key]
    for key in [key for key in root if values.get(hyphenated(str(key))) is False]:
        del root[key]
    values = {key: _in_a_line(value) for key, value in _as_vllm_reads(values).items()}
    spelled = {hyphenated(str(key)): key for key in root}
    behind: str | None = None
    for key, value in values.items():
        if key in spelled:
            if root[spelled[key]] != value:
                root[spelled[key]] = value
        else:
            _put_behind(root, behind, key, value)
            spelled[key] = key
        behind = spelled[key]


def _in_a_line(value: object) -> object:
    """Return a list as it stands in one line of YAML, any other value as it is."""
    if not isinstance(value, list):
        return value
    line = CommentedSeq(value)
    line.fa.set_flow_style()
    return line


def _put_behind(root: dict[str, Any], behind: str | None, key: str, value: object) -> None:
    """Put a key behind another; blank lines that follow that one then follow the new one."""
    comments_of = getattr(root, "ca", None)
    if behind is None or comments_of is None:
        root[key] = value
        return
    root.insert(list(root).index(behind) + 1, key, value)  # type: ignore[attr-defined]
    slots = comments_of.items.get(behind)
    if slots and slots[2] is not None and slots[2].value.startswith("\n"):
        comments_of.items[key] = comments_of.items.pop(behind)


def _remark(root: dict[str, Any], rec: Recommendation) -> None:
    """Add to the cap's line where it comes from, unless it has a comment of the user's."""
    facts = rec.facts
    run = f"run {facts['run-id']}" if "run-id" in facts else ""
    parts = (facts.get("tuned-at", "")[:10], facts.get("gain"), run)
    text = ", ".join(filter(None, parts))
    key = next(key for key in root if hyphenated(str(key)) == MAX_NUM_SEQS)
    comments_of = getattr(root, "ca", None)
    if not text or comments_of is None or root.fa.flow_style():  # type: ignore[attr-defined]
        return
    token = (comments_of.items.get(key) or [None, None, None])[2]
    if token is None:
        root.yaml_add_eol_comment(f"{_OURS}{text}", key)  # type: ignore[attr-defined]
    elif token.value.startswith("\n"):
        token.value = f"{_OURS}{text}{token.value}"
    elif own_remark(token.value):
        old, newline, rest = token.value.partition("\n")
        blanks = old[: len(old) - len(old.lstrip())]
        token.value = f"{blanks}{_OURS}{text}{newline}{rest}"
