"""The files in examples/demo are what `tune emit` makes of the run that lies beside them.

`UPDATE_EXAMPLES=1 pytest tests/test_examples_emit.py` writes them anew.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from support.emit_targets import kubectl
from tuner.cli import run
from tuner.emit.names import Format

ROOT = Path(__file__).parents[1]
DEMO = Path("examples") / "demo"
DEPLOYMENT = ("--merge", str(DEMO / "current-deployment.yaml"))
FILES = {
    "best.yaml": (Format.VLLM,),
    "best-exact.yaml": (Format.VLLM_EXACT,),
    "serve.sh": (Format.ARGS,),
    "compose.yaml": (Format.DOCKER_COMPOSE,),
    "deployment.yaml": (Format.KUBERNETES,),
    "deployment-patch.yaml": (Format.KUBERNETES, "--patch", *DEPLOYMENT),
    "kustomize/kustomization.yaml": (Format.KUBERNETES, "--patch", "component", *DEPLOYMENT),
    "production-stack-values.yaml": (Format.PRODUCTION_STACK,),
    "vllmruntime-patch.yaml": (
        Format.VLLM_RUNTIME,
        *("--patch", "--merge", str(DEMO / "current-vllmruntime.yaml")),
    ),
    "inferenceservice.yaml": (Format.KSERVE,),
    "llminferenceservice.yaml": (Format.KSERVE_LLM,),
    "llm-d-values.yaml": (Format.LLM_D,),
    "aibrix.yaml": (Format.AIBRIX,),
}


def test_there_is_an_example_of_every_format() -> None:
    assert {words[0] for words in FILES.values()} == set(Format)
    kept = {str(p.relative_to(ROOT / DEMO)) for p in (ROOT / DEMO).rglob("*") if p.is_file()}
    others = {name for name in kept if not name.startswith("run/")}
    assert others - set(FILES) == {
        "current.yaml",
        "current-deployment.yaml",
        "current-vllmruntime.yaml",
    }


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_what_is_emitted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    chosen, *more = FILES[name]
    made = tmp_path / Path(name).name
    command = ["emit", str(DEMO / "run"), "--format", str(chosen), *more]
    assert run([*command, "-o", str(made)]) == 0
    kept = DEMO / name
    if os.environ.get("UPDATE_EXAMPLES"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(made.read_text())
    assert kept.read_text() == made.read_text()
    assert str(ROOT) not in kept.read_text()


def test_the_patches_fit_what_runs_and_keep_its_key(tmp_path: Path) -> None:
    demo = ROOT / DEMO
    (tmp_path / "kustomization.yaml").write_text("resources: [now.yaml]\ncomponents: [tuned]\n")
    shutil.copytree(demo / "kustomize", tmp_path / "tuned")
    shutil.copy(demo / "current-deployment.yaml", tmp_path / "now.yaml")
    flags = ["patch", "--local", "-o", "yaml", "--type", "json"]
    for kind in ("deployment", "vllmruntime"):
        done = kubectl(
            *(*flags, "-f", str(demo / f"current-{kind}.yaml")),
            *("--patch-file", str(demo / f"{kind}-patch.yaml")),
        )
        spec = yaml.safe_load(done.stdout)["spec"]
        if kind == "vllmruntime":
            assert spec["model"]["maxNumSeqs"] == 64
            assert spec["vllmConfig"]["extraArgs"][-1] == "--max-num-batched-tokens=512"
            continue
        args = spec["template"]["spec"]["containers"][0]["args"]
        assert (args[0], len(args)) == ("--api-key=$(API_KEY)", 7)
        assert args[-2:] == ["--max-num-seqs=64", "--max-num-batched-tokens=512"]
        assert yaml.safe_load(kubectl("kustomize", str(tmp_path)).stdout)["spec"] == spec
