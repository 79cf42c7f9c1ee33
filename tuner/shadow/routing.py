"""Replicas behind a router, compiled: who gets each request, by what they have in flight then.

Every replica goes on as `schedule` says, over arrays of its own; what becomes of a request is
noted in arrays that all share. Before one is dealt out, each replica has come as far as that
instant, so that the router sees what a real one would see: what was sent and not answered yet.
Later turns of a session go where its first went.

`deal_out` is the only entry; `fleet` lays out the arrays and reads them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tuner.shadow.compiled import compiled, part
from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.arrivals import admit, next_due, wait_for
from tuner.shadow.schedule.replay import has_work, work_on

# How requests are dealt out: as traffic.reshape.Router.
ROUND_ROBIN, LEAST_LOADED, PREFIX = range(3)

# The integers of a fleet. WANTED is how many replicas are to be up; PLANNED counts the changes
# of the plan that were made.
(
    ROUTER, REPLICAS, CALLED, CALLS, TURN, WANTED, FEWEST, PLANNED, PLANS,
    CACHED_SHARE, MAX_BUSIER, FLEET_INTEGERS,
) = range(12)  # fmt: skip
# Its instants and seconds: when it is looked at next, how often, and for how long it keeps what
# was needed; how long a start takes; how many requests in flight a replica is for.
LOOK, EVERY_S, HOLD_S, START_S, TARGET, FLEET_FLOATS = range(6)

# What a replica does, how many requests had ended before its last step; since when it is on,
# from when it serves, and how long it was on before.
STATE, ENDED_BEFORE, REPLICA_INTEGERS = range(3)
OFF, STARTS, SERVES, DRAINS = range(4)
ON_S, READY_S, BILLED_S, REPLICA_FLOATS = range(4)


class Many(NamedTuple):
    """What each replica has of its own: arrays of `schedule` with one more axis, the first."""

    g: Any
    x: Any
    w: Any
    slots: Any
    refs: Any
    ready: Any
    pool: Any
    keys: Any
    tables: Any
    heads: Any


class Common(NamedTuple):
    """What all replicas share: step times, the books of requests, traffic, a new cache."""

    t: Any
    instants: Any
    answers: Any
    histograms: Any
    log: Any
    traffic: Any
    cache: Any


class Fleet(NamedTuple):
    """The router's own: its numbers, the replicas', whom it sends where and when.

    `calls` are the rows that are dealt out, by due time; `plan` are instants and the replicas
    wanted from then on; bit i of seen[number] says that replica i had a prompt that begins so.
    needed_s[k] is when k replicas were needed last, -inf for never.

    Shapes: integers [FLEET_INTEGERS], floats [FLEET_FLOATS], states [replicas,
        REPLICA_INTEGERS], times_s [replicas, REPLICA_FLOATS], calls [m], places [n], plan
        [changes, 2], seen [numbers], needed_s [replicas + 1].
    """

    integers: Any
    floats: Any
    states: Any
    times_s: Any
    calls: Any
    places: Any
    plan: Any
    seen: Any
    needed_s: Any


_inner = part()


@_inner
def _bring(many, common, fleet, i, until_s):
    """Let a replica work until an instant has come, or it has nothing to do before."""
    g, x, w = many.g[i], many.x[i], many.w[i]
    sl, r, f, q = many.slots[i], many.refs[i].T, common.instants, common.answers
    t, h, log = common.t, common.histograms, common.log
    a, c = common.traffic, common.cache
    tr = s.Requests(
        a.prompts,
        a.outputs,
        a.priorities,
        many.ready[i],
        a.follows,
        a.followers,
        a.pauses_s,
        a.targets,
    )
    kv = s.Cache(
        many.pool[i],
        many.keys[i],
        many.tables[i],
        many.heads[i],
        c.links,
        c.starts,
        c.covered,
        c.before,
        c.held,
        c.reached,
        c.firsts,
        c.looks_back,
    )
    while x[s.NOW] < until_s and g[s.STATUS] == s.GOES:
        admit(g, x, f, r, q, tr)
        due_s = next_due(g, x, f, tr)
        if has_work(g):
            fleet.states[i, ENDED_BEFORE] = g[s.ENDED]
            work_on(g, x, w, t, sl, f, r, q, h, log, tr, kv, min(due_s, until_s))
        elif due_s >= until_s:
            return
        else:
            x[s.NOW] = max(x[s.NOW], due_s)


@_inner
def _due_by(ready, count, at_s):
    """Return how many of a heap of requests are due by an instant."""
    found = at = 0
    while True:
        if at < count and ready[at, 0] <= at_s:
            found += 1
            at = 2 * at + 1
            continue
        while at > 0 and at % 2 == 0:
            at = (at - 1) >> 1
        if at == 0:
            return found
        at += 1


@_inner
def _in_flight(many, fleet, i, at_s):
    """Return how many requests a replica had at an instant that it has just come to."""
    g = many.g[i]
    count = g[s.IN_FLIGHT] + _due_by(many.ready[i], g[s.READY], at_s)
    if many.x[i, s.NOW] > at_s:  # the step that goes on then has not answered yet
        count += g[s.ENDED] - fleet.states[i, ENDED_BEFORE]
    return count


@_inner
def _least(many, fleet, at_s):
    """Return who serves and has the fewest requests in flight; among equals they take turns."""
    n = fleet.integers[REPLICAS]
    best, fewest = -1, 0
    for step in range(n):
        i = (fleet.integers[TURN] + step) % n
        if fleet.states[i, STATE] != SERVES:
            continue
        count = _in_flight(many, fleet, i, at_s)
        if best < 0 or count < fewest:
            best, fewest = i, count
    return best


@_inner
def _next_in_turn(fleet):
    n = fleet.integers[REPLICAS]
    for step in range(n):
        i = (fleet.integers[TURN] + step) % n
        if fleet.states[i, STATE] == SERVES:
            return i
    return -1


@_inner
def _who_holds(fleet, cache, row):
    """Return who had most of the beginning of a prompt, and how many blocks of it."""
    left, best, held = np.uint64(0), -1, 0
    for i in range(fleet.integers[REPLICAS]):
        if fleet.states[i, STATE] == SERVES:
            left |= np.uint64(1) << np.uint64(i)
    for at in range(cache.starts[row], cache.starts[row + 1]):
        left &= fleet.seen[cache.links[at]]
        if left == 0:
            break
        best, held = 0, held + 1
        while not (left >> np.uint64(best)) & np.uint64(1):
            best += 1
    return best, held


@_inner
def _place(many, common, fleet, row, at_s):
    """Return where a request goes."""
    router = fleet.integers[ROUTER]
    if router == ROUND_ROBIN:
        return _next_in_turn(fleet)
    place = _least(many, fleet, at_s)
    if router == LEAST_LOADED:
        return place
    best, held = _who_holds(fleet, common.cache, row)
    block = many.g[0, s.RECORDED_BLOCK]
    is_enough = 100 * held * block >= fleet.integers[CACHED_SHARE] * common.traffic.prompts[row]
    if best >= 0 and is_enough:
        most = _in_flight(many, fleet, place, at_s) + fleet.integers[MAX_BUSIER]
        if _in_flight(many, fleet, best, at_s) <= most:
            place = best
    for at in range(common.cache.starts[row], common.cache.starts[row + 1]):
        fleet.seen[common.cache.links[at]] |= np.uint64(1) << np.uint64(place)
    return place


@_inner
def _want(fleet, wanted, at_s):
    """Have so many replicas on from an instant: start some, or let some drain."""
    fleet.integers[WANTED] = wanted
    for i in range(fleet.integers[REPLICAS]):
        state = fleet.states[i, STATE]
        if i < wanted and state == OFF:
            fleet.states[i, STATE] = STARTS
            fleet.times_s[i, ON_S] = at_s
            fleet.times_s[i, READY_S] = at_s + fleet.floats[START_S]
        elif i < wanted and state == DRAINS:
            fleet.states[i, STATE] = SERVES
        elif i >= wanted and state == STARTS:
            _turn_off(fleet, i, at_s)
        elif i >= wanted and state == SERVES:
            fleet.states[i, STATE] = DRAINS


@_inner
def _turn_off(fleet, i, at_s):
    fleet.states[i, STATE] = OFF
    fleet.times_s[i, BILLED_S] += max(0.0, at_s - fleet.times_s[i, ON_S])


@_inner
def _look(many, common, fleet, at_s):
    """See at an instant who has come up, who is done, and how many are wanted."""
    ints, floats = fleet.integers, fleet.floats
    total = 0
    for i in range(ints[REPLICAS]):
        if fleet.states[i, STATE] == STARTS and fleet.times_s[i, READY_S] <= at_s:
            fleet.states[i, STATE] = SERVES
        if fleet.states[i, STATE] != OFF:
            count = _in_flight(many, fleet, i, at_s)
            total += count
            if fleet.states[i, STATE] == DRAINS and count + many.g[i, s.READY] == 0:
                _turn_off(fleet, i, max(fleet.times_s[i, ON_S], at_s))
                _begin_anew(many, common, fleet, i)
    while ints[PLANNED] < ints[PLANS] and fleet.plan[ints[PLANNED], 0] <= at_s:
        _want(fleet, int(fleet.plan[ints[PLANNED], 1]), at_s)
        ints[PLANNED] += 1
    if floats[TARGET] == math.inf:
        return
    needed = math.ceil(total / floats[TARGET])
    needed = min(max(needed, ints[FEWEST]), ints[REPLICAS])
    fleet.needed_s[needed] = at_s
    wanted = needed
    for count in range(needed + 1, ints[REPLICAS] + 1):
        if at_s - fleet.needed_s[count] < floats[HOLD_S]:
            wanted = count
    if wanted != ints[WANTED]:
        _want(fleet, wanted, at_s)


@_inner
def _begin_anew(many, common, fleet, i):
    """Empty the prefix cache of a replica that has ended: another start has nothing in it."""
    new = common.cache
    for block in range(new.keys.size):
        many.keys[i, block] = new.keys[block]
        for field in range(s.BLOCK_FIELDS):
            many.pool[i, block, field] = new.pool[block, field]
    for key in range(new.heads.size):
        many.heads[i, key] = new.heads[key]
    mask = ~(np.uint64(1) << np.uint64(i % 64))
    for at in range(fleet.seen.size):
        fleet.seen[at] &= mask


@_inner
def _bring_all(many, common, fleet, until_s):
    """Let every replica come as far as an instant; False when one of them cannot."""
    for i in range(fleet.integers[REPLICAS]):
        if many.x[i, s.NOW] < until_s:
            _bring(many, common, fleet, i, until_s)
            if many.g[i, s.STATUS] != s.GOES:
                return False
    return True


@_inner
def _has_work(many, replicas):
    """Whether a replica has requests, or any that wait for an answer of theirs."""
    left = 0
    for i in range(replicas):
        left += many.g[i, s.IN_FLIGHT] + many.g[i, s.READY]
    return left > 0


@compiled
def deal_out(many, common, fleet, turns):
    """Deal out so many requests, or what is left and wait for all answers; True while more is.

    Each replica's status says whether it came to grief.
    """
    ints, floats = fleet.integers, fleet.floats
    for _ in range(turns):
        row = -1
        due_s = math.inf
        if ints[CALLED] < ints[CALLS]:
            row = fleet.calls[ints[CALLED]]
            due_s = common.instants[row, s.DUE]
        # Whoever is on once all have begun is looked at until the last of them is done.
        goes_on = row >= 0 or _has_work(many, ints[REPLICAS])
        if goes_on and floats[LOOK] <= due_s and floats[LOOK] < math.inf:
            if not _bring_all(many, common, fleet, floats[LOOK]):
                return False
            _look(many, common, fleet, floats[LOOK])
            floats[LOOK] += floats[EVERY_S]
            continue
        if not _bring_all(many, common, fleet, due_s):
            return False
        if row < 0:
            return False
        place = _place(many, common, fleet, row, due_s)
        fleet.places[row] = place
        ints[TURN] = (place + 1) % ints[REPLICAS]
        ints[CALLED] += 1
        wait_for(many.g[place], many.ready[place], due_s, row)
    return True
