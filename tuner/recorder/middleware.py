"""The second door: an ASGI middleware, `vllm serve --middleware tuner.recorder.TraceRecorder`.

It passes every message on as it came, in both directions, and keeps no body. What it adds to
the engine's counts are the prompts, seen through `tap`, and the requests that end early. Where
the engine's counts are not to be had, it takes those that responses tell of themselves. Whole
bodies and streams of events both end with `usage`, so neither is kept or parsed as a whole.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

from tuner.recorder.messages import Ended, Left, Replied, Usage
from tuner.recorder.recorder import Recorder, process_recorder
from tuner.recorder.tap import (
    Ask,
    EngineClient,
    current_asks,
    left_behind,
    listen,
)

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

TAIL_BYTES: Final = 1 << 16
"""Ours: behind `usage` vLLM sends what else was asked for, such as the prompt's token ids."""

# Within JSON text a quotation mark is escaped, so what looks like the key is the key.
_USAGE: Final = b'"usage":'
_FINISH: Final = re.compile(rb'"(?:finish_reason|stop_reason)":\s*"([a-z_]{1,40})"')
_DECODER: Final = json.JSONDecoder()


class TraceRecorder:
    """Records what an API server is asked, together with the plugin or alone."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._guards: _Guards | None = None
        self._client: EngineClient | None = None
        self._has_looked = False
        self._recorder = process_recorder()
        if self._recorder is not None:
            with self._recorder.opening:
                self._guards = _Guards(self._recorder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        recorder, guards, exchange = self._recorder, self._guards, None
        if recorder is None or guards is None or not recorder.is_on:
            await self._app(scope, receive, send)
            return
        if not self._has_looked:
            with guards.looking:
                self._look(recorder, scope)
        with guards.beginning:
            exchange = self._begin(recorder, guards, scope, receive, send)
        if exchange is None:
            await self._app(scope, receive, send)
            return
        try:
            # Where the engine counts, responses are passed on unread: they add nothing.
            await self._app(
                scope, exchange.receive, exchange.send if exchange.is_counted else send
            )
        except BaseException:
            with guards.leaving:
                exchange.give_up()
            raise
        finally:
            with guards.ending:
                exchange.end()

    def _look(self, recorder: Recorder, scope: Scope) -> None:
        """Find the application's engine, at the first request that comes."""
        if scope["type"] == "http":
            self._has_looked = True
            self._client = _listening_client(scope, recorder)

    def _begin(
        self, recorder: Recorder, guards: _Guards, scope: Scope, receive: Receive, send: Send
    ) -> _Seen | None:
        """Return the HTTP request to be followed, None for what is none."""
        if scope["type"] != "http":
            return None
        is_counted = not recorder.source.has_engine_counts and _tells_usage(scope)
        return _Seen(recorder, guards, self._client, receive, send, is_counted=is_counted)


class _Guards:
    """One guard for each step beside serving that may fail."""

    def __init__(self, recorder: Recorder) -> None:
        self.looking, self.beginning = recorder.guard(), recorder.guard()
        self.noticing, self.leaving = recorder.guard(), recorder.guard()
        self.ending, self.closing = recorder.guard(), _Closing(recorder)


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
        self,
        recorder: Recorder,
        guards: _Guards,
        client: EngineClient | None,
        receive: Receive,
        send: Send,
        *,
        is_counted: bool,
    ) -> None:
        self.is_counted = is_counted
        self._recorder, self._guards, self._client = recorder, guards, client
        self._receive, self._send = receive, send
        self._arrived_at_s, self._began_s = time.time(), time.monotonic()
        self._left: list[Left] = []
        self._is_given_up = False
        self._is_stream = False
        self._is_answered = False
        self._status = 0
        self._first_s: float | None = None
        self._tail = b""
        self._asks: list[Ask] = []
        self._before = current_asks.set(self._asks)

    async def receive(self) -> Message:
        """Pass on what the client sends, and notice when it goes away."""
        message = await self._receive()
        with self._guards.leaving:
            if message["type"] == "http.disconnect":
                self.give_up()
        return message

    async def send(self, message: Message) -> None:
        """Pass on what the server sends, and keep its last bytes in mind."""
        with self._guards.noticing:
            self._notice(message)
        await self._send(message)

    def give_up(self) -> None:
        """Read how far the engine is, before it forgets.

        A client also leaves after its answer; then there is nothing to ask.
        """
        if self._is_given_up or self._is_answered or self._client is None:
            return
        self._is_given_up = True
        if self._recorder.source.sees_unfinished:
            self._left = [left_behind(self._client, ask) for ask in self._asks]

    def end(self) -> None:
        """Send the recorder how it ended."""
        if self._has_counts:
            self._recorder.offer(self._replied())
        elif self._asks:
            self._guards.closing.soon(self._asks, self._left)
        current_asks.reset(self._before)

    @property
    def _has_counts(self) -> bool:
        """Whether the counts come from the response."""
        is_whole = self._is_answered and self._status == 200
        return self.is_counted and is_whole and not self._is_given_up

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
            asked=[(ask.request_id, ask.number) for ask in self._asks],
            usage=read_usage(self._tail),
        )


class _Closing:
    """What is over, until the engine has reported what it would, or the recording ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._guard = recorder, recorder.guard()
        self._waiting: dict[int, tuple[Sequence[Ask], Sequence[Left]]] = {}
        self._count = 0
        recorder.before_close.append(self._close_all)

    def soon(self, asks: Sequence[Ask], left: Sequence[Left]) -> None:
        """Close what an HTTP request asked for, after GRACE_S."""
        self._count += 1
        self._waiting[self._count] = (asks, left)
        asyncio.get_running_loop().call_later(GRACE_S, self._close, self._count)

    def _close(self, number: int) -> None:
        """Send the recorder what is over.

        A response may leave work behind that goes on without it, and is reported later.
        """
        with self._guard:
            asks, left = self._waiting.pop(number, ((), ()))
            for one in left:
                self._recorder.offer(one)
            over = [(ask.request_id, ask.number) for ask in asks if not ask.is_running()]
            if over:
                self._recorder.offer(Ended(over))

    def _close_all(self) -> None:
        for number in [*self._waiting]:
            self._close(number)


def read_usage(tail: bytes) -> Usage | None:
    """Return the last usage in the end of a response, None where it tells none.

    OpenAI's completions and chat spell it prompt_tokens and completion_tokens, responses and
    Anthropic's messages input_tokens and output_tokens.

    >>> read_usage(b'{"usage":{"prompt_tokens":3,"completion_tokens":5}}').output_length
    5
    >>> read_usage(b'{"usage":{"prompt_tokens":3,"total_tokens":3}}') is None
    True
    """
    at = tail.rfind(_USAGE)
    if at < 0:
        return None
    text = tail[at + len(_USAGE) :].decode("utf-8", "replace").lstrip()
    try:
        found, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    prompt = _tokens(found, "prompt_tokens", "input_tokens")
    output = _tokens(found, "completion_tokens", "output_tokens")
    if prompt is None or output is None:
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = _tokens(details, "cached_tokens") if isinstance(details, dict) else None
    reasons = _FINISH.findall(tail)
    return Usage(prompt, output, cached, reasons[-1].decode() if reasons else "unknown")


def _tokens(found: dict[str, object], *names: str) -> int | None:
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
