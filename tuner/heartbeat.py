"""A beat at a steady interval, so that others can tell work in progress from a dead process.

Answers only that the process still runs. What a beat writes, and what follows when it stops,
is left to `journal`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Heart:
    """A call every so often, from a daemon thread that dies with the process.

    Units: interval_s in seconds; the first call comes after one interval.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._beat()

    def stop(self) -> None:
        """Beat no more; a beat that hangs is not waited for longer than one interval."""
        self._stopped.set()
        self._thread.join(self._interval_s)
