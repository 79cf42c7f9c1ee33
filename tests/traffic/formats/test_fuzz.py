"""Bytes of any kind, guided by coverage: see fuzz_readers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.paths import TESTS

FUZZ = TESTS / "support" / "fuzz_readers.py"
SECONDS = 15
BETWEEN = (
    "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)"
)
"""Starts what is named. libFuzzer bounds the most memory that its process ever had, and Linux
counts that of whoever started it: a worker of pytest has 2 GiB after hours of tests."""


@pytest.mark.slow
def test_no_bytes_crash_hang_or_fill_the_memory_of_a_reader() -> None:
    pytest.importorskip("atheris", reason="pip install atheris, which has Linux builds only")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            BETWEEN,
            sys.executable,
            str(FUZZ),
            f"-max_total_time={SECONDS}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # What was raised stands in what it printed, the bytes in its log.
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs is not None
    assert int(runs[1]) > 1000
    grown = re.search(r"DONE\s+cov: (\d+)", done.stderr)
    assert grown is not None
    assert int(grown[1]) > 500
