"""What goes wrong in a run is told: failing engines, SLOs out of reach, requests too long."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from support.job_parts import SHORT, arguments_for, run
from support.odd_toys import FragileSource
from support.run_parts import CEILING, Heard, a_profile, a_run, a_space
from support.toy import ToySource
from support.toy_tune import CROWDED, job_on, write_trace
from support.traffic import a_trace, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import (
    EngineError,
    NoFeasibleConfigError,
    StorageError,
    TooFewSamplesError,
    UsageError,
)
from tuner.replay.slo import Slo
from tuner.run.inputs import fit_lengths
from tuner.run.journal import Journal
from tuner.run.options import TuningOptions
from tuner.run.sessions import shadow as shadow_session
from tuner.run.sessions.shadow import ShadowSession
from tuner.run.start import prepare
from tuner.run.tune import _Run
from tuner.search.race import RaceDecision
from tuner.search.trials import Trial
from tuner.shadow.predictor import Predictor
from tuner.traffic.traces import TooLong


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace on disk."""
    return write_trace(tmp_path / "t.jsonl")


@pytest.mark.slow
def test_requests_above_the_models_length_are_refused_and_counted(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", n=200)
    long = '{"arrived_at_s": %d, "input_length": 5000, "output_length": 9}\n'
    path.write_text(path.read_text() + "".join(long % second for second in range(40)))
    done = run(ToySource(CROWDED), path, "--too-long", "refuse", *SHORT)
    assert "40 of 240 requests exceed max_model_len 4096: they will be refused" in done.talk
    whole = [t["measurement"] for t in done.trials if t["tier"] != "3 cut short"]
    assert {(m["refused"], m["offered"]) for m in whole} == {(40, 240)}
    assert "requests_refused" in done.caveats


def test_requests_above_the_models_length_can_be_left_out() -> None:
    trace = a_trace([float(s) for s in range(20)], prompt=[100] * 15 + [5000] * 5, output=9)
    fitted, message = fit_lengths(trace, 4096, TooLong.DROP)
    assert len(fitted) == 15
    assert "5 of 20 requests exceed max_model_len 4096: they were dropped" in message


@pytest.mark.slow
def test_an_slo_nothing_meets_names_the_nearest_and_what_broke(trace: Path) -> None:
    with pytest.raises(NoFeasibleConfigError) as caught:
        job_on(ToySource(CROWDED), arguments_for(trace, "--slo", "ttft_p50=1ms", *SHORT))
    assert caught.value.exit_code == 3
    assert "nearest is " in caught.value.message
    assert "ttft_p50" in caught.value.message
    assert "exceeds 0.001 s" in caught.value.message
    assert "with probability 0.00" in caught.value.message
    assert "longer --budget" not in caught.value.hint
    result = json.loads((trace.parent / "run" / "result.json").read_text())
    assert result["recommendation"] is None
    assert {t["tier"] for t in result["trials"]} == {"2 breaks an SLO"}
    assert not (trace.parent / "best.yaml").exists()


def test_a_window_that_cannot_carry_the_slo_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", n=60)
    with pytest.raises(TooFewSamplesError, match="needs at least 100 requests") as caught:
        job_on(ToySource(), arguments_for(trace, "--slo", "e2e_p99=9s", *SHORT))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "shown"), [(False, "no memory for"), (True, "the toy died of its limits")]
)
def test_a_configuration_that_fails_is_recorded_with_its_cause_and_the_search_goes_on(
    trace: Path, *, dies: bool, shown: str
) -> None:
    source = FragileSource(fails_above=16, dies=dies)
    done = run(source, trace, "--max-num-seqs", "4,8,16,32", "--budget", "60s")
    failed = [t for t in done.trials if t["tier"] == "4 failed"]
    assert {t["max_num_seqs"] for t in failed} >= {32}
    for trial in failed:
        assert shown in trial["cause"]
        assert trial["value"] is None
        assert trial["measurement"] is None
    assert done.result["recommendation"]["max_num_seqs"] <= 16
    tried = [t for t in done.trials if t["phase"] == "cold"]
    cold = {(t["max_num_seqs"], t["max_num_batched_tokens"], t["race_round"]) for t in tried}
    is_change = done.result["recommendation"]["verdict"] == "change"
    assert len(cold) in ((2, 4) if is_change else (0,))
    assert done.result["provenance"]["engine_starts"] == 1 + len(failed) + len(cold)
    assert shown in done.talk


@pytest.mark.slow
def test_caps_that_all_fail_above_the_current_do_not_end_the_run(tmp_path: Path) -> None:
    """Three failures in a row are the fault of three caps while a lower one works."""
    trace = write_trace(tmp_path / "t.jsonl", per_s=40)
    source = FragileSource(fails_above=16)
    done = run(source, trace, "--max-num-seqs", "16,32,64", "--budget", "60s")
    assert done.result["recommendation"]["max_num_seqs"] == 16
    assert sum(t["tier"] == "4 failed" for t in done.trials) >= 3


def test_an_engine_that_never_works_ends_the_run_with_its_last_words(trace: Path) -> None:
    with pytest.raises(EngineError, match="the toy died of its limits") as caught:
        job_on(ToySource(dies_above=0), arguments_for(trace, *SHORT))
    assert caught.value.exit_code == 4
    log = trace.parent / "run" / "engine.log"
    assert str(log) in str(caught.value.hint)
    assert "the toy died of its limits" in log.read_text()
    assert not (trace.parent / "best.yaml").exists()


@pytest.mark.slow
def test_a_current_configuration_that_fails_is_an_infeasible_trial_0(trace: Path) -> None:
    source = FragileSource(CROWDED, fails_above=15)
    more = ("--window", "all", "--max-num-seqs", "8", "--budget", "60s")
    done = run(source, trace, *more)
    assert (done.trials[0]["tier"], done.trials[0]["measurement"]) == ("4 failed", None)
    assert "no memory for 16" in done.trials[0]["cause"]
    found = done.result["recommendation"]
    assert (found["verdict"], found["gain_ratio"]) == ("change", None)


def test_an_engine_that_refuses_a_key_is_told_before_anything_is_measured(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="refuses the key toy-refuses"):
        job_on(ToySource(), arguments_for(trace, "--engine-arg", "toy-refuses=1", *SHORT))
    assert "trial" not in capsys.readouterr().err
    assert [one.name for one in trace.parent.iterdir()] == ["t.jsonl"]


def test_a_prediction_stands_though_memory_is_short_for_what_is_told_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting with much room is asked for many times the load, of which copies are made."""

    def short(*_: object) -> None:
        raise UsageError("64 times the trace is 12,800,000,000 requests")

    monkeypatch.setattr(shadow_session, "predict_capacity", short)
    traffic, slos = steady(300, per_s=2.0), (Slo.parse("e2e_p90=60s"),)
    with a_run(tmp_path, traffic, a_space(EngineLimits(16, 2048)), slos=slos) as begun:
        session = ShadowSession(begun.context, Predictor(a_profile(), CEILING))
        decision = session.run()
        state, heard = begun.context.journal.state, begun.context.listener
    assert (session.decision, state) == (decision, "done")
    assert isinstance(heard, Heard)
    assert "lacks how much load it bears or part of it: 64 times" in " ".join(heard.notes)


class AwayJournal(Journal):
    """A study whose storage is away for good."""

    def set_state(self, text: str) -> None:
        """Raise StorageError."""
        raise StorageError(f"the storage is away, and cannot say {text}")

    def records(self) -> list[Trial]:
        """Raise StorageError."""
        raise StorageError("the storage is away")


@dataclass(slots=True)
class EndedSession(ShadowSession):
    """A run that ends with an error before anything is decided."""

    error: BaseException = field(default_factory=KeyboardInterrupt)

    def run(self) -> RaceDecision:
        """Raise the error."""
        raise self.error


@pytest.mark.parametrize("error", [EngineError("it fell off the bus"), KeyboardInterrupt()])
def test_what_ended_a_run_is_told_though_its_storage_is_away_by_then(
    tmp_path: Path, error: BaseException
) -> None:
    space, traffic = a_space(EngineLimits(16, 2048)), steady(40, per_s=10)
    predictor = Predictor(a_profile(), space.ceiling)
    with a_run(tmp_path, traffic, space) as begun:
        journal = AwayJournal(begun.context.run_dir.storage_url, "study", join=True)
        context = replace(begun.context, journal=journal)
        session = EndedSession(context, predictor, error=error)
        prepared = prepare(TuningOptions(traffic, run_dir=tmp_path / "other"))
        with pytest.raises(type(error)) as caught:
            _Run(prepared, session, None).to_the_end()
        journal.close()
    assert caught.value is error
