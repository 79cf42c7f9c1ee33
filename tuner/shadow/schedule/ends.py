"""How requests end: answered, timed out, aborted or refused."""

from __future__ import annotations

import math

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.arrivals import end_request, queued
from tuner.shadow.schedule.batches import batch_at, ends_at, singles_at
from tuner.shadow.schedule.blocks import cache_up_to, release
from tuner.shadow.schedule.decoding import decodes_no_more, held_blocks
from tuner.shadow.schedule.layout import inlined, inner
from tuner.shadow.schedule.waiting import drop_slot, is_in_list, leave_run, stop_waiting

# the ends of requests


@inlined
def _answered(g, x, f, q, r, tr, row):
    """Close the book of a request that was answered in full."""
    g[s.IN_FLIGHT] -= 1
    took_s = x[s.NOW] - f[row, s.DUE]
    if took_s > x[s.PATIENCE]:
        end_request(g, x, q, tr, row, s.TIMED_OUT)
        return
    if took_s > x[s.LATE_S] and not r[row, s.IS_LATE] and row >= g[s.LED_IN]:
        r[row, s.IS_LATE] = 1
        g[s.LATE] += 1
    end_request(g, x, q, tr, row, s.COMPLETED)


@inlined
def _finish(g, x, w, sl, f, r, q, kv, tr, slot):
    """End a request whose last token is there."""
    row = sl[slot, s.ROW]
    f[row, s.LAST] = x[s.NOW]
    q[row, s.TOKENS] = sl[slot, s.OUTPUT]
    if sl[slot, s.STATE] == s.PREEMPTED:
        stop_waiting(g, w, slot)
    else:
        if g[s.KEYS_AT_ONCE] and g[s.IS_CACHED]:
            computed = sl[slot, s.PROMPT] + sl[slot, s.OUTPUT] - 1
            cache_up_to(g, sl, kv, slot, computed, -1)
        held_blocks(g, sl, slot)
        release(g, sl, kv, slot)
        leave_run(g, w, sl, slot)
    drop_slot(g, w, sl, r, slot)
    g[s.TIDY] = 1
    g[s.HELD] = 0
    _answered(g, x, f, q, r, tr, row)


@inner
def stop(g, x, w, sl, f, q, slot):
    """Note how far the answer of a request came that goes no further."""
    row = sl[slot, s.ROW]
    if sl[slot, s.STATE] != s.DECODES:
        q[row, s.TOKENS] = sl[slot, s.ANSWERED]
        return
    scheduled = sl[slot, s.OUTPUT] - (sl[slot, s.END] - (g[s.STEP] - 1))
    if sl[slot, s.MISSED]:
        q[row, s.TOKENS] = scheduled
        return
    if not g[s.AHEAD]:
        q[row, s.TOKENS] = scheduled
        f[row, s.LAST] = x[s.BEFORE]
        return
    q[row, s.TOKENS] = scheduled - 1
    step = g[s.STEP] - 1
    batch = batch_at(g, step)
    if not is_in_list(w, singles_at(g, step), w[batch + s.B_SINGLES], slot, sl[slot, s.ORDER]):
        w[batch + s.B_EVEN] -= 1
        f[row, s.LAST] = x[s.BEFORE]


@inner
def _abort(g, x, w, sl, f, r, q, kv, row):
    """Drop a request, whether queued or running."""
    slot = r[row, s.SLOT_OF]
    g[s.TIDY] = 1
    g[s.HELD] = 0
    g[s.IN_FLIGHT] -= 1
    if slot < 0:
        g[s.WAITING] -= 1
        return
    stop(g, x, w, sl, f, q, slot)
    if sl[slot, s.STATE] == s.PREEMPTED:
        stop_waiting(g, w, slot)
    else:
        held_blocks(g, sl, slot)
        if sl[slot, s.STATE] == s.PREFILLS:
            g[s.PREFILLING] -= 1
        elif sl[slot, s.STATE] == s.DECODES and sl[slot, s.END] >= g[s.STEP]:
            decodes_no_more(g, w, sl, slot)
        release(g, sl, kv, slot)
        leave_run(g, w, sl, slot)
    drop_slot(g, w, sl, r, slot)


@inlined
def time_out(g, x, w, sl, f, r, q, kv, tr):
    """Drop requests whose client would have gone; the oldest are due first."""
    begin = g[s.OLDEST]
    while g[s.OLDEST] < g[s.QUEUE_TAIL]:
        row = queued(r, g[s.OLDEST])
        if q[row, s.OUTCOME] == s.GOES_ON:
            if x[s.NOW] - f[row, s.DUE] <= x[s.PATIENCE]:
                break
            _abort(g, x, w, sl, f, r, q, kv, row)
        g[s.OLDEST] += 1
    for i in range(begin, g[s.OLDEST]):
        row = queued(r, i)
        if q[row, s.OUTCOME] == s.GOES_ON:
            end_request(g, x, q, tr, row, s.TIMED_OUT)


@inner
def _note_overdue(g, x, f, r, q):
    """Count what is in flight for longer than a request may take."""
    while g[s.NEXT_LATE] < g[s.QUEUE_TAIL]:
        row = queued(r, g[s.NEXT_LATE])
        if q[row, s.OUTCOME] == s.GOES_ON:
            if x[s.NOW] - f[row, s.DUE] <= x[s.LATE_S]:
                return
            if not r[row, s.IS_LATE] and row >= g[s.LED_IN]:
                r[row, s.IS_LATE] = 1
                g[s.LATE] += 1
        g[s.NEXT_LATE] += 1


@inlined
def is_cut(g, x, f, r, q):
    """Whether going on is pointless; the status says why."""
    # Nothing is longer than nan, as the first due time is before there is one.
    if x[s.NOW] - x[s.FIRST_DUE] > x[s.MAX_CLOCK]:
        g[s.STATUS] = s.CLOCK_CUT
        return True
    if x[s.LATE_S] < math.inf:
        if x[s.PATIENCE] == math.inf:
            _note_overdue(g, x, f, r, q)
        if g[s.LATE] > g[s.ALLOWED_LATE]:
            g[s.STATUS] = s.LATE_CUT
            return True
    return False


@inlined
def finish_batch(g, x, w, sl, f, r, q, kv, tr, step):
    """End those whose last token came with a batch."""
    at = ends_at(g, step)
    for i in range(w[batch_at(g, step) + s.B_ENDS]):
        slot = w[at + 2 * i]
        if sl[slot, s.ORDER] == w[at + 2 * i + 1] and sl[slot, s.STATE] != s.NOBODY:
            _finish(g, x, w, sl, f, r, q, kv, tr, slot)
