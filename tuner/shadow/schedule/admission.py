"""Who is let in: what it finds in the prefix cache, and whether there are blocks for the rest.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py; vllm/v1/core/kv_cache_manager.py,
kv_cache_coordinator.py.
"""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.batches import batch_at, count_in, prefilled
from tuner.shadow.schedule.blocks import (
    behind_window,
    blocks_of_window,
    cache_up_to,
    find_block,
    grow,
    grow_states,
    key_at,
    needed_blocks,
    over,
    span_of,
    taken_by,
    taken_for_states,
    unlink,
    within,
)
from tuner.shadow.schedule.drafts import drafts_of_step, padding
from tuner.shadow.schedule.layout import inlined, inner
from tuner.shadow.schedule.states import (
    end_of_prompt,
    states_left,
    up_to_a_state,
    waits_for_a_state,
)
from tuner.shadow.schedule.waiting import (
    head_of_queue,
    leave_front,
    new_slot,
    start_running,
)


@inner
def _is_cached(g, kv, row, slot, at, looks_back):
    """Whether all groups of a kind have a request's block of the same tokens."""
    for group in range(g[s.GROUPS]):
        if kv.looks_back[group] == looks_back:
            key = key_at(g, kv, row, at, group)
            if find_block(g, kv, slot, key) < 0:
                return False
    return True


@inner
def _looked_up(g, hits, tokens, drops, span):
    """Return how many blocks of a group are looked up: one more where the last is dropped."""
    if drops and g[s.GROUPS] > 1:
        hits = min(hits + span, tokens // g[s.BLOCK])
    return within(hits, span)


@inner
def _in_window(g, kv, row, slot, hits, tokens):
    """Return how many of the first blocks of tokens serve groups that look back a window.

    Only those before the end of a hit are read: the last stretch that is as long as a window
    and ends where a hit can, or where there is none, what the prompt begins with.
    """
    span, drops = g[s.BACK_SPAN], g[s.BACK_DROPS]
    wanted, together, aligned = blocks_of_window(g) + drops, 0, within(g[s.ALIGNED], span)
    for at in range(_looked_up(g, hits, tokens, drops, span) - 1, -1, -1):
        if together == 0 and aligned > 1 and (at + 1 - drops) % aligned:
            continue
        together = together + 1 if _is_cached(g, kv, row, slot, at, s.LOOKS_BACK) else 0
        if together == wanted:
            return (at + together - drops) * span
    together = max(0, within(together, aligned) * aligned - drops)
    return within(together, aligned) * aligned * span


@inner
def _hits(g, kv, row, slot, tokens):
    """Return how many blocks of a request are cached, and how many of those nobody holds.

    The first are counted in blocks of tokens, the others in all groups. Last comes how many are
    cached but where layers look back, 0 if no more than in all.
    """
    hits, idle = (tokens - 1) // g[s.BLOCK], 0
    if g[s.WINDOWED] < g[s.GROUPS]:
        at, span, drops = 0, g[s.FULL_SPAN], g[s.FULL_DROPS]
        last = _looked_up(g, hits, tokens, drops, span)
        while at < last and _is_cached(g, kv, row, slot, at, s.SEES_ALL):
            at += 1
        hits = within(max(0, at - drops) * span, g[s.ALIGNED]) * g[s.ALIGNED]
    elsewhere = 0
    if g[s.WINDOWED]:
        most = hits
        hits = _in_window(g, kv, row, slot, hits, tokens)
        if hits < most and g[s.WINDOWED] < g[s.GROUPS]:
            elsewhere = most
    for group in range(g[s.GROUPS]):
        span = span_of(g, kv, group)
        skipped = behind_window(g, hits * g[s.BLOCK]) if kv.looks_back[group] else 0
        for at in range(within(skipped, span), within(hits, span)):
            block = find_block(g, kv, slot, key_at(g, kv, row, at, group))
            idle += kv.pool[block, s.HOLDERS] == 0
    return hits, idle, elsewhere


@inner
def _adopt(g, sl, kv, slot, hits):
    """Let a request hold the cached blocks that it begins with."""
    row = sl[slot, s.ROW]
    skipped = behind_window(g, hits * g[s.BLOCK]) if g[s.WINDOWED] else 0
    for group in range(g[s.GROUPS]):
        first, span = group * g[s.ROOM_OF_GROUP], span_of(g, kv, group)
        begin = within(skipped, span) if kv.looks_back[group] else 0
        for at in range(begin, within(hits, span)):
            block = find_block(g, kv, slot, key_at(g, kv, row, at, group))
            if kv.pool[block, s.HOLDERS] == 0:
                unlink(kv.pool, block)
                g[s.FREE] -= 1
            kv.pool[block, s.HOLDERS] += 1
            kv.tables[0, slot, first + at] = block
    sl[slot, s.BLOCKS] = sl[slot, s.CACHED] = sl[slot, s.STATED] = hits
    sl[slot, s.SKIPPED] = skipped


@inlined
def _taken_at_first(g, hits, blocks, states):
    """Return how many blocks groups take at first that keep states of a request's blocks."""
    return taken_for_states(g, hits, blocks, states) + g[s.STATES] * g[s.SCRATCH]


@inlined
def _reserved(g, tokens, hits, last):
    """Return how many blocks have to be free for a request to be computed to its end."""
    full = (tokens + g[s.BLOCK] - 1) // g[s.BLOCK]
    if g[s.STATES]:
        states = states_left(g, hits * g[s.BLOCK], tokens, last)
        return taken_by(g, hits, full) + _taken_at_first(g, hits, full, states)
    span, back = g[s.FULL_SPAN], g[s.BACK_SPAN]
    in_window = max(0, min(over(full, back), g[s.MOST_IN_WINDOW]) - within(hits, back))
    in_full = over(full, span) - within(hits, span)
    return (g[s.GROUPS] - g[s.WINDOWED]) * in_full + g[s.WINDOWED] * in_window


@inlined
def admit_waiting(g, w, sl, r, q, tr, kv, budget, threshold, defers):
    """Let those run who wait, as long as cap, budget and blocks allow; return if any did."""
    batch, block, any_admitted = batch_at(g, g[s.STEP]), g[s.BLOCK], False
    # Who was admitted in this step is not among those that ran before.
    carries, ran = g[s.CARRIES], w[batch + s.B_DECODES]
    beside = g[s.BESIDE]
    while budget > beside and g[s.WAITING] > 0 and g[s.RUNNING] < g[s.CAP]:
        where = head_of_queue(g, w, sl, r, q, tr)
        slot = w[g[s.AT_FRONT] + where] if where >= 0 else -1
        row = sl[slot, s.ROW] if where >= 0 else r[-1 - where, s.QUEUE]
        answered = sl[slot, s.ANSWERED] if where >= 0 else 0
        tokens = tr.prompts[row] + answered
        hits = idle = elsewhere = 0
        if g[s.IS_CACHED]:
            hits, idle, elsewhere = _hits(g, kv, row, slot, tokens)
        before = hits * block
        if defers and before < tokens - 1:
            break
        wanted = tokens - before
        padded = padding(g, carries, ran, before, wanted, budget - beside)
        if padded < 0:
            break
        wanted += padded
        if 0 < threshold < wanted:
            wanted = threshold
        if not g[s.CHUNKS] and wanted > budget - beside:
            break
        wanted = min(wanted, budget - beside)
        junction = elsewhere * g[s.JUNCTIONS]
        states, last = 1, end_of_prompt(tr.prompts[row], tokens)
        if g[s.STATES]:
            prompt = tr.prompts[row]
            wanted = up_to_a_state(g, before, wanted, prompt, tokens, junction * block)
            if wanted == 0 or waits_for_a_state(g, kv, slot, row, hits):
                break
            states = states_left(g, before, before + wanted, last)
        spare = g[s.FREE] - idle - (g[s.WATERMARK] if g[s.RUNNING] > 0 else 0) - g[s.FIXED]
        if g[s.RESERVES] and _reserved(g, tokens, hits, last) > spare:
            break
        needed = needed_blocks(g, before + wanted, g[s.LOOKAHEAD] * g[s.ADMITS_AHEAD])
        taken, stated = taken_by(g, hits, needed), 0
        if g[s.STATES]:
            stated = needed_blocks(g, before + wanted, 0)
            taken += _taken_at_first(g, hits, stated, states)
        if taken > spare:
            break
        if slot < 0:
            if g[s.FREE_SLOTS] == 0:
                g[s.STATUS] = s.NO_SLOT
                break
            slot = new_slot(g, w, sl, r, kv, tr, row)
            sl[slot, s.ARRIVAL] = -1 - where
            r[-1 - where, s.QUEUE] = -1 - row
        else:
            leave_front(g, w, where)
        g[s.WAITING] -= 1
        if g[s.IS_CACHED]:
            _adopt(g, sl, kv, slot, hits)
            sl[slot, s.JUNCTION] = junction
        grow(g, sl, r, kv, slot, needed)
        grow_states(g, sl, r, kv, slot, stated, states, s.BEGINS)
        if g[s.IS_CACHED]:
            keyed = min(before + wanted, tokens - g[s.HASHED_AHEAD])
            cache_up_to(g, sl, kv, slot, keyed, g[s.STEP])
        start_running(g, w, sl, slot)
        is_new = not sl[slot, s.RESUMED]
        is_decode = not is_new and answered > 0 and wanted <= 1 + padded
        count_in(w, batch, is_decode, before, wanted)
        if is_new:
            w[batch + s.B_CACHED] += before
        if before < tokens - 1:
            g[s.CARRIES] = 1
        sl[slot, s.COMPUTED] = before + wanted
        sl[slot, s.LATEST], sl[slot, s.PART] = g[s.STEP], wanted
        drafts_of_step(g, sl, slot, -padded)
        sl[slot, s.MISSED] = 0
        if not prefilled(g, w, sl, slot):
            sl[slot, s.STATE] = s.PREFILLS
            g[s.PREFILLING] += 1
            g[s.LAST_PREFILL] = slot
        budget -= wanted + beside
        any_admitted = True
    return any_admitted
