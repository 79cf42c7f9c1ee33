"""How long commands that predict from a profile take, start and imports included.

    python tests/benchmarks/command_cost.py [PYTHON ...] [--runs 6] [--only check,plan]

Each command runs in every PYTHON (default: this one) in turns, after one run that is not
counted and compiles what is not compiled yet. PYTHON has the project installed, vLLM or not.
Told are seconds by the clock and of processor time, the median and the least. On a machine that
others use, `chrt -f 10` in front gives the cores to this alone; it takes root and stops the
others meanwhile.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.shadow_files import a_trace_file, furnished

GRID: Final = ("--max-num-seqs", "2,8")
COMMANDS: Final = {
    "check": (
        *("check", "--baseline", "profile.yaml", "--trace", "more.jsonl", *GRID),
        *("--baseline-trace", "before.jsonl", "--config", "best.yaml"),
    ),
    "plan": (
        *("plan", "--profile", "profile.yaml", "--trace", "now.jsonl", *GRID),
        *("--loads", "0.1,0.2"),
    ),
    "tune": (
        *("--method", "shadow", "--profile", "profile.yaml", "--trace", "now.jsonl", *GRID),
        *("-o", "new.yaml", "--run-dir", "run"),
    ),
    "help": ("--help",),
}
"""By name; 10 is what a check ends with where a re-tune pays."""
START: Final = "from tuner.cli import main; main()"


def timed(python: str, arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a command and return its seconds by the clock and of processor time."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [python, "-c", START, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 10):
        sys.exit(done.stderr)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--only", default=",".join(COMMANDS), help="which, with commas between")
    args = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="tune-cost-") as name:
        folder = furnished(Path(name))
        a_trace_file(folder / "now.jsonl", 1000)
        a_trace_file(folder / "more.jsonl", 3000)
        for which in args.only.split(","):
            runs = [
                [timed(python, COMMANDS[which], folder) for python in args.pythons]
                for _ in range(args.runs + 1)
            ][1:]
            for python, seen in zip(args.pythons, zip(*runs, strict=True), strict=True):
                clock_s, processor_s = zip(*seen, strict=True)
                print(
                    f"{which} in {python}: {median(clock_s):.2f} s ({min(clock_s):.2f}), of "
                    f"processor time {median(processor_s):.2f} s ({min(processor_s):.2f}), "
                    f"n {args.runs}"
                )


if __name__ == "__main__":
    main()
