"""Whatever happens to a run, it goes on to the same answer with every trial, once.

The runs are live ones on the toy engine, whose answer is known and does not depend on chance. A
fault comes at a random instant; then the run is resumed, mostly after another, until it ends.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.fault_parts import (
    Marked,
    Tally,
    at_instant,
    clock_of,
    ended,
    fill,
    how_many,
    marked,
    small_disk,
)
from support.fault_runs import TOY, Ended, Run, left_alone
from support.toy_tune import command, write_trace
from tuner.run.directory import STUDY_FILE, TRIALS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]

MAX_RESUMES = 12
DISK_KIB = 2048


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return what comes of the run when it is left alone."""
    return left_alone(tmp_path_factory.mktemp("undisturbed") / "home")


# --- faults ---

Fault = Callable[[random.Random, Run], bool]
"""Do something to a run that goes on; return whether it was there to be done something to."""


def _signalled(number: signal.Signals) -> Fault:
    def fault(rng: random.Random, run: Run) -> bool:
        process = _running(run)
        # While Python still imports an interrupt is shown by Python, not by the command.
        while number is signal.SIGINT and not run.said() and process.poll() is None:
            time.sleep(0.01)
        run.note()
        with suppress(ProcessLookupError):
            process.send_signal(number)
        if number is signal.SIGINT and rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.5))
            with suppress(ProcessLookupError):  # who waits no longer
                process.send_signal(signal.SIGINT)
        return True

    return fault


def _running(run: Run) -> subprocess.Popen[bytes]:
    assert run.process is not None
    return run.process


def _engine_killed(_: random.Random, run: Run) -> bool:
    children = run.ours.children(_running(run).pid)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(children)


def _stopped_for_a_while(rng: random.Random, run: Run) -> bool:
    process = _running(run)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 2.0))
    os.kill(process.pid, signal.SIGCONT)
    return True


def _disk_full(rng: random.Random, run: Run) -> bool:
    run.note()
    filler = fill(run.folder)
    time.sleep(rng.uniform(0.1, 3.0))
    filler.unlink(missing_ok=True)
    return True


def _study_locked(rng: random.Random, run: Run) -> bool:
    path = run.path / STUDY_FILE
    if not path.exists():
        return False
    with suppress(sqlite3.OperationalError):
        connection = sqlite3.connect(path, timeout=5, isolation_level=None)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(rng.uniform(0.5, 4.0))
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    return True


def _clock_set(rng: random.Random, run: Run) -> bool:
    off = Path(run.environment["TUNE_FAULT_CLOCK"])
    off.write_text(str(rng.choice((-86_400, -3600, -5, 5, 3600, 864_000))))
    return True


def _second_run(_: random.Random, run: Run) -> bool:
    """Somebody starts it again while it goes on: refused, or a run like any other."""
    if not (run.path / "run.json").exists():
        return False
    again = run.ours.start(
        command(["--resume", str(run.path)], **TOY), run.log, run.environment
    )
    code = ended(again)
    assert code in {0, 2}, f"{code}: {run.said()}"
    return code == 2


WHILE_RUNNING: dict[str, Fault] = {
    "run: SIGKILL": _signalled(signal.SIGKILL),
    "run: SIGTERM": _signalled(signal.SIGTERM),
    "run: SIGINT, also twice": _signalled(signal.SIGINT),
    "run: engine process killed": _engine_killed,
    "run: stopped and continued": _stopped_for_a_while,
    "run: disk full, then not": _disk_full,
    "run: study locked by others": _study_locked,
    "run: clock set": _clock_set,
    "run: started a second time": _second_run,
}


def _study_cut(rng: random.Random, run: Run) -> None:
    content = (run.path / STUDY_FILE).read_bytes()
    (run.path / STUDY_FILE).write_bytes(content[: rng.randrange(len(content))])


def _study_gone(_: random.Random, run: Run) -> None:
    (run.path / STUDY_FILE).unlink()


def _study_garbage(rng: random.Random, run: Run) -> None:
    content = bytearray((run.path / STUDY_FILE).read_bytes())
    at = rng.randrange(len(content))
    content[at : at + 4096] = rng.randbytes(min(4096, len(content) - at))
    (run.path / STUDY_FILE).write_bytes(content)


def _study_empty(_: random.Random, run: Run) -> None:
    (run.path / STUDY_FILE).write_bytes(b"")


WHILE_STOPPED: dict[str, Callable[[random.Random, Run], None]] = {
    "study: cut off": _study_cut,
    "study: gone": _study_gone,
    "study: overwritten in part": _study_garbage,
    "study: empty": _study_empty,
}


def disturbed(rng: random.Random, run: Run, kind: str, within_s: float) -> None:
    """Run to the end, with one fault of the kind and perhaps more kills while it is resumed."""
    fault = WHILE_RUNNING[kind]
    for attempt in range(MAX_RESUMES):
        process = run.begin()
        is_last = attempt >= 4
        if (attempt == 0 or (not is_last and rng.random() < 0.3)) and at_instant(
            rng, process, within_s if attempt == 0 else within_s / 2
        ):
            (fault if attempt == 0 else WHILE_RUNNING["run: SIGKILL"])(rng, run)
        code = ended(process)
        run.check_after(code)
        if code == 0 and (run.path / "result.json").exists():
            result = json.loads((run.path / "result.json").read_text())
            if result["state"] == "complete":
                return
    raise AssertionError(f"not at its end after {MAX_RESUMES} resumes: {run.said()}")


def homes(tmp_path: Path, ours: Marked, count: int) -> Iterator[tuple[int, Run]]:
    """Yield runs that have not begun, each on a small disk of its own."""
    trace = write_trace(tmp_path / "t.jsonl", n=120)
    for number in range(count):
        place = tmp_path / f"home{number}"
        with small_disk(place, DISK_KIB) as folder, clock_of(tmp_path) as (environment, off):
            off.unlink(missing_ok=True)
            yield number, Run(folder, ours, trace, environment)


@pytest.mark.parametrize("part", [0, 1])
def test_a_run_that_is_disturbed_ends_as_one_that_is_not(
    part: int,
    undisturbed: Ended,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally, kinds = Tally(), list(WHILE_RUNNING)
    with marked("runs") as ours:
        for number, run in homes(tmp_path, ours, how_many(request, 9, 0.12)):
            kind = kinds[number % len(kinds)]
            rng = random.Random(f"{part} {number}")
            with tally.fault(kind, f"part {part}, number {number}"):
                disturbed(rng, run, kind, undisturbed.took_s)
                run.check_whole(undisturbed)
            ours.end()
    tally.report(record_property)


def test_a_study_that_is_damaged_takes_no_trial_with_it(
    undisturbed: Ended,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """Either the run goes on with all that the file of trials holds, or it says why not."""
    tally, kinds = Tally(), list(WHILE_STOPPED)
    with marked("studies") as ours:
        for number, run in homes(tmp_path, ours, how_many(request, 4, 0.06)):
            kind, rng = kinds[number % len(kinds)], random.Random(f"study {number}")
            process = run.begin()
            while process.poll() is None and len(run.trials()) < rng.randrange(2, 12):
                time.sleep(0.02)
            process.kill()
            ended(process)
            run.note()
            with tally.fault(kind, f"number {number}"):
                WHILE_STOPPED[kind](rng, run)
                code = ended(run.begin())
                run.check_after(code)
                if code == 0:
                    run.check_whole(undisturbed)
                else:
                    assert code in {2, 4}, f"{code}: {run.said()}"
                    assert run.trials()[: len(run.kept)] == list(run.kept.values())
            ours.end()
    tally.report(record_property)


def test_the_oracle_sees_a_trial_that_is_lost(undisturbed: Ended, tmp_path: Path) -> None:
    with marked("oracle") as ours:
        for _, run in homes(tmp_path, ours, 1):
            assert ended(run.begin()) == 0
            run.note()
            run.check_whole(undisturbed)
            lines = (run.path / TRIALS_FILE).read_text().splitlines(keepends=True)
            (run.path / TRIALS_FILE).write_text("".join(lines[1:]))
            with pytest.raises(AssertionError):
                run.check_whole(undisturbed)
            sleeper = ours.start(["sleep", "60"], run.log)
            while not ours.alive():  # until it has its own environment
                time.sleep(0.01)
            with pytest.raises(AssertionError, match="still running"):
                ours.none_left(0.5)
            sleeper.kill()
