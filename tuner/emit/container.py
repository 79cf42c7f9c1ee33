"""The container that a recommendation runs in: image, model path, port, devices, arguments.

What Docker Compose and the Kubernetes objects have in common.
"""

from __future__ import annotations

from typing import Any, Final

from tuner.emit.flags import flags, one_key_note, without_expansion
from tuner.emit.recommendation import API_KEY, API_KEY_ENV, Recommendation

DEFAULT_PORT: Final = 8000
"""Source: vLLM vllm/entrypoints/openai/cli_args.py, --port."""

MODELS_DIR: Final = "/models"
"""Where a model that is a folder is mounted: ours."""

_PATHS = ("/", "./", "../", "~/")
# What names no file that has to be there, or is told of by itself.
_NO_FILES = frozenset({"model", "served-model-name", "root-path", "uds", "download-dir"})

# A large model may take minutes to load and compile: ours, 30 minutes.
_START_PROBES = 180
_PROBE_PERIOD_S = 10


def image(rec: Recommendation) -> str:
    """Return vLLM's own image of the version that was measured.

    Source: vLLM docs, deployment/docker.md and getting_started/installation/cpu.md.
    """
    repository, tag = image_parts(rec)
    return f"{repository}:{tag}"


def image_parts(rec: Recommendation) -> tuple[str, str]:
    """Return the image's repository and tag."""
    version = rec.facts.get("vllm-version", "").split("+")[0]
    repository = "vllm/vllm-openai-cpu" if is_cpu(rec) else "vllm/vllm-openai"
    return repository, f"v{version}" if version else "latest"


def is_cpu(rec: Recommendation) -> bool:
    """Return whether the measured engine ran without an accelerator."""
    return rec.facts.get("device", "").startswith("CPU")


def gpus(rec: Recommendation) -> int:
    """Return how many devices one replica takes: a product of vLLM's parallelisms."""
    if is_cpu(rec):
        return 0
    kinds = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    count = 1
    for kind in kinds:
        count *= max(rec.number(kind, 1), 1)
    return count


def port(rec: Recommendation) -> int:
    """Return the port that the server listens on."""
    return rec.number("port", DEFAULT_PORT)


def model_path(rec: Recommendation) -> str:
    """Return what the model is called inside of the container."""
    return f"{MODELS_DIR}/{rec.name}" if rec.is_folder else rec.model


def claim(rec: Recommendation) -> str:
    """Return the name of the volume claim that is to hold a model's folder."""
    return f"{rec.name}-model"


def words(rec: Recommendation, *but: str) -> list[str]:
    """Return the arguments after the model; inside a container every address is right."""
    return without_expansion(flags(rec.flags_but("host", *but)))


def notes(rec: Recommendation) -> list[str]:
    """Return what a pod leaves out of the settings, and what it needs."""
    if not rec.is_folder:
        return machine_notes(rec)
    message = f"put {rec.model} into the volume claim {claim(rec)} as {rec.name}"
    return [*machine_notes(rec), f"the model is a folder: {message}"]


def machine_notes(rec: Recommendation) -> list[str]:
    """Return what a container leaves out of the settings, and which files they ask of it."""
    left_out = "left out host: a container is reached on all of its addresses"
    return [*([left_out] if "host" in rec.shared else []), *file_notes(rec)]


def file_notes(rec: Recommendation) -> list[str]:
    """Return which settings name files that no image has by itself."""
    return [
        f"{key} names the file {value}: mount it there, or make it part of the image"
        for key, value in rec.shared.items()
        if key not in _NO_FILES and str(value).startswith(_PATHS)
    ]


def secret(rec: Recommendation, workload: str) -> str:
    """Return the name of the Kubernetes Secret that is to hold the api-key."""
    return f"{workload or rec.name}-{API_KEY}"


def api_key_env(rec: Recommendation, workload: str) -> list[dict[str, Any]]:
    """Return the variable with a required api-key: without its Secret no container starts.

    Source: Kubernetes, core/v1 SecretKeySelector, whose `optional` is false by default.
    """
    if not rec.requires_api_key:
        return []
    reference = {"name": secret(rec, workload), "key": API_KEY}
    return [{"name": API_KEY_ENV, "valueFrom": {"secretKeyRef": reference}}]


def api_key_notes(rec: Recommendation, workload: str) -> list[str]:
    """Return where a pod gets a required api-key from, and the command that puts it there."""
    if not rec.requires_api_key:
        return []
    name = secret(rec, workload)
    # An empty key would open the server, so an empty variable stops the command.
    made = f'--from-literal={API_KEY}="${{{API_KEY_ENV}:?}}"'
    where = f"the server reads it from the Secret {name}"
    return [
        f"{API_KEY} is a secret: {where}, and does not start without",
        f"  kubectl create secret generic {name} {made}",
        *one_key_note(rec),
    ]


def container(rec: Recommendation, name: str, workload: str) -> dict[str, Any]:
    """Return the container of a pod that runs the workload."""
    made: dict[str, Any] = {
        "name": name,
        "image": image(rec),
        "command": ["vllm", "serve", *without_expansion([model_path(rec)])],
        "args": words(rec),
        **({"env": env} if (env := api_key_env(rec, workload)) else {}),
        "ports": [{"name": "http", "containerPort": port(rec)}],
        "startupProbe": {**_probe(), "failureThreshold": _START_PROBES},
        "readinessProbe": _probe(),
    }
    if gpus(rec):
        made["resources"] = {"limits": {"nvidia.com/gpu": str(gpus(rec))}}
    made["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's
    if rec.is_folder:
        mount = {"name": "model", "mountPath": MODELS_DIR, "readOnly": True}
        made["volumeMounts"].append(mount)
    return made


def volumes(rec: Recommendation) -> list[dict[str, Any]]:
    """Return the pod's volumes; tensor parallelism passes its messages through /dev/shm."""
    made: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    ]
    if rec.is_folder:
        reference = {"claimName": claim(rec), "readOnly": True}
        made.append({"name": "model", "persistentVolumeClaim": reference})
    return made


def _probe() -> dict[str, Any]:
    return {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_PERIOD_S}
