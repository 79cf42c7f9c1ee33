"""Batches on their way: what requests add, who ends in them, and who is put back out of one."""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.blocks import release
from tuner.shadow.schedule.decoding import (
    day_of,
    decodes_no_more,
    decodes_on,
    steady_from,
)
from tuner.shadow.schedule.layout import inlined, inner
from tuner.shadow.schedule.waiting import is_in_list, leave_run


@inner
def batch_at(g, step):
    """Return where a batch's numbers stand."""
    return g[s.AT_BATCHES] + (step & (s.PIPE - 1)) * s.BATCH_FIELDS


@inner
def singles_at(g, step):
    """Return where those stand whose token of a batch is looked at by itself."""
    return g[s.AT_SINGLES] + (step & (s.PIPE - 1)) * 2 * g[s.SLOTS]


@inner
def ends_at(g, step):
    """Return where those stand whose last token is in a batch."""
    return g[s.AT_ENDS] + (step & (s.PIPE - 1)) * 2 * g[s.SLOTS]


@inlined
def add_single(g, w, sl, step, slot):
    """Have a request's token in a batch looked at by itself."""
    n = w[batch_at(g, step) + s.B_SINGLES]
    at = singles_at(g, step) + 2 * n
    w[at], w[at + 1] = slot, sl[slot, s.ORDER]
    w[batch_at(g, step) + s.B_SINGLES] = n + 1


@inlined
def add_end(g, w, sl, step, slot):
    """Have a request end with a batch; they end in the order in which they run."""
    n = w[batch_at(g, step) + s.B_ENDS]
    at, order = ends_at(g, step), sl[slot, s.ORDER]
    i = n
    while i > 0 and w[at + 2 * i - 1] > order:
        w[at + 2 * i], w[at + 2 * i + 1] = w[at + 2 * i - 2], w[at + 2 * i - 1]
        i -= 1
    w[at + 2 * i], w[at + 2 * i + 1] = slot, order
    w[batch_at(g, step) + s.B_ENDS] = n + 1


@inlined
def let_end(g, w, sl, step):
    """Have those end with a batch whose last token it schedules."""
    while w[day_of(g, step)] >= 0:
        slot = w[day_of(g, step)]
        decodes_no_more(g, w, sl, slot)
        add_end(g, w, sl, step, slot)


@inner
def split_off(g, x, w, sl, f, slot):
    """Have the next gap of a decoding request counted by itself: it stops decoding steadily."""
    if sl[slot, s.MISSED]:
        return
    if g[s.AHEAD]:
        step = g[s.STEP] - 1
        batch = batch_at(g, step)
        if is_in_list(w, singles_at(g, step), w[batch + s.B_SINGLES], slot, sl[slot, s.ORDER]):
            return
        w[batch + s.B_EVEN] -= 1
        add_single(g, w, sl, step, slot)
    f[sl[slot, s.ROW], s.LAST] = x[s.BEFORE]


@inner
def preempt(g, x, w, sl, f, kv, slot):
    """Take everything from a running request and put it before the queue."""
    if sl[slot, s.STATE] == s.DECODES:
        split_off(g, x, w, sl, f, slot)
        sl[slot, s.ANSWERED] = sl[slot, s.OUTPUT] - (sl[slot, s.END] - (g[s.STEP] - 1))
        if sl[slot, s.END] >= g[s.STEP]:
            decodes_no_more(g, w, sl, slot)
    elif sl[slot, s.STATE] == s.PREFILLS:
        g[s.PREFILLING] -= 1
    release(g, sl, kv, slot)
    sl[slot, s.STATE] = s.PREEMPTED
    sl[slot, s.COMPUTED] = sl[slot, s.TAKEN] = 0
    sl[slot, s.RESUMED] = 1
    leave_run(g, w, sl, slot)
    w[g[s.AT_FRONT] + g[s.FRONT]] = slot
    g[s.FRONT] += 1
    g[s.WAITING] += 1
    if g[s.WOULD_CACHE] and not g[s.IS_CACHED]:
        g[s.STATUS] = s.NEEDS_CACHE


@inlined
def count_in(w, batch, is_decode, before, tokens):
    """Note what a request adds to a batch."""
    if is_decode:
        w[batch + s.B_DECODES] += 1
        w[batch + s.B_DECODE_CONTEXT] += before + tokens
        w[batch + s.B_SQUARES] += (before + tokens) ** 2
        w[batch + s.B_DRAFTS] += tokens - 1
    else:
        w[batch + s.B_PREFILL] += tokens
        w[batch + s.B_SEQS] += 1
        w[batch + s.B_PREFILL_CONTEXT] += tokens * before + tokens * (tokens + 1) // 2


@inlined
def prefilled(g, w, sl, slot):
    """Take note of what a request has computed of its prompt; its first token may follow."""
    step = g[s.STEP]
    if sl[slot, s.COMPUTED] < sl[slot, s.PROMPT] + sl[slot, s.ANSWERED]:
        return False
    if g[s.DRAFTS]:
        sl[slot, s.STATE] = s.VERIFIES
        add_single(g, w, sl, step, slot)
        return True
    sl[slot, s.END] = step + sl[slot, s.OUTPUT] - sl[slot, s.ANSWERED] - 1
    sl[slot, s.STATE], sl[slot, s.STEADY] = s.DECODES, steady_from(g)
    add_single(g, w, sl, step, slot)
    if sl[slot, s.END] > step:
        decodes_on(g, w, sl, slot)
    else:
        add_end(g, w, sl, step, slot)
    return True
