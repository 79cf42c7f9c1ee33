"""Docker Compose: one service, with the evidence as its labels.

Source: vLLM docs, deployment/docker.md; the Compose specification.
"""

from __future__ import annotations

from typing import Any

from tuner.emit import container
from tuner.emit.edits import edit_container, evidence, label, no_place, running
from tuner.emit.flags import ASKED, one_key_note, without_expansion
from tuner.emit.recommendation import API_KEY, API_KEY_ENV, Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text

_PATH = "services.NAME.command"
_KEYS = ("command", "entrypoint")


def write(rec: Recommendation, names: Names) -> str:
    """Return a Compose file with one service. The image's entrypoint is `vllm serve`."""
    port = container.port(rec)
    # Without a key only this machine may ask.
    address = "" if rec.requires_api_key else "127.0.0.1:"
    service: dict[str, Any] = {
        "image": container.image(rec),
        "command": [*without_expansion([container.model_path(rec)]), *container.words(rec)],
        "ports": [f"{address}{port}:{port}"],
        "ipc": "host",
        "volumes": [
            "~/.cache/huggingface:/root/.cache/huggingface",
            "~/.cache/vllm:/root/.cache/vllm",
        ],
        "labels": _labels(rec),
    }
    notes = container.machine_notes(rec)
    if rec.requires_api_key:
        service["environment"] = {API_KEY_ENV: f"${{{API_KEY_ENV}:?{ASKED}}}"}
        where = f"{API_KEY_ENV}, in the environment or in a file .env beside this one"
        notes += [f"{API_KEY} is a secret: it is read from {where}", *one_key_note(rec)]
    else:
        notes.append(f"no {API_KEY}: the port is open to this machine alone")
    if rec.is_folder:
        folder = rec.model if rec.model.startswith((".", "/", "~")) else f"./{rec.model}"
        mount = without_expansion([f"{folder}:{container.model_path(rec)}:ro"])
        service["volumes"].extend(mount)
    if container.gpus(rec):
        device = {"driver": "nvidia", "count": container.gpus(rec), "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    command = f"docker compose -f {names.file} up"
    body = {"services": {names.workload or "vllm": service}}
    return yaml_text(body, rec.lines(command, notes))


def edit(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set both limits in the command of the service that runs vLLM."""
    root = documents[0] if documents else None
    services = root.get("services") if isinstance(root, dict) else None
    if not isinstance(services, dict) or not services:
        raise no_place(_PATH, "no services")
    holder = services[_chosen(services, names.workload)]
    if "command" not in holder and "entrypoint" not in holder:
        raise no_place(_PATH, "a service without a command")
    edit_container(holder, rec.tuned, "services.NAME", _KEYS)
    label(holder, _labels(rec))
    return []


def _labels(rec: Recommendation) -> dict[str, str]:
    """Return the provenance; Compose reads a dollar in it as the start of a variable."""
    return {key: without_expansion([text])[0] for key, text in rec.annotations().items()}


def _chosen(services: dict[str, Any], wanted: str) -> str:
    """Return the name of the service that runs vLLM."""
    if wanted and wanted not in services:
        raise no_place(f"services.{wanted}", f"services {', '.join(services)}")
    if wanted:
        return wanted
    maps = [name for name, service in services.items() if isinstance(service, dict)]
    fit = running(maps, lambda name: evidence(services[name], name, _KEYS))
    if len(fit) != 1:
        got = f"{len(fit)} services that run vLLM among {', '.join(services)}"
        raise no_place(_PATH, got, "name the one to change with --name")
    return fit[0]
