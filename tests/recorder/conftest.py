"""What a process records whose tests ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.recorder import middleware
from tuner.recorder import recorder as recorder_module
from tuner.recorder.recorder import process_recorder
from tuner.recorder.settings import FILE, KEY


@pytest.fixture
def prod(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Have this process record into a file, as TUNE_RECORD asks for, and return its path.

    It waits for as long as the test's module says by GRACE_S and GATHER_S.
    """
    path = tmp_path / "prod.jsonl"
    monkeypatch.setenv(FILE, str(path))
    monkeypatch.setenv(KEY, "")
    monkeypatch.setattr(recorder_module, "GATHER_S", getattr(request.module, "GATHER_S", 0.01))
    monkeypatch.setattr(middleware, "GRACE_S", getattr(request.module, "GRACE_S", 0.05))
    process_recorder.cache_clear()
    yield path
    recorder = process_recorder()
    if recorder is not None:
        recorder.close()
    process_recorder.cache_clear()
