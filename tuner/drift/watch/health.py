"""What a watch shows over HTTP: /healthz for probes, /metrics for Prometheus.

Every number is read off the state at each request, so that counters go on where they were after
any restart.
"""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tuner.drift.watch.loop import Watcher
from tuner.engine.limits import EngineLimits
from tuner.errors import TunerError, UsageError

MIN_PATIENCE_S: Final = 900.0
"""Ours: replays, a hook and the guard's look take minutes; a quarter of an hour is a hang."""

CURRENT_S: Final = 1.0
"""Ours: people do not notice it."""

MAX_CLIENTS: Final = 64
CLIENT_S: Final = 10.0
"""Ours: a probe and a scrape each take milliseconds."""

_HINT = "for example --listen 127.0.0.1:9105"


class _Current:
    """The limits in use, read again once the file is another one, or a moment has passed.

    A probe may ask at any rate. Raises: UsageError, when called, where the file is damaged.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._read: tuple[float, object, EngineLimits] | None = None

    def __call__(self) -> EngineLimits:
        now_s, file = time.monotonic(), self._file()
        if self._read is None or self._read[1] != file or now_s - self._read[0] > CURRENT_S:
            self._read = now_s, file, self._watcher.current
        return self._read[2]

    def _file(self) -> object:
        """Return what tells one state of the file from the next."""
        try:
            found = self._watcher.rollout.publisher.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def health(watcher: Watcher, current_of: Callable[[], EngineLimits]) -> dict[str, Any]:
    """Return how the watch is; `ok` is false once its loop hangs.

    A Prometheus that is down does not make it unwell: a restart would not mend that.
    """
    state = watcher.store.state
    last, handover = state.last, state.handover
    quiet_s = watcher.clock.elapsed_s() - watcher.began_s
    try:
        current = str(current_of())
    except TunerError as error:
        current = error.message
    return {
        "ok": quiet_s < 2 * watcher.every_s + MIN_PATIENCE_S,
        "since_last_round_s": round(quiet_s, 1),
        "current": current,
        "verdict": last.verdict or None,
        "why": last.why or None,
        "act": last.act or None,
        "checked_at_s": last.check_s or None,
        "error": last.error or None,
        "error_at_s": last.error_s or None,
        "handover": None if handover is None else str(handover.stage),
        "guard": last.guard or None,
    }


class WatchMetrics(Collector):
    """The state as Prometheus's client writes metrics."""

    def __init__(self, watcher: Watcher, current_of: Callable[[], EngineLimits]) -> None:
        self._watcher, self._current_of = watcher, current_of

    def collect(self) -> Iterable[Metric]:
        """Yield every metric as of now."""
        state = self._watcher.store.state
        last, counts = state.last, state.counts
        checks = CounterMetricFamily(
            "tune_watch_checks", "Checks, by verdict.", None, ["verdict"]
        )
        for verdict, count in counts.checks.items():
            checks.add_metric([verdict], count)
        yield checks
        for name, text, count in (
            ("errors", "Rounds that failed: no data, no shadow, a hook.", counts.errors),
            ("changes", "Files that were written and handed over.", counts.changes),
            ("rollbacks", "Files that the guard took back.", counts.rollbacks),
        ):
            yield CounterMetricFamily(f"tune_watch_{name}", text, count)
        gauges = {
            "last_check_timestamp_seconds": (
                "When a check last ended with a verdict, in Unix time.",
                last.check_s or None,
            ),
            "gain_ratio": ("What a re-tune would gain, by the last check.", last.gain_ratio),
            "on_guard": (
                "Whether a change is on probation.",
                float(self._watcher.rollout.is_on_guard),
            ),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"tune_watch_{name}", text, value)
        yield from self._current()

    def _current(self) -> Iterator[Metric]:
        """Yield the limits in use; none while the file is damaged."""
        try:
            current = self._current_of()
        except TunerError:
            return
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            text = f"{name} of the configuration in use."
            yield GaugeMetricFamily(
                f"tune_watch_current_{name}", text, float(getattr(current, name))
            )


_Request = socket.socket | tuple[bytes, socket.socket]
"""As the base class has it, for servers of every kind."""


class _Server(http.server.ThreadingHTTPServer):
    """Answers so many clients at a time, each for so long; who comes goes before who stays.

    Neither those that say nothing nor those that drip keep a probe from its answer.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]
    ) -> None:
        self._open: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: _Request, client_address: object) -> None:
        """Answer in a thread."""
        if len(self._open) >= MAX_CLIENTS:
            _end(next(iter(self._open)))
        if isinstance(request, socket.socket):
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Request) -> None:
        """Forget who was answered."""
        if isinstance(request, socket.socket):
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End who has stayed too long; called every half second."""
        long_ago_s = time.monotonic() - CLIENT_S
        for request in [one for one, came_s in [*self._open.items()] if came_s < long_ago_s]:
            _end(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Drop it: a client that went away is no news."""


def _end(request: socket.socket) -> None:
    """Wake the thread of a client, which then closes."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(listen: str, watcher: Watcher) -> Iterator[int]:
    """Serve both pages beside the watch; yield the port. Raises: UsageError."""
    host, port = _address(listen)
    registry, current_of = CollectorRegistry(), _Current(watcher)
    registry.register(WatchMetrics(watcher, current_of))
    handler = _handler(registry, lambda: health(watcher, current_of))
    try:
        server = _Server((host, port), handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--listen {listen} cannot be listened on: {reason}", _HINT) from error
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(
    registry: CollectorRegistry, report_of: Callable[[], dict[str, Any]]
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer one of the two pages."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                report = report_of()
                status = HTTPStatus.OK if report["ok"] else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer(status, "application/json", json.dumps(report).encode() + b"\n")
            else:
                text = b"/healthz and /metrics are here\n"
                self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", text)

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: standard error is for rounds, not for probes."""

    return Handler


def _address(listen: str) -> tuple[str, int]:
    """Return host and port; no host is every one of the machine's own.

    Raises: UsageError.

    >>> _address("127.0.0.1:9105"), _address(":9105")
    (('127.0.0.1', 9105), ('', 9105))
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"--listen must be HOST:PORT, got {listen}", _HINT)
    return host, int(port)
