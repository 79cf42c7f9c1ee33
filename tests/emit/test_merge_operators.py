"""What operators of Kubernetes make of a merged file: KServe and production-stack."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.emit_files import KSERVE, KSERVE_LLM, RUNTIME
from support.emit_parts import PLAIN, changed
from tuner.emit.names import Format
from tuner.emit.registry import emit, merge_into
from tuner.emit.target import Names

SIDECAR = "    containers: [{name: agent, image: x}]\n"
OF_ITS_OWN = """kind: InferenceService
spec:
  predictor:
    containers:
    - image: kserve/huggingfaceserver
      name: kserve-container
      args:
      - --max-num-seqs=256
"""


@pytest.mark.parametrize("text", [KSERVE, KSERVE + SIDECAR, OF_ITS_OWN])
def test_kserve_gets_flags_as_it_passes_them_on(text: str, tmp_path: Path) -> None:
    """Of a flag with underscores it takes no notice."""
    path = tmp_path / "service.yaml"
    path.write_text(text.replace("--max-num-seqs", "--max_num_seqs"))
    merged = merge_into(path, Format.KSERVE, PLAIN, Names())
    assert changed(merged.before, merged.after)[:2] == [
        "-      - --max_num_seqs=256",
        "+      - --max-num-seqs=48",
    ]


WORKER = "  worker: {containers: [{name: main, WORDS}]}\n"
OWN = "command: [bash, -c, 'ray start']"


@pytest.mark.parametrize(
    ("part", "lines", "said"),
    [
        (WORKER.replace("WORDS", "env: []"), 2, []),
        (WORKER.replace("WORDS", OWN), 1, ["spec.worker"]),
        ("  worker: {}\n  prefill: {}\n", 1, ["spec.worker", "prefill"]),
    ],
)
def test_workers_get_the_limits_of_their_leader_or_it_is_said(
    part: str, lines: int, said: list[str], tmp_path: Path
) -> None:
    """Each worker of data parallelism schedules by flags of its own."""
    path = tmp_path / "service.yaml"
    path.write_text(KSERVE_LLM + part)
    merged = merge_into(path, Format.KSERVE_LLM, PLAIN, Names())
    assert merged.after.count("--max-num-seqs=48") == lines
    assert [note.split(" is left as it is")[0] for note in merged.notes] == said


def test_what_an_operator_turns_off_unasked_is_told(tmp_path: Path) -> None:
    path = tmp_path / "runtime.yaml"
    path.write_text(RUNTIME)
    (note,) = merge_into(path, Format.VLLM_RUNTIME, PLAIN, Names()).notes
    assert note.startswith("enableChunkedPrefill is not set there, which turns it off")
    path.write_text(RUNTIME + "    extraArgs: [--enable-chunked-prefill]\n")
    assert not merge_into(path, Format.VLLM_RUNTIME, PLAIN, Names()).notes
    path.write_text(RUNTIME)
    without = replace(PLAIN, values={"model": "m", "no-enable-chunked-prefill": True})
    assert not merge_into(path, Format.VLLM_RUNTIME, without, Names()).notes


def test_a_shell_that_reads_kserve_s_line_once_more_changes_nothing_in_it() -> None:
    values = {
        "model": "m",
        "compilation-config": {"level": 3, "pass_config": {"fuse": True}},
        "limit-mm-per-prompt": {"image": 2},
        "speculative-config": {"method": "ngram", "sizes": [1, 2]},
    }
    text = emit(Format.KSERVE_LLM, replace(PLAIN, values=values), Names())
    (found,) = yaml.safe_load_all(text)
    (holder,) = found["spec"]["template"]["containers"]
    line = next(env["value"] for env in holder["env"] if env["name"] == "VLLM_ADDITIONAL_ARGS")
    shell = ["sh", "-c", f"eval \"printf '%s\\n' {line}\""]
    said = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert said.split() == line.split()
    assert "--compilation-config.level=3" in said
    assert "--compilation-config.pass_config.fuse=true" in said
    assert "--limit-mm-per-prompt.image=2" in said
    assert "speculative" not in line
    assert "left out speculative-config: its value has blanks or signs of a shell" in text
