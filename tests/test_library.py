"""A Python program tunes with a few names, and gets and leaves what the command does."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tuner
from support.paths import ROOT
from support.toy import ToySource
from support.toy_tune import CROWDED, job_on, write_trace
from tuner import library
from tuner.errors import Caveat, NoFeasibleConfigError, UsageError
from tuner.recorder.rows import recorded_by
from tuner.run.listener import Listener
from tuner.run.outcome import own_version
from tuner.run.result import RunResult
from tuner.search.trials import Trial


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace on disk."""
    return write_trace(tmp_path / "prod.jsonl", n=160)


def asked(trace: Path, **more: Any) -> tuner.TuningOptions:
    """Return the options of a short live run."""
    config = trace.parent / "current.yaml"
    config.write_text("model: m\nport: 8000\n")
    return replace(
        tuner.TuningOptions(
            trace=tuner.read_trace(trace),
            config=config,
            ladder=(4, 8, 16),
            budget_s=40.0,
            method=tuner.Method.LIVE,
            run_dir=trace.parent / "run",
        ),
        **more,
    )


@dataclass(slots=True)
class Told(Listener):
    """A listener that remembers, and stops the run after some trials."""

    stop: BaseException | None = None
    after: int = 3
    trials: int = 0
    notes: list[str] = field(default_factory=list)
    results: list[RunResult] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a sentence."""
        self.notes.append(text)

    def trial_ended(self, trial: Trial, left_s: float) -> None:  # noqa: ARG002
        """Count, and stop the run where it is to be stopped."""
        self.trials += 1
        if self.stop is not None and self.trials >= self.after:
            raise self.stop

    def result_written(self, result: RunResult, run_dir: Path) -> None:
        """Keep a result that is on disk."""
        assert (run_dir / "result.json").exists()
        self.results.append(result)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, tuner; print(*dir(tuner)); "
        "print([m for m in ('numpy', 'click', 'vllm', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert set(tuner.__all__) <= set(names.split())


def test_every_name_is_there_and_none_is_hidden_by_a_package() -> None:
    packages = {p.parent.name for p in (ROOT / "tuner").glob("*/__init__.py")}
    modules = {p.stem for p in (ROOT / "tuner").glob("*.py")}
    assert not set(tuner.__all__) & (packages | modules)
    for name in tuner.__all__:
        assert getattr(tuner, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tuner.nonsense  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Told]:
    """Tune once on an engine that is doubtful; return the trace, and what was told."""
    trace, listener = (
        write_trace(tmp_path_factory.mktemp("tuned") / "prod.jsonl", n=160),
        Told(),
    )
    doubtful = frozenset({Caveat.DRAFTS_ON_RANDOM_TEXT, Caveat.EXPERTS_ON_RANDOM_TEXT})
    result = tuner.tune(asked(trace), listener, source=ToySource(CROWDED, caveats=doubtful))
    assert listener.results == [result]
    return trace, listener


def test_whatever_the_functions_take_can_be_named_by_the_package() -> None:
    """Of what a caller has to make, or to choose from; a typed script has no other names."""
    taken: set[str] = set()
    for function in (tuner.read_trace, tuner.render_config, tuner.check_drift, tuner.tune):
        taken |= set(re.findall(r"\b[A-Z]\w+", str(function.__annotations__)))
    for option in fields(tuner.TuningOptions):
        taken |= set(re.findall(r"\b[A-Z]\w+", str(option.type)))
    of_python = {"None", "Path", "Sequence", "Mapping"}
    # A parsed window, what a run is made of, another engine, and what check_drift returns.
    of_no_caller = {"WindowChoice", "PreparedRun", "EngineSource", "Checked"}
    assert taken - of_python - of_no_caller <= set(tuner.__all__)


def test_a_profile_is_read_by_its_path_as_text_and_by_the_name_it_comes_with() -> None:
    path = ROOT / "profiles" / "demo.profile.yaml"
    assert tuner.read_profile(str(path)) == tuner.read_profile(path)
    assert tuner.read_profile("demo") == tuner.read_profile(path)


def test_slos_are_taken_as_people_type_them(trace: Path) -> None:
    typed = asked(trace, slos=["ttft_p99=500ms"], method="live")
    assert typed.slos == (tuner.Slo.parse("ttft_p99=500ms"),)
    assert typed.method is tuner.Method.LIVE


@pytest.mark.slow
def test_what_is_doubtful_of_an_engine_is_so_of_predictions_from_its_profile(
    tuned: tuple[Path, Told], tmp_path: Path
) -> None:
    trace, _ = tuned
    learnt = trace.parent / "run/profile.yaml"
    again = asked(
        trace, method="shadow", profile=learnt, is_forced=True, run_dir=tmp_path / "predicted"
    )
    result = tuner.tune(again)
    assert "experts_on_random_text" in {caveat.id for caveat in result.caveats}


def test_a_program_tunes_and_sees_what_to_run_with(tuned: tuple[Path, Told]) -> None:
    _, listener = tuned
    (result,) = listener.results
    assert "drafts_on_random_text" in [caveat.id for caveat in result.caveats]
    assert result.recommendation is not None
    # A step pays dearly for sequences beyond ten.
    assert result.recommendation.max_num_seqs in range(7, 13)
    assert result.gain is not None
    assert -1 < result.gain.value < 0
    assert "windowed" not in [caveat.id for caveat in result.caveats]
    assert listener.trials > 3
    assert any(note.startswith("current configuration 16/2048") for note in listener.notes)
    written = yaml.safe_load(tuner.render_config(result))
    assert written == {
        "model": "m",
        "port": 8000,
        "max-num-seqs": result.recommendation.max_num_seqs,
        "max-num-batched-tokens": result.recommendation.max_num_batched_tokens,
    }
    assert f"--max-num-seqs={written['max-num-seqs']}" in tuner.render_config(result, "args")
    with pytest.raises(UsageError, match="format must be one of vllm"):
        tuner.render_config(result, "yaml")


@pytest.mark.slow
def test_a_program_leaves_the_directory_that_the_command_leaves(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuner.tune(asked(trace), source=ToySource(CROWDED))
    mine = trace.parent / "run"
    typed = ["--trace", str(trace), "--config", str(trace.parent / "current.yaml")]
    typed += ["--max-num-seqs", "4,8,16", "--budget", "40s", "--method", "live"]
    typed += ["--run-dir", str(trace.parent / "typed")]
    assert job_on(ToySource(CROWDED), typed) == 0
    capsys.readouterr()
    names = {path.name for path in (trace.parent / "typed").iterdir()}
    assert {path.name for path in mine.iterdir()} == names
    assert {"report.html", "result.json", "profile.yaml", "traffic.json"} <= names
    # Rounds go by the clock, so two answers may differ in their last digits; the job may not.
    jobs = [
        json.loads((path / "run.json").read_text()) for path in (mine, mine.parent / "typed")
    ]
    for job in jobs:
        del job["study"], job["options"]["trace"], job["options"]["notes"]
    assert jobs[0] == jobs[1]
    result, theirs = (
        json.loads((path / "result.json").read_text()) for path in (mine, mine.parent / "typed")
    )
    assert result.keys() == theirs.keys()
    assert result["recommendation"].keys() == theirs["recommendation"].keys()
    # A step pays dearly for sequences beyond ten, whoever asks.
    for written in (result, theirs):
        assert written["recommendation"]["max_num_seqs"] in range(7, 13)


def stopped(trace: Path, stop: BaseException, state: str) -> Path:
    """Return the directory of a run that was stopped after three trials."""
    listener = Told(stop)
    with pytest.raises(type(stop)):
        tuner.tune(asked(trace), listener, source=ToySource(CROWDED))
    folder = trace.parent / "run"
    assert json.loads((folder / "result.json").read_text())["state"] == state
    assert [result.state for result in listener.results] == [state]
    assert (folder / "report.html").exists()
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 3
    return folder


def test_a_run_that_fails_keeps_the_best_so_far(trace: Path) -> None:
    stopped(trace, RuntimeError("x"), "failed")


@pytest.mark.slow
def test_a_run_that_is_interrupted_keeps_the_best_so_far_and_can_go_on(trace: Path) -> None:
    folder = stopped(trace, KeyboardInterrupt(), "interrupted")
    with pytest.raises(UsageError, match="program, which gave the trace itself"):
        job_on(ToySource(CROWDED), ["--resume", str(folder)])
    with pytest.raises(UsageError, match=r"load cannot change .* it was 1\.0, now 2\.0"):
        tuner.tune(asked(trace, is_resumed=True, load=2.0), source=ToySource(CROWDED))
    again = Told()
    done = tuner.tune(asked(trace, is_resumed=True), again, source=ToySource(CROWDED))
    assert done.state == "complete"
    assert again.trials == len((folder / "trials.jsonl").read_text().splitlines()) - 3


def test_a_run_that_measured_nothing_leaves_nothing(trace: Path) -> None:
    refused = asked(trace, engine_args={"toy-refuses": True})
    with pytest.raises(UsageError, match="toy-refuses"):
        tuner.tune(refused, source=ToySource())
    assert not (trace.parent / "run").exists()


@pytest.mark.slow
def test_what_nothing_can_meet_is_an_error_with_the_nearest(trace: Path) -> None:
    slos = [tuner.Slo.parse("ttft_p50=1ms")]
    with pytest.raises(NoFeasibleConfigError, match="nearest is"):
        tuner.tune(asked(trace, slos=slos), source=ToySource())


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"objective": "fastest"}, "objective must be one of balanced"),
        ({"ladder": ()}, "at least 1"),
        ({"budget_s": 1.0}, "too short for one trial"),
        ({"budget_s": float("nan")}, "--budget must end, got nan"),
        ({"budget_s": float("inf")}, "--budget must end, got inf"),
        ({"load_model": "closed", "concurrency": 0}, "concurrency must be at least 1"),
        ({"request_timeout_s": float("nan")}, "time-out must be above 0 s, got nan"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"slos": ["ttft"]}, "is not an SLO"),
        ({"load": 0.0}, "multiple above 0"),
        ({"window": "noon"}, "window must be all"),
        ({"objective": "goodput"}, "needs at least one"),
        ({"method": "shadow"}, "needs --profile"),
        (
            {"method": "shadow", "profile": "x.yaml", "is_greedy": True},
            "--greedy is for a live engine",
        ),
        (
            {"method": "shadow", "profile": "x.yaml", "clock": "wall"},
            "--clock wall is for a live engine",
        ),
        (
            {"method": "shadow", "profile": "x.yaml", "start_timeout_s": 60.0},
            "--start-timeout is for a live engine",
        ),
        ({"run_dir": None, "is_resumed": True}, "needs its run_dir"),
        ({"run_dir": "", "is_resumed": True}, "needs its run_dir"),
    ],
)
def test_options_that_cannot_be_used_are_refused_at_once(
    trace: Path, wrong: dict[str, Any], shown: str
) -> None:
    with pytest.raises(UsageError, match=shown):
        asked(trace, **wrong)


def test_one_replay_gives_a_measurement(trace: Path) -> None:
    read = tuner.read_trace([trace])
    log = tuner.replay_trace(read, ToySource(), tuner.EngineLimits(8, 2048))
    slo = tuner.Slo.parse("ttft_p99=500ms")
    measured = tuner.measure([log], [slo])
    assert measured.offered == len(read) == 160
    assert slo.slack_ratio(measured) is not None
    twice = tuner.replay_trace(read, ToySource(), plan=tuner.ReplayPlan(load=2.0))
    assert tuner.measure([twice]).requests_per_s > 1.2 * measured.requests_per_s


def test_the_traffic_of_a_run_has_not_drifted_from_itself() -> None:
    found = tuner.check_drift(
        ROOT / "examples" / "demo" / "run",
        tuner.read_trace(ROOT / "traces" / "translation.jsonl"),
    )
    assert found.verdict is tuner.DriftVerdict.UNCHANGED


@pytest.mark.slow
def test_what_the_readme_shows_runs(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a toy in vLLM's place and in less time; the text is the README's."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (trace.parent / "current.yaml").write_text("model: m\n")
    monkeypatch.chdir(trace.parent)
    monkeypatch.setattr(
        tuner, "tune", lambda options: tune_on(ToySource(CROWDED), options, 20.0)
    )
    printed: list[object] = []
    exec(block, {"tuner": tuner, "print": lambda *values: printed.extend(values)})  # noqa: S102
    advice, _, caveats = printed
    assert "max_num_seqs" in str(advice)
    assert isinstance(caveats, tuple)
    assert caveats
    for caveat in caveats:
        assert f"{caveat.id}: {caveat.text}" in str(caveats)
    assert "CaveatRecord" not in str(caveats)


def tune_on(source: ToySource, options: tuner.TuningOptions, budget_s: float) -> RunResult:
    """Run with another engine, for so long."""
    shorter = replace(options, budget_s=budget_s, method="live")  # type: ignore[arg-type]
    return library.tune(shorter, source=source)


def test_a_checkout_that_is_not_installed_has_a_version_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine to which nothing but folders could be carried."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert own_version() == "unknown"
    assert recorded_by() == "max-num-seqs-recorder unknown"
