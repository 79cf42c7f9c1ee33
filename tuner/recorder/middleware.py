"""The second door: an ASGI middleware, `vllm serve --middleware tuner.recorder.TraceRecorder`.

It passes every message on as it came, in both directions, and keeps no body. What it adds to
the engine's counts are the prompts, seen through `tap`, and the requests that end early. Where
the engine's counts are not to be had, it takes those that responses tell of themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from tuner.recorder.messages import Left, Replied
from tuner.recorder.recorder import Recorder, process_recorder
from tuner.recorder.tap import EngineClient, Exchange, current_exchange, left_behind, listen
from tuner.recorder.usage import TAIL_BYTES, read_usage

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GRACE_S: Final = 1.0
"""Ours: the engine may report an end a few steps after its response went out, and a request
that it reports must not count as given up."""

ANSWERING: Final = ("/completions", "/responses", "/messages")
"""How the paths end whose responses carry the usage of an answer."""


class TraceRecorder:
    """Records what an API server is asked, together with the plugin or alone."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._recorder = process_recorder()
        self._client: EngineClient | None = None
        self._has_looked = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        recorder = self._recorder
        if recorder is None or not recorder.is_on or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._has_looked:
            self._has_looked = True
            self._client = _listening_client(scope, recorder)
        seen = _Seen(recorder, self._client, receive, send)
        # Where the engine counts, responses go their own way: they tell nothing more.
        is_counted = not recorder.source.has_engine_counts and _tells_usage(scope)
        token = current_exchange.set(seen.exchange)
        try:
            await self._app(scope, seen.receive, seen.send if is_counted else send)
        except BaseException:
            seen.give_up()
            raise
        finally:
            current_exchange.reset(token)
            seen.end(is_counted=is_counted)


def _listening_client(scope: Scope, recorder: Recorder) -> EngineClient | None:
    """Return the engine client of the application if its prompts can be seen."""
    try:
        client: EngineClient = scope["app"].state.engine_client
    except (KeyError, AttributeError):
        return None
    return client if listen(client, recorder) else None


def _tells_usage(scope: Scope) -> bool:
    return scope["method"] == "POST" and str(scope["path"]).endswith(ANSWERING)


class _Seen:
    """One HTTP request as it passes by."""

    def __init__(
        self, recorder: Recorder, client: EngineClient | None, receive: Receive, send: Send
    ) -> None:
        self.exchange = Exchange()
        self._recorder, self._client = recorder, client
        self._receive, self._send = receive, send
        self._arrived_at_s, self._began_s = time.time(), time.monotonic()
        self._left: list[Left] = []
        self._is_given_up = False
        self._is_stream = False
        self._is_answered = False
        self._status = 0
        self._first_s: float | None = None
        self._tail = b""

    async def receive(self) -> Message:
        """Pass on what the client sends, and notice when it goes away."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.give_up()
        return message

    async def send(self, message: Message) -> None:
        """Pass on what the server sends, and keep its last bytes in mind."""
        with self._recorder.harmless():
            self._notice(message)
        await self._send(message)

    def give_up(self) -> None:
        """Ask the engine how far it is, before it forgets.

        A client also leaves after its answer; then there is nothing to ask.
        """
        if self._is_given_up or self._is_answered or self._client is None:
            return
        self._is_given_up = True
        with self._recorder.harmless():
            if self._recorder.source.sees_unfinished:
                self._left = [left_behind(self._client, ask) for ask in self.exchange.asks]

    def end(self, *, is_counted: bool) -> None:
        """Tell the recorder how it ended."""
        with self._recorder.harmless():
            if self._is_given_up:
                loop = asyncio.get_running_loop()
                for left in self._left:
                    loop.call_later(GRACE_S, self._recorder.offer, left)
            elif is_counted and self._is_answered and self._status == 200:
                self._recorder.offer(self._replied())

    def _notice(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body and self._first_s is None:
                self._first_s = time.monotonic()
            self._tail = (self._tail + body[-TAIL_BYTES:])[-TAIL_BYTES:]
            self._is_answered = not message.get("more_body", False)

    def _replied(self) -> Replied:
        ttft_s = None
        if self._is_stream and self._first_s is not None:
            ttft_s = self._first_s - self._began_s
        return Replied(
            arrived_at_s=self._arrived_at_s,
            e2e_s=time.monotonic() - self._began_s,
            ttft_s=ttft_s,
            asked=[(ask.request_id, ask.number) for ask in self.exchange.asks],
            usage=read_usage(self._tail),
        )
