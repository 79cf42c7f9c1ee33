"""Every format of `tune emit` with what writes it: a new target is named here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tuner.emit import (
    aibrix,
    args,
    compose,
    kserve,
    kubernetes,
    llm_d,
    production_stack,
    vllm,
    vllm_edit,
)
from tuner.emit.merge import Merged, merge
from tuner.emit.names import Format, PatchKind
from tuner.emit.recommendation import Recommendation
from tuner.emit.target import Names, Target
from tuner.emit.yaml_text import Block, yaml_text
from tuner.errors import UsageError

TARGETS: Final[Mapping[Format, Target]] = {
    Format.VLLM: Target("best.yaml", vllm.render_plain, edit=vllm_edit.edit),
    Format.VLLM_EXACT: Target("best.yaml", vllm.render_exact, edit=vllm_edit.edit_exact),
    Format.ARGS: Target("serve.sh", args.write),
    Format.DOCKER_COMPOSE: Target("compose.yaml", compose.write, edit=compose.edit),
    Format.KUBERNETES: Target(
        "deployment.yaml", kubernetes.write, kubernetes.patch, kubernetes.edit
    ),
    Format.PRODUCTION_STACK: Target(
        "values.yaml", production_stack.write, edit=production_stack.edit
    ),
    Format.VLLM_RUNTIME: Target(
        "vllmruntime-patch.yaml",
        production_stack.write_runtime,
        production_stack.patch,
        production_stack.edit_runtime,
    ),
    Format.KSERVE: Target("inferenceservice.yaml", kserve.write, edit=kserve.edit),
    Format.KSERVE_LLM: Target(
        "llminferenceservice.yaml", kserve.write_llm, edit=kserve.edit_llm
    ),
    Format.LLM_D: Target("values.yaml", llm_d.write, edit=llm_d.edit),
    Format.AIBRIX: Target("model.yaml", aibrix.write, aibrix.patch, kubernetes.edit),
}


def emit(chosen: Format, rec: Recommendation, names: Names | None = None) -> str:
    """Return the file of a target. Raises: UsageError if it cannot hold this."""
    target = TARGETS[chosen]
    wanted = names or Names()
    file = wanted.file or target.file_name
    return target.write(rec, Names(file, wanted.workload, wanted.container))


def emit_patch(
    chosen: Format, rec: Recommendation, names: Names, kind: PatchKind = PatchKind.OBJECT
) -> str:
    """Return the change of an object that exists, as a patch or a Kustomize component.

    Raises: UsageError if the target has no objects to patch.
    """
    target = TARGETS[chosen]
    if target.patch is None:
        able = ", ".join(sorted(name for name, t in TARGETS.items() if t.patch is not None))
        how = "--merge FILE changes an existing file" if target.edit else "leave --patch out"
        raise UsageError(f"--patch is for {able}, got --format {chosen}", how)
    made = target.patch(rec, names)
    name, object_kind = made["metadata"]["name"], made["kind"]
    if kind is PatchKind.COMPONENT:
        file = names.file or "kustomization.yaml"
        above = rec.lines(f"in a kustomization.yaml: components, the folder of {file}")
        return yaml_text(_component(made), above)
    strategy = "merge" if "." in made["apiVersion"].partition("/")[0] else "strategic"
    command = f"kubectl patch {object_kind.lower()} {name} --type {strategy} --patch-file "
    return yaml_text(made, rec.lines(command + (names.file or "patch.yaml")))


def _component(made: dict[str, Any]) -> dict[str, Any]:
    """Return a Kustomize component around a patch. Source: Kustomize, kind Component."""
    group, _, version = made["apiVersion"].partition("/")
    target = {
        "group": group,
        "version": version,
        "kind": made["kind"],
        "name": made["metadata"]["name"],
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "patches": [{"target": target, "patch": Block(yaml_text(made))}],
    }


def merge_into(path: Path, chosen: Format, rec: Recommendation, names: Names) -> Merged:
    """Return a file of the user's with both limits in it; nothing is written.

    Raises: UsageError if it is not YAML, or has no place for the limits.
    """
    target = TARGETS[chosen]
    if target.edit is None:
        raise UsageError(
            f"--merge changes a YAML file, which --format {chosen} does not write",
            "name the format of the file after --format",
        )
    return merge(path, partial(_edited, target, rec, names))


def _edited(
    target: Target, rec: Recommendation, names: Names, documents: list[Any]
) -> list[str]:
    return [] if target.edit is None else target.edit(documents, rec, names)
