"""The rollout of a change in steps, each on disk before the next: write, run the hook, guard.

Answers how a change that was decided goes on, also in a process that only finds it in the
state. A hook may run again after a kill, never not at all. The file is written only over what
the change was decided on, so that what others put there meanwhile stays.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tuner.drift.watch.guard import SETTLE_RATIO, Guard, GuardVerdict
from tuner.drift.watch.policy import changed, rolled_back
from tuner.drift.watch.publish import Publisher, Text
from tuner.drift.watch.state import RolloutRecord, Stage, StateDir
from tuner.errors import TunerError, UsageError
from tuner.files import ChangedMeanwhileError

MAX_OUTPUT_CHARACTERS: Final = 400
"""Ours: enough of a command's last output to show its error."""

_PIPE_BYTES: Final = 1 << 16
_LINGER_S: Final = 0.5
"""Ours: what a command wrote before it ended is read by then."""


@dataclass(frozen=True, slots=True)
class HookEnd:
    """How a hook ended: exit_code is None where it did not start or was stopped in time."""

    exit_code: int | None
    output: str
    problem: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the file was handed over."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Return the end in words."""
        how = self.problem or f"ended with exit code {self.exit_code}"
        return f"the hook {how}" + (
            f": {self.output}" if self.output and not self.is_done else ""
        )


def run_hook(argv: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> HookEnd:
    """Run the command and return how it ended; past the time-out it is killed whole.

    `environment` is added to ours. Its output goes to neither of our streams, so that standard
    output stays the result's. It has ended when the command has: what it left in the background
    runs on, and may keep its streams.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # A group of its own, so that what it started ends with it.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return HookEnd(None, "", f"cannot be run: {argv[0]}: {reason}")
    output = _LastWords(process)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return HookEnd(None, output.text, f"did not end within {timeout_s:g} s and was killed")
    except BaseException:
        _kill(process)
        raise
    problem = f"was ended by {_signal_name(-code)}" if code < 0 else ""
    return HookEnd(code, output.text, problem)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _signal_name(number: int) -> str:
    """Return what a signal is called; those for real time have no names.

    >>> _signal_name(15), _signal_name(40)
    ('SIGTERM', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _LastWords:
    """The end of what a process writes, read for as long as anybody may write it.

    By a thread of its own, and all but the end is dropped: neither a command that floods its
    output nor a service that it leaves behind is held up, and none takes memory.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(
            target=self._read, args=(process.stdout,), name="hook output", daemon=True
        )
        self._thread.start()

    def _read(self, stream: io.BufferedReader) -> None:
        with suppress(OSError), stream:
            while part := stream.read1(_PIPE_BYTES):
                self._kept = (self._kept + part)[-4 * MAX_OUTPUT_CHARACTERS :]

    @property
    def text(self) -> str:
        """What was written by now, as one line; the last of it may be on its way."""
        self._thread.join(_LINGER_S)
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return " / ".join(lines)[-MAX_OUTPUT_CHARACTERS:]


Notify = Callable[[str], None]
RunHook = Callable[[Mapping[str, str]], HookEnd]


class Clock(Protocol):
    """What time it is, and how it passes."""

    def now_s(self) -> float:
        """Return the Unix time."""

    def elapsed_s(self) -> float:
        """Return seconds since any instant, which nobody sets back or forward."""

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""


@dataclass(slots=True)
class Rollout:
    """Brings a change to its end: the file, the hook, the guard."""

    store: StateDir
    publisher: Publisher
    run_hook: RunHook | None
    guard: Guard | None
    clock: Clock
    notify: Notify

    @property
    def is_on_guard(self) -> bool:
        """Whether a change is on probation."""
        record = self.store.state.handover
        return record is not None and record.stage is Stage.ON_GUARD

    @property
    def judged_at_s(self) -> float | None:
        """When the guard's window ends, in Unix seconds; None without a change on probation."""
        record = self.store.state.handover
        if record is None or record.stage is not Stage.ON_GUARD or self.guard is None:
            return None
        return self.guard.window(record.handed_s)[1]

    def begin(self, handover: RolloutRecord) -> None:
        """Write the file and hand it over, unless it was changed since this was decided.

        Raises: UsageError, with the old file whole.
        """
        self.store.update(handover=handover)
        self._write(handover)

    def go_on(self) -> None:
        """Resume what an earlier round, or another process, has left unfinished.

        Raises: TunerError if it still cannot be finished.
        """
        record = self.store.state.handover
        if record is None:
            return
        if record.stage is Stage.DECIDED:
            self._resume(record)
        elif record.stage is Stage.WRITTEN and not self.publisher.holds(record.new_text):
            self._drop(record)
        elif record.stage is Stage.WRITTEN:
            self._hand(record)
        else:
            self._judge(record)

    def _resume(self, record: RolloutRecord) -> None:
        """Go on where a process died, or a disk was full, around the writing of the file."""
        if record.is_rollback or self.publisher.holds(record.new_text):
            self._write(record)
            return
        # The verdict is of another time by now; the next check gives a fresh one.
        self.notify(f"the change to {record.new} was decided but not written: it is dropped")
        self.store.update(handover=None)
        self.store.forget_traffic_but(self.store.state.traffic)

    def _write(self, record: RolloutRecord) -> None:
        if not self.publisher.holds(record.new_text):
            try:
                self.publisher.write(Text(record.new_text, record.has_secrets), record.expected)
            except ChangedMeanwhileError:
                self._drop(record)
                return
        self.notify(f"{self.publisher.path} now holds {record.new}: {record.why}")
        written = replace(record, stage=Stage.WRITTEN)
        self.store.update(handover=written)
        self._hand(written)

    def _drop(self, record: RolloutRecord) -> None:
        """Forget a change, as the file is not the one that it was decided on."""
        message = f"{self.publisher.path} was changed by others meanwhile and is left alone"
        self.notify(f"{message}: the {_event(record)} to {record.new} is dropped")
        self.store.update(handover=None)
        self.store.forget_traffic_but(self.store.state.traffic)

    def _hand(self, record: RolloutRecord) -> None:
        """Run the hook, and note that the change is made."""
        if self.run_hook is not None:
            end = self.run_hook(self._environment(record))
            self.notify(end.text)
            if not end.is_done:
                again = replace(record, hook_tries=record.hook_tries + 1)
                self.store.update(handover=again)
                raise UsageError(
                    f"{end.text}; {self.publisher.path} is written but not handed over, "
                    f"try {again.hook_tries}",
                    "it runs again in the next round",
                )
        now_s, state = self.clock.now_s(), self.store.state
        counts, memory = state.counts, changed(state.memory, now_s)
        if record.is_rollback:
            counts = replace(counts, rollbacks=counts.rollbacks + 1)
            memory = rolled_back(state.memory, record.old, now_s)
        else:
            counts = replace(counts, changes=counts.changes + 1)
        stays = self.guard is not None and not record.is_rollback
        guarded = replace(record, stage=Stage.ON_GUARD, handed_s=now_s) if stays else None
        self.store.update(
            memory=memory,
            counts=counts,
            current=record.new,
            traffic=record.new_traffic,
            handover=guarded,
        )
        self.store.forget_traffic_but(
            record.new_traffic, *([record.old_traffic] if stays else [])
        )

    def _environment(self, record: RolloutRecord) -> dict[str, str]:
        """Return the hook's environment variables."""
        return {
            "TUNE_EVENT": _event(record),
            "TUNE_FILE": str(self.publisher.path.resolve()),
            "TUNE_MAX_NUM_SEQS": str(record.new.max_num_seqs),
            "TUNE_MAX_NUM_BATCHED_TOKENS": str(record.new.max_num_batched_tokens),
            "TUNE_WHY": record.why,
        }

    def _judge(self, record: RolloutRecord) -> None:
        """Judge a change on probation: keep it, roll it back, or wait."""
        now_s = self.clock.now_s()
        if self.guard is None:
            self._end_guard("the guard was switched off")
            return
        if now_s < record.handed_s:
            # The clock was put back: what comes from now on is judged.
            decided_s = min(record.decided_s, now_s)
            record = replace(record, handed_s=now_s, decided_s=decided_s)
            self.store.update(handover=record)
        if now_s < self.guard.window(record.handed_s)[1]:
            return
        is_over = self.guard.is_over(record.decided_s, now_s)
        try:
            judged = self.guard.judge(
                record.decided_s, record.handed_s, record.old, record.new, record.restarted
            )
        except TunerError as error:
            if is_over:
                self._end_guard(f"gave up without a verdict on {record.new}: {error.message}")
            raise
        message = f"{record.new} {judged.verdict}: {judged.why}"
        if judged.verdict is GuardVerdict.AGREES:
            self._end_guard(message)
        elif judged.verdict is GuardVerdict.WORSE:
            self._roll_back(record, judged.why)
        elif is_over:
            self._end_guard(f"gave up without a verdict on {record.new}: {judged.why}")
        else:
            self.notify(f"guard: {message}; it looks again")
            begin_s = judged.restarted_s
            if begin_s is None:
                # What was looked at stays as it was: the next window begins now.
                begin_s = now_s - SETTLE_RATIO * self.guard.lasting_s
            anew = tuple(sorted({*record.restarted, *judged.anew}))
            self.store.update(handover=replace(record, handed_s=begin_s, restarted=anew))

    def _end_guard(self, message: str) -> None:
        """Let a change stand."""
        self.notify(f"guard: {message}")
        self.store.update(handover=None, last=replace(self.store.state.last, guard=message))
        self.store.forget_traffic_but(self.store.state.traffic)

    def _roll_back(self, record: RolloutRecord, why: str) -> None:
        """Write the old file again, unless others have changed it since."""
        message = f"{record.new} {GuardVerdict.WORSE}: {why}"
        if not self.publisher.holds(record.new_text):
            path = self.publisher.path
            self._end_guard(f"{message}; {path} was changed by others since and is left alone")
            return
        self.notify(f"guard: {message}; rolling back to {record.old}")
        last = replace(self.store.state.last, guard=f"{message}; rolled back")
        self.store.update(last=last)
        self.begin(
            replace(
                record,
                old=record.new,
                new=record.old,
                old_text=record.new_text,
                new_text=record.old_text,
                old_traffic=record.new_traffic,
                new_traffic=record.old_traffic,
                why=f"rolled back from {record.new}: {why}",
                decided_s=self.clock.now_s(),
                stage=Stage.DECIDED,
                hook_tries=0,
                restarted=(),
                is_rollback=True,
                had_file=True,
            )
        )


def _event(record: RolloutRecord) -> str:
    return "rollback" if record.is_rollback else "change"
