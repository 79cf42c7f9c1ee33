"""A gate as what stands in front of vLLM takes it, with what it cannot hold said in comments.

Each bounds what it can: only our own middleware and Envoy keep a queue apart from the engine,
and only the middleware has a time-out for it and ends answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tuner.emit.comments import with_keys
from tuner.emit.names import GateFormat
from tuner.emit.yaml_text import commented, yaml_text
from tuner.errors import UsageError
from tuner.gate import ANSWERING, SETTINGS
from tuner.run.loads.gate import GateAnswer, goodput_per_s
from tuner.stats import short

FULLEST: Final = 0.8
"""Ours: an autoscaler's target for the requests in flight, as a share of what a gate lets in.
At more than that they could not rise far enough for another replica to be asked for."""
MOST_REPLICAS: Final = 8
"""Ours: a placeholder that whoever pays for replicas has to replace."""


NO_GATE: Final = "at none of these loads is a gate surely better than none: leave it out"


def evidence(answer: GateAnswer) -> list[str]:
    """Return what a gate is for and what it brings, line by line."""
    slos = ", ".join(map(str, answer.slos))
    lines = [
        f"a gate by tune for {with_keys(answer.limits)}: {answer.gate}",
        f"goodput within {slos}, predicted, {answer.error.words()}:",
    ]
    for at in answer.loads:
        before, gated = goodput_per_s(at.before), goodput_per_s(at.gated)
        interval = f"{at.elsewhere.low:+.3g} … {at.elsewhere.high:+.3g}/s"
        lines.append(
            f"  {at.load:g} x  {short(before)}/s -> {short(gated)}/s "
            f"({at.gained_per_s:+.3g}/s; on other traffic {interval}, P(better) {at.odds:.2f})"
        )
    return [*lines, *answer.error.lines(), *([] if answer.pays else [NO_GATE])]


def _middleware(answer: GateAnswer) -> str:
    notes = [
        "vllm serve … --middleware tuner.gate.Gate, with this file as its environment",
        "the package beside vLLM, or its gate.py alone on the PYTHONPATH as gate.Gate",
        "each API server process has a gate of its own: divide by --api-server-count",
        *evidence(answer),
    ]
    return commented(notes) + f"{SETTINGS}={answer.gate}\n"


def _vllm(answer: GateAnswer) -> str:
    gate = answer.gate
    notes = [
        "keys for vllm serve --config, since vLLM 0.29: 503 beyond",
        "bounds the engine and its queue together, without a time-out or a cap on answers",
        *evidence(answer),
    ]
    return yaml_text({"max-num-queued-reqs": gate.max_in_flight + gate.max_queued}, notes)


def _nginx(answer: GateAnswer) -> str:
    gate = answer.gate
    notes = [
        "inside http { } of nginx.conf",
        "open source nginx refuses beyond a number and keeps no queue: both together here",
        *evidence(answer),
    ]
    return commented(notes) + (
        # One key for all requests: nginx counts none whose key is empty, as an unset name's is.
        'limit_conn_zone "tune_gate" zone=tune_gate:1m;\n'
        "limit_conn_status 503;\n"
        "upstream vllm {\n"
        "    server 127.0.0.1:8000;\n"
        "}\n"
        "server {\n"
        "    listen 8080;\n"
        # Of all paths: what asks for no answer may be as large, as /tokenize or an embedding.
        "    client_max_body_size 64m;\n"
        "    proxy_buffering off;\n"
        "    proxy_read_timeout 1h;\n"
        f"    location ~ ({'|'.join(ANSWERING)})$ {{\n"
        f"        limit_conn tune_gate {gate.max_in_flight + gate.max_queued};\n"
        "        proxy_pass http://vllm;\n"
        "    }\n"
        "    location / {\n"
        "        proxy_pass http://vllm;\n"
        "    }\n"
        "}\n"
    )


def _envoy(answer: GateAnswer) -> str:
    gate = answer.gate
    notes = [
        "one of static_resources.clusters: over HTTP/1.1 a connection carries one request",
        "requests wait without a time-out of their own, and answers are not capped; Envoy also",
        "puts a request that finds a connection free into its queue first, which holds one",
        "at least therefore, or it would refuse everything",
        *evidence(answer),
    ]
    limits = {
        "priority": "DEFAULT",
        "max_connections": gate.max_in_flight,
        "max_requests": gate.max_in_flight + gate.max_queued,
        "max_pending_requests": max(1, gate.max_queued),
        "max_retries": 0,
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 8000}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    cluster = {
        "name": "vllm",
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": "vllm", "endpoints": endpoints},
        "circuit_breakers": {"thresholds": [limits]},
    }
    return yaml_text([cluster], notes)


def _target(answer: GateAnswer) -> int:
    """Return the requests in flight at which another replica is to come. Raises: UsageError."""
    if answer.in_flight is None:
        raise UsageError(
            "no number of replicas holds the SLOs: they hold at no load, however small",
            "allow more time with --slo, or choose limits at which they hold",
        )
    return max(1, int(min(answer.in_flight, FULLEST * answer.gate.max_in_flight)))


def _scaling_notes(answer: GateAnswer) -> list[str]:
    needed = (f"{at.load:g} x: {at.replicas}" for at in answer.loads)
    return [
        f"a replica holds {answer.capacity:.2g} x the recorded load within the SLOs, with "
        f"{answer.in_flight:.2g} requests in flight; replicas by load: {', '.join(needed)}",
        f"maxReplicas {MOST_REPLICAS} is a placeholder",
        *evidence(answer),
    ]


def _scaler(
    answer: GateAnswer, version: str, kind: str, spec: dict[str, Any], *notes: str
) -> str:
    """Return an autoscaler of the deployment, with what it rests on."""
    content = {"apiVersion": version, "kind": kind, "metadata": {"name": "vllm"}, "spec": spec}
    return yaml_text(content, [*notes, *_scaling_notes(answer)])


def _keda(answer: GateAnswer) -> str:
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": "http://prometheus:9090",
            "query": "sum(vllm:num_requests_running) + sum(vllm:num_requests_waiting)",
            "threshold": str(_target(answer)),
        },
    }
    spec = {
        "scaleTargetRef": {"name": "vllm"},
        "minReplicaCount": 1,
        "maxReplicaCount": MOST_REPLICAS,
        "triggers": [trigger],
    }
    note = "requests in flight of all replicas, over the threshold: so many replicas"
    return _scaler(answer, "keda.sh/v1alpha1", "ScaledObject", spec, note)


def _hpa(answer: GateAnswer) -> str:
    target = {"type": "AverageValue", "averageValue": str(_target(answer))}
    pods = {"metric": {"name": "vllm_num_requests_in_flight"}, "target": target}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm"},
        "minReplicas": 1,
        "maxReplicas": MOST_REPLICAS,
        "metrics": [{"type": "Pods", "pods": pods}],
    }
    return _scaler(
        answer,
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        spec,
        "the metric is vllm:num_requests_running + vllm:num_requests_waiting of a pod, which",
        "an adapter such as prometheus-adapter has to offer under this name",
    )


WRITERS: Final[Mapping[GateFormat, Callable[[GateAnswer], str]]] = {
    GateFormat.MIDDLEWARE: _middleware,
    GateFormat.VLLM: _vllm,
    GateFormat.NGINX: _nginx,
    GateFormat.ENVOY: _envoy,
    GateFormat.KEDA: _keda,
    GateFormat.HPA: _hpa,
}
