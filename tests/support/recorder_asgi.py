"""An ASGI application, server and engine by the names that vLLM gives their parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

from support.recorder_parts import BLOCK
from tuner.recorder import TraceRecorder
from tuner.recorder.messages import Finished
from tuner.recorder.recorder import Recorder, process_recorder

PROMPT = list(range(10))
SECRET = "what the client wrote"
START = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
EVENTS = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
USAGE = b'"usage":{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3}}'
REPLY = b'{"choices":[{"text":"\\"usage\\":{}","finish_reason":"length"}],' + USAGE

Message = MutableMapping[str, Any]
Messages = list[Message]
App = Callable[..., Awaitable[None]]


class Engine:
    """An engine client by the names that vLLM gives its parts."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(served_model_name=["demo", "also-demo"]),
        )
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.generate: Callable[..., object] = self.generate_answer

    async def generate_answer(
        self, prompt: object, sampling_params: object, request_id: str, **keywords: object
    ) -> AsyncGenerator[object]:
        """Give all that was asked, to show that it came through, or refuse what is bad."""
        if isinstance(prompt, dict) and prompt.get("is_bad"):
            raise ValueError("this grammar is none")
        if isinstance(prompt, dict) and prompt.get("takes_s"):
            await asyncio.sleep(prompt["takes_s"])
        yield prompt, sampling_params, request_id, keywords

    def works_on(self, request_id: str, made: int) -> None:
        """Have a request in hand, with so many tokens made."""
        stats = SimpleNamespace(
            arrival_time=1e9, first_token_latency=0.5, num_generation_tokens=made
        )
        self.output_processor.external_req_ids[request_id] = [f"{request_id}-internal"]
        self.output_processor.request_states[f"{request_id}-internal"] = SimpleNamespace(
            prompt_len=len(PROMPT), num_cached_tokens=4, is_prefilling=not made, stats=stats
        )


def the_recorder() -> Recorder:
    recorder = process_recorder()
    assert recorder is not None
    return recorder


def told_by_engine() -> Recorder:
    """Open the plugin's door, as vLLM does before it serves."""
    recorder = the_recorder()
    recorder.source.has_engine_counts = True
    return recorder


def ask(engine: Engine, request_id: str = "cmpl-alice-0", answers: int = 1) -> Any:
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    return engine.generate(
        prompt, SimpleNamespace(n=answers), request_id, priority=3, lora_request=None
    )


def exchange(
    app: App,
    engine: Engine | None = None,
    received: Sequence[Message] = (),
    path: str = "/v1/completions",
) -> Messages:
    """Serve one request through the middleware and return what was sent."""
    sent: Messages = []
    body = {"type": "http.request", "body": SECRET.encode(), "more_body": False}
    coming = iter([body, *received])

    async def receive() -> Message:
        return next(coming)

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path}
    if engine is not None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def serve() -> None:
        await TraceRecorder(app)(scope, receive, send)
        await asyncio.sleep(0.1)

    asyncio.run(serve())
    return sent


def answering(
    *messages: Message,
    engine: Engine | None = None,
    answers: int = 1,
    reported: Finished | None = None,
) -> App:
    """Return an application that asks the engine and sends these messages.

    What the engine reported follows its last word at once, as in vLLM.
    """

    async def app(_scope: object, receive: Any, send: Any) -> None:
        await receive()
        if engine is not None:
            ask(engine, answers=answers)
        for message in messages:
            await send(message)
        if reported is not None:
            the_recorder().offer(reported)

    return app


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def streamed(*events: bytes) -> Messages:
    return [
        EVENTS,
        *(part(b"data: " + each + b"\n\n", more=True) for each in events),
        part(b""),
    ]
