"""Blocks of the KV cache: counted, or with the prefix cache as vLLM keeps it.

A request holds blocks for the same tokens in every group of layers; a group of sliding-window
attention, which looks back a window, gives back what lies behind it. One of state-space layers
is like one with a window of two tokens, but takes no blocks for what a batch passes over.

Tokens are counted in blocks of BLOCK of them; a block of a group is a whole number of these,
its span, so that blocks of layers whose keys and values are smaller hold more tokens.

Source: vLLM 0.32, vllm/v1/core/kv_cache_manager.py, single_type_kv_cache_manager.py,
block_pool.py.
"""

from __future__ import annotations

import numpy as np

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.layout import inlined, inner

# blocks: counted, or with the prefix cache as vLLM keeps it


@inner
def _link(blk, block, before):
    """Put a block into the free queue behind another."""
    after = blk[before, s.NEXT_FREE]
    blk[block, s.NEXT_FREE], blk[block, s.BEFORE_FREE] = after, before
    blk[before, s.NEXT_FREE] = block
    blk[after, s.BEFORE_FREE] = block


@inner
def unlink(blk, block):
    """Take a block out of the free queue."""
    before, after = blk[block, s.BEFORE_FREE], blk[block, s.NEXT_FREE]
    blk[before, s.NEXT_FREE] = after
    blk[after, s.BEFORE_FREE] = before


@inner
def _forget(g, r, kv, block):
    """Let a block lose its key."""
    key = kv.keys[block]
    if key == s.NO_KEY:
        return
    kv.keys[block] = s.NO_KEY
    if key == s.PART_KEY:
        return
    if key >= 0:
        first = kv.heads[key]
        if first == block:
            kv.heads[key] = kv.pool[block, s.SAME_KEY]
            return
    else:
        own = -2 - key
        slot = r[own // g[s.WIDTH], s.SLOT_OF]
        if slot < 0:
            return
        at = own % g[s.WIDTH]
        first = kv.tables[1, slot, at]
        if first == block:
            kv.tables[1, slot, at] = kv.pool[block, s.SAME_KEY]
            return
    while first >= 0 and kv.pool[first, s.SAME_KEY] != block:
        first = kv.pool[first, s.SAME_KEY]
    if first >= 0:
        kv.pool[first, s.SAME_KEY] = kv.pool[block, s.SAME_KEY]


@inner
def _take_block(g, r, kv):
    """Return the block that was free for longest, without its key."""
    sentinel = g[s.ALL_BLOCKS]
    block = kv.pool[sentinel, s.NEXT_FREE]
    unlink(kv.pool, block)
    _forget(g, r, kv, block)
    kv.pool[block, s.HOLDERS] = 1
    g[s.FREE] -= 1
    return block


@inner
def span_of(g, kv, group):
    """Return how many blocks of tokens a block of a group is as large as."""
    return g[s.BACK_SPAN] if kv.looks_back[group] else g[s.FULL_SPAN]


@inner
def over(blocks, span):
    """Return how many blocks of a span hold so many blocks of tokens."""
    return (blocks + span - 1) // span


@inner
def within(blocks, span):
    """Return how many blocks of a span lie within so many blocks of tokens.

    A division where nothing is to be divided is a good part of looking up a prefix.
    """
    return blocks if span == 1 else blocks // span


@inner
def key_at(g, kv, row, at, group):
    """Return the key of a request's block: shared with equal beginnings, or its own.

    What it holds of the turn before it has that turn's keys. Each group has its own, of the
    last of the tokens.
    """
    at = (at + 1) * span_of(g, kv, group) - 1
    end = (at + 1) * g[s.BLOCK] + g[s.HASHED_AHEAD]
    while end <= kv.held[row]:
        row = kv.before[row]
    if end <= kv.covered[row]:
        link = (end - 1) // g[s.RECORDED_BLOCK]
        first = (link * g[s.RECORDED_BLOCK]) // g[s.BLOCK] - g[s.HASHED_AHEAD]
        key = np.int64(kv.links[kv.starts[row] + link]) * g[s.LINK_KEYS] + at - first
        return key * g[s.GROUPS] + group
    if end <= kv.reached[row]:
        return (kv.firsts[row] + at) * g[s.GROUPS] + group
    place = group * g[s.ROOM_OF_GROUP] + at
    return np.int64(-2) - (np.int64(row) * g[s.WIDTH] + place)


@inner
def find_block(g, kv, slot, key):
    """Return the block that is cached under a key for longest, -1 without one."""
    if key >= 0:
        return kv.heads[key]
    if slot < 0:
        return -1
    return kv.tables[1, slot, (-2 - key) % g[s.WIDTH]]


@inner
def _remember(g, kv, slot, block, key):
    """Give a block its key."""
    if kv.keys[block] == key:
        return
    kv.keys[block] = key
    kv.pool[block, s.SAME_KEY] = -1
    last = find_block(g, kv, slot, key)
    if last < 0:
        if key >= 0:
            kv.heads[key] = block
        else:
            kv.tables[1, slot, (-2 - key) % g[s.WIDTH]] = block
        return
    while kv.pool[last, s.SAME_KEY] >= 0:
        last = kv.pool[last, s.SAME_KEY]
    kv.pool[last, s.SAME_KEY] = block


@inner
def blocks_of_window(g):
    """Return of how many blocks before its end a hit needs all, where layers look back."""
    return (g[s.WINDOW] - 2) // (g[s.BLOCK] * g[s.BACK_SPAN]) + 1


@inner
def _serves_a_hit(g, sl, slot, at):
    """Whether the prefix cache keeps a block of a group that looks back a window.

    Of all hits that could be, or where RETENTION says which, of these alone: those of the same
    prompt and of a longer one, which drafts let end a block before. Where the last block of a
    hit is dropped that is kept too.
    """
    span, drops = g[s.BACK_SPAN], g[s.BACK_DROPS]
    if at < within(sl[slot, s.SKIPPED], span):
        return False
    wanted = blocks_of_window(g) + drops
    each = within(g[s.ALIGNED] if g[s.RETENTION] < 0 else g[s.RETENTION], span)
    if each > 0 and (wanted >= each or (at >= drops and (at - drops) % each >= each - wanted)):
        return True
    if g[s.RETENTION] < 0:
        return False
    aligned = within(g[s.ALIGNED], span)
    end = (sl[slot, s.PROMPT] - 1) // g[s.ROUND]
    longer = end
    if drops or g[s.FULL_DROPS]:
        longer = max(0, sl[slot, s.PROMPT] // g[s.ROUND] - 1)
        end = max(0, end - 1)
    end, longer = end * aligned, longer * aligned
    if end + drops - wanted <= at < end + drops:
        return True
    if longer + drops - wanted <= at < longer + drops:
        return True
    junction = within(sl[slot, s.JUNCTION], span)
    return junction > 0 and junction + drops - wanted <= at < junction + drops


@inner
def blocks_before_end(g, tokens):
    """Return how many blocks of so many tokens others can go on from; drafts leave one less."""
    if g[s.FULL_DROPS]:
        return max(0, tokens // g[s.BLOCK] - 1)
    return (tokens - 1) // g[s.BLOCK]


@inlined
def key_anew(g, sl, kv, slot, tokens, step):
    """Give the state before the end of a prompt its key in a step too, while it is held."""
    at = blocks_before_end(g, sl[slot, s.PROMPT])
    if at == 0 or tokens // g[s.BLOCK] != at or sl[slot, s.SKIPPED] >= at:
        return
    for group in range(g[s.GROUPS]):
        block = kv.tables[0, slot, group * g[s.ROOM_OF_GROUP] + at - 1]
        if kv.looks_back[group] and block != s.NO_BLOCK:
            kv.pool[block, s.KEYED_IN] = step


@inlined
def _key_blocks(g, sl, kv, slot, full, more, step):
    """Give so many blocks of a request their keys, but for those that have them.

    One more of groups that drop the last of a hit, if so many are full.
    """
    row = sl[slot, s.ROW]
    for group in range(g[s.GROUPS]):
        first, span = group * g[s.ROOM_OF_GROUP], span_of(g, kv, group)
        drops = g[s.BACK_DROPS] if kv.looks_back[group] else g[s.FULL_DROPS]
        last = within(min(more, full + span * drops), span)
        for at in range(within(sl[slot, s.CACHED], span), last):
            block = kv.tables[0, slot, first + at]
            if block == s.NO_BLOCK:
                continue
            if not kv.looks_back[group] or _serves_a_hit(g, sl, slot, at):
                _remember(g, kv, slot, block, key_at(g, kv, row, at, group))
                kv.pool[block, s.KEYED_IN] = step
    sl[slot, s.CACHED] = full


@inner
def _key_part(g, sl, kv, slot, full):
    """Give the block in which a prompt ends a key of its part, which keeps it for longer.

    Source: vllm/v1/core/single_type_kv_cache_manager.py, _cache_partial_tail_block.
    """
    end, span = sl[slot, s.PROMPT] // g[s.BLOCK], g[s.FULL_SPAN]
    if end > full or end % span == 0:
        return
    for group in range(g[s.GROUPS]):
        if not kv.looks_back[group]:
            block = kv.tables[0, slot, group * g[s.ROOM_OF_GROUP] + end // span]
            if kv.keys[block] == s.NO_KEY:
                kv.keys[block] = s.PART_KEY


@inlined
def cache_up_to(g, sl, kv, slot, tokens, step):
    """Give all blocks that so many tokens fill their keys; -1 as step where none is begun.

    Up to where a hit can end, and once one can, to the end of what it would drop.
    """
    if g[s.KEYS_ANEW]:
        key_anew(g, sl, kv, slot, tokens, step)
    full = more = tokens // g[s.ROUND] * g[s.ALIGNED]
    drops = full > 0 and (g[s.FULL_DROPS] or g[s.BACK_DROPS])
    if drops:
        more = tokens // g[s.BLOCK]
    if full > sl[slot, s.CACHED] or (drops and more > sl[slot, s.CACHED]):
        _key_blocks(g, sl, kv, slot, full, more, step)
    if full > 0 and g[s.FULL_DROPS] and g[s.FULL_SPAN] > 1:
        _key_part(g, sl, kv, slot, min(more, full + g[s.FULL_SPAN]))


@inner
def taken_by(g, have, blocks):
    """Return how many blocks groups take for a request's blocks of tokens, with those had.

    All groups but those that keep states.
    """
    if g[s.ALIGNED] > 1:
        full, back, windowed = g[s.FULL_SPAN], g[s.BACK_SPAN], g[s.WINDOWED]
        in_full, in_back = over(blocks, full), over(blocks, back)
        taken = (g[s.GROUPS] - windowed) * (in_full - over(have, full))
        return taken + windowed * (in_back - over(have, back))
    return (g[s.GROUPS] - g[s.STATES]) * (blocks - have)


@inner
def taken_for_states(g, have, blocks, states):
    """Return how many blocks groups take that keep so many states of a request's blocks."""
    return g[s.STATES] * min(max(0, blocks - have), states)


@inlined
def _take_blocks(g, r, kv, slot, have, blocks):
    """Let a request hold blocks by name, of all groups but those that keep states."""
    for group in range(g[s.GROUPS]):
        if g[s.STATES] and kv.looks_back[group]:
            continue
        first, span = group * g[s.ROOM_OF_GROUP], span_of(g, kv, group)
        for at in range(over(have, span), over(blocks, span)):
            kv.tables[0, slot, first + at] = _take_block(g, r, kv)


@inner
def _take_states(g, r, kv, slot, have, blocks, states, begins):
    """Let a request hold so many states of its blocks, the last, and those of its drafts.

    Behind the last block stand those of drafts; what is passed over of these moves on.
    """
    passed = max(have, blocks - states)
    scratch = 0 if begins else g[s.SCRATCH]
    for group in range(g[s.GROUPS]):
        if not kv.looks_back[group]:
            continue
        first = group * g[s.ROOM_OF_GROUP]
        for at in range(have + scratch, passed):
            kv.tables[0, slot, first + at] = s.NO_BLOCK
        end = max(have + scratch, passed)
        for at in range(have, min(have + scratch, passed)):
            kv.tables[0, slot, first + end] = kv.tables[0, slot, first + at]
            kv.tables[0, slot, first + at] = s.NO_BLOCK
            end += 1
        for at in range(end, blocks + g[s.SCRATCH]):
            kv.tables[0, slot, first + at] = _take_block(g, r, kv)


@inlined
def needed_blocks(g, tokens, ahead):
    """Return how many blocks of tokens a request has, with so many ahead of them."""
    last = min(tokens + ahead, g[s.MAX_LENGTH])
    return (last + g[s.BLOCK] - 1) // g[s.BLOCK]


@inlined
def grow(g, sl, r, kv, slot, blocks):
    """Let a request hold so many blocks of tokens; the caller has seen that they are there."""
    have = sl[slot, s.BLOCKS]
    if blocks <= have:
        return
    sl[slot, s.BLOCKS] = blocks
    if g[s.IS_CACHED]:
        _take_blocks(g, r, kv, slot, have, blocks)
    else:
        g[s.FREE] -= taken_by(g, have, blocks) + (g[s.FIXED] if have == 0 else 0)


@inlined
def grow_states(g, sl, r, kv, slot, blocks, states, begins):
    """Let groups that keep states hold no more than so many of a request's blocks, the last."""
    have = sl[slot, s.STATED]
    if g[s.STATES] and blocks > have:
        sl[slot, s.STATED] = blocks
        _take_states(g, r, kv, slot, have, blocks, states, begins)


@inner
def behind_window(g, settled):
    """Return how many blocks of tokens lie behind the window of what comes after so many."""
    return max(0, settled - g[s.WINDOW] + 1) // g[s.BLOCK]


@inner
def slide(g, sl, kv, slot, settled):
    """Give back what lies behind the window, of so many tokens that no batch reads any more."""
    if g[s.WINDOWED] == 0:
        return
    begin, end = sl[slot, s.SKIPPED], min(behind_window(g, settled), sl[slot, s.BLOCKS])
    if end <= begin:
        return
    sl[slot, s.SKIPPED], span = end, g[s.BACK_SPAN]
    if not g[s.IS_CACHED]:
        g[s.FREE] += g[s.WINDOWED] * (end // span - begin // span)
        return
    for group in range(g[s.GROUPS]):
        if kv.looks_back[group]:
            _give_back(g, kv, slot, group, begin // span, end // span)


@inner
def _give_back(g, kv, slot, group, begin, end):
    """Let go of a request's blocks of a group, the last first.

    Those without a key wait before all others, or, where not KEYLESS_FIRST, like others.
    """
    sentinel = g[s.ALL_BLOCKS]
    keyless_first = g[s.KEYLESS_FIRST] > (not kv.looks_back[group])
    front, first = sentinel, group * g[s.ROOM_OF_GROUP]
    for at in range(end - 1, begin - 1, -1):
        block = kv.tables[0, slot, first + at]
        if block == s.NO_BLOCK:
            continue
        kv.pool[block, s.HOLDERS] -= 1
        if kv.pool[block, s.HOLDERS] > 0:
            continue
        g[s.FREE] += 1
        if keyless_first and kv.keys[block] == s.NO_KEY:
            _link(kv.pool, block, front)
            front = block
        else:
            _link(kv.pool, block, kv.pool[sentinel, s.BEFORE_FREE])


@inlined
def release(g, sl, kv, slot):
    """Give back all of a request's blocks, group by group."""
    blocks, skipped, stated = sl[slot, s.BLOCKS], sl[slot, s.SKIPPED], sl[slot, s.STATED]
    sl[slot, s.BLOCKS] = sl[slot, s.CACHED] = sl[slot, s.SKIPPED] = sl[slot, s.STATED] = 0
    if not g[s.IS_CACHED]:
        given_back = g[s.WINDOWED] * (skipped // g[s.BACK_SPAN])
        g[s.FREE] += taken_by(g, 0, blocks) - given_back
        g[s.FREE] += g[s.FIXED] if blocks > 0 else 0
        return
    for group in range(g[s.GROUPS]):
        span = span_of(g, kv, group)
        begin, end = skipped // span if kv.looks_back[group] else 0, over(blocks, span)
        if g[s.STATES] and kv.looks_back[group]:
            end = stated + g[s.SCRATCH] if stated > 0 else 0
        _give_back(g, kv, slot, group, begin, end)
