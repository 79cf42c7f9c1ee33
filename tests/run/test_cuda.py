"""A run on an engine whose memory and graphs follow the limits, as on a CUDA device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.cuda_toy import NO_MEMORY, OUT_OF_MEMORY, CudaSource
from support.job_parts import SHORT, arguments_for, run
from support.toy_tune import CROWDED, job_on, write_trace
from support.traffic import ToyPrompts, kept, steady
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import EngineError
from tuner.replay.loop import replay
from tuner.replay.plan import ReplayPlan
from tuner.shadow.calibration import Calibration
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile

CURRENT = EngineLimits(8, 1024)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace on disk."""
    return write_trace(tmp_path / "t.jsonl")


@pytest.mark.slow
def test_a_ceiling_that_does_not_start_is_lowered_and_said(trace: Path) -> None:
    source = CudaSource(CROWDED, memory_blocks=700, token_blocks=1 / 8, current=CURRENT)
    done = run(source, trace, *SHORT)
    assert f"does not start at 64/8192: the engine did not start: {NO_MEMORY}" in done.talk
    assert "ceiling_lowered" in done.caveats
    started = done.result["provenance"]["engine"]["started_at_limits"]
    ceiling = EngineLimits(**started)
    assert ceiling == EngineLimits(64, 2048)
    assert all(
        EngineLimits(t["max_num_seqs"], t["max_num_batched_tokens"]).within(ceiling)
        for t in done.trials
    )
    kept = json.loads((trace.parent / "run" / "run.json").read_text())
    assert kept["ceiling"] == started


def test_an_engine_that_has_no_memory_as_it_is_ends_the_run(trace: Path) -> None:
    with pytest.raises(EngineError, match=NO_MEMORY) as caught:
        job_on(CudaSource(memory_blocks=1), arguments_for(trace, *SHORT))
    assert caught.value.exit_code == 4


@pytest.mark.slow
def test_a_setting_that_runs_out_of_memory_is_its_own_result(trace: Path) -> None:
    source = CudaSource(CROWDED, overflows_above=16, memory_blocks=4000)
    done = run(source, trace, "--max-num-seqs", "4,8,16,32", "--budget", "60s")
    failed = [t for t in done.trials if t["tier"] == "4 failed"]
    assert failed
    assert "graphs_of_ceiling" not in done.caveats
    assert {t["max_num_seqs"] for t in failed} <= {32, 64, 128}
    assert all(OUT_OF_MEMORY.removeprefix("torch.") in t["cause"] for t in failed)
    assert done.result["recommendation"]["max_num_seqs"] <= 16


@pytest.mark.slow
def test_a_warm_up_that_runs_out_of_memory_lowers_the_ceiling(trace: Path) -> None:
    source = CudaSource(CROWDED, overflows_above=32, overflows_at_once=True)
    done = run(source, trace, *SHORT)
    assert OUT_OF_MEMORY.removeprefix("torch.") in done.talk
    assert done.result["provenance"]["engine"]["started_at_limits"]["max_num_seqs"] == 32
    assert done.result["recommendation"]["max_num_seqs"] <= 32


@pytest.mark.slow
def test_graphs_that_cannot_be_hidden_are_said(trace: Path) -> None:
    source = CudaSource(CROWDED, memory_blocks=4000, hides_graphs=False)
    done = run(source, trace, *SHORT)
    assert "graphs_of_ceiling" in done.caveats
    assert "--format vllm-exact deploys them too" in done.talk


def test_a_start_that_hangs_ends_the_run_in_time(trace: Path) -> None:
    source = CudaSource(hangs_above=1)
    with pytest.raises(EngineError, match="did not start within 1 s"):
        job_on(source, arguments_for(trace, "--start-timeout", "1s", *SHORT))


CEILING = EngineLimits(256, 8192)
TRAFFIC = steady(400, per_s=60.0, prompt=60, output=30)
CAPS = [EngineLimits(4, 1024), EngineLimits(16, 512), EngineLimits(64, 2048), CEILING]
"""The smallest runs most steps with a prompt eagerly on an engine of its own."""


def raced(source: CudaSource) -> tuple[Profile, dict[EngineLimits, StepColumns]]:
    """Return the profile that steps on one engine make, and the steps of each setting."""
    engine = source.start({}, CEILING)
    steps = {}
    for limits in CAPS:
        engine.set_limits(limits)
        log = replay(engine, TRAFFIC, ToyPrompts(TRAFFIC), ReplayPlan(keep_steps=True))
        steps[limits] = kept(log)
    calibration = Calibration(
        shape=engine.shape(),
        starts=(KvStart(CEILING, engine.info.num_blocks),),
        steps=tuple(steps.items()),
        current=CURRENT,
        serve_values={},
        has_own_graphs=engine.info.has_own_graphs,
    )
    return calibration.profile(), steps


def busy_s(steps: StepColumns) -> float:
    """Return how long all steps took."""
    return float(steps.duration_s.sum())


@pytest.mark.parametrize("hides_graphs", [True, False])
def test_a_setting_is_learnt_and_predicted_with_the_graphs_that_it_ran_with(
    *, hides_graphs: bool
) -> None:
    source = CudaSource(memory_blocks=100_000, eager_s=0.02, hides_graphs=hides_graphs)
    profile, steps = raced(source)
    predictor = Predictor(profile, CEILING, has_own_graphs=hides_graphs)
    for limits, measured in steps.items():
        predicted = predictor.replay(TRAFFIC, limits, ReplayPlan(keep_steps=True))
        assert busy_s(kept(predicted)) == pytest.approx(busy_s(measured), rel=0.02), limits
    # As deployed the smallest has fewer graphs than the engine that raced.
    alone = replace(source, num_blocks=100_000).start({}, CAPS[0])
    log = replay(alone, TRAFFIC, ToyPrompts(TRAFFIC), ReplayPlan(keep_steps=True))
    told = predictor.as_deployed().replay(TRAFFIC, CAPS[0], ReplayPlan(keep_steps=True))
    if hides_graphs:
        assert busy_s(kept(told)) == pytest.approx(busy_s(kept(log)), rel=0.02)
        assert busy_s(kept(log)) == pytest.approx(busy_s(steps[CAPS[0]]), rel=0.02)
    else:
        # All that raced ran with the ceiling's graphs: what a step without one costs was
        # not seen, which the caveat says.
        assert busy_s(kept(log)) > 1.05 * busy_s(steps[CAPS[0]])
    assert np.isfinite(busy_s(kept(told)))
