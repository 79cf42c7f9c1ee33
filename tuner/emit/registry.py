"""Every format of `tune emit` with what writes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tuner.emit import aibrix, compose, flags, kserve, kubernetes, llm_d, production_stack, vllm
from tuner.emit.edits import last_value
from tuner.emit.merge import Merged, edit_named, merge, read_documents
from tuner.emit.names import Format, PatchKind
from tuner.emit.patch import Patched, patch
from tuner.emit.recommendation import API_KEY, API_KEY_ENV, Recommendation, with_evidence
from tuner.emit.target import CONTAINER, NAME, ApiKey, Names, Target, Write
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, human_integer
from tuner.errors import UsageError

_NO: Final[frozenset[str]] = frozenset()
_NAME: Final = frozenset({NAME})
_CONTAINER: Final = frozenset({CONTAINER})
_BOTH: Final = _NAME | _CONTAINER

TARGETS: Final[Mapping[Format, Target]] = {
    Format.VLLM: Target("best.yaml", vllm.render_plain, vllm.edit, ApiKey.HELD),
    Format.VLLM_EXACT: Target("best.yaml", vllm.render_exact, vllm.edit_exact, ApiKey.HELD),
    Format.ARGS: Target("serve.sh", flags.write),
    Format.DOCKER_COMPOSE: Target(
        "compose.yaml", compose.write, compose.edit, names=(_NAME, _NAME)
    ),
    Format.KUBERNETES: Target(
        "deployment.yaml",
        kubernetes.write,
        kubernetes.edit,
        names=(_BOTH, _BOTH),
        is_object=True,
    ),
    Format.PRODUCTION_STACK: Target(
        "values.yaml", production_stack.write, production_stack.edit, names=(_NAME, _NAME)
    ),
    Format.VLLM_RUNTIME: Target(
        "vllmruntime.yaml",
        None,
        production_stack.edit_runtime,
        names=(_NO, _NAME),
        is_object=True,
    ),
    Format.KSERVE: Target(
        "inferenceservice.yaml",
        kserve.write,
        kserve.edit,
        ApiKey.IGNORED,
        names=(_NAME, _BOTH),
        is_object=True,
    ),
    Format.KSERVE_LLM: Target(
        "llminferenceservice.yaml",
        kserve.write_llm,
        kserve.edit_llm,
        names=(_NAME, _BOTH),
        is_object=True,
    ),
    Format.LLM_D: Target("values.yaml", llm_d.write, llm_d.edit, names=(_BOTH, _CONTAINER)),
    Format.AIBRIX: Target(
        "model.yaml", aibrix.write, kubernetes.edit, names=(_BOTH, _BOTH), is_object=True
    ),
}


def checked_writer(chosen: Format, rec: Recommendation) -> Write:
    """Return what writes a target whole, whose server will ask for the api-key.

    Raises: UsageError if it changes existing objects alone, or if its server would answer
        anybody where the configuration has an api-key.
    """
    target = TARGETS[chosen]
    if target.write is None:
        raise UsageError(
            f"--format {chosen} changes an object that exists and writes none",
            "tune emit with --merge FILE changes its manifest, with --patch beside it makes a "
            "patch",
        )
    if rec.requires_api_key and target.api_key is ApiKey.IGNORED:
        raise UsageError(
            f"the configuration has an {API_KEY}, and a server of --format {chosen} answers "
            "without one",
            "choose another --format, or guard the server from outside and let tune emit write "
            "it with --allow-unauthenticated",
        )
    is_lost = rec.requires_api_key and API_KEY not in rec.settings
    if is_lost and target.api_key is ApiKey.HELD:
        raise UsageError(
            f"the configuration has an {API_KEY} which is not kept here, and a server of "
            f"--format {chosen} would answer without one",
            "start from the YAML file that holds the key, choose --format args, or give the "
            f"server {API_KEY_ENV} and let tune emit write it with --allow-unauthenticated",
        )
    return target.write


_LONGEST_NAME: Final = 63
"""What labels hold, among which names go. Source: Kubernetes, Object Names and IDs."""

_NAME_PART: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"


def _check_name(option: str, name: str, *, dots: bool = False) -> None:
    """Refuse what no object of Kubernetes is called. Raises: UsageError."""
    pattern = rf"{_NAME_PART}(?:\.{_NAME_PART})*" if dots else _NAME_PART
    if name and not (len(name) <= _LONGEST_NAME and re.fullmatch(pattern, name)):
        signs = "digits, hyphens and dots" if dots else "digits and hyphens"
        raise UsageError(
            f"{option} {name!r} cannot be a name in Kubernetes (RFC 1123): expected lowercase "
            f"letters, {signs}, with a letter or digit at both ends and {_LONGEST_NAME} "
            "characters at most",
            f"for example {option} chat-7b, or leave it out",
        )


def _check_taken(chosen: Format, names: Names, taken: frozenset[str], done: str) -> None:
    """Refuse a name that would say nothing. Raises: UsageError."""
    for option, name in names.given().items():
        if option not in taken:
            raise UsageError(
                f"{option} {name!r} has no place in what is {done} with --format {chosen}",
                f"leave {option} out",
            )


def emit(chosen: Format, rec: Recommendation, names: Names | None = None) -> str:
    """Return the file of a target.

    Raises: UsageError if it cannot hold this, would start a server without the api-key, or is
        given a name that its objects cannot have, or that it does not hold.
    """
    write = checked_writer(chosen, rec)
    wanted = names or Names()
    _check_taken(chosen, wanted, TARGETS[chosen].names[0], "written")
    if chosen is not Format.DOCKER_COMPOSE:  # It names no objects of Kubernetes.
        # Of a Deployment's name dots may separate parts.
        _check_name(NAME, wanted.workload, dots=chosen is Format.KUBERNETES)
        _check_name(CONTAINER, wanted.container)
    # It stands in the command above the file, which people paste into a shell.
    file = shlex.quote(wanted.file or TARGETS[chosen].file_name)
    return write(rec, replace(wanted, file=file))


def emit_patch(
    path: Path | None, chosen: Format, rec: Recommendation, names: Names, kind: PatchKind
) -> Patched:
    """Return the change of the object in a file, as a patch or a Kustomize component.

    Raises: UsageError if the target has no objects to patch, the file no place for the limits,
        or if there is no file.
    """
    target = TARGETS[chosen]
    if not target.is_object:
        able = ", ".join(sorted(name for name, t in TARGETS.items() if t.is_object))
        how = "leave --patch out: --merge FILE changes the file itself"
        raise UsageError(f"--patch is for {able}, got --format {chosen}", how)
    if path is None:
        raise UsageError(
            "--patch needs the manifest of what it changes: a list of arguments is replaced "
            "whole, and the one in use may hold what the run never saw, an api-key for one",
            "kubectl get KIND NAME -o yaml > running.yaml, then --patch --merge running.yaml",
        )
    _check_taken(chosen, names, target.names[1], "changed")
    return patch(path, partial(_edited, target, rec, names), rec, names.file, kind)


def merge_into(path: Path, chosen: Format, rec: Recommendation, names: Names) -> Merged:
    """Return a file of the user's with both limits in it; nothing is written.

    Evidence that an earlier tuning wrote above its values makes room for that of this one.

    Raises: UsageError if it is not YAML, or has no place for the limits or for a name.
    """
    target = TARGETS[chosen]
    if target.edit is None:
        raise UsageError(
            f"--merge changes a YAML file, which --format {chosen} does not write",
            "name the format of the file after --format",
        )
    _check_taken(chosen, names, target.names[1], "changed")
    merged = merge(path, partial(_edited, target, rec, names))
    return replace(merged, after=with_evidence(merged.after, rec.comments))


_MARKS: Final = EngineLimits(1_000_000_007, 1_000_000_009)
"""Ours: limits that no file has, by which the places of a file's own are found."""
_MARK: Final = re.compile(f"({_MARKS.max_num_seqs}|{_MARKS.max_num_batched_tokens})")
_MARKED: Final = {
    str(_MARKS.max_num_seqs): MAX_NUM_SEQS,
    str(_MARKS.max_num_batched_tokens): MAX_NUM_BATCHED_TOKENS,
}
_NUMBER: Final = r"['\"]?([\w.]+)['\"]?"


def limits_in(path: Path, chosen: Format, names: Names) -> EngineLimits | None:
    """Return the limits in a file of the user's where an edit would set them.

    None where neither is a number there.

    Raises: UsageError if it is not YAML, has no place for them, one of them alone, or a pair
        that vLLM refuses.
    """
    before = read_documents(path)
    after = deepcopy(before)
    marked = Recommendation({}, _MARKS)
    edit_named(path, partial(_edited, TARGETS[chosen], marked, names), after)
    texts, found = dict(_texts(before)), dict[str, int | None]()
    for place, text in _texts(after):
        parts = _MARK.split(text)
        pattern = _NUMBER.join(map(re.escape, parts[::2]))
        if there := re.fullmatch(pattern, texts.get(place, "")):
            # Of a flag that stands twice vLLM takes the last.
            found |= zip(parts[1::2], map(human_integer, there.groups()), strict=True)
        elif len(parts) > 1:
            # The edit put flags beside those that stand in a variable, or spelled them anew.
            found |= _limits_of_line(texts.get(place, ""))
    seqs, tokens = map(found.get, _MARKED)
    if seqs is not None and tokens is not None:
        return EngineLimits(seqs, tokens)
    spelled = [text.replace("_", "-") for text in texts.values()]
    named = {key for key in _MARKED.values() if any(key in text for text in spelled)}
    if (seqs is None) is not (tokens is None) or len(named) == 1:
        raise UsageError(
            f"{path} sets one of the two limits alone",
            f"set {' and '.join(_MARKED.values())} there, so that it is known what is served",
        )
    return None


def _limits_of_line(line: str) -> dict[str, int | None]:
    """Return the numbers behind the flags of the limits in a command line, by their marks.

    None of them where a variable holds one.
    """
    texts = {mark: last_value(line, key) for mark, key in _MARKED.items()}
    found = {mark: human_integer(text) for mark, text in texts.items() if text is not None}
    return {} if None in found.values() else found


def _texts(
    node: Any,  # noqa: ANN401 - any YAML
    place: tuple[object, ...] = (),
) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield each text and number of a document, with the keys that lead to it."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(value, (*place, key))
    else:
        yield place, str(node)


def _edited(
    target: Target, rec: Recommendation, names: Names, documents: list[Any]
) -> list[str]:
    return [] if target.edit is None else target.edit(documents, rec, names)
