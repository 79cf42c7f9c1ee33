"""The one recorder of a process: takes messages while serving, writes from a thread of its own.

Serving comes first. Taking a message is putting it into a queue; hashing, joining and writing
happen in a daemon thread. Whatever goes wrong here ends the recording with one warning, and
nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Final

from tuner.errors import UsageError
from tuner.recorder.blocks import KeyedHashes
from tuner.recorder.join import Join
from tuner.recorder.messages import Asked, Message
from tuner.recorder.rows import Source, header_line, row_line
from tuner.recorder.segments import Segments
from tuner.recorder.settings import RecordSettings

GATHER_S: Final = 0.25
"""Ours: four wakes a second disturb nobody, and a killed server loses no more than that."""

CLOSE_S: Final = 5.0
"""Ours: what an exiting server waits for a slow disk."""

MOST_WAITING_BYTES: Final = 1 << 28
"""Ours: 256 MiB, some 30 million prompt tokens, before a disk that hangs ends the recording."""

MESSAGE_BYTES: Final = 1000
TOKEN_BYTES: Final = 8
"""What a message, and each token id of a prompt in it, is taken to hold on to."""

# A child of vLLM's logger, so that the server's log shows it in the server's own form.
_log = logging.getLogger("vllm.tuner.recorder")


class Recorder:
    """Takes messages from any thread and writes rows until it is closed or something fails."""

    def __init__(self, settings: RecordSettings) -> None:
        self._path = settings.path
        self._hashes = KeyedHashes(settings.key)
        self.source = Source(self._hashes.scope)
        self._segments = Segments(
            settings.path, settings.max_bytes, lambda: header_line(self.source)
        )
        self._queue: SimpleQueue[Message | None] = SimpleQueue()
        self._offered_bytes = self._done_bytes = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.is_on, self._has_failed = True, False

    def offer(self, message: Message) -> None:
        """Take a message; costs next to nothing and never raises."""
        if not self.is_on:
            return
        if self._thread is None:
            self._start()
        self._offered_bytes += _weight(message)
        if self._offered_bytes - self._done_bytes > MOST_WAITING_BYTES:
            self.stop("the disk does not keep up")
            return
        self._queue.put(message)

    def stop(self, reason: object) -> None:
        """End the recording for good, with one warning; what waits to be written is dropped."""
        with self._lock:
            if self._has_failed:
                return
            self.is_on, self._has_failed = False, True
        if isinstance(reason, OSError):
            reason = reason.strerror or reason
        _log.warning("recording to %s stopped: %s; serving goes on", self._path, reason)
        self._end_thread()

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """Stop recording, and do nothing else, if the block fails."""
        try:
            yield
        except Exception as cause:  # noqa: BLE001 - whatever it is, it must not reach the server
            self.stop(f"{type(cause).__name__}: {cause}")

    def close(self) -> None:
        """Write what has been taken, and say what was recorded; later messages are ignored."""
        self.is_on = False
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._end_thread()
            thread.join(CLOSE_S)

    def _end_thread(self) -> None:
        self._closing.set()
        self._queue.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="tune-record", daemon=True)
            self._thread.start()
        # vLLM's API servers are children of multiprocessing, which end without atexit.
        Finalize(None, self.close, exitpriority=1)
        _log.info("recording requests to %s", self._path)

    def _work(self) -> None:
        join, written = Join(self._hashes), 0
        try:
            is_open = True
            while is_open:
                messages, is_open = self._gather()
                if self._has_failed:
                    break
                lines = [row_line(row) for one in messages for row in join.rows(one)]
                if lines:
                    self._segments.write(lines)
                written += len(lines)
                self._done_bytes += sum(map(_weight, messages))
        except Exception as cause:  # noqa: BLE001 - as in harmless
            self.stop(cause)
        finally:
            with self.harmless():
                self._segments.close()
            self._forget()
        names = ", ".join(map(str, self._segments.paths)) or "no file"
        _log.info("recorded %d requests to %s", written, names)
        if join.unknown:
            _log.warning(
                "%d responses were not recorded, as they told no usage of a single answer",
                join.unknown,
            )

    def _gather(self) -> tuple[list[Message], bool]:
        """Return the messages of the next moment, and whether more are to come."""
        first = self._queue.get()
        if first is None:
            return [], False
        self._closing.wait(GATHER_S)
        messages = [first]
        while True:
            try:
                message = self._queue.get_nowait()
            except Empty:
                return messages, True
            if message is None:
                return messages, False
            messages.append(message)

    def _forget(self) -> None:
        """Let go of prompts that nobody will hash any more."""
        while True:
            try:
                self._queue.get_nowait()
            except Empty:
                return


def _weight(message: Message) -> int:
    if isinstance(message, Asked) and message.token_ids is not None:
        return MESSAGE_BYTES + TOKEN_BYTES * len(message.token_ids)
    return MESSAGE_BYTES


@cache
def process_recorder() -> Recorder | None:
    """Return the recorder of this process, None where TUNE_RECORD names no file.

    Settings that cannot be used are warned of, and nothing is recorded: a server must start.
    """
    try:
        settings = RecordSettings.from_environment(os.environ)
    except UsageError as error:
        _log.warning("nothing is recorded: %s (%s)", error.message, error.hint)
        return None
    return None if settings is None else Recorder(settings)
