"""The command says what is wrong, at once and in one form, and its help can be trusted."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from support.paths import TESTS
from support.toy_tune import write_trace
from tuner.cli import run
from tuner.cli.commands import tune
from tuner.cli.displays import talk

SNAPSHOT = TESTS / "snapshots" / "help.txt"
HELP_S = 0.2
"""Processor time, the least of three: a busy machine takes longer by the wall."""
HEAVY = ("vllm", "torch", "optuna", "polars", "rich", "numpy", "yaml")
LINE = '{"arrived_at_s": 0, "input_length": %s, "output_length": %s}\n'
FILES = {
    "empty.jsonl": "",
    "words.jsonl": LINE % (1, 1) + "not json\n",
    "lacks.jsonl": LINE % (1, 1) + '{"arrived_at_s": 0, "input_length": 1}\n',
    "negative.jsonl": LINE % (-1, 1),
    "absurd.jsonl": LINE % (10**11, 1),
    "silent.jsonl": LINE % (5, 0),
    "lfs.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n",
    "list.yaml": "- a\n",
    "keyless.yaml": "port: 8000\n",
    "gone.yaml": "model: ./no-such-model\n",
}
Output = pytest.CaptureFixture[str]

BAD_INPUT = [
    ("--trace none.jsonl", ("none.jsonl", "no such file")),
    ("--trace empty.jsonl", ("empty.jsonl is empty",)),
    ("--trace ''", ("--trace must not be empty", "unset")),
    ("--trace t.jsonl --config ''", ("--config must not be empty", "unset")),
    ("--trace t.jsonl --model ''", ("--model must not be empty", "unset")),
    ("--trace t.jsonl -o ''", ("--output must not be empty", "unset")),
    ("trace inspect ''", ("FILE... must not be empty",)),
    ("report bad\udcff", ("RUN must be a name in UTF-8, got bad\N{REPLACEMENT CHARACTER}",)),
    ("--trace t.jsonl --run-dir r\udcff", ("--run-dir must be a name in UTF-8", "rename it")),
    ("emit x.yaml --merge ''", ("--merge must not be empty",)),
    ("emit ''", ("RUN_OR_YAML must not be empty",)),
    ("verify --trace t.jsonl --url ''", ("--url must not be empty",)),
    (
        "trace inspect negative.jsonl --skip-invalid --max-invalid 100",
        ("none of the 1 requests can be replayed (1 invalid", "that were answered"),
    ),
    ("trace inspect words.jsonl --skip-invalid --max-invalid nan", ("0 to 100, got nan",)),
    ("trace thin t.jsonl --replicas 99999999999", ("99,999,999,999 replicas", "50 requests")),
    ("--trace t.jsonl --load 1e9", ("above 0 and below 1,000,000, got '1e9'",)),
    ("verify --trace t.jsonl --url host:8000", ("start with http:// or https://",)),
    (
        "verify --trace t.jsonl --slo decode_step_p50=9ms",
        ("decode_step_p50=0.009s cannot be verified", "tpot or itl"),
    ),
    ("trace inspect t.jsonl --hash-block-size 99999999999999999999", ("--hash-block-size",)),
    ("plan --fleet --slo e2e_p90=2s --gpu-hour-price nan", ("--gpu-hour-price", "got 'nan'")),
    ("--trace t.jsonl --tuning none.yaml", ("none.yaml does not exist", "check its path")),
    ("profile fit --recording t.jsonl -o -", ("a profile needs a file",)),
    ("calibrate --profile demo --anchor itl=8ms@running=4 -o -", ("a profile needs a file",)),
    ("profile fit --recording gone.jsonl", ("gone.jsonl: no such file",)),
    ("--trace words.jsonl", ("words.jsonl line 2", "is not JSON")),
    ("--trace lacks.jsonl", ("lacks.jsonl line 2", "lacks output_length")),
    ("--trace negative.jsonl", ("negative.jsonl line 1", "at least 0, got -1")),
    ("--trace absurd.jsonl", ("absurd.jsonl line 1", "at most 10,000,000", "got 1000000000")),
    (
        "--trace silent.jsonl",
        ("silent.jsonl", "none of the 1 requests can be replayed", "--zero-output"),
    ),
    (
        "--trace silent.jsonl --zero-output refuse",
        ("silent.jsonl line 1", "at least 1, got 0", "--zero-output"),
    ),
    ("--trace lfs.jsonl", ("lfs.jsonl", "Git-LFS pointer", "git lfs pull")),
    ("--trace t.jsonl --trace-format x", ("mooncake", 'got "x"')),
    ("--trace t.jsonl --max-num-seqs 0,0", ("--max-num-seqs", "at least 1, got '0,0'")),
    ("--trace t.jsonl --max-num-seqs 4,x", ("--max-num-seqs", "got '4,x'")),
    ("--trace t.jsonl --slo fast", ("--slo 'fast'", "ttft_p99=500ms")),
    ("--trace t.jsonl --slo ttft_p98=1s", ("--slo 'ttft_p98=1s'", "p50, p90, p95 or p99")),
    ("--trace t.jsonl --slo ttft_p99=5", ("--slo", 'got "5"')),
    ("--trace t.jsonl --slo ttft_p99=0s", ("--slo", "above 0, got 0s")),
    ("--trace t.jsonl --budget 3s", ("--budget 3s", "too short for one trial", "20 s")),
    ("--trace t.jsonl --budget soon", ("--budget", 'got "soon"')),
    ("--trace t.jsonl --model ./none", ("model folder ./none does not exist",)),
    ("--trace t.jsonl --config none.yaml", ("none.yaml does not exist",)),
    ("--trace t.jsonl --config list.yaml", ("list.yaml", "got a list")),
    ("--trace t.jsonl --config keyless.yaml", ("names no model",)),
    ("--trace t.jsonl --config gone.yaml", ("./no-such-model does not exist",)),
    ("--trace t.jsonl --config t.jsonl", ("t.jsonl must end in .yaml",)),
    ("--trace t.jsonl --engine-arg dtype", ("--engine-arg", "key=value", "'dtype'")),
    ("--trace t.jsonl --objective goodput", ("--objective goodput", "--slo ttft_p99=500ms")),
    ("--trace t.jsonl --objective best", ("--objective", "'best'", "balanced")),
    ("--trace t.jsonl -o none/best.yaml", ("-o none/best.yaml", "folder does not exist")),
    ("--trace t.jsonl --window 5m", ("--window", 'got "5m"')),
    ("--trace t.jsonl --window 500s:600s", ("500 s and 600 s", "the trace ends at")),
    ("--trace t.jsonl --load 0", ("--load", "below 1,000,000, got '0'")),
    ("--trace t.jsonl --load nan", ("--load", "got 'nan'")),
    ("--trace t.jsonl --concurrency 3", ("--concurrency", "--load-model closed")),
    ("--trace t.jsonl --load-model closed", ("concurrency", "e2e_s")),
    ("--trace t.jsonl --tuning x", ("--tuning x", "batch or interactive")),
    ("--trace t.jsonl --request-timeout 0s", ("time-out", "above 0 s, got 0")),
    ("--resume none", ("none holds no run to resume",)),
    ("--budget 1m", ("--trace is missing",)),
    ("--frace t.jsonl", ("--frace", "tune --help")),
    ("replay", ("--trace is missing",)),
    ("replay --trace t.jsonl --max-num-seqs 0", ("--max-num-seqs", "0")),
    ("replays", ("'replays'", "tune --help")),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with good and bad files."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_trace(tmp_path / "t.jsonl", n=50)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "shown"), BAD_INPUT, ids=[typed for typed, _ in BAD_INPUT])
def test_bad_input_is_reported_in_one_form_before_anything_starts(
    folder: Path, capsys: Output, typed: str, shown: tuple[str, ...]
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(shlex.split(typed)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert [line[:7] for line in lines[1:]] in ([], ["hint:  "])
    assert not lines[0].endswith(".")
    for words in shown:
        assert words in err
    assert sorted(folder.rglob("*")) == before
    assert multiprocessing.active_children() == []


def test_a_server_that_does_not_answer_is_known_before_anything_is_predicted(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.cli.verify.EngineProcess", lambda *_: pytest.fail("started"))
    typed = ["verify", "--trace", str(folder / "t.jsonl"), "--url", "http://127.0.0.1:1"]
    assert run(typed) == 4
    assert "127.0.0.1:1/v1/models does not answer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_is_no_defect(folder: Path) -> None:
    code = "from tuner.cli import main; main()"
    for words in ("explain", "trace inspect t.jsonl", "trace convert t.jsonl", "--help"):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-c", code, *words.split()],
                cwd=folder,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 2
        assert "cannot be written: No space left on device\nhint:  free" in done.stderr
        assert "Traceback" not in done.stderr


def without(missing: str, folder: Path) -> dict[str, str]:
    """Return an environment in which a package cannot be imported."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError('there is no {missing}', name='{missing}')\n"
    )
    return {**os.environ, "PYTHONPATH": str(hidden)}


def typed_in_a_shell(
    arguments: list[str], folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    code = "from tuner.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_missing_vllm_is_reported_with_the_command_that_mends_it(folder: Path) -> None:
    arguments = ["--trace", "t.jsonl", "--budget", "30s"]
    done = typed_in_a_shell(arguments, folder, without("vllm", folder))
    assert done.returncode == 2, done.stderr
    assert "error: vLLM is not installed in this environment" in done.stderr
    assert "pip install 'max-num-seqs-tuner[gpu]'" in done.stderr
    assert done.stdout == ""


def commands_below(
    command: click.Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and those below it, each with the words that name it."""
    yield words, command
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from commands_below(child, (*words, name))


COMMANDS = dict(commands_below(tune))
EVERY_COMMAND = pytest.mark.parametrize(
    "words", list(COMMANDS), ids=lambda words: " ".join(("tune", *words))
)


def help_of(words: Iterable[str], capsys: Output) -> str:
    """Return the help of a command, as it is printed."""
    assert run([*words, "--help"]) == 0
    return capsys.readouterr().out


def parse(command: click.Command, words: list[str]) -> None:
    """Let a command read the words as it would, and run nothing."""
    if isinstance(command, click.Group) and words and words[0] in command.commands:
        parse(command.commands[words[0]], words[1:])
    else:
        command.make_context(command.name, words)


@EVERY_COMMAND
def test_help_ends_with_exit_codes_and_examples_that_the_command_takes(
    capsys: Output, words: tuple[str, ...]
) -> None:
    text = help_of(words, capsys)
    options, ending = text.split("\nExit codes: 0 ")
    assert "--help " in options
    examples = re.split(r"^Examples?:\n", ending, flags=re.MULTILINE)[1]
    for example in examples.replace("\\\n", " ").strip().splitlines():
        name, *typed = shlex.split(example)
        assert [name, *typed[: len(words)]] == ["tune", *words]
        parse(tune, typed)
    assert run([*words, "-h"]) == 0
    assert capsys.readouterr().out == text


@EVERY_COMMAND
def test_help_says_what_a_newcomer_would_say(capsys: Output, words: tuple[str, ...]) -> None:
    text = " ".join(help_of(words, capsys).split())
    odd = r"\b(present (one|config\w*|limits)|fore(told|tell|seen)|borne|in place of)\b"
    assert re.findall(odd, text) == []
    for load in re.findall(r" --load X (.*?)\.", text):
        assert load == "Multiple of the recorded arrivals, over the same time"


@pytest.mark.parametrize("command", [[], ["trace"], ["profile"]])
def test_a_group_of_commands_alone_shows_its_help(command: list[str], capsys: Output) -> None:
    assert run(command) == 0
    alone = capsys.readouterr().out
    assert run([*command, "--help"]) == 0
    assert capsys.readouterr().out == alone


def test_help_is_what_it_was(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Changed on purpose? UPDATE_SNAPSHOTS=1 python -m pytest tests/cli/test_commands.py."""
    monkeypatch.setenv("COLUMNS", "96")
    texts = []
    for command in ([], ["replay"], ["plan"], ["worker"], ["doctor"]):
        assert run([*command, "--help"]) == 0
        texts.append(capsys.readouterr().out)
    shown = "\n".join(texts)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(shown)
    assert shown == SNAPSHOT.read_text()


@pytest.mark.parametrize("columns", ["1", "6"])
def test_help_in_a_sliver_of_a_terminal_keeps_its_words_whole(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["doctor", "--help"]) == 0
    assert "installation" in capsys.readouterr().out.split()


def options_of(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option)]


def test_every_option_and_every_command_is_explained() -> None:
    for command in COMMANDS.values():
        assert command.help
        unexplained = [option.opts[-1] for option in options_of(command) if not option.help]
        assert unexplained == []


def test_every_option_that_takes_a_value_says_its_default_or_that_it_has_none() -> None:
    optional = {"trace", "config", "engine_args", "tuning", "slo", "resume", "profile"}
    context = click.Context(tune, **tune.context_settings)
    for option in options_of(tune):
        if option.is_flag or option.name in optional | {"version"}:
            continue
        _, told = option.get_help_record(context) or ("", "")
        assert "default" in told, option.name


def test_help_waits_for_nothing_heavy(folder: Path) -> None:
    """Its processor time, and on a slower machine what cloup alone takes there."""
    helped = processor_s(folder, "from tuner.cli import run; code = run(['--help'])")
    assert helped < max(HELP_S, 2.5 * processor_s(folder, "import cloup; code = 0"))


def processor_s(folder: Path, code: str) -> float:
    """Return the least processor time of three, in which nothing heavy is imported."""
    code = (
        f"import resource, sys; {code}; "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]; "
        "print(used.ru_utime + used.ru_stime, heavy, file=sys.stderr); sys.exit(code)"
    )
    took_s = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
        )
        spent_s, heavy = done.stderr.split(maxsplit=1)
        assert heavy == "[]\n"
        took_s.append(float(spent_s))
    return min(took_s)


INTERRUPTED_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from tuner.cli import main
main()
"""


@pytest.mark.parametrize("module", ["click", "tuner.cli.values"])
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(
    module: str, folder: Path
) -> None:
    code = INTERRUPTED_AT.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def completed(folder: Path, typed: str, instruction: str) -> str:
    """Return what a shell is told that asks for completions."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    env = {**os.environ, **words, "_TUNE_COMPLETE": instruction}
    done = typed_in_a_shell([], folder, env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_shell_gets_a_script_that_completes(folder: Path) -> None:
    assert "_TUNE_COMPLETE=bash_complete" in completed(folder, "", "bash_source")
    assert "#compdef tune" in completed(folder, "", "zsh_source")
    methods = completed(folder, "tune --method ", "bash_complete")
    assert methods.split() == [
        f"plain,{method}" for method in ("auto", "calibrated", "live", "shadow")
    ]
    assert completed(folder, "tune --slo x --trace pr", "bash_complete") == "file,pr\n"
    assert "plain,verify\n" in completed(folder, "tune ve", "bash_complete")


def test_the_version_is_that_of_the_distribution(capsys: Output) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tune, version 0.")


def test_the_script_is_installed(folder: Path) -> None:
    script = Path(sys.executable).with_name("tune")
    done = subprocess.run(
        [script, "--trace", "none.jsonl"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: none.jsonl: no such file\nhint:  ")


@pytest.mark.parametrize(
    ("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")], ids=["NO_COLOR", "dumb"]
)
def test_colour_can_be_declined(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, name: str, value: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    talk().print("loud", style="red")
    assert "\x1b[" in capsys.readouterr().err
    monkeypatch.setenv(name, value)
    talk().print("quiet", style="red")
    assert capsys.readouterr().err == "quiet\n"


def test_a_defect_of_ours_is_called_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(tune.commands["doctor"], "callback", broken)
    assert run(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: a defect" in err
    assert "error: this is a defect of tune, not of your input" in err
    assert folder.is_dir()


def test_a_file_that_nobody_may_write_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    # Who runs this as root may write anywhere.
    monkeypatch.setattr(os, "access", lambda place, _: place != folder)
    assert run(["--trace", "t.jsonl", "-o", "best.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: -o best.yaml cannot be written")


def test_a_result_is_written_whatever_the_locale(folder: Path) -> None:
    tuned = TESTS.parent / "examples" / "demo" / "best.yaml"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = typed_in_a_shell(["emit", str(tuned)], folder, ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sha256 b069b002…" in done.stdout


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tuner.cli import main; main()", "--help"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    err = process.communicate(timeout=60)[1]
    assert "Traceback" not in err
    assert process.returncode in {0, 1, 141}
