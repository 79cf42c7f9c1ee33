"""What comes along is complete: model, tokenizer, and where the samples lie."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tuner.demo import DEMO_MODEL_DIR, bundled, demo_engine_args
from tuner.demo_tokenizer import VOCAB_SIZE, tokenizer_json, write_tokenizer
from tuner.emit.vllm import render
from tuner.errors import UsageError


def test_the_tokenizer_in_the_package_is_the_one_its_script_writes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (DEMO_MODEL_DIR / made.name).read_bytes()


def test_every_token_id_is_below_the_models_vocabulary() -> None:
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    model = tokenizer_json()["model"]
    assert isinstance(model, dict)
    assert sorted(model["vocab"].values()) == list(range(VOCAB_SIZE))
    assert config["vocab_size"] == VOCAB_SIZE
    assert (config["bos_token_id"], config["eos_token_id"]) == (
        model["vocab"]["<s>"],
        model["vocab"]["</s>"],
    )


@pytest.mark.engine
def test_any_text_survives_the_demo_tokenizer() -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    tokenizer = auto.from_pretrained(str(DEMO_MODEL_DIR))
    for text in ("Guten Tag, what's 1234?", "ünïcode 漢字 \t\n 🙂", "A"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < VOCAB_SIZE
    assert len(tokenizer) == VOCAB_SIZE


def test_what_is_bundled_is_found_and_what_is_not_is_refused() -> None:
    assert bundled("traces").is_dir()
    with pytest.raises(UsageError, match="expected profiles or traces"):
        bundled("tests")


def ask(url: str, question: dict[str, object] | None = None) -> bytes:
    """Return what the server on this machine answers."""
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own server
        body: bytes = answer.read()
    return body


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when the server is healthy, or fail when it dies first."""
    while server.poll() is None:
        try:
            ask(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server ended with status {server.returncode}")


@pytest.mark.engine
@pytest.mark.slow
def test_a_server_started_from_an_emitted_file_answers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = demo_engine_args() | {"host": "127.0.0.1", "port": port, "max-model-len": 4096}
    path = tmp_path / "best.yaml"
    path.write_text(render(values, 16, 2048, []))
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--config",
        str(path),
    ]
    environ = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, server)
            question = {"model": str(DEMO_MODEL_DIR), "prompt": "Hello", "max_tokens": 4}
            answer = json.loads(ask(f"{url}/v1/completions", question))
            assert answer["usage"]["completion_tokens"] <= 4
            assert answer["choices"][0]["finish_reason"] in {"length", "stop"}
        finally:
            server.terminate()
            server.wait(60)
