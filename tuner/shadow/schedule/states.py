"""State-space layers: where a prompt's parts end, and who goes on from a state.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py, _mamba_block_aligned_split;
vllm/v1/core/single_type_kv_cache_manager.py, MambaManager.
"""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.blocks import blocks_before_end, find_block, key_at
from tuner.shadow.schedule.layout import inlined


@inlined
def _has_state_at(g, begin, end, at):
    """Whether what a batch computes of a prompt also leaves the state at a token within."""
    block = g[s.BLOCK]
    return (
        begin % block == 0
        and (end + block - 1) // block - 2 > (begin - 1) // block
        and begin + block <= at < end
        and (at - begin) % g[s.TWO_EVERY] == 0
    )


@inlined
def states_left(g, begin, end, last):
    """Return how many states a batch leaves of a prompt up to a last token; one at its end."""
    if g[s.TWO_EVERY] == 0 or (g[s.RETENTION] == 0 and end < last):
        return 1
    return 1 + _has_state_at(g, begin, end, (end - 1) // g[s.BLOCK] * g[s.BLOCK])


@inlined
def end_of_prompt(prompt, known):
    """Return up to where a request computes what is known: its prompt, or tokens before."""
    return max(prompt, known - 1)


@inlined
def up_to_a_state(g, begin, wanted, prompt, known, junction):
    """Return how much of a prompt a step computes where layers leave a state behind.

    They leave it where a part of the prompt ends, and others find it only at the end of a
    block: a part ends there, or where it would pass the last such end, or the last before the
    tokens where prompts part. What is too short for that waits, but where no part could be as
    long as a block.
    """
    whole = end_of_prompt(prompt, known)
    if begin >= whole:
        return wanted
    block, end = g[s.BLOCK], begin + wanted
    last = blocks_before_end(g, known) if g[s.PARTS_BEFORE_LAST] else known // block
    last *= block
    before_end = (whole - 1) // block * block
    if g[s.TWO_EVERY] and end >= whole and _has_state_at(g, begin, end, before_end):
        last = begin
    if end < whole:
        most = min(g[s.BUDGET], g[s.THRESHOLD]) if g[s.THRESHOLD] > 0 else g[s.BUDGET]
        if end // block * block > begin or block <= most:
            end = end // block * block
    begun = (begin // block + 1) * block if begin % block else begin
    parts = begin + (junction - begin) // block * block if begin < junction < end else begin
    part = end
    for stop in (begun, last, parts):
        if begin < stop < end:
            part = min(part, stop)
    return max(part - begin, 0)


@inlined
def part_of_prompt(g, sl, slot, wanted):
    """Return how much of its prompt a running request computes of what it may."""
    prompt, junction = sl[slot, s.PROMPT], sl[slot, s.JUNCTION] * g[s.BLOCK]
    known = prompt + sl[slot, s.ANSWERED]
    return up_to_a_state(g, sl[slot, s.COMPUTED], wanted, prompt, known, junction)


@inlined
def states_of_part(g, sl, slot, begin, end):
    """Return how many states a part of a running request's prompt leaves."""
    known = sl[slot, s.PROMPT] + sl[slot, s.ANSWERED]
    return states_left(g, begin, end, end_of_prompt(sl[slot, s.PROMPT], known))


@inlined
def _is_keyed_now(g, kv, slot, key):
    """Whether a state got a key in the step that is being put together."""
    block = find_block(g, kv, slot, key)
    while block >= 0:
        if kv.pool[block, s.KEYED_IN] == g[s.STEP]:
            return True
        block = kv.pool[block, s.SAME_KEY]
    return False


@inlined
def waits_for_a_state(g, kv, slot, row, hits):
    """Whether the state that a request would go on from is left by another in this step."""
    if hits == 0:
        return False
    for group in range(g[s.GROUPS]):
        if kv.looks_back[group]:
            key = key_at(g, kv, row, hits - 1, group)
            if _is_keyed_now(g, kv, slot, key):
                return True
    return False
