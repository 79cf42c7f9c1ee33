"""A recorded application for the campaign: a server by vLLM's ways, without a model.

    python -m support.fault_server PORT

It answers /v1/completions as vLLM does, one in five times with an error after the engine was
asked, counts what it has answered, and tells the recorder of each request what an engine would.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from support.recorder_asgi import Engine, told_by_engine
from support.recorder_parts import Reported, finished
from tuner.recorder import TraceRecorder


def application() -> Any:
    """Return the application, recorded where TUNE_RECORD says so."""
    engine, recorder = Engine(), told_by_engine()
    app = Starlette()
    app.state.engine_client = engine

    async def completions(request: Request) -> Response:
        body = await request.json()
        name = f"cmpl-{request.headers.get('x-request-id', 'none')}"
        prompt = {
            "type": "token",
            "prompt_token_ids": body["prompt"],
            "is_bad": body.get("bad"),
        }
        stream: Any = engine.generate(prompt, SimpleNamespace(n=1), name)
        if body.get("bad"):
            try:
                await anext(stream)
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)

        async def shown() -> AsyncIterator[bytes]:
            async for _ in stream:
                for number in range(int(body.get("max_tokens", 3))):
                    yield b'data: {"choices": [{"text": "%d"}]}\n\n' % number
                    await asyncio.sleep(float(body.get("pause_s", 0)))
            recorder.offer(finished(Reported(name, num_prompt_tokens=len(body["prompt"]))))
            yield b"data: [DONE]\n\n"

        return StreamingResponse(shown(), media_type="text/event-stream")

    async def health(_: Request) -> Response:
        return Response()

    app.add_route("/v1/completions", completions, methods=["POST"])
    app.add_route("/health", health)
    app.add_middleware(TraceRecorder)
    return app


if __name__ == "__main__":
    # As vLLM's server, it ends in order: uvicorn raises the signal again once it has shut down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(application(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
