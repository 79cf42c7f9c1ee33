"""The gate in a server: it lets in so many, keeps a queue, turns away, and ends answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tuner.gate import ANSWERING, SETTINGS, Gate, GateLimits, Message, Receive, Scope, Send

COMPLETIONS = "/v1/completions"


class SlowApp:
    """An application that answers when it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.lengths: list[bytes] = []
        self.done = asyncio.Event()
        self.in_flight = self.peak = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, and answer once that is wanted."""
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.asked.append(json.loads(body))
        self.lengths.append(dict(scope["headers"]).get(b"content-length", b""))
        try:
            await self.done.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.in_flight -= 1


async def ask(
    gate: Gate, body: bytes = b"{}", path: str = COMPLETIONS, method: str = "POST"
) -> int:
    """Return the status that a request is answered with; the body comes in two parts."""
    parts = [body[:1], body[1:]]
    seen: list[int] = []

    async def receive() -> Message:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    await gate(scope, receive, send)
    return seen[0]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_so_many_are_in_the_engine_some_wait_in_order_and_the_rest_is_turned_away() -> None:
    async def play() -> tuple[list[int], SlowApp]:
        app = SlowApp()
        gate = Gate(app, GateLimits(max_in_flight=2, max_queued=3))
        tasks = []
        for i in range(7):
            tasks.append(asyncio.create_task(ask(gate, json.dumps({"i": i}).encode())))
            await settled()
        app.done.set()
        return list(await asyncio.gather(*tasks)), app

    statuses, app = asyncio.run(play())
    assert statuses == [200] * 5 + [503] * 2
    assert app.peak == 2
    assert [asked["i"] for asked in app.asked] == [0, 1, 2, 3, 4]


def test_whoever_waits_for_too_long_is_turned_away_and_its_place_is_free_again() -> None:
    async def play() -> list[int]:
        app = SlowApp()
        gate = Gate(app, GateLimits(1, max_queued=1, queue_timeout_s=0.05))
        first = asyncio.create_task(ask(gate))
        await settled()
        second = await ask(gate)
        third = asyncio.create_task(ask(gate))
        await settled()
        app.done.set()
        return [await first, second, await third]

    assert asyncio.run(play()) == [200, 503, 200]


def test_a_client_that_leaves_gives_its_place_to_the_next() -> None:
    async def play() -> tuple[int, int]:
        app = SlowApp()
        gate = Gate(app, GateLimits(1, max_queued=2))
        tasks = [asyncio.create_task(ask(gate)) for _ in range(3)]
        await settled()
        tasks[0].cancel()
        tasks[1].cancel()
        await settled()
        app.done.set()
        status = await tasks[2]
        return status, await ask(gate)

    assert asyncio.run(play()) == (200, 200)


def test_what_asks_for_no_answer_goes_by() -> None:
    async def play() -> list[int]:
        app = SlowApp()
        app.done.set()
        gate = Gate(app, GateLimits(1))
        gate._in_flight = 1  # the engine is full
        paths = [("/health", "GET"), ("/metrics", "GET"), ("/v1/models", "GET")]
        passed = [await ask(gate, path=path, method=method) for path, method in paths]
        return [*passed, await ask(gate), await ask(gate, path="/v1/chat/completions")]

    assert asyncio.run(play()) == [200, 200, 200, 503, 503]


GOING_BY = {
    "/abort_requests",
    "/detokenize",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/ping",
    "/scale_elastic_ep",
    "/tokenize",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
}
"""What a server is sent without asking its engine for an answer."""


@pytest.mark.engine
def test_every_path_on_which_vllm_generates_passes_the_gate() -> None:
    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from vllm.entrypoints.launchers.api_server.routers import register_api_routers

    app = FastAPI()
    app.state.args = Namespace(enable_scale_out=True)
    register_api_routers(app.state.args, app, ("generate", "transcription"))

    posted = {r.path for r in app.routes if isinstance(r, APIRoute) and "POST" in r.methods}
    gated = {path for path in posted if path.endswith(tuple(ANSWERING))}
    assert posted - gated <= GOING_BY
    assert {"/invocations", "/inference/v1/generate", "/v1/responses"} <= gated
    assert not gated & GOING_BY


@pytest.mark.parametrize(
    ("path", "asked", "wanted"),
    [
        (COMPLETIONS, {"max_tokens": 900}, {"max_tokens": 64}),
        (COMPLETIONS, {"max_tokens": 9}, {"max_tokens": 9}),
        (COMPLETIONS, {}, {"max_tokens": 64}),
        ("/v1/chat/completions", {"max_tokens": 900}, {"max_tokens": 64}),
        ("/v1/chat/completions", {"max_tokens": None}, {"max_completion_tokens": 64}),
        ("/v1/responses", {"min_tokens": 99}, {"max_output_tokens": 64, "min_tokens": 64}),
        ("/invocations", {"messages": []}, {"messages": [], "max_tokens": 64}),
        ("/invocations", {"max_completion_tokens": 900}, {"max_completion_tokens": 64}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"min_tokens": 99}},
            {"sampling_params": {"min_tokens": 64, "max_tokens": 64}},
        ),
        ("/inference/v1/generate", {"sampling_params": 1}, {"sampling_params": 1}),
        # Of a token or two: nothing to cap.
        ("/generative_scoring", {"max_tokens": 900}, {"max_tokens": 900}),
        # As vLLM reads them: a text for its number, and 0 for an echo without an answer.
        (COMPLETIONS, {"max_tokens": "900"}, {"max_tokens": 64}),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}, {"max_tokens": 0, "echo": True}),
        ("/v1/chat/completions", {"max_tokens": 9.0}, {"max_tokens": 9.0}),
        # What is no number is for vLLM to refuse.
        (COMPLETIONS, {"max_tokens": [1]}, {"max_tokens": [1]}),
    ],
)
def test_an_answer_ends_by_the_cap_under_the_name_that_its_path_has(
    path: str, asked: dict[str, Any], wanted: dict[str, Any]
) -> None:
    async def play() -> SlowApp:
        app = SlowApp()
        app.done.set()
        gate = Gate(app, GateLimits(1, max_output_tokens=64))
        assert await ask(gate, json.dumps({"prompt": "é", **asked}).encode(), path) == 200
        return app

    app = asyncio.run(play())
    got = {name: value for name, value in app.asked[0].items() if value is not None}
    assert got == {"prompt": "é", **wanted}
    assert app.lengths == [str(len(json.dumps(app.asked[0]))).encode()]


def test_the_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = GateLimits(24, max_queued=8, queue_timeout_s=0.5, max_output_tokens=512)
    monkeypatch.setenv(SETTINGS, str(limits))

    assert Gate(SlowApp())._limits == limits
    for text in ("", "max_in_flight=0", "max_in_flight=4,burst=2", "max_in_flight=few"):
        monkeypatch.setenv(SETTINGS, text)
        with pytest.raises(ValueError, match=r"TUNE_GATE must be .* got"):
            Gate(SlowApp())


def test_a_server_that_takes_it_in_pays_for_the_standard_library_alone(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[1] / "tuner" / "gate.py"
    (tmp_path / "gate.py").write_text(source.read_text())
    code = (
        "import sys; before = set(sys.modules); import gate; print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    brought = {name.split(".")[0].lstrip("_") for name in done.stdout.split()} - {"gate"}
    assert brought <= {name.lstrip("_") for name in sys.stdlib_module_names}
