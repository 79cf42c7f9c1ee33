"""What a profile's recording has not shown, and its own error, are said wherever it is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.paths import ROOT
from support.recorded_parts import LIMITS, a_recording
from support.traffic import steady
from tuner.cli import run
from tuner.run.result import read_result
from tuner.shadow.profiles import Seen, read_profile

QUIET = steady(150, per_s=1.0, prompt=400, output=60)
"""One request at a time, most of the time."""


def fitted(recording: Path) -> Path:
    """Return the profile that the command learns of a recording."""
    path = recording.with_name("fitted.yaml")
    words = ["profile", "fit", "--recording", str(recording), "-o", str(path), "--json"]
    assert run(words) == 0
    return path


def tuned(profile: Path, trace: Path, *more: str) -> int:
    """Return how a run by prediction ends."""
    words = ["--method", "shadow", "--profile", str(profile), "--trace", str(trace)]
    words += ["--run-dir", str(profile.parent / "run"), "-o", str(profile.parent / "best.yaml")]
    return run([*words, "--max-num-seqs", "8", *more])


@pytest.mark.slow
def test_a_profile_knows_how_full_batches_were_seen_and_a_run_beyond_them_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = fitted(a_recording(tmp_path, "quiet", trace=QUIET))
    told = json.loads(capfd.readouterr().out)
    seen = read_profile(profile).seen
    assert seen == Seen(told["most_decode_seqs"], told["most_prefill_tokens"])
    assert seen.decode_seqs < 4
    busy = a_recording(tmp_path, "busy", trace=steady(100, per_s=6.0, prompt=400, output=60))
    assert tuned(profile, busy, "--force-profile") == 0
    (caveat,) = (c for c in read_result(tmp_path / "run").caveats if c.id == "extrapolated")
    assert "predicted beyond what was measured: " in caveat.text
    assert f"of more than the {seen.decode_seqs} decoding sequences" in caveat.text
    assert f"caveat: {caveat.text}" in (tmp_path / "best.yaml").read_text()


@pytest.mark.slow
def test_within_what_was_seen_nothing_is_said(tmp_path: Path) -> None:
    # Prompts so short that other token budgets make no other batches.
    trace = steady(300, per_s=6.0, prompt=100, output=60)
    recording = a_recording(tmp_path, "busy", trace=trace)
    assert tuned(fitted(recording), recording, "--force-profile") == 0
    caveats = {caveat.id for caveat in read_result(tmp_path / "run").caveats}
    assert "extrapolated" not in caveats


def test_a_recording_that_its_profile_does_not_come_up_with_is_not_ranked_by(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recording = a_recording(tmp_path, "held", held_up_s=1.0)
    profile = fitted(recording)
    told = json.loads(capfd.readouterr().out)
    *_, last = told["warnings"]
    assert told["warnings"][0].startswith("first tokens are ")
    assert "tune does not rank by it" in last
    off = told["off"]
    wrong = max(abs(off["tpot p50"]), abs(off["e2e p50"]))
    assert read_profile(profile).metric_error_ratio == pytest.approx(wrong)
    assert tuned(profile, recording) == 2
    said = capfd.readouterr().err
    assert "wrong by" in said


def test_a_server_started_again_is_held_to_what_it_served_since(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 256}
    a_recording(folder, "prod", held_up_s=1.0, limits=limits)
    since = steady(100, per_s=6.0, prompt=400, output=60)
    a_recording(folder, "prod.1", trace=since, later_s=1000.0)
    profile = read_profile(fitted(folder))
    assert profile.current_limits == LIMITS
    assert profile.metric_error_ratio == pytest.approx(0.0, abs=0.05)
    assert json.loads(capfd.readouterr().out)["warnings"] == []


def test_a_half_written_last_line_does_not_keep_a_profile_from_being_held_to_its_recording(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recording = a_recording(tmp_path, "held", held_up_s=1.0)
    recording.write_bytes(recording.read_bytes()[:-20])
    assert (read_profile(fitted(recording)).metric_error_ratio or 0.0) > 0.2
    assert "tune does not rank by it" in capfd.readouterr().out
    few = a_recording(tmp_path, "few", trace=steady(60, per_s=6.0, prompt=400, output=60))
    assert read_profile(fitted(few)).metric_error_ratio is None
    (said,) = json.loads(capfd.readouterr().out)["warnings"]
    assert "was not held to the recorded times" in said


@pytest.mark.slow
def test_a_derived_profile_says_its_own_error_before_and_after_a_point(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    derived, profile = tmp_path / "derived.yaml", tmp_path / "anchored.yaml"
    shutil.copy(ROOT / "profiles" / "gpu" / "meta-llama-3.1-8b.1xh200_sxm.yaml", derived)
    point = ["--anchor", "itl=8ms@running=14", "-o", str(profile)]
    assert run(["calibrate", "--profile", str(derived), *point]) == 0
    assert "taken to be wrong by 10%" in capfd.readouterr().out
    trace = a_recording(tmp_path, "few", trace=steady(60, per_s=6.0, prompt=100, output=20))
    for path, said in ((derived, "up to 20 % off"), (profile, "to be 10 % wrong")):
        words = ["replay", "--engine", "shadow", "--profile", str(path), "--force-profile"]
        assert run([*words, "--trace", str(trace)]) == 0
        assert said in capfd.readouterr().out
    assert tuned(profile, trace, "--force-profile") == 0
    told = {c.id: c.text for c in read_result(tmp_path / "run").caveats}["derived"]
    assert told.endswith("taken to be 10 % wrong")
    assert f"caveat: {told}" in capfd.readouterr().err
