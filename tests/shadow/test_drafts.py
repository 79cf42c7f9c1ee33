"""Drafts in the simulator, held to vLLM's own scheduler, and what a profile keeps of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.drafting import DraftingSource, drafting_values
from support.live_parts import GEMMA
from support.optional import not_none
from support.same_replay import compare_with_the_reference
from support.shadow_files import a_profile, a_trace_file
from support.shadow_parts import a_shape
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts
from tuner.errors import TooFewSamplesError, UsageError
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.shadow.calibration import Calibration
from tuner.shadow.predictor import Predictor
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.profiles import KvStart, Profile, read_profile, write_profile
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.shadow.step_model import StepModel
from tuner.traffic.formats import ReadOptions, read_traces
from tuner.traffic.traces import LoadModel

RATES = (0.8, 0.5, 0.3)
LIMITS, LOWERED = EngineLimits(16, 2048), EngineLimits(8, 96)


def a_drafting_profile(rates: tuple[float, ...] = RATES) -> Profile:
    """Return the profile of an engine whose head drafts a token for each rate."""
    profile = a_profile()
    shape = replace(profile.shape, drafts=Drafts("eagle", len(rates)), asynchronous=False)
    return replace(profile, shape=shape, accepted=rates)


def test_a_profile_keeps_how_drafts_are_accepted(tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.yaml", a_drafting_profile()
    write_profile(path, profile)
    assert read_profile(path).shape.drafts == Drafts("eagle", 3)
    assert read_profile(path).accepted == RATES
    text = path.read_text()
    for was, becomes, what in (
        ("tokens: 3", "tokens: 0", "engine.drafts: drafts.tokens must be 1 or more, got 0"),
        ("0.5, 0.3]", "0.5, 0.6]", "rates of accepted drafts must be 3 from 1 down to 0"),
        ("0.5, 0.3]", "0.5]", "a rate for each draft, got .0.8, 0.5."),
    ):
        path.write_text(text.replace(was, becomes))
        with pytest.raises(UsageError, match=what):
            read_profile(path)


def test_accepted_drafts_shorten_answers_as_much_as_they_bring(tmp_path: Path) -> None:
    """Steps of one request alone: 1 + 0.8 + 0.5 + 0.3 tokens each in the mean."""
    trace = read_traces([str(a_trace_file(tmp_path / "trace.jsonl", 400))], None, ReadOptions())
    plan = ReplayPlan(keep_steps=True)
    found = {}
    for rates in (RATES, (1.0, 1.0), (0.0,)):
        log = Predictor(a_drafting_profile(rates)).replay(trace, LIMITS, plan)
        steps = log.kept_steps
        assert steps is not None
        decodes = float((steps.decode_seqs * steps.repeats).sum())
        assert float(steps.draft_tokens.sum()) == len(rates) * decodes
        found[rates] = (trace.output_tokens - 1).sum() / decodes
    # The last step of an answer often drafts beyond its end.
    assert found[(0.0,)] == 1.0
    assert 0.85 * 3.0 < found[(1.0, 1.0)] <= 3.0
    assert 0.85 * 2.6 < found[RATES] <= 2.6


def test_rates_are_counted_over_all_replays() -> None:
    shape = replace(a_shape(), drafts=Drafts("eagle", 2))
    verified = Calibration(shape, (KvStart(LIMITS, 1000),), (), LIMITS, {})
    assert verified.accepted == ()
    with pytest.raises(TooFewSamplesError, match="no step was seen"):
        verified.learn()
    counted = verified.and_brought((50, 30, 20)).and_brought(()).and_brought((50, 30, 20))
    assert counted.accepted == pytest.approx((0.5, 0.2))


@pytest.mark.engine
@pytest.mark.slow
def test_the_simulator_and_vllm_agree_on_drafts() -> None:
    steps = preempted = drafted = 0
    for seed in range(300):
        windows = True if seed < 100 else None
        found = compare_with_the_reference(seed, has_drafts=True, has_windows=windows)
        if isinstance(found, ReplayLog):
            steps += found.steps.steps
            preempted += found.steps.preempted
            assert found.kept_steps is not None
            drafted += int(np.sum(found.kept_steps.draft_tokens))
    assert min(steps, preempted, drafted) > 50


# All layers that draft have to hold their keys alike.
ONE_LAYER = {**GEMMA, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


def with_windows(folder: Path, config: dict[str, object]) -> dict[str, object]:
    """Return the configuration of an engine with random weights of such a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    values = {"load-format": "dummy", "skip-tokenizer-init": True, "max-model-len": 1024}
    return {"model": str(folder), **values}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "draft_model", "windows"])
def test_a_real_engine_takes_the_steps_that_are_predicted(tmp_path: Path, method: str) -> None:
    """So many requests in flight at any time, whatever a step takes; the budget binds."""
    trace = read_traces([str(a_trace_file(tmp_path / "trace.jsonl", 60))], None, ReadOptions())
    plan = ReplayPlan(keep_steps=True, load_model=LoadModel.CLOSED, concurrency=6)
    with EngineProcess(DraftingSource(rates=RATES), tmp_path / "engine.log") as host:
        values = drafting_values(tmp_path, 3)
        if method != "eagle":
            model = values["model"]
            if method == "windows":
                values |= with_windows(tmp_path / "target", GEMMA)
                model = with_windows(tmp_path / "draft", ONE_LAYER)["model"]
            drafts = {"model": model, "num_speculative_tokens": 3}
            values["speculative-config"] = {"method": "draft_model", **drafts}
        started = host.start(values, LIMITS)
        host.load("trace", trace, 0)
        log = host.replay("trace", LOWERED, plan)
    shape = not_none(started.shape)
    assert not_none(shape.drafts).slots == (method != "eagle")
    assert any(not_none(shape.kv_layout).looks_back) == (method == "windows")
    seen = Calibration(shape, (), (), LOWERED, {}).and_brought(log.brought).accepted
    assert seen == pytest.approx(RATES, abs=0.06)
    model = StepModel.linear(0.01, 0.0, 0.0)
    engine = SimulatedEngine(shape, started.info.num_blocks, model, LIMITS, seen)
    predicted = simulate(engine, PreparedTrace(trace, plan), LOWERED, plan)
    for count in ("steps", "prefill_tokens"):
        live = getattr(log.steps, count)
        assert getattr(predicted.steps, count) == pytest.approx(live, rel=0.05)
    both = [float(not_none(one.kept_steps).draft_tokens.sum()) for one in (log, predicted)]
    assert both[1] == pytest.approx(both[0], rel=0.05)
