"""A patch sets both limits in what runs and keeps all else, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from support.emit_files import KSERVE, KSERVE_LLM, RUNTIME, SHELL
from support.emit_parts import KEYED, RUN_ID, a_run_dir, vllm_serve_parser
from support.emit_targets import STARTED, kubectl
from tuner.cli import run
from tuner.emit.json_patch import operations
from tuner.emit.names import Format

Output = pytest.CaptureFixture[str]

KEY = "--api-key=$(KEY)"
RUNNING = f"""\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: chat
  namespace: search
  annotations: {{team: search}}
spec:
  replicas: 4
  selector: {{matchLabels: {{app: chat}}}}
  template:
    metadata: {{labels: {{app: chat}}}}
    spec:
      containers:
      - {{name: proxy, image: envoy, args: ["--max-num-seqs", "256"]}}
      - name: engine
        image: mine:1
        command: [vllm, serve, Qwen/Qwen2.5-7B-Instruct]
        args: ["{KEY}", --max-num-seqs, "256", --max-num-active-seqs, "4", --enforce-eager]
        env: [{{name: KEY, valueFrom: {{secretKeyRef: {{name: chat, key: key}}}}}}]
"""


def patch_of(root: Path, text: str, chosen: Format, *more: str) -> Path:
    """Return the patch that `tune emit` makes of a manifest, for a run that knew of a key."""
    manifest, patch = root / "running.yaml", root / "tuned" / "kustomization.yaml"
    manifest.write_text(text)
    patch.parent.mkdir()
    source = str(a_run_dir(root, values=KEYED))
    command = ["emit", source, "--format", str(chosen), "--merge", str(manifest)]
    assert run([*command, "-o", str(patch), *more]) == 0
    assert manifest.read_text() == text
    return patch


def patched(root: Path, text: str, patch: Path) -> dict[str, Any]:
    """Return the object after `kubectl patch`, as the patch says itself how to call it."""
    command = patch.read_text().splitlines()[0].removeprefix("# kubectl ").split()
    kind, name, place = command[1], command[2], command.index("--type")
    (root / "now.yaml").write_text(text)
    done = kubectl(
        *("patch", "--local", "-f", str(root / "now.yaml"), "-o", "json"),
        *command[place:-1],
        str(patch),
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert (kind, name) == (found["kind"].lower(), found["metadata"]["name"])
    return found


def built(root: Path) -> dict[str, Any]:
    """Return the running object with the component put on, as Kustomize makes it."""
    (root / "kustomization.yaml").write_text("resources: [running.yaml]\ncomponents: [tuned]\n")
    found: dict[str, Any] = yaml.safe_load(kubectl("kustomize", str(root)).stdout)
    return found


def check(document: dict[str, Any]) -> None:
    """See that both limits and the provenance changed, and nothing else."""
    wanted = yaml.safe_load(RUNNING)
    engine = wanted["spec"]["template"]["spec"]["containers"][1]
    limits = ["--max-num-seqs", "48", "--enforce-eager", "--max-num-batched-tokens", "4096"]
    engine["args"] = [KEY, *limits]
    annotations = document["metadata"].pop("annotations")
    assert annotations.pop("max-num-seqs-tuner/run-id") == RUN_ID
    assert {key: text for key, text in annotations.items() if "tuner/" not in key} == wanted[
        "metadata"
    ].pop("annotations")
    assert document == wanted


def test_the_patch_keeps_the_key_of_what_runs(tmp_path: Path) -> None:
    patch = patch_of(tmp_path, RUNNING, Format.KUBERNETES, "--patch")
    assert patch.read_text().startswith(
        "# kubectl patch deployment chat -n search --type json --patch-file "
    )
    check(patched(tmp_path, RUNNING, patch))


def test_the_component_keeps_the_key_of_what_is_in_the_repository(tmp_path: Path) -> None:
    patch_of(tmp_path, RUNNING, Format.AIBRIX, "--patch", "component")
    check(built(tmp_path))


CHANGED_SINCE = {
    "another argument in front": RUNNING.replace(f'"{KEY}", ', f'"{KEY}", --seed=1, '),
    "another value": RUNNING.replace('"256", --max-num-active', '"128", --max-num-active'),
    "another order of containers": RUNNING.replace("name: engine", "name: proxy2"),
}


@pytest.mark.parametrize("text", CHANGED_SINCE.values(), ids=CHANGED_SINCE)
def test_a_patch_is_refused_where_the_arguments_have_changed_since(
    text: str, tmp_path: Path
) -> None:
    patch = patch_of(tmp_path, RUNNING, Format.KUBERNETES, "--patch")
    (tmp_path / "running.yaml").write_text(text)
    done = kubectl(
        *("patch", "--local", "-f", str(tmp_path / "running.yaml"), "--type", "json"),
        *("--patch-file", str(patch), "-o", "json"),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "testing value /spec/template/spec/containers/1/" in done.stderr


@pytest.mark.parametrize("tag", ["!Ref", "!vault"])
def test_a_manifest_with_tags_of_another_tool_is_merged_and_has_no_patch(
    tag: str, tmp_path: Path, capsys: Output
) -> None:
    manifest, merged = tmp_path / "running.yaml", tmp_path / "merged.yaml"
    manifest.write_text(RUNNING.replace("name: chat\n", f"name: {tag} chat\n", 1))
    source = str(a_run_dir(tmp_path, values=KEYED))
    command = ["emit", source, "--format", "kubernetes", "--merge", str(manifest)]
    assert run([*command, "--patch"]) == 2
    assert f"running.yaml has the tag {tag} in line 4" in capsys.readouterr().err
    assert run([*command, "-o", str(merged)]) == 0
    assert f"\n  name: {tag} chat\n" in merged.read_text()


def test_a_patch_without_the_manifest_is_refused(tmp_path: Path, capsys: Output) -> None:
    source = str(a_run_dir(tmp_path, values=KEYED))
    for kind in ("object", "component"):
        assert run(["emit", source, "--format", "kubernetes", "--patch", kind]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "--patch needs the manifest of what it changes" in err
        assert "hint:  kubectl get KIND NAME -o yaml > running.yaml" in err


@pytest.mark.engine
def test_a_vllm_runtime_is_patched_and_starts_vllm_as_it_did(tmp_path: Path) -> None:
    running = RUNTIME + '    v1: true\n    extraArgs: ["--api-key=k3y-in-use", "--seed=1"]\n'
    patch = patch_of(tmp_path, running, Format.VLLM_RUNTIME, "--patch")
    assert "k3y" not in patch.read_text()
    text = json.dumps(patched(tmp_path, running, patch))
    words = STARTED[Format.VLLM_RUNTIME](text, tmp_path)
    read = vllm_serve_parser().parse_args(["serve", *words])
    assert (read.max_num_seqs, read.max_num_batched_tokens) == (48, 4096)
    assert (read.api_key, read.seed) == (["k3y-in-use"], 1)
    assert read.model_tag == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("chosen", "text", "place", "value"),
    [
        (
            Format.VLLM_RUNTIME,
            RUNTIME,
            ("vllmConfig", "extraArgs"),
            ["--max-num-batched-tokens=4096"],
        ),
        (
            Format.KSERVE,
            KSERVE,
            ("predictor", "model", "args"),
            [
                "--model_id=Qwen/Qwen2.5-7B-Instruct",
                "--max-num-seqs=48",
                "--max-num-batched-tokens=4096",
            ],
        ),
        (
            Format.KSERVE_LLM,
            KSERVE_LLM,
            ("template", "containers", 0, "env", 0, "value"),
            "--enable-auto-tool-choice --max-num-seqs=48 --tool-call-parser=qwen3_coder "
            "--max-num-batched-tokens=4096",
        ),
    ],
)
def test_custom_objects_are_patched(
    chosen: Format,
    text: str,
    place: tuple[str | int, ...],
    value: object,
    tmp_path: Path,
    capsys: Output,
) -> None:
    patch_of(tmp_path, text, chosen, "--patch", "component")
    assert "has no metadata.annotations to add to" in " ".join(capsys.readouterr().err.split())
    document = built(tmp_path)
    assert "annotations" not in document["metadata"]
    found = document["spec"]
    for key in place:
        found = found[key]
    assert found == value


def test_what_somebody_has_added_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    patch_of(tmp_path, RUNTIME, Format.VLLM_RUNTIME, "--patch", "component")
    (tmp_path / "running.yaml").write_text(RUNTIME + "    extraArgs: ['--api-key=$(KEY)']\n")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [running.yaml]\ncomponents: [tuned]\n"
    )
    done = kubectl("kustomize", str(tmp_path), check=False)
    assert done.returncode == 1
    assert "testing value /spec/vllmConfig/extraArgs failed" in done.stderr


def test_a_line_that_holds_a_secret_is_not_quoted(tmp_path: Path, capsys: Output) -> None:
    manifest = tmp_path / "mine.yaml"
    command = ["emit", str(a_run_dir(tmp_path)), "--format", "kubernetes"]
    command += ["--patch", "--merge", str(manifest)]
    for key, code in (("sk-secret", 2), ("$KEY", 0), ("$(KEY)", 0), ('"${KEY}"', 0)):
        manifest.write_text(
            SHELL.replace("--max-num-seqs 256", f"--api-key {key} --max-num-seqs 256")
        )
        assert run(command) == code
        out, err = capsys.readouterr()
        assert "sk-secret" not in out + err
        assert ("by a line that holds a secret" in err) == (code == 2)
        assert (f"--api-key {key}" in yaml.safe_load(out or "[{}]")[-1].get("value", "")) == (
            code == 0
        )


def test_a_patch_of_what_has_these_values_changes_nothing(
    tmp_path: Path, capsys: Output
) -> None:
    manifest, patch = tmp_path / "running.yaml", tmp_path / "patch.yaml"
    manifest.write_text(RUNNING)
    source = str(a_run_dir(tmp_path))
    command = ["emit", source, "--format", "kubernetes", "--merge", str(manifest)]
    assert run(command) == 0
    capsys.readouterr()
    assert run([*command, "--patch", "-o", str(patch)]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "has these values already: the patch changes nothing" in shown
    assert yaml.safe_load(patch.read_text()) == []
    (tmp_path / "tuned").mkdir()
    component = tmp_path / "tuned" / "kustomization.yaml"
    assert run([*command, "--patch", "component", "-o", str(component)]) == 0
    assert built(tmp_path) == yaml.safe_load(manifest.read_text())


WORDS = st.lists(
    st.sampled_from(["--a", "--b=1", "4", "--max-num-seqs", "256", "x"]), max_size=7
)


def applied(words: list[str], made: list[dict[str, Any]]) -> list[str]:
    """Return a list after a JSON patch, as RFC 6902 applies one."""
    now = list(words)
    for each in made:
        place = len(now) if each["path"] == "/-" else int(each["path"][1:])
        match each["op"]:
            case "test":
                assert now[place] == each["value"]
            case "replace":
                now[place] = each["value"]
            case "remove":
                del now[place]
            case "add":
                now.insert(place, each["value"])
    return now


@given(WORDS, WORDS)
def test_the_operations_make_one_list_of_the_other(before: list[str], after: list[str]) -> None:
    assert applied(before, operations(before, after)) == after
