"""`tune report RUN`: write a run as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from tuner.cli.console import say
from tuner.files import write_atomic
from tuner.report.page import REPORT_FILE, report_of


def run_report(run_dir: Path, output: Path | None) -> int:
    """Write the page, to `output` or else into the run, and say so. Raises: UsageError."""
    target = output or run_dir / REPORT_FILE
    write_report(run_dir, target)
    say(f"report written to {target}")
    return 0


def write_report(run_dir: Path, target: Path) -> None:
    """Write the page of a run, whole or not at all. Raises: UsageError."""
    write_atomic(target, report_of(run_dir), secret=False)
