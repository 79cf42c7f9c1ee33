"""The main job finds what the toy is known to like, and says so in every place it should."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.job_parts import SHORT, Run, arguments_for, run
from support.toy import ToyCosts, ToySource
from support.toy_tune import CROWDED, job_on, write_trace
from support.traffic import replay_toy
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import limits as limits_of
from tuner.engine.serve_config import read_config
from tuner.errors import EngineError, UsageError
from tuner.replay.metrics import measure
from tuner.run.sessions.live import Session
from tuner.run.trial_runner import TrialRunner
from tuner.search.objective import Objective, Scoring, Tier
from tuner.search.trials import Phase
from tuner.traffic.formats import read_trace

SECRETS = ("sk-of-the-config", "hf_of_the_config", "sk-of-an-argument")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace on disk."""
    return write_trace(tmp_path / "t.jsonl")


def values_by_cap(trace: Path, source: ToySource, caps: Sequence[int]) -> dict[int, float]:
    """Replay each cap without any search and return what the objective makes of it."""
    goal = Scoring(Objective.BALANCED, (), "p95")
    scores = {
        cap: goal.score(
            measure([replay_toy(read_trace(trace), EngineLimits(cap, 2048), source)])
        )
        for cap in caps
    }
    return {cap: score.value for cap, score in scores.items() if score.tier is Tier.GOOD}


def test_it_finds_the_best_cap_that_trying_them_all_would_find(trace: Path) -> None:
    source = ToySource(CROWDED)
    values = values_by_cap(trace, source, range(1, 33))
    found = run(source, trace, "--budget", "60s").result["recommendation"]
    assert found["verdict"] == "change"
    # Refining stops at caps a fifth apart, on this curve 4 %; the race calls 2 % a tie.
    assert values[found["max_num_seqs"]] <= min(values.values()) * 1.06
    expected = values[found["max_num_seqs"]] / values[16] - 1
    low, high = found["gain_here_interval"]
    assert low <= expected <= high
    # No step model knows of a cost that grows with the square.
    assert high - low < 0.2


@pytest.mark.slow
def test_it_climbs_past_the_ladder_while_the_edge_wins(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", per_s=80)
    source = ToySource(ToyCosts(per_seq_s=0.0), current=EngineLimits(2, 2048))
    done = run(source, trace, "--max-num-seqs", "2,4,8", "--budget", "60s")
    assert done.result["recommendation"]["max_num_seqs"] > 8
    assert "extend" in {trial["phase"] for trial in done.trials}


@pytest.mark.slow
def test_the_budget_of_tokens_is_lowered_where_prefill_floods_hurt(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", per_s=20, tick_s=1.0)
    costs = ToyCosts(per_seq_s=0.0, per_prefill_token_s=0.0, flood_tokens=600, flood_s=0.001)
    source = ToySource(costs, current=EngineLimits(64, 8192))
    done = run(source, trace, "--max-num-seqs", "32,64", "--budget", "60s")
    best = done.result["recommendation"]["best_measured"]["max_num_batched_tokens"]
    assert best < 8192
    assert "budget" in {trial["phase"] for trial in done.trials}


@pytest.mark.slow
def test_it_keeps_what_is_best_already(trace: Path) -> None:
    values = values_by_cap(trace, ToySource(CROWDED), range(8, 17))
    best = min(values, key=lambda cap: values[cap])
    source = ToySource(CROWDED, noise_ratio=0.02, current=EngineLimits(best, 2048))
    done = run(source, trace, *SHORT)
    assert done.result["recommendation"]["verdict"] == "keep"
    assert limits_of(read_config(done.emitted)) == (best, 2048)
    assert "keep what you have" in done.talk
    assert "KEEP WHAT YOU HAVE" in done.emitted.read_text()
    # What stays as it is needs no engine started cold.
    assert done.result["provenance"]["engine_starts"] == 1
    assert done.result["confirmed_cold"] is None
    assert "cold" not in {t["phase"] for t in done.trials}


@pytest.mark.slow
def test_equal_configurations_are_never_told_apart(tmp_path: Path) -> None:
    """At one request a second no cap above 2 ever binds: whatever is found is noise."""
    trace = write_trace(tmp_path / "t.jsonl", n=100, per_s=1)
    done = run(ToySource(noise_ratio=0.1), trace, *SHORT)
    assert done.result["recommendation"]["verdict"] == "keep"


@pytest.mark.slow
def test_a_part_of_the_traffic_is_said_and_without_a_file_standard_output_holds_the_yaml_alone(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = '{"arrived_at_s": %d, "input_length": 5000, "output_length": 9}\n'
    trace.write_text(trace.read_text() + "".join(long % second for second in range(12)))
    part = ("--window", "2s:12s", "--load", "0.5", "--too-long", "clip")
    arguments = ["--trace", str(trace), "--run-dir", str(tmp_path / "run"), *SHORT, *part]
    assert job_on(ToySource(CROWDED), [*arguments, "--method", "live"]) == 0
    out, err = capsys.readouterr()
    done = Run(tmp_path, err, out)
    read, found = yaml.safe_load(out), done.result["recommendation"]
    limits = (read["max-num-seqs"], read["max-num-batched-tokens"])
    assert limits == (found["max_num_seqs"], found["max_num_batched_tokens"])
    assert out.startswith("# vllm serve --config best.yaml\n")
    assert not done.emitted.exists()
    assert {"windowed", "requests_clipped"} <= done.caveats
    assert "and nothing predicts the rest" in done.talk
    assert "requests exceed max_model_len 4096: they were clipped" in done.talk
    assert "window 2 s to 12 s" in done.result["provenance"]["trace"]["window"]
    for shown in (t["measurement"] for t in done.trials):
        assert shown["refused"] == 0
        assert shown["offered"] < 120
        assert 0.3 * 14 < shown["requests_per_s"] < 0.7 * 14


@pytest.mark.slow
def test_secrets_reach_the_emitted_file_and_nothing_else(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "current.yaml"
    config.write_text(f"model: m\napi-key: {SECRETS[0]}\nhf-token: {SECRETS[1]}\nport: 8000\n")
    secret = f"my-token={SECRETS[2]}"
    more = ("--config", str(config), "--engine-arg", secret, *SHORT)
    done = run(ToySource(CROWDED), trace, *more)
    emitted = yaml.safe_load(done.emitted.read_text())
    assert (emitted["api-key"], emitted["hf-token"], emitted["my-token"]) == SECRETS
    assert emitted["port"] == 8000
    assert done.emitted.stat().st_mode & 0o777 == 0o600
    kept = b"".join(p.read_bytes() for p in done.run_dir.rglob("*") if p.is_file())
    shown = (done.talk + done.stdout).encode()
    comments = "".join(
        line for line in done.emitted.read_text().splitlines() if line.startswith("#")
    )
    for secret in SECRETS:
        assert secret.encode() not in kept + shown + comments.encode()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return one run that several tests look at."""
    trace = write_trace(tmp_path_factory.mktemp("finished") / "t.jsonl")
    return run(ToySource(CROWDED), trace, *SHORT)


def test_without_secrets_the_emitted_file_is_for_everyone(finished: Run) -> None:
    assert finished.emitted.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))


def test_every_trial_stands_in_the_journal_and_in_the_result_alike(finished: Run) -> None:
    assert finished.result["trials"] == finished.trials
    assert [trial["number"] for trial in finished.trials] == list(range(len(finished.trials)))
    first = finished.trials[0]
    assert (first["phase"], first["max_num_seqs"], first["max_num_batched_tokens"]) == (
        "current",
        16,
        2048,
    )
    for trial in finished.trials:
        shown = trial["measurement"]
        ended = shown["completed"] + shown["refused"] + shown["timed_out"] + shown["aborted"]
        assert shown["offered"] == 240 == ended
    assert set(finished.result) == {
        *("schema", "state", "method", "objective", "tail", "slos", "recommendation"),
        *("load", "ladder", "knobs", "starting_points", "variants", "clients"),
        *("nearest", "restlessness"),
        *("baseline", "evidence", "limited_by", "confirmed_cold", "capacity", "caveats"),
        *("provenance", "serve_values", "trace_description", "live_against_shadow"),
        "trials",
    }
    assert finished.result["state"] == "complete"
    assert finished.result["baseline"]["max_num_seqs"] == 16
    made = finished.result["provenance"]
    assert made["trace"]["requests"] == made["trace"]["replayed_requests"] == 240
    # One start for the whole search and race, and one each for winner and current one, cold.
    assert (made["engine"]["kind"], made["engine_starts"]) == ("toy", 3)


def test_it_leaves_a_page_and_the_timelines_of_those_that_raced(finished: Run) -> None:
    page = (finished.run_dir / "report.html").read_text()
    assert "No timeline" not in page
    assert "kept no timelines" not in page
    kept = json.loads((finished.run_dir / "timelines.json").read_text())["replays"]
    raced = {
        (t["max_num_seqs"], t["max_num_batched_tokens"])
        for t in finished.trials
        if t["phase"] == "race"
    }
    assert {(r["max_num_seqs"], r["max_num_batched_tokens"]) for r in kept} == raced
    for replay in kept:
        assert [sum(window["arrivals"]) for window in replay["windows"]] == [240]


@pytest.mark.slow
def test_another_format_is_written_in_place_of_vllms(trace: Path) -> None:
    done = run(ToySource(CROWDED), trace, *SHORT, "--format", "kubernetes")
    read = yaml.safe_load(done.emitted.read_text())
    assert read["kind"] == "Deployment"
    (container,) = read["spec"]["template"]["spec"]["containers"]
    best = done.result["recommendation"]["max_num_seqs"]
    assert f"--max-num-seqs={best}" in container["args"]


def test_what_could_not_be_written_in_the_end_is_refused_at_the_beginning(
    trace: Path,
) -> None:
    arguments = arguments_for(trace, *SHORT)
    arguments[arguments.index("-o") + 1] = str(trace.with_name("best.txt"))
    with pytest.raises(UsageError, match=r"must end in \.yaml"):
        job_on(ToySource(CROWDED), arguments)
    assert not (trace.parent / "run").exists()


def test_a_change_is_confirmed_on_engines_started_cold(finished: Run) -> None:
    found = finished.result["recommendation"]
    assert found["verdict"] == "change"
    cold = [t for t in finished.trials if t["phase"] == "cold"]
    assert list(dict.fromkeys(t["max_num_seqs"] for t in cold)) == [found["max_num_seqs"], 16]
    assert finished.trials[-len(cold) :] == cold
    # The toy is without noise: cold it measures what it measured in the race.
    low, high = found["gain_here_interval"]
    assert low < finished.result["confirmed_cold"]["ratio"] - 1 < high
    assert finished.result["confirmed_cold"]["p_better"] > 0.9
    assert "not_confirmed_cold" not in finished.caveats
    assert "confirmed on engines started cold" in finished.emitted.read_text()
    assert (finished.result["method"], finished.result["capacity"]) == ("live", None)
    assert {t["engine"] for t in finished.trials} == {"live"}
    assert set(finished.result["provenance"]["stages_s"]) == {"start", "race", "cold"}


@pytest.mark.parametrize(
    "error",
    [
        EngineError("the device is lost"),
        pytest.param(UsageError("the device is lost"), marks=pytest.mark.slow),
        pytest.param(KeyboardInterrupt(), marks=pytest.mark.slow),
    ],
)
def test_what_was_decided_stands_though_what_is_told_beside_it_is_not_found(
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Session, "_find_capacity", fail)
    is_stopped = isinstance(error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if is_stopped else nullcontext():
        assert job_on(ToySource(CROWDED), arguments_for(trace, *SHORT)) == 0
    out, err = capsys.readouterr()
    done = Run(trace.parent, err, out)
    found, cold = done.result["recommendation"], done.result["confirmed_cold"]
    own = [t["max_num_seqs"] for t in done.trials if t["phase"] == "cold"]
    assert list(dict.fromkeys(own)) == [found["max_num_seqs"], 16]
    assert found["odds"]["p_better"] > 0.9
    assert found["gain_interval"][0] < found["gain_ratio"] < found["gain_interval"][1] < 0
    assert cold["ratio"] == pytest.approx(1 + found["gain_ratio"], abs=0.1)
    assert "not_confirmed_cold" not in done.caveats
    said = "interrupted once this was decided: not all may be told beside it"
    assert done.result["state"] == ("interrupted" if is_stopped else "complete")
    assert (said in done.emitted.read_text()) is is_stopped
    missing = "the result lacks how much load it bears or part of it: the device is lost"
    assert (missing in " ".join(err.split())) is not is_stopped


@pytest.mark.slow
def test_what_was_decided_stands_though_the_cold_engines_are_interrupted(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = TrialRunner.measure

    def interrupted(runner: TrialRunner, limits: EngineLimits, *args: Any, **named: Any) -> Any:
        if Phase.COLD in args and limits.max_num_seqs == 16:
            raise KeyboardInterrupt
        return measured(runner, limits, *args, **named)

    monkeypatch.setattr(TrialRunner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job_on(ToySource(CROWDED), arguments_for(trace, *SHORT))
    out, err = capsys.readouterr()
    done = Run(trace.parent, err, out)
    found = done.result["recommendation"]
    cold = [t["max_num_seqs"] for t in done.trials if t["phase"] == "cold"]
    assert done.result["state"] == "interrupted"
    assert found["verdict"] == "change"
    assert set(cold) == {found["max_num_seqs"]}
    assert found["odds"]["p_better"] > 0.9
    low, high = found["gain_interval"]
    assert low < found["gain_ratio"] < min(high, 0)
    assert "not_confirmed_cold" in done.caveats


def test_before_the_first_trial_it_says_what_will_be_done_and_for_how_long(
    finished: Run,
) -> None:
    talk = finished.talk
    before = talk[: talk.index("trial   0")]
    for word in ("requests", "in flight", "plan: caps 4, 8, 16", "at most 0:40", "demo model"):
        assert word in before
    assert "current configuration 16/2048" in before
    assert "\x1b[" not in talk


def test_the_demo_model_is_a_caveat_and_stands_in_the_file(finished: Run) -> None:
    assert "demo_model" in finished.caveats
    emitted = yaml.safe_load(finished.emitted.read_text())
    assert (emitted["load-format"], emitted["enforce-eager"]) == ("dummy", True)


@pytest.mark.slow
def test_a_closed_loop_says_so_and_keeps_its_number_in_flight(trace: Path) -> None:
    more = ("--load-model", "closed", "--concurrency", "6", *SHORT)
    done = run(ToySource(CROWDED), trace, *more)
    assert "closed_loop" in done.caveats
    assert max(t["measurement"]["running"]["max"] for t in done.trials) == 6


@pytest.mark.slow
def test_an_slo_is_a_bound_and_not_a_price(finished: Run, trace: Path) -> None:
    """A cap of ten is best by latency; a bound on TPOT that only smaller ones meet rules."""
    tpot_s = {t["max_num_seqs"]: t["measurement"]["tpot_s"]["p90"] for t in finished.trials}
    slo = f"tpot_p90={tpot_s[4] * 1.02 * 1000:.3f}ms"
    bound = run(ToySource(CROWDED), trace, "--slo", slo, *SHORT)
    found = bound.result["recommendation"]
    assert found["max_num_seqs"] < finished.result["recommendation"]["max_num_seqs"]
    assert "SLO tpot_p90" in bound.result["limited_by"]


@pytest.mark.slow
def test_a_study_can_be_kept_elsewhere_and_two_runs_of_one_name_there_do_not_mix(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'both.db'}"
    results: list[Run] = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        trace = write_trace(tmp_path / name / "t.jsonl", seed=len(results))
        results.append(run(ToySource(CROWDED), trace, "--storage", url, *SHORT))
    assert (tmp_path / "both.db").stat().st_size > 0
    assert not any((run_.run_dir / "study.db").exists() for run_ in results)
    assert [run_.trials[0]["number"] for run_ in results] == [0, 0]
    first, second = (run_.trials[0]["measurement"]["e2e_s"]["mean"] for run_ in results)
    assert first != second
