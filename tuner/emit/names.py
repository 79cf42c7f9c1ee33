"""What `tune emit` can write, by name: so that its help need not load what writes it."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """A deployment target, or a form of vLLM's own."""

    VLLM = "vllm"
    VLLM_EXACT = "vllm-exact"
    ARGS = "args"
    DOCKER_COMPOSE = "docker-compose"
    KUBERNETES = "kubernetes"
    PRODUCTION_STACK = "production-stack"
    VLLM_RUNTIME = "vllm-runtime"
    KSERVE = "kserve"
    KSERVE_LLM = "kserve-llm"
    LLM_D = "llm-d"
    AIBRIX = "aibrix"


class PatchKind(StrEnum):
    """A form in which a change of an existing object is written."""

    OBJECT = "object"
    """The changed fields alone, as `kubectl patch --patch-file` takes them."""
    COMPONENT = "component"
    """The same inside a Kustomize component."""


class GateFormat(StrEnum):
    """What `tune gate` can write a gate for."""

    MIDDLEWARE = "middleware"
    VLLM = "vllm"
    NGINX = "nginx"
    ENVOY = "envoy"
    KEDA = "keda"
    HPA = "hpa"
