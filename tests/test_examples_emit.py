"""The files in examples/demo are what `tune emit` makes of the run that lies beside them.

`UPDATE_EXAMPLES=1 pytest tests/test_examples_emit.py` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuner.cli import run
from tuner.emit.names import Format

ROOT = Path(__file__).parents[1]
DEMO = Path("examples") / "demo"
FILES = {
    "best.yaml": (Format.VLLM,),
    "best-exact.yaml": (Format.VLLM_EXACT,),
    "serve.sh": (Format.ARGS,),
    "compose.yaml": (Format.DOCKER_COMPOSE,),
    "deployment.yaml": (Format.KUBERNETES,),
    "deployment-patch.yaml": (Format.KUBERNETES, "--patch"),
    "kustomize/kustomization.yaml": (Format.KUBERNETES, "--patch", "component"),
    "production-stack-values.yaml": (Format.PRODUCTION_STACK,),
    "vllmruntime-patch.yaml": (Format.VLLM_RUNTIME,),
    "inferenceservice.yaml": (Format.KSERVE,),
    "llminferenceservice.yaml": (Format.KSERVE_LLM,),
    "llm-d-values.yaml": (Format.LLM_D,),
    "aibrix.yaml": (Format.AIBRIX,),
}


def test_there_is_an_example_of_every_format() -> None:
    assert {words[0] for words in FILES.values()} == set(Format)
    kept = {str(p.relative_to(ROOT / DEMO)) for p in (ROOT / DEMO).rglob("*") if p.is_file()}
    others = {name for name in kept if not name.startswith("run/")} - {"current.yaml"}
    assert others == set(FILES)


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
