"""What all tests share: public traces, a PostgreSQL server, and the engine marker."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's business; pytest's own limit ends one that hangs.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent

# Threads of numpy's BLAS spin while they wait for each other, and two workers have two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests share what lies in `support`, and an engine's process finds it through the same path.
sys.path.insert(0, str(ROOT / "tests"))
_more = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *_more])
# Its tests are inherited, and tell as much when they fail as if they stood in a test file.
pytest.register_assert_rewrite("support")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add how long the campaign and the fuzz go on: far longer by night than in test-all."""
    group = parser.getgroup("faults")
    group.addoption("--faults", default=0, type=int, help="of each kind; by default a few")
    group.addoption("--fuzz-inputs", default=10_000, type=int, help="for the readers")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the campaign and the fuzz have counted, from whichever process."""
    reports = [one for many in terminalreporter.stats.values() for one in many]
    called = [one for one in reports if getattr(one, "when", "") == "call"]
    found = [pair for report in called for pair in report.user_properties]
    counted: dict[str, list[int]] = {}
    for name, value in found:
        if name == "faults":
            kind, count, survived = value
            counts = counted.setdefault(kind, [0, 0])
            counts[0] += count
            counts[1] += survived
        elif name in {"fuzz", "month", "sizes"}:
            terminalreporter.write_line(f"{name}: {value}")
    if counted:
        terminalreporter.section("faults")
        total = [sum(column) for column in zip(*counted.values(), strict=True)]
        for kind, (count, survived) in [*sorted(counted.items()), ("all", total)]:
            terminalreporter.write_line(f"{kind:<40} {count:>6} tried {survived:>6} survived")


# Before pytest-xdist looks at the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of vLLM where there is none; give one process all tests of real models.

    They go first: nothing else takes so long, and the other process has the rest meanwhile.
    """
    is_installed = importlib.util.find_spec("vllm") is not None
    skip = pytest.mark.skip(reason="vLLM is not installed: make setup")
    for item in items:
        if item.get_closest_marker("engine") and not is_installed:
            item.add_marker(skip)
        if item.get_closest_marker("xdist_group") is None:
            group = "model" if item.get_closest_marker("model") else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("model") is None)


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Return the folder of public trace slices, or skip and say that it is missing."""
    folder = ROOT.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("no ../shared/traces beside the repository: public traces not tested")
    return folder


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Start a PostgreSQL of our own on a loopback port, and return a URL without the driver."""
    from support.postgres import postgres

    with postgres() as found:
        yield found.address
