"""Compiled code is kept where it can be, and never ends a run where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tuner.errors import UsageError
from tuner.shadow.compiled import compiled_meanwhile

SOURCE = """
from tuner.shadow.compiled import compiled, warms_up

@compiled
def step(n):
    return n + 1

@compiled
def climb(n):
    total = 0
    for i in range(n):
        total += step(i)
    return total

@warms_up
def call():
    climb(3)
"""
RUN = """
import sys; sys.path.insert(0, sys.argv[1])
import climbing
print(climbing.climb(4), sum(climbing.climb.stats.cache_hits.values()))
"""
WARM = """
import sys; sys.path.insert(0, sys.argv[1])
import climbing
from tuner.shadow.compiled import main
main()
"""
PATIENCE_S = 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a module of compiled functions."""
    place = tmp_path / "source"
    place.mkdir()
    (place / "climbing.py").write_text(SOURCE)
    return place


def started(folder: Path, code: str = RUN, **env: str) -> subprocess.Popen[str]:
    home = folder.parent / "home"
    usual = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    usual |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    usual |= {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env=usual | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(folder: Path, code: str = RUN, **env: str) -> tuple[str, str]:
    """Return what a process printed that called the compiled function, and its talk."""
    process = started(folder, code, **env)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out.strip(), err


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in {".nbi", ".nbc"})


def unwritable(folder: Path) -> None:
    """Make a folder's cache one that nobody can write, root neither."""
    (folder / "__pycache__").write_text("a file and no folder")


def test_code_is_compiled_once_and_loaded_by_the_next_process(folder: Path) -> None:
    """Also from an image whose folders cannot be written any more."""
    assert ran(folder) == ("10 0", "")
    assert {path.parent for path in kept(folder)} == {folder / "__pycache__"}
    assert ran(folder) == ("10 1", "")
    nowhere = str(folder / "climbing.py" / "below-a-file")
    read_only = (
        "import tempfile\n"
        "def refuse(*args, **more): raise OSError(30, 'Read-only file system')\n"
        "tempfile.TemporaryFile = refuse\n"
    )
    assert ran(folder, read_only + RUN, HOME=nowhere, XDG_CACHE_HOME=nowhere) == ("10 1", "")


def test_a_folder_that_is_named_comes_first(folder: Path, tmp_path: Path) -> None:
    named = str(tmp_path / "named")
    assert ran(folder, NUMBA_CACHE_DIR=named) == ("10 0", "")
    assert kept(folder) == []
    assert ran(folder, NUMBA_CACHE_DIR=named) == ("10 1", "")


def test_beside_read_only_sources_the_home_keeps_the_code(folder: Path) -> None:
    unwritable(folder)
    assert ran(folder) == ("10 0", "")
    assert kept(folder.parent / "home")
    assert ran(folder) == ("10 1", "")


def test_where_nothing_can_be_written_it_runs_and_says_once_what_to_do(folder: Path) -> None:
    unwritable(folder)
    nowhere = str(folder / "climbing.py" / "below-a-file")
    out, err = ran(folder, HOME=nowhere, XDG_CACHE_HOME=nowhere)
    assert out == "10 0"
    assert err.count("\n") == 1
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in err


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "left"), [(".nbi", 0.5), (".nbc", 0.5), (".nbc", 0.0)])
def test_a_damaged_file_costs_a_compilation_and_is_replaced(
    folder: Path, suffix: str, left: float
) -> None:
    assert ran(folder) == ("10 0", "")
    for path in kept(folder):
        if path.suffix == suffix:
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
    assert ran(folder) == ("10 0", "")
    assert ran(folder) == ("10 1", "")


def test_another_source_beside_it_compiles_anew_and_leaves_no_files(folder: Path) -> None:
    """A function holds the code of those it calls, in whichever file they stand."""
    (folder / "climbing.py").write_text(
        SOURCE.replace("@compiled\ndef step(n):\n    return n + 1", "from below import step")
    )
    below = "from tuner.shadow.compiled import compiled\n@compiled\ndef step(n): return n + "
    (folder / "below.py").write_text(f"{below}1\n")
    assert ran(folder) == ("10 0", "")
    before = len(kept(folder))
    (folder / "below.py").write_text(f"{below}2\n")
    assert ran(folder) == ("14 0", "")
    assert len(kept(folder)) == before


@pytest.mark.slow
def test_processes_that_compile_at_once_agree(folder: Path) -> None:
    processes = [started(folder) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert out.startswith("10 "), err
    assert ran(folder) == ("10 1", "")


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_without_numba_it_is_told_what_to_install(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "numba.py").write_text(f"raise {kind}('Numba needs NumPy 2.3 or less')\n")
    code = (
        "from tuner.errors import UsageError\n"
        "try:\n    import tuner.shadow.compiled\n"
        "except UsageError as error:\n    print(error.message, '/', error.hint)\n"
    )
    paths = os.pathsep.join([str(hidden), os.environ["PYTHONPATH"]])
    out, _ = ran(folder, code, PYTHONPATH=paths)
    assert "numba, which cannot be imported: Numba needs NumPy 2.3 or less" in out
    assert "/ pip install --upgrade max-num-seqs-tuner" in out


def test_what_is_registered_is_warm_for_the_next_process(folder: Path) -> None:
    out, _ = ran(folder, WARM)
    assert out.startswith("compiled code is ready (")
    assert ran(folder) == ("10 1", "")


@pytest.mark.parametrize("error", [None, UsageError("no numba")])
def test_what_is_compiled_while_something_else_is_waited_for_is_there_afterwards(
    error: Exception | None,
) -> None:
    began, done = threading.Event(), []

    def compile_it() -> None:
        began.set()
        time.sleep(0.05)
        done.append(threading.current_thread())
        if error is not None:
            raise error  # it is raised once more where something is predicted

    with compiled_meanwhile(compile_it):
        assert began.wait(10.0)
        assert not done
    assert done
    assert done != [threading.main_thread()]


def test_nobody_waits_for_the_compiler_when_what_was_waited_for_fails() -> None:
    ends = threading.Event()
    with pytest.raises(KeyboardInterrupt), compiled_meanwhile(lambda: ends.wait(10.0)):
        raise KeyboardInterrupt
    assert not ends.is_set()
    ends.set()
