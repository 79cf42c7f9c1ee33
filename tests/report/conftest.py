"""A run and a surface whose pages tests read; none of them changes either."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.explore_parts import explored
from support.report_parts import live_run
from tuner.report.explore import Explored, explore_page
from tuner.report.page import report_of


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a live run."""
    return live_run(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="session")
def page(live: Path) -> str:
    """Return its page."""
    return report_of(live)


@pytest.fixture(scope="session")
def found() -> Explored:
    """Return what is predicted of a space at a few loads."""
    return explored()


@pytest.fixture(scope="session")
def explorer(found: Explored) -> str:
    """Return its page."""
    return explore_page(found)
