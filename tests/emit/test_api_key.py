"""A configuration with an api-key is never emitted as a server that starts without one."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.emit_parts import KEYED, QWEN, a_run_dir, emitted, vllm_serve_parser
from support.emit_targets import STARTED, in_a_shell, kubectl, loaded
from support.run_parts import a_profile
from support.traffic import a_trace
from tuner.cli import run
from tuner.drift.watch.publish import Publisher, Reason
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation
from tuner.emit.registry import TARGETS, emit
from tuner.emit.target import ApiKey
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.redact import redacted
from tuner.shadow.profiles import write_profile

Output = pytest.CaptureFixture[str]
HELD = (Format.VLLM, Format.VLLM_EXACT)
IGNORED = (Format.KSERVE,)
OF_KUBERNETES = (
    Format.KUBERNETES,
    Format.AIBRIX,
    Format.KSERVE_LLM,
    Format.LLM_D,
    Format.PRODUCTION_STACK,
)
OF_A_SHELL = (Format.ARGS, Format.DOCKER_COMPOSE)
NOTHING: tuple[dict[str, str], ...] = ({}, {"VLLM_API_KEY": ""})
SHELLS = {
    "sh": ("/bin/sh",),
    "bash": ("/bin/bash",),
    # As somebody pastes it into a terminal: an error does not end this shell.
    "pasted": ("/bin/bash", "--norc", "--noprofile", "-i"),
}


@pytest.fixture(params=["with the key", "of a run", "of a file without"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return what knows of an api-key: by itself, as redacted, or as left out before."""
    folder, path = a_run_dir(tmp_path, values=KEYED), tmp_path / "best.yaml"
    if request.param == "of a run":
        return str(folder)
    if request.param == "of a file without":
        assert run(["emit", str(folder), "--allow-unauthenticated", "-o", str(path)]) == 0
        assert "api-key" not in yaml.safe_load(path.read_text())
    else:
        path.write_text(yaml.safe_dump(KEYED))
    return str(path)


def test_every_target_is_told_apart_here() -> None:
    written = {chosen for chosen, target in TARGETS.items() if target.write is not None}
    assert {*HELD, *IGNORED, *OF_KUBERNETES, *OF_A_SHELL} == written
    assert all(TARGETS[chosen].api_key is ApiKey.REQUIRED for chosen in OF_KUBERNETES)


def required_secret(chosen: Format, text: str) -> dict[str, str]:
    """Return name and key of the Secret without which Kubernetes starts no container."""
    document = loaded(text)[0]
    if chosen is Format.PRODUCTION_STACK:
        # deployment-vllm-multi.yaml and deployment-router.yaml make a secretKeyRef of both.
        held = document["servingEngineSpec"]["vllmApiKey"]
        return {"name": held.pop("secretName"), "key": held.pop("secretKey"), **held}
    pod = document["decode"] if chosen is Format.LLM_D else document["spec"]["template"]
    (container,) = pod.get("spec", pod)["containers"]
    (variable,) = [each for each in container["env"] if each["name"] == "VLLM_API_KEY"]
    found: dict[str, str] = variable["valueFrom"]["secretKeyRef"]
    return found


@pytest.mark.parametrize("chosen", OF_KUBERNETES)
def test_no_pod_starts_without_the_secret_that_the_comment_makes(
    chosen: Format, source: str, tmp_path: Path, capsys: Output
) -> None:
    text = emitted(capsys, source, "--format", str(chosen), "--name", "chat")
    assert required_secret(chosen, text) == {"name": "chat-api-key", "key": "api-key"}
    assert "k3y-value" not in text
    (command,) = [line[1:] for line in text.splitlines() if "kubectl create secret" in line]
    kubectl("version", "--client")
    path = str(Path(shutil.which("kubectl") or "").parent) + ":/usr/bin:/bin"
    command += " --dry-run=client -o yaml"
    made = in_a_shell(command, tmp_path, {"PATH": path, "VLLM_API_KEY": "k3y-value"})
    secret = yaml.safe_load(made.stdout)
    assert (secret["metadata"]["name"], list(secret["data"])) == ("chat-api-key", ["api-key"])
    for nothing in NOTHING:
        assert in_a_shell(command, tmp_path, {"PATH": path, **nothing}).stdout == ""


@pytest.mark.parametrize("chosen", [*OF_KUBERNETES, Format.DOCKER_COMPOSE])
def test_a_file_that_only_refers_to_the_key_stays_open_to_those_who_deploy_it(
    chosen: Format, tmp_path: Path
) -> None:
    path, profile = tmp_path / "out.yaml", a_profile(serve_values=KEYED)
    publisher = Publisher(path, chosen, profile, KEYED)
    path.write_text(emit(chosen, Recommendation(KEYED, EngineLimits(4, 512))))
    reason = Reason(a_trace([0.0, 1.0]), EngineLimits(4, 512), "-9 %", "why", "e", 1.8e9)
    text = publisher.changed(EngineLimits(8, 512), reason)
    assert "VLLM_API_KEY" in text.text
    assert not text.has_secrets


@pytest.mark.parametrize("chosen", [Format.KUBERNETES, Format.AIBRIX])
def test_kubernetes_takes_what_asks_for_the_key(
    chosen: Format, source: str, capsys: Output
) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in loaded(emitted(capsys, source, "--format", str(chosen))):
        validate(document, "1.33", strict=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_line_starts_nothing_without_the_key(
    shell: str, source: str, tmp_path: Path, capsys: Output
) -> None:
    text = emitted(capsys, source, "--format", "args")
    assert "k3y-value" not in text
    for nothing in NOTHING:
        done = in_a_shell(text, tmp_path, nothing, SHELLS[shell])
        assert "serve" not in done.stdout
        assert "VLLM_API_KEY: set it to the api-key that clients send" in done.stderr
    # Not exported, as an assignment at a prompt leaves it.
    for given, variables in (("", {"VLLM_API_KEY": "abc"}), ("VLLM_API_KEY=abc\n", {})):
        done = in_a_shell(given + text, tmp_path, variables, SHELLS[shell])
        assert done.stdout.split("\0")[:3] == ["abc", "serve", QWEN["model"]]


def test_compose_starts_nothing_without_the_key(
    source: str, tmp_path: Path, capsys: Output
) -> None:
    text = emitted(capsys, source, "--format", "docker-compose")
    assert "k3y-value" not in text
    project = pytest.importorskip("compose_spec").PyCompose
    read = project.from_yaml(text.replace("- ~/", "- /home/me/"))
    value = read.services["vllm"].environment["VLLM_API_KEY"]
    # Compose takes this form from the shell, which is here to read it.
    for shell_has, code in (({}, 2), ({"VLLM_API_KEY": ""}, 2), ({"VLLM_API_KEY": "abc"}, 0)):
        done = in_a_shell(f'echo "{value}"', tmp_path, shell_has)
        assert (done.returncode, done.stdout) == (code, "" if code else "abc\n")


@pytest.mark.parametrize("chosen", IGNORED)
def test_a_target_that_cannot_ask_is_refused(
    chosen: Format, source: str, capsys: Output
) -> None:
    command = ["emit", source, "--format", str(chosen)]
    assert run(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"a server of --format {chosen} answers without one" in err
    assert "--allow-unauthenticated" in err
    text = emitted(capsys, *command[1:], "--allow-unauthenticated")
    assert "# left out api-key: this runtime knows none, guard it from outside" in text


def test_vllms_own_file_holds_the_key_that_is_at_hand(tmp_path: Path) -> None:
    best, output = tmp_path / "best.yaml", tmp_path / "again.yaml"
    best.write_text(yaml.safe_dump(KEYED))
    assert run(["emit", str(best), "-o", str(output)]) == 0
    assert yaml.safe_load(output.read_text())["api-key"] == "k3y-value"
    assert output.stat().st_mode & 0o777 == 0o600


def test_vllms_own_file_is_refused_where_the_key_is_lost(
    tmp_path: Path, capsys: Output
) -> None:
    folder, best = str(a_run_dir(tmp_path, values=KEYED)), str(tmp_path / "best.yaml")
    for source, chosen in ((folder, HELD[0]), (folder, HELD[1]), (best, HELD[0])):
        command = ["emit", source, "--format", str(chosen), "-o", str(tmp_path / "out.yaml")]
        assert run(command) == 2
        assert "an api-key which is not kept here" in capsys.readouterr().err
        assert not (tmp_path / "out.yaml").exists()
        assert run([*command[:-1], best, "--allow-unauthenticated"]) == 0
        assert (
            "# left out api-key, which is a secret: set VLLM_API_KEY" in Path(best).read_text()
        )


def test_without_a_key_nobody_is_asked_for_one(tmp_path: Path, capsys: Output) -> None:
    folder = str(a_run_dir(tmp_path))
    for chosen, target in TARGETS.items():
        if target.write is not None:
            assert "API_KEY" not in emitted(capsys, folder, "--format", str(chosen))


def test_several_keys_become_one_and_it_is_said(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "best.yaml"
    path.write_text(yaml.safe_dump({**QWEN, "api_key": ["one", "two"]}))
    for chosen in (*OF_KUBERNETES, *OF_A_SHELL):
        text = emitted(capsys, str(path), "--format", str(chosen))
        assert "# api-key lists 2 keys, and VLLM_API_KEY holds one of them" in text


def test_a_run_refuses_before_it_starts_what_it_could_not_write(
    tmp_path: Path, capsys: Output
) -> None:
    config, trace = tmp_path / "mine.yaml", tmp_path / "t.jsonl"
    config.write_text("model: m\napi-key: k3y-value\n")
    trace.write_text('{"arrived_at_s": 0, "input_length": 4, "output_length": 4}\n' * 9)
    command = ["--trace", str(trace), "--config", str(config), "--run-dir", str(tmp_path / "r")]
    assert run([*command, "--format", "kserve"]) == 2
    assert "a server of --format kserve answers without one" in capsys.readouterr().err
    # A profile keeps no secrets, and a shadow run needs none until it writes its file.
    profile = tmp_path / "profile.yaml"
    write_profile(profile, a_profile(serve_values=redacted(KEYED)))
    shadow = [*command[:2], *command[4:], "--method", "shadow", "--profile", str(profile)]
    assert run(shadow) == 2
    assert "an api-key which is not kept here" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_watch_refuses_at_its_start_a_file_without_the_key(tmp_path: Path) -> None:
    path, profile = tmp_path / "out.yaml", a_profile()
    for chosen, shown in (
        (Format.VLLM, "an api-key which is not kept here"),
        (Format.KSERVE, "answers without one"),
        (Format.VLLM_RUNTIME, "changes an object that exists"),
    ):
        with pytest.raises(UsageError, match=shown):
            Publisher(path, chosen, profile, {"model": "m"}, ("api_key",))
    Publisher(path, Format.ARGS, profile, {"model": "m"}, ("api_key",))
    path.write_text("model: m\nmax-num-seqs: 4\nmax-num-batched-tokens: 64\n")
    Publisher(path, Format.VLLM, profile, {"model": "m"}, ("api_key",))


def models() -> dict[str, str]:
    """Answer as a server that lets everybody in."""
    return {}


@pytest.mark.engine
def test_vllms_server_asks_for_the_key_of_the_variable(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastapi = pytest.importorskip("fastapi")
    client = pytest.importorskip("fastapi.testclient").TestClient
    register = pytest.importorskip("vllm.entrypoints.serve.middleware.register")
    source = str(a_run_dir(tmp_path, values=KEYED))
    text = emitted(capsys, source, "--format", "kubernetes")
    words = STARTED[Format.KUBERNETES](text, tmp_path)
    args: argparse.Namespace = vllm_serve_parser().parse_args(["serve", *words])
    answers: dict[str, tuple[int, int]] = {}
    for key in ("k3y-value", ""):
        monkeypatch.setenv("VLLM_API_KEY", key)
        app: Any = fastapi.FastAPI()
        app.get("/v1/models")(models)
        register.init_entrypoints_middleware(args, app, ())
        with client(app) as asking:
            headers = {"Authorization": "Bearer k3y-value"}
            answers[key] = (
                asking.get("/v1/models").status_code,
                asking.get("/v1/models", headers=headers).status_code,
            )
    # An empty key is none: hence the refusals above of a variable that is empty.
    assert answers == {"k3y-value": (401, 200), "": (200, 200)}
