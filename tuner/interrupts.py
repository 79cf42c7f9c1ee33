"""Ctrl-C that waits until what must not be left half done is done.

An interruption in the middle of a transaction leaves a lock behind that nobody gives back. What
is to be protected is up to the caller.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType, FunctionType
from typing import ParamSpec, TypeVar

_KINDS = (signal.SIGINT, signal.SIGTERM)

Kept = TypeVar("Kept", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let a first Ctrl-C or SIGTERM wait until the block is left; a second one does not wait.

    Nests. Signals interrupt the main thread alone, so there is nothing to do in others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = {kind: signal.getsignal(kind) for kind in _KINDS}

    def hear(kind: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(kind)]
        if heard and callable(handler):
            handler(kind, frame)
        heard.append(kind)

    try:
        for kind in _KINDS:
            signal.signal(kind, hear)
        yield
    finally:
        for kind, handler in before.items():
            # None is a handler that is not Python's and cannot be put back.
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
        if heard:
            signal.raise_signal(heard[0])


def undisturbed_methods(kept: Kept) -> Kept:
    """Run every public method and property of a class, and its making, undisturbed."""
    for name, value in list(vars(kept).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, FunctionType):
            setattr(kept, name, _undisturbed(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(kept, name, property(_undisturbed(value.fget), doc=value.__doc__))
    return kept


def _undisturbed(call: Callable[P, R]) -> Callable[P, R]:
    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with undisturbed():
            return call(*args, **kwargs)

    return called
