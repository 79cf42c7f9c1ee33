"""A replay over HTTP sends when due, stamps what comes, and hides neither lag nor failures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.paths import ROOT
from support.sse_server import SseServer
from support.traffic import a_trace
from tuner.cli import run as tune
from tuner.cli.verify import _login, _show
from tuner.engine.demo import DEMO_MODEL_DIR
from tuner.errors import EngineError, NoFeasibleConfigError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.server.client import MAX_ERRORS, Endpoint, HttpRun, find_endpoint, replay_http
from tuner.replay.server.comparison import Verification, verification
from tuner.replay.server.process import answers
from tuner.replay.server.scrape import Scraper, cache_usage
from tuner.replay.slo import Slo
from tuner.replay.timeline import Outcome
from tuner.traffic.prompts import PromptSource, TokenPrompt
from tuner.traffic.traces import LoadModel, Trace, Turns

TRACE = ROOT / "traces" / "chat.jsonl"


def prompts(trace: Trace) -> Any:
    """Prompts that begin with their row's number."""
    return SimpleNamespace(
        prompt=lambda row: TokenPrompt([row] * int(trace.prompt_tokens[row])),
        begin=lambda **_: None,
        answered=lambda *_: None,
    )


def replayed(server: SseServer, trace: Trace, plan: ReplayPlan | None = None) -> HttpRun:
    endpoint = Endpoint(server.url, "toy")
    return replay_http(endpoint, trace, prompts(trace), plan or ReplayPlan(), lambda: None)


def test_latencies_are_the_servers_and_count_from_the_due_time() -> None:
    trace = a_trace([0, 0.1, 0.2], prompt=[3, 4, 5], output=[1, 5, 10])
    with SseServer(first_s=0.05, gap_s=0.02) as server:
        line = replayed(server, trace).timelines
    assert line.outcome.tolist() == [Outcome.COMPLETED] * 3
    assert line.ttft_s == pytest.approx([0.05] * 3, abs=0.04)
    assert line.e2e_s == pytest.approx([0.05, 0.05 + 4 * 0.02, 0.05 + 9 * 0.02], abs=0.08)
    assert line.sent_s == pytest.approx(trace.due_s, abs=0.04)
    asked = sorted(server.asked, key=lambda body: len(body["prompt"]))
    assert [len(body["prompt"]) for body in asked] == [3, 4, 5]
    assert [body["max_tokens"] for body in asked] == [1, 5, 10]
    assert all(body["ignore_eos"] for body in asked)


def test_what_leads_in_to_a_window_is_sent_and_not_measured() -> None:
    trace = replace(a_trace([0, 0.1, 0.3, 0.4], output=5), lead_in_s=0.25)
    with SseServer(fails_on=1, first_s=0.02, gap_s=0.01) as server:
        run = replayed(server, trace)
    line = run.timelines
    assert len(server.asked) == 4
    assert line.due_s == pytest.approx([0.05, 0.15])
    assert line.sent_s == pytest.approx([0.05, 0.15], abs=0.04)
    assert line.outcome.tolist() == [Outcome.COMPLETED] * 2
    assert line.gap_s.total_weight == 2 * 4
    assert (run.requested_tokens.tolist(), run.errors) == ([5, 5], {})
    assert run.wall_s == pytest.approx(0.21, abs=0.1)


def test_a_next_turn_waits_for_the_answer_over_http_too() -> None:
    trace = replace(
        a_trace([0, 0.01], output=5), turns=Turns(np.array([-1, 0]), np.array([0.0, 0.1]))
    )
    with SseServer() as server:
        line = replayed(server, trace).timelines
    assert line.due_s[1] == pytest.approx(line.last_s[0] + 0.1, abs=0.02)


def test_a_next_turn_holds_the_answer_before_it() -> None:
    """As in the engine that predicts beside it, or the server would find less in its cache."""
    turns = Turns(np.array([-1, 0]), np.array([0.0, 0.0]))
    trace = replace(a_trace([0, 0.01], prompt=[40, 60], output=8), turns=turns)
    with SseServer() as server:
        endpoint = Endpoint(server.url, "toy")
        source = PromptSource(trace, 1000, 0)
        replay_http(endpoint, trace, source, ReplayPlan(), lambda: None)
        first, second = server.asked
        answer = server.answer(8)
    assert second["prompt"][:48] == [*first["prompt"], *answer]


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    trace = a_trace([0] * 6, output=3)
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=2)
    with SseServer() as server:
        line = replayed(server, trace, plan).timelines
    starts, ends = np.sort(line.sent_s), np.sort(line.last_s)
    in_flight = [int((starts <= at).sum() - (ends < at).sum()) for at in starts]
    assert max(in_flight) == 2


def test_failures_are_counted_with_what_the_server_said() -> None:
    trace = a_trace([0] * 4, output=5)
    with SseServer(fails_on=1, cuts_on=2, floods_on=3) as server:
        run = replayed(server, trace)
    assert run.timelines.outcome.tolist() == [Outcome.COMPLETED, *[Outcome.ABORTED] * 3]
    said = " ".join(run.errors)
    assert "HTTP 500: out of order" in said
    assert "1 for 5" in said
    assert sum(run.errors.values()) == 3
    assert max(map(len, run.errors)) < 300


def judged(run: HttpRun, *slos: str) -> Verification:
    return verification(
        run, Scraper("http://127.0.0.1:9"), None, [Slo.parse(slo) for slo in slos], None
    )


def test_requests_that_fail_are_later_than_any_bound() -> None:
    trace = a_trace([i * 0.01 for i in range(100)], output=5)
    with SseServer(fails_on=10, cuts_on=20, hangs_on=30) as server:
        found = judged(
            replayed(server, trace, ReplayPlan(timeout_s=2.0)),
            *("ttft_p95=1s", "tpot_p95=1s", "e2e_p95=1s", "itl_p95=1s"),
            *("ttft_p99=1h", "tpot_p99=1h", "e2e_p99=1h", "itl_p99=1h", "e2e_mean=1h"),
        )
    assert [said.split()[0] for said in found.broken] == [
        *("ttft_p99", "tpot_p99", "e2e_p99", "itl_p99", "e2e_mean")
    ]
    assert "e2e_p99 is infinite, as 3.0% failed" in found.broken
    assert found.lines()[0] == "3 of 100 requests failed (3.0%)"
    assert found.as_json()["failed"] == 3
    assert found.as_json()["failed_ratio"] == 0.03
    assert "at most 1% may" in found.failure


def test_a_run_in_which_all_fail_holds_no_slo_and_one_in_which_none_does_says_so() -> None:
    trace = a_trace([0, 0, 0], output=5)
    with SseServer(busy_every=1) as server:
        found = judged(replayed(server, trace), "ttft_p50=1h")
    assert found.broken == ("ttft_p50 is infinite, as 100.0% failed",)
    assert found.failure.endswith("most often: HTTP 503: too busy")
    with SseServer() as server:
        found = judged(replayed(server, trace), "ttft_p50=1h")
    assert not found.broken
    assert not found.failure
    assert found.lines()[0] == "none of 3 requests failed"


def test_what_exceeds_the_servers_length_is_no_failure_of_it() -> None:
    # The second has no room for its prompt, the third none for its whole answer.
    trace = a_trace([0, 0, 0], prompt=[10, 60, 40], output=20)
    with SseServer(max_model_len=50) as server:
        endpoint = find_endpoint(server.url, {})
        run = replay_http(endpoint, trace, prompts(trace), ReplayPlan(), lambda: None)
        unknown = replayed(server, trace)
    assert run.timelines.outcome.tolist() == [
        Outcome.COMPLETED,
        Outcome.REFUSED,
        Outcome.REFUSED,
    ]
    found = judged(run, "e2e_p99=5s")
    assert (found.failed, found.broken) == (0, ())
    assert "2 requests exceed the server's max_model_len: not counted" in found.lines()
    assert judged(unknown).failed == 2


def test_the_login_is_one_of_the_configurations_keys_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-env")
    cases: list[tuple[dict[str, object], str]] = [
        ({"api-key": "sk-1"}, "sk-1"),
        ({"api-key": ["sk-1", "sk-2"]}, "sk-1"),
        ({}, "sk-env"),
    ]
    for values, key in cases:
        assert _login(values) == {"Authorization": f"Bearer {key}"}
    monkeypatch.delenv("VLLM_API_KEY")
    assert not _login({})


@pytest.mark.parametrize("key", ["uds", "ssl-keyfile"])
def test_a_server_that_would_not_answer_at_a_plain_port_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    config = tmp_path / "current.yaml"
    config.write_text(f"model: {DEMO_MODEL_DIR}\n{key}: {tmp_path / 'it'}\n")
    assert tune(["verify", "--trace", str(TRACE), "--config", str(config)]) == 2
    assert f"the configuration sets {key}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.engine
def test_the_command_fails_when_requests_fail(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = ["--trace", str(TRACE), "--window", "typical:2s", "--predict", "none"]
    with SseServer(busy_every=3, first_s=0.0, gap_s=0.0) as server:
        asked = ["verify", *traffic, "--url", server.url, "--max-send-lag", "10s"]
        assert tune([*asked, "--slo", "e2e_p50=1h"]) == 4
        said = capsys.readouterr()
        assert re.match(r"\d+ of \d+ requests failed \(3\d\.\d%\)\n", said.out)
        assert "at most 1% may; most often: HTTP 503: too busy" in said.err
        assert tune([*asked, "--slo", "e2e_p90=1h"]) == 3
        assert "breaks 1 SLO: e2e_p90 is infinite, as 3" in capsys.readouterr().err


def test_the_advice_is_of_the_server_only_for_what_was_not_predicted() -> None:
    trace = a_trace([i * 0.01 for i in range(30)], output=5)
    with SseServer(first_s=0.0, gap_s=0.0) as server:
        fast = judged(replayed(server, trace)).measured
    slow = Slo.parse("e2e_p50=1ms"), Slo.parse("ttft_p50=0.001ms")

    def hint(predicted: Measurement | None, *slos: Slo) -> str:
        with SseServer(first_s=0.1, gap_s=0.02) as server:
            run = replayed(server, trace)
        found = verification(run, Scraper("http://127.0.0.1:9"), predicted, slos, None)
        with pytest.raises(NoFeasibleConfigError) as error:
            _show(found, as_json=True)
        return error.value.hint

    assert "--predict live or shadow says whether" in hint(None, *slow)
    within = Slo.parse("e2e_p50=100ms")
    assert hint(fast, within).startswith("predicted, without HTTP, they hold: ")
    same = hint(fast, *slow)
    assert "breaks them as well, so it is not the server that differs: relax them" in same
    assert "HTTP adds" not in same
    both = hint(fast, within, slow[1])
    assert both.startswith("the prediction breaks ttft_p50 as well")
    assert both.endswith("the others hold in it, and break by what HTTP adds")


def test_a_client_that_falls_behind_voids_the_run_and_still_shows_it() -> None:
    with SseServer() as server:
        run = replayed(server, a_trace([0]))
        late = replace(run, lag_p99_s=0.3)
        found = [
            verification(one, Scraper(server.url), None, [], None, 0.2) for one in (run, late)
        ]
    assert [bool(one.void) for one in found] == [False, True]
    assert "VOID: this client fell behind: p99 send lag 300 ms" in found[1].lines()[-1]
    assert found[1].as_json()["measured"]["completed"] == 1


def test_a_server_that_names_each_request_makes_no_list_of_errors_without_end() -> None:
    trace = a_trace([0.0] * 60, prompt=3, output=2)
    with SseServer(busy_every=1, names_requests=True) as server:
        run = replayed(server, trace)
    assert len(run.errors) == MAX_ERRORS + 1
    assert (sum(run.errors.values()), run.errors["errors in other words"]) == (60, 40)


def test_a_server_here_is_found_whatever_proxy_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with SseServer() as server:
        assert answers(f"{server.url}/v1/models")


def test_a_server_that_dies_ends_the_replay() -> None:
    def dead() -> None:
        raise EngineError("the server ended with code 1")

    trace = a_trace([0, 60])
    with SseServer() as server, pytest.raises(EngineError, match="ended with code 1"):
        replay_http(Endpoint(server.url, "toy"), trace, prompts(trace), ReplayPlan(), dead)


def test_what_is_no_vllm_server_is_said_to_be_none() -> None:
    with SseServer() as server:
        assert find_endpoint(server.url, {}).model == "toy"
    with pytest.raises(EngineError, match="does not answer as a vLLM API server"):
        find_endpoint("http://127.0.0.1:9", {})


def test_tokens_that_nobody_counts_as_they_come_are_no_latencies() -> None:
    trace = a_trace([0, 0.01], output=5)
    with SseServer(tells_usage=False) as server:
        run = replayed(server, trace)
    assert run.timelines.outcome.tolist() == [Outcome.ABORTED] * 2
    ((said, count),) = run.errors.items()
    assert said.startswith("tokens without the usage that stream_options.continuous_usage")
    assert count == 2


def test_of_several_models_the_configured_one_is_asked_and_none_by_chance() -> None:
    adapter = {"id": "sql", "root": "/lora", "parent": "base"}
    alias = {"id": "chat", "root": "org/base"}
    with SseServer(models=[{"id": "base", "root": "org/base"}, alias, adapter]) as server:
        assert find_endpoint(server.url, {}).model == "base"
        assert find_endpoint(server.url, {}, ["sql", "org/base"]).model == "sql"
    with SseServer(models=[{"id": "embed"}, {"id": "chat"}]) as server:
        assert find_endpoint(server.url, {}, ["x", "chat"]).model == "chat"
        with pytest.raises(EngineError, match="offers several models: embed, chat"):
            find_endpoint(server.url, {}, ["x"])


@pytest.mark.parametrize("name", ["kv_cache_usage_perc", "gpu_cache_usage_perc"])
def test_the_cache_usage_of_several_engines_is_their_mean(name: str) -> None:
    page = (
        f"# HELP vllm:{name} x\n# TYPE vllm:{name} gauge\n"
        f'vllm:{name}{{engine="0",model_name="m"}} 0.2\n'
        f'vllm:{name}{{engine="1",model_name="m"}} 0.4\n'
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
    )
    assert cache_usage(page) == pytest.approx(0.3)
    assert cache_usage("".join(page.splitlines(keepends=True)[4:])) is None


def test_the_table_says_what_the_front_end_adds_and_which_slo_breaks() -> None:
    trace = a_trace([i * 0.01 for i in range(30)], output=5)
    with SseServer() as server:
        run = replayed(server, trace)
    slow = Slo.parse("ttft_p50=1ms")
    found = verification(run, Scraper("http://127.0.0.1:9"), None, [slow], 3.0)
    assert found.measured.completed == 30
    assert found.broken == (found.broken[0],)
    assert "ttft_p50" in found.broken[0]
    assert "exceeds 0.001 s" in found.broken[0]
    same = verification(run, Scraper(""), found.measured, [], None)
    assert set(same.as_json()["added"].values()) <= {0.0, None}
    assert any("requests/s" in line for line in same.lines())
