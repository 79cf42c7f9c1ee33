"""`tune calibrate`: a recording of a server corrects the profile of its engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.recorded_parts import MODEL, a_recording
from support.run_parts import a_profile as toy_profile
from support.served_parts import CALM, STEPS, recorded
from support.shadow_files import a_profile
from tuner.cli import run
from tuner.shadow.profiles import read_profile, write_profile
from tuner.traffic.formats.native import native_rows
from tuner.traffic.traces import Trace

AT_LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--force-profile")


def write_recording(path: Path, trace: Trace) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in native_rows(trace)))
    return str(path)


@pytest.mark.slow
@pytest.mark.engine
def test_a_corrected_profile_gives_back_what_was_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served = recorded(CALM.trace(), STEPS.served(0.004, 0.8), frontend_s=0.003)
    trace = write_recording(tmp_path / "recording.jsonl", served)
    kept, corrected = tmp_path / "profile.yaml", tmp_path / "served.profile.yaml"
    write_profile(kept, replace(a_profile(), step_model=STEPS))
    command = ["calibrate", "--profile", str(kept), "--trace", trace, *AT_LIMITS]
    capfd.readouterr()  # what vLLM said while it was recorded
    assert run([*command, "-o", str(corrected), "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["limits"] == {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    assert shown["added_step_s"] == pytest.approx(0.004, abs=0.0005)
    assert abs(shown["off_now"]["e2e p50"]) < abs(shown["off_before"]["e2e p50"]) / 3
    assert read_profile(kept).step_model == STEPS

    shadow = ["replay", "--engine", "shadow", "--profile", str(corrected), "--trace", trace]
    assert run([*shadow, *AT_LIMITS, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert served.e2e_s is not None
    wanted_s = sorted(served.e2e_s)[len(served) // 2]
    # Without what the front end added, which is no step: 1 %.
    assert found["e2e_s"]["p50"] == pytest.approx(wanted_s, rel=0.05)
    assert found["completed"] == len(served)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-o", "x.yaml"], "--profile is missing"),
        (["--profile", "x.yaml"], "--output is missing"),
        (["--profile", "x.yaml", "-o", "y.yaml", "--load", "2"], "--load would change"),
        (["--profile", "gone.yaml", "-o", "y.yaml"], "gone.yaml cannot be read"),
    ],
)
def test_what_cannot_be_corrected_is_reported(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_recording(tmp_path / "recording.jsonl", CALM.trace())
    assert run(["calibrate", "--trace", trace, *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("served_by", "refused"),
    [
        ({}, ""),
        ({"model": "/models/toy", "device": ""}, ""),
        ({"model": "toy-2"}, "the profile was made with the model toy, here is toy-2"),
        ({"device": "NVIDIA L4"}, "the profile was made with the device toy, here is NVIDIA"),
    ],
)
def test_steps_of_another_engine_correct_nothing_unless_it_is_forced(
    served_by: dict[str, Any],
    refused: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace, output = a_recording(tmp_path, "prod", **served_by), tmp_path / "corrected.yaml"
    kept = tmp_path / "profile.yaml"
    write_profile(kept, replace(toy_profile(), step_model=MODEL))
    words = ["calibrate", "--profile", kept, "--trace", trace, "-o", output]
    words += ["--steps", tmp_path / "prod.steps"]
    assert run(list(map(str, words))) == (2 if refused else 0)
    assert refused in capsys.readouterr().err
    assert output.exists() is not bool(refused)
    assert run([*map(str, words), "--force-profile"]) == 0


@pytest.mark.engine
def test_a_trace_without_times_is_no_recording_of_a_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = write_recording(tmp_path / "recording.jsonl", CALM.trace())
    kept, corrected = tmp_path / "profile.yaml", tmp_path / "served.profile.yaml"
    write_profile(kept, a_profile())
    command = ["calibrate", "--profile", str(kept), "--trace", trace, *AT_LIMITS]
    assert run([*command, "-o", str(corrected)]) == 2
    assert "does not say when tokens came" in capfd.readouterr().err
    assert not corrected.exists()
