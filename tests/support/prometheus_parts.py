"""A Prometheus of the tests' own: started, filled with a past, and asked."""

from __future__ import annotations

import http.client
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from support.prometheus_past import END_S, HOUR_S, PastEngine
from tuner.errors import UsageError
from tuner.replay.server.process import free_port
from tuner.traffic.prometheus import Scraped, Selection, trace_from_prometheus
from tuner.traffic.traces import Trace

PATIENCE_S = 60.0


def need_prometheus() -> None:
    """Skip where Prometheus is not installed, and say how to get it."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("no Prometheus here: apt-get install prometheus")


def wait_for(
    is_so: Callable[[], bool], why: Callable[[], str] = str, patience_s: float = PATIENCE_S
) -> None:
    """Wait until something is so; fail when patience ends."""
    deadline_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.05)


def answers(port: int, path: str) -> bool:
    """Say whether a loopback server answers a page with 200, or asks for a login."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status in {200, 401}
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def asked(url: str, promql: str) -> float:
    """Return the one number that Prometheus answers a query with; 0 if it has none."""
    query = urlencode({"query": promql})
    # The address is a loopback one of our own.
    with urlopen(f"{url}/api/v1/query?{query}", timeout=PATIENCE_S) as response:  # noqa: S310
        found = json.load(response)["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def last_scrape_s(url: str, metric: str) -> float:
    """Return when Prometheus last read a metric, in Unix seconds; 0 if it never did."""
    return asked(url, f"max(timestamp({metric}))")


@contextmanager
def prometheus(
    folder: Path, *, scrapes: Sequence[int] = (), web_config: str = ""
) -> Iterator[str]:
    """Run Prometheus over folder/data, scraping loopback ports each second; give its URL."""
    port = free_port()
    targets = ", ".join(f'"127.0.0.1:{target}"' for target in scrapes)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    (folder / "web.yml").write_text(web_config)
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", "--log.level=warn"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.config.file={folder / 'web.yml'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
        try:
            if "tls" in web_config:
                wait_for(lambda: _listens(port), log.read_text)
            else:
                wait_for(lambda: answers(port, "/-/ready"), log.read_text)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def backfill(folder: Path, lines: Sequence[str]) -> None:
    """Write a history into the data folder, as Prometheus's own tool does it."""
    text = folder / "history.txt"
    text.write_text("\n".join([*lines, "# EOF", ""]))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text)]
    done = subprocess.run(
        [*command, str(folder / "data")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def with_history(folder: Path, *engines: PastEngine, web_config: str = "") -> Iterator[str]:
    """Run a Prometheus that knows the past of some engines; give its URL."""
    backfill(folder, [line for engine in engines for line in engine.lines()])
    with prometheus(folder, web_config=web_config) as url:
        yield url


def scraped(url: str, model: str | None = None, **labels: str) -> Scraped:
    """Return what is asked of which Prometheus."""
    return Scraped(url, Selection(model, None, labels))


def read(url: str, model: str, engine: str | None = None, **more: Any) -> Trace:
    """Return the trace of the two hours in steps of 30 s."""
    asked: dict[str, Any] = {"since_s": 2 * HOUR_S, "step_s": 30, "until_s": END_S}
    return trace_from_prometheus(Scraped(url, Selection(model, engine)), **(asked | more))


def refused(of: str | Scraped, **more: Any) -> UsageError:
    """Return the error that asking for the two hours ends with."""
    asked: dict[str, Any] = {"since_s": 2 * HOUR_S, "step_s": 30, "until_s": END_S}
    with pytest.raises(UsageError) as caught:
        trace_from_prometheus(Scraped(of) if isinstance(of, str) else of, **(asked | more))
    assert caught.value.exit_code == 2
    return caught.value


class Page:
    """A page over HTTP that the test changes, and that counts who looked."""

    def __init__(self) -> None:
        self.text, self.seen = "", 0
        page, self._lock = self, threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                with page._lock:
                    self.wfile.write(page.text.encode())
                    page.seen += 1

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def show(self, text: str) -> None:
        """Show a text until it was looked at."""
        with self._lock:
            self.text, before = text, self.seen
        wait_for(lambda: self.seen > before)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
