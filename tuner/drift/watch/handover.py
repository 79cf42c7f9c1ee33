"""Hand a file over step by step, each on disk before the next: write, run the hook, guard.

Answers how a change that was decided goes on, also in a process that only finds it in the
state. A hook may run again after a kill, never not at all. The file is written only over what
the change was decided on, so that what others put there meanwhile stays. Deciding is left to
`loop`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tuner.drift.watch.guard import Guard, Guarded
from tuner.drift.watch.policy import changed, rolled_back
from tuner.drift.watch.publish import Publisher, Text
from tuner.drift.watch.state import RolloutRecord, Stage, StateDir, WatchState
from tuner.errors import TunerError, UsageError
from tuner.files import ChangedMeanwhileError

TOLD_CHARACTERS: Final = 400
"""Ours: enough of what a command said last to see what it complained of."""


@dataclass(frozen=True, slots=True)
class HookEnd:
    """How a hook ended: exit_code is None where it did not start or was stopped in time."""

    exit_code: int | None
    said: str
    problem: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the file was handed over."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Say it in words."""
        how = self.problem or f"ended with exit code {self.exit_code}"
        return f"the hook {how}" + (f": {self.said}" if self.said and not self.is_done else "")


def run_hook(argv: Sequence[str], told: Mapping[str, str], timeout_s: float) -> HookEnd:
    """Run the command and return how it ended; past the time-out it is killed whole.

    `told` is added to its environment. Its own words go to neither of our streams, so that
    standard output stays the result's.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **told},
            # A group of its own, so that what it started ends with it.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return HookEnd(None, "", f"cannot be run: {argv[0]}: {reason}")
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        said, _ = process.communicate()
        return HookEnd(None, _tail(said), f"did not end within {timeout_s:g} s and was killed")
    except BaseException:
        _kill(process)
        raise
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return HookEnd(process.returncode, _tail(said), f"was ended by {name}")
    return HookEnd(process.returncode, _tail(said))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(said: bytes) -> str:
    r"""Return the end of what was said, as one line.

    >>> _tail(b"a\nb\n")
    'a / b'
    """
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return " / ".join(lines)[-TOLD_CHARACTERS:]


Notify = Callable[[str], None]
RunHook = Callable[[Mapping[str, str]], HookEnd]


class Clock(Protocol):
    """What time it is, and how it passes."""

    def now_s(self) -> float:
        """Return the Unix time."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        ...


class StateStore:
    """The state as it is on disk: what a change rests on is there before it is known here."""

    def __init__(self, kept: StateDir, state: WatchState) -> None:
        self.kept, self.state = kept, state

    def put(self, state: WatchState) -> None:
        """Take a state once it is on disk. Raises: UsageError if it cannot be written."""
        self.kept.save(state)
        self.state = state

    def note(self, state: WatchState) -> None:
        """Take a state, on disk if that can be: counts and words, which nothing rests on.

        Raises: UsageError if it is not on disk.
        """
        self.state = state
        self.kept.save(state)


@dataclass(slots=True)
class Rollout:
    """Brings hand-overs to their end."""

    book: StateStore
    publisher: Publisher
    run_hook: RunHook | None
    guard: Guard | None
    clock: Clock
    tell: Notify

    @property
    def is_on_guard(self) -> bool:
        """Whether a change is on probation."""
        found = self.book.state.handover
        return found is not None and found.stage is Stage.ON_GUARD

    @property
    def judged_at_s(self) -> float | None:
        """When the guard wants to look, in Unix seconds; None while there is nothing."""
        found = self.book.state.handover
        if found is None or found.stage is not Stage.ON_GUARD or self.guard is None:
            return None
        return self.guard.window(found.handed_s)[1]

    def begin(self, handover: RolloutRecord) -> None:
        """Write the file and hand it over, unless it was changed since this was decided.

        Raises: UsageError, with the old file whole.
        """
        self.book.put(replace(self.book.state, handover=handover))
        self._write(handover)

    def go_on(self) -> None:
        """Take up what an earlier round, or another process, has left unfinished.

        Raises: TunerError if it still cannot be finished.
        """
        found = self.book.state.handover
        if found is None:
            return
        if found.stage is Stage.DECIDED:
            self._take_up(found)
        elif found.stage is Stage.WRITTEN:
            self._hand(found)
        else:
            self._judge(found)

    def _take_up(self, found: RolloutRecord) -> None:
        """Go on where a process died, or a disk was full, around the writing of the file."""
        if found.is_rollback or self.publisher.holds(found.new_text):
            self._write(found)
            return
        # The verdict is of another time by now; the next check gives a fresh one.
        self.tell(f"a change to {found.new} was decided and not written: it is dropped")
        self.book.put(replace(self.book.state, handover=None))
        self.book.kept.forget_traffic_but(self.book.state.traffic)

    def _write(self, found: RolloutRecord) -> None:
        if not self.publisher.holds(found.new_text):
            try:
                self.publisher.write(Text(found.new_text, found.has_secrets), found.held)
            except ChangedMeanwhileError:
                self._drop(found)
                return
        self.tell(f"{self.publisher.path} now holds {found.new}: {found.why}")
        written = replace(found, stage=Stage.WRITTEN)
        self.book.put(replace(self.book.state, handover=written))
        self._hand(written)

    def _drop(self, found: RolloutRecord) -> None:
        """Forget a change, as the file is not the one that it was decided on."""
        told = f"{self.publisher.path} was changed by others meanwhile and is left alone"
        self.tell(f"{told}: the {_event(found)} to {found.new} is dropped")
        self.book.put(replace(self.book.state, handover=None))
        self.book.kept.forget_traffic_but(self.book.state.traffic)

    def _hand(self, found: RolloutRecord) -> None:
        """Run the hook, and note that the change is made."""
        if self.run_hook is not None:
            end = self.run_hook(self._told(found))
            self.tell(end.text)
            if not end.is_done:
                again = replace(found, hook_tries=found.hook_tries + 1)
                self.book.put(replace(self.book.state, handover=again))
                raise UsageError(
                    f"{end.text}; {self.publisher.path} is written but not handed over, "
                    f"try {again.hook_tries}",
                    "it runs again in the next round",
                )
        now_s, state = self.clock.now_s(), self.book.state
        counts, memory = state.counts, changed(state.memory, now_s)
        if found.is_rollback:
            counts = replace(counts, rollbacks=counts.rollbacks + 1)
            memory = rolled_back(state.memory, found.old, now_s)
        else:
            counts = replace(counts, changes=counts.changes + 1)
        stays = self.guard is not None and not found.is_rollback
        guarded = replace(found, stage=Stage.ON_GUARD, handed_s=now_s) if stays else None
        self.book.put(
            replace(
                state,
                memory=memory,
                counts=counts,
                present=found.new,
                traffic=found.new_traffic,
                handover=guarded,
            )
        )
        self.book.kept.forget_traffic_but(
            found.new_traffic, *([found.old_traffic] if stays else [])
        )

    def _told(self, found: RolloutRecord) -> dict[str, str]:
        """Return what the hook finds in its environment."""
        return {
            "TUNE_EVENT": _event(found),
            "TUNE_FILE": str(self.publisher.path.resolve()),
            "TUNE_MAX_NUM_SEQS": str(found.new.max_num_seqs),
            "TUNE_MAX_NUM_BATCHED_TOKENS": str(found.new.max_num_batched_tokens),
            "TUNE_WHY": found.why,
        }

    def _judge(self, found: RolloutRecord) -> None:
        """Look at a change on probation: keep it, take it back, or wait on."""
        now_s = self.clock.now_s()
        if self.guard is None:
            self._end_guard("the guard was switched off")
            return
        if now_s < self.guard.window(found.handed_s)[1]:
            return
        is_over = self.guard.is_over(found.decided_s, now_s)
        try:
            judged = self.guard.judge(found.decided_s, found.handed_s, found.old, found.new)
        except TunerError as error:
            if is_over:
                self._end_guard(f"gave up without a verdict on {found.new}: {error.message}")
            raise
        told = f"{found.new} {judged.found}: {judged.why}"
        if judged.found is Guarded.AGREES:
            self._end_guard(told)
        elif judged.found is Guarded.WORSE:
            self._take_back(found, judged.why)
        elif is_over:
            self._end_guard(f"gave up without a verdict on {found.new}: {judged.why}")
        else:
            self.tell(f"guard: {told}; it looks again")
            if judged.restarted_s is not None:
                later = replace(found, handed_s=judged.restarted_s)
                self.book.put(replace(self.book.state, handover=later))

    def _end_guard(self, told: str) -> None:
        """Let a change stand."""
        self.tell(f"guard: {told}")
        state = self.book.state
        last = replace(state.last, guard=told)
        self.book.put(replace(state, handover=None, last=last))
        self.book.kept.forget_traffic_but(state.traffic)

    def _take_back(self, found: RolloutRecord, why: str) -> None:
        """Emit the old file again, unless somebody has put another in its place."""
        told = f"{found.new} {Guarded.WORSE}: {why}"
        if not self.publisher.holds(found.new_text):
            path = self.publisher.path
            self._end_guard(f"{told}; {path} was changed by others since and is left alone")
            return
        self.tell(f"guard: {told}; rolling back to {found.old}")
        state = self.book.state
        self.book.put(replace(state, last=replace(state.last, guard=f"{told}; rolled back")))
        self.begin(
            replace(
                found,
                old=found.new,
                new=found.old,
                old_text=found.new_text,
                new_text=found.old_text,
                old_traffic=found.new_traffic,
                new_traffic=found.old_traffic,
                why=f"rolled back from {found.new}: {why}",
                decided_s=self.clock.now_s(),
                stage=Stage.DECIDED,
                hook_tries=0,
                is_rollback=True,
                had_file=True,
            )
        )


def _event(found: RolloutRecord) -> str:
    return "rollback" if found.is_rollback else "change"
