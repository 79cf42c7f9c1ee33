"""A Prometheus that is slow, drips, lies or goes away costs a sentence and bounded time."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fault_parts import Tally, how_many
from support.fuzz_mutations import changed
from support.fuzz_targets import START_S, past
from support.prometheus_fake import FakePrometheus, Handler, Respond, answered, listening, send
from support.prometheus_parts import need_prometheus, with_history
from support.prometheus_past import END_S, PastEngine
from support.prometheus_past import past as two_hours
from tuner.errors import UsageError
from tuner.traffic.prometheus import Scraped, client, trace_from_prometheus
from tuner.traffic.prometheus.live import live_between

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]

DEADLINE_S = 2.0
BOUND_S = 20 * DEADLINE_S + 30
"""Each query may take as long as it is allowed to, and a busy machine as long again."""
MAX_BYTES = 4 << 20


def head(handler: Handler, length: int) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()


def slow(_: random.Random, handler: Handler, body: bytes) -> None:
    time.sleep(3 * DEADLINE_S)
    send(handler, body)


def dripping(_: random.Random, handler: Handler, body: bytes) -> None:
    head(handler, len(body))
    for at in range(0, len(body), 8):
        handler.wfile.write(body[at : at + 8])
        handler.wfile.flush()
        time.sleep(0.3)


def endless(_: random.Random, handler: Handler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    handler.wfile.write(body[:-3])
    while True:
        handler.wfile.write(b" " * 65536)


def truncated(rng: random.Random, handler: Handler, body: bytes) -> None:
    head(handler, len(body))
    handler.wfile.write(body[: rng.randrange(len(body))])
    handler.close_connection = True


def reset(rng: random.Random, handler: Handler, body: bytes) -> None:
    head(handler, len(body))
    handler.wfile.write(body[: rng.randrange(len(body))])
    handler.wfile.flush()
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True


def failing(rng: random.Random, handler: Handler, _: bytes) -> None:
    bodies = (b"", b"<html>", b'{"status":"error","error":"out of order"}', b"\xff\xfe", b"[1]")
    send(handler, rng.choice(bodies), rng.choice((400, 401, 403, 404, 422, 429, 500, 502, 503)))


def redirected(_: random.Random, handler: Handler, __: bytes) -> None:
    handler.send_response(302)
    handler.send_header("Location", handler.path)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def lying(rng: random.Random, handler: Handler, body: bytes) -> None:
    found: Any = json.loads(body)
    for _ in range(rng.randrange(1, 4)):
        found = changed(rng, found)
    send(handler, json.dumps(found).encode("utf-8", "surrogatepass"))


def garbage(rng: random.Random, handler: Handler, _: bytes) -> None:
    handler.wfile.write(rng.choice((b"\0" * 99, b"HTTP/1.1 200\r\n", b"SSH-2.0-x\r\n", b"")))
    handler.close_connection = True


MOODS: dict[str, Callable[[random.Random, Handler, bytes], None]] = {
    "Prometheus: slow": slow,
    "Prometheus: dripping": dripping,
    "Prometheus: endless": endless,
    "Prometheus: cut off": truncated,
    "Prometheus: connection reset": reset,
    "Prometheus: errors": failing,
    "Prometheus: redirects to itself": redirected,
    "Prometheus: lies": lying,
    "Prometheus: no HTTP": garbage,
}


def moody(rng: random.Random, kind: str) -> Respond:
    """Return a Prometheus that has a mood at one of its answers, or at all."""
    turn, lasts = rng.randrange(6), rng.random() < 0.5
    asked_so_far = [0]

    def respond(handler: Handler, asked: dict[str, str]) -> None:
        asked_so_far[0] += 1
        body = answered(past(), asked)
        is_hit = asked_so_far[0] - 1 == turn or (lasts and asked_so_far[0] > turn)
        if is_hit:
            MOODS[kind](rng, handler, body)
        else:
            send(handler, body)

    return respond


def outcome(call: Callable[[], object], within_s: float = BOUND_S) -> tuple[str, float]:
    """Return what came of a call, and how long it took; "hangs" where it takes too long."""
    came: list[str] = []

    def work() -> None:
        try:
            call()
            came.append("answered")
        except UsageError as error:
            came.append(f"refused: {error.message}")
        except Exception as error:  # noqa: BLE001 - what may not come
            came.append(f"{type(error).__name__}: {error}")

    began_s = time.monotonic()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(within_s)
    return (came or ["hangs"])[0], time.monotonic() - began_s


def traced(url: str) -> str:
    """Return the digest of the trace that a Prometheus gives."""
    return trace_from_prometheus(Scraped(url), 900, 30, until_s=START_S + 900).sha256


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", MAX_BYTES)


def test_a_prometheus_in_any_mood_is_answered_by_a_trace_or_a_sentence_in_time(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    tally, kinds = Tally(), list(MOODS)
    with listening(lambda handler, asked: send(handler, answered(past(), asked))) as url:
        undisturbed = traced(url)
    for number in range(how_many(request, 27, 0.2)):
        kind, rng = kinds[number % len(kinds)], random.Random(f"prometheus {number}")
        with listening(moody(rng, kind)) as url:
            calls = (
                lambda url=url: traced(url),
                lambda url=url: live_between(Scraped(url), START_S, START_S + 900, 30),
            )
            with tally.fault(kind, f"number {number}"):
                came, took_s = outcome(calls[number % 2])
                assert came == "answered" or came.startswith("refused: "), came
                assert len(came) < 600
                assert took_s < BOUND_S
    # And after all of it the next answer is what it was.
    with listening(lambda handler, asked: send(handler, answered(past(), asked))) as url:
        assert traced(url) == undisturbed
    tally.report(record_property)


def test_the_fake_answers_as_a_real_prometheus(tmp_path: Path) -> None:
    need_prometheus()
    engines: tuple[PastEngine, ...] = (
        two_hours(model="m"),
        two_hours(0.5, 3, model="m", instance="b"),
    )
    fake = FakePrometheus.of(*engines)

    def read(url: str) -> str:
        return trace_from_prometheus(Scraped(url), 3600, 30, until_s=END_S).sha256

    with listening(lambda handler, asked: send(handler, answered(fake, asked))) as url:
        ours = read(url)
    with with_history(tmp_path, *engines) as url:
        assert read(url) == ours


def test_the_oracle_sees_a_call_that_hangs() -> None:
    assert outcome(lambda: time.sleep(1), 0.2)[0] == "hangs"
    assert outcome(lambda: 1 // 0)[0].startswith("ZeroDivisionError")
