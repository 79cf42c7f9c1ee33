"""What a batch of vLLM's scheduler computes is read alike, whichever runner it goes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tuner.engine.compat.core import BatchReader, largest_batch_bytes


def a_request(name: str, prompt: int, before: int, known: int | None = None) -> Any:
    return SimpleNamespace(
        req_id=name,
        num_computed_tokens=before,
        prompt_token_ids=[0] * prompt,
        prefill_token_ids=None if known is None else [0] * known,
    )


def a_batch(*new: Any, preempted: tuple[str, ...] = (), finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={request.req_id: 10 for request in new},
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], num_output_tokens=[]
        ),
        scheduled_spec_decode_tokens={},
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
    )


def test_a_hit_is_what_a_new_request_finds_and_not_what_a_preempted_one_does() -> None:
    """The V2 runner is told of both alike, and its list of tokens has grown when it is read."""
    batches = BatchReader()
    first = batches.read(a_batch(a_request("a", 100, 64, 101), a_request("b", 100, 0, 101)))
    batches.read(a_batch(preempted=("a",)))
    again = batches.read(a_batch(a_request("a", 100, 64, known=100)))
    batches.read(a_batch(finished=("a",)))
    anew = batches.read(a_batch(a_request("a", 100, 64)))
    assert first is not None
    assert again is not None
    assert anew is not None
    assert (first.cached_tokens, again.cached_tokens, anew.cached_tokens) == (64, 0, 64)
    assert (first.prefill_tokens, again.prefill_tokens) == (20, 10)


def test_who_was_preempted_while_it_answered_decodes_again_with_one_token() -> None:
    batches = BatchReader()
    batches.read(a_batch(preempted=("a",)))
    batch = a_batch(a_request("a", 100, 104, known=105))
    batch.num_scheduled_tokens["a"] = 1
    found = batches.read(batch)
    assert found is not None
    assert (found.decode_seqs, found.prefill_seqs, found.decode_context_tokens) == (1, 0, 105)


def test_what_the_largest_batch_took_is_read_off_a_worker_that_measured_it() -> None:
    """What graphs were thought to take is among the activations, where vLLM counts it."""
    measured = SimpleNamespace(peak_activation_memory=1000, cudagraph_memory_estimate=300)
    assert largest_batch_bytes(measured) == 700
    assert largest_batch_bytes(SimpleNamespace(peak_activation_memory=1000)) == 1000
    assert largest_batch_bytes(SimpleNamespace()) == 0
