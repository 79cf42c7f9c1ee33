"""No file of others crashes a reader, hangs it or takes all memory: see fuzz_structured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fuzz_structured import CASES, chosen, fuzz, keep, made, read_one
from support.fuzz_targets import Target, targets

SEED = 20


@pytest.mark.slow
@pytest.mark.timeout(86_400)
def test_no_input_made_of_real_samples_crashes_hangs_or_fills_memory(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    wanted = int(request.config.getoption("--fuzz-inputs"))
    found = fuzz(SEED, 0, wanted)
    kept = [f"{one.target}: {one.kind} {one.detail}: {keep(SEED, one)}" for one in found.faults]
    record_property("fuzz", str(found))
    assert kept == []
    assert found.inputs == wanted
    # As many that are read as that are refused: they get past the first check.
    assert found.outcomes["read"] > 0.15 * wanted
    assert found.outcomes["TraceError"] > 0.15 * wanted


def cases() -> list[Path]:
    return sorted(path for path in CASES.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def known() -> dict[str, Target]:
    return targets()


@pytest.mark.parametrize("path", cases(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_was_too_much_is_read_or_refused(
    path: Path, known: dict[str, Target], tmp_path: Path
) -> None:
    target = known[path.parent.name.replace("+", "/")]
    assert read_one(target, tmp_path, path.read_bytes())[1:] == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "does"),
    [
        ("ZeroDivisionError", "1 / 0"),
        ("slow", "while True: pass"),
        ("slow", "while True:\n try:\n  while True: pass\n except Exception: pass"),
        ("memory", "bytearray(700 << 20)"),
        ("message", "from tuner.errors import UsageError\nraise UsageError('Traceback (most')"),
        ("died", "import os; os.abort()"),
    ],
)
def test_the_fuzz_sees_what_no_reader_may_do(
    kind: str, does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that does it stands in for `read_tuning`, in the processes that read."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import tuner.engine.serve_config as c\nDOES = {does!r}\nleft = [2]\n"
        "def read(path):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0:\n"  # the samples are read first
        "        exec(DOES)\n"
        "c.read_tuning = read\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = fuzz(SEED, 0, 1, only="yaml/tuning")
    assert [(fault.number, fault.kind) for fault in found.faults] == [(0, kind)]
    assert found.inputs == 1


def test_an_input_is_the_same_whenever_it_is_made() -> None:
    some = chosen("trace/")
    assert [made(some, 1, n)[2] for n in range(50)] == [made(some, 1, n)[2] for n in range(50)]
    assert len({made(some, 1, n)[2] for n in range(50)}) > 40
