"""Recording real vLLM servers: what they served stands in the file, exactly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.drafting import accepting_environment, drafting
from support.live_parts import GEMMA, LFM
from support.paths import TESTS
from support.recorder_parts import recorded, rows_of
from support.recorder_probe import REFUSING
from support.recorder_server import (
    MIDDLEWARE,
    SEVERAL,
    completed,
    left_midway,
    posted,
    serving,
    wanted,
)
from tuner.engine.demo import DEMO_MODEL_DIR, demo_engine_args
from tuner.engine.shape import Drafts
from tuner.recorder.settings import FILE, MAX_BYTES, STEPS
from tuner.shadow.profiles import read_profile
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.traces import Aborted

pytestmark = [
    pytest.mark.engine,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

DETAILS = "--enable-logging-iteration-details"
TEXT = "the quick brown fox jumps over the lazy dog "


def prompt_of(length: int, start: int = 3) -> list[int]:
    return [start + i % 500 for i in range(length)]


def names_of(prod: Path) -> list[str]:
    return sorted(path.name for path in prod.parent.glob("prod*.jsonl"))


class Server:
    """A server under record, and how many rows were seen of it so far."""

    def __init__(self, port: int, prod: Path) -> None:
        self.port, self.prod = port, prod
        self.seen = 0

    def new_rows(self, count: int) -> list[dict[str, Any]]:
        """Return the rows that came since the last call, in the order of their arrival."""
        rows = rows_of(self.prod, self.seen + count)[self.seen :]
        self.seen += len(rows)
        assert len(rows) == count
        return sorted(rows, key=lambda row: row["arrived_at_s"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve with both doors open, and a look at what the recorder holds."""
    folder = tmp_path_factory.mktemp("both")
    prod = folder / "prod.jsonl"
    environment = {FILE: str(prod), **python_path(TESTS)}
    doors = (*MIDDLEWARE, "--middleware", "support.recorder_probe.Held")
    with serving(folder, *doors, environment=environment) as port:
        yield Server(port, prod)


def python_path(first: Path) -> dict[str, str]:
    """Return the environment of a server that finds modules in this folder too."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(first), *([before] if before else [])])}


def test_counts_are_those_the_server_tells(both: Server) -> None:
    answers = [
        completed(both.port, TEXT * n, tokens) for n, tokens in [(1, 5), (9, 1), (3, 20)]
    ]
    shown = [answer["usage"] for answer in answers]
    rows = both.new_rows(3)
    assert [row["input_length"] for row in rows] == [one["prompt_tokens"] for one in shown]
    assert [row["output_length"] for row in rows] == [5, 1, 20]
    assert {row["status"] for row in rows} == {"length"}
    for row in rows:
        assert row["queue_s"] + row["prefill_s"] <= row["ttft_s"] <= row["e2e_s"]
        assert row["ttft_s"] + row["decode_s"] == pytest.approx(row["e2e_s"], abs=1e-5)
    header = recorded(both.prod)[0]
    assert header["vllm"] == __import__("vllm").__version__
    assert (header["model"], header["counts_from"], header["lacks"]) == ("demo", "engine", [])


def test_streams_without_usage_are_counted_exactly(both: Server) -> None:
    status, content = posted(both.port, "/v1/completions", wanted(TEXT, 17, stream=True))
    assert status == 200
    assert b'"usage":{' not in content
    chat = {"messages": [{"role": "user", "content": TEXT}], "stream": True}
    body = wanted(None, 9) | chat
    body.pop("prompt")
    assert posted(both.port, "/v1/chat/completions", body)[0] == 200
    assert [row["output_length"] for row in both.new_rows(2)] == [17, 9]


def test_nothing_of_the_client_is_in_the_file(both: Server) -> None:
    body = wanted(TEXT, 4, user="alice")
    status, content = posted(both.port, "/v1/completions", body, {"X-Request-Id": "alice-7"})
    assert status == 200
    assert json.loads(content)["id"] == "cmpl-alice-7"
    (row,) = both.new_rows(1)
    assert len(row["request_id"]) == 16
    text = both.prod.read_text()
    for secret in ("alice", "quick", json.loads(content)["choices"][0]["text"][:10]):
        assert secret not in text


def test_shared_blocks_are_the_tokens_that_vllm_found_in_its_cache(both: Server) -> None:
    size = recorded(both.prod)[0]["block_size"]
    base = prompt_of(4 * size, start=700)
    lengths = [4 * size, 3 * size + 7, 2 * size - 1, size, 7]
    prompts = [base[:n] + prompt_of(2 * size, start=1300 + 50 * n % 700) for n in lengths]
    prompts += [base[:n] for n in lengths]
    for prompt in prompts:
        completed(both.port, prompt, 2)
    rows = both.new_rows(len(prompts))
    known: set[int] = set()
    for row, prompt in zip(rows, prompts, strict=True):
        ids = row["hash_ids"]
        assert len(ids) == len(prompt) // size
        hits = next((at for at, one in enumerate(ids) if one not in known), len(ids))
        # vLLM computes at least one token anew, so a prompt of cached blocks alone loses one.
        reusable = min(hits, (len(prompt) - 1) // size)
        assert row["cached_tokens"] == reusable * size
        known.update(ids)


def test_each_answer_to_one_prompt_is_a_row(both: Server) -> None:
    size = recorded(both.prod)[0]["block_size"]
    prompt = prompt_of(size + 5, start=40)
    completed(both.port, prompt, 6, n=3, temperature=1.0)
    completed(both.port, [prompt, prompt_of(9)], 6)
    rows = both.new_rows(5)
    assert [row["output_length"] for row in rows] == [6] * 5
    assert len({row["request_id"] for row in rows}) == 3
    assert len({tuple(row["hash_ids"]) for row in rows if row["input_length"] > 9}) == 1


@pytest.mark.parametrize("chunks", [5, 0])
def test_clients_that_leave_are_recorded_with_what_they_cost(both: Server, chunks: int) -> None:
    left_midway(both.port, prompt_of(20), 4000, chunks=chunks)
    (row,) = both.new_rows(1)
    assert (row["status"], row["input_length"]) == ("abort", 20)
    assert max(chunks, 1) <= row["output_length"] < 4000
    assert row["ttft_s"] < row["e2e_s"]


def test_refused_requests_are_no_rows_and_huge_ones_no_harm(both: Server) -> None:
    assert posted(both.port, "/v1/completions", wanted(TEXT, -1))[0] == 400
    assert posted(both.port, "/v1/completions", {"nonsense": "x" * (32 << 20)})[0] == 400
    assert posted(both.port, "/v1/completions", wanted(prompt_of(40_000), 5))[0] == 400
    assert posted(both.port, "/no/such/path", {})[0] == 404
    completed(both.port, TEXT, 2)
    assert [row["output_length"] for row in both.new_rows(1)] == [2]


@pytest.mark.parametrize("token_id", [1 << 32, 1 << 70, 600_000])
def test_a_token_id_that_is_refused_ends_no_recording(both: Server, token_id: int) -> None:
    body = wanted([5, token_id] * 200, 3)
    assert posted(both.port, "/v1/completions", body)[0] == 400
    size = recorded(both.prod)[0]["block_size"]
    for _ in range(6):
        completed(both.port, prompt_of(size + 3), 2)
    assert [len(row["hash_ids"]) for row in both.new_rows(6)] == [1] * 6


def held(server: Server) -> dict[str, int]:
    """Return how many prompts the recorder of a server holds, when they are none or in 10 s."""
    deadline_s = time.monotonic() + 10
    while True:
        status, content = posted(server.port, "/held", None)
        assert status == 200
        found: dict[str, int] = json.loads(content)
        if not found["prompts"] or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"structured_outputs": {"grammar": "root ::= ("}},
        {"structured_outputs": {"grammar": "root ::= ("}, "stream": True},
        {"prompt": [[7] * 30, [7, 600_000]]},
    ],
)
def test_refused_requests_of_one_id_leave_no_prompt_open(
    both: Server, bad: dict[str, object]
) -> None:
    def refused() -> bytes:
        body, headers = wanted(TEXT, 3) | bad, {"X-Request-Id": "the-same"}
        status, content = posted(both.port, "/v1/completions", body, headers)
        assert status == 400 or b'"error"' in content
        return content

    for _ in range(100):
        refused()
    assert held(both) == {"prompts": 0, "bytes": 0}
    completed(both.port, TEXT, 2)
    rows = rows_of(both.prod, both.seen + 1)[both.seen :]
    both.seen += len(rows)
    # Prompts beside a bad one may have run before it was refused.
    assert len(rows) == 1 or "prompt" in bad
    assert rows[-1]["output_length"] == 2


def test_what_a_server_recorded_is_a_trace(both: Server) -> None:
    header, rows = recorded(both.prod)
    trace = read_trace(both.prod, options=ReadOptions(aborted=Aborted.KEEP))
    assert len(trace) == len(rows)
    assert trace.notes.aborted == sum(row["status"] == "abort" for row in rows) > 0
    assert trace.prompt_tokens.sum() == sum(row["input_length"] for row in rows)
    assert trace.output_tokens.sum() == sum(row["output_length"] for row in rows)
    assert trace.hashes is not None
    assert trace.hashes.block_size == header["block_size"]
    assert trace.hash_scope == header["hash_scope"]
    assert trace.zero_s == min(row["arrived_at_s"] for row in rows)


def test_alone_the_middleware_counts_by_usage(tmp_path: Path) -> None:
    prod = tmp_path / "prod.jsonl"
    environment = {FILE: str(prod), "VLLM_PLUGINS": "none"}
    with serving(tmp_path, *MIDDLEWARE, environment=environment) as port:
        size_of = {}
        kinds: list[tuple[int, dict[str, object]]] = [
            (5, {}),
            (6, {"stream": True, "stream_options": {"include_usage": True}}),
            (7, {"stream": True}),
        ]
        for tokens, more in kinds:
            prompt = prompt_of(300 + tokens)
            size_of[tokens] = len(prompt)
            assert posted(port, "/v1/completions", wanted(prompt, tokens, **more))[0] == 200
        left_midway(port, prompt_of(20), 4000, chunks=3)
        rows_of(prod, 3)
        completed(port, TEXT, 8)
    # The server was told to end at once, and still the last row is there.
    header, rows = recorded(prod)
    assert [row["output_length"] for row in rows[:2]] == [5, 6]
    assert [row["input_length"] for row in rows[:2]] == [size_of[5], size_of[6]]
    assert [len(row["hash_ids"]) for row in rows[:2]] == [300 // header["block_size"]] * 2
    assert [row["status"] for row in rows[2:]] == ["abort", "length"]
    assert (header["counts_from"], header["model"]) == ("usage", "demo")
    assert header["lacks"] == ["queue_s", "prefill_s", "decode_s"]
    assert "1 responses were not recorded" in (tmp_path / "server.log").read_text()


def test_a_server_whose_recorder_gets_no_thread_serves_on(tmp_path: Path) -> None:
    prod, site = tmp_path / "prod.jsonl", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(REFUSING)
    environment = {FILE: str(prod), **python_path(site)}
    # Without the middleware: what a stat logger raises, vLLM takes for its engine's end.
    with serving(tmp_path, environment=environment) as port:
        for _ in range(4):
            assert posted(port, "/v1/completions", wanted(TEXT, 2))[0] == 200
        assert posted(port, "/health", None)[0] == 200
    said = (tmp_path / "server.log").read_text()
    assert said.count("can't start new thread; serving goes on") == 1
    assert not prod.exists()


def test_two_api_servers_write_files_that_can_be_compared(tmp_path: Path) -> None:
    prod, script = tmp_path / "prod.jsonl", tmp_path / "serve.py"
    script.write_text(SEVERAL)
    program = (str(script), "serve")
    more = ("--api-server-count", "2", *MIDDLEWARE)
    with serving(tmp_path, *more, environment={FILE: str(prod)}, program=program) as port:
        deadline_s = time.monotonic() + 60.0
        # The second may be ready later than the first, which is asked meanwhile.
        while len(names_of(prod)) < 2 and time.monotonic() < deadline_s:
            completed(port, prompt_of(300), 2)
    assert names_of(prod) == ["prod.1.jsonl", "prod.jsonl"]
    files = [recorded(prod.with_name(name)) for name in names_of(prod)]
    assert len({header["hash_scope"] for header, _ in files}) == 1
    assert len({tuple(row["hash_ids"]) for _, rows in files for row in rows}) == 1


EMBEDDING = """
import asyncio, sys
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

async def serve():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**eval(sys.argv[1])))
    async def answer(number):
        params = SamplingParams(max_tokens=10 + number, ignore_eos=True)
        prompt = {"prompt_token_ids": [5] * (20 + number)}
        async for _ in engine.generate(prompt, params, f"alice-{number}"):
            pass
    await asyncio.gather(*map(answer, range(8)))
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(serve())
"""


def test_a_service_that_embeds_the_engine_is_recorded_without_middleware(
    tmp_path: Path,
) -> None:
    prod, script = tmp_path / "prod.jsonl", tmp_path / "service.py"
    script.write_text(EMBEDDING)
    arguments = {key.replace("-", "_"): value for key, value in demo_engine_args().items()}
    done = subprocess.run(
        [sys.executable, str(script), repr(arguments)],
        env=os.environ | {FILE: str(prod), MAX_BYTES: "4096", "VLLM_NO_USAGE_STATS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    header, rows = recorded(prod)
    assert sorted((row["input_length"], row["output_length"]) for row in rows) == [
        (20 + n, 10 + n) for n in range(8)
    ]
    assert header["lacks"] == ["hash_ids", "aborted"]
    assert "alice" not in prod.read_text()


@pytest.mark.parametrize(
    ("has_details", "layers"),
    [(True, None), (False, None), (True, GEMMA), (True, LFM)],
    ids=["details", "intervals", "windows", "states"],
)
def test_steps_of_a_server_become_a_profile_of_it(
    tmp_path: Path, *, has_details: bool, layers: Mapping[str, object] | None
) -> None:
    prod, output = tmp_path / "prod.jsonl", tmp_path / "profile.yaml"
    more = [DETAILS] if has_details else []
    if layers is not None:
        model = tmp_path / "model"
        shutil.copytree(DEMO_MODEL_DIR, model)
        (model / "config.json").write_text(json.dumps({**layers, "vocab_size": 4096}))
        more += ["--model", str(model), "--load-format", "dummy"]
    limits = ("--max-num-seqs", "4", "--max-num-batched-tokens", "512")
    environment = {FILE: str(prod), STEPS: "1"}

    def ask(number: int) -> None:
        prompt = prompt_of(20 + 37 * number % 400, 1 + number)
        completed(port, prompt, 12 + number % 40)

    with (
        serving(tmp_path, *MIDDLEWARE, *more, *limits, environment=environment) as port,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(ask, range(120)))
        rows_of(prod, 120)
    assert "Iteration(" not in (tmp_path / "server.log").read_text()
    assert prod.with_suffix(".steps").stat().st_mode & 0o777 == 0o600
    words = ("profile", "fit", "--recording", str(prod), "-o", str(output), "--json")
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["limits"] == {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    assert found["has_details"] is has_details
    assert sum(found["left_out"].values()) < 0.1 * found["steps"]
    assert found["most_decode_seqs"] == 4
    # The second half of the requests, replayed on what the steps of all taught. Other work on
    # the machine that comes or goes between the halves shows in it; how near it is on a quiet
    # one `tests/benchmarks/production.py` tells.
    assert abs(found["off"]["tpot p50"]) < 0.5
    profile = read_profile(output)
    assert profile.shape.block_size == 128
    assert len(profile.shape.kv_groups) == (4 if layers else 0)
    assert profile.num_blocks_at(profile.current_limits) > 100
    assert profile.uncertainty is not None
    assert profile.serve_values["model"] == profile.shape.model


def test_a_server_that_drafts_becomes_a_profile_with_what_it_accepts(tmp_path: Path) -> None:
    prod, output = tmp_path / "prod.jsonl", tmp_path / "profile.yaml"
    drafts = drafting(DEMO_MODEL_DIR, tmp_path / "eagle", 3)
    named = ("--speculative-config", json.dumps(drafts), "--max-num-seqs", "4")
    rates = (0.8, 0.5, 0.3)
    environment = {FILE: str(prod), STEPS: "1"} | accepting_environment(tmp_path / "on", rates)

    def ask(number: int) -> None:
        prompt = prompt_of(20 + 37 * number % 400, 1 + number)
        completed(port, prompt, 12 + number % 40)

    with (
        serving(tmp_path, *MIDDLEWARE, DETAILS, *named, environment=environment) as port,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(ask, range(120)))
        rows_of(prod, 120)
    words = ("profile", "fit", "--recording", str(prod), "-o", str(output), "--json")
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["left_out"].values()) < 0.1 * found["steps"]
    assert abs(found["off"]["tpot p50"]) < 0.5
    assert found["accepted"] == pytest.approx(rates, abs=0.04)
    profile = read_profile(output)
    assert profile.accepted == pytest.approx(found["accepted"])
    assert profile.shape.drafts == Drafts("eagle", 3)
    assert profile.caveats == ()
