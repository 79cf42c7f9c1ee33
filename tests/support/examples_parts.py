"""What the tests of the examples share: their texts, their commands, and a small API server."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.paths import ROOT

SCHEDULE = ROOT / "examples" / "schedule"
NAMESPACE = "vllm"
PATIENCE_S = 60.0
_VERBS = {"GET": "get", "PATCH": "patch", "POST": "create", "PUT": "update"}


def ran(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is."""
    words = [str(word) for word in command]
    return subprocess.run(
        words,
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def succeeded(*command: str | Path, **how: Any) -> str:
    """Run a command that must succeed, and return what it said."""
    done = ran(*command, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def need(program: str, package: str) -> None:
    """Skip where a program is missing, and say how to get it."""
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here: apt-get install {package}")


def kustomized() -> dict[str, dict[str, Any]]:
    """Return what `kubectl apply -k` would send, by kind."""
    made = yaml.safe_load_all(succeeded("kubectl", "kustomize", SCHEDULE / "kubernetes"))
    return {found["kind"]: found for found in made}


def interpolated(text: str) -> str:
    """Put defaults in place of variables, as docker compose does before it reads the file."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def compose_file() -> dict[str, Any]:
    """Return the compose file as it is without any variable set."""
    text = (SCHEDULE / "compose" / "docker-compose.yaml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(interpolated(text))
    return loaded


def cron_lines() -> list[list[str]]:
    """Return the lines of the crontab that run something: five fields, account, command."""
    text = (SCHEDULE / "cron" / "tune").read_text()
    return [
        line.split(maxsplit=6)
        for line in text.splitlines()
        if line and not line.startswith("#") and not re.match(r"\w+=", line)
    ]


def tune_commands() -> dict[str, list[str]]:
    """Return every command of ours in the examples, by where it stands, after `tune`."""
    found: dict[str, list[str]] = {}
    for unit in ("tune-watch", "tune-check"):
        text = (SCHEDULE / "systemd" / f"{unit}.service").read_text()
        joined = text.replace("\\\n", " ").replace("%%", "%")
        (line,) = re.findall(r"^ExecStart=(.*)$", joined, re.MULTILINE)
        found[unit] = shlex.split(line)[1:]
    for line in cron_lines():
        words = shlex.split(re.split(r" (?:>>|2>)", line[6])[0].replace("\\%", "%"))
        found[f"cron {words[1]}"] = words[1:]
    (job,) = yaml.safe_load_all((SCHEDULE / "kubernetes" / "cronjob.yaml").read_text())
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    found["kubernetes"] = pod["containers"][0]["args"]
    found["compose"] = compose_file()["services"]["watcher"]["command"]
    return found


class ApiServer:
    """One ConfigMap behind the part of Kubernetes' API that kubectl asks for it.

    It answers discovery, reading and merging, and forbids what the rules of a Role do not
    allow. Admission and validation it has none.
    """

    def __init__(
        self, name: str, data: dict[str, str], rules: Sequence[dict[str, Any]]
    ) -> None:
        self.config_map: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": "1"},
            "data": data,
        }
        self.asked: list[str] = []
        self._rules = rules

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and object for a request."""
        if path in _DISCOVERY:
            return 200, _DISCOVERY[path]
        verb, name = _VERBS[method], path.rsplit("/", 1)[-1]
        self.asked.append(f"{verb} {name}")
        if not any(_allows(rule, verb, name) for rule in self._rules):
            return 403, _failure(403, "Forbidden", f"cannot {verb} configmap {name}")
        if path != f"/api/v1/namespaces/{NAMESPACE}/configmaps/{self._name}":
            return 404, _failure(404, "NotFound", f"no {path}")
        if verb == "patch":
            patch = json.loads(body)
            assert set(patch) == {"data"}
            self.config_map["data"] |= patch["data"]
        return 200, self.config_map

    @property
    def _name(self) -> str:
        return str(self.config_map["metadata"]["name"])


def _allows(rule: dict[str, Any], verb: str, name: str) -> bool:
    named = rule.get("resourceNames")
    return (
        "" in rule["apiGroups"]
        and "configmaps" in rule["resources"]
        and verb in rule["verbs"]
        and (named is None or name in named)
    )


def _failure(code: int, reason: str, message: str) -> dict[str, Any]:
    failed = {"apiVersion": "v1", "kind": "Status", "status": "Failure"}
    return {**failed, "code": code, "reason": reason, "message": message}


_CONFIG_MAPS = {
    "name": "configmaps",
    "singularName": "configmap",
    "namespaced": True,
    "kind": "ConfigMap",
    "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
    "shortNames": ["cm"],
}
_DISCOVERY: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4"},
    "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [_CONFIG_MAPS]},
}


@contextmanager
def serving(api: ApiServer, folder: Path) -> Iterator[Path]:
    """Serve the API on loopback; give the kubectl configuration that points there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            path = self.path.partition("?")[0]
            code, found = api.answer(self.command, path, self.rfile.read(length))
            text = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PATCH = do_POST = do_PUT = _reply  # noqa: N815 - http.server's own names

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    config = folder / "kubeconfig"
    named = {"cluster": "here", "user": "nobody", "namespace": NAMESPACE}
    written = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "contexts": [{"name": "here", "context": named}],
        "users": [{"name": "nobody", "user": {}}],
    }
    config.write_text(yaml.safe_dump(written))
    try:
        yield config
    finally:
        server.shutdown()
        server.server_close()
