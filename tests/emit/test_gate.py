"""A gate is written so that what takes it does, and says what it leaves out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import pytest
import yaml

from support.gate_parts import a_gate
from support.prometheus_parts import answers, wait_for
from tuner.emit.gate import NO_GATE, WRITERS
from tuner.emit.names import GateFormat
from tuner.errors import UsageError
from tuner.gate import SETTINGS, GateLimits
from tuner.replay.server.process import free_port

ANSWER = replace(a_gate(), gate=GateLimits(6, 3, 0.25, 100), capacity=1.25, in_flight=5.5)


def test_every_form_is_written_with_what_it_rests_on() -> None:
    assert set(WRITERS) == set(GateFormat)
    for chosen, write in WRITERS.items():
        comments = [line for line in write(ANSWER).splitlines() if line.startswith("# ")]
        text = "\n".join(comments)
        assert "max-num-seqs 8" in text, chosen
        assert "P(better) 1.00" in text, chosen
        assert str(ANSWER.gate) in text, chosen
        assert f"({ANSWER.loads[-1].gained_per_s:+.3g}/s; on other traffic" in text, chosen


def test_a_file_says_where_no_gate_is_better() -> None:
    useless = [replace(at, odds=0.5) for at in ANSWER.loads]
    for chosen, write in WRITERS.items():
        assert f"# {NO_GATE}" in write(replace(ANSWER, loads=tuple(useless))), chosen
        assert NO_GATE not in write(ANSWER), chosen


def test_the_middleware_reads_what_is_written_for_it() -> None:
    last = WRITERS[GateFormat.MIDDLEWARE](ANSWER).splitlines()[-1]
    name, value = last.split("=", 1)
    assert name == SETTINGS
    assert GateLimits.parse(value) == ANSWER.gate


def test_vllm_bounds_the_engine_and_the_queue_together() -> None:
    assert yaml.safe_load(WRITERS[GateFormat.VLLM](ANSWER)) == {"max-num-queued-reqs": 9}


@pytest.mark.engine
def test_vllm_takes_its_own_limit() -> None:
    from tuner.engine.compat.serve import parse_serve_values

    values = yaml.safe_load(WRITERS[GateFormat.VLLM](ANSWER))
    assert parse_serve_values(values).max_num_queued_reqs == 9


class SlowUpstream(BaseHTTPRequestHandler):
    """Answers once all requests are there or refused, as an engine that is busy until then."""

    held: ClassVar[list[str]] = []
    free: ClassVar[Event] = Event()

    def do_GET(self) -> None:
        """Hold a completion until the engine is free."""
        if self.path.startswith("/v1/"):
            self.held.append(self.path)
            self.free.wait(30)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Take what is sent, as by those who ask for no answer."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


def an_nginx(folder: Path, port: int, upstream: int) -> list[str]:
    """Return the command that serves the emitted file. Skips where there is no nginx."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("no nginx here: apt-get install nginx-light")
    text = WRITERS[GateFormat.NGINX](ANSWER)
    (folder / "gate.conf").write_text(
        text.replace("listen 8080", f"listen 127.0.0.1:{port}").replace(
            "127.0.0.1:8000", f"127.0.0.1:{upstream}"
        )
    )
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n"
        f"client_body_buffer_size 4m;\n{paths}include {folder}/gate.conf;\n}}\n"
    )
    return [nginx, "-e", "stderr", "-p", str(folder), "-c", "nginx.conf"]


def status_of(
    port: int, method: str = "GET", path: str = "/v1/completions", body: bytes = b""
) -> int:
    """Return the status that nginx answers a request with."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    finally:
        connection.close()


def test_nginx_lets_in_what_the_gate_holds_and_refuses_the_rest(tmp_path: Path) -> None:
    port = free_port()
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowUpstream) as upstream:
        Thread(target=upstream.serve_forever, daemon=True).start()
        nginx = subprocess.Popen(an_nginx(tmp_path, port, upstream.server_port))
        try:
            wait_for(lambda: answers(port, "/health") or nginx.poll() is not None)
            with ThreadPoolExecutor(12) as clients:
                asked = [clients.submit(status_of, port) for _ in range(12)]
                done = SlowUpstream.held
                wait_for(lambda: len(done) + sum(each.done() for each in asked) >= 12)
                SlowUpstream.free.set()
            # Six in flight and three in the queue, which nginx counts together.
            assert sorted(each.result() for each in asked) == [200] * 9 + [503] * 3
            assert status_of(port, "POST", "/tokenize", b"x" * (2 << 20)) == 200
        finally:
            nginx.terminate()
            nginx.wait(30)
            upstream.shutdown()


def test_nginx_gates_every_path_on_which_vllm_generates_and_no_other() -> None:
    (place,) = re.findall(r"location ~ (\S+) {", WRITERS[GateFormat.NGINX](ANSWER))
    for path in ("/invocations", "/inference/v1/generate", "/v1/chat/completions/batch"):
        assert re.search(place, path), path
    for path in ("/tokenize", "/v1/chat/completions/render", "/v1/messages/count_tokens"):
        assert not re.search(place, path), path


def test_envoy_never_gets_a_queue_of_nothing_which_would_refuse_all() -> None:
    for gate, pending in ((ANSWER.gate, 3), (GateLimits(6), 1)):
        (cluster,) = yaml.safe_load(WRITERS[GateFormat.ENVOY](replace(ANSWER, gate=gate)))
        (bounds,) = cluster["circuit_breakers"]["thresholds"]
        assert bounds["max_connections"] == 6
        assert bounds["max_pending_requests"] == pending


def test_kubernetes_takes_the_autoscaler() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    hpa = yaml.safe_load(WRITERS[GateFormat.HPA](ANSWER))
    validate(hpa, "1.30", strict=True)
    # Four fifths of what the gate lets in are less than the requests in flight at capacity.
    assert hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "4"
    keda = yaml.safe_load(WRITERS[GateFormat.KEDA](ANSWER))
    assert keda["spec"]["triggers"][0]["metadata"]["threshold"] == "4"


def test_nothing_scales_to_slos_that_hold_at_no_load() -> None:
    hopeless = replace(ANSWER, capacity=None, in_flight=None)
    for chosen in (GateFormat.KEDA, GateFormat.HPA):
        with pytest.raises(UsageError, match="hold at no load"):
            WRITERS[chosen](hopeless)
