"""What clients are told is what can be worked out by hand of traffic that was made for it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.shadow_files import a_profile, a_trace_file
from support.traffic import a_trace
from tuner.cli import run
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.loads.clients import advise, moved_blocks, shared_prefixes
from tuner.run.loads.records import ClientAdvice
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import write_profile
from tuner.shadow.step_model import StepModel
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window, whole

STEPS = StepModel.linear(0.1, 0.0, 0.0)
"""Every step takes a tenth of a second, whatever is in it."""
N = 200


def advice_for(
    trace: Trace,
    *slos: str,
    load: float = 1.0,
    window: Window | None = None,
    timeout_s: float | None = None,
) -> ClientAdvice:
    """Return the advice for an engine that runs one request at a time."""
    predictor = Predictor(replace(a_profile(), step_model=STEPS))
    plan = ReplayPlan(load=load, timeout_s=timeout_s)
    aim = Aim(Objective.BALANCED, tuple(map(Slo.parse, slos)), plan, None)
    workload = Workload.of("traffic", trace, (window or whole(trace),), aim)
    return advise(predictor, EngineLimits(1, 512), workload)


def words_for(folder: Path, n: int, per_s: float) -> list[str]:
    """Return the words that name a profile and a trace of so many requests a second."""
    write_profile(folder / "p.yaml", a_profile())
    trace = a_trace_file(folder / "t.jsonl", n, per_s=per_s)
    return ["--profile", str(folder / "p.yaml"), "--force-profile", "--trace", str(trace)]


def run_into(folder: Path) -> list[str]:
    """Return the words that predict a run into a folder."""
    return ["--method", "shadow", "--run-dir", str(folder / "run")]


def test_a_request_a_second_of_half_a_second_is_half_a_request_in_flight() -> None:
    found = advice_for(a_trace(np.arange(N).tolist(), 10, 5), "e2e_p95=0.9s")
    assert found.in_flight == pytest.approx(0.5, rel=0.01)
    assert found.connections == 1
    assert found.timeout_s == pytest.approx(1.0)
    assert found.too_long == 0.0
    assert found.sharing is None
    # Who comes while another is served takes longer than the SLO, which one in twenty may.
    assert found.retries == pytest.approx(0.05, abs=0.02)
    assert found.most_in_flight == 2


def test_requests_that_come_in_pairs_need_two_connections() -> None:
    pairs = np.repeat(np.arange(N) * 2.0, 2).tolist()
    found = advice_for(a_trace(pairs, 10, 5))
    # The second waits for the first: 0.5 s and 1 s, two in flight for a quarter of the time.
    assert found.in_flight == pytest.approx(0.75, rel=0.01)
    assert found.connections == 2
    assert (found.most_in_flight, found.retries, found.too_long) == (None, None, None)


def test_where_some_are_not_answered_no_time_out_is_told() -> None:
    """It would be twice a time that has no end, which no file holds."""
    pairs = np.repeat(np.arange(N) * 2.0, 2).tolist()
    found = advice_for(a_trace(pairs, 10, 5), timeout_s=0.8)
    assert found.timeout_s is None
    assert "no time-out: of a hundred requests more than one" in "".join(found.lines())
    kept = msgspec.json.encode(found)
    assert msgspec.json.decode(kept, type=ClientAdvice) == found


@pytest.mark.slow
def test_requests_that_all_come_at_once_are_tuned_for_without_advice_for_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, best = words_for(tmp_path, 60, math.inf), str(tmp_path / "best.yaml")
    assert run([*words, *run_into(tmp_path), "--slo", "e2e_p90=9s", "-o", best]) == 0
    assert "no advice for clients: all requests come at one instant" in capsys.readouterr().err
    assert run(["plan", *words, "--clients"]) == 2
    assert "--load-model closed" in capsys.readouterr().err
    assert (
        run(["plan", *words, "--clients", "--load-model", "closed", "--concurrency", "3"]) == 0
    )
    assert "connection pool 3," in capsys.readouterr().out


@pytest.mark.parametrize("slo", [(), ("--slo", "ttft_p90=1s")])
def test_where_no_request_is_answered_in_time_it_is_said_how_many_are_lost(
    slo: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words_for(tmp_path, 60, 1.0), *run_into(tmp_path), "--request-timeout", "1ms"]
    assert run([*words, *slo, "-o", str(tmp_path / "best.yaml")]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "no configuration answers its requests; " in said
    assert "loses least, 100% of them" in said
    assert "allow a longer --request-timeout, lower --load, or add replicas" in said
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["state"] == "failed"


@pytest.mark.slow
def test_where_nothing_meets_the_slos_it_is_said_at_which_load_they_would_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words_for(tmp_path, 300, 16.0), *run_into(tmp_path)]
    assert run([*words, "--slo", "e2e_p90=3s", "--load", "40"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "lower --load" in said
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["capacity"]["winner"] < 40
    assert f"capacity at the SLOs: {kept['capacity']['text']}" in said


def test_some_answers_break_an_slo_by_their_length_alone() -> None:
    lengths = np.where(np.arange(N) % 10 == 0, 20, 5).tolist()
    found = advice_for(a_trace((np.arange(N) * 5.0).tolist(), 10, lengths), "e2e_p50=1.5s")
    assert found.too_long == pytest.approx(0.1)
    at_none = advice_for(a_trace((np.arange(N) * 5.0).tolist(), 10, 5), "e2e_p50=0.1s")
    assert (at_none.too_long, at_none.retries, at_none.most_in_flight) == (1.0, None, None)
    assert "no retries: the SLOs hold at no load, or" in "\n".join(at_none.lines())
    without = advice_for(a_trace((np.arange(N) * 5.0).tolist(), 10, 5))
    assert "no retries: without an SLO" in "\n".join(without.lines())


def test_a_number_that_is_kept_in_flight_tells_no_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More load is as many in flight, so that the SLOs hold at every load or at none."""
    words = [*words_for(tmp_path, 60, 1.0), "--slo", "e2e_p90=9s"]
    words += ["--load-model", "closed", "--concurrency", "4"]
    assert run(["plan", *words, "--clients"]) == 0
    assert "semaphore" not in (said := capsys.readouterr().out)
    assert "a number is kept in flight at every load" in " ".join(said.split())
    words += [*run_into(tmp_path), "-o", str(tmp_path / "best.yaml")]
    assert run(words) == 0
    assert "capacity at the SLOs" not in "".join(capsys.readouterr())
    words += ["--run-dir", str(tmp_path / "refused"), "--objective", "capacity"]
    assert run(words) == 2
    assert "leave --concurrency out" in capsys.readouterr().err


def test_what_warms_a_window_up_is_not_counted() -> None:
    """One request at a time, all are answered before the window begins."""
    trace = a_trace((np.arange(N) * 5.0).tolist(), 32, [20] * 120 + [5] * (N - 120))
    trace = replace(trace, hashes=HashIds.from_rows([(1, 2)] * N, 16))
    found = advice_for(trace, "e2e_p50=1.5s", window=Window(600.0, 1000.0, 300.0))
    assert found.too_long == 0.0
    assert found.sharing is not None
    assert found.sharing.possible == 1.0
    # From 600 s to the last before 1,000 s.
    (prefix,) = found.sharing.prefixes
    assert prefix.requests == 80


def test_who_came_before_a_window_and_is_still_there_is_in_flight() -> None:
    """Four come at once before it and are answered one after the other, 20 s each."""
    due_s = [90.0] * 4 + (100.0 + np.arange(N)).tolist()
    trace = a_trace(due_s, 10, [200] * 4 + [1] * N)
    warm = advice_for(trace, window=Window(100.0, 400.0, 20.0))
    alone = advice_for(trace)
    assert warm.connections == alone.connections
    # The whole is the window of 199 s and 10 s before it, in which there are four.
    assert 199 * warm.in_flight + 4 * 10 == pytest.approx(209 * alone.in_flight, rel=0.01)


def test_the_prefixes_that_spare_most_are_named_and_none_within_another() -> None:
    rows = [(1, 2, 3, 10 + i) for i in range(6)] + [(7, 8 + 100 * i) for i in range(13)]
    hashes = HashIds.from_rows([*rows, (1, 2, 3, 10)], 16)
    first, second = list(shared_prefixes(hashes))[:2]
    # 48 tokens in seven requests, six of which are spared them; 16 in thirteen.
    assert (first.row, first.tokens, first.requests, first.saved_tokens) == (0, 48, 7, 288)
    assert (second.row, second.tokens, second.requests, second.saved_tokens) == (6, 16, 13, 192)
    trace = replace(
        a_trace((np.arange(len(hashes)) * 5.0).tolist(), 64, 5),
        prompt_tokens=hashes.counts * 16,
        hashes=hashes,
    )
    sharing = advice_for(trace).sharing
    assert sharing is not None
    tokens = 16 * hashes.ids.size
    assert sharing.possible == pytest.approx((5 * 48 + 64 + 12 * 16) / tokens)
    assert sharing.found == 0.0, "this engine caches no prefixes"
    assert sharing.moved is None
    assert "they cannot tell" in "\n".join(advice_for(trace).lines())


def test_blocks_behind_another_beginning_tell_what_a_moved_timestamp_would_bring() -> None:
    # A timestamp in the first block, three blocks that are always the same.
    stamped = HashIds.from_rows([(100 + i, 1, 2, 3) for i in range(5)], 16)
    assert moved_blocks(stamped) == 4 * 3
    chained = HashIds.from_rows([(1, 2, 3, 100 + i) for i in range(5)], 16)
    assert moved_blocks(chained) is None
