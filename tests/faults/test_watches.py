"""Whatever happens to a watch, its file is whole, edits stay, and production has it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from support.fault_parts import MARK, Marked, Tally, fill, how_many, marked, small_disk
from support.fault_watch import change, hand_over, restless
from support.watch_parts import EIGHT, FOUR, SERVED, UNCHANGED, a_world
from tuner.emit.sources import read_emitted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["support.fault_watch"])
EDIT = 7
"""What people have written when they have edited the file twice."""
LONG_S = 1.5
"""In which the file is changed some twenty times."""


def edited(path: Path, number: int) -> None:
    """Have a person change a line of their own, as editors do: whole, and by a rename."""
    lines = [line for line in path.read_text().splitlines() if "max-model-len" not in line]
    new = path.with_name("best.edited")
    new.write_text("\n".join([*lines, f"max-model-len: {1000 + number}"]) + "\n")
    new.replace(path)


def hooks_of(ours: Marked, process: BaseProcess) -> list[int]:
    assert process.pid is not None
    return ours.children(process.pid)


Fault = Callable[[random.Random, Marked, BaseProcess, Path], None]


def _killed(_: random.Random, __: Marked, process: BaseProcess, ___: Path) -> None:
    process.kill()


def _hook_killed(rng: random.Random, ours: Marked, process: BaseProcess, __: Path) -> None:
    for _ in range(rng.randrange(1, 6)):
        until_s = time.monotonic() + 2
        while not (found := hooks_of(ours, process)) and time.monotonic() < until_s:
            time.sleep(0.001)
        for pid in found:
            with suppress(ProcessLookupError):
                os.killpg(pid, rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGRTMIN)))
    process.kill()


def _disk_full(rng: random.Random, _: Marked, process: BaseProcess, folder: Path) -> None:
    filler = fill(folder)
    time.sleep(rng.uniform(0.1, 0.8))
    filler.unlink()
    time.sleep(rng.uniform(0.0, 0.4))
    process.kill()


def _edited(rng: random.Random, _: Marked, process: BaseProcess, folder: Path) -> None:
    edited(folder / "best.yaml", 0)
    time.sleep(rng.uniform(0.0, 0.5))
    edited(folder / "best.yaml", EDIT)
    time.sleep(rng.uniform(0.0, 0.5))
    process.kill()


def _stopped(rng: random.Random, _: Marked, process: BaseProcess, __: Path) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0.05, 0.5))
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(rng.uniform(0.0, 0.3))
    process.kill()


FAULTS: dict[str, Fault] = {
    "watch: SIGKILL": _killed,
    "watch: hook killed": _hook_killed,
    "watch: disk full, then not": _disk_full,
    "watch: file edited meanwhile": _edited,
    "watch: stopped, continued, killed": _stopped,
}


def check_taken_up(folder: Path, marker: str) -> None:
    """See that a watch that is started again finds a whole file, and ends what was begun."""
    path = folder / "best.yaml"
    read = read_emitted(path)
    assert read.limits in (FOUR, EIGHT)
    assert read.values["enforce-eager"] is True
    assert str(read.values.get("max-model-len", "")) == marker
    with a_world(folder, run_hook=partial(hand_over, folder)) as world:
        assert world.words == "", world.words
        for _ in range(3):
            world.rounds(UNCHANGED)
        state = world.watcher.store.state
        assert state.handover is None, world.words
        # Limits that people left as they were.
        assert world.watcher.current == read_emitted(path).limits
    left = {one.name for one in folder.iterdir()} - {"best.yaml", "state", "site"}
    assert left <= {"handed.yaml", "handed.new", ".filler"}, left


def check_handed(folder: Path) -> None:
    """Production has what was written last, unless people wrote since."""
    handed, text = (folder / "handed.yaml").read_text(), (folder / "best.yaml").read_text()
    assert handed == text


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Path]:
    """Return a small disk of a watch's own, with the file that is served."""
    with small_disk(tmp_path / "home", 1024) as folder:
        (folder / "best.yaml").write_text(SERVED)
        yield folder


def test_a_watch_killed_at_any_instant_is_taken_up(
    homes: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    tally, kinds, expected = Tally(), list(FAULTS), ""
    with marked("watch") as ours:
        monkeypatch.setenv(MARK, ours.name)
        for number in range(how_many(request, 30, 0.2)):
            kind, rng = kinds[number % len(kinds)], random.Random(f"watch {number}")
            process = FORKING.Process(target=restless, args=(homes,))
            process.start()
            time.sleep(rng.uniform(0.2, LONG_S))
            with tally.fault(kind, f"number {number}"):
                assert process.is_alive(), f"it ended with {process.exitcode}"
                FAULTS[kind](rng, ours, process, homes)
                process.join(30)
                time.sleep(0.1)  # a hook runs on where its watch was killed, and ends
                expected = str(1000 + EDIT) if FAULTS[kind] is _edited else expected
                check_taken_up(homes, expected)
                with a_world(homes, run_hook=partial(hand_over, homes)) as world:
                    change(world)
                check_handed(homes)
            process.kill()
            process.join()
    tally.report(record_property)


def test_the_oracle_sees_a_file_that_was_not_handed_over(homes: Path) -> None:
    with a_world(homes, run_hook=partial(hand_over, homes)) as world:
        change(world)
    check_handed(homes)
    edited(homes / "best.yaml", 3)
    with pytest.raises(AssertionError):
        check_handed(homes)
    with pytest.raises(AssertionError):
        check_taken_up(homes, "1004")
    check_taken_up(homes, "1003")
