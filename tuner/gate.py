"""A gate in front of an engine: how many it lets in, how many wait, and who is turned away.

Under overload every request that is let in makes all others later, until none meets its SLO.
A gate bounds who is in the engine, keeps a short queue before it, first come first served, and
turns away whoever finds the queue full or has waited for too long.

`GateLimits` is what a replay, live or simulated, is planned with, and `Gate` the same in a
server: `TUNE_GATE=max_in_flight=24,max_queued=8,queue_timeout_s=0.5 vllm serve --middleware
tuner.gate.Gate`. Each API server process has a gate of its own. This file needs the standard
library alone, so that it can also be copied beside a server and be named `gate.Gate`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SETTINGS: Final = "TUNE_GATE"
ANSWERING: Final[Mapping[str, tuple[str, ...]]] = {
    "/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/chat/completions/batch": ("max_completion_tokens", "max_tokens"),
    "/completions": ("max_tokens",),
    "/responses": ("max_output_tokens",),
    "/messages": ("max_tokens",),
    "/cohere/v2/chat": ("max_tokens",),
    # SageMaker's: a chat or a completion, which both know this name.
    "/invocations": ("max_tokens", "max_completion_tokens"),
    "/inference/v1/generate": ("sampling_params.max_tokens",),
    # One or two tokens.
    "/generative_scoring": (),
    "/systemone": (),
    # A form with a recording, whose text is as long as what is said in it.
    "/audio/transcriptions": (),
    "/audio/translations": (),
}
"""The ends of paths that are answered by the engine, and how each names the longest answer.

None where an answer is not capped. What a pooling model answers goes by, which generates
nothing, and so does /v1/realtime, which is no request but a connection.

Source: vLLM, vllm/entrypoints, the request classes of each path.
"""
RETRY_AFTER_S: Final = 1
"""Ours: what a client that is turned away is told to wait."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What a gate lets in.

    At most `max_in_flight` requests are in the engine, waiting there or running; `max_queued`
    more wait before it, each for `queue_timeout_s` at most, None for as long as it takes. An
    answer ends after `max_output_tokens`, None for where it ends by itself.

    Units: requests, seconds, tokens.
    Raises: ValueError for a gate that is none, or one that would refuse everything.
    """

    max_in_flight: int
    max_queued: int = 0
    queue_timeout_s: float | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what lets nobody in."""
        least = {"max_in_flight": 1, "max_queued": 0, "max_output_tokens": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value is not None and value < fewest:
                raise ValueError(f"{name} must be at least {fewest}, got {value}")
        wait_s = self.queue_timeout_s
        if wait_s is not None and not 0 < wait_s < math.inf:
            raise ValueError(f"queue_timeout_s must be above 0 s, got {wait_s}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the limits that a text names, as the variable of a server does.

        Raises: ValueError if it names none, or what no gate has.

        >>> GateLimits.parse("max_in_flight=24, queue_timeout_s=0.5").queue_timeout_s
        0.5
        """
        kinds = {f.name: float if f.name.endswith("_s") else int for f in fields(cls)}
        try:
            pairs = [part.split("=", 1) for part in text.split(",")]
            values: dict[str, Any] = {
                name.strip(): kinds[name.strip()](value) for name, value in pairs
            }
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{SETTINGS} must be max_in_flight=24,max_queued=8 or alike, with any of"
                f" {', '.join(kinds)}; got {text!r}: {error}"
            ) from error

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(
            f"{name}={value}" for name, value in values.items() if value is not None
        )


class Gate:
    """An ASGI application behind a gate: what asks for an answer passes it, all else goes by.

    Whoever is turned away is answered 503 at once. A client that leaves while it waits keeps
    its place until its turn, or its time, has come.

    Raises: ValueError for settings that are none.
    """

    def __init__(self, app: App, limits: GateLimits | None = None) -> None:
        self._app = app
        self._limits = limits or GateLimits.parse(os.environ.get(SETTINGS, ""))
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, now or when it is its turn, or turn it away."""
        names = _length_names(scope)
        if names is None:
            await self._app(scope, receive, send)
        elif not await self._enters():
            await _turn_away(send)
        else:
            try:
                if names and self._limits.max_output_tokens is not None:
                    most = self._limits.max_output_tokens
                    scope, receive = await _capped(scope, receive, names, most)
                await self._app(scope, receive, send)
            finally:
                self._leave()

    async def _enters(self) -> bool:
        """Take a place in the engine, after those who came before; False without one."""
        if self._in_flight < self._limits.max_in_flight:
            self._in_flight += 1
            return True
        if len(self._waiting) >= self._limits.max_queued:
            return False
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait([turn], timeout=self._limits.queue_timeout_s)
        except asyncio.CancelledError:
            if turn.done():
                self._leave()
            else:
                self._waiting.remove(turn)
            raise
        if not turn.done():
            self._waiting.remove(turn)
        return turn.done()

    def _leave(self) -> None:
        """Give a place to whoever waits for longest."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._in_flight -= 1


def _length_names(scope: Scope) -> tuple[str, ...] | None:
    """Return how a request names its longest answer, None for one that asks for no answer."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    ends = (names for end, names in ANSWERING.items() if scope["path"].endswith(end))
    return next(ends, None)


async def _turn_away(send: Send) -> None:
    """Answer that the engine is full, in the form of OpenAI's errors."""
    error = {
        "message": "the server is full: its gate lets nobody in at the moment",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    headers = [
        (b"content-type", b"application/json"),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


async def _capped(
    scope: Scope, receive: Receive, names: tuple[str, ...], most: int
) -> tuple[Scope, Receive]:
    """Read a request whole and return it with its answer bounded."""
    body, last = bytearray(), await receive()
    while last["type"] == "http.request":
        body += last.get("body", b"")
        if not last.get("more_body", False):
            text = cap_answer(bytes(body), names, most)
            last = {"type": "http.request", "body": text, "more_body": False}
            kept = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
            headers = [*kept, (b"content-length", str(len(text)).encode())]
            scope = {**scope, "headers": headers}
            break
        last = await receive()
    first: list[Message] = [last]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return scope, receive_again


def cap_answer(body: bytes, names: tuple[str, ...], most: int) -> bytes:
    """Return a request that asks for so many tokens at most; what is no request as it is.

    >>> cap_answer(b'{"max_tokens": 900}', ("max_tokens",), 256)
    b'{"max_tokens": 256}'
    >>> cap_answer(b'{"sampling_params": {}}', ("sampling_params.max_tokens",), 256)
    b'{"sampling_params": {"max_tokens": 256}}'
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return body
    section, _, first = names[0].rpartition(".")
    lengths = asked.get(section) if section and isinstance(asked, dict) else asked
    if not isinstance(lengths, dict):
        return body
    given = [name for name in names if lengths.get(name) is not None]
    for name in given or [first]:
        lengths[name] = _bounded(lengths.get(name), most)
    if lengths.get("min_tokens") is not None:
        lengths["min_tokens"] = _bounded(lengths["min_tokens"], most)
    return json.dumps(asked).encode()


def _bounded(length: Any, most: int) -> Any:  # noqa: ANN401 - whatever a client sends
    """Return a length that is no more than that; what is none is left for vLLM to refuse.

    vLLM reads a text as a number, and 0 as a prompt that is to be echoed alone.
    """
    if length is None:
        return most
    try:
        is_within = (float(length) if isinstance(length, str) else length) <= most
    except (TypeError, ValueError):
        return length
    return length if is_within else most
