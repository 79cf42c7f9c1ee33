"""Requests that verify drafts: what they compute in a step, and what it brings out.

A step brings out as many tokens as drafts are accepted, and one. With a batch ahead the next
step is scheduled as if all were; what was not is taken back once it is known.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py, async_scheduler.py.
"""

from __future__ import annotations

import numpy as np

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.batches import add_end, add_single
from tuner.shadow.schedule.blocks import cache_up_to
from tuner.shadow.schedule.layout import inlined, inner


@inner
def padding(g, carries, ran, before, wanted, budget):
    """Return how many tokens the only one left of who waits is padded by; -1: it waits.

    So that the batch stays of a single shape, where nothing of a prompt ran in it before.
    """
    if g[s.PADDING] == s.NEVER_PADS or g[s.DRAFTS] == 0 or wanted != 1 or carries:
        return 0
    if ran == 0 and (before == 0 or g[s.PADDING] != s.PADS_ALONE):
        return 0
    padded, waits = 1 + g[s.DRAFTS], g[s.PADDING] == s.PADS_OR_WAITS
    fits = before + padded + (not waits) <= g[s.MAX_LENGTH]
    if not fits and not waits:
        return 0
    return g[s.DRAFTS] if fits and padded <= budget else -1


@inner
def drafts_of_step(g, sl, slot, drafted):
    """Note how many drafts the newest step has of a request; below 0 they only pad."""
    sl[slot, s.DRAFTED + (g[s.STEP] & 1)] = drafted


@inner
def to_verify(g, sl, slot):
    """Return how many tokens a request would compute; 0 once a step on its way ends it."""
    known = sl[slot, s.PROMPT] + sl[slot, s.ANSWERED]
    is_on_its_way = sl[slot, s.COMPUTED] >= known
    if is_on_its_way and sl[slot, s.ANSWERED] + 1 >= sl[slot, s.OUTPUT]:
        return 0
    return min(1 + g[s.DRAFTS], g[s.MAX_LENGTH] - 1 - sl[slot, s.COMPUTED])


@inner
def verify(g, w, sl, slot, taken):
    """Have the newest step verify drafts of a request, beside the token that it decodes."""
    sl[slot, s.COMPUTED] += taken
    sl[slot, s.LATEST], sl[slot, s.PART] = g[s.STEP], taken
    drafts_of_step(g, sl, slot, taken - 1)
    add_single(g, w, sl, g[s.STEP], slot)


@inner
def _uniform(row, number):
    """Return the number from 0 to 1 that compat.scheduler draws for a request and its step.

    Source: splitmix64, as there.
    """
    x = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(number) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64(x ^ (x >> np.uint64(31))) * 2.0**-64


@inlined
def bring_out(g, w, t, sl, kv, step, slot):
    """Take in how many drafts of a request are accepted, and let it end with its last token.

    Beside its first token there are none. Who was preempted meanwhile gets its tokens too.
    """
    number, accepted, drafted = sl[slot, s.ROUNDS], 0, sl[slot, s.DRAFTED + (step & 1)]
    sl[slot, s.ROUNDS] = number + 1
    if number > 0 and drafted > 0:
        drawn = _uniform(sl[slot, s.ROW], number)
        for i in range(drafted):
            accepted += drawn < t[g[s.AT_RATES] + i]
    sl[slot, s.ANSWERED] = min(sl[slot, s.ANSWERED] + 1 + accepted, sl[slot, s.OUTPUT])
    if sl[slot, s.STATE] == s.VERIFIES:
        sl[slot, s.COMPUTED] -= abs(drafted) - accepted
        if g[s.KEYS_AT_ONCE] and g[s.IS_CACHED]:
            known = sl[slot, s.PROMPT] + sl[slot, s.ANSWERED]
            cache_up_to(g, sl, kv, slot, known - 1, -1)
    if sl[slot, s.ANSWERED] == sl[slot, s.OUTPUT]:
        add_end(g, w, sl, step, slot)
