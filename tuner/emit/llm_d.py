"""llm-d: values of the modelservice Helm chart.

The chart makes `vllm serve MODEL` with port, names and parallelism itself, and appends our
arguments. Prefill and decode are one engine here, as they were when it was measured.

Source: llm-d-incubation/llm-d-modelservice, charts/llm-d-modelservice/templates/_helpers.tpl.
"""

from __future__ import annotations

from typing import Any, Final

from tuner.emit import container
from tuner.emit.edits import edit_container, find_container, merge_map, no_place
from tuner.emit.recommendation import Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text

PREFILL_STAYS: Final = (
    "prefill is left as it is: what was measured prefills and decodes in one engine"
)
_PATH = "decode.containers[]"
_PARALLELISM: Final = {"tensor": "tensor-parallel-size", "data": "data-parallel-size"}


def uri(rec: Recommendation) -> str:
    """Return where the model's files come from: the hub, or a volume claim for a folder."""
    if rec.is_address:
        return rec.model
    return f"pvc://{container.claim(rec)}/{rec.name}" if rec.is_folder else f"hf://{rec.model}"


def write(rec: Recommendation, names: Names) -> str:
    """Return values for the chart: one decode container, no prefill."""
    set_by_chart = ("port", "served-model-name", *_PARALLELISM.values())
    role_values: dict[str, Any] = {
        "name": names.container or "vllm",
        "image": container.image(rec)
        if container.is_cpu(rec)
        else "ghcr.io/llm-d/llm-d-cuda:latest",
        "modelCommand": "vllmServe",
        "args": container.words(rec, *set_by_chart),
        **({"env": env} if (env := container.api_key_env(rec, names.workload)) else {}),
        "mountModelVolume": True,
    }
    body: dict[str, Any] = {
        "modelArtifacts": {"name": rec.served_names[0], "uri": uri(rec), "size": "40Gi"},
        "decode": {
            "create": True,
            "replicas": 1,
            "annotations": rec.annotations(),
            "parallelism": {kind: rec.number(key, 1) for kind, key in _PARALLELISM.items()},
            "containers": [role_values],
        },
        "prefill": {"create": False},
    }
    if container.is_cpu(rec):
        body = {"accelerator": {"type": "cpu"}, **body}
    notes = [
        *container.notes(rec),
        "modelArtifacts.size is an example: fit it to the model",
        *container.api_key_notes(rec, names.workload),
    ]
    command = f"helm upgrade --install {names.workload or rec.name} "
    command += f"llm-d-modelservice/llm-d-modelservice -f {names.file}"
    return yaml_text(body, rec.lines(command, notes))


def edit(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set both limits in the arguments of the decode container."""
    root = documents[0] if documents else None
    if not isinstance(root, dict):
        raise no_place(_PATH, "no mapping")
    holder = find_container(root, ("decode",), _PATH, names.container)
    if "args" not in holder and holder.get("modelCommand") in {"vllmServe", "imageDefault"}:
        # The chart writes the command line and appends what stands here.
        holder["args"] = []
    edit_container(holder, rec.tuned, _PATH)
    merge_map(root["decode"], "annotations", rec.annotations())
    prefill = root.get("prefill")
    if isinstance(prefill, dict) and prefill.get("create", True) and prefill.get("containers"):
        return [PREFILL_STAYS]
    return []
