"""AIBrix: a Deployment and a Service that its gateway finds by their labels.

The gateway routes a request by the name of its model to the Service of that name, so the
Service, the label and the name that vLLM serves under are one.

Source: AIBrix docs, getting_started/quickstart.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from tuner.emit import container, kubernetes
from tuner.emit.recommendation import Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text

_NAME_LABEL: Final = "model.aibrix.ai/name"
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVED: Final = "served-model-name"


def _routed(rec: Recommendation, names: Names) -> tuple[Recommendation, Names, list[str]]:
    """Return the recommendation so that vLLM serves under the Service's name."""
    served = rec.served_names
    fit = [name for name in served if _DNS_LABEL.fullmatch(name)]
    name = names.workload or (fit[0] if fit else rec.name)
    # A folder is served under its path unless it is given a name.
    is_named = _SERVED in rec.settings or not rec.is_folder
    if name in served and is_named:
        return rec, replace(names, workload=name), []
    model_names = [*served, name] if _SERVED in rec.settings else [name]
    routed = replace(rec, values={**rec.values, _SERVED: model_names})
    message = f"clients name the model {name}: AIBrix routes by the name of the Service"
    return routed, replace(names, workload=name), [message]


def write(rec: Recommendation, names: Names) -> str:
    """Return the Deployment and, as a second document, its Service."""
    routed, named, routing_notes = _routed(rec, names)
    port = container.port(rec)
    selector = {_NAME_LABEL: named.workload}
    made = kubernetes.deployment(routed, named, selector)
    found_by = {**selector, "model.aibrix.ai/port": str(port), "model.aibrix.ai/engine": "vllm"}
    made["metadata"]["labels"] = found_by
    made["spec"]["template"]["metadata"]["labels"] = found_by
    service: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": named.workload, "labels": selector},
        "spec": {
            "selector": selector,
            "ports": [{"name": "serve", "port": port, "targetPort": "http"}],
        },
    }
    notes = [
        *container.notes(rec),
        *routing_notes,
        *container.api_key_notes(rec, named.workload),
    ]
    above = rec.lines(f"kubectl apply -f {names.file}", notes)
    return yaml_text(made, above) + "---\n" + yaml_text(service)
