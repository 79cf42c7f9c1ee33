"""Files are whole or not there, links are followed, what a killed process left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.errors import UsageError
from tuner.files import LEFT_AFTER_S, scratch_folder, write_atomic

HOLDING = """
import sys, time
from tuner.files import scratch_folder
with scratch_folder() as folder:
    (folder / "trace").write_text("much")
    print(folder, flush=True)
    time.sleep(60)
"""


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
