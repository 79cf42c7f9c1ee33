"""When requests come: on a clock, after an answer, in a closed loop, in batches, by a gate."""

from __future__ import annotations

import math

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.layout import inlined, inner

# arrivals


@inlined
def wait_for(g, ready, due_s, row):
    """Let a request of a session be due at an instant: a heap by instant, then by row."""
    at = g[s.READY]
    g[s.READY] += 1
    while at > 0:
        above = (at - 1) >> 1
        if ready[above, 0] < due_s or (ready[above, 0] == due_s and ready[above, 1] <= row):
            break
        ready[at, 0], ready[at, 1] = ready[above, 0], ready[above, 1]
        at = above
    ready[at, 0], ready[at, 1] = due_s, row


@inlined
def _take_ready(g, ready):
    """Take out the request of a session that is due next."""
    row = int(ready[0, 1])
    g[s.READY] -= 1
    n = g[s.READY]
    due_s, last = ready[n, 0], ready[n, 1]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= n:
            break
        if below + 1 < n and (
            ready[below + 1, 0] < ready[below, 0]
            or (
                ready[below + 1, 0] == ready[below, 0] and ready[below + 1, 1] < ready[below, 1]
            )
        ):
            below += 1
        if ready[below, 0] > due_s or (ready[below, 0] == due_s and ready[below, 1] >= last):
            break
        ready[at, 0], ready[at, 1] = ready[below, 0], ready[below, 1]
        at = below
    ready[at, 0], ready[at, 1] = due_s, last
    return row


@inner
def _closed_rise(x, targets, n, in_flight):
    """Return when a closed loop's next request goes: now if fewer are in flight than wanted."""
    now = x[s.NOW]
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if targets[middle, 0] <= now:
            low = middle + 1
        else:
            high = middle
    at = low - 1
    if at >= 0 and targets[at, 1] > in_flight:
        return now
    for later in range(at + 1, n):
        if targets[later, 1] > in_flight:
            return targets[later, 0]
    return x[s.END_S] if in_flight == 0 else math.inf


@inlined
def next_due(g, x, f, tr):
    """Return when the next request is due that is known of, inf without one."""
    kind = g[s.ARRIVALS]
    if kind == s.OPEN:
        return f[g[s.NEXT], s.DUE] if g[s.NEXT] < g[s.REQUESTS] else math.inf
    if kind == s.CAUSAL:
        return tr.ready[0, 0] if g[s.READY] > 0 else math.inf
    if kind == s.CLOSED:
        if g[s.NEXT] >= g[s.REQUESTS] or x[s.NOW] >= x[s.END_S]:
            return math.inf
        return _closed_rise(x, tr.targets, g[s.TARGETS], g[s.IN_FLIGHT])
    left = g[s.REQUESTS] - g[s.NEXT]
    if left == 0:
        return math.inf
    if g[s.GOING] > 0:
        return x[s.NOW]
    if g[s.IN_FLIGHT] > 0:
        return math.inf
    full_s = math.inf
    if left >= g[s.BATCH_SIZE]:
        full_s = f[g[s.NEXT] + g[s.BATCH_SIZE] - 1, s.DUE]
    return min(full_s, f[g[s.NEXT], s.DUE] + x[s.BATCH_WAIT_S])


@inlined
def _take_next(g, x, f, tr):
    """Take the next request out of those to come; return its row."""
    kind = g[s.ARRIVALS]
    if kind == s.CAUSAL:
        due_s = tr.ready[0, 0]
        row = _take_ready(g, tr.ready)
        f[row, s.DUE] = due_s
        return row
    row = g[s.NEXT]
    if kind == s.BATCHES:
        if g[s.GOING] == 0:
            arrived = 0
            while (
                row + arrived < g[s.REQUESTS]
                and arrived < g[s.BATCH_SIZE]
                and f[row + arrived, s.DUE] <= x[s.NOW]
            ):
                arrived += 1
            g[s.GOING] = max(1, arrived)
        g[s.GOING] -= 1
    elif kind == s.CLOSED:
        f[row, s.DUE] = x[s.NOW]
    g[s.NEXT] += 1
    return row


@inlined
def end_request(g, x, q, tr, row, outcome):
    """Close a request's book, and let those follow that waited for its answer."""
    q[row, s.OUTCOME] = outcome
    g[s.ENDED] += 1
    if g[s.ARRIVALS] == s.CAUSAL:
        for i in range(tr.follows[row], tr.follows[row + 1]):
            wait_for(g, tr.ready, x[s.NOW] + tr.pauses_s[tr.followers[i]], tr.followers[i])


@inner
def _hand_over(g, r, row):
    """Put a request into the engine's queue."""
    g[s.IN_FLIGHT] += 1
    if g[s.WAITING] == 0 or g[s.PRIORITY] or g[s.THRESHOLD] > 0:
        g[s.HELD] = 0
    r[g[s.QUEUE_TAIL], s.QUEUE] = row
    g[s.QUEUE_TAIL] += 1
    g[s.WAITING] += 1


@inner
def _let_in(g, x, f, r, q, tr):
    """Drop who has waited at the gate for too long, and let in whom there is room for."""
    while g[s.GATE_HEAD] < g[s.GATE_TAIL]:
        row = r[g[s.GATE_HEAD], s.AT_GATE]
        waited_s = x[s.NOW] - f[row, s.DUE]
        if waited_s > x[s.GATE_WAIT_S]:
            end_request(
                g, x, q, tr, row, s.TIMED_OUT if waited_s > x[s.PATIENCE] else s.TURNED_AWAY
            )
        elif g[s.IN_FLIGHT] < g[s.GATE_CAP]:
            _hand_over(g, r, row)
        else:
            return
        g[s.GATE_HEAD] += 1


@inlined
def admit(g, x, f, r, q, tr):
    """Hand over every request that is due by now, or leave it to the gate."""
    _let_in(g, x, f, r, q, tr)
    while True:
        due_s = next_due(g, x, f, tr)
        if due_s > x[s.NOW] or due_s == math.inf:
            return
        row = _take_next(g, x, f, tr)
        g[s.SENT] += 1
        if math.isnan(x[s.FIRST_DUE]) and row >= g[s.LED_IN]:
            x[s.FIRST_DUE] = f[row, s.DUE]
        if tr.prompts[row] + tr.outputs[row] > g[s.MAX_LENGTH]:
            end_request(g, x, q, tr, row, s.REFUSED)
            continue
        f[row, s.SENT_AT] = x[s.NOW]
        q[row, s.OUTCOME] = s.GOES_ON
        if g[s.IN_FLIGHT] < g[s.GATE_CAP]:
            _hand_over(g, r, row)
        elif g[s.GATE_TAIL] - g[s.GATE_HEAD] < g[s.GATE_ROOM]:
            r[g[s.GATE_TAIL], s.AT_GATE] = row
            g[s.GATE_TAIL] += 1
        else:
            end_request(g, x, q, tr, row, s.TURNED_AWAY)


@inner
def queued(r, at):
    """Return the row at a place of the queue, also of one that has left it."""
    row = r[at, s.QUEUE]
    return row if row >= 0 else -1 - row
