"""A file that serves another model than the one that was tuned is changed, and it is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.emit_files import FILES
from support.emit_parts import PLAIN
from tuner.emit.names import Format
from tuner.emit.registry import merge_into
from tuner.emit.target import Names

QWEN = "Qwen/Qwen2.5-7B-Instruct"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
NAMING = [chosen for chosen, text in FILES.items() if QWEN in text]
IN_OTHER_WORDS = {
    "in a line": f"['vllm serve {QWEN} --port 1']",
    "by its flag": f"[--model, {QWEN}]",
    "in one word": f"[--model={QWEN}]",
    "by another engine's flag": f"[--model_id={QWEN}, --backend=vllm]",
    "behind serve": f"[vllm, serve, {QWEN}]",
}


def notes_on(text: str, chosen: Format, model: str, folder: Path) -> list[str]:
    path = folder / "mine.yaml"
    path.write_text(text)
    tuned = replace(PLAIN, values={"model": model})
    return [note for note in merge_into(path, chosen, tuned, Names()).notes if "serves" in note]


@pytest.mark.parametrize("chosen", NAMING)
def test_another_model_is_told_and_the_same_is_not(chosen: Format, tmp_path: Path) -> None:
    (told,) = notes_on(FILES[chosen], chosen, LLAMA, tmp_path)
    assert f"serves {QWEN}, and what was tuned is {LLAMA}" in told
    assert f"--model {QWEN}" in told
    for same in (QWEN, QWEN.lower(), f"hf://{QWEN}"):
        assert notes_on(FILES[chosen], chosen, same, tmp_path) == []


@pytest.mark.parametrize("words", IN_OTHER_WORDS)
def test_a_model_is_found_wherever_vllm_takes_it(words: str, tmp_path: Path) -> None:
    text = f"services:\n  vllm:\n    image: vllm/vllm\n    command: {IN_OTHER_WORDS[words]}\n"
    (told,) = notes_on(text, Format.DOCKER_COMPOSE, LLAMA, tmp_path)
    assert QWEN in told
    assert notes_on(text, Format.DOCKER_COMPOSE, QWEN, tmp_path) == []


@pytest.mark.parametrize("folder", ["/mnt/models", "./llama", "~/llama", "/data/a/b"])
def test_a_folder_may_hold_any_model(folder: str, tmp_path: Path) -> None:
    text = FILES[Format.KUBERNETES]
    assert notes_on(text, Format.KUBERNETES, folder, tmp_path) == []
    assert notes_on(text.replace(QWEN, folder), Format.KUBERNETES, LLAMA, tmp_path) == []
