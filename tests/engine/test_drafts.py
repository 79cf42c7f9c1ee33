"""Which engines that draft have a shadow, and where their limits may be lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.drafting import drafting_values
from support.shadow_parts import a_shape
from tuner.engine.compat import serve
from tuner.engine.compat.core import limit_names
from tuner.engine.compat.scheduler import kv_cache_config, scheduler_of
from tuner.engine.compat.shape import drafts_of, read_shape
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts, EngineShape
from tuner.errors import ShadowError

pytestmark = pytest.mark.engine

OWN, CEILING = EngineLimits(256, 512), EngineLimits(256, 2048)


def resolved(limits: EngineLimits, method: str, **more: object) -> tuple[Any, Any]:
    """Return vLLM's configuration of an engine that drafts four tokens, and its arguments."""
    serve.prepare_environment()
    values = demo_engine_args()
    drafts = {
        "method": method,
        "num_speculative_tokens": 4,
        **({"model": values["model"]} if method == "draft_model" else {"prompt_lookup_max": 3}),
    }
    arguments = serve.parse_serve_values(
        {
            **values,
            "max-num-seqs": limits.max_num_seqs,
            "max-num-batched-tokens": limits.max_num_batched_tokens,
            "enable-prefix-caching": False,
            "block-size": 16,
            "speculative-config": drafts,
            **more,
        }
    )
    return serve.resolve_config(arguments), arguments


def a_scheduler(limits: EngineLimits, method: str) -> Any:
    """Return vLLM's own scheduler of such an engine."""
    config, _ = resolved(limits, method)
    return scheduler_of(config, kv_cache_config(a_shape(block_size=16), 4000))[0]


def first_batch(scheduler: Any) -> tuple[int, int]:
    """Return the requests and tokens of the first batch, of many short prompts."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for row in range(256):
        scheduler.add_request(Request(str(row), [5] * 3, params, None, arrival_time=row))
    scheduled = scheduler.schedule()
    return len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_lowered_limits_are_those_of_an_engine_of_its_own_or_are_not_lowered(
    method: str,
) -> None:
    lowered = a_scheduler(CEILING, method)
    names = limit_names(lowered)
    if method == "draft_model":  # the draft of each request takes a slot
        assert names is None
        return
    assert names is not None
    for name, value in zip(names, (OWN.max_num_seqs, OWN.max_num_batched_tokens), strict=True):
        setattr(lowered, name, value)
    assert first_batch(lowered) == first_batch(a_scheduler(OWN, method))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_budget_that_was_asked_for_is_the_limit_whatever_drafts_take_of_it(
    method: str,
) -> None:
    assert serve.config_limits(*resolved(CEILING, method)) == CEILING


def test_what_is_scheduled_is_the_limit_where_it_was_asked_for() -> None:
    config, arguments = resolved(CEILING, "ngram")
    arguments.max_num_scheduled_tokens = 700
    assert serve.config_limits(config, arguments) == EngineLimits(256, 700)


def the_shape(config: Any) -> EngineShape:
    """Return what is read off a running engine of a configuration."""
    kv_cache = kv_cache_config(a_shape(block_size=16), 4000)
    return read_shape(config, kv_cache, "CPU", serve.vllm_version())


def test_heads_that_always_draft_alike_have_a_shadow(tmp_path: Path) -> None:
    config = serve.resolve_config(serve.parse_serve_values(drafting_values(tmp_path, 3)))
    assert the_shape(config).drafts == Drafts("eagle", 3)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ngram", "speculative decoding by ngram, which drafts by what the text is"),
        ("draft_model", "speculative decoding by draft_model, whose drafts take slots"),
    ],
)
def test_drafts_that_come_and_go_have_none(method: str, words: str) -> None:
    config, _ = resolved(CEILING, method)
    with pytest.raises(ShadowError, match=f"cannot stand in for an engine with {words}"):
        the_shape(config)
    assert drafts_of(config.speculative_config) is None
