"""Requests that only decode: by the step of their last token, and by when they want a block."""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.blocks import behind_window
from tuner.shadow.schedule.layout import inlined, inner

# the calendar: decoding requests by the step of their last token, round a circle of steps


@inner
def day_of(g, step):
    """Return where the first of those stands whose last token a step schedules."""
    return g[s.AT_CALENDAR] + (step & g[s.LAST_DAY])


@inlined
def _enter(g, w, sl, slot):
    """Enter a request into the calendar."""
    day = day_of(g, sl[slot, s.END])
    first = w[day]
    sl[slot, s.END_NEXT], sl[slot, s.END_BEFORE] = first, -1
    if first >= 0:
        sl[first, s.END_BEFORE] = slot
    w[day] = slot


@inlined
def _strike(g, w, sl, slot):
    """Take a request out of the calendar."""
    before, after = sl[slot, s.END_BEFORE], sl[slot, s.END_NEXT]
    if before >= 0:
        sl[before, s.END_NEXT] = after
    else:
        w[day_of(g, sl[slot, s.END])] = after
    if after >= 0:
        sl[after, s.END_BEFORE] = before


# decoding requests, by the phase in which they want a block


@inner
def _phase(sl, slot):
    """Return the step in which a request decodes its first token, if it ever did."""
    return sl[slot, s.END] + 2 - sl[slot, s.PROMPT] - sl[slot, s.OUTPUT]


@inlined
def _want_blocks(g, w, phase, sign):
    """Count the blocks that a decoding request wants by step modulo ROUND, or no more."""
    if g[s.ALIGNED] == 1:
        w[g[s.AT_WANTED] + phase % g[s.ROUND]] += sign * g[s.GROUPS]
        return
    for back in range(2):
        groups = g[s.WINDOWED] if back else g[s.GROUPS] - g[s.WINDOWED]
        span = g[s.BACK_SPAN] if back else g[s.FULL_SPAN]
        for at in range(0, g[s.ALIGNED], span):
            w[g[s.AT_WANTED] + (phase + at * g[s.BLOCK]) % g[s.ROUND]] += sign * groups


@inner
def wanted_blocks(g, w, step):
    """Return how many blocks all who decode want in a step."""
    return w[g[s.AT_WANTED] + step % g[s.ROUND]]


@inlined
def _join_bucket(g, w, sl, slot):
    phase = _phase(sl, slot)
    _want_blocks(g, w, phase, 1)
    phase %= g[s.BLOCK]
    if g[s.IS_CACHED]:
        first = w[g[s.AT_BUCKETS] + phase]
        sl[slot, s.BUCKET_NEXT], sl[slot, s.BUCKET_BEFORE] = first, -1
        if first >= 0:
            sl[first, s.BUCKET_BEFORE] = slot
        w[g[s.AT_BUCKETS] + phase] = slot


@inlined
def _leave_bucket(g, w, sl, slot):
    phase = _phase(sl, slot)
    _want_blocks(g, w, phase, -1)
    phase %= g[s.BLOCK]
    if g[s.IS_CACHED]:
        before, after = sl[slot, s.BUCKET_BEFORE], sl[slot, s.BUCKET_NEXT]
        if before >= 0:
            sl[before, s.BUCKET_NEXT] = after
        else:
            w[g[s.AT_BUCKETS] + phase] = after
        if after >= 0:
            sl[after, s.BUCKET_BEFORE] = before


# what those give back whose window moves on, one block each at every block of tokens


@inner
def settled_before(g, sl, slot):
    """Return how many tokens of a request are computed that no batch on its way may read.

    Where nothing SETTLES a batch on its way does not count as one that reads.
    """
    if sl[slot, s.STATE] != s.DECODES:
        sent = sl[slot, s.COMPUTED]
    else:
        sent = computed_before(g, sl, slot)
    if not g[s.SETTLES]:
        return sent
    if sl[slot, s.LATEST] == g[s.STEP] - 1:
        return sent - sl[slot, s.PART]
    return sent - (sl[slot, s.STATE] == s.DECODES and not sl[slot, s.MISSED])


@inner
def _block_behind(g):
    """Return how many tokens a block holds that lies behind a window."""
    return g[s.BLOCK] * g[s.BACK_SPAN]


@inner
def steady_from(g):
    """Return from when on who begins to decode in this step gives back one block at a time.

    At first what lies behind its window depends on how much of its prompt came last.
    """
    return g[s.STEP] + 2 + g[s.SETTLES]


@inlined
def _begin_to_overtake(g, w, sl, slot):
    """Note from when on a request that decodes gives back blocks, beside whom it does so."""
    sl[slot, s.STEADY] = steady_from(g)
    g[s.ALL_STEADY] = max(g[s.ALL_STEADY], sl[slot, s.STEADY])
    # Who is left out of one step after the other begins anew in each.
    if sl[slot, s.LISTED] != sl[slot, s.ORDER] + 1:
        at = g[s.AT_UNSTEADY] + 2 * g[s.UNSTEADY]
        w[at], w[at + 1] = slot, sl[slot, s.ORDER]
        g[s.UNSTEADY] += 1
        sl[slot, s.LISTED] = sl[slot, s.ORDER] + 1
    if g[s.IS_CACHED]:
        return
    # Of a step less this so much lies behind the window.
    less = sl[slot, s.END] + 1 - sl[slot, s.PROMPT] - sl[slot, s.OUTPUT]
    less += g[s.SETTLES] + g[s.WINDOW]
    block = _block_behind(g)
    behind = max(sl[slot, s.STEADY] - less, block)
    whole = (behind + block - 1) // block * block
    sl[slot, s.OVERTAKES] = whole + less
    if whole + less <= sl[slot, s.END]:
        w[g[s.AT_OVERTAKES] + ((whole + less) & g[s.LAST_DAY])] += 1


@inner
def is_unsteady(g, w, sl, at):
    """Whether an entry is of a request that this step decodes, and that is not yet steady."""
    slot = w[at]
    return (
        sl[slot, s.ORDER] == w[at + 1]
        and sl[slot, s.STATE] == s.DECODES
        and sl[slot, s.END] >= g[s.STEP]
        and sl[slot, s.STEADY] > g[s.STEP]
    )


@inner
def forget_steady(g, w, sl):
    """Let go of the entries of those that have become steady, or are gone."""
    begin, kept = g[s.AT_UNSTEADY], 0
    for i in range(g[s.UNSTEADY]):
        at = begin + 2 * i
        if is_unsteady(g, w, sl, at):
            w[begin + 2 * kept], w[begin + 2 * kept + 1] = w[at], w[at + 1]
            kept += 1
        elif sl[w[at], s.LISTED] == w[at + 1] + 1:
            sl[w[at], s.LISTED] = 0
    g[s.UNSTEADY] = kept


@inlined
def _overtake_no_more(g, w, sl, slot):
    """Leave a request out of those that give back blocks steadily."""
    step = sl[slot, s.OVERTAKES]
    if g[s.IS_CACHED] or step > sl[slot, s.END]:
        return
    if step <= g[s.OVERTAKEN]:
        w[g[s.AT_LONG] + step % _block_behind(g)] -= 1
    else:
        w[g[s.AT_OVERTAKES] + (step & g[s.LAST_DAY])] -= 1


@inner
def overtake(g, w, step):
    """Return how many blocks all who decode steadily give back in a step, if only counted."""
    at = g[s.AT_OVERTAKES] + (step & g[s.LAST_DAY])
    phase = g[s.AT_LONG] + step % _block_behind(g)
    w[phase] += w[at]
    w[at] = 0
    g[s.OVERTAKEN] = step
    return g[s.WINDOWED] * w[phase]


@inner
def _attended(sl, slot):
    """Return what a decoding request attends to, less the number of the step."""
    return sl[slot, s.PROMPT] + sl[slot, s.OUTPUT] - 1 - sl[slot, s.END]


@inner
def squares_at(g, step):
    """Return the sum of squares of what decoding requests attend to in a step."""
    later = step - g[s.ORIGIN]
    return g[s.SQUARES] + later * (2 * g[s.CONTEXT] + g[s.DECODING] * (2 * g[s.ORIGIN] + later))


@inlined
def decodes_on(g, w, sl, slot):
    """Count a request among those that decode, from the next step on."""
    # Squares of sums of steps would grow beyond an integer.
    g[s.SQUARES], g[s.ORIGIN] = squares_at(g, g[s.STEP]), g[s.STEP]
    g[s.DECODING] += 1
    g[s.CONTEXT] += _attended(sl, slot)
    g[s.SQUARES] += (_attended(sl, slot) + g[s.ORIGIN]) ** 2
    _join_bucket(g, w, sl, slot)
    _enter(g, w, sl, slot)
    if g[s.WINDOWED]:
        _begin_to_overtake(g, w, sl, slot)


@inlined
def decodes_no_more(g, w, sl, slot):
    """Leave a request out of those that decode."""
    g[s.DECODING] -= 1
    g[s.CONTEXT] -= _attended(sl, slot)
    g[s.SQUARES] -= (_attended(sl, slot) + g[s.ORIGIN]) ** 2
    _leave_bucket(g, w, sl, slot)
    _strike(g, w, sl, slot)
    if g[s.WINDOWED]:
        _overtake_no_more(g, w, sl, slot)
    if sl[slot, s.MISSED]:
        g[s.MISSING] -= 1
        sl[slot, s.MISSED] = 0


@inner
def computed_before(g, sl, slot):
    """Return how many tokens of a decoding request are computed before the current step."""
    return sl[slot, s.PROMPT] + sl[slot, s.OUTPUT] - 2 - (sl[slot, s.END] - g[s.STEP])


@inlined
def held_blocks(g, sl, slot):
    """Bring the blocks of a request up to date where they are only counted."""
    if sl[slot, s.STATE] == s.DECODES and not g[s.IS_CACHED]:
        computed = computed_before(g, sl, slot)
        if sl[slot, s.END] < g[s.STEP]:
            computed = sl[slot, s.PROMPT] + sl[slot, s.OUTPUT] - 1
        sl[slot, s.BLOCKS] = (computed + g[s.BLOCK] - 1) // g[s.BLOCK]
        last = min(g[s.STEP] - 1, sl[slot, s.END])
        if g[s.WINDOWED] and last >= sl[slot, s.STEADY]:
            sl[slot, s.SKIPPED] = behind_window(g, computed - 1 - g[s.SETTLES])
