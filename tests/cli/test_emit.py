"""`tune emit` writes where it is told to, whole, and says what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.emit_files import FILES
from support.emit_parts import QWEN, a_run_dir, emitted
from tuner.cli import run
from tuner.emit.names import Format
from tuner.emit.registry import TARGETS

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("chosen", [c for c in Format if TARGETS[c].write is not None])
def test_every_format_can_be_asked_for(chosen: Format, tmp_path: Path, capsys: Output) -> None:
    folder = str(a_run_dir(tmp_path))
    text = emitted(capsys, folder, "--format", str(chosen))
    output = tmp_path / ("serve.sh" if chosen is Format.ARGS else "out.yaml")
    assert emitted(capsys, folder, "--format", str(chosen), "-o", str(output)) == ""
    assert output.read_text().splitlines()[1:] == text.splitlines()[1:]


def test_the_default_is_the_file_that_vllm_takes(tmp_path: Path, capsys: Output) -> None:
    values = yaml.safe_load(emitted(capsys, str(a_run_dir(tmp_path))))
    assert (values["max-num-seqs"], values["max-num-batched-tokens"]) == (48, 4096)


def test_a_file_is_as_good_a_source_as_a_run(tmp_path: Path, capsys: Output) -> None:
    folder = a_run_dir(tmp_path)
    best = tmp_path / "best.yaml"
    assert run(["emit", str(folder), "-o", str(best)]) == 0
    of_run = emitted(capsys, str(folder), "--format", "kubernetes")
    of_file = emitted(capsys, str(best), "--format", "kubernetes")
    assert [d["spec"] for d in yaml.safe_load_all(of_file)] == [
        d["spec"] for d in yaml.safe_load_all(of_run)
    ]


def test_the_result_of_a_run_names_the_run(tmp_path: Path, capsys: Output) -> None:
    folder = a_run_dir(tmp_path)
    assert emitted(capsys, str(folder / "result.json")) == emitted(capsys, str(folder))


def test_a_secret_goes_into_the_file_of_vllm_alone(tmp_path: Path, capsys: Output) -> None:
    best, other = tmp_path / "best.yaml", tmp_path / "again.yaml"
    best.write_text(yaml.safe_dump({**QWEN, "api-key": "s3cret-value"}))
    assert run(["emit", str(best), "-o", str(other)]) == 0
    assert "s3cret-value" in other.read_text()
    assert other.stat().st_mode & 0o777 == 0o600
    assert "s3cret-value" not in emitted(capsys, str(best), "--format", "args")


def test_the_model_may_have_another_name_where_it_is_served(
    tmp_path: Path, capsys: Output
) -> None:
    folder = str(a_run_dir(tmp_path, values={**QWEN, "model": "/data/qwen"}))
    text = emitted(capsys, folder, "--format", "llm-d", "--model", "Qwen/Qwen2.5-7B-Instruct")
    assert yaml.safe_load(text)["modelArtifacts"]["uri"] == "hf://Qwen/Qwen2.5-7B-Instruct"
    text = emitted(capsys, folder, "--format", "llm-d")
    assert yaml.safe_load(text)["modelArtifacts"]["uri"] == "pvc://qwen-model/qwen"
    assert "put /data/qwen into the volume claim qwen-model as qwen" in text


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (["--format", "helm"], "'helm' is not one of"),
        (["-o", "best.txt"], "-o best.txt must end in .yaml or .yml, got .txt"),
        (["-o", "none/best.yaml"], "none/best.yaml cannot be written: No such file"),
        (
            ["--patch"],
            "aibrix, kserve, kserve-llm, kubernetes, vllm-runtime, got --format vllm",
        ),
        (
            ["--patch", "--format", "kubernetes"],
            "--patch needs the manifest of what it changes",
        ),
        (["--format", "vllm-runtime"], "vllm-runtime changes an object that exists"),
        (["--format", "llm-d", "--name", "Bad Name!"], "--name 'Bad Name!' cannot be a name"),
        (["--merge", "gone.yaml"], "gone.yaml does not exist"),
        (["--merge", "."], ". cannot be read: Is a directory"),
        (["--merge", "latin.yaml"], "latin.yaml is not YAML: it is no text in UTF-8"),
    ],
)
def test_what_cannot_be_written_is_reported(
    more: list[str],
    shown: str,
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(a_run_dir(tmp_path))
    (tmp_path / "latin.yaml").write_bytes("model: é\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    assert run(["emit", folder, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert shown in err


@pytest.mark.parametrize(
    ("served", "more", "is_doubted"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", [], False),
        ("/models/qwen2.5-7b-instruct", [], False),
        ("Qwen/Qwen2.5-7B-Instruct-1M", [], True),
        ("/mnt/models", [], True),
        ("/mnt/models", ["--model", "/mnt/models"], False),
    ],
)
@pytest.mark.parametrize("patch", [[], ["--patch"]])
def test_limits_in_a_file_that_names_another_model_are_doubted(
    served: str,
    more: list[str],
    is_doubted: bool,
    patch: list[str],
    tmp_path: Path,
    capsys: Output,
) -> None:
    folder, theirs = str(a_run_dir(tmp_path)), tmp_path / "theirs.yaml"
    text = FILES[Format.KUBERNETES]
    assert text.count("Qwen/Qwen2.5-7B-Instruct") == 1
    theirs.write_text(text.replace("Qwen/Qwen2.5-7B-Instruct", served))
    words = ["--format", "kubernetes", "--merge", str(theirs), *patch, *more]
    assert run(["emit", folder, *words]) == 0
    note = f"note: {theirs} names Qwen/Qwen2.5-7B-Instruct nowhere, for which these limits"
    assert (note in capsys.readouterr().err) is is_doubted


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [
        ("no-enable-chunked-prefill: true\nmax-model-len: 8192", True),
        ("enable_chunked_prefill: false\nmax_model_len: 8k", True),
        ("enable-chunked-prefill: false", True),
        ("enable-chunked-prefill: false\nmax-model-len: 512", False),
        ("enable-chunked-prefill: true\nmax-model-len: 8192", False),
        ("max-model-len: 8192", False),
    ],
)
def test_a_file_that_vllm_does_not_start_with_these_limits_is_told(
    said: str, tmp_path: Path, capsys: Output, *, is_refused: bool
) -> None:
    """Of prompts that are computed whole the longest has to fit into a batch."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"model: Qwen/Qwen2.5-7B-Instruct\n{said}\n")
    assert run(["emit", str(a_run_dir(tmp_path)), "--merge", str(theirs)]) == 0
    note = f"note: {theirs} switches chunked prefill off: vLLM then refuses to start with a"
    assert (note in capsys.readouterr().err) is is_refused


def test_a_file_that_nobody_tuned_is_told_to_be_none(tmp_path: Path, capsys: Output) -> None:
    tuned, plain = tmp_path / "tuned.yaml", tmp_path / "current.yaml"
    tuned.write_text(emitted(capsys, str(a_run_dir(tmp_path))))
    plain.write_text(yaml.safe_dump(yaml.safe_load(tuned.read_text())))
    for path, said in ((tuned, ""), (plain, f"note: {plain} says nothing of a tuning")):
        assert run(["emit", str(path), "--format", "args"]) == 0
        err = capsys.readouterr().err
        assert err.startswith(said) if said else not err
