"""An HTTP server with known delays, as an oracle for the client that replays over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web


@dataclass(slots=True)
class SseServer:
    """Answers /v1/completions after first_s, then a token every gap_s.

    Prompts that start with the token `fails_on` are answered with HTTP 500, those that start
    with `cuts_on` break off after one token, `hangs_on` never end, and `floods_on` get a line
    of a MiB; of all requests each `busy_every`-th is answered with HTTP 503, which
    `names_requests` or not. Beyond max_model_len it does as vLLM 0.32: HTTP 400 for a prompt
    that does not fit, and a shorter answer for one that does. It offers `models`, and without
    `tells_usage` it counts tokens where an answer ends and not before, as some proxies do.
    """

    first_s: float = 0.05
    gap_s: float = 0.01
    fails_on: int = -1
    cuts_on: int = -1
    hangs_on: int = -1
    floods_on: int = -1
    busy_every: int = 0
    names_requests: bool = False
    max_model_len: int | None = None
    tells_usage: bool = True
    models: Sequence[Mapping[str, str]] = ({"id": "toy"},)
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _ready: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @staticmethod
    def answer(tokens: int) -> list[int]:
        """Return the tokens that so long an answer has."""
        return [900 + n for n in range(tokens)]

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{**model, "max_model_len": self.max_model_len} for model in self.models]
        return web.json_response({"data": cards})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if body["prompt"][0] == self.fails_on:
            return web.Response(status=500, text="out of order")
        named = f" for {len(self.asked)}" if self.names_requests else ""
        if self.busy_every and len(self.asked) % self.busy_every == 0:
            return web.Response(status=503, text=f"too busy{named}")
        room = (self.max_model_len or 10**9) - len(body["prompt"])
        if room < 0:
            return web.Response(status=400, text=f"longer than {self.max_model_len} tokens")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await asyncio.sleep(self.first_s)
        if body["prompt"][0] == self.floods_on:
            await answer.write(b"data: " + b"x" * (1 << 20) + b"\n\n")
        usage = {"completion_tokens": 0}
        for n in range(min(body["max_tokens"], room)):
            if n and body["prompt"][0] == self.hangs_on:
                await asyncio.sleep(60)
            if n:
                await asyncio.sleep(self.gap_s)
            choice: dict[str, Any] = {"text": "x"}
            if body.get("return_token_ids"):
                choice["token_ids"] = self.answer(n + 1)[-1:]
            usage = {"completion_tokens": n + 1}
            event = {"choices": [choice], "usage": usage if self.tells_usage else None}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if body["prompt"][0] == self.cuts_on:
                break
        last = {"choices": [], "usage": usage}
        await answer.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer
