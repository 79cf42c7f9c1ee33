"""The main job on the toy engine: in this process, or as a program that can be interrupted.

    python tests/support/toy_tune.py '{"noise_ratio": 0.1}' --trace t.jsonl --run-dir r

The first argument holds ToySource's fields as JSON, ToyCosts under `costs`; the others are
those of `tune`, or `worker` and those of `tune worker`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.odd_toys import SlowSource
from support.toy import ToyCosts, ToySource
from tuner.cli import hear_endings, hear_no_more
from tuner.cli.commands import tune
from tuner.cli.console import say, say_error
from tuner.cli.options import path_of
from tuner.cli.tune import read_job, run_job
from tuner.engine.limits import EngineLimits
from tuner.errors import TunerError
from tuner.run.worker import work

PATIENCE_S = 60.0
# Beyond ten sequences a step pays dearly, so a cap near ten is best whatever the ladder says.
CROWDED = ToyCosts(knee=10, crowd_s=0.0003)


def job_on(source: ToySource | None, arguments: Sequence[str]) -> int:
    """Run the main job as `tune` does, but on the toy if there is one. Raises: TunerError."""
    context = tune.make_context("tune", list(arguments))
    return run_job(read_job(context), source)


def write_trace(
    path: Path, n: int = 240, per_s: float = 14.0, seed: int = 0, tick_s: float = 1e-4
) -> Path:
    """Write n Poisson arrivals with mixed lengths, as JSON Lines; a long tick makes bursts."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / per_s, n)) // tick_s * tick_s
    prompts, outputs = rng.integers(20, 200, n), rng.integers(10, 60, n)
    rows = zip(due_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    path.write_text(
        "".join(
            f'{{"arrived_at_s": {d:.4f}, "input_length": {p}, "output_length": {o}}}\n'
            for d, p, o in rows
        )
    )
    return path


def command(arguments: Sequence[str], **fields: object) -> list[str]:
    """Return the command line that runs the job on such a toy."""
    return [sys.executable, "-m", "support.toy_tune", json.dumps(fields), *arguments]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return a JSON Lines file, none if it is not there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Poll until it is true. Fails once the process has ended or patience has."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()[1]}")
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not true within {PATIENCE_S:g} s")
        time.sleep(0.01)


def _source(text: str) -> ToySource:
    fields = json.loads(text)
    if "costs" in fields:
        fields["costs"] = ToyCosts(**fields["costs"])
    if "current" in fields:
        fields["current"] = EngineLimits(*fields["current"])
    return SlowSource(**fields) if "pause_s" in fields else ToySource(**fields)


def worker_on(source: ToySource, arguments: Sequence[str]) -> int:
    """Work for a run as `tune worker` does, but with a toy. Raises: TunerError."""
    given = tune.commands["worker"].make_context("worker", list(arguments)).params
    config = path_of(given["config"])
    work(Path(given["run_dir"]), given["storage"], given["trace"], say, source, config)
    return 0


def main(fields: str, arguments: Sequence[str]) -> int:
    """Run and return the exit code, as `tuner.cli.run` does."""
    try:
        if arguments[0] == "worker":
            return worker_on(_source(fields), arguments[1:])
        return job_on(_source(fields), arguments)
    except TunerError as error:
        say_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        hear_no_more()
        say("interrupted")
        return 130


if __name__ == "__main__":
    hear_endings()
    code = main(sys.argv[1], sys.argv[2:])
    hear_no_more()
    sys.exit(code)
