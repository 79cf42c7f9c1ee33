"""Interrupts that wait until what must not be cut in two is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let a first Ctrl-C or SIGTERM wait until the block is left; a second one does not wait.

    SIGHUP always waits: a shell that ends sends it again. What is ignored stays ignored. Nests.
    Signals interrupt the main thread alone, so there is nothing to do in others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {kind: signal.getsignal(kind) for kind in _KINDS}
    before = {kind: found for kind, found in handlers.items() if found is not signal.SIG_IGN}

    def on_signal(kind: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(kind)]
        if received and callable(handler) and kind != signal.SIGHUP:
            handler(kind, frame)
        received.append(kind)

    try:
        for kind in before:
            signal.signal(kind, on_signal)
        yield
    finally:
        for kind, handler in before.items():
            # None is a handler that is not Python's and cannot be put back.
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
        if received:
            signal.raise_signal(received[0])
