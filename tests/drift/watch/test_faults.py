"""Whatever dies, fills up or fails around a watch, the file is whole and the state tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.paths import TESTS
from support.watch_parts import (
    EIGHT,
    FOUR,
    HOUR_S,
    SERVED,
    THIRTY,
    UNCHANGED,
    a_world,
    full_disk,
    pays,
)
from tuner.drift.watch.handover import HookEnd, run_hook
from tuner.drift.watch.policy import Act
from tuner.drift.watch.publish import Publisher, Text
from tuner.drift.watch.state import RolloutRecord, StateDir, WatchState
from tuner.emit.names import Format
from tuner.emit.sources import read_emitted
from tuner.files import ExpectedText

RESTLESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.watch_parts import EIGHT, FOUR, HOUR_S, a_world, pays
from tuner.drift.watch.handover import HookEnd
folder = Path(sys.argv[1])
def hand_over(facts):
    (folder / "handed.new").write_text((folder / "best.yaml").read_text())
    (folder / "handed.new").replace(folder / "handed.yaml")
    return HookEnd(0, "")
with a_world(folder, run_hook=hand_over) as world:
    while True:
        other = EIGHT if world.watcher.current == FOUR else FOUR
        world.lasts(pays(other))
        world.clock.sleep(6 * HOUR_S)
        print(other, flush=True)
"""
"""Changes the file again and again; a copy is what its hook has handed over."""


class KilledError(BaseException):
    """Stands for the end of the process within it."""


def test_a_process_killed_at_any_instant_leaves_a_whole_file_and_is_taken_up(
    tmp_path: Path,
) -> None:
    changes = 3
    (tmp_path / "best.yaml").write_text(SERVED)
    command = [sys.executable, "-c", RESTLESS, str(tmp_path), str(TESTS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(changes):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with a_world(tmp_path) as world:
        assert world.words == ""
        assert read_emitted(world.path).limits in (FOUR, EIGHT)
        world.rounds(UNCHANGED)
        state = world.watcher.store.state
        assert state.handover is None
        assert state.counts.changes >= changes
        assert state.current == world.watcher.current
        # Handed over by the process that was killed, or by this one.
        handed = [text for _, text in world.hook.seen] or [
            (tmp_path / "handed.yaml").read_text()
        ]
        assert handed == [world.path.read_text()]


def test_a_file_that_was_written_before_the_kill_is_handed_over_after_it(
    tmp_path: Path,
) -> None:
    def die(_: object) -> HookEnd:
        raise KilledError

    with a_world(tmp_path, run_hook=die) as world, pytest.raises(KilledError):
        world.lasts(pays())
    with a_world(tmp_path) as world:
        assert world.rounds(UNCHANGED) == [Act.NONE]
        assert world.hook.seen == [("change", world.path.read_text())]
        assert world.watcher.current == EIGHT


@dataclass(frozen=True, slots=True)
class DyingPublisher(Publisher):
    """Does not live to write the file."""

    def write(self, text: Text, held: ExpectedText) -> None:
        """End the process."""
        raise KilledError(text.text, held)


def test_a_change_that_was_decided_but_not_written_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        rollout = world.watcher.rollout
        rollout.publisher = DyingPublisher(
            world.path, Format.VLLM, rollout.publisher.profile, {}
        )
        with pytest.raises(KilledError):
            world.lasts(pays())
    with a_world(tmp_path) as world:
        assert world.rounds(UNCHANGED) == [Act.NONE]
        assert "was decided but not written: it is dropped" in world.words
        assert world.hook.seen == []
        assert world.path.read_text() == SERVED


def test_a_way_back_that_was_decided_is_taken_even_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text("model: toy\n")
    back = RolloutRecord(
        EIGHT,
        FOUR,
        "model: toy\n",
        SERVED,
        has_secrets=False,
        why="it was worse",
        decided_s=0.0,
        is_rollback=True,
    )
    with StateDir(tmp_path / "state") as kept:
        kept.save(WatchState(profile_sha256="a", handover=back))
    with a_world(tmp_path) as world:
        world.rounds(UNCHANGED)
        assert world.hook.seen == [("rollback", SERVED)]
        assert world.watcher.store.state.memory.barred == (EIGHT,)


def test_a_hook_that_fails_runs_again_before_anything_else(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.hook.exit_codes = [3, 0]
        found = world.lasts(pays())
        assert found[-1].startswith("the hook ended with exit code 3: done; ")
        assert "written but not handed over, try 1" in found[-1]
        assert world.watcher.store.state.counts.changes == 0
        assert world.rounds(UNCHANGED) == [Act.NONE]
        assert [event for event, _ in world.hook.seen] == ["change"] * 2
        assert world.watcher.store.state.counts.changes == 1


def test_a_hook_does_not_run_again_over_what_somebody_has_written_since(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.hook.exit_codes = [3, 0]
        world.lasts(pays())
        own = world.path.read_text().replace("max-num-seqs: 8", "max-num-seqs: 16")
        assert own != world.path.read_text()
        world.path.write_text(own)
        world.rounds(UNCHANGED)
        assert [event for event, _ in world.hook.seen] == ["change"]
        assert world.path.read_text() == own
        assert world.watcher.store.state.counts.changes == 0
        assert world.watcher.current.max_num_seqs == 16


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    served = SERVED + "".join(f"# {'x' * 90}\n" for _ in range(100))
    (tmp_path / "best.yaml").write_text(served)
    with a_world(tmp_path) as world:
        world.rounds(pays())
        world.clock.sleep(HOUR_S)
        with full_disk():
            (found,) = world.rounds(pays())
        assert "cannot be written" in found
        assert world.path.read_text() == served
        assert world.hook.seen == []
        # With room again the next round acts.
        assert world.rounds(pays()) == [Act.CHANGE]


def test_a_real_hook_is_told_what_happened_and_needs_no_shell(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = (
        "import json, os, sys; json.dump([sys.argv[2], {**os.environ}], open(sys.argv[1], 'w'))"
    )
    argv = [sys.executable, "-c", code, str(seen), "$(rm -rf /) ; *"]
    with a_world(tmp_path, run_hook=lambda facts: run_hook(argv, facts, 30.0)) as world:
        assert world.lasts(pays()) == [Act.CONFIRM, Act.CHANGE]
        word, environment = json.loads(seen.read_text())
        assert word == "$(rm -rf /) ; *"
        assert environment["TUNE_EVENT"] == "change"
        assert environment["TUNE_FILE"] == str(world.path.resolve())
        assert environment["TUNE_MAX_NUM_SEQS"] == "8"
        assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('no'); raise SystemExit(7)", "the hook ended with exit code 7: no"),
        ("import time; time.sleep(60)", "did not end within 0.5 s and was killed"),
        ("import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM"),
    ],
)
def test_how_a_hook_ends_is_reported(code: str, words: str) -> None:
    end = run_hook([sys.executable, "-c", code], {}, 0.5 if "sleep" in code else 30.0)
    assert not end.is_done
    assert words in end.text


def test_a_signal_without_a_name_ends_a_hook_and_not_the_watch() -> None:
    end = run_hook(["sh", "-c", "kill -40 $$"], {}, 30.0)
    assert end.text == "the hook was ended by signal 40"


@pytest.mark.parametrize("how", ["sleep 30 &", "setsid sleep 30 &"])
def test_what_a_hook_leaves_running_neither_holds_it_up_nor_is_killed(
    tmp_path: Path, how: str
) -> None:
    pid = tmp_path / "pid"
    began_s = time.monotonic()
    end = run_hook(["sh", "-c", f"{how} echo $! > {pid}; echo handed over"], {}, 20.0)
    assert (end.exit_code, end.output) == (0, "handed over")
    assert time.monotonic() - began_s < 10
    left = int(pid.read_text())
    os.kill(left, 0)
    os.kill(left, signal.SIGKILL)


def test_a_hook_that_floods_its_output_takes_no_memory() -> None:
    code = "import sys; [sys.stdout.write('x' * 65536) for _ in range(2000)]; print('the end')"
    tracemalloc.start()
    try:
        end = run_hook([sys.executable, "-c", code], {}, 60.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert end.output.endswith("the end")
    assert peak < 4 << 20


def test_no_exception_of_a_round_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        for fault in (
            ValueError("could not convert string to float: 'abc'"),
            MemoryError(),
            RuntimeError("cannot reach http://me:s3cret@host?token=s3cret"),
            RecursionError("deep"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(world.watcher, "check", raising(fault))
                error = world.watcher.round()
            assert error is not None
            assert type(fault).__name__ in error.message
            assert "test_faults.py" in world.words, "without its traceback nobody can mend it"
        last = world.watcher.store.state.last
        assert world.watcher.store.state.counts.errors == 4
        assert "RecursionError: deep" in last.error
        kept = (tmp_path / "state" / "state.json").read_text()
        assert "s3cret" not in kept
        assert world.path.read_text() == SERVED
        # The next rounds are as if nothing had been.
        assert world.lasts(pays()) == [Act.CONFIRM, Act.CHANGE]


def raising(fault: Exception) -> Any:
    """Return what fails whatever it is called with."""

    def fail(*_: object) -> object:
        raise fault

    return fail


def test_a_watch_outlives_a_log_that_is_full() -> None:
    code = "from tuner.cli.watch import _say_if_anybody_listens as say; say('nobody reads it')"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; print('on')"],
            stderr=full,
            stdout=subprocess.PIPE,
            check=False,
        )
    assert done.stdout == b"on\n"


def test_a_hook_that_is_not_there_is_reported() -> None:
    end = run_hook(["/no/such program"], {}, 1.0)
    assert end.text == "the hook cannot be run: /no/such program: No such file or directory"


def test_a_damaged_state_is_reported_and_the_file_says_what_is_in_use(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.lasts(pays())
    (tmp_path / "state" / "state.json").write_text("{")
    with a_world(tmp_path) as world:
        assert "is damaged and was set aside" in world.words
        assert world.watcher.current == EIGHT
        assert world.rounds(pays(THIRTY)) == [Act.CONFIRM]


def test_kept_traffic_that_is_damaged_is_reported_and_the_profiles_own_taken(
    tmp_path: Path,
) -> None:
    with a_world(tmp_path) as world:
        world.lasts(pays())
        (kept,) = (tmp_path / "state").glob("traffic-*.json")
        kept.write_text("{}")
        assert world.rounds(UNCHANGED) == [Act.NONE]
        assert world.script.tuned_for[-1] is None
        assert "comparing with the profile's own traffic" in world.words


def test_a_prometheus_that_comes_back_is_asked_again_and_one_that_does_not_is_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        world.script.outages.extend(["it is down"] * 3)
        assert world.rounds(pays()) == [Act.CONFIRM]
        assert world.clock.waits_s[:3] == [2.0, 8.0, 30.0]
        world.script.outages.extend(["it is down"] * 4)
        assert world.watcher.round() is not None
        last = world.watcher.store.state.last
        assert (last.error, world.watcher.store.state.counts.errors) == ("it is down", 1)
        assert world.path.read_text() == SERVED
        # It neither confirmed nor refuted.
        world.script.outages.clear()
        world.clock.sleep(HOUR_S)
        assert world.rounds(pays()) == [Act.CHANGE]
