"""A shell's script starts vLLM with both limits wherever it did, and runs as it ran."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.emit_files import SHELL
from support.emit_parts import a_run_dir
from support.emit_targets import in_a_shell
from tuner.cli import run
from tuner.emit.edits import edit_line

Output = pytest.CaptureFixture[str]
TUNED = {"max-num-seqs": 48, "max-num-batched-tokens": 4096}

STARTS = [
    "vllm serve m",
    "vllm serve m --max-num-seqs 256",
    'A=1 vllm serve "$MODEL" --max_num_seqs=256 2>/dev/null',
    "(vllm serve m --max-num-batched-tokens 2048)",
    "if [ -d / ]; then vllm serve m --max-num-seqs 256; else vllm serve n; fi",
    "vllm serve \\\n  m \\\n  --max-num-seqs \\\n  '256' # --max-num-seqs 2",
    "sh -c 'vllm serve m --max-num-seqs 256'",
    'sh -c "vllm serve $MODEL --port 1" vllm',
    "for m in a b; do vllm serve $m; done & wait",
    'ARGS="--max-num-seqs 256 --port 1"; vllm serve m $ARGS',
    "vllm serve m ${MODEL:+--max-num-seqs ${CAP:-256}} ${UNSET:+--max-num-seqs=$CAP} --seed 1",
    'vllm serve m --max-num-seqs "${CAP:-"256"}" --port 1',
    'case $MODEL in m) exec vllm serve "${MODEL:-a b}";; esac',
]
OTHERS = [
    "# vllm serve reads m from the hub; it's slow",
    "# --max-num-seqs 256 ran out of memory",
    'echo "starting vllm serve with $MODEL"',
    "echo starting vllm serve now",
    "cat <<END >/dev/null\nit's a note: $MODEL\nEND",
    "true && false || :",
]


def given_to_vllm(script: str, folder: Path) -> list[list[str]]:
    """Return the words of each `vllm serve` that a script runs, without those of echo."""
    path = f"{folder}:/usr/bin:/bin"
    done = in_a_shell(script, folder, {"PATH": path, "MODEL": "m", "VLLM_API_KEY": "@"})
    assert done.stderr == ""
    served = ("@\0" + done.stdout).split("@\0serve\0")[1:]
    return [each.split("\0")[:-1] for each in served]


@given(st.lists(st.sampled_from(OTHERS), max_size=3), st.sampled_from(STARTS), st.data())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
def test_each_start_has_both_limits_and_all_else_is_as_it_was(
    tmp_path: Path, others: list[str], start: str, data: st.DataObject
) -> None:
    script = "\n".join(data.draw(st.permutations([*others, start])))
    edited = edit_line(script, TUNED)
    assert edit_line(edited, TUNED) == edited
    subprocess.run(["/bin/sh", "-n", "-c", edited], check=True, timeout=60)
    assert all(other in edited for other in others)
    before, after = (given_to_vllm(text, tmp_path) for text in (script, edited))
    assert len(before) == len(after) > 0
    for words in after:
        text = " ".join(words).replace("=", " ").replace("_", "-")
        assert "--max-num-seqs 48" in text
        assert "--max-num-batched-tokens 4096" in text
        assert "256" not in text
        assert "2048" not in text
    assert [words[0] for words in after] == [words[0] for words in before]


@pytest.mark.parametrize(
    "start",
    [
        "vllm serve m --port 1 $MORE",
        'sh -c "vllm serve m $MORE"',
        "vllm serve m --max-num-seqs 128 $MORE",
        "vllm serve m --max-num-seqs=128 --enforce-eager ${MORE} --port 1",
        'set -- $MORE; vllm serve m --max-num-seqs 128 --seed "$@"',
    ],
)
def test_a_flag_that_a_variable_brings_is_not_the_last_one(start: str, tmp_path: Path) -> None:
    variables = {"PATH": f"{tmp_path}:/bin", "MORE": "--max-num-seqs=256 --seed=1"}
    edited = edit_line(f"{start} 2>&1", TUNED)
    assert edit_line(edited, TUNED) == edited
    done = in_a_shell(edited, tmp_path, variables)
    caps = [word for word in done.stdout.split("\0") if word.startswith("--max-num-seqs")]
    assert caps[-2:] == ["--max-num-seqs=256", "--max-num-seqs=48"]


@pytest.mark.parametrize("behind", ["--port $PORT", '-tp "$TP"', "${PORT:+--port $PORT}"])
def test_a_flag_is_not_repeated_behind_a_variable_that_holds_none(behind: str) -> None:
    line = "vllm serve m --max-num-seqs 256 --max-num-batched-tokens 2048"
    wanted = "vllm serve m --max-num-seqs 48 --max-num-batched-tokens 4096"
    assert edit_line(f"{line} {behind}", TUNED) == f"{wanted} {behind}"


def test_a_flag_that_is_shortened_is_not_the_last_one() -> None:
    """The parser of vLLM takes `--max-num-seq`, too, and of both the last."""
    assert edit_line("vllm serve m --max_num_seq 256 --seed 1 | tee log", TUNED) == (
        "vllm serve m --max-num-batched-tokens=4096 --max_num_seq 256 --seed 1 "
        "--max-num-seqs=48 | tee log"
    )


@pytest.mark.parametrize(
    "value",
    ["$(nproc --all)", '"$(nproc)"', "`nproc`", "4$(nproc)", '2"5"6', "${X:-4 --seed 1}"],
)
def test_a_value_that_cannot_be_told_from_what_follows_is_refused(
    value: str, tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SHELL.replace("seqs 256", f"seqs {value}"))
    source = str(a_run_dir(tmp_path))
    assert run(["emit", source, "--format", "kubernetes", "--merge", str(path)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert (
        f"{path} has no place for the limits: expected a plain value behind --max-num" in shown
    )
    assert "hint: write a number there" in shown
    assert value in path.read_text()


def test_a_script_that_only_speaks_of_vllm_is_refused(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SHELL.replace("exec vllm", "echo vllm"))
    source = str(a_run_dir(tmp_path))
    assert run(["emit", source, "--format", "kubernetes", "--merge", str(path)]) == 2
    assert "got a script without one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "stays"),
    [
        ("bench --max-num-seqs 7 & vllm serve m", True),
        ("vllm serve m --max-num-seqs 8; /usr/bin/bench --max-num-seqs=7", False),
        ("vllm serve m --max-num-seqs 8 && nice bench --max-num-seqs 7", False),
        ('serve() { vllm serve m "$@"; }; serve --max-num-seqs 7', False),
        ('set -- --max-num-seqs 7; vllm serve m "$@"', False),
        ("FLAGS='--max-num-seqs 7'; vllm serve m $FLAGS", False),
        ("vllm serve m; ./again.sh --max-num-seqs 7", False),
        ("bench --max-num-seqs 7", False),
    ],
)
def test_flags_of_another_program_stay_where_they_cannot_be_vllms(
    script: str, *, stays: bool
) -> None:
    """Beside a command that starts vLLM a program by its plain name has its own."""
    edited = edit_line(script, TUNED)
    assert ("seqs 7" in edited or "seqs=7" in edited) is stays
