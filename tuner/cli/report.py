"""`tune report RUN`: write a run as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.cli.console import say
from tuner.files import write_atomic
from tuner.report.page import REPORT_FILE, report_of


def run_report(options: Mapping[str, Any]) -> int:
    """Write the page and say where it is. Raises: UsageError."""
    run_dir = Path(options["run_dir"])
    target = Path(options["output"]) if options["output"] else run_dir / REPORT_FILE
    write_report(run_dir, target)
    say(f"report written to {target}")
    return 0


def write_report(run_dir: Path, target: Path) -> None:
    """Write the page of a run, whole or not at all. Raises: UsageError."""
    write_atomic(target, report_of(run_dir), secret=False)
