"""Files are whole or not there, links are followed, what a killed process left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tuner.cli import run
from tuner.emit.merge import read_documents
from tuner.errors import UsageError
from tuner.files import (
    LEFT_AFTER_S,
    check_references,
    log_folder,
    parse_yaml,
    scratch_folder,
    write_atomic,
)

HOLDING = """
import sys, time
from tuner.files import scratch_folder
with scratch_folder() as folder:
    (folder / "trace").write_text("much")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_standard_output_keeps_what_a_redirection_had_there(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = (
        "from pathlib import Path; from tuner.files import write_atomic; "
        f"print('first'); write_atomic(Path({name!r}), 'text\\n'); print('last')"
    )
    with log.open("a") as appended:
        subprocess.run([sys.executable, "-c", code], stdout=appended, cwd=tmp_path, check=True)
    assert log.read_text() == "before\nfirst\ntext\nlast\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_what_a_killed_process_left_is_removed_by_the_next_one_that_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    long_ago = time.time() - 2 * LEFT_AFTER_S
    os.utime(left, (long_ago, long_ago))
    with scratch_folder():
        assert left.exists(), "removed while it was used"
    process.kill()
    process.wait()
    (tmp_path / "tune-scratch-link").symlink_to(left)
    with scratch_folder() as own:
        assert not left.exists()
        assert own.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tune-scratch-link"]


WRITING = """
import sys, time
from pathlib import Path
from tuner.files import replacing
with replacing(Path(sys.argv[1])) as file:
    print(flush=True)
    time.sleep(60)
"""


def test_the_copy_of_a_killed_process_is_removed_by_who_writes_next(tmp_path: Path) -> None:
    target, other = tmp_path / "trials.jsonl", tmp_path / ".trials.jsonl.20261124"
    other.write_text("a copy of somebody's own")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(target)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    write_atomic(target, "while another writes")
    (left,) = set(tmp_path.iterdir()) - {target, other}
    process.kill()
    process.wait()
    os.mkfifo(tmp_path / ".trials.jsonl.planted.tune-copy")
    assert left.exists()
    write_atomic(target, "after")
    assert set(tmp_path.iterdir()) == {target, other}
    assert target.read_text() == "after"


def test_who_writes_at_once_never_takes_a_copy_from_another(tmp_path: Path) -> None:
    target = tmp_path / "trials.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_atomic(target, f"{number}"), range(400)))
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_links_that_lead_nowhere_are_an_error_and_others_are_followed(tmp_path: Path) -> None:
    one, other, target = (tmp_path / name for name in ("one", "other", "target"))
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(UsageError, match="Too many levels of symbolic links"):
        write_atomic(one, "text")
    other.unlink()
    other.symlink_to(target)
    write_atomic(one, "text")
    assert (one.is_symlink(), target.read_text()) == (True, "text")


def test_a_planted_name_is_not_written_through(tmp_path: Path) -> None:
    path, victim = tmp_path / "result.json", tmp_path / "victim"
    victim.write_text("mine")
    for name in (".result.json.new", ".result.json.part", "result.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_atomic(path, "result")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == (
        "mine",
        "result",
        False,
    )


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    ten = [", ".join([f"*a{n}"] * 10) for n in range(levels - 1)]
    lines += [f"a{n}: &a{n} [{items}]" for n, items in enumerate(ten, start=1)]
    return "\n".join(["model: m", *lines, ""])


@pytest.mark.parametrize("levels", [7, 30, 300])
def test_a_few_lines_that_stand_for_very_many_values_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], levels: int
) -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError, match=r"references \(\*name\) stand for more than 10,000"):
        parse_yaml(bomb(levels))
    path = tmp_path / "deployment.yaml"
    path.write_text(bomb(levels))
    for command in (
        ["emit", str(path), "--format", "args"],
        ["plan", "--profile", str(path), "--trace", str(path)],
    ):
        assert run(command) == 2, command
    with pytest.raises(UsageError, match="cannot be changed: its references"):
        read_documents(path)
    assert "defect" not in capsys.readouterr().err
    assert time.process_time() - began_s < 10


def test_what_holds_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="stands within what it refers to in line"):
        parse_yaml("a: &a [1, *a]")


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "a: [" + "{x: [" * 200])
def test_what_nests_beyond_reason_is_refused_at_once(text: str) -> None:
    began_s = time.process_time()
    for refuse in (parse_yaml, check_references):
        with pytest.raises(ValueError, match="nests deeper than 100 levels"):
            refuse(text)
    assert time.process_time() - began_s < 0.5
    assert parse_yaml("[" * 60 + "]" * 60) is not None


def test_a_reference_that_people_use_is_read() -> None:
    text = "x: &x {cpu: 4, memory: 8}\na: {<<: *x, cpu: 2}\nb: [*x, *x]\n"
    read = parse_yaml(text)
    assert read["a"] == {"cpu": 2, "memory": 8}
    assert read["b"] == [read["x"]] * 2


@given(
    st.recursive(
        st.none() | st.integers() | st.text("ab"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
        max_leaves=50,
    )
)
def test_what_yaml_writes_is_read(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value)) == value


def test_a_log_folder_stays_only_where_a_message_names_it() -> None:
    with log_folder("tune-test-") as folder:
        (folder / "engine.log").write_text("all is well")
    assert not folder.exists()

    def fail() -> Path:
        with log_folder("tune-test-") as folder:
            (folder / "engine.log").write_text("died")
            raise UsageError(f"see {folder / 'engine.log'}")

    with pytest.raises(UsageError) as caught:
        fail()
    log = Path(caught.value.message.removeprefix("see "))
    assert log.read_text() == "died"
    log.unlink()
    log.parent.rmdir()
