"""The GPU campaign runs on the demo model from end to end, goes on, and tells all of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import bundled_profiles, read_profile, write_profile

SCRIPT = ROOT / "tests" / "benchmarks" / "gpu_campaign.py"


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("gpu_campaign")


@pytest.fixture
def stages(campaign: Any) -> Any:
    """Return the module of what its stages do."""
    return sys.modules[campaign.Campaign.__module__]


def run(out: Path, *more: str) -> str:
    """Run the script at small size, and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--small", "--out", str(out), *more],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kept(out: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{stage}.json").read_text())
    return found


@pytest.mark.engine
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_its_stages_measure_keep_and_go_on(tmp_path: Path) -> None:
    wanted = ("doctor", "starts", "truth-qwen", "truth-drafts", "race", "overhead", "derived")
    only = [word for stage in wanted for word in ("--only", stage)]
    said = run(tmp_path, "--slice", "45m", *only)
    for stage in wanted:
        found = kept(tmp_path, stage)
        assert found["state"] == "done", found
        assert f"| {stage} | done |" in said
    first = kept(tmp_path, "starts")["result"]
    assert [one["num_blocks"] for one in first["starts"]] == [
        first["starts"][0]["num_blocks"]
    ] * 3
    assert first["third_off"] == first["second_off"] == 0
    truth = kept(tmp_path, "truth-qwen")["result"]
    assert set(truth["predicted"]) == {"8/1024", "4/512"}
    assert (tmp_path / "truth-qwen.profile.yaml").exists()
    assert kept(tmp_path, "race")["result"]["status"] == 0
    assert kept(tmp_path, "overhead")["result"]["ratio"] > 0.3
    assert "no tables of CPU" in said
    assert "| truth-mooncake | not run |" in said
    # Nothing is done twice.
    again = run(tmp_path, "--slice", "45m", *only)
    assert again == said[said.index("| stage") :]


@pytest.mark.slow
def test_a_stage_that_would_not_fit_is_left_to_the_next_slice(tmp_path: Path) -> None:
    said = run(tmp_path, "--slice", "25s")
    assert "starts wants 140 s: left to the next slice" in said
    assert not list(tmp_path.glob("*.json"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--only", "no-such"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no stage no-such" in done.stderr


def test_a_stage_that_fails_leaves_its_reason(campaign: Any, tmp_path: Path) -> None:
    one = campaign.Campaign(campaign.small(tmp_path), tmp_path, tmp_path, 1e12, True)
    broken = campaign.Stage("broken", lambda _: 1 / 0, 10)
    campaign.run_stage(one, broken)
    found = kept(tmp_path, "broken")
    assert (found["state"], found["error"]) == ("failed", "ZeroDivisionError: division by zero")
    assert "test_gpu_campaign.py" in found["traceback"]


@pytest.mark.slow
def test_a_derived_profile_is_held_to_what_was_measured(
    campaign: Any, stages: Any, tmp_path: Path
) -> None:
    """Measured is here what the ready profile of that card says, all a tenth slower."""
    profile = read_profile(bundled_profiles()["meta-llama-3.1-8b.1xh100_sxm"])
    slower = replace(profile, step_model=profile.step_model.scaled(1.1))
    learnt = tmp_path / "learnt.yaml"
    write_profile(learnt, slower)
    size = stages.small(tmp_path)
    scenario = stages.Scenario(
        name="llama",
        trace=size.conv[0],
        window_s=20.0,
        settings=("64/8192", "16/2048"),
        values={"model": "examples/llama-3.1-8b-shape", "max-model-len": "16384"},
    )
    window = stages.shadow_truth.traffic(scenario)
    live, shadow = {}, {}
    for name in scenario.settings:
        limits = stages.truth_figures.limits_of(name)
        found = Predictor(slower).measure([window], limits, ReplayPlan())
        assert isinstance(found, Measurement)
        live[name], shadow[name] = [found.as_json()], found.as_json()
    result = {
        "scenario": asdict(scenario),
        "trace_path": scenario.trace,
        "device": profile.shape.device,
        "num_blocks": profile.kv_starts[0].num_blocks,
        "live": live,
        "shadow": shadow,
        "predicted": list(live),
    }
    told = stages.derived_against(json.loads(json.dumps(result)), learnt)
    assert "derived from published tables" in told["origin"]
    assert told["tpot_p50"]["learnt"] == pytest.approx(0.0, abs=1e-6)
    assert 0.03 < told["tpot_p50"]["derived"] < 0.3
    assert told["tpot_p50"]["learnt apart"] == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < told["tpot_p50"]["derived apart"] < 0.1  # all steps take as many times as long
    row = campaign._derived_row({"truth-llama": told})
    assert row.startswith("truth-llama: TPOT off ")
    other = stages.derived_against({**result, "device": "a card of its own"}, learnt)
    assert other == {"skipped": "no tables of a card of its own"}
