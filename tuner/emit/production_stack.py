"""vLLM production-stack: values of its Helm chart, and its operator's VLLMRuntime.

The chart accepts keys that it does not know and does nothing with them; max_num_batched_tokens
has no key and goes through `extraArgs`. Chart and operator both turn prefix caching off where
nobody says otherwise, so it is always said; the operator chunked prefill, too, without which
vLLM starts at no token budget below the model's length.

A VLLMRuntime is only changed where it stands: its image and resources are not ours to know, and
its variables hold plain values, so that a whole one could not ask for an api-key.

Source: vllm-project/production-stack, helm/templates/deployment-vllm-multi.yaml and
    helm/values.schema.json; operator/config/crd/bases, operator/internal/controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tuner.emit import container
from tuner.emit.edits import (
    annotate,
    descend,
    drop_caps,
    drop_flag,
    find_object,
    key_of,
    merge_map,
    no_place,
    put_flag,
    set_flag,
)
from tuner.emit.flags import flags, without_expansion
from tuner.emit.recommendation import API_KEY, Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text
from tuner.engine.serve_config import MAX_NUM_SEQS, human_integer, twin

_SWITCHES: Final = {
    "enableChunkedPrefill": "enable-chunked-prefill",
    "enablePrefixCaching": "enable-prefix-caching",
}
_KEYS: Final = {
    "maxModelLen": "max-model-len",
    "tensorParallelSize": "tensor-parallel-size",
    "dtype": "dtype",
    "gpuMemoryUtilization": "gpu-memory-utilization",
    **_SWITCHES,
}
"""The chart's own keys, and what vLLM calls the same."""
# Helm reads numbers as floats and writes those from a million on with an exponent.
_HELM_EXACT_BELOW = 1_000_000
_MODEL_PATH = "servingEngineSpec.modelSpec[].vllmConfig"
_RUNTIME = ("VLLMRuntime",)


def _int(rec: Recommendation, key: str) -> int | None:
    """Return a whole number as the schemas want it, or None where vLLM has to read it."""
    value = rec.settings.get(key)
    number = human_integer(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if 0 < number < _HELM_EXACT_BELOW else None


def _known(rec: Recommendation) -> dict[str, Any]:
    """Return the settings that the chart has a key of its own for, and takes there."""
    dtype = rec.settings.get("dtype")
    made = {
        "maxModelLen": _int(rec, "max-model-len"),
        "tensorParallelSize": _int(rec, "tensor-parallel-size"),
        "dtype": dtype if isinstance(dtype, str) else None,
        "gpuMemoryUtilization": rec.settings.get("gpu-memory-utilization"),
        **{key: rec.is_on(switch) for key, switch in _SWITCHES.items()},
    }
    return {key: value for key, value in made.items() if value is not None}


def _extra(rec: Recommendation, known: dict[str, Any]) -> list[str]:
    """Return the flags of everything that has no key."""
    own = (_KEYS[key] for key in known)
    return without_expansion(flags(rec.flags_but("host", "port", "max-num-seqs", *own)))


def write(rec: Recommendation, names: Names) -> str:
    """Return values for the chart, with one entry of modelSpec."""
    known = _known(rec)
    repository, tag = container.image_parts(rec)
    model = {
        "name": names.workload or rec.name,
        "annotations": rec.annotations(),
        "repository": repository,
        "tag": tag,
        "modelURL": f"/data/{rec.name}" if rec.is_folder else rec.model,
        "replicaCount": 1,
        "requestCPU": 6,
        "requestMemory": "32Gi",
        "requestGPU": container.gpus(rec),
        "vllmConfig": {
            "maxNumSeqs": rec.limits.max_num_seqs,
            **known,
            "extraArgs": _extra(rec, known),
        },
    }
    if rec.is_folder:
        model["pvcStorage"] = "50Gi"
    notes = ["requests of CPU and memory are examples: fit them to your nodes"]
    notes += container.file_notes(rec)
    if rec.is_folder:
        notes.append(f"the model is a folder: put {rec.model} into the chart's volume, /data")
    spec: dict[str, Any] = {"runtimeClassName": "", "modelSpec": [model]}
    if rec.requires_api_key:
        # The chart's own key: its router has to know the secret as well.
        key_reference = {
            "secretName": container.secret(rec, names.workload),
            "secretKey": API_KEY,
        }
        spec = {"runtimeClassName": "", "vllmApiKey": key_reference, "modelSpec": [model]}
        notes.extend(container.api_key_notes(rec, names.workload))
    command = f"helm upgrade --install vllm vllm/vllm-stack -f {names.file}"
    return yaml_text({"servingEngineSpec": spec}, rec.lines(command, notes))


def edit(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set maxNumSeqs, and the token budget among extraArgs, of one modelSpec."""
    root = documents[0] if documents else None
    listed = descend(root, ("servingEngineSpec", "modelSpec"), _MODEL_PATH)
    models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    fit = [m for m in models if names.workload in ("", m.get("name"))]
    if len(fit) != 1:
        got = ", ".join(str(m.get("name")) for m in models) or "none"
        raise no_place("one entry of servingEngineSpec.modelSpec", got, "choose it with --name")
    config = fit[0].get("vllmConfig")
    if not isinstance(config, dict) or not config:
        raise no_place(_MODEL_PATH, "no vllmConfig")
    config["maxNumSeqs"] = rec.limits.max_num_seqs
    _edit_extra(config, rec)
    merge_map(fit[0], "annotations", rec.annotations())
    return _switched_off(config, rec)


def edit_runtime(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set both limits in a VLLMRuntime: the cap beside the model, the budget in extraArgs."""
    document = find_object(documents, _RUNTIME, names.workload)
    model = descend(document, ("spec", "model"), "spec.model")
    config = descend(document, ("spec", "vllmConfig"), "spec.vllmConfig")
    if not isinstance(model, dict) or not isinstance(config, dict):
        raise no_place("spec.model and spec.vllmConfig", "no mappings there")
    model["maxNumSeqs"] = rec.limits.max_num_seqs
    _edit_extra(config, rec)
    annotate(document, rec.annotations())
    return _switched_off(config, rec, tuple(_SWITCHES))


def _edit_extra(config: dict[str, Any], rec: Recommendation) -> None:
    """Set what was tuned among the extra arguments, which come last and so win."""
    words = config.get("extraArgs")
    if words is None:
        words = config["extraArgs"] = []
    if not isinstance(words, list):
        raise no_place("a list of words in vllmConfig.extraArgs", "no list")
    set_flag(words, MAX_NUM_SEQS, rec.limits.max_num_seqs)
    own = {switch: key for key, switch in _SWITCHES.items()}
    for key, value in rec.tuned.items():
        if key in own:
            config[own[key]] = value
            drop_flag(words, key, takes=0)
            drop_flag(words, twin(key), takes=0)
        elif key != MAX_NUM_SEQS:
            put_flag([words], key, value)
    drop_caps([words])


def _switched_off(
    config: dict[str, Any], rec: Recommendation, keys: Sequence[str] = ("enablePrefixCaching",)
) -> list[str]:
    """Return a note on each switch that is off there by omission, and was on when measured."""
    flagged = {key_of(word) for word in config["extraArgs"]}
    return [
        f"{key} is not set there, which turns it off; it was on when this was measured"
        for key in keys
        if key not in config and _SWITCHES[key] not in flagged and rec.is_on(_SWITCHES[key])
    ]
