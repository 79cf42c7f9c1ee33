"""A real vLLM server under a known load, seen through a real Prometheus, becomes that load."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from support.prometheus_parts import (
    answers,
    asked,
    last_scrape_s,
    need_prometheus,
    prometheus,
    wait_for,
)
from support.shadow_files import home
from support.watch_parts import JumpingClock
from tuner.cli.watch import WatchOptions, run_watch
from tuner.cli.watch_command import watch
from tuner.engine.demo import demo_engine_args
from tuner.replay.server.process import free_port
from tuner.traffic.prometheus import Scraped, trace_from_prometheus
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
from tuner.traffic.traces import Trace

__all__ = ["home"]

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

PATIENCE_S = 180.0
HELD, HOLD_S = 6, 12.0
# Of the scrapes, and how long one may take: beyond, nothing can be said to the second.
MIN_READ, LATEST_SCRAPE_S = 0.95, 0.7


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: when it went, in Unix seconds, and how long prompt and answer were."""

    at_s: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Load:
    """What the server was asked, the URL of the Prometheus that saw it, and when."""

    url: str
    open_loop: list[Sent]
    closed_loop: list[Sent]
    open_until_s: float
    closed_from_s: float
    end_s: float


def ask(port: int, prompt: int, output: int) -> Sent:
    """Send one request of exact lengths and wait for its answer."""
    at_s = time.time()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        body = {"model": "demo", "prompt": [7] * prompt, "max_tokens": output}
        text = json.dumps(body | {"ignore_eos": True, "temperature": 0})
        connection.request(
            "POST", "/v1/completions", text, {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        usage = json.loads(response.read())["usage"]
    finally:
        connection.close()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, output)
    return Sent(at_s, prompt, output)


def send_open(port: int, rng: np.random.Generator) -> list[Sent]:
    """Send 480 requests at 7/s, whatever the server does."""
    gaps_s = rng.exponential(1 / 7, 480).tolist()
    prompts, outputs = rng.integers(3, 400, 480).tolist(), rng.integers(1, 40, 480).tolist()
    with ThreadPoolExecutor(64) as pool:
        waiting = []
        for gap_s, prompt, output in zip(gaps_s, prompts, outputs, strict=True):
            time.sleep(gap_s)
            waiting.append(pool.submit(ask, port, prompt, output))
        return [one.result() for one in waiting]


def send_closed(port: int) -> list[Sent]:
    """Keep six requests in flight for a while, of as many lengths, or all would end at once."""
    end_s = time.monotonic() + HOLD_S
    sent: list[Sent] = []
    lock = threading.Lock()

    def keep_asking(output: int) -> None:
        while time.monotonic() < end_s:
            one = ask(port, 50, output)
            with lock:
                sent.append(one)

    with ThreadPoolExecutor(HELD) as pool:
        for worker in [pool.submit(keep_asking, 70 + 12 * one) for one in range(HELD)]:
            worker.result()
    return sent


def wait_for_scrape(url: str, counted: int) -> None:
    """Wait until Prometheus has read what the server shows by now, and every answer."""
    now_s, metric = time.time(), "vllm:request_prompt_tokens_count"
    wait_for(lambda: last_scrape_s(url, metric) > now_s and asked(url, metric) >= counted)


def need_every_scrape(load: Load) -> None:
    """Skip where the machine was too busy to be read each second: nobody can say when then."""
    span_s = int(time.time() - load.open_loop[0].at_s)
    fresh = asked(load.url, f"avg_over_time(up[{span_s}s])")
    late_s = asked(load.url, f"max_over_time(scrape_duration_seconds[{span_s}s])")
    if fresh < MIN_READ or late_s > LATEST_SCRAPE_S:
        what = f"{fresh:.0%} of the scrapes came, the slowest took {late_s:.2g} s"
        pytest.skip(f"this machine is too busy to be scraped each second: {what}")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Serve the demo model, scrape it each second, and put the load on it."""
    need_prometheus()
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    values = {**demo_engine_args(), "served-model-name": "demo", "max-num-seqs": 16}
    (folder / "serve.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--config", "serve.yaml", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=out, start_new_session=True
        )
        try:
            wait_for(lambda: answers(port, "/health"), log.read_text, PATIENCE_S)
            with prometheus(folder, scrapes=[port]) as url:
                # Counting begins with the first scrape.
                wait_for_scrape(url, 0)
                sent = send_open(port, np.random.default_rng(5))
                open_until_s = time.time()
                wait_for_scrape(url, len(sent))
                closed_from_s = time.time()
                held = send_closed(port)
                wait_for_scrape(url, len(sent) + len(held))
                yield Load(url, sent, held, open_until_s, closed_from_s, time.time())
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def traced(load: Load, *, concurrency: bool = False) -> Trace:
    return trace_from_prometheus(
        Scraped(load.url),
        since_s=240,
        step_s=1,
        until_s=load.end_s + 1,
        concurrency=concurrency,
    )


def cumulative_error(trace: Trace, sent: Sequence[Sent]) -> float:
    """Return by how many requests the two counts ever differ, a second's slack given."""
    true_s = np.sort([one.at_s for one in sent])
    drawn_s = trace.due_s + trace.zero_s
    at_s = np.arange(true_s[0], true_s[-1], 0.5)
    drawn = np.searchsorted(drawn_s, at_s)
    early, late = np.searchsorted(true_s, at_s - 1.5), np.searchsorted(true_s, at_s + 1.5)
    return float(np.maximum(early - drawn, drawn - late).max())


def test_every_request_that_was_sent_is_in_the_trace_or_told_to_be_left_out(
    load: Load,
) -> None:
    trace = traced(load)
    told = re.findall(r"([\d,]+) counted across gaps", " ".join(trace.notes.texts))
    left_out = sum(int(count.replace(",", "")) for count in told)
    assert len(trace) + left_out == len(load.open_loop) + len(load.closed_loop)


def test_every_request_is_in_the_trace_at_its_time(load: Load) -> None:
    need_every_scrape(load)
    assert cumulative_error(traced(load), load.open_loop + load.closed_loop) <= 1


def test_lengths_have_the_means_that_were_sent(load: Load) -> None:
    """Lengths are drawn by stretches, whose ends fall between a request's counters or not."""
    trace = traced(load)
    sent = load.open_loop + load.closed_loop
    assert trace.prompt_tokens.mean() == pytest.approx(
        np.mean([one.prompt for one in sent]), rel=0.05
    )
    assert trace.output_tokens.mean() == pytest.approx(
        np.mean([one.output for one in sent]), rel=0.05
    )


def test_requests_held_in_flight_are_seen_in_flight(load: Load) -> None:
    need_every_scrape(load)
    trace = traced(load, concurrency=True)
    flow = trace.concurrency
    assert flow is not None
    start_s = load.closed_from_s + 2 - trace.zero_s
    held = flow.between(start_s, start_s + HOLD_S - 4)
    spent_s = np.diff(np.append(held.times_s, HOLD_S - 4))
    # A scrape may fall between an answer and the next request of the same client, on a busy
    # machine more than one in five.
    assert spent_s[np.abs(held.in_flight - HELD) <= 2].sum() >= 0.6 * spent_s.sum()
    assert flow.in_flight.max() <= len(load.open_loop)
    assert trace.notes.sampled_from.startswith("Prometheus at 127.0.0.1:")


def test_the_servers_own_numbers_are_reported(load: Load) -> None:
    shown = " / ".join(traced(load).notes.texts)
    assert "KV cache was at most" in shown
    # All prompts begin alike, so that most of their blocks hit.
    found = re.search(r"(\d+)% of the prompt tokens hit the server's own .*?(\d+)%", shown)
    assert found is not None
    served, imitated = (int(share) for share in found.groups())
    assert served > 50
    assert imitated == pytest.approx(served, abs=3)


def shapeless(sent: Sequence[Sent]) -> Trace:
    """Return what was sent as a trace of its own."""
    due_s = np.array([one.at_s for one in sent])
    order = np.argsort(due_s)
    prompts, outputs = (np.array([getattr(s, k) for s in sent]) for k in ("prompt", "output"))
    return Trace(due_s[order] - due_s.min(), prompts[order], outputs[order])


@pytest.mark.parametrize(("times", "verdict"), [(1.0, "unchanged: "), (0.4, "shifted, ")])
def test_a_watch_sees_from_a_real_servers_metrics_whether_traffic_has_shifted(
    load: Load, home: Path, times: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is best for it is not asked here: that hangs on the profile, not on the server."""
    sent = shapeless(load.open_loop)
    stretched = replace(sent, due_s=sent.due_s / times)
    write_sketch(home / TRAFFIC_FILE, sketch_of(stretched))
    began_s = min(one.at_s for one in load.open_loop)
    arguments = [
        *("--once", "--prometheus", load.url, "--profile", str(home / "profile.yaml")),
        *("--emit", str(home / "best.yaml"), "--state", str(home / "state")),
        *("--since", f"{int(load.open_until_s - began_s) - 2}s", "--step", "1s"),
        *("--force-profile", "--max-num-seqs", "4"),
    ]
    options = WatchOptions.parse(watch.make_context("watch", arguments).params, ())
    assert run_watch(options, JumpingClock(load.open_until_s)) == 0
    shown = capsys.readouterr().err
    assert verdict in shown
    assert ("arrival_rate" in shown) == (times != 1.0)
