"""What all tests share: the public traces beside the repository, and the engine marker."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Tests share `toy` and `traffic`, and an engine's process finds them through the same path.
sys.path.insert(0, str(ROOT / "tests"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of the real engine where there is none, and say so."""
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed: make setup")
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Return the folder of public trace slices, or skip and say that it is missing."""
    folder = ROOT.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("no ../shared/traces beside the repository: public traces not tested")
    return folder
