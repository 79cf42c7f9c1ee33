"""A live engine samples as a server of its model would, and greedily only if asked to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.live_parts import start_live
from tuner.engine.compat import serve
from tuner.engine.demo import DEMO_MODEL_DIR, demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveEngine, LiveSource
from tuner.errors import Caveat, UsageError
from tuner.traffic.prompts import TokenPrompt

pytestmark = pytest.mark.engine

CEILING = EngineLimits(8, 256)
SAID = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "max_new_tokens": 3}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the demo model with a generation_config of its own."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    (folder / "generation_config.json").write_text(json.dumps(SAID | {"do_sample": True}))
    return folder


def sampled(
    model: Path, more: Mapping[str, object] | None = None, *, is_greedy: bool = False
) -> tuple[str, Mapping[str, float], list[list[int]]]:
    """Start vLLM, ask the same four times, and return how it sampled and what."""
    values = {**demo_engine_args(), "model": str(model), **(more or {})}
    engine = start_live(values, CEILING, is_greedy=is_greedy)
    try:
        return engine.info.sampling, dict(engine._running_core._sampling), answers(engine)
    finally:
        engine.close()


def answers(engine: LiveEngine) -> list[list[int]]:
    for row in range(4):
        engine.add(row, TokenPrompt([11, 12, 13] * 5), 12)
    found: list[list[int]] = [[] for _ in range(4)]
    while engine.has_work():
        for out in engine.step().emitted:
            found[out.row].extend(out.ids)
    return found


@pytest.mark.model
def test_the_models_generation_config_is_taken_and_lengths_stay_as_recorded(
    model: Path,
) -> None:
    text, params, tokens = sampled(model)
    assert {name: params[name] for name in ("temperature", "top_p", "top_k")} == {
        name: SAID[name] for name in ("temperature", "top_p", "top_k")
    }
    assert "temperature 0.6" in text
    assert "the model's generation_config" in text
    assert [len(answer) for answer in tokens] == [12] * 4
    # Random weights give nearly even odds, of which four times twelve draws never agree.
    assert len({tuple(answer) for answer in tokens}) == 4


@pytest.mark.model
def test_greedy_is_an_option_and_gives_the_same_answer_every_time(model: Path) -> None:
    text, params, tokens = sampled(model, is_greedy=True)
    assert params == {"temperature": 0.0}
    assert "greedily, as asked for" in text
    assert len({tuple(answer) for answer in tokens}) == 1


@pytest.mark.model
def test_the_flags_of_the_server_go_before_the_model(model: Path) -> None:
    said = json.dumps({"temperature": 0.3})
    text, params, _ = sampled(model, {"override-generation-config": said})
    assert params["temperature"] == 0.3
    assert params["top_k"] == SAID["top_k"]
    assert "override-generation-config" in text
    text, params, _ = sampled(model, {"generation-config": "vllm"})
    assert params["temperature"] == 1.0
    assert "temperature 1: the model's generation_config says nothing" in text


def facts_of(model: Path, **more: object) -> frozenset[Caveat]:
    values = {**demo_engine_args(), "load-format": "auto", "model": str(model), **more}
    return LiveSource().facts(values).caveats


@pytest.mark.parametrize("key", ["max-model-len", "max_model_len"])
@pytest.mark.parametrize("length", ["Auto", -1])
def test_a_length_that_every_start_chooses_anew_is_refused(
    model: Path, key: str, length: object
) -> None:
    with pytest.raises(UsageError, match="fit it to the KV cache at each start") as caught:
        facts_of(model, **{key: length})
    assert "/v1/models" in caught.value.hint


def test_random_text_is_a_reason_to_doubt_experts_and_drafts_only(model: Path) -> None:
    assert facts_of(model) == frozenset()
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    said = facts_of(model, **{"speculative-config": json.dumps(drafts)})
    assert said == {Caveat.DRAFTS_ON_RANDOM_TEXT}
    given = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.2}
    said = facts_of(model, **{"speculative-config": json.dumps({**drafts, **given})})
    assert said == {Caveat.ACCEPTANCE_GIVEN}


def test_a_model_of_experts_gets_a_caveat(tmp_path: Path) -> None:
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 64,
        "decoder_sparse_step": 1,
    }
    folder = tmp_path / "experts"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    (folder / "config.json").write_text(json.dumps(config | experts))
    assert facts_of(folder) == {Caveat.EXPERTS_ON_RANDOM_TEXT}


def test_what_is_served_and_not_replayed_is_told(model: Path) -> None:
    assert facts_of(model, **{"enable-lora": True}) == {Caveat.ADAPTERS_LEFT_OUT}
    assert facts_of(model, **{"load-format": "dummy"}) == {Caveat.RANDOM_WEIGHTS}


@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ({}, True),
        ({"limit_per_prompt": {"image": 0}}, False),
        ({"language_model_only": True}, False),
    ],
)
def test_images_are_not_replayed_which_is_told_where_requests_may_hold_any(
    said: dict[str, Any], *, is_told: bool
) -> None:
    config = serve.resolve_config(serve.parse_serve_values(demo_engine_args()))
    from vllm.config.multimodal import MultiModalConfig

    config.model_config.multimodal_config = MultiModalConfig(**said)
    assert (Caveat.MEDIA_LEFT_OUT in serve.config_caveats(config)) is is_told


def test_a_model_that_generates_nothing_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match=r"answers with no tokens \(runner pooling\)"):
        facts_of(model, runner="pooling")


def test_a_server_takes_the_rest_as_openai_does() -> None:
    serve.prepare_environment()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    kept: Any = ChatCompletionRequest.__private_attributes__["_DEFAULT_SAMPLING_PARAMS"]
    assert kept.default == serve.OPENAI_DEFAULTS
