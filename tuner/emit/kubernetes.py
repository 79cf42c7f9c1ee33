"""A Deployment of plain Kubernetes: whole, or edited where it stands.

Source: vLLM docs, deployment/k8s.md; the apps/v1 API.
"""

from __future__ import annotations

from typing import Any

from tuner.emit import container
from tuner.emit.edits import annotate, edit_container, find_container, find_object
from tuner.emit.recommendation import Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text

_POD_PATH = "spec.template.spec.containers[]"
# The kinds whose pods serve a model for good.
_KINDS = ("Deployment", "StatefulSet", "ReplicaSet")


def deployment(rec: Recommendation, names: Names, labels: dict[str, str]) -> dict[str, Any]:
    """Return a Deployment of one replica whose pods bear the labels."""
    name = names.workload or rec.name
    pod = {
        "containers": [container.container(rec, names.container or "vllm", name)],
        "volumes": container.volumes(rec),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels, "annotations": rec.annotations()},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def write(rec: Recommendation, names: Names) -> str:
    """Return a Deployment."""
    labels = {"app": names.workload or rec.name}
    notes = [*container.notes(rec), *container.api_key_notes(rec, names.workload)]
    above = rec.lines(f"kubectl apply -f {names.file}", notes)
    return yaml_text(deployment(rec, names, labels), above)


def edit(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set both limits in the one container that runs vLLM."""
    document = find_object(documents, _KINDS, names.workload)
    holder = find_container(document, ("spec", "template", "spec"), _POD_PATH, names.container)
    edit_container(holder, rec.tuned, _POD_PATH)
    annotate(document, rec.annotations())
    return []
