"""What a watch shows over HTTP: /healthz for probes, /metrics for Prometheus.

Every number is read off the state at each request, so that counters go on where they were after
any restart.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tuner.drift.watch.loop import Watcher
from tuner.errors import TunerError, UsageError

MIN_PATIENCE_S: Final = 900.0
"""Ours: replays, a hook and the guard's look take minutes; a quarter of an hour is a hang."""

_HINT = "for example --listen 127.0.0.1:9105"


def health(watcher: Watcher) -> dict[str, Any]:
    """Return how the watch is; `ok` is false once its loop hangs.

    A Prometheus that is down does not make it unwell: a restart would not mend that.
    """
    state = watcher.store.state
    last, handover = state.last, state.handover
    quiet_s = watcher.clock.now_s() - watcher.began_s
    try:
        current = str(watcher.current)
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

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

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
            "on_guard": ("Whether a change is on probation.", float(self._is_on_guard)),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"tune_watch_{name}", text, value)
        yield from self._current()

    @property
    def _is_on_guard(self) -> bool:
        return self._watcher.rollout.is_on_guard

    def _current(self) -> Iterator[Metric]:
        """Yield the limits in use; none while the file is damaged."""
        try:
            current = self._watcher.current
        except TunerError:
            return
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            text = f"{name} of the configuration in use."
            yield GaugeMetricFamily(
                f"tune_watch_current_{name}", text, float(getattr(current, name))
            )


@contextmanager
def serving(listen: str, watcher: Watcher) -> Iterator[int]:
    """Serve both pages beside the watch; yield the port. Raises: UsageError."""
    host, port = _address(listen)
    registry = CollectorRegistry()
    registry.register(WatchMetrics(watcher))
    try:
        server = http.server.ThreadingHTTPServer((host, port), _handler(watcher, registry))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--listen {listen} cannot be listened on: {reason}", _HINT) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(
    watcher: Watcher, registry: CollectorRegistry
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        # A client that says nothing must not hold a thread for ever.
        timeout = 10

        def do_GET(self) -> None:
            """Answer one of the two pages."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                report = health(watcher)
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
