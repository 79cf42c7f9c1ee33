"""Whatever happens to a recording, serving goes on, and what is on disk is whole.

Most of it is a small application by vLLM's ways, killed again and again; at the end hostile
clients meet a real vLLM server that is recorded, whose answers must be what they were.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.fault_parts import (
    PATIENCE_S,
    Marked,
    Tally,
    clock_of,
    fill,
    how_many,
    marked,
    small_disk,
)
from support.paths import TESTS
from support.prometheus_parts import answers
from support.recorder_parts import recorded
from support.recorder_server import MIDDLEWARE, completed, posted, serving, wanted
from tuner.recorder.settings import FILE, MAX_BYTES
from tuner.replay.server.process import free_port
from tuner.traffic.formats import ReadOptions, read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]

DISK_KIB = 2048
WRITTEN_AFTER_S = 1.5
"""Longer than the recorder gathers before it writes, on a busy machine."""


@dataclass(slots=True)
class Clients:
    """Clients of every kind: who reads to the end, leaves, is refused or sends rubbish."""

    port: int
    rng: random.Random
    done_at_s: list[float] = field(default_factory=list)
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    is_over: threading.Event = field(default_factory=threading.Event)

    def work(self, number: int) -> None:
        """Send requests until it is over."""
        rng = random.Random(f"{self.rng.random()} {number}")
        while not self.is_over.is_set():
            kind = rng.choice(("read", "read", "read", "refused", "leaves", "rubbish"))
            with suppress(OSError, http.client.HTTPException):
                getattr(self, f"_{kind}")(rng)
                self.seen[kind] += 1
            time.sleep(0.005)

    def _asked(self, body: dict[str, Any], name: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json", "X-Request-Id": name}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _read(self, rng: random.Random) -> None:
        body = {"prompt": [7] * rng.randrange(1, 40), "max_tokens": rng.randrange(1, 5)}
        status, content = self._asked(body, str(rng.random()))
        if status != 200 or not content.endswith(b"data: [DONE]\n\n"):
            self.wrong.append(f"{status} {content[-80:]!r}")
        self.done_at_s.append(time.monotonic())

    def _refused(self, _: random.Random) -> None:
        status, _content = self._asked({"prompt": [7], "bad": True}, "the-same")
        self.refused += status == 400

    def _leaves(self, rng: random.Random) -> None:
        body = json.dumps({"prompt": [7], "max_tokens": 50, "pause_s": 0.02}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as line:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            line.sendall(
                head.encode() + b"\r\n\r\n" + body[: rng.choice((len(body), len(body) // 2))]
            )
            time.sleep(rng.uniform(0, 0.1))

    def _rubbish(self, rng: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as line:
            line.sendall(rng.choice((b"\0" * 999, b"GET / HTTP/9\r\n\r\n", rng.randbytes(200))))
            line.settimeout(1)
            line.recv(99)

    @contextmanager
    def at_work(self, count: int = 6) -> Iterator[None]:
        """Have so many of them send until the block ends."""
        with ThreadPoolExecutor(count) as pool:
            for number in range(count):
                pool.submit(self.work, number)
            try:
                yield
            finally:
                self.is_over.set()


def check_files(folder: Path) -> int:
    """Every file is whole lines of a trace that is read; return how many rows there are."""
    rows = 0
    for path in sorted(folder.glob("prod*.jsonl")):
        content = path.read_bytes()
        assert content.endswith(b"\n"), f"{path.name} ends with {content[-80:]!r}"
        header, found = recorded(path)
        assert header["recorded_by"]
        rows += len(found)
        if found:
            assert len(read_trace(path, options=ReadOptions())) > 0
    return rows


@dataclass(slots=True)
class Served:
    """The application, started anew after each fault, all recording under one name."""

    ours: Marked
    folder: Path
    environment: dict[str, str]
    port: int = 0
    process: Any = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.port = free_port()
        more = {**self.environment, FILE: str(self.folder / "prod.jsonl"), MAX_BYTES: "60000"}
        command = [sys.executable, "-m", "support.fault_server", str(self.port)]
        self.process = self.ours.start(command, self.folder.parent / "server.log", more)
        deadline_s = time.monotonic() + PATIENCE_S
        while not answers(self.port, "/health"):
            assert time.monotonic() < deadline_s, self.said()
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        """Return its last words."""
        return (self.folder.parent / "server.log").read_text(errors="replace")[-2000:]


Fault = Callable[[random.Random, Served], None]


def _killed(_: random.Random, server: Served) -> None:
    server.process.kill()


def _ended(_: random.Random, server: Served) -> None:
    server.process.terminate()


def _disk_full(rng: random.Random, server: Served) -> None:
    filler = fill(server.folder)
    time.sleep(rng.uniform(0.3, 1.5))
    filler.unlink()
    time.sleep(0.5)


def _stopped(rng: random.Random, server: Served) -> None:
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.1, 1.0))
    server.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)


def _clock_set(rng: random.Random, server: Served) -> None:
    off = Path(server.environment["TUNE_FAULT_CLOCK"])
    off.write_text(str(rng.choice((-86_400, -5, 5, 864_000))))
    time.sleep(0.5)


def _moved_away(_: random.Random, server: Served) -> None:
    for path in server.folder.glob("prod*.jsonl"):
        path.unlink()
    time.sleep(0.5)


FAULTS: dict[str, Fault] = {
    "recorded: server killed": _killed,
    "recorded: server told to end": _ended,
    "recorded: disk full, then not": _disk_full,
    "recorded: stopped and continued": _stopped,
    "recorded: clock set": _clock_set,
    "recorded: files removed": _moved_away,
}
ENDING = {_killed, _ended}


def test_a_recording_survives_what_happens_to_its_server(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally, kinds = Tally(), list(FAULTS)
    place = tmp_path / "disk"
    for number in range(how_many(request, 12, 0.1)):
        kind, rng = kinds[number % len(kinds)], random.Random(f"recording {number}")
        with (
            marked("recorded") as ours,
            small_disk(place, DISK_KIB) as folder,
            clock_of(tmp_path) as (environment, off),
        ):
            off.unlink(missing_ok=True)
            server = Served(ours, folder, environment)
            with tally.fault(kind, f"number {number}"):
                one_recording(rng, server, FAULTS[kind])
    tally.report(record_property)


def one_recording(rng: random.Random, server: Served, fault: Fault) -> None:
    """Record, let it happen, and check what is on disk and what clients got."""
    server.start()
    clients = Clients(server.port, rng)
    with clients.at_work():
        time.sleep(rng.uniform(0.3, 2.0))
        at_s = time.monotonic()
        fault(rng, server)
        if fault not in ENDING:
            assert server.process.poll() is None, server.said()
    if fault in ENDING:
        server.process.wait(30)
    else:
        # Serving was not touched: who read to the end got all of it, before and after.
        assert clients.wrong == []
        assert any(one > at_s for one in clients.done_at_s)
        assert answers(server.port, "/health")
        server.process.terminate()
        server.process.wait(30)
    assert "Traceback" not in server.said(), server.said()
    rows = check_files(server.folder)
    if fault is _killed:
        old = sum(one < at_s - WRITTEN_AFTER_S for one in clients.done_at_s)
        assert rows >= old, f"{rows} rows of {old} that were answered long before"
    elif fault in {_ended, _stopped, _clock_set}:
        assert rows >= len(clients.done_at_s), f"{rows} of {len(clients.done_at_s)}"
    before = {path: path.read_bytes() for path in server.folder.glob("prod*.jsonl")}
    server.start()
    again = Clients(server.port, rng)
    again._read(rng)
    assert again.wrong == []
    server.process.terminate()
    server.process.wait(30)
    # What was recorded before stays as it is, beside what came now.
    assert {path: path.read_bytes() for path in before} == before
    assert check_files(server.folder) == rows + 1


# --- a real server ---

HOSTILE: tuple[dict[str, Any], ...] = (
    {"prompt": [5, 2**32] * 200},
    {"prompt": [5, -1]},
    {"prompt": [5, 600_000]},
    {"prompt": "x" * 200_000},
    {"prompt": [[7] * 30, [7, 600_000]]},
    {"structured_outputs": {"grammar": "root ::= ("}},
    {"structured_outputs": {"regex": "(" * 99}},
    {"min_tokens": 9, "max_tokens": 3},
    {"n": 10_000},
    {"model": "no such model"},
    {"logit_bias": {"99999999": 5}},
    {"stop": ["x"] * 5000},
    {"temperature": float("nan")},
    {"max_tokens": -1},
    {"cache_salt": "s" * 100_000},
    {"user": "\ud800"},
)
HEADERS = ("the-same", "\x7f" * 40, "x" * 8000, "../../etc/passwd", "é")


@pytest.mark.engine
@pytest.mark.model
def test_hostile_clients_change_nothing_for_others_on_a_real_recorded_server(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally, wanted_faults = Tally(), how_many(request, 60, 0.2)
    prompts = [[3 + n] * (20 + 9 * n) for n in range(6)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with small_disk(tmp_path / "disk", 4096) as folder:
        prod = folder / "prod.jsonl"
        doors = (*MIDDLEWARE, "--middleware", "support.recorder_probe.Held")
        environment = {FILE: str(prod), "PYTHONPATH": path}
        with serving(tmp_path, *doors, environment=environment) as port:

            def texts() -> list[str]:
                return [completed(port, one, 8)["choices"][0]["text"] for one in prompts]

            before = texts()
            for number in range(wanted_faults):
                rng = random.Random(f"hostile {number}")
                body = wanted([7] * 20, 4) | rng.choice(HOSTILE)
                body |= {"stream": True} if rng.random() < 0.3 else {}
                with tally.fault(
                    "recorded vLLM: hostile request", f"number {number}: {body!r:.99}"
                ):
                    sent(port, body, rng.choice(HEADERS))
                    if number % 10 == 9:
                        assert texts() == before
                        assert posted(port, "/health", None)[0] == 200
            with tally.fault("recorded vLLM: disk full, then not", ""):
                filler = fill(folder)
                assert texts() == before
                time.sleep(1.0)
                filler.unlink()
                assert texts() == before
            with tally.fault("recorded vLLM: memory left behind", "", count=0):
                deadline_s, held = time.monotonic() + 20, {"prompts": -1}
                while held["prompts"] and time.monotonic() < deadline_s:
                    held = json.loads(posted(port, "/held", None)[1])
                assert held == {"prompts": 0, "bytes": 0}
        rows = check_files(folder)
        assert rows >= 6
    tally.report(record_property)


def sent(port: int, body: dict[str, Any], name: str) -> None:
    """Send a request that may well be refused; a connection that is closed is no matter."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest("POST", "/v1/completions")
        data = json.dumps(body).encode("utf-8", "surrogatepass")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("X-Request-Id", name.encode("utf-8"))
        connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException, ValueError):
        pass
    finally:
        connection.close()


def test_the_oracle_sees_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    row = '{"arrived_at_s": 1.0, "input_length": 4, "output_length": 9, "status": "stop"}\n'
    path.write_text('{"trace_header": {"version": 1, "recorded_by": "x"}}\n' + row)
    assert check_files(tmp_path) == 1
    path.write_text(path.read_text() + row[:20])
    with pytest.raises(AssertionError, match="ends with"):
        check_files(tmp_path)
