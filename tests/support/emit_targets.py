"""What each deployment target makes of a file: the words that vLLM is started with there.

Written from the targets' own templates, whose places stand in the modules of `tuner.emit`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuner.emit.names import Format


def expanded(words: list[str]) -> list[str]:
    """Return words after Kubernetes, or Compose, has put its variables in: there are none."""
    for word in words:
        assert "$" not in word.replace("$$", ""), f"{word} would be expanded"
    return [word.replace("$$", "$") for word in words]


def by_vllm(text: str, folder: Path) -> list[str]:
    path = folder / "best.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def by_shell(text: str, folder: Path) -> list[str]:
    """Let a shell run the file, with a `vllm` that prints what it is given."""
    done = in_a_shell(text, folder)
    assert done.returncode == 0, done.stderr
    serve, *words = done.stdout.split("\0")[1:-1]
    assert serve == "serve"
    return words


def in_a_shell(
    text: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    shell: tuple[str, ...] = ("/bin/sh",),
) -> subprocess.CompletedProcess[str]:
    """Return what a shell made of a text on its standard input.

    The `vllm` that it finds prints the key that it is given, and its arguments.
    """
    (folder / "vllm").write_text('#!/bin/sh\nprintf \'%s\\0\' "$VLLM_API_KEY" "$@"\n')
    (folder / "vllm").chmod(0o755)
    return subprocess.run(
        [*shell],
        input=text,
        env={"PATH": str(folder), **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def by_compose(text: str, _: Path) -> list[str]:
    return expanded(yaml.safe_load(text)["services"]["vllm"]["command"])


def by_kubernetes(text: str, _: Path) -> list[str]:
    pod = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = expanded([*container["command"], *container["args"]])
    assert words[:2] == ["vllm", "serve"]
    return words[2:]


def by_stack_chart(text: str, _: Path) -> list[str]:
    """Read values as the chart's template does; a key that it does not know does nothing."""
    (model,) = yaml.safe_load(text)["servingEngineSpec"]["modelSpec"]
    config = dict(model["vllmConfig"])
    words = [model["modelURL"], "--host", "0.0.0.0", "--port", "8000"]  # noqa: S104 - the chart says so
    if "enableChunkedPrefill" in config:
        on = config.pop("enableChunkedPrefill")
        words.append("--enable-chunked-prefill" if on else "--no-enable-chunked-prefill")
    on = config.pop("enablePrefixCaching", False)
    words.append("--enable-prefix-caching" if on else "--no-enable-prefix-caching")
    for key, flag in (
        ("maxModelLen", "--max-model-len"),
        ("dtype", "--dtype"),
        ("tensorParallelSize", "--tensor-parallel-size"),
        ("maxNumSeqs", "--max-num-seqs"),
        ("gpuMemoryUtilization", "--gpu_memory_utilization"),
    ):
        if key in config:
            words.extend([flag, str(config.pop(key))])
    extra = config.pop("extraArgs")
    assert config == {}, "keys that the chart ignores"
    return [*words, *expanded(extra)]


def by_operator(text: str, _: Path) -> list[str]:
    """Read an object as the operator does."""
    spec = yaml.safe_load(text)["spec"]
    model, config = dict(spec["model"]), dict(spec["vllmConfig"])
    words = [model.pop("modelURL"), "--port", str(config.pop("port"))]
    for held, key, flag in (
        (model, "maxModelLen", "--max-model-len"),
        (model, "dtype", "--dtype"),
        (model, "maxNumSeqs", "--max-num-seqs"),
        (config, "tensorParallelSize", "--tensor-parallel-size"),
        (config, "gpuMemoryUtilization", "--gpu_memory_utilization"),
    ):
        if key in held:
            words.extend([flag, str(held.pop(key))])
    for key, flag in (
        ("enableChunkedPrefill", "enable-chunked-prefill"),
        ("enablePrefixCaching", "enable-prefix-caching"),
    ):
        words.append(f"--{flag}" if config.pop(key, False) else f"--no-{flag}")
    extra = config.pop("extraArgs")
    # Without it the operator asks for the engine that vLLM no longer has.
    assert config.pop("v1") is True
    assert (model, config) == ({}, {}), "fields that the operator has not"
    return [*words, *expanded(extra)]


def by_kserve(text: str, _: Path) -> list[str]:
    """Read the arguments as the runtime does: its own flags first, what is left is vLLM's."""
    model = yaml.safe_load(text)["spec"]["predictor"]["model"]
    own = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("model_name", "model_id", "model_revision", "tokenizer_revision"):
        own.add_argument(f"--{flag}")
    own.add_argument("--max_model_len", type=int)
    own.add_argument("--trust_remote_code", action="store_true")
    read, rest = own.parse_known_args(expanded(model["args"]))
    assert not any("_" in word.partition("=")[0] for word in rest if word.startswith("--"))
    length = [] if read.max_model_len is None else [f"--max-model-len={read.max_model_len}"]
    return [str(read.model_id), "--served-model-name", read.model_name, *length, *rest]


def by_kserve_llm(text: str, _: Path) -> list[str]:
    """Read the variable as the shell does that the template starts vLLM with."""
    spec = yaml.safe_load(text)["spec"]
    (container,) = spec["template"]["containers"]
    assert container["name"] == "main"
    variable = container["env"][0]
    assert variable["name"] == "VLLM_ADDITIONAL_ARGS"
    model = re.sub(r"^\w+://", "", spec["model"]["uri"])
    first = [model, "--served-model-name", spec["model"]["name"], "--port", "8000"]
    return [*first, *expanded([variable["value"]])[0].split()]


def by_llm_d(text: str, _: Path) -> list[str]:
    """Read values as the chart's helpers do where modelCommand is vllmServe."""
    values = yaml.safe_load(text)
    (container,) = values["decode"]["containers"]
    assert container["modelCommand"] == "vllmServe"
    artifacts, parallelism = values["modelArtifacts"], values["decode"]["parallelism"]
    words = [re.sub(r"^\w+://", "", artifacts["uri"]), "--port", "8200"]
    if parallelism["tensor"] > 1:
        words.extend(["--tensor-parallel-size", str(parallelism["tensor"])])
    return [*words, "--served-model-name", artifacts["name"], *expanded(container["args"])]


STARTED: dict[Format, Callable[[str, Path], list[str]]] = {
    Format.VLLM: by_vllm,
    Format.VLLM_EXACT: by_vllm,
    Format.ARGS: by_shell,
    Format.DOCKER_COMPOSE: by_compose,
    Format.KUBERNETES: by_kubernetes,
    Format.PRODUCTION_STACK: by_stack_chart,
    Format.VLLM_RUNTIME: by_operator,
    Format.KSERVE: by_kserve,
    Format.KSERVE_LLM: by_kserve_llm,
    Format.LLM_D: by_llm_d,
    Format.AIBRIX: by_kubernetes,
}

SETS_ITS_OWN_PORT = {
    Format.PRODUCTION_STACK,
    Format.VLLM_RUNTIME,
    Format.KSERVE,
    Format.KSERVE_LLM,
    Format.LLM_D,
}


def kubectl(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Return what kubectl made of its arguments; nothing it does here needs a cluster."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here: apt-get install kubernetes-client")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


def loaded(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML text."""
    return list(yaml.safe_load_all(text))
