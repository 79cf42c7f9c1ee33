"""KServe: an InferenceService of its Hugging Face runtime, and an LLMInferenceService.

The runtime ignores flags that it does not know, so vLLM's are written with hyphens, as vLLM's
own parser takes them, and the runtime's own with underscores. It serves vLLM's engine behind a
server of its own, which knows no api-key: an InferenceService cannot ask for one.

Source: kserve/kserve, python/huggingfaceserver/huggingfaceserver/__main__.py;
    config/llmisvcconfig/config-llm-template.yaml and docs/samples/llmisvc.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tuner.emit import container
from tuner.emit.edits import (
    STARTS,
    annotate,
    descend,
    edit_container,
    edit_line,
    evidence,
    find_container,
    find_object,
    key_of,
    like,
    no_place,
)
from tuner.emit.flags import flags, without_expansion
from tuner.emit.llm_d import PREFILL_STAYS, uri
from tuner.emit.recommendation import API_KEY, Recommendation
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text
from tuner.engine.serve_config import (
    LIVE_LIMIT_KEYS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    human_integer,
)

_OWN_FLAGS: Final = {
    "max-model-len": "max_model_len",
    "revision": "model_revision",
    "tokenizer-revision": "tokenizer_revision",
    "trust-remote-code": "trust_remote_code",
}
"""Flags of the runtime itself, which it hands on to vLLM."""

_SHELLS: Final = re.compile(r"[\s\"'`$&|;<>(){}\[\]*?!#~\\]")
"""What a shell that reads a word once more changes, or splits it at."""

_ARGS_PATH = "spec.predictor.model.args"
_LLM_PATH = "spec.template.containers[]"
_LLM_CONTAINER = "main"
_ENV: Final = "VLLM_ADDITIONAL_ARGS"
"""What the template's shell line appends to `vllm serve`."""


def _resources(rec: Recommendation, memory: str) -> dict[str, Any]:
    """Return room for one replica; without it KServe grants one core and 2 GiB."""
    room = {"cpu": "6", "memory": memory}
    if container.gpus(rec):
        room["nvidia.com/gpu"] = str(container.gpus(rec))
    return {"limits": room, "requests": dict(room)}


def write(rec: Recommendation, names: Names) -> str:
    """Return an InferenceService."""
    name = names.workload or rec.name
    served = rec.served_names[0] if "served-model-name" in rec.settings else name
    shared = rec.flags_but("host", "port", "served-model-name")
    own = {_OWN_FLAGS[key]: shared.pop(key) for key in _OWN_FLAGS if key in shared}
    model: dict[str, Any] = {"modelFormat": {"name": "huggingface"}}
    if rec.is_folder or rec.is_address:
        model["storageUri"] = uri(rec)
    else:
        own = {"model_id": rec.model, **own}
    first = _own_flags({"model_name": served, **own})
    model["args"] = without_expansion([*first, *flags(shared)])
    model["resources"] = _resources(rec, "24Gi")
    body = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name, "annotations": rec.annotations()},
        "spec": {"predictor": {"model": model}},
    }
    notes = [*container.notes(rec), "resources are examples: fit them to your nodes"]
    if rec.has_api_key:
        notes.append(f"left out {API_KEY}: this runtime knows none, guard it from outside")
    command = f"kubectl apply -f {names.file}"
    return yaml_text(body, rec.lines(command, notes, but=[API_KEY]))


def _own_flags(own: Mapping[str, object]) -> list[str]:
    """Return the runtime's own flags, whose numbers it reads as plain ones and not as 8K."""
    made = []
    for key, value in own.items():
        if value is True:
            made.append(f"--{key}")
        elif value is not False:
            number = human_integer(str(value)) if key == "max_model_len" else None
            made.append(f"--{key}={value if number is None else number}")
    return made


def edit(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set both limits in the arguments of an InferenceService's model."""
    document = find_object(documents, ("InferenceService",), names.workload)
    predictor = descend(document, ("spec", "predictor"), _ARGS_PATH)
    keys = predictor.keys() if isinstance(predictor, dict) else ()
    # Containers beside a model are sidecars, unless one of them is named.
    is_own = names.container or ("containers" in keys and "model" not in keys)
    if isinstance(predictor, dict) and is_own:
        shown = "spec.predictor.containers[]"
        holder = find_container(predictor, (), shown, names.container)
    else:
        holder, shown = descend(predictor, ("model",), _ARGS_PATH), "spec.predictor.model"
        if not isinstance(holder, dict):
            raise no_place(_ARGS_PATH, "no mapping")
        holder.setdefault("args", [])
    _respell(holder.get("args"))
    edit_container(holder, rec.tuned, shown)
    annotate(document, rec.annotations())
    return []


def _respell(words: Any) -> None:  # noqa: ANN401 - any YAML
    """Write the flags of both limits with hyphens: KServe passes on no other spelling.

    Source: KServe, huggingfaceserver/__main__.py, parse_known_args.
    """
    for place, word in enumerate(words if isinstance(words, list) else ()):
        if (key := key_of(word)) in (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, *LIVE_LIMIT_KEYS):
            _, equals, value = str(word).partition("=")
            words[place] = like(word, f"--{key}{equals}{value}")


def write_llm(rec: Recommendation, names: Names) -> str:
    """Return an LLMInferenceService whose template gets our flags through its variable."""
    line, split = _one_line(rec)
    container_spec: dict[str, Any] = {
        "name": _LLM_CONTAINER,
        "env": [{"name": _ENV, "value": line}, *container.api_key_env(rec, names.workload)],
        "resources": _resources(rec, "32Gi"),
    }
    if container.is_cpu(rec):
        # The template's image is for GPUs, and vLLM's own runs as root.
        own = {"image": container.image(rec), "securityContext": {"runAsNonRoot": False}}
        container_spec = {"name": _LLM_CONTAINER, **own, **container_spec}
    body = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": names.workload or rec.name, "annotations": rec.annotations()},
        "spec": {
            "model": {"uri": uri(rec), "name": rec.served_names[0]},
            "replicas": 1,
            "router": {"route": {}, "gateway": {}, "scheduler": {}},
            "template": {"containers": [container_spec]},
        },
    }
    notes = [
        *container.notes(rec),
        *split,
        "resources are examples: fit them to your nodes",
        *container.api_key_notes(rec, names.workload),
    ]
    return yaml_text(body, rec.lines(f"kubectl apply -f {names.file}", notes))


def _one_line(rec: Recommendation) -> tuple[str, list[str]]:
    """Return the flags in one line, and what cannot stand there.

    A shell reads the line once more: it splits at blanks, and quotes and braces are its own.
    """
    words_left: list[str] = []
    notes: list[str] = []
    for key, value in rec.flags_but("host", "port", "served-model-name").items():
        words = list(_dotted(key, value)) if isinstance(value, dict) else flags({key: value})
        if any(_SHELLS.search(word) for word in words):
            notes.append(
                f"left out {key}: its value has blanks or signs of a shell, which KServe's "
                "template gives the line to"
            )
        else:
            words_left.extend(words)
    return " ".join(without_expansion(words_left)), notes


def _dotted(key: str, value: object) -> Iterator[str]:
    """Yield a flag for each value within a mapping, as vLLM takes them too.

    >>> list(_dotted("compilation-config", {"level": 3, "pass_config": {"fuse": True}}))
    ['--compilation-config.level=3', '--compilation-config.pass_config.fuse=true']
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _dotted(f"{key}.{name}", inner)
    else:
        yield f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def edit_llm(documents: list[Any], rec: Recommendation, names: Names) -> list[str]:
    """Set both limits in the variable that the template appends, or in arguments of its own.

    Workers of data parallelism run engines of their own, by a template that appends the same.
    """
    document = find_object(documents, ("LLMInferenceService",), names.workload)
    name = names.container or _LLM_CONTAINER
    holder = find_container(document, ("spec", "template"), _LLM_PATH, name)
    _edit_main(holder, rec, _LLM_PATH)
    spec, notes = document["spec"], []
    if (worker := spec.get("worker")) is not None:
        listed = worker.get("containers") if isinstance(worker, dict) else None
        mains = [c for c in listed or () if isinstance(c, dict) and c.get("name") == name]
        if mains and ("command" not in mains[0] or evidence(mains[0], "") == STARTS):
            _edit_main(mains[0], rec, "spec.worker.containers[]")
        else:
            notes.append(
                "spec.worker is left as it is: engines that it starts take their limits from "
                f"{_ENV} in a container {name} of its own"
            )
    if spec.get("prefill") is not None:
        notes.append(PREFILL_STAYS)
    annotate(document, rec.annotations())
    return notes


def _edit_main(holder: dict[str, Any], rec: Recommendation, shown: str) -> None:
    """Set both limits in a container of an LLMInferenceService. Raises: UsageError."""
    if "args" in holder or "command" in holder:
        edit_container(holder, rec.tuned, shown)
        return
    variables = holder.get("env")
    if variables is None:
        variables = holder["env"] = []
    if not isinstance(variables, list):
        raise no_place(f"a list of variables in {shown}.env", "no list")
    own = [v for v in variables if isinstance(v, dict) and v.get("name") == _ENV]
    if own and not isinstance(own[0].get("value"), str):
        raise no_place(f"a value of {_ENV} in {shown}.env", "a reference")
    if own:
        own[0]["value"] = like(own[0]["value"], edit_line(own[0]["value"], rec.tuned))
    else:
        variables.append({"name": _ENV, "value": edit_line("", rec.tuned).strip()})
