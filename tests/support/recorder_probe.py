"""What a test adds to a server process: a look at what its recorder holds, a thread refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tuner.recorder.recorder import process_recorder

REFUSING = """
import threading
start = threading.Thread.start
def refuse(thread):
    if thread.name == "tune-record":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse
"""
"""A sitecustomize.py for a process that gets all threads but the recorder's."""


class Held:
    """An ASGI middleware of the server: `/held` tells what the recorder holds."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer what is meant for the probe and pass on the rest."""
        recorder = process_recorder()
        if scope.get("path") != "/held" or recorder is None:
            await self._app(scope, receive, send)
            return
        held = recorder.join.open
        body = json.dumps({"prompts": len(held), "bytes": held.held_bytes}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
