"""vLLM's scheduling decisions, compiled: which requests each step computes, and when.

The same rules as vLLM's V1 scheduler and KV-cache manager, over arrays instead of objects.
Running requests that only decode are not touched one by one: each is known by the step in which
its last token is scheduled, so that a step costs the same for one of them as for a thousand.
Steps in which their order could matter (blocks run short, the token budget is spent, several
prompts in pieces) go through the running list one by one.

`advance` is the only entry; `simulated` lays out the arrays, and `simulator` reads them.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py, async_scheduler.py, kv_cache_manager.py,
block_pool.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tuner.shadow.compiled import compiled, part

# The columns of a slot: what is known of a request that runs or was preempted. END is the step
# in which its last token is scheduled, ORDER the count of admissions when it began to run,
# TAKEN what this step schedules of it, MISSED whether the step before left it out.
(
    ROW, PROMPT, OUTPUT, ANSWERED, COMPUTED, END, STATE, BLOCKS, ORDER, PLACE, CACHED,
    TAKEN, END_NEXT, END_BEFORE, BUCKET_NEXT, BUCKET_BEFORE, MISSED, RESUMED, ARRIVAL,
    SLOT_FIELDS,
) = range(20)  # fmt: skip
NOBODY, PREFILLS, DECODES, PREEMPTED = range(4)

# The integers of a replay's state. STEP counts the batches that were scheduled, DONE is the
# last that was completed; CONTEXT is the sum of what decoding requests attend to, less STEP
# for each of them, SQUARES that of its squares less ORIGIN, a step of not long ago.
(
    STEP, DONE, RUNNING, RUN_LENGTH, DECODING, PREFILLING, LAST_PREFILL, CONTEXT, FREE,
    QUEUE_HEAD, QUEUE_TAIL, FRONT, WAITING, ORDERS, HELD, TIDY, IN_PIPE, SENT, ENDED,
    IN_FLIGHT, MISSING, OLDEST, NEXT_LATE, LATE, STUCK, READY, NEXT, GOING, LOGGED,
    FREE_SLOTS, STATUS, MEASURES, SQUARES, ORIGIN,
    # Batches without anything; whether this one carries a prompt, and how many with anything
    # there were by the last that did; whether prompts were left waiting.
    EMPTY, CARRIES, CARRIED, BACKED_UP,
    # The first and the last of those who wait before the gate.
    GATE_HEAD, GATE_TAIL,
    # What the replay is: constant from here on.
    CAP, BUDGET, INPUT_BUDGET, THRESHOLD, ADAPTIVE, CHUNKS, RESERVES, WATERMARK, PRIORITY,
    AHEAD, BLOCK, ALL_BLOCKS, MAX_LENGTH, IS_CACHED, WOULD_CACHE, ARRIVALS, ALLOWED_LATE,
    KEEPS_LOG, BATCH_SIZE, REQUESTS, RECORDED_BLOCK, LINK_KEYS, SLOTS, WIDTH, TARGETS,
    KNOTS, LONE, KEYLESS_FIRST, OMITS, YIELDS, INTERVAL, LAST_DAY, GATE_CAP, GATE_ROOM,
    LED_IN,
    # Where the parts of the work array begin.
    AT_RUN, AT_CALENDAR, AT_PHASES, AT_BUCKETS, AT_FRONT, AT_FREE_SLOTS,
    AT_SINGLES, AT_ENDS, AT_BATCHES, AT_MIXED, AT_KNOTS, AT_FACTORS, FACTOR_ROWS,
    FACTOR_COLUMNS, AT_LAUNCHES, INTEGERS,
) = range(91)  # fmt: skip

# The instants and seconds of a replay's state, and the sums over its steps.
(
    NOW, BEFORE, FIRST_DUE, PATIENCE, LATE_S, MAX_CLOCK, END_S, BASE_S, SEQ_S, EAGER_S,
    PREFILL_BASE_S, DECODE_CONTEXT_S, MIXED_CONTEXT_S, SPREAD_S, MIXED_SPREAD_S,
    PREFILL_CONTEXT_S, TIDY_S, BATCH_WAIT_S, LEAD_S, GATE_WAIT_S,
    # What launching takes the host: a batch with a prompt in a graph, one without, and for
    # each sequence and token; when it has launched the newest batch, and whether it noticed the
    # last one late; when the device has nothing left, and when each batch on its way ends.
    HOST_MIXED_S, HOST_EAGER_S, HOST_SEQ_S, HOST_TOKEN_S, LAUNCHED, WAS_LATE, DEVICE,
    ENDS_0, ENDS_1, ENDS_2, ENDS_3, STEPS_N, STEPS_S, HOST_BOUND_S,
    CACHED_N, PREEMPTED_N, FULLEST, PEAK_RUNNING, PEAK_WAITING,
    PEAK_USED,
    # Steps that decode alone: how many, sequences, their squares, seconds, seconds x sequences.
    ALONE_N, ALONE_SEQS, ALONE_SQUARES, ALONE_S, ALONE_PRODUCT,
    # The others: how many, sequences, prompt tokens, seconds.
    MIXED_N, MIXED_SEQS, MIXED_TOKENS, MIXED_S, FLOATS,
) = range(50)  # fmt: skip

# The columns of a request's instants, of its answer, and of what refers to it.
DUE, SENT_AT, FIRST, LAST = range(4)
TOKENS, OUTCOME = range(2)
QUEUE, SLOT_OF, IS_LATE, AT_GATE, REFERENCES = range(5)
COMPLETED, REFUSED, TIMED_OUT, ABORTED, UNFINISHED, TURNED_AWAY, TRUNCATED, GOES_ON = range(8)

# How requests arrive.
OPEN, CAUSAL, CLOSED, BATCHES = range(4)

# The columns of a batch on its way; EVEN counts the requests that were in the batch before too.
(
    B_DECODES, B_PREFILL, B_SEQS, B_DECODE_CONTEXT, B_PREFILL_CONTEXT, B_PREEMPTED,
    B_CACHED, B_RUNNING, B_WAITING, B_USED, B_EVEN, B_SINGLES, B_ENDS, B_SQUARES,
    BATCH_FIELDS,
) = range(15)  # fmt: skip
PIPE = 4  # batches that the arrays hold at once, a power of two: more than are on their way

# The columns of the log: those of engine.steps.StepColumns, of which two are in blocks here.
LOG_FIELDS, USED_COLUMNS = 16, (10, 11)
# Histograms: gaps between tokens, steps that decode alone, running, waiting, used blocks.
GAPS, DECODE_STEPS, H_RUNNING, H_WAITING, H_USED, HISTOGRAMS = range(6)
# A bin for each key of stats.LogHistogram from 2^-33 to 2^26, those at the ends hold what lies
# beyond. Each has a weight and a total. Behind them stands a mark for each stretch of bins,
# whether any of it was counted.
BIN_SHIFT, STRETCH_SHIFT = 41, 6
LOWEST_KEY, BINS = (1023 - 33) << 11, 59 << 11
ROOM = 2 * BINS + (BINS >> STRETCH_SHIFT)
BIN_RATIO = 2.0**-11

# The columns of a block: its neighbours in the free queue, who holds it, and the next with
# the same key.
NEXT_FREE, BEFORE_FREE, HOLDERS, SAME_KEY, BLOCK_FIELDS = range(5)
NO_KEY = -1

GOES, ENDED_WELL, NEEDS_CACHE, IS_STUCK, LOST_WORK, LATE_CUT, CLOCK_CUT, NO_SLOT = range(8)
STUCK_TURNS = 10_000


class Requests(NamedTuple):
    """What is replayed, and who waits for whose answer.

    `ready` is a heap of due time and row of the sessions' requests that may go; the followers
    of a row stand from follows[row] to follows[row + 1]; `targets` are the times and numbers of
    requests that a closed loop holds in flight.

    Shapes: prompts, outputs and pauses_s are [n], priorities [n] or [0], ready [n, 2], follows
        [n + 1], targets [changes, 2].
    Units: tokens, seconds.
    """

    prompts: Any
    outputs: Any
    priorities: Any
    ready: Any
    follows: Any
    followers: Any
    pauses_s: Any
    targets: Any


class Cache(NamedTuple):
    """The blocks of the KV cache, where blocks are more than a number.

    `tables` hold the blocks of each slot, and then those that it alone can find again. `heads`
    has for each key that requests share the block that has it for longest; a beginning of a
    prompt is numbered in `links`, from starts[row] on, for the first covered[row] tokens. The
    first held[row] tokens of a prompt are the prompt and the answer of row before[row]. Others
    hold the first reached[row] tokens of a row; what of these is in no numbered beginning has
    keys from firsts[row] on.

    Shapes: pool is [blocks + 1, BLOCK_FIELDS], keys [blocks + 1], tables [2, slots, width].
    """

    pool: Any
    keys: Any
    tables: Any
    heads: Any
    links: Any
    starts: Any
    covered: Any
    before: Any
    held: Any
    reached: Any
    firsts: Any


_inner = part()
_inlined = part(is_inlined=True)


@_inlined
def _count(h, which, value, weight, total):
    """Count a sample of which `weight` come to `total`."""
    at = (np.float64(value).view(np.int64) >> BIN_SHIFT) - LOWEST_KEY
    at = min(max(at, 0), BINS - 1)
    first = which * ROOM
    h[first + 2 * at] += weight
    h[first + 2 * at + 1] += total
    h[first + 2 * BINS + (at >> STRETCH_SHIFT)] = 1.0


# the calendar: decoding requests by the step of their last token, round a circle of steps


@_inner
def _day(g, step):
    """Return where the first of those stands whose last token a step schedules."""
    return g[AT_CALENDAR] + (step & g[LAST_DAY])


@_inlined
def _enter(g, w, sl, slot):
    """Enter a request into the calendar."""
    day = _day(g, sl[slot, END])
    first = w[day]
    sl[slot, END_NEXT], sl[slot, END_BEFORE] = first, -1
    if first >= 0:
        sl[first, END_BEFORE] = slot
    w[day] = slot


@_inlined
def _strike(g, w, sl, slot):
    """Take a request out of the calendar."""
    before, after = sl[slot, END_BEFORE], sl[slot, END_NEXT]
    if before >= 0:
        sl[before, END_NEXT] = after
    else:
        w[_day(g, sl[slot, END])] = after
    if after >= 0:
        sl[after, END_BEFORE] = before


# blocks: counted, or with the prefix cache as vLLM keeps it


@_inner
def _link(blk, block, before):
    """Put a block into the free queue behind another."""
    after = blk[before, NEXT_FREE]
    blk[block, NEXT_FREE], blk[block, BEFORE_FREE] = after, before
    blk[before, NEXT_FREE] = block
    blk[after, BEFORE_FREE] = block


@_inner
def _unlink(blk, block):
    """Take a block out of the free queue."""
    before, after = blk[block, BEFORE_FREE], blk[block, NEXT_FREE]
    blk[before, NEXT_FREE] = after
    blk[after, BEFORE_FREE] = before


@_inner
def _forget(g, r, kv, block):
    """Let a block lose its key."""
    key = kv.keys[block]
    if key == NO_KEY:
        return
    kv.keys[block] = NO_KEY
    if key >= 0:
        first = kv.heads[key]
        if first == block:
            kv.heads[key] = kv.pool[block, SAME_KEY]
            return
    else:
        own = -2 - key
        slot = r[own // g[WIDTH], SLOT_OF]
        if slot < 0:
            return
        at = own % g[WIDTH]
        first = kv.tables[1, slot, at]
        if first == block:
            kv.tables[1, slot, at] = kv.pool[block, SAME_KEY]
            return
    while first >= 0 and kv.pool[first, SAME_KEY] != block:
        first = kv.pool[first, SAME_KEY]
    if first >= 0:
        kv.pool[first, SAME_KEY] = kv.pool[block, SAME_KEY]


@_inner
def _take_block(g, r, kv):
    """Return the block that was free for longest, without its key."""
    sentinel = g[ALL_BLOCKS]
    block = kv.pool[sentinel, NEXT_FREE]
    _unlink(kv.pool, block)
    _forget(g, r, kv, block)
    kv.pool[block, HOLDERS] = 1
    g[FREE] -= 1
    return block


@_inner
def _key_at(g, kv, row, at):
    """Return the key of a request's block: shared with equal beginnings, or its own.

    What it holds of the turn before it has that turn's keys.
    """
    end = (at + 1) * g[BLOCK]
    while end <= kv.held[row]:
        row = kv.before[row]
    if end <= kv.covered[row]:
        link = (end - 1) // g[RECORDED_BLOCK]
        first = (link * g[RECORDED_BLOCK]) // g[BLOCK]
        return np.int64(kv.links[kv.starts[row] + link]) * g[LINK_KEYS] + at - first
    if end <= kv.reached[row]:
        return kv.firsts[row] + at
    return np.int64(-2) - (np.int64(row) * g[WIDTH] + at)


@_inner
def _found(g, kv, slot, key):
    """Return the block that is cached under a key for longest, -1 without one."""
    if key >= 0:
        return kv.heads[key]
    if slot < 0:
        return -1
    return kv.tables[1, slot, (-2 - key) % g[WIDTH]]


@_inner
def _remember(g, kv, slot, block, key):
    """Give a block its key."""
    if kv.keys[block] == key:
        return
    kv.keys[block] = key
    kv.pool[block, SAME_KEY] = -1
    last = _found(g, kv, slot, key)
    if last < 0:
        if key >= 0:
            kv.heads[key] = block
        else:
            kv.tables[1, slot, (-2 - key) % g[WIDTH]] = block
        return
    while kv.pool[last, SAME_KEY] >= 0:
        last = kv.pool[last, SAME_KEY]
    kv.pool[last, SAME_KEY] = block


@_inlined
def _cache_up_to(g, sl, kv, slot, tokens):
    """Give all blocks that so many tokens fill their keys."""
    full = tokens // g[BLOCK]
    row = sl[slot, ROW]
    for at in range(sl[slot, CACHED], full):
        key = _key_at(g, kv, row, at)
        _remember(g, kv, slot, kv.tables[0, slot, at], key)
    sl[slot, CACHED] = max(sl[slot, CACHED], full)


@_inlined
def _grow(g, sl, r, kv, slot, blocks):
    """Let a request hold so many blocks; the caller has seen that they are there."""
    have = sl[slot, BLOCKS]
    if blocks <= have:
        return
    sl[slot, BLOCKS] = blocks
    if g[IS_CACHED]:
        for at in range(have, blocks):
            kv.tables[0, slot, at] = _take_block(g, r, kv)
    else:
        g[FREE] -= blocks - have


@_inlined
def _release(g, sl, kv, slot):
    """Give back a request's blocks: the last first, those without a key before all others.

    Before KEYLESS_FIRST they wait like others.
    """
    if not g[IS_CACHED]:
        g[FREE] += sl[slot, BLOCKS]
        sl[slot, BLOCKS] = 0
        return
    sentinel = g[ALL_BLOCKS]
    front = sentinel
    for at in range(sl[slot, BLOCKS] - 1, -1, -1):
        block = kv.tables[0, slot, at]
        kv.pool[block, HOLDERS] -= 1
        if kv.pool[block, HOLDERS] > 0:
            continue
        g[FREE] += 1
        if g[KEYLESS_FIRST] and kv.keys[block] == NO_KEY:
            _link(kv.pool, block, front)
            front = block
        else:
            _link(kv.pool, block, kv.pool[sentinel, BEFORE_FREE])
    sl[slot, BLOCKS] = 0
    sl[slot, CACHED] = 0


# decoding requests, by the phase in which they want a block


@_inner
def _phase(g, sl, slot):
    """Return at which steps, modulo the block size, a decoding request wants a block."""
    return (sl[slot, END] + 2 - sl[slot, PROMPT] - sl[slot, OUTPUT]) % g[BLOCK]


@_inlined
def _join_bucket(g, w, sl, slot):
    phase = _phase(g, sl, slot)
    w[g[AT_PHASES] + phase] += 1
    if g[IS_CACHED]:
        first = w[g[AT_BUCKETS] + phase]
        sl[slot, BUCKET_NEXT], sl[slot, BUCKET_BEFORE] = first, -1
        if first >= 0:
            sl[first, BUCKET_BEFORE] = slot
        w[g[AT_BUCKETS] + phase] = slot


@_inlined
def _leave_bucket(g, w, sl, slot):
    phase = _phase(g, sl, slot)
    w[g[AT_PHASES] + phase] -= 1
    if g[IS_CACHED]:
        before, after = sl[slot, BUCKET_BEFORE], sl[slot, BUCKET_NEXT]
        if before >= 0:
            sl[before, BUCKET_NEXT] = after
        else:
            w[g[AT_BUCKETS] + phase] = after
        if after >= 0:
            sl[after, BUCKET_BEFORE] = before


@_inner
def _attended(sl, slot):
    """Return what a decoding request attends to, less the number of the step."""
    return sl[slot, PROMPT] + sl[slot, OUTPUT] - 1 - sl[slot, END]


@_inner
def _squares_at(g, step):
    """Return the sum of squares of what decoding requests attend to in a step."""
    later = step - g[ORIGIN]
    return g[SQUARES] + later * (2 * g[CONTEXT] + g[DECODING] * (2 * g[ORIGIN] + later))


@_inlined
def _decodes_on(g, w, sl, slot):
    """Count a request among those that decode, from the next step on."""
    # Squares of sums of steps would grow beyond an integer.
    g[SQUARES], g[ORIGIN] = _squares_at(g, g[STEP]), g[STEP]
    g[DECODING] += 1
    g[CONTEXT] += _attended(sl, slot)
    g[SQUARES] += (_attended(sl, slot) + g[ORIGIN]) ** 2
    _join_bucket(g, w, sl, slot)
    _enter(g, w, sl, slot)


@_inlined
def _decodes_no_more(g, w, sl, slot):
    """Leave a request out of those that decode."""
    g[DECODING] -= 1
    g[CONTEXT] -= _attended(sl, slot)
    g[SQUARES] -= (_attended(sl, slot) + g[ORIGIN]) ** 2
    _leave_bucket(g, w, sl, slot)
    _strike(g, w, sl, slot)
    if sl[slot, MISSED]:
        g[MISSING] -= 1
        sl[slot, MISSED] = 0


@_inner
def _computed_before(g, sl, slot):
    """Return how many tokens of a decoding request are computed before the current step."""
    return sl[slot, PROMPT] + sl[slot, OUTPUT] - 2 - (sl[slot, END] - g[STEP])


@_inlined
def _held_blocks(g, sl, slot):
    """Bring the blocks of a request up to date where they are only counted."""
    if sl[slot, STATE] == DECODES and not g[IS_CACHED]:
        computed = _computed_before(g, sl, slot)
        if sl[slot, END] < g[STEP]:
            computed = sl[slot, PROMPT] + sl[slot, OUTPUT] - 1
        sl[slot, BLOCKS] = (computed + g[BLOCK] - 1) // g[BLOCK]


# the running list and the queue


@_inlined
def _compact(g, w, sl):
    """Close the gaps in the running list."""
    run, kept = g[AT_RUN], 0
    for i in range(g[RUN_LENGTH]):
        slot = w[run + i]
        if slot >= 0:
            w[run + kept] = slot
            sl[slot, PLACE] = kept
            kept += 1
    g[RUN_LENGTH] = kept


@_inlined
def _run(g, w, sl, slot):
    """Put a request at the end of the running list."""
    if g[RUN_LENGTH] >= 2 * g[SLOTS]:
        _compact(g, w, sl)
    w[g[AT_RUN] + g[RUN_LENGTH]] = slot
    sl[slot, PLACE] = g[RUN_LENGTH]
    sl[slot, ORDER] = g[ORDERS]
    g[ORDERS] += 1
    g[RUN_LENGTH] += 1
    g[RUNNING] += 1


@_inlined
def _leave_run(g, w, sl, slot):
    """Take a request out of the running list."""
    w[g[AT_RUN] + sl[slot, PLACE]] = -1
    g[RUNNING] -= 1
    while g[RUN_LENGTH] > 0 and w[g[AT_RUN] + g[RUN_LENGTH] - 1] < 0:
        g[RUN_LENGTH] -= 1


@_inner
def _is_before(priorities, row, arrival, other, other_arrival):
    """Whether a row is served before another: by priority, then by arrival."""
    if priorities.size == 0 or priorities[row] == priorities[other]:
        return arrival < other_arrival
    return priorities[row] < priorities[other]


@_inlined
def _skip_gone(g, r, q):
    """Let the queue begin with who is still in it."""
    while g[QUEUE_HEAD] < g[QUEUE_TAIL]:
        row = r[g[QUEUE_HEAD], QUEUE]
        if row >= 0 and q[row, OUTCOME] == GOES_ON:
            return
        g[QUEUE_HEAD] += 1


@_inlined
def _head(g, w, sl, r, q, tr):
    """Return where the request stands that would be admitted next.

    0 and more is a place among the preempted, -1 - i the place i in the queue.
    """
    _skip_gone(g, r, q)
    if not g[PRIORITY]:
        return g[FRONT] - 1 if g[FRONT] > 0 else -1 - g[QUEUE_HEAD]
    best, arrival, where = -1, -1, -1
    for at in range(g[FRONT]):
        slot = w[g[AT_FRONT] + at]
        row, came = sl[slot, ROW], sl[slot, ARRIVAL]
        if best < 0 or _is_before(tr.priorities, row, came, best, arrival):
            best, arrival, where = row, came, at
    last = g[QUEUE_TAIL] if tr.priorities.size else min(g[QUEUE_HEAD] + 1, g[QUEUE_TAIL])
    for i in range(g[QUEUE_HEAD], last):
        row = r[i, QUEUE]
        if row < 0 or q[row, OUTCOME] != GOES_ON:
            continue
        if best < 0 or _is_before(tr.priorities, row, i, best, arrival):
            best, arrival, where = row, i, -1 - i
    return where


@_inlined
def _leave_front(g, w, at):
    """Take a preempted request out of the line."""
    front = g[AT_FRONT]
    g[FRONT] -= 1
    for i in range(at, g[FRONT]):
        w[front + i] = w[front + i + 1]


@_inlined
def _new_slot(g, w, sl, r, kv, tr, row):
    """Return a slot for a request that begins."""
    g[FREE_SLOTS] -= 1
    slot = w[g[AT_FREE_SLOTS] + g[FREE_SLOTS]]
    r[row, SLOT_OF] = slot
    for field in range(SLOT_FIELDS):
        sl[slot, field] = 0
    sl[slot, ROW], sl[slot, PROMPT], sl[slot, OUTPUT] = row, tr.prompts[row], tr.outputs[row]
    if g[IS_CACHED]:
        for at in range((tr.prompts[row] + tr.outputs[row]) // g[BLOCK] + 1):
            kv.tables[1, slot, at] = -1
    return slot


@_inlined
def _drop_slot(g, w, sl, r, slot):
    """Give back the slot of a request that is gone."""
    r[sl[slot, ROW], SLOT_OF] = -1
    sl[slot, STATE] = NOBODY
    w[g[AT_FREE_SLOTS] + g[FREE_SLOTS]] = slot
    g[FREE_SLOTS] += 1


@_inner
def _stop_waiting(g, w, slot):
    """Take a preempted request out of the line that will not run again."""
    for at in range(g[FRONT]):
        if w[g[AT_FRONT] + at] == slot:
            _leave_front(g, w, at)
            break
    g[WAITING] -= 1


@_inlined
def _is_in_list(w, at, count, slot, order):
    # numba compiles no generator here.
    for i in range(count):  # noqa: SIM110
        if w[at + 2 * i] == slot and w[at + 2 * i + 1] == order:
            return True
    return False


@_inner
def _batch(g, step):
    """Return where a batch's numbers stand."""
    return g[AT_BATCHES] + (step & (PIPE - 1)) * BATCH_FIELDS


@_inner
def _singles(g, step):
    """Return where those stand whose token of a batch is looked at by itself."""
    return g[AT_SINGLES] + (step & (PIPE - 1)) * 2 * g[SLOTS]


@_inner
def _ends(g, step):
    """Return where those stand whose last token is in a batch."""
    return g[AT_ENDS] + (step & (PIPE - 1)) * 2 * g[SLOTS]


@_inlined
def _add_single(g, w, sl, step, slot):
    """Have a request's token in a batch looked at by itself."""
    n = w[_batch(g, step) + B_SINGLES]
    at = _singles(g, step) + 2 * n
    w[at], w[at + 1] = slot, sl[slot, ORDER]
    w[_batch(g, step) + B_SINGLES] = n + 1


@_inlined
def _add_end(g, w, sl, step, slot):
    """Have a request end with a batch; they end in the order in which they run."""
    n = w[_batch(g, step) + B_ENDS]
    at, order = _ends(g, step), sl[slot, ORDER]
    i = n
    while i > 0 and w[at + 2 * i - 1] > order:
        w[at + 2 * i], w[at + 2 * i + 1] = w[at + 2 * i - 2], w[at + 2 * i - 1]
        i -= 1
    w[at + 2 * i], w[at + 2 * i + 1] = slot, order
    w[_batch(g, step) + B_ENDS] = n + 1


@_inlined
def _let_end(g, w, sl, step):
    """Have those end with a batch whose last token it schedules."""
    while w[_day(g, step)] >= 0:
        slot = w[_day(g, step)]
        _decodes_no_more(g, w, sl, slot)
        _add_end(g, w, sl, step, slot)


@_inner
def _split_off(g, x, w, sl, f, slot):
    """Have the next gap of a decoding request counted by itself: it stops decoding steadily."""
    if sl[slot, MISSED]:
        return
    if g[AHEAD]:
        step = g[STEP] - 1
        batch = _batch(g, step)
        if _is_in_list(w, _singles(g, step), w[batch + B_SINGLES], slot, sl[slot, ORDER]):
            return
        w[batch + B_EVEN] -= 1
        _add_single(g, w, sl, step, slot)
    f[sl[slot, ROW], LAST] = x[BEFORE]


@_inner
def _preempt(g, x, w, sl, f, kv, slot):
    """Take everything from a running request and put it before the queue."""
    if sl[slot, STATE] == DECODES:
        _split_off(g, x, w, sl, f, slot)
        sl[slot, ANSWERED] = sl[slot, OUTPUT] - (sl[slot, END] - (g[STEP] - 1))
        if sl[slot, END] >= g[STEP]:
            _decodes_no_more(g, w, sl, slot)
    else:
        g[PREFILLING] -= 1
    _release(g, sl, kv, slot)
    sl[slot, STATE] = PREEMPTED
    sl[slot, COMPUTED] = sl[slot, TAKEN] = 0
    sl[slot, RESUMED] = 1
    _leave_run(g, w, sl, slot)
    w[g[AT_FRONT] + g[FRONT]] = slot
    g[FRONT] += 1
    g[WAITING] += 1
    if g[WOULD_CACHE] and not g[IS_CACHED]:
        g[STATUS] = NEEDS_CACHE


@_inlined
def _threshold(g):
    """Return how much of a long prompt a step computes while others want to run; 0: all."""
    eligible = g[RUNNING] + g[WAITING]
    if g[THRESHOLD] <= 0 or eligible <= g[LONE]:
        return 0
    if g[ADAPTIVE]:
        return max(g[THRESHOLD], g[INPUT_BUDGET] // eligible)
    return g[THRESHOLD]


@_inner
def _defers(g):
    """Whether this step leaves prompts out, so that those who decode have it to themselves."""
    executed = g[STEP] - g[EMPTY]
    return (
        g[INTERVAL] > 1
        and not g[BACKED_UP]
        and executed + 1 - g[CARRIED] < g[INTERVAL]
        and g[RUNNING] > g[PREFILLING]
    )


@_inlined
def _count_in(w, batch, is_decode, before, tokens):
    """Note what a request adds to a batch."""
    if is_decode:
        w[batch + B_DECODES] += 1
        w[batch + B_DECODE_CONTEXT] += before + tokens
        w[batch + B_SQUARES] += (before + tokens) ** 2
    else:
        w[batch + B_PREFILL] += tokens
        w[batch + B_SEQS] += 1
        w[batch + B_PREFILL_CONTEXT] += tokens * before + tokens * (tokens + 1) // 2


@_inlined
def _prefilled(g, w, sl, slot):
    """Take note of what a request has computed of its prompt; its first token may follow."""
    step = g[STEP]
    if sl[slot, COMPUTED] < sl[slot, PROMPT] + sl[slot, ANSWERED]:
        return False
    sl[slot, END] = step + sl[slot, OUTPUT] - sl[slot, ANSWERED] - 1
    sl[slot, STATE] = DECODES
    _add_single(g, w, sl, step, slot)
    if sl[slot, END] > step:
        _decodes_on(g, w, sl, slot)
    else:
        _add_end(g, w, sl, step, slot)
    return True


@_inner
def _hits(g, kv, row, slot, tokens):
    """Return how many blocks of a request are cached, and how many of those nobody holds."""
    hits = idle = 0
    for at in range((tokens - 1) // g[BLOCK]):
        key = _key_at(g, kv, row, at)
        block = _found(g, kv, slot, key)
        if block < 0:
            break
        hits += 1
        if kv.pool[block, HOLDERS] == 0:
            idle += 1
    return hits, idle


@_inner
def _adopt(g, sl, kv, slot, hits):
    """Let a request hold the cached blocks that it begins with."""
    row = sl[slot, ROW]
    for at in range(hits):
        key = _key_at(g, kv, row, at)
        block = _found(g, kv, slot, key)
        if kv.pool[block, HOLDERS] == 0:
            _unlink(kv.pool, block)
            g[FREE] -= 1
        kv.pool[block, HOLDERS] += 1
        kv.tables[0, slot, at] = block
    sl[slot, BLOCKS] = sl[slot, CACHED] = hits


@_inlined
def _admit_waiting(g, w, sl, r, q, tr, kv, budget, threshold, defers):
    """Let those run who wait, as long as cap, budget and blocks allow; return if any did."""
    batch, block, any_admitted = _batch(g, g[STEP]), g[BLOCK], False
    while budget > 0 and g[WAITING] > 0 and g[RUNNING] < g[CAP]:
        where = _head(g, w, sl, r, q, tr)
        slot = w[g[AT_FRONT] + where] if where >= 0 else -1
        row = sl[slot, ROW] if where >= 0 else r[-1 - where, QUEUE]
        answered = sl[slot, ANSWERED] if where >= 0 else 0
        tokens = tr.prompts[row] + answered
        hits = idle = 0
        if g[IS_CACHED]:
            hits, idle = _hits(g, kv, row, slot, tokens)
        before = hits * block
        if defers and before < tokens - 1:
            break
        wanted = tokens - before
        if 0 < threshold < wanted:
            wanted = threshold
        if not g[CHUNKS] and wanted > budget:
            break
        wanted = min(wanted, budget)
        spare = g[FREE] + hits - idle - (g[WATERMARK] if g[RUNNING] > 0 else 0)
        if g[RESERVES] and (tokens + block - 1) // block > spare:
            break
        needed = (before + wanted + block - 1) // block
        if needed > spare:
            break
        if slot < 0:
            if g[FREE_SLOTS] == 0:
                g[STATUS] = NO_SLOT
                break
            slot = _new_slot(g, w, sl, r, kv, tr, row)
            sl[slot, ARRIVAL] = -1 - where
            r[-1 - where, QUEUE] = -1 - row
        else:
            _leave_front(g, w, where)
        g[WAITING] -= 1
        if g[IS_CACHED]:
            _adopt(g, sl, kv, slot, hits)
        _grow(g, sl, r, kv, slot, needed)
        if g[IS_CACHED]:
            _cache_up_to(g, sl, kv, slot, before + wanted)
        _run(g, w, sl, slot)
        is_new = not sl[slot, RESUMED]
        _count_in(w, batch, not is_new and answered > 0 and wanted <= 1, before, wanted)
        if is_new:
            w[batch + B_CACHED] += before
        if before < tokens - 1:
            g[CARRIES] = 1
        sl[slot, COMPUTED] = before + wanted
        sl[slot, MISSED] = 0
        if not _prefilled(g, w, sl, slot):
            sl[slot, STATE] = PREFILLS
            g[PREFILLING] += 1
            g[LAST_PREFILL] = slot
        budget -= wanted
        any_admitted = True
    return any_admitted


@_inner
def _worst(g, w, sl, tr):
    """Return who is preempted first: the last, or with priorities who matters least."""
    if not g[PRIORITY]:
        return w[g[AT_RUN] + g[RUN_LENGTH] - 1]
    worst = -1
    for i in range(g[RUN_LENGTH]):
        slot = w[g[AT_RUN] + i]
        if slot >= 0 and (
            worst < 0
            or _is_before(
                tr.priorities,
                sl[worst, ROW],
                sl[worst, ARRIVAL],
                sl[slot, ROW],
                sl[slot, ARRIVAL],
            )
        ):
            worst = slot
    return worst


@_inner
def _schedule_running(g, x, w, sl, f, r, tr, kv, threshold, defers):
    """Schedule running requests one by one in their order; return what is left of the budget.

    Also returns how many were preempted for it. Who is preempted for its own sake ends the
    step, or where it YIELDS, leaves it to those behind, who may matter more. Where it OMITS,
    one is left out for each that is preempted of those already passed over.
    """
    _compact(g, w, sl)
    for i in range(g[RUN_LENGTH]):
        slot = w[g[AT_RUN] + i]
        sl[slot, TAKEN] = 0
        _held_blocks(g, sl, slot)
    budget, preempted, i, block = g[BUDGET], 0, 0, g[BLOCK]
    while i < g[RUN_LENGTH] and budget > 0:
        slot = w[g[AT_RUN] + i]
        i += 1
        if slot < 0:
            continue
        decodes = sl[slot, STATE] == DECODES
        if defers and not decodes:
            continue
        if decodes:
            if sl[slot, END] < g[STEP]:
                continue
            before, wanted = _computed_before(g, sl, slot), 1
            known = before + (1 if not g[AHEAD] or sl[slot, MISSED] else 0)
        else:
            before = sl[slot, COMPUTED]
            known = sl[slot, PROMPT] + sl[slot, ANSWERED]
            wanted = known - before
            if 0 < threshold < wanted:
                wanted = threshold
            wanted = min(wanted, budget)
        needed = (before + wanted + block - 1) // block
        fits, omitted = True, 0
        while needed - sl[slot, BLOCKS] > g[FREE]:
            worst = _worst(g, w, sl, tr)
            budget += sl[worst, TAKEN]
            if g[OMITS] and sl[worst, TAKEN] == 0 and sl[worst, PLACE] < sl[slot, PLACE]:
                omitted += 1
            _preempt(g, x, w, sl, f, kv, worst)
            preempted += 1
            if worst == slot:
                fits = False
                break
        if not fits:
            if g[YIELDS]:
                continue
            break
        if not decodes:
            g[CARRIES] = 1
        _grow(g, sl, r, kv, slot, needed)
        if g[IS_CACHED]:
            _cache_up_to(g, sl, kv, slot, min(before + wanted, known))
        sl[slot, TAKEN] = wanted
        budget -= wanted
        while omitted > 0 and i < g[RUN_LENGTH]:
            omitted -= w[g[AT_RUN] + i] >= 0
            i += 1
    return budget, preempted


@_inner
def _note_running(g, x, w, sl, f, kv):
    """Take note of what was scheduled of each running request, and of who was left out."""
    step = g[STEP]
    batch = _batch(g, step)
    for i in range(g[RUN_LENGTH]):
        slot = w[g[AT_RUN] + i]
        if slot < 0:
            continue
        taken = sl[slot, TAKEN]
        if sl[slot, STATE] == DECODES:
            if sl[slot, END] < step:
                continue
            if taken:
                _count_in(w, batch, DECODES, _computed_before(g, sl, slot), 1)
                if sl[slot, MISSED]:
                    sl[slot, MISSED] = 0
                    g[MISSING] -= 1
                    _add_single(g, w, sl, step, slot)
                else:
                    w[batch + B_EVEN] += 1
                continue
            _split_off(g, x, w, sl, f, slot)
            if g[AHEAD] and g[IS_CACHED] and not sl[slot, MISSED]:
                _cache_up_to(g, sl, kv, slot, _computed_before(g, sl, slot))
            _decodes_no_more(g, w, sl, slot)
            sl[slot, END] += 1
            sl[slot, MISSED] = 1
            g[MISSING] += 1
            _decodes_on(g, w, sl, slot)
        elif taken:
            before = sl[slot, COMPUTED]
            is_decode = sl[slot, ANSWERED] > 0 and taken <= 1
            _count_in(w, batch, is_decode, before, taken)
            sl[slot, COMPUTED] = before + taken
            if _prefilled(g, w, sl, slot):
                g[PREFILLING] -= 1
            else:
                g[LAST_PREFILL] = slot


@_inlined
def _calm_prefill(g, sl, threshold, defers):
    """Return how much the only prompt in pieces gets; -1 where their order matters."""
    if g[PREFILLING] == 0 or defers:
        return 0
    slot = g[LAST_PREFILL]
    if g[PREFILLING] > 1 or sl[slot, STATE] != PREFILLS or sl[slot, ORDER] != g[ORDERS] - 1:
        return -1
    wanted = sl[slot, PROMPT] + sl[slot, ANSWERED] - sl[slot, COMPUTED]
    if 0 < threshold < wanted:
        wanted = threshold
    return min(wanted, g[BUDGET] - g[DECODING])


@_inlined
def _let_decode(g, w, sl, r, kv):
    """Let everybody who decodes have the blocks and keys of this step."""
    step, block = g[STEP], g[BLOCK]
    if not g[IS_CACHED]:
        g[FREE] -= w[g[AT_PHASES] + step % block]
        return
    slot = w[g[AT_BUCKETS] + step % block]
    while slot >= 0:
        _grow(g, sl, r, kv, slot, sl[slot, BLOCKS] + 1)
        slot = sl[slot, BUCKET_NEXT]
    ahead = g[AHEAD]
    slot = w[g[AT_BUCKETS] + (step + (0 if ahead else 1)) % block]
    while slot >= 0:
        full = _computed_before(g, sl, slot) + (0 if ahead else 1)
        _cache_up_to(g, sl, kv, slot, full)
        slot = sl[slot, BUCKET_NEXT]


@_inlined
def _schedule_calmly(g, w, sl, r, kv, threshold, defers):
    """Schedule running requests where their order does not matter; False where it does."""
    block = g[BLOCK]
    needed = w[g[AT_PHASES] + g[STEP] % block]
    if g[DECODING] > g[BUDGET] or g[MISSING] > 0 or needed > g[FREE]:
        return False
    wanted = _calm_prefill(g, sl, threshold, defers)
    if wanted < 0:
        return False
    slot = g[LAST_PREFILL]
    blocks = 0
    if wanted > 0:
        blocks = (sl[slot, COMPUTED] + wanted + block - 1) // block
        if needed + blocks - sl[slot, BLOCKS] > g[FREE]:
            return False
    batch = _batch(g, g[STEP])
    w[batch + B_DECODES] = w[batch + B_EVEN] = g[DECODING]
    w[batch + B_DECODE_CONTEXT] = g[CONTEXT] + g[DECODING] * g[STEP]
    w[batch + B_SQUARES] = _squares_at(g, g[STEP])
    if g[DECODING] > 0:
        _let_decode(g, w, sl, r, kv)
    if wanted > 0:
        g[CARRIES] = 1
        _grow(g, sl, r, kv, slot, blocks)
        before = sl[slot, COMPUTED]
        if g[IS_CACHED]:
            _cache_up_to(g, sl, kv, slot, before + wanted)
        _count_in(w, batch, sl[slot, ANSWERED] > 0 and wanted <= 1, before, wanted)
        sl[slot, COMPUTED] = before + wanted
        if _prefilled(g, w, sl, slot):
            g[PREFILLING] -= 1
    return True


@_inlined
def _note_decodes(g, w, step):
    """Note a batch of those who decode, and of nobody else."""
    batch = _batch(g, step)
    for field in range(BATCH_FIELDS):
        w[batch + field] = 0
    w[batch + B_DECODES] = w[batch + B_EVEN] = g[DECODING]
    w[batch + B_DECODE_CONTEXT] = g[CONTEXT] + g[DECODING] * step
    w[batch + B_SQUARES] = _squares_at(g, step)
    w[batch + B_RUNNING], w[batch + B_WAITING] = g[RUNNING], g[WAITING]
    w[batch + B_USED] = g[ALL_BLOCKS] - g[FREE]


@_inlined
def _schedule_decodes(g, w, sl, r, kv):
    """Send a batch on its way of those who decode, for whom there are blocks."""
    step = g[STEP]
    _let_decode(g, w, sl, r, kv)
    _note_decodes(g, w, step)
    g[TIDY] = 0
    g[STEP] += 1
    g[IN_PIPE] += 1


@_inlined
def _schedule(g, x, w, sl, f, r, q, tr, kv):
    """Put the next batch together and send it on its way; return whether it is empty."""
    batch = _batch(g, g[STEP])
    for field in range(BATCH_FIELDS):
        w[batch + field] = 0
    threshold, defers, preempted = _threshold(g), _defers(g), 0
    g[CARRIES] = 0
    if _schedule_calmly(g, w, sl, r, kv, threshold, defers):
        budget = g[BUDGET] - w[batch + B_DECODES] - w[batch + B_PREFILL]
    else:
        budget, preempted = _schedule_running(g, x, w, sl, f, r, tr, kv, threshold, defers)
        _note_running(g, x, w, sl, f, kv)
    came = False
    if preempted == 0 and budget > 0 and g[WAITING] > 0:
        came = _admit_waiting(g, w, sl, r, q, tr, kv, budget, threshold, defers)
    is_calm = preempted == 0 and w[batch + B_PREFILL] == 0 and g[PREFILLING] == 0
    g[HELD] = is_calm and not came and not defers
    if preempted == 0 and not defers:
        g[BACKED_UP] = g[WAITING] > 0
    _let_end(g, w, sl, g[STEP])
    is_empty = w[batch + B_DECODES] == 0 and w[batch + B_PREFILL] == 0
    # as engine.compat.core.BatchReader: a turn without a batch tells of nothing.
    w[batch + B_PREEMPTED] = 0 if is_empty else preempted
    w[batch + B_RUNNING], w[batch + B_WAITING] = g[RUNNING], g[WAITING]
    w[batch + B_USED] = g[ALL_BLOCKS] - g[FREE]
    g[TIDY] = 0
    g[STEP] += 1
    g[IN_PIPE] += 1
    g[EMPTY] += is_empty
    if g[CARRIES]:
        g[CARRIED] = g[STEP] - g[EMPTY]
    return is_empty


# time and what is noted of it


@_inner
def _spread(seqs, total, squares):
    """Return how far apart contexts are, as engine.protocol.spread_tokens has it."""
    if seqs == 0:
        return 0.0
    return math.sqrt((seqs * squares - total * total) / seqs)


@_inner
def _tokens_s(g, t, tokens):
    """Return the seconds of so many tokens that no graph serves, as StepModel's curve."""
    knots, n = g[AT_KNOTS], g[KNOTS]
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if t[knots + middle] <= tokens:
            low = middle + 1
        else:
            high = middle
    i = low - 1
    return t[knots + n + i] + t[knots + 2 * n + i] * (tokens - t[knots + i])


@_inner
def _factor(g, t, decodes, prefill):
    """Return a batch's factor, as step_model.Factors.at has it: knots at 0, 1, 2, 4, 8 ..."""
    at, rows, columns = g[AT_FACTORS], g[FACTOR_ROWS], g[FACTOR_COLUMNS]
    i, low, high = 0, 0, 1
    while high <= decodes:
        i, low, high = i + 1, high, 2 * high
    j, left, right = 0, 0, 1
    while right <= prefill:
        j, left, right = j + 1, right, 2 * right
    down = (decodes - low) / (high - low)
    across = (prefill - left) / (right - left)
    here, below = at + min(i, rows - 1) * columns, at + min(i + 1, rows - 1) * columns
    j, k = min(j, columns - 1), min(j + 1, columns - 1)
    first = t[here + j] + (t[below + j] - t[here + j]) * down
    second = t[here + k] + (t[below + k] - t[here + k]) * down
    return first + (second - first) * across


@_inlined
def _step_s(g, x, t, decodes, prefill, decode_context, prefill_context, spread):
    """Return the seconds of a batch, as StepModel.step_s does."""
    if decodes == 0 and prefill == 0:
        return x[TIDY_S]
    decode_s, apart_s, prefill_s = x[DECODE_CONTEXT_S], x[SPREAD_S], 0.0
    if prefill:
        tokens = decodes + prefill
        if g[AT_MIXED] + tokens < g[AT_KNOTS]:
            work_s = t[g[AT_MIXED] + tokens] + x[SEQ_S] * decodes
        else:
            work_s = _tokens_s(g, t, tokens) + x[SEQ_S] * decodes + x[EAGER_S]
        factor = _factor(g, t, decodes, prefill)
        decode_s += x[MIXED_CONTEXT_S]
        apart_s += x[MIXED_SPREAD_S]
        prefill_s = x[PREFILL_BASE_S] + x[PREFILL_CONTEXT_S] * prefill_context
    else:
        work_s, factor = t[decodes], t[g[CAP] + 1 + decodes]
    context_s = decode_s * decode_context
    context_s += apart_s * spread + prefill_s
    return (x[BASE_S] + work_s + context_s) * factor


@_inlined
def _launch_s(g, x, t, decodes, prefill):
    """Return the seconds that launching a batch takes the host, as Host.launch_s does."""
    if prefill == 0:
        return t[g[AT_LAUNCHES] + decodes]
    is_in_graph = g[AT_MIXED] + decodes + prefill < g[AT_KNOTS]
    kind_s = x[HOST_MIXED_S] if is_in_graph else x[HOST_EAGER_S]
    return kind_s + x[HOST_SEQ_S] * decodes + x[HOST_TOKEN_S] * prefill


@_inlined
def _launch(g, x, w, t):
    """Launch the newest batch: the device begins once it is free, and ends no sooner."""
    step = g[STEP] - 1
    batch = _batch(g, step)
    decodes, prefill = w[batch + B_DECODES], w[batch + B_PREFILL]
    context, pairs = w[batch + B_DECODE_CONTEXT], w[batch + B_PREFILL_CONTEXT]
    spread = _spread(decodes, context, w[batch + B_SQUARES])
    took_s = _step_s(g, x, t, decodes, prefill, context, pairs, spread)
    x[LAUNCHED] = x[NOW] + _launch_s(g, x, t, decodes, prefill)
    x[DEVICE] = max(max(x[DEVICE], x[NOW]) + took_s, x[LAUNCHED])
    x[ENDS_0 + (step & (PIPE - 1))] = x[DEVICE]


@_inlined
def _notice(x, step):
    """Wait for a batch that the device computes; the next one is launched before."""
    ends_s = x[ENDS_0 + (step & (PIPE - 1))]
    is_late = x[LAUNCHED] > ends_s
    now_s = x[LAUNCHED] if is_late else ends_s
    if is_late and x[WAS_LATE]:
        x[HOST_BOUND_S] += now_s - x[NOW]
    x[WAS_LATE] = is_late
    x[NOW] = now_s


@_inlined
def _note_steps(
    g,
    x,
    h,
    log,
    took_s,
    repeats,
    decodes,
    prefill,
    decode_context,
    prefill_context,
    spread,
    running,
    waiting,
    used,
    most_used,
    preempted,
    cached,
):
    """Count like steps that took so long together, and keep them where they are asked for."""
    x[STEPS_N] += repeats
    x[STEPS_S] += took_s
    x[CACHED_N] += cached
    x[PREEMPTED_N] += preempted
    x[FULLEST] = max(x[FULLEST], decodes + prefill)
    x[PEAK_RUNNING] = max(x[PEAK_RUNNING], running)
    x[PEAK_WAITING] = max(x[PEAK_WAITING], waiting)
    x[PEAK_USED] = max(x[PEAK_USED], most_used)
    if prefill == 0 and decodes > 0:
        x[ALONE_N] += repeats
        x[ALONE_SEQS] += repeats * decodes
        x[ALONE_SQUARES] += repeats * decodes * decodes
        x[ALONE_S] += took_s
        x[ALONE_PRODUCT] += took_s * decodes
    else:
        x[MIXED_N] += repeats * (prefill > 0)
        x[MIXED_SEQS] += repeats * decodes
        x[MIXED_TOKENS] += prefill
        x[MIXED_S] += took_s
    if took_s > 0.0:
        _count(h, H_RUNNING, running, took_s, running * took_s)
        _count(h, H_WAITING, waiting, took_s, waiting * took_s)
        _count(h, H_USED, used, took_s, used * took_s)
    if g[KEEPS_LOG]:
        at = g[LOGGED]
        log[at, 0], log[at, 1], log[at, 2] = x[NOW], took_s, repeats
        log[at, 3], log[at, 4] = decodes, prefill
        log[at, 5], log[at, 6], log[at, 7] = decode_context, prefill_context, spread
        log[at, 8], log[at, 9], log[at, 10], log[at, 11] = running, waiting, used, most_used
        log[at, 12], log[at, 13] = preempted, cached
        log[at, 14] = log[at, 15] = 0.0
        g[LOGGED] = at + 1


# arrivals


@_inlined
def wait_for(g, ready, due_s, row):
    """Let a request of a session be due at an instant: a heap by instant, then by row."""
    at = g[READY]
    g[READY] += 1
    while at > 0:
        above = (at - 1) >> 1
        if ready[above, 0] < due_s or (ready[above, 0] == due_s and ready[above, 1] <= row):
            break
        ready[at, 0], ready[at, 1] = ready[above, 0], ready[above, 1]
        at = above
    ready[at, 0], ready[at, 1] = due_s, row


@_inlined
def _take_ready(g, ready):
    """Take out the request of a session that is due next."""
    row = int(ready[0, 1])
    g[READY] -= 1
    n = g[READY]
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


@_inner
def _closed_rise(x, targets, n, in_flight):
    """Return when a closed loop's next request goes: now if fewer are in flight than wanted."""
    now = x[NOW]
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
    return x[END_S] if in_flight == 0 else math.inf


@_inlined
def next_due(g, x, f, tr):
    """Return when the next request is due that is known of, inf without one."""
    kind = g[ARRIVALS]
    if kind == OPEN:
        return f[g[NEXT], DUE] if g[NEXT] < g[REQUESTS] else math.inf
    if kind == CAUSAL:
        return tr.ready[0, 0] if g[READY] > 0 else math.inf
    if kind == CLOSED:
        if g[NEXT] >= g[REQUESTS] or x[NOW] >= x[END_S]:
            return math.inf
        return _closed_rise(x, tr.targets, g[TARGETS], g[IN_FLIGHT])
    left = g[REQUESTS] - g[NEXT]
    if left == 0:
        return math.inf
    if g[GOING] > 0:
        return x[NOW]
    if g[IN_FLIGHT] > 0:
        return math.inf
    full_s = math.inf
    if left >= g[BATCH_SIZE]:
        full_s = f[g[NEXT] + g[BATCH_SIZE] - 1, DUE]
    return min(full_s, f[g[NEXT], DUE] + x[BATCH_WAIT_S])


@_inlined
def _take_next(g, x, f, tr):
    """Take the next request out of those to come; return its row."""
    kind = g[ARRIVALS]
    if kind == CAUSAL:
        due_s = tr.ready[0, 0]
        row = _take_ready(g, tr.ready)
        f[row, DUE] = due_s
        return row
    row = g[NEXT]
    if kind == BATCHES:
        if g[GOING] == 0:
            arrived = 0
            while (
                row + arrived < g[REQUESTS]
                and arrived < g[BATCH_SIZE]
                and f[row + arrived, DUE] <= x[NOW]
            ):
                arrived += 1
            g[GOING] = max(1, arrived)
        g[GOING] -= 1
    elif kind == CLOSED:
        f[row, DUE] = x[NOW]
    g[NEXT] += 1
    return row


@_inlined
def _end(g, x, q, tr, row, outcome):
    """Close a request's book, and let those follow that waited for its answer."""
    q[row, OUTCOME] = outcome
    g[ENDED] += 1
    if g[ARRIVALS] == CAUSAL:
        for i in range(tr.follows[row], tr.follows[row + 1]):
            wait_for(g, tr.ready, x[NOW] + tr.pauses_s[tr.followers[i]], tr.followers[i])


@_inner
def _hand_over(g, r, row):
    """Put a request into the engine's queue."""
    g[IN_FLIGHT] += 1
    if g[WAITING] == 0 or g[PRIORITY] or g[THRESHOLD] > 0:
        g[HELD] = 0
    r[g[QUEUE_TAIL], QUEUE] = row
    g[QUEUE_TAIL] += 1
    g[WAITING] += 1


@_inner
def _let_in(g, x, f, r, q, tr):
    """Drop who has waited at the gate for too long, and let in whom there is room for."""
    while g[GATE_HEAD] < g[GATE_TAIL]:
        row = r[g[GATE_HEAD], AT_GATE]
        waited_s = x[NOW] - f[row, DUE]
        if waited_s > x[GATE_WAIT_S]:
            _end(g, x, q, tr, row, TIMED_OUT if waited_s > x[PATIENCE] else TURNED_AWAY)
        elif g[IN_FLIGHT] < g[GATE_CAP]:
            _hand_over(g, r, row)
        else:
            return
        g[GATE_HEAD] += 1


@_inlined
def admit(g, x, f, r, q, tr):
    """Hand over every request that is due by now, or leave it to the gate."""
    _let_in(g, x, f, r, q, tr)
    while True:
        due_s = next_due(g, x, f, tr)
        if due_s > x[NOW] or due_s == math.inf:
            return
        row = _take_next(g, x, f, tr)
        g[SENT] += 1
        if math.isnan(x[FIRST_DUE]) and row >= g[LED_IN]:
            x[FIRST_DUE] = f[row, DUE]
        if tr.prompts[row] + tr.outputs[row] > g[MAX_LENGTH]:
            _end(g, x, q, tr, row, REFUSED)
            continue
        f[row, SENT_AT] = x[NOW]
        q[row, OUTCOME] = GOES_ON
        if g[IN_FLIGHT] < g[GATE_CAP]:
            _hand_over(g, r, row)
        elif g[GATE_TAIL] - g[GATE_HEAD] < g[GATE_ROOM]:
            r[g[GATE_TAIL], AT_GATE] = row
            g[GATE_TAIL] += 1
        else:
            _end(g, x, q, tr, row, TURNED_AWAY)


@_inner
def _queued(r, at):
    """Return the row at a place of the queue, also of one that has left it."""
    row = r[at, QUEUE]
    return row if row >= 0 else -1 - row


# the ends of requests


@_inlined
def _answered(g, x, f, q, r, tr, row):
    """Close the book of a request that was answered in full."""
    g[IN_FLIGHT] -= 1
    took_s = x[NOW] - f[row, DUE]
    if took_s > x[PATIENCE]:
        _end(g, x, q, tr, row, TIMED_OUT)
        return
    if took_s > x[LATE_S] and not r[row, IS_LATE] and row >= g[LED_IN]:
        r[row, IS_LATE] = 1
        g[LATE] += 1
    _end(g, x, q, tr, row, COMPLETED)


@_inlined
def _finish(g, x, w, sl, f, r, q, kv, tr, slot):
    """End a request whose last token is there."""
    row = sl[slot, ROW]
    f[row, LAST] = x[NOW]
    q[row, TOKENS] = sl[slot, OUTPUT]
    if sl[slot, STATE] == PREEMPTED:
        _stop_waiting(g, w, slot)
    else:
        if g[AHEAD] and g[IS_CACHED]:
            _cache_up_to(g, sl, kv, slot, sl[slot, PROMPT] + sl[slot, OUTPUT] - 1)
        _held_blocks(g, sl, slot)
        _release(g, sl, kv, slot)
        _leave_run(g, w, sl, slot)
    _drop_slot(g, w, sl, r, slot)
    g[TIDY] = 1
    g[HELD] = 0
    _answered(g, x, f, q, r, tr, row)


@_inner
def _stop(g, x, w, sl, f, q, slot):
    """Note how far the answer of a request came that goes no further."""
    row = sl[slot, ROW]
    if sl[slot, STATE] != DECODES:
        q[row, TOKENS] = sl[slot, ANSWERED]
        return
    scheduled = sl[slot, OUTPUT] - (sl[slot, END] - (g[STEP] - 1))
    if sl[slot, MISSED]:
        q[row, TOKENS] = scheduled
        return
    if not g[AHEAD]:
        q[row, TOKENS] = scheduled
        f[row, LAST] = x[BEFORE]
        return
    q[row, TOKENS] = scheduled - 1
    step = g[STEP] - 1
    batch = _batch(g, step)
    if not _is_in_list(w, _singles(g, step), w[batch + B_SINGLES], slot, sl[slot, ORDER]):
        w[batch + B_EVEN] -= 1
        f[row, LAST] = x[BEFORE]


@_inner
def _abort(g, x, w, sl, f, r, q, kv, row):
    """Drop a request, whether queued or running."""
    slot = r[row, SLOT_OF]
    g[TIDY] = 1
    g[HELD] = 0
    g[IN_FLIGHT] -= 1
    if slot < 0:
        g[WAITING] -= 1
        return
    _stop(g, x, w, sl, f, q, slot)
    if sl[slot, STATE] == PREEMPTED:
        _stop_waiting(g, w, slot)
    else:
        _held_blocks(g, sl, slot)
        if sl[slot, STATE] == PREFILLS:
            g[PREFILLING] -= 1
        elif sl[slot, END] >= g[STEP]:
            _decodes_no_more(g, w, sl, slot)
        _release(g, sl, kv, slot)
        _leave_run(g, w, sl, slot)
    _drop_slot(g, w, sl, r, slot)


@_inlined
def _time_out(g, x, w, sl, f, r, q, kv, tr):
    """Drop requests whose client would have gone; the oldest are due first."""
    begin = g[OLDEST]
    while g[OLDEST] < g[QUEUE_TAIL]:
        row = _queued(r, g[OLDEST])
        if q[row, OUTCOME] == GOES_ON:
            if x[NOW] - f[row, DUE] <= x[PATIENCE]:
                break
            _abort(g, x, w, sl, f, r, q, kv, row)
        g[OLDEST] += 1
    for i in range(begin, g[OLDEST]):
        row = _queued(r, i)
        if q[row, OUTCOME] == GOES_ON:
            _end(g, x, q, tr, row, TIMED_OUT)


@_inner
def _note_overdue(g, x, f, r, q):
    """Count what is in flight for longer than a request may take."""
    while g[NEXT_LATE] < g[QUEUE_TAIL]:
        row = _queued(r, g[NEXT_LATE])
        if q[row, OUTCOME] == GOES_ON:
            if x[NOW] - f[row, DUE] <= x[LATE_S]:
                return
            if not r[row, IS_LATE] and row >= g[LED_IN]:
                r[row, IS_LATE] = 1
                g[LATE] += 1
        g[NEXT_LATE] += 1


@_inlined
def _is_cut(g, x, f, r, q):
    """Whether going on is pointless; the status says why."""
    # Nothing is longer than nan, as the first due time is before there is one.
    if x[NOW] - x[FIRST_DUE] > x[MAX_CLOCK]:
        g[STATUS] = CLOCK_CUT
        return True
    if x[LATE_S] < math.inf:
        if x[PATIENCE] == math.inf:
            _note_overdue(g, x, f, r, q)
        if g[LATE] > g[ALLOWED_LATE]:
            g[STATUS] = LATE_CUT
            return True
    return False


@_inlined
def _finish_batch(g, x, w, sl, f, r, q, kv, tr, step):
    """End those whose last token came with a batch."""
    at = _ends(g, step)
    for i in range(w[_batch(g, step) + B_ENDS]):
        slot = w[at + 2 * i]
        if sl[slot, ORDER] == w[at + 2 * i + 1] and sl[slot, STATE] != NOBODY:
            _finish(g, x, w, sl, f, r, q, kv, tr, slot)


@_inlined
def _complete(g, x, w, t, sl, f, h, log):
    """Complete the batch whose turn it is, but for those who end with it."""
    step = g[DONE] + 1
    batch = _batch(g, step)
    decodes, prefill = w[batch + B_DECODES], w[batch + B_PREFILL]
    context, pairs = w[batch + B_DECODE_CONTEXT], w[batch + B_PREFILL_CONTEXT]
    spread = _spread(decodes, context, w[batch + B_SQUARES])
    if g[AHEAD]:
        took_s = -x[NOW]
        _notice(x, step)
        took_s += x[NOW]
    else:
        took_s = _step_s(g, x, t, decodes, prefill, context, pairs, spread)
        x[NOW] += took_s
    g[DONE] = step
    g[IN_PIPE] -= 1
    used = w[batch + B_USED]
    _note_steps(
        g,
        x,
        h,
        log,
        took_s,
        1,
        decodes,
        prefill,
        context,
        pairs,
        spread,
        w[batch + B_RUNNING],
        w[batch + B_WAITING],
        used,
        used,
        w[batch + B_PREEMPTED],
        w[batch + B_CACHED],
    )
    if decodes > 0 and prefill == 0:
        _count(h, DECODE_STEPS, took_s, 1.0, took_s)
    even = w[batch + B_EVEN]
    if even > 0:
        gap_s = x[NOW] - x[BEFORE]
        _count(h, GAPS, gap_s, even, gap_s * even)
    at = _singles(g, step)
    for i in range(w[batch + B_SINGLES]):
        slot = w[at + 2 * i]
        if sl[slot, ORDER] != w[at + 2 * i + 1] or sl[slot, STATE] == NOBODY:
            continue
        row = sl[slot, ROW]
        if math.isnan(f[row, FIRST]):
            f[row, FIRST] = x[NOW]
        else:
            gap_s = x[NOW] - f[row, LAST]
            _count(h, GAPS, gap_s, 1.0, gap_s)
        f[row, LAST] = x[NOW]
    x[BEFORE] = x[NOW]
    if decodes == 0 and prefill == 0:
        g[STUCK] += 1
    else:
        g[STUCK] = 0


@_inlined
def _turn(g, x, w, t, sl, f, r, q, h, log, tr, kv):
    """Schedule a batch, and complete the one whose turn it is."""
    x[LAUNCHED] = x[NOW]
    if g[RUNNING] > 0 or g[WAITING] > 0 or g[TIDY]:
        is_empty = _schedule(g, x, w, sl, f, r, q, tr, kv)
        if g[STATUS] != GOES:
            return
        if g[AHEAD]:
            _launch(g, x, w, t)
        has_requests = g[RUNNING] > 0 or g[WAITING] > 0
        if g[AHEAD] and g[IN_PIPE] < 2 and (has_requests or not is_empty):
            took_s = x[LAUNCHED] - x[NOW]
            x[NOW], x[WAS_LATE] = x[LAUNCHED], 0.0
            _note_steps(g, x, h, log, took_s, 1, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0)
            g[STUCK] += 1
            return
    _complete(g, x, w, t, sl, f, h, log)
    _finish_batch(g, x, w, sl, f, r, q, kv, tr, g[DONE])


# steps that are alike, in one go


@_inlined
def _only_decode(g, w):
    """Whether the next step only decodes, and nobody who runs ends with the one on its way."""
    if (
        g[DECODING] == 0
        or g[DECODING] != g[RUNNING]
        or g[PREFILLING] > 0
        or g[MISSING] > 0
        or g[DECODING] > g[BUDGET]
        or (g[WAITING] > 0 and not g[HELD])
    ):
        return False
    return not g[AHEAD] or (g[IN_PIPE] == 1 and w[_batch(g, g[STEP] - 1) + B_ENDS] == 0)


@_inlined
def _quiet_until(g, x, f, r, q, due_s):
    """Return before when nothing but decoding happens; a little early does no harm."""
    until_s = min(due_s, x[END_S])
    if not g[MEASURES]:
        until_s = min(until_s, x[LEAD_S])
    if x[PATIENCE] < math.inf:
        while g[OLDEST] < g[QUEUE_TAIL]:
            row = _queued(r, g[OLDEST])
            if q[row, OUTCOME] == GOES_ON:
                until_s = min(until_s, f[row, DUE] + x[PATIENCE] * (1 - 1e-9))
                break
            g[OLDEST] += 1
    elif x[LATE_S] < math.inf:
        while g[NEXT_LATE] < g[QUEUE_TAIL]:
            row = _queued(r, g[NEXT_LATE])
            if q[row, OUTCOME] == GOES_ON and not r[row, IS_LATE]:
                until_s = min(until_s, f[row, DUE] + x[LATE_S] * (1 - 1e-9))
                break
            g[NEXT_LATE] += 1
    if g[GATE_HEAD] < g[GATE_TAIL] and x[GATE_WAIT_S] < math.inf:
        row = r[g[GATE_HEAD], AT_GATE]
        until_s = min(until_s, f[row, DUE] + x[GATE_WAIT_S] * (1 - 1e-9))
    if x[MAX_CLOCK] < math.inf and not math.isnan(x[FIRST_DUE]):
        until_s = min(until_s, x[FIRST_DUE] + x[MAX_CLOCK] * (1 - 1e-9))
    return until_s


@_inlined
def _leap(g, x, w, t, sl, f, r, q, h, log, kv, tr, due_s):
    """Take steps that only decode until something else happens; return how many.

    With a batch ahead the one on its way is completed first, whatever is in it, and the last
    one scheduled is left.
    """
    until_s = _quiet_until(g, x, f, r, q, due_s)
    ahead, began = g[AHEAD], g[STEP]
    if ahead:
        if w[g[AT_PHASES] + began % g[BLOCK]] > g[FREE]:
            return 0
        _schedule_decodes(g, w, sl, r, kv)
        _launch(g, x, w, t)
        _complete(g, x, w, t, sl, f, h, log)
    if not ahead or (x[NOW] < until_s and w[_day(g, began)] < 0):
        _decode_on(g, x, w, t, sl, r, h, log, kv, until_s)
    if g[STEP] == began:
        return 0
    if g[WAITING] == 0:
        g[BACKED_UP] = 0
    last = g[STEP] - 1
    if w[_day(g, last)] >= 0:
        if not ahead:
            w[_batch(g, last) + B_ENDS] = 0
        _let_end(g, w, sl, last)
        if not ahead:
            _finish_batch(g, x, w, sl, f, r, q, kv, tr, last)
    return g[STEP] - began


@_inlined
def _decode_on(g, x, w, t, sl, r, h, log, kv, until_s):
    """Take steps of those who decode until one of them ends, or an instant has come."""
    ahead, n, began, step = g[AHEAD], g[DECODING], g[STEP], g[STEP]
    phase, block, phases, calendar = step % g[BLOCK], g[BLOCK], g[AT_PHASES], g[AT_CALENDAR]
    free, blocks = g[FREE], g[ALL_BLOCKS]
    used = last_used = float(blocks - free)
    attended = g[CONTEXT] + n * (step - ahead)
    context = first_context = float(attended)
    spread = _spread(n, attended, _squares_at(g, step - ahead))
    now, slope_s, alone_s = x[NOW], x[DECODE_CONTEXT_S], x[BASE_S] + t[n]
    apart_s, factor = x[SPREAD_S] * spread + 0.0, t[g[CAP] + 1 + n]
    launch_s, device, is_late = t[g[AT_LAUNCHES] + n], x[DEVICE], x[WAS_LATE] > 0
    first_s, took_s, used_sum, launched, was_late = 0.0, 0.0, 0.0, 0.0, False
    while w[phases + phase] <= free:
        if ahead:
            launched = now + launch_s
            was_late, is_late = is_late, launched > device
            # Like ones are noticed alike; the first that is not goes by itself.
            if is_late != was_late and step > began:
                is_late = was_late
                break
        last_used = used
        if g[IS_CACHED]:
            g[STEP] = step
            _let_decode(g, w, sl, r, kv)
            free = g[FREE]
        else:
            free -= w[phases + phase]
        used = float(blocks - free)
        if not ahead:
            last_used = used
        if ahead:
            # The batch that is launched attends to a token of each more than the one noticed.
            computes_s = (alone_s + (slope_s * (context + n) + apart_s)) * factor
            ends, before = device, now
            device = max(max(device, now) + computes_s, launched)
            now = launched if is_late else ends
            took_s = now - before
            if is_late and was_late:
                x[HOST_BOUND_S] += took_s
            if step == began:
                first_s = took_s
        else:
            # As StepModel.step_s adds them, so that both come to the same instants.
            took_s = (alone_s + (slope_s * context + apart_s)) * factor
            now += took_s
        used_sum += last_used * took_s
        context += n
        phase = phase + 1 if phase + 1 < block else 0
        step += 1
        if now >= until_s or w[calendar + ((step - 1) & g[LAST_DAY])] >= 0:
            break
        if ahead and is_late != was_late:
            break
    steps = step - began
    if steps == 0:
        return
    if not ahead:
        first_s = (alone_s + (slope_s * first_context + apart_s)) * factor
    g[STEP], g[FREE] = step, free
    g[DONE] += steps
    g[STUCK] = g[TIDY] = 0
    took_all_s = now - x[NOW]
    x[NOW] = x[BEFORE] = now
    _note_steps(
        g,
        x,
        h,
        log,
        took_all_s,
        steps,
        n,
        0,
        first_context,
        0,
        spread,
        g[RUNNING],
        g[WAITING],
        used_sum / took_all_s if took_all_s > 0.0 else last_used,
        last_used,
        0,
        0,
    )
    _count_like(h, steps, n, first_s, took_s, took_all_s)
    if ahead:
        _note_decodes(g, w, step - 1)
        x[DEVICE] = x[ENDS_0 + ((step - 1) & (PIPE - 1))] = device
        x[WAS_LATE] = is_late


@_inlined
def _count_like(h, steps, n, first_s, last_s, took_s):
    """Count steps of n decoding requests, and the gaps between their tokens, as long as they.

    Steps grow by the same from one to the next.
    """
    if last_s <= first_s * (1 + BIN_RATIO):
        _count(h, DECODE_STEPS, took_s / steps, steps, took_s)
        _count(h, GAPS, took_s / steps, n * steps, n * took_s)
        return
    growth_s = (last_s - first_s) / (steps - 1)
    for i in range(steps):
        each_s = first_s + growth_s * i
        _count(h, DECODE_STEPS, each_s, 1.0, each_s)
        _count(h, GAPS, each_s, n, n * each_s)


@_inner
def _begin_to_measure(g, x, h):
    """Forget what was counted while the engine warmed up."""
    g[MEASURES], g[LOGGED] = 1, 0
    for field in range(STEPS_N, FLOATS):
        x[field] = 0.0
    for at in range(h.size):
        h[at] = 0.0


@_inner
def _leave_unfinished(g, x, f, q):
    """Close the books where the recording ends: of what is in flight, and of the rest."""
    for row in range(g[REQUESTS]):
        if q[row, OUTCOME] == GOES_ON:
            q[row, OUTCOME] = UNFINISHED
            g[ENDED] += 1
    for row in range(g[NEXT], g[REQUESTS]):
        f[row, DUE] = x[NOW]
        q[row, OUTCOME] = UNFINISHED
        g[ENDED] += 1


@_inlined
def has_work(g):
    """Whether the engine takes a step before anything arrives."""
    return g[RUNNING] > 0 or g[WAITING] > 0 or g[TIDY] or g[IN_PIPE] > 0


@_inlined
def work_on(g, x, w, t, sl, f, r, q, h, log, tr, kv, due_s):
    """Take a step, or as many as are alike before an instant."""
    steps = 0
    if _only_decode(g, w):
        steps = _leap(g, x, w, t, sl, f, r, q, h, log, kv, tr, due_s)
    if steps == 0:
        _turn(g, x, w, t, sl, f, r, q, h, log, tr, kv)
    if x[PATIENCE] < math.inf:
        _time_out(g, x, w, sl, f, r, q, kv, tr)
    if g[STUCK] > STUCK_TURNS:
        g[STATUS] = IS_STUCK


@compiled
def stop_all(g, x, w, sl, f, q):
    """Note how far every answer in flight came."""
    for slot in range(g[SLOTS]):
        if sl[slot, STATE] != NOBODY:
            _stop(g, x, w, sl, f, q, slot)


@compiled
def advance(g, x, w, t, sl, f, r, q, h, log, tr, kv, turns):
    """Go on with a replay for so many turns, or until it has ended; True while there is more.

    The status says how it ended. Everything is in the arrays, which `simulated` lays out.
    """
    for _ in range(turns):
        if g[KEEPS_LOG] and g[LOGGED] >= log.shape[0] - 2:
            return True
        if not g[MEASURES] and x[NOW] >= x[LEAD_S]:
            _begin_to_measure(g, x, h)
        if x[NOW] >= x[END_S]:
            stop_all(g, x, w, sl, f, q)
            _leave_unfinished(g, x, f, q)
            g[STATUS] = ENDED_WELL
            return False
        admit(g, x, f, r, q, tr)
        due_s = next_due(g, x, f, tr)
        if has_work(g):
            work_on(g, x, w, t, sl, f, r, q, h, log, tr, kv, due_s)
        elif due_s == math.inf:
            g[STATUS] = LOST_WORK if g[IN_FLIGHT] > 0 else ENDED_WELL
        else:
            x[NOW] = max(x[NOW], due_s)
        if g[STATUS] != GOES or _is_cut(g, x, f, r, q):
            stop_all(g, x, w, sl, f, q)
            return False
    return True
