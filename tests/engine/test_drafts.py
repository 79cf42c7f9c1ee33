"""Which engines that draft have a shadow, and where their limits may be lowered."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.drafting import drafting_values
from support.shadow_parts import a_shape
from tuner.engine.compat import serve
from tuner.engine.compat.core import change_limits, limit_names
from tuner.engine.compat.scheduler import kv_cache_config, scheduler_of
from tuner.engine.compat.shape import drafts_of, read_shape
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts, EngineShape
from tuner.errors import EngineError, ShadowError

pytestmark = pytest.mark.engine

OWN, CEILING = EngineLimits(256, 512), EngineLimits(256, 2048)


WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model"},
    "parallel draft_model": {"method": "draft_model", "parallel_drafting": True},
}
"""Ways to draft that need no file of a head, of which the last two take slots of the budget."""
SLOTS = {"ngram": 0, "draft_model": 1, "parallel draft_model": 4}


def resolved(limits: EngineLimits, method: str, **more: object) -> tuple[Any, Any]:
    """Return vLLM's configuration of an engine that drafts four tokens, and its arguments."""
    serve.prepare_environment()
    values = demo_engine_args()
    drafts = {"num_speculative_tokens": 4, **WAYS[method]}
    if drafts["method"] == "draft_model":
        drafts["model"] = values["model"]
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


@pytest.mark.parametrize("method", WAYS)
def test_lowered_limits_are_those_of_an_engine_of_its_own(method: str) -> None:
    lowered = a_scheduler(CEILING, method)
    names = limit_names(lowered)
    assert names is not None
    change_limits(lowered, names, OWN, SLOTS[method])
    own = first_batch(a_scheduler(OWN, method))
    assert first_batch(lowered) == own
    # Each request takes slots of its own beside its tokens, so that fewer fit.
    assert (own[1] < 3 * 170) is (method != "ngram")


def test_limits_that_leave_no_token_beside_the_slots_are_refused() -> None:
    scheduler = a_scheduler(CEILING, "parallel draft_model")
    names = limit_names(scheduler)
    assert names is not None
    with pytest.raises(EngineError, match="and leaves none to compute"):
        change_limits(scheduler, names, EngineLimits(4, 4), 4)


@pytest.mark.parametrize("method", WAYS)
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
    ("method", "drafts"),
    [
        ("draft_model", Drafts("draft_model", 4, slots=1)),
        ("parallel draft_model", Drafts("draft_model", 4, slots=4)),
    ],
)
def test_a_draft_model_has_a_shadow_whose_budget_is_as_vllm_counts_it(
    method: str, drafts: Drafts
) -> None:
    config, _ = resolved(CEILING, method)
    assert the_shape(config).drafts == drafts
    assert drafts.lookahead_tokens == config.num_lookahead_tokens


def test_drafts_that_come_and_go_have_none() -> None:
    config, _ = resolved(CEILING, "ngram")
    words = "speculative decoding by ngram, which drafts by what the text is"
    with pytest.raises(ShadowError, match=f"cannot stand in for an engine with {words}"):
        the_shape(config)
    assert drafts_of(config.speculative_config, "0.32.0") is None


@pytest.mark.parametrize(
    ("method", "parallel"),
    [
        *product(["eagle", "mtp", "medusa", "draft_model"], [False, True]),
        ("dflash", True),
        ("dspark", True),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_a_method_takes_is_what_vllm_says_it_takes(
    method: str, tokens: int, *, parallel: bool
) -> None:
    """Asked is its own configuration, of models that are not there."""
    serve.prepare_environment()
    values = {
        **demo_engine_args(),
        "speculative-config": WAYS["ngram"] | {"num_speculative_tokens": tokens},
    }
    config = serve.resolve_config(serve.parse_serve_values(values))
    asked = config.speculative_config
    asked.method, asked.parallel_drafting = method, parallel
    for sample_from_anchor in (True, False):
        model = SimpleNamespace(sample_from_anchor=sample_from_anchor)
        asked.draft_model_config = SimpleNamespace(hf_config=model)
        drafts = drafts_of(asked, "0.32.0")
        assert drafts is not None
        assert drafts.slots == asked.max_num_new_slots_for_drafting
        assert drafts.lookahead_tokens == config.num_lookahead_tokens
        assert drafts.is_eagle == asked.use_eagle()
        shape = replace(a_shape(), drafts=drafts, vllm_version=serve.vllm_version())
        assert shape.drops_hit == asked.use_eagle_block_drop()
