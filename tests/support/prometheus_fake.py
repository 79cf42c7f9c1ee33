"""A Prometheus in a few lines, for tests that ask it thousands of times or have it misbehave.

It knows the past of some engines and answers the queries that this tool makes: one selector,
with `timestamp()` around it or not, and `max(up)`. A test holds it to a real Prometheus.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from support.prometheus_past import PastEngine
from tuner.stats import Floats

LOOK_BACK_S = 300.0
"""How long a sample stands for what follows. Source: Prometheus, --query.lookback-delta."""

_LINE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+) (?P<at>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"')


def _unescaped(text: str) -> str:
    return text.replace(r"\"", '"').replace(r"\\", "\\")


@dataclass(slots=True)
class FakePrometheus:
    """Series by their labels: when they were scraped, and what was read."""

    series: dict[tuple[tuple[str, str], ...], tuple[Floats, Floats]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, *engines: PastEngine) -> FakePrometheus:
        """Return one that scraped these engines."""
        read: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for engine in engines:
            for line in engine.lines():
                found = _LINE.fullmatch(line)
                assert found is not None, line
                labels = {n: _unescaped(v) for n, v in _LABEL.findall(found["labels"] or "")}
                key = tuple(sorted({"__name__": found["name"], **labels}.items()))
                read.setdefault(key, []).append((float(found["at"]), float(found["value"])))
        known = {key: np.array(pairs) for key, pairs in read.items()}
        return cls({key: (pairs[:, 0], pairs[:, 1]) for key, pairs in known.items()})

    def answer(self, query: str, start_s: float, end_s: float, step_s: float) -> dict[str, Any]:
        """Return what /api/v1/query_range answers."""
        at_s: Floats = np.arange(start_s, end_s + step_s / 2, step_s, dtype=np.float64)
        if query == "max(up)":
            return _matrix([({}, at_s, np.ones(at_s.size))])
        inner = re.fullmatch(r"timestamp\((.*)\)", query)
        selector = inner[1] if inner else query
        return _matrix(
            (
                # A function drops the name.
                {k: v for k, v in key if not (inner and k == "__name__")},
                *_read_at(at_s, *columns, wants_times=inner is not None),
            )
            for key, columns in self.series.items()
            if _matches(dict(key), selector)
        )


def _matches(labels: dict[str, str], selector: str) -> bool:
    for name, operator, quoted in _MATCHER.findall(selector):
        value, wanted = labels.get(name, ""), _unescaped(quoted)
        is_so = bool(re.fullmatch(wanted, value)) if "~" in operator else value == wanted
        if is_so is operator.startswith("!"):
            return False
    return True


def _read_at(
    at_s: Floats, times_s: Floats, values: Floats, *, wants_times: bool
) -> tuple[Floats, Floats]:
    """Return the instants at which a series has a value, and those."""
    last = np.searchsorted(times_s, at_s, "right") - 1
    is_known = (last >= 0) & (at_s - times_s[np.maximum(last, 0)] < LOOK_BACK_S)
    return at_s[is_known], (times_s if wants_times else values)[last[is_known]]


def _matrix(series: Iterable[tuple[dict[str, str], Floats, Floats]]) -> dict[str, Any]:
    result = [
        {
            "metric": labels,
            "values": [
                [at_s, repr(value)]
                for at_s, value in zip(times_s.tolist(), values.tolist(), strict=True)
            ],
        }
        for labels, times_s, values in series
        if times_s.size
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


Handler = http.server.BaseHTTPRequestHandler
Respond = Callable[[Handler, dict[str, str]], None]
"""Answer one request, given its parameters."""


def send(handler: Handler, body: bytes, status: int = 200) -> None:
    """Send a whole answer."""
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def answered(past: FakePrometheus, asked: dict[str, str]) -> bytes:
    """Return what a Prometheus answers to the parameters of a request."""
    start_s, end_s = float(asked["start"]), float(asked["end"])
    answer = past.answer(asked["query"], start_s, end_s, float(asked["step"]))
    return json.dumps(answer).encode()


@contextmanager
def listening(respond: Respond) -> Iterator[str]:
    """Serve until the block ends, as `respond` does, and give the URL."""

    class Answering(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(urlsplit(self.path).query)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._answer(self.rfile.read(length).decode())

        def _answer(self, query: str) -> None:
            try:
                respond(self, {name: values[0] for name, values in parse_qs(query).items()})
            except OSError:  # the client went away
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
