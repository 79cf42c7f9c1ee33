"""The one recorder of a process: takes messages while serving, writes from a thread of its own.

Serving comes first. Taking a message is putting it into a queue; hashing, joining and writing
happen in a daemon thread. What cannot be recorded of one request is left out and counted; what
leaves nothing to be recorded, such as a full disk, ends the recording with one warning. Neither
reaches the server.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Final

from tuner.recorder.blocks import KeyedHashes
from tuner.recorder.faults import (
    MAX_IN_A_ROW,
    FaultGuard,
    Faults,
    described,
    inform,
    silently,
    warn,
)
from tuner.recorder.join import Join
from tuner.recorder.messages import Finished, Message, Stepped, weight_bytes
from tuner.recorder.rows import RecordedServer, header_line, recorded_by, row_line
from tuner.recorder.segments import Room, Segments
from tuner.recorder.settings import RecordSettings, UsageError
from tuner.recorder.steps import SUFFIX, added, steps_header, steps_line, steps_path

GATHER_S: Final = 0.25
"""Ours: four wakes a second cost nothing, and a killed server loses no more than that."""

CLOSE_S: Final = 5.0
"""Ours: what an exiting server waits for a slow disk."""

MAX_WAITING_BYTES: Final = 3 << 26
"""Ours: 192 MiB, some 50 million prompt tokens, before a disk that hangs ends the recording.
With what `open_prompts` holds it is 256 MiB."""


class Recorder:
    """Takes messages from any thread and writes rows until it is closed or something fails."""

    def __init__(self, settings: RecordSettings) -> None:
        self._path = settings.path
        hashes = KeyedHashes(settings.key)
        self.source = RecordedServer(hashes.scope)
        self.join = Join(hashes)
        room = Room(settings.path, [SUFFIX], settings.max_total_bytes)
        self._segments = Segments(
            settings.path, settings.max_bytes, lambda: header_line(self.source), room
        )
        self.has_steps = settings.has_steps
        self._step_segments = Segments(
            steps_path(settings.path),
            settings.max_bytes,
            lambda: steps_header(recorded_by(), self.source.server),
            room,
        )
        self.before_close: list[Callable[[], None]] = []
        """What doors still hold is handed over by these when the recording ends."""
        self._queue: SimpleQueue[tuple[Message, int] | None] = SimpleQueue()
        self._offered_bytes = self._done_bytes = self._written = 0
        self._thread: threading.Thread | None = None
        self._lock, self._offer_lock = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self.is_on, self._has_failed = True, False
        self._faults = Faults(settings.path, self.stop)
        self.opening = self.guard(max_in_a_row=1)
        """For a door that opens: one that cannot leaves nothing to be recorded."""
        self._offering, self._starting = self.guard(), self.guard(max_in_a_row=1)
        self._joining, self._working = self.guard(), self.guard(max_in_a_row=1)

    def offer(self, message: Message) -> None:
        """Take a message; costs next to nothing and never raises."""
        if self.is_on:
            with self._offering:
                self._take(message)

    def stop(self, reason: object) -> None:
        """End the recording for good, with one warning; what waits to be written is dropped.

        Never raises.
        """
        with self._lock:
            if self._has_failed:
                return
            self.is_on, self._has_failed = False, True
        with silently:
            warn("recording to %s stopped: %s; serving goes on", self._path, described(reason))
        with silently:
            self._forget()
            self._end_thread()

    def guard(self, max_in_a_row: int = MAX_IN_A_ROW) -> FaultGuard:
        """Return a guard for one place that may fail; with 1 its first fault ends it all."""
        return FaultGuard(self._faults, max_in_a_row)

    def close(self) -> None:
        """Write what has been taken, and say what was recorded; later messages are ignored."""
        for hand_over in self.before_close:
            with silently:
                hand_over()
        self.is_on = False
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with self._starting:
                self._end_thread()
                thread.join(CLOSE_S)

    def _take(self, message: Message) -> None:
        if self._thread is None:
            with self._starting:
                self._start()
            if self._has_failed:
                return
        weight = weight_bytes(message)
        # Doors may open in several threads, and none of their sums may be lost.
        with self._offer_lock:
            waiting_bytes = self._offered_bytes + weight - self._done_bytes
            if waiting_bytes <= MAX_WAITING_BYTES:
                self._queue.put((message, weight))
                self._offered_bytes += weight
        if waiting_bytes > MAX_WAITING_BYTES:
            self.stop("the disk does not keep up")

    def _end_thread(self) -> None:
        self._closing.set()
        self._queue.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._work, name="tune-record", daemon=True)
            thread.start()
            self._thread = thread
        # vLLM's API servers are children of multiprocessing, which end without atexit.
        Finalize(None, self.close, exitpriority=1)
        inform("recording requests to %s", self._path)

    def _work(self) -> None:
        with self._working:
            while self._write_next():
                pass
        for segments in (self._segments, self._step_segments):
            with self._working:
                segments.close()
        with self._working:
            self._forget()
            self.join.open.clear()
            self._say_end()

    def _write_next(self) -> bool:
        """Write what the next moment brings, and return whether more is to come."""
        messages, weight, is_open = self._gather()
        if self._has_failed:
            return False
        lines = self._lines(messages)
        steps = self._step_lines(messages)
        # So that a disk that hangs keeps the lines alone.
        messages.clear()
        if lines:
            self._segments.write(lines)
        if steps:
            self._step_segments.write(steps)
        self._written += len(lines)
        self._done_bytes += weight
        return is_open

    def _lines(self, messages: list[Message]) -> list[bytes]:
        """Return the lines that messages complete; what fails in one costs that one."""
        lines: list[bytes] = []
        for message in messages:
            for one in _single(message):
                with self._joining:
                    lines += [row_line(row) for row in self.join.rows(one)]
        return lines

    def _step_lines(self, messages: list[Message]) -> list[bytes]:
        """Return the line that the steps among messages make, if there are any."""
        numbers, drafts = array("q"), list[int]()
        for message in messages:
            if isinstance(message, Stepped):
                numbers.extend(message.numbers)
                drafts = added(drafts, message.drafts)
        lines: list[bytes] = []
        if numbers:
            with self._joining:
                lines.append(steps_line(numbers, drafts))
        return lines

    def _gather(self) -> tuple[list[Message], int, bool]:
        """Return the messages of the next moment, their weight, and whether more will come."""
        first = self._queue.get()
        if first is None:
            return [], 0, False
        self._closing.wait(GATHER_S)
        messages, weight = [first[0]], first[1]
        while True:
            try:
                following = self._queue.get_nowait()
            except Empty:
                return messages, weight, True
            if following is None:
                return messages, weight, False
            messages.append(following[0])
            weight += following[1]

    def _forget(self) -> None:
        """Drop what will not be written any more."""
        while True:
            try:
                self._queue.get_nowait()
            except Empty:
                return

    def _say_end(self) -> None:
        names = ", ".join(map(str, self._segments.paths)) or "no file"
        count = self._faults.count
        left_out = f"; had to leave something out {count} times" if count else ""
        if ended := self.join.without_row:
            left_out += f"; {ended} more were refused, failed or left and have no row"
        inform("recorded %d requests to %s%s", self._written, names, left_out)
        if self.join.unknown:
            warn(
                "%d responses were not recorded, as they told no usage of a single answer",
                self.join.unknown,
            )


def _single(message: Message) -> Iterator[Message]:
    """Give a message in the parts that can fail alone: each request that an iteration ended."""
    if isinstance(message, Finished):
        for request in message.requests:
            yield Finished(message.at_s, [request], message.engine_index)
    else:
        yield message


@cache
def process_recorder() -> Recorder | None:
    """Return the recorder of this process, None where TUNE_RECORD names no file.

    Settings that cannot be used are warned of, and nothing is recorded: a server must start.
    """
    try:
        settings = RecordSettings.from_environment(os.environ)
        return None if settings is None else Recorder(settings)
    except UsageError as error:
        warn("nothing is recorded: %s (%s)", error.message, error.hint)
    except Exception as cause:  # noqa: BLE001 - as above
        warn("nothing is recorded, as the recorder cannot be set up: %s", described(cause))
    return None
