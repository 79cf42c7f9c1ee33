"""Requests that the engine refuses leave nothing behind, whatever id they bear.

A Starlette application behind uvicorn, as vLLM's, refuses what clients send it over HTTP.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.recorder_asgi import PROMPT, Engine, the_recorder, told_by_engine
from support.recorder_parts import Reported, finished, rows_of, warnings_kept
from tuner.recorder import TraceRecorder, middleware
from tuner.replay.server.process import free_port

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn and Starlette come with vLLM")
applications = pytest.importorskip("starlette.applications")
responses = pytest.importorskip("starlette.responses")

REFUSED = 3000
GRACE_S = 0.2
STREAM = {"stream": True, "is_bad": True}


class Service:
    """An application by the ways of vLLM's: it asks, answers, refuses and works on."""

    def __init__(self) -> None:
        self.engine, self.tasks = Engine(), list[Any]()
        self.app = applications.Starlette()
        self.app.state.engine_client = self.engine
        self.app.add_route("/v1/completions", self.completions, methods=["POST"])
        self.app.add_middleware(TraceRecorder)

    async def completions(self, request: Any) -> Any:
        """Answer for each prompt of the body, with 400 if one is refused."""
        body = await request.json()
        name = request.headers.get("x-request-id", "none")
        prompts = [
            {"type": "token", "prompt_token_ids": PROMPT, **body, "is_bad": is_bad}
            for is_bad in body.get("prompts", [body.get("is_bad", False)])
        ]
        streams: list[Any] = [
            self.engine.generate(prompt, SimpleNamespace(n=1), f"cmpl-{name}")
            for prompt in prompts
        ]
        if body.get("stream"):
            return responses.StreamingResponse(shown(streams), media_type="text/event-stream")
        if body.get("background"):
            self.tasks.append(asyncio.create_task(answered(streams, f"cmpl-{name}")))
            return responses.JSONResponse({})
        try:
            await answered(streams, f"cmpl-{name}")
        except ValueError as error:
            return responses.JSONResponse({"error": str(error)}, status_code=400)
        return responses.JSONResponse({})


async def answered(streams: list[Any], request_id: str) -> None:
    """Have each prompt answered, and the engine report it."""
    for stream in streams:
        async for _ in stream:
            the_recorder().offer(finished(Reported(request_id)))


async def shown(streams: list[Any]) -> Any:
    """Give events, among them the refusal: with a stream the status has long been sent."""
    try:
        for stream in streams:
            async for _ in stream:
                yield b"data: {}\n\n"
    except ValueError as error:
        yield f"data: {error}\n\n".encode()


@contextmanager
def listening(app: object) -> Iterator[http.client.HTTPConnection]:
    """Serve until the block ends, and give a connection to the server."""
    port = free_port()
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        yield connection
    finally:
        connection.close()
        server.should_exit = True
        thread.join(20)


def posted(connection: http.client.HTTPConnection, name: str, body: object) -> int:
    headers = {"X-Request-Id": name, "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read()
    return response.status


def nothing_is_open() -> bool:
    """Say whether the recorder lets go of all that it holds, soon."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if len(the_recorder().join.open) == 0:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "counted_by", [pytest.param("engine", marks=pytest.mark.slow), "usage"]
)
@pytest.mark.parametrize("name", ["constant", "own-{}"])
def test_thousands_of_refused_requests_leave_no_prompt_open(
    prod: Path, counted_by: str, name: str
) -> None:
    if counted_by == "engine":
        told_by_engine()
    with listening(Service().app) as connection, warnings_kept() as said:
        for number in range(REFUSED):
            assert posted(connection, name.format(number), {"is_bad": True}) == 400
        assert nothing_is_open()
        assert the_recorder().join.open.held_bytes == 0
    assert said == []
    assert not prod.exists()


@pytest.mark.usefixtures("prod")
@pytest.mark.parametrize("body", [STREAM, {"prompts": [False, True, False]}])
def test_a_refusal_within_a_stream_or_among_other_prompts_leaves_no_prompt_open(
    body: dict[str, object],
) -> None:
    told_by_engine()
    with listening(Service().app) as connection:
        for _ in range(100):
            assert posted(connection, "constant", body) == (200 if "stream" in body else 400)
        assert nothing_is_open()


def test_what_goes_on_after_its_response_keeps_its_blocks(prod: Path) -> None:
    told_by_engine()
    with listening(Service().app) as connection:
        for _ in range(3):
            body = {"background": True, "takes_s": 3 * middleware.GRACE_S}
            assert posted(connection, "constant", body) == 200
            assert posted(connection, "constant", {"is_bad": True}) == 400
        rows = rows_of(prod, 3)
        assert nothing_is_open()
    assert [len(row["hash_ids"]) for row in rows] == [2] * 3


def test_refused_requests_cost_good_ones_of_the_same_id_nothing(prod: Path) -> None:
    told_by_engine()
    with listening(Service().app) as connection:
        for _ in range(20):
            assert posted(connection, "constant", {"is_bad": True}) == 400
            assert posted(connection, "constant", {}) == 200
        assert nothing_is_open()
    rows = rows_of(prod, 20)
    assert [len(row["hash_ids"]) for row in rows] == [2] * 20
