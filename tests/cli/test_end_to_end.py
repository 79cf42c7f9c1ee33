"""The command as a user runs it: real files in, a real engine, a file that a server takes."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.paths import ROOT
from tuner.replay.server.process import free_port

TRACE = ROOT / "traces" / "translation.jsonl"
TUNE = [sys.executable, "-c", "from tuner.cli import main; main()"]
REPLAY_KEYS = [
    *("engine", "limits", "load_model", "offered", "completed", "refused", "timed_out"),
    *("aborted", "requests_per_s", "output_tokens_per_s", "ttft_s", "tpot_s", "itl_s"),
    *("e2e_s", "decode_step_s", "queue_depth", "running", "gpu_cache_usage_perc"),
    *("preemptions", "prefix_cache_hit_ratio", "sustained", "caveats", "steps"),
    *("busy_s", "virtual_duration_s", "wall_s"),
]
SECRET = "hf_never_to_be_seen"
PATIENCE_S = 180.0

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]


def typed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `tune` in a folder of its own."""
    return subprocess.run(
        [*TUNE, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the main job once and return the folder it ran in."""
    folder = tmp_path_factory.mktemp("tuned")
    done = typed(
        folder,
        # A quarter of the load, so that a machine that is busy with other things has time.
        *("--trace", str(TRACE), "--window", "peak:3s", "--budget", "60s", "--load", "0.25"),
        *("--max-num-seqs", "4,16", "-o", "best.yaml", "--engine-arg", f"hf-token={SECRET}"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (folder / "talk").write_text(done.stderr)
    return folder


@pytest.fixture(scope="module")
def run_dir(tuned: Path) -> Path:
    """Return the directory of the run."""
    (found,) = (tuned / "runs").iterdir()
    return found


@pytest.mark.end_to_end
def test_the_job_ends_near_its_budget_with_one_engine_start_but_for_the_cold_ones(
    run_dir: Path,
) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert result["state"] == "complete"
    made = result["provenance"]
    tried = [trial for trial in result["trials"] if trial["phase"] == "cold"]
    cold = {(t["max_num_seqs"], t["max_num_batched_tokens"], t["race_round"]) for t in tried}
    assert len(cold) in {0, 2}
    assert made["engine_starts"] == 1 + len(cold)
    assert made["engine"]["kind"] == "live"
    assert made["wall_s"] < 60 + 30
    for trial in result["trials"]:
        m = trial["measurement"]
        assert m["offered"] == m["completed"] + m["refused"] + m["timed_out"] + m["aborted"]


@pytest.mark.end_to_end
def test_before_measuring_it_says_what_the_trace_asks_for(tuned: Path) -> None:
    talk = (tuned / "talk").read_text()
    for word in (
        "requests       903",
        "0.25 times the recorded load",
        "busiest second",
        "plan: caps 4, 16",
        "demo model",
    ):
        assert word in talk[: talk.index("calibrating on")]


@pytest.mark.end_to_end
def test_the_engines_log_and_the_run_hold_no_secret(tuned: Path, run_dir: Path) -> None:
    assert (run_dir / "engine.log").stat().st_size > 0
    for path in (p for p in run_dir.rglob("*") if p.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path.name
    assert SECRET not in (tuned / "talk").read_text()
    assert (tuned / "best.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.end_to_end
def test_vllms_own_parser_reads_the_file(tuned: Path) -> None:
    flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    arguments = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parser = flexible()
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    arguments.make_arg_parser(serve)
    read: Any = parser.parse_args(["serve", "--config", str(tuned / "best.yaml")])
    emitted = yaml.safe_load((tuned / "best.yaml").read_text())
    assert read.max_num_seqs == emitted["max-num-seqs"]
    assert read.max_num_batched_tokens == emitted["max-num-batched-tokens"]
    assert (read.load_format, read.enforce_eager) == ("dummy", True)


@pytest.fixture
def server(tuned: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a real API server from the emitted file."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--config", "best.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (tuned / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=tuned, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process, port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def asked(port: int, method: str, path: str, body: dict[str, object] | None = None) -> Any:
    """Return the answer of the server, None while it does not listen."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return json.loads(content) if content else {}
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


def test_a_server_started_from_the_file_answers(
    server: tuple[subprocess.Popen[bytes], int], tuned: Path
) -> None:
    process, port = server
    deadline_s = time.monotonic() + PATIENCE_S
    while asked(port, "GET", "/health") is None:
        assert process.poll() is None, (tuned / "server.log").read_text()[-2000:]
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    model = yaml.safe_load((tuned / "best.yaml").read_text())["model"]
    wanted: dict[str, object] = {"model": model, "prompt": "hello", "max_tokens": 5}
    answer = asked(port, "POST", "/v1/completions", wanted | {"ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 5


def replayed(folder: Path, *arguments: str) -> dict[str, Any]:
    done = typed(folder, "replay", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    ended = found["completed"] + found["refused"] + found["timed_out"] + found["aborted"]
    assert found["offered"] == ended > 0
    return found


def test_replay_prints_one_object_with_the_documented_keys(tmp_path: Path) -> None:
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "1024")
    found = replayed(tmp_path, "--trace", str(TRACE), "--window", "peak:1s", *limits)
    documented = set(REPLAY_KEYS)
    assert set(found) & documented == documented
    assert found["engine"] == "live"
    assert found["limits"] == {"max_num_seqs": 8, "max_num_batched_tokens": 1024}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "decode_step_s"):
        assert {"mean", "p50", "p90", "p95", "p99", "n"} <= set(found[name])
    assert set(found["queue_depth"]) == set(found["running"]) == {"mean", "max"}
    assert set(found["gpu_cache_usage_perc"]) == {"mean", "p99", "max"}
    assert found["running"]["max"] == 8
    assert found["completed"] == found["offered"]
    assert not (tmp_path / "runs").exists()


def test_the_azure_slice_is_replayed(tmp_path: Path, shared_traces: Path) -> None:
    trace = shared_traces / "azure_2023_conv.open.csv"
    found = replayed(
        tmp_path, "--trace", str(trace), "--window", "peak:1s", "--max-num-seqs", "16"
    )
    assert found["completed"] == found["offered"]


def test_the_mooncake_slice_is_replayed_and_what_is_too_long_is_counted(
    tmp_path: Path, shared_traces: Path
) -> None:
    trace = shared_traces / "mooncake_conversation.open.jsonl"
    more = ("--engine-arg", "max-model-len=8192", "--max-num-seqs", "8")
    found = replayed(tmp_path, "--trace", str(trace), "--window", "peak:1s", *more)
    assert found["refused"] > 0
    assert "requests_refused" in found["caveats"]


@pytest.mark.parametrize(
    ("argument", "key", "hint"),
    [
        ("--engine-arg=no-such-key=1", "no-such-key", "compare the key with"),
        ("--engine-arg=root-pth=32", "root-pth", "did you mean root-path?"),
        ("--variant=big:root-pth=32", "root-pth", "did you mean root-path?"),
    ],
)
def test_an_engine_argument_that_vllm_does_not_know_is_named(
    argument: str, key: str, hint: str, tmp_path: Path
) -> None:
    done = typed(tmp_path, "--trace", str(TRACE), argument)
    assert done.returncode == 2
    assert f"vLLM refuses the configuration: unrecognized arguments: --{key}" in done.stderr
    assert f"hint:  {hint}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = typed(tmp_path, "--trace", str(TRACE), "--model", "./model")
    assert done.returncode == 2, done.stderr
    assert "error: vLLM refuses the model or its options" in done.stderr
    assert "hint:  " in done.stderr


def test_a_model_that_is_looked_for_from_another_folder_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = typed(tmp_path, "--trace", str(TRACE), "--model", "tuner/demo_model")
    assert done.returncode == 2, done.stderr
    assert "error: vLLM refuses the model or its options" in done.stderr
    assert f"hint:  tuner/demo_model is no folder in {tmp_path}" in done.stderr


def test_an_engine_that_cannot_start_is_reported_in_its_own_words(tmp_path: Path) -> None:
    arguments = ("--trace", str(TRACE), "--engine-arg", "kv-cache-memory-bytes=1000")
    done = typed(tmp_path, *arguments)
    assert done.returncode == 4, done.stderr
    assert "No available memory for the cache blocks" in done.stderr
    (log,) = (tmp_path / "runs").glob("*/engine.log")
    assert str(log.relative_to(tmp_path)) in done.stderr.splitlines()[-1]
    assert log.stat().st_size > 0


def test_doctor_says_what_is_there_and_exits_by_it(tmp_path: Path) -> None:
    done = typed(tmp_path, "doctor")
    assert done.returncode == (2 if "MISSING" in done.stdout else 0)
    assert "vllm" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        (("data-parallel-size=2",), "data-parallel-size 2", "tune trace thin --replicas 2"),
        (("nnodes=2", "tensor-parallel-size=2"), "nnodes 2", "leave nnodes and node-rank out"),
        (("headless=true",), "is headless", "leave headless out"),
    ],
)
def test_an_engine_that_would_wait_for_others_for_ever_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], named: str, hint: str
) -> None:
    more = [word for one in arguments for word in ("--engine-arg", one)]
    done = typed(tmp_path, "replay", "--trace", str(TRACE), "--window", "peak:2s", *more)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert hint in " ".join(done.stderr.split())


def test_interrupted_before_anything_was_measured_it_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["--trace", str(TRACE), "--window", "peak:3s", "--budget", "90s"]
    process = subprocess.Popen(
        [*TUNE, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while not list(tmp_path.glob("runs/*/run.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    # A moment later the engine is starting, which takes seconds.
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "interrupted before anything was measured" in said
    assert list(tmp_path.iterdir()) == []


def test_what_vllm_said_when_it_refused_a_configuration_stays(tmp_path: Path) -> None:
    refused = ("--engine-arg", "max-model-len=99999999")
    done = typed(tmp_path, "--trace", str(TRACE), "--budget", "90s", *refused)
    assert done.returncode == 2, done.stderr
    assert "vLLM refuses the model or its options" in done.stderr
    (log,) = tmp_path.glob("runs/*/engine.log")
    assert log.stat().st_size > 0
