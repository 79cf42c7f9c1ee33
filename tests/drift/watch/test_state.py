"""The state of a watch survives what can happen to a process and to a disk."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.drift_parts import busy_traffic
from support.watch_parts import full_disk
from tuner.drift.watch.policy import Memory, Policy, later_from_s
from tuner.drift.watch.state import (
    STATE_FILE,
    Counts,
    Last,
    RolloutRecord,
    Stage,
    StateDir,
    WatchState,
)
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.traffic.sketch import sketch_of

LIMITS = st.builds(EngineLimits, st.integers(1, 64), st.integers(64, 8192))
FINITE = st.floats(0, 1e10)
HANDOVERS = st.builds(
    RolloutRecord,
    LIMITS,
    LIMITS,
    st.text(),
    st.text(),
    st.booleans(),
    st.text(),
    FINITE,
    stage=st.sampled_from(Stage),
    had_file=st.booleans(),
    restarted=st.lists(st.text()).map(tuple),
)
STATES = st.builds(
    WatchState,
    memory=st.builds(
        Memory, LIMITS, st.integers(0), FINITE, st.lists(LIMITS).map(tuple), st.none() | FINITE
    ),
    current=st.none() | LIMITS,
    handover=st.none() | HANDOVERS,
    counts=st.builds(Counts, st.dictionaries(st.text(), st.integers(0))),
    last=st.builds(Last, FINITE, st.text(), gain_ratio=st.none() | FINITE),
)
KILLED = """
import sys
from pathlib import Path
from tuner.drift.watch.state import Counts, StateDir, WatchState
kept, count = StateDir(Path(sys.argv[1])), 0
while True:
    count += 1
    kept.save(WatchState(counts=Counts(errors=count, checks={"x" * 50_000: count})))
    print(count, flush=True)
"""


@settings(max_examples=30)
@given(STATES)
def test_a_state_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, state: WatchState
) -> None:
    with StateDir(tmp_path_factory.mktemp("state")) as kept:
        kept.save(state)
        assert kept.load() == (state, "")


EARLIER = b"""{
 "schema": 2, "profile_sha256": "a", "traffic": "traffic-1.json",
 "memory": {
  "pending": {"max_num_seqs": 8, "max_num_batched_tokens": 2048}, "confirmed": 1,
  "last_change_s": 5.0, "barred": []
 },
 "handover": {
  "old": {"max_num_seqs": 4, "max_num_batched_tokens": 2048},
  "new": {"max_num_seqs": 8, "max_num_batched_tokens": 2048},
  "old_text": "a", "new_text": "b", "has_secrets": false, "why": "it pays",
  "decided_s": 6.0, "stage": "on guard", "handed_s": 7.0, "hook_tries": 0,
  "bias": {"e2e tail": 1.2, "requests_per_s": 1.0}, "is_rollback": false
 }
}"""


def test_the_state_of_an_earlier_version_is_read_and_its_change_stays_on_guard(
    tmp_path: Path,
) -> None:
    (tmp_path / STATE_FILE).write_bytes(EARLIER)
    with StateDir(tmp_path) as kept:
        state, shown = kept.load()
    assert shown == ""
    assert state.memory == Memory(EngineLimits(8, 2048), 1, 5.0)
    assert state.handover is not None
    assert (state.handover.stage, state.handover.handed_s) == (Stage.ON_GUARD, 7.0)
    # Which engines had restarted was not kept: the next restart is the first that is seen.
    assert state.handover.restarted == ()
    # Nobody knows on which traffic its verdict rests, so that nothing can confirm it.
    assert later_from_s(Policy(), state.memory, 1e9) is None


def test_the_first_state_is_empty_and_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    with StateDir(tmp_path / "new" / "state") as kept:
        assert kept.load() == (WatchState(), "")
        kept.save(WatchState())
        assert stat.S_IMODE((kept.path / STATE_FILE).stat().st_mode) == 0o600


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_state(tmp_path: Path) -> None:
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        shown = [int(process.stdout.readline()) for _ in range(5)]
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        shown += [int(line) for line in process.stdout.read().splitlines()]
        process.wait()
        # The lock goes with the process, and what it was writing is cleared away.
        with StateDir(tmp_path) as kept:
            state, remark = kept.load()
            assert remark == ""
            assert state.counts.errors >= shown[-1]
            assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", STATE_FILE]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema": 1}',
        b'{"current": {"max_num_seqs": 0, "max_num_batched_tokens": 1}}',
        b'{"handover": {}}',
    ],
)
def test_a_damaged_state_is_set_aside_and_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(content)
    with StateDir(tmp_path) as kept:
        state, shown = kept.load()
        assert state == WatchState()
        assert "is damaged and was set aside as state.json.damaged-" in shown
        aside = next(tmp_path.glob("state.json.damaged-*"))
        assert aside.read_bytes() == content
        assert kept.load() == (WatchState(), "")


def test_two_watches_exclude_each_other(tmp_path: Path) -> None:
    with StateDir(tmp_path), pytest.raises(UsageError, match="another watch is using") as shown:
        StateDir(tmp_path)
    assert "--state" in shown.value.hint
    with StateDir(tmp_path) as kept:
        assert kept.load() == (WatchState(), "")


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    old = WatchState(counts=Counts(errors=1))
    with StateDir(tmp_path) as kept:
        kept.save(old)
        with full_disk(), pytest.raises(UsageError, match="cannot be written"):
            kept.save(WatchState(counts=Counts({"x" * 100_000: 1})))
        assert kept.load() == (old, "")
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", STATE_FILE]


def test_a_new_profile_lifts_what_was_held_against_the_old() -> None:
    eight = EngineLimits(8, 2048)
    old = WatchState(
        profile_sha256="a",
        memory=Memory(eight, 1, 5.0, (eight,), 4.0, eight),
        current=eight,
        traffic="traffic-1.json",
    )
    assert old.for_profile("a") == old
    new = old.for_profile("b")
    assert (new.memory, new.current, new.traffic) == (Memory(last_change_s=5.0), eight, "")


def test_kept_traffic_comes_back_or_is_told_to_be_damaged(tmp_path: Path) -> None:
    sketch = sketch_of(busy_traffic(0, minutes=4))
    with StateDir(tmp_path) as kept:
        name = kept.keep_traffic(sketch, 0.0)
        found, shown = kept.traffic(name)
        assert found is not None
        assert (found.requests, found.sha256, shown) == (sketch.requests, sketch.sha256, "")
        other = kept.keep_traffic(sketch, 60.0)
        kept.forget_traffic_but(other)
        assert kept.traffic(name) == (None, f"{tmp_path / name} is gone")
        (tmp_path / other).write_text("{}")
        found, shown = kept.traffic(other)
        assert found is None
        assert "is damaged and was set aside" in shown
