"""A real vLLM API server on the demo model, and a client that speaks plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from tuner.engine.demo import demo_engine_args
from tuner.recorder.settings import FILE, KEY, MAX_BYTES
from tuner.replay.server.process import free_port

PATIENCE_S = 420.0
MODEL = "demo"
MIDDLEWARE = ("--middleware", "tuner.recorder.TraceRecorder")
MODULE = ("-m", "vllm.entrypoints.openai.api_server")
SEVERAL = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args()
    ServeSubcommand().validate(args)
    ServeSubcommand.cmd(args)
"""
"""`vllm serve`, whose own command asks for a distribution that CPU builds do not have."""


@contextmanager
def serving(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = MODULE,
    python: Path = Path(sys.executable),
) -> Iterator[int]:
    """Run an API server until the block ends, and give its port.

    With this environment's own Python it needs the doors of a recorder that is installed here.
    """
    if python == Path(sys.executable):
        assert entry_points(group="vllm.stat_logger_plugins", name="tune_recorder"), (
            "no recorder is installed here: make setup, or pip install -e ./tuner/recorder"
        )
    port = free_port()
    config = folder / "server.yaml"
    config.write_text(yaml.safe_dump({**demo_engine_args(), "served-model-name": MODEL}))
    command = [str(python), *program, "--config", str(config), "--port", str(port)]
    outside = {k: v for k, v in os.environ.items() if k not in {FILE, KEY, MAX_BYTES}}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *arguments],
            cwd=folder,
            env={**outside, "VLLM_NO_USAGE_STATS": "1", **(environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        (folder / "server.pid").write_text(str(process.pid))
        try:
            _wait(process, port, folder / "server.log")
            yield port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline_s, log.read_text()[-3000:]
        try:
            if posted(port, "/health", None)[0] == 200:
                return
        except ConnectionError:
            time.sleep(0.2)


def posted(
    port: int, path: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Return status and body of one request; a GET without a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        sent = None if body is None else json.dumps(body)
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request("GET" if body is None else "POST", path, sent, all_headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wanted(prompt: object, tokens: int, **more: object) -> dict[str, object]:
    """Return a request for exactly so many tokens."""
    plain = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {**plain, "prompt": prompt, **more}


def completed(port: int, prompt: object, tokens: int, **more: object) -> dict[str, Any]:
    """Return the answer to a completion that is not streamed."""
    status, content = posted(port, "/v1/completions", wanted(prompt, tokens, **more))
    assert status == 200, content
    answer: dict[str, Any] = json.loads(content)
    return answer


def left_midway(port: int, prompt: object, tokens: int, *, chunks: int) -> None:
    """Begin a streamed completion and go away after some chunks; 0 leaves before any."""
    body = json.dumps(wanted(prompt, tokens, stream=chunks > 0)).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        line.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        if not chunks:
            time.sleep(1.0)
            return
        seen = b""
        while seen.count(b"data: ") < chunks:
            got = line.recv(65536)
            assert got, seen
            seen += got
