"""Write the change of an object of Kubernetes as a patch that keeps all else.

Made from the object as it runs, or as it stands in a repository: otherwise the arguments beside
the two limits are unknown, and a patch that replaces their list would remove what guards the
server.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.emit.edits import metadata_of
from tuner.emit.hiding import Secrets, secrets_in
from tuner.emit.json_patch import Operation, operations
from tuner.emit.merge import Edit, edit_named, read_documents
from tuner.emit.names import PatchKind
from tuner.emit.recommendation import Recommendation
from tuner.emit.yaml_text import BlockText, yaml_text
from tuner.errors import UsageError


@dataclass(frozen=True, slots=True)
class Patched:
    """The text of a patch, with notes on it."""

    text: str
    notes: tuple[str, ...]


def patch(
    path: Path,
    edit: Edit,
    rec: Recommendation,
    file: str,
    kind: PatchKind,
) -> Patched:
    """Return the patch that edits the object in a file; the file stays as it is.

    `file` is what the patch will be called.

    Raises: UsageError if the file is not YAML, has no place for the limits, or if the patch
        would show a secret.
    """
    before = read_documents(path)
    after = deepcopy(before)
    notes = edit_named(path, edit, after)
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    old, new = changed[0] if changed else ({}, {})
    if changed and not metadata_of(old).get("name"):
        raise UsageError(f"{path} names no object: expected metadata.name, got none")
    if "annotations" not in metadata_of(old) and "annotations" in metadata_of(new):
        # As a patch they would take the place of those that the server has put there.
        del new["metadata"]["annotations"]
        notes.append(
            f"the patch does not say where its values come from: {path} has no "
            "metadata.annotations to add to"
        )
    made = operations(old, new)
    _check_secrets(path, made, secrets_in(*before))
    if not made:
        notes.append(f"{path} has these values already: the patch changes nothing")
    write = _component if kind is PatchKind.COMPONENT else _object
    return Patched(write(old, made, rec, file), tuple(notes))


def _check_secrets(path: Path, made: list[Operation], secrets: Secrets) -> None:
    """Refuse a patch that quotes a line with a secret in it. Raises: UsageError."""
    if any(secrets.are_in(str(each.get("value", ""))) for each in made):
        raise UsageError(
            f"{path} starts vLLM by a line that holds a secret, which a patch of it would show",
            "leave --patch out, which changes the file itself, or let the line take the secret "
            "from a variable",
        )


def _object(
    document: Mapping[str, Any], made: list[Operation], rec: Recommendation, file: str
) -> str:
    """Return the operations as `kubectl patch` takes them."""
    if not made:
        return yaml_text(made, ["changes nothing"])
    metadata = metadata_of(document)
    space = ["-n", str(metadata["namespace"])] if metadata.get("namespace") else []
    words = ["kubectl", "patch", str(document["kind"]).lower(), str(metadata["name"]), *space]
    words += ["--type", "json", "--patch-file", file or "patch.yaml"]
    return yaml_text(made, [shlex.join(words), *rec.comments])


def _component(
    document: Mapping[str, Any], made: list[Operation], rec: Recommendation, file: str
) -> str:
    """Return a Kustomize component around a patch. Source: Kustomize, kind Component."""
    patches: list[object] = []
    if made:
        group, _, version = str(document.get("apiVersion", "")).rpartition("/")
        name = str(metadata_of(document)["name"])
        target = {"group": group, "version": version, "kind": document["kind"], "name": name}
        named = {key: value for key, value in target.items() if value}
        patches = [{"target": named, "patch": BlockText(yaml_text(made))}]
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "patches": patches,
    }
    command = (
        f"in a kustomization.yaml: components, the folder of {file or 'kustomization.yaml'}"
    )
    return yaml_text(body, [command, *rec.comments])
