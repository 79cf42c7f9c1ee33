"""A Prometheus that drips, floods or lies costs a bounded time and memory, and no traceback."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from support.prometheus_parts import scraped
from tuner.errors import UsageError
from tuner.traffic.prometheus import client
from tuner.traffic.prometheus.client import Prometheus, Span
from tuner.traffic.prometheus.live import live_between
from tuner.traffic.prometheus.sampled import trace_from_prometheus

Answer = Callable[[socket.socket], None]
SPAN = Span(0, 600, 60)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def answering(answer: Answer, asked: list[str] | None = None) -> Iterator[str]:
    """Answer each connection so, in a thread of its own; give the URL. Notes what is asked."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                line, _ = listening.accept()
                threading.Thread(target=take, args=(line,), daemon=True).start()

    def take(line: socket.socket) -> None:
        with suppress(OSError), line:
            while got := line.recv(65536):
                if asked is not None:
                    asked.append(got.split()[1].decode())
                answer(line)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def whole(content: object) -> Answer:
    body = json.dumps(content).encode()
    length = f"Content-Length: {len(body)}\r\n\r\n".encode()
    return lambda line: line.sendall(HEAD + length + body)


def series(*found: tuple[dict[str, str], list[tuple[float, str]]]) -> Answer:
    result = [{"metric": labels, "values": values} for labels, values in found]
    return whole({"status": "success", "data": {"result": result}})


def dripping(first: bytes) -> Answer:
    def answer(line: socket.socket) -> None:
        line.sendall(first)
        for _ in range(600):
            line.sendall(b"x")
            time.sleep(0.1)

    return answer


def flooding(line: socket.socket) -> None:
    line.sendall(HEAD + b"\r\n" + b'{"data": {"result": [')
    while True:
        line.sendall(b'{"metric":{},"values":[]},' * 4096)


@pytest.mark.parametrize(
    "first", [HEAD[:15], HEAD[:20], HEAD + b"X-Slow: ", HEAD + b"Content-Length: 99999\r\n\r\n"]
)
def test_an_answer_that_drips_is_waited_for_as_long_as_any(
    monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 1.0)
    began_s = time.monotonic()
    with answering(dripping(first)) as url, Prometheus(url) as server:
        with pytest.raises(UsageError, match="did not answer within 1 s") as caught:
            server.over("up", SPAN)
        assert "--since" in caught.value.hint
    assert time.monotonic() - began_s < 5


def test_an_endless_answer_is_cut_and_takes_no_more_memory_than_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
    tracemalloc.start()
    try:
        with answering(flooding) as url, Prometheus(url) as server:
            with pytest.raises(UsageError, match="answers with more than 1 MiB"):
                server.over("up", SPAN)
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_what_is_too_long_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 4000)

    def answer(line: socket.socket) -> None:
        # As many points as were asked for cannot be told here, so all are given at last.
        asked.append(1)
        size = 500 if len(asked) == 1 else 5
        series(({"a": "b"}, [(60.0 * i, "1") for i in range(size)]))(line)

    asked: list[int] = []
    with answering(answer) as url, Prometheus(url) as server:
        (found,) = server.over("up", Span(0, 240, 60))
    assert found.values.tolist() == [1.0] * 5
    assert len(asked) > 1


def test_very_many_series_are_refused_before_they_take_memory() -> None:
    answer = series(*(({"a": str(i)}, [(0.0, "1")]) for i in range(2000)))
    with answering(answer) as url, Prometheus(url) as server:
        with pytest.raises(UsageError, match=r"answers with more than \d+ series") as caught:
            server.over("up", Span(0, 1_000_000, 1))
        assert "--label" in caught.value.hint


@pytest.mark.parametrize(
    "values",
    [
        [[math.nan, "1"]],
        [[1e300, "1"], [-1e300, "NaN"]],
        [[0, "1e999"], [60, "-Inf"], [120, "1"]],
    ],
)
def test_times_and_values_from_nowhere_are_no_traceback(values: list[list[object]]) -> None:
    answer = whole({"data": {"result": [{"metric": {}, "values": values}]}})
    with answering(answer) as url, Prometheus(url) as server, suppress(UsageError):
        (found,) = server.over("up", SPAN)
        assert found.values.shape == (SPAN.points,)


def test_connections_that_the_server_ends_are_not_kept_open() -> None:
    """A watch asks for months."""
    kept = series(({"instance": "a"}, [(0.0, "1")]))

    def once(line: socket.socket) -> None:
        kept(line)
        line.shutdown(socket.SHUT_RDWR)

    opened = []
    with answering(once) as url, Prometheus(url) as server:
        for _ in range(20):
            assert len(server.over("up", SPAN)) == 1
            opened.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - a count
    # The server's own threads have some too, for as long as they live.
    assert max(opened[10:]) <= max(opened[:10]) + 2


def test_a_login_does_not_follow_a_redirect() -> None:
    seen: list[bytes] = []

    def elsewhere(line: socket.socket) -> None:
        seen.append(b"asked")
        series()(line)

    with answering(elsewhere) as other:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n"
        with (
            answering(lambda line: line.sendall(moved.encode())) as url,
            Prometheus(url, headers={"X-Scope-OrgID": "secret"}) as server,
            pytest.raises(UsageError, match="answers with HTTP 302"),
        ):
            server.over("up", SPAN)
    assert seen == []


def histograms(bound: str) -> Answer:
    """Answer every query with an engine whose histograms have a bucket of this bound."""
    found = []
    times = range(0, 601, 60)
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        for le, times_as_many in ((bound, 1), ("100", 1), ("+Inf", 2)):
            labels = {"__name__": f"vllm:{name}_bucket", "le": le, "model_name": "m"}
            found.append((labels, [(float(t), str(t * times_as_many)) for t in times]))
    return series(*found)


@pytest.mark.parametrize("bound", ["abc", "", "NaN", "-Inf", "-5", "1e5x"])
def test_a_bucket_without_a_bound_is_left_out(bound: str) -> None:
    with answering(histograms(bound)) as url:
        live = live_between(scraped(url, "m"), 0, 600, 60)
        assert math.inf in live.bounds_s
        assert np.isfinite(live.counts).all()
        with suppress(UsageError):
            trace_from_prometheus(scraped(url, "m"), 600, 60, until_s=600)


def test_whatever_number_of_requests_is_claimed_a_watch_draws_no_more_than_its_bound() -> None:
    with answering(histograms("200")) as url:
        with pytest.raises(
            UsageError, match=r"counted [\d,]+ requests .* more than 1,000"
        ) as too:
            trace_from_prometheus(scraped(url, "m"), 600, 60, until_s=600, max_requests=1000)
        assert "--label instance=HOST:PORT" in too.value.hint


def test_only_series_with_the_labels_that_are_named_are_asked_for() -> None:
    asked: list[str] = []

    def answer(line: socket.socket) -> None:
        series()(line)

    with answering(answer, asked) as url, suppress(UsageError):
        of = scraped(url, job="vllm", instance='a"b:80')
        trace_from_prometheus(of, 600, 60, until_s=600)
    (query, *_) = [parse_qs(urlsplit(text).query)["query"][0] for text in asked]
    assert query.endswith(',job="vllm",instance="a\\"b:80"}')
