"""Starting points: candidates, a place to begin at, and how far they are from the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.paths import ROOT
from support.shadow_files import a_profile, a_trace_file
from tuner.cli import run
from tuner.errors import UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.run.options import STARTING_POINTS, Method, TuningOptions
from tuner.run.result import RunResult, read_result
from tuner.run.start import prepare
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import write_profile
from tuner.traffic.formats import ReadOptions, read_traces


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a profile and traffic that fits a cap of two dozen."""
    folder = tmp_path_factory.mktemp("starting_points")
    write_profile(folder / "profile.yaml", a_profile())
    a_trace_file(folder / "prod.jsonl", 500, per_s=16.0)
    return folder


def tuned(files: Path, *more: str) -> RunResult:
    """Return what a run by prediction came to."""
    folder = files / f"run {len(list(files.iterdir()))}"
    words = ["--profile", str(files / "profile.yaml"), "--trace", str(files / "prod.jsonl")]
    words += ["--method", "shadow", "--force-profile", "--run-dir", str(folder)]
    assert run([*words, "-o", str(files / "best.yaml"), *more]) == 0
    return read_result(folder)


def test_the_answer_says_how_far_starting_points_are_from_it(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = tuned(files)
    told = capfd.readouterr().err
    trace = read_traces([str(files / "prod.jsonl")], None, ReadOptions())
    answer = Predictor(a_profile()).measure([trace], result.deployed, ReplayPlan())
    assert isinstance(answer, Measurement)
    assert [point.name for point in result.starting_points] == list(STARTING_POINTS)
    for point in result.starting_points:
        measured = Predictor(a_profile()).measure([trace], point.limits, ReplayPlan())
        assert isinstance(measured, Measurement)
        mine, best = (m.latency("e2e_s", result.tail) or 0.0 for m in (measured, answer))
        assert point.metric == f"e2e_{result.tail}"
        assert point.ratio == pytest.approx(mine / best, rel=1e-9)
        assert point.text in told
        assert f"# {point.text}\n" in (files / "best.yaml").read_text()


@pytest.mark.slow
def test_those_that_the_space_holds_are_candidates(files: Path) -> None:
    tried = {trial.limits for trial in tuned(files, "--max-num-seqs", "20").trials}
    assert STARTING_POINTS["low-latency"].limits in tried
    assert STARTING_POINTS["high-throughput"].limits not in tried
    tried = {trial.limits for trial in tuned(files, "--max-num-seqs", "12").trials}
    assert STARTING_POINTS["low-latency"].limits not in tried


@pytest.mark.slow
def test_a_run_starts_from_one_of_them_in_place_of_the_configurations_limits(
    files: Path,
) -> None:
    result = tuned(files, "--start", "low-latency")
    assert result.current == STARTING_POINTS["low-latency"].limits
    assert result.baseline.source == "starting point low-latency"
    assert result.trials[0].limits == result.current


def test_without_a_profile_its_share_of_memory_is_taken_too(files: Path) -> None:
    options = TuningOptions(
        trace=str(files / "prod.jsonl"),
        config={"model": "m", "max_num_seqs": 4, "gpu-memory-utilization": 0.3},
        start="high-throughput",
    )
    assert prepare(options).engine.values == {
        "model": "m",
        "max-num-seqs": 512,
        "max-num-batched-tokens": 65536,
        "gpu-memory-utilization": 0.92,
    }
    shadow = replace(options, profile=a_profile(), method=Method.SHADOW)
    assert prepare(shadow).engine.values["gpu-memory-utilization"] == 0.3


def test_one_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--start must be one of high-throughput, low-latency"):
        TuningOptions(trace="t.jsonl", start="fast")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--max-num-seqs", "8,1000000000"), "must list caps up to 262,144, got 1000000000"),
        (
            (
                *("--engine-arg", "max-num-seqs=2000000"),
                *("--engine-arg", "max-num-batched-tokens=2000000"),
            ),
            "max_num_seqs must be at most 1,048,576, got 2000000",
        ),
        (
            ("--engine-arg", "max-num-batched-tokens=1000000000"),
            "max_num_batched_tokens must be at most 16,777,216, got 1000000000",
        ),
    ],
)
def test_caps_that_no_engine_starts_with_are_refused(
    files: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    command = ["--profile", str(files / "profile.yaml"), "--trace", str(files / "prod.jsonl")]
    command += ["--method", "shadow", "--force-profile", "--run-dir", str(files / "refused")]
    assert run([*command, *more]) == 2
    assert words in capsys.readouterr().err
    assert not (files / "refused").exists()


@pytest.mark.parametrize("named", [True, False])
def test_only_who_names_no_model_is_told_that_the_demo_model_is_measured(
    *, named: bool
) -> None:
    """Also with a profile of it."""
    config = ROOT / "examples" / "demo" / "current.yaml" if named else None
    for profile in (None, ROOT / "profiles" / "demo.profile.yaml"):
        options = TuningOptions(
            trace=ROOT / "traces" / "chat.jsonl", config=config, profile=profile
        )
        assert prepare(options).engine.is_demo is not named
