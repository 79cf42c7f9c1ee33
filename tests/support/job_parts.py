"""The live job on the toy as a test runs it, and what a run leaves behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.toy import ToySource
from support.toy_tune import job_on, lines_of

SHORT = ("--max-num-seqs", "4,8,16", "--budget", "40s")
"""A ladder that does not take long."""


class Run:
    """A run that has ended, and what it left behind."""

    def __init__(self, folder: Path, talk: str, stdout: str = "") -> None:
        self.run_dir, self.talk, self.stdout = folder / "run", talk, stdout
        self.emitted = folder / "best.yaml"
        self.trials = lines_of(self.run_dir / "trials.jsonl")
        self.result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())

    @property
    def caveats(self) -> set[str]:
        """The ids of the caveats in the result."""
        return {caveat["id"] for caveat in self.result["caveats"]}


def arguments_for(trace: Path, *more: str) -> list[str]:
    """Return the arguments of a live run beside its trace."""
    folder = trace.parent
    return [
        *("--trace", str(trace), "--run-dir", str(folder / "run"), "--method", "live"),
        *("-o", str(folder / "best.yaml"), *more),
    ]


@dataclass(frozen=True, slots=True)
class Said:
    """What a command wrote to its two streams."""

    out: str
    err: str


def shown(call: Callable[[], int]) -> Said:
    """Run something that has to succeed and return what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert call() == 0, err.getvalue()
    return Said(out.getvalue(), err.getvalue())


def run(source: ToySource, trace: Path, *more: str) -> Run:
    """Run the live job to its end and return what it left."""
    said = shown(lambda: job_on(source, arguments_for(trace, *more)))
    return Run(trace.parent, said.err, said.out)
