"""What a batch of vLLM's scheduler computes is read alike, whichever runner it goes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tuner.engine.compat.core import read_batch


def a_request(name: str, prompt: int, before: int, known: int | None = None) -> Any:
    return SimpleNamespace(
        req_id=name,
        num_computed_tokens=before,
        prompt_token_ids=[0] * prompt,
        prefill_token_ids=None if known is None else [0] * known,
    )


def a_batch(*new: Any) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={request.req_id: 10 for request in new},
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], num_output_tokens=[]
        ),
        scheduled_spec_decode_tokens={},
        preempted_req_ids=None,
    )


def test_a_hit_is_what_a_new_request_finds_and_not_what_a_preempted_one_does() -> None:
    """The V2 runner is told of both alike, but for the answer that one has by then."""
    first = read_batch(a_batch(a_request("a", 100, 64, known=100), a_request("b", 100, 0, 100)))
    again = read_batch(a_batch(a_request("a", 100, 64, known=117)))
    older = read_batch(a_batch(a_request("a", 100, 64)))
    assert first is not None
    assert again is not None
    assert older is not None
    assert (first.cached_tokens, again.cached_tokens, older.cached_tokens) == (64, 0, 64)
    assert (first.prefill_tokens, again.prefill_tokens) == (20, 10)
