"""The running list and the queue before it."""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.layout import inlined, inner

# the running list and the queue


@inlined
def compact(g, w, sl):
    """Close the gaps in the running list."""
    run, kept = g[s.AT_RUN], 0
    for i in range(g[s.RUN_LENGTH]):
        slot = w[run + i]
        if slot >= 0:
            w[run + kept] = slot
            sl[slot, s.PLACE] = kept
            kept += 1
    g[s.RUN_LENGTH] = kept


@inlined
def start_running(g, w, sl, slot):
    """Put a request at the end of the running list."""
    if g[s.RUN_LENGTH] >= 2 * g[s.SLOTS]:
        compact(g, w, sl)
    w[g[s.AT_RUN] + g[s.RUN_LENGTH]] = slot
    sl[slot, s.PLACE] = g[s.RUN_LENGTH]
    sl[slot, s.ORDER] = g[s.ORDERS]
    g[s.ORDERS] += 1
    g[s.RUN_LENGTH] += 1
    g[s.RUNNING] += 1


@inlined
def leave_run(g, w, sl, slot):
    """Take a request out of the running list."""
    w[g[s.AT_RUN] + sl[slot, s.PLACE]] = -1
    g[s.RUNNING] -= 1
    while g[s.RUN_LENGTH] > 0 and w[g[s.AT_RUN] + g[s.RUN_LENGTH] - 1] < 0:
        g[s.RUN_LENGTH] -= 1


@inner
def is_before(priorities, row, arrival, other, other_arrival):
    """Whether a row is served before another: by priority, then by arrival."""
    if priorities.size == 0 or priorities[row] == priorities[other]:
        return arrival < other_arrival
    return priorities[row] < priorities[other]


@inlined
def _skip_gone(g, r, q):
    """Let the queue begin with who is still in it."""
    while g[s.QUEUE_HEAD] < g[s.QUEUE_TAIL]:
        row = r[g[s.QUEUE_HEAD], s.QUEUE]
        if row >= 0 and q[row, s.OUTCOME] == s.GOES_ON:
            return
        g[s.QUEUE_HEAD] += 1


@inlined
def head_of_queue(g, w, sl, r, q, tr):
    """Return where the request stands that would be admitted next.

    0 and more is a place among the preempted, -1 - i the place i in the queue.
    """
    _skip_gone(g, r, q)
    if not g[s.PRIORITY]:
        return g[s.FRONT] - 1 if g[s.FRONT] > 0 else -1 - g[s.QUEUE_HEAD]
    best, arrival, where = -1, -1, -1
    for at in range(g[s.FRONT]):
        slot = w[g[s.AT_FRONT] + at]
        row, came = sl[slot, s.ROW], sl[slot, s.ARRIVAL]
        if best < 0 or is_before(tr.priorities, row, came, best, arrival):
            best, arrival, where = row, came, at
    last = g[s.QUEUE_TAIL] if tr.priorities.size else min(g[s.QUEUE_HEAD] + 1, g[s.QUEUE_TAIL])
    for i in range(g[s.QUEUE_HEAD], last):
        row = r[i, s.QUEUE]
        if row < 0 or q[row, s.OUTCOME] != s.GOES_ON:
            continue
        if best < 0 or is_before(tr.priorities, row, i, best, arrival):
            best, arrival, where = row, i, -1 - i
    return where


@inlined
def leave_front(g, w, at):
    """Take a preempted request out of the line."""
    front = g[s.AT_FRONT]
    g[s.FRONT] -= 1
    for i in range(at, g[s.FRONT]):
        w[front + i] = w[front + i + 1]


@inlined
def new_slot(g, w, sl, r, kv, tr, row):
    """Return a slot for a request that begins."""
    g[s.FREE_SLOTS] -= 1
    slot = w[g[s.AT_FREE_SLOTS] + g[s.FREE_SLOTS]]
    r[row, s.SLOT_OF] = slot
    for field in range(s.SLOT_FIELDS):
        sl[slot, field] = 0
    sl[slot, s.ROW], sl[slot, s.PROMPT], sl[slot, s.OUTPUT] = (
        row,
        tr.prompts[row],
        tr.outputs[row],
    )
    if g[s.IS_CACHED]:
        blocks = (tr.prompts[row] + tr.outputs[row]) // g[s.BLOCK] + 1
        for group in range(g[s.GROUPS]):
            first = group * g[s.ROOM_OF_GROUP]
            kv.tables[1, slot, first : first + blocks] = -1
    return slot


@inlined
def drop_slot(g, w, sl, r, slot):
    """Give back the slot of a request that is gone."""
    r[sl[slot, s.ROW], s.SLOT_OF] = -1
    sl[slot, s.STATE] = s.NOBODY
    w[g[s.AT_FREE_SLOTS] + g[s.FREE_SLOTS]] = slot
    g[s.FREE_SLOTS] += 1


@inner
def stop_waiting(g, w, slot):
    """Take a preempted request out of the line that will not run again."""
    for at in range(g[s.FRONT]):
        if w[g[s.AT_FRONT] + at] == slot:
            leave_front(g, w, at)
            break
    g[s.WAITING] -= 1


@inlined
def is_in_list(w, at, count, slot, order):
    """Whether a slot, as of an admission, is among so many from a place on."""
    # numba compiles no generator here.
    for i in range(count):  # noqa: SIM110
        if w[at + 2 * i] == slot and w[at + 2 * i + 1] == order:
            return True
    return False
