"""vLLM's scheduling decisions, compiled: which requests each step computes, and when.

The same rules as vLLM's V1 scheduler and KV-cache manager, over arrays instead of objects.
Running requests that only decode are not touched one by one: each is known by the step in which
its last token is scheduled, so that a step costs the same for one of them as for a thousand.
Steps in which their order could matter (blocks run short, the token budget is spent, several
prompts in pieces) go through the running list one by one.

`replay.advance` is the only entry; `layout` says where what stands in the arrays, which
`simulated` lays out and `simulator` reads. A turn completes a batch (`ends`, `clock`), lets in
who has come (`arrivals`), and schedules the next (`steps`, with `waiting`, `blocks`, `decoding`
and `batches`).

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py, async_scheduler.py, kv_cache_manager.py,
block_pool.py.
"""
