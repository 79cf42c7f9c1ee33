"""What a step computes: who runs on, who is admitted, and who has to give way.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py, async_scheduler.py.
"""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.batches import (
    add_end,
    add_single,
    batch_at,
    let_end,
    preempt,
    split_off,
)
from tuner.shadow.schedule.blocks import (
    behind_window,
    blocks_of_window,
    cache_up_to,
    find_block,
    grow,
    key_anew,
    key_at,
    slide,
    taken_by,
    unlink,
)
from tuner.shadow.schedule.decoding import (
    computed_before,
    decodes_no_more,
    decodes_on,
    forget_steady,
    held_blocks,
    is_unsteady,
    overtake,
    settled_before,
    squares_at,
    steady_from,
)
from tuner.shadow.schedule.drafts import drafts_of_step, padding, to_verify, verify
from tuner.shadow.schedule.layout import inlined, inner
from tuner.shadow.schedule.states import (
    end_of_prompt,
    part_of_prompt,
    states_left,
    states_of_part,
    up_to_a_state,
    waits_for_a_state,
)
from tuner.shadow.schedule.waiting import (
    compact,
    head_of_queue,
    is_before,
    leave_front,
    new_slot,
    start_running,
)


@inlined
def _threshold(g):
    """Return how much of a long prompt a step computes while others want to run; 0: all."""
    eligible = g[s.RUNNING] + g[s.WAITING]
    if g[s.THRESHOLD] <= 0 or eligible <= g[s.LONE]:
        return 0
    if g[s.ADAPTIVE]:
        return max(g[s.THRESHOLD], g[s.INPUT_BUDGET] // eligible)
    return g[s.THRESHOLD]


@inner
def _defers(g):
    """Whether this step leaves prompts out, so that those who decode have it to themselves."""
    executed = g[s.STEP] - g[s.EMPTY]
    return (
        g[s.INTERVAL] > 1
        and not g[s.BACKED_UP]
        and executed + 1 - g[s.CARRIED] < g[s.INTERVAL]
        and g[s.RUNNING] > g[s.PREFILLING]
    )


@inlined
def _count_in(w, batch, is_decode, before, tokens):
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
def _prefilled(g, w, sl, slot):
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
def _in_window(g, kv, row, slot, hits):
    """Return how many of the first blocks serve groups that look back a window.

    Only those before the end of a hit are read: the last stretch that is as long as a window,
    or where there is none, what the prompt begins with.
    """
    wanted, together = blocks_of_window(g), 0
    for at in range(hits - 1, -1, -1):
        together = together + 1 if _is_cached(g, kv, row, slot, at, s.LOOKS_BACK) else 0
        if together == wanted:
            return at + together
    return together


@inner
def _hits(g, kv, row, slot, tokens):
    """Return how many blocks of a request are cached, and how many of those nobody holds.

    The first are counted in blocks of tokens, the others in all groups. Last comes how many are
    cached but where layers look back, 0 if no more than in all.
    """
    hits, idle = (tokens - 1) // g[s.BLOCK], 0
    if g[s.WINDOWED] < g[s.GROUPS]:
        at = 0
        while at < hits and _is_cached(g, kv, row, slot, at, s.SEES_ALL):
            at += 1
        hits = at
    elsewhere = 0
    if g[s.WINDOWED]:
        most = hits
        hits = _in_window(g, kv, row, slot, hits)
        if hits < most and g[s.WINDOWED] < g[s.GROUPS]:
            elsewhere = most
    if g[s.DROPS_HIT] and hits > 0:
        hits -= 1
    for group in range(g[s.GROUPS]):
        skipped = behind_window(g, hits * g[s.BLOCK]) if kv.looks_back[group] else 0
        for at in range(skipped, hits):
            block = find_block(g, kv, slot, key_at(g, kv, row, at, group))
            idle += kv.pool[block, s.HOLDERS] == 0
    return hits, idle, elsewhere


@inner
def _adopt(g, sl, kv, slot, hits):
    """Let a request hold the cached blocks that it begins with."""
    row = sl[slot, s.ROW]
    skipped = behind_window(g, hits * g[s.BLOCK]) if g[s.WINDOWED] else 0
    for group in range(g[s.GROUPS]):
        first = group * g[s.ROOM_OF_GROUP]
        for at in range(skipped if kv.looks_back[group] else 0, hits):
            block = find_block(g, kv, slot, key_at(g, kv, row, at, group))
            if kv.pool[block, s.HOLDERS] == 0:
                unlink(kv.pool, block)
                g[s.FREE] -= 1
            kv.pool[block, s.HOLDERS] += 1
            kv.tables[0, slot, first + at] = block
    sl[slot, s.BLOCKS] = sl[slot, s.CACHED] = hits
    sl[slot, s.SKIPPED] = skipped


@inlined
def _reserved(g, tokens, hits, last):
    """Return how many blocks have to be free for a request to be computed to its end."""
    full = (tokens + g[s.BLOCK] - 1) // g[s.BLOCK]
    if g[s.STATES]:
        states = states_left(g, hits * g[s.BLOCK], tokens, last)
        return taken_by(g, full - hits, states)
    in_window = max(0, min(full, g[s.MOST_IN_WINDOW]) - hits)
    return (g[s.GROUPS] - g[s.WINDOWED]) * (full - hits) + g[s.WINDOWED] * in_window


@inlined
def _needed(g, tokens, ahead):
    """Return how many blocks so many tokens take of a group, with so many ahead of them."""
    last = min(tokens + ahead, g[s.MAX_LENGTH])
    return (last + g[s.BLOCK] - 1) // g[s.BLOCK]


@inlined
def _admit_waiting(g, w, sl, r, q, tr, kv, budget, threshold, defers):
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
        needed = _needed(g, before + wanted, g[s.LOOKAHEAD] * g[s.ADMITS_AHEAD])
        if taken_by(g, needed - hits, states) > spare:
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
        grow(g, sl, r, kv, slot, needed, states)
        if g[s.IS_CACHED]:
            keyed = min(before + wanted, tokens - g[s.HASHED_AHEAD])
            cache_up_to(g, sl, kv, slot, keyed, g[s.STEP])
        start_running(g, w, sl, slot)
        is_new = not sl[slot, s.RESUMED]
        is_decode = not is_new and answered > 0 and wanted <= 1 + padded
        _count_in(w, batch, is_decode, before, wanted)
        if is_new:
            w[batch + s.B_CACHED] += before
        if before < tokens - 1:
            g[s.CARRIES] = 1
        sl[slot, s.COMPUTED] = before + wanted
        sl[slot, s.LATEST], sl[slot, s.PART] = g[s.STEP], wanted
        drafts_of_step(g, sl, slot, -padded)
        sl[slot, s.MISSED] = 0
        if not _prefilled(g, w, sl, slot):
            sl[slot, s.STATE] = s.PREFILLS
            g[s.PREFILLING] += 1
            g[s.LAST_PREFILL] = slot
        budget -= wanted + beside
        any_admitted = True
    return any_admitted


@inner
def _worst(g, w, sl, tr):
    """Return who is preempted first: the last, or with priorities who matters least."""
    if not g[s.PRIORITY]:
        return w[g[s.AT_RUN] + g[s.RUN_LENGTH] - 1]
    worst = -1
    for i in range(g[s.RUN_LENGTH]):
        slot = w[g[s.AT_RUN] + i]
        if slot >= 0 and (
            worst < 0
            or is_before(
                tr.priorities,
                sl[worst, s.ROW],
                sl[worst, s.ARRIVAL],
                sl[slot, s.ROW],
                sl[slot, s.ARRIVAL],
            )
        ):
            worst = slot
    return worst


@inner
def _schedule_running(g, x, w, sl, f, r, tr, kv, threshold, defers):
    """Schedule running requests one by one in their order; return what is left of the budget.

    Also returns how many were preempted for it. Who is preempted for its own sake ends the
    step, or where it YIELDS, leaves it to those behind, who may matter more. Where it OMITS,
    one is left out for each that is preempted of those already passed over.
    """
    compact(g, w, sl)
    for i in range(g[s.RUN_LENGTH]):
        slot = w[g[s.AT_RUN] + i]
        sl[slot, s.TAKEN] = 0
        held_blocks(g, sl, slot)
    if g[s.WINDOWED] and not g[s.IS_CACHED]:
        overtake(g, w, g[s.STEP])  # each slides by itself
    budget, beside, preempted, i = g[s.BUDGET], g[s.BESIDE], 0, 0
    while i < g[s.RUN_LENGTH] and budget > beside:
        slot = w[g[s.AT_RUN] + i]
        i += 1
        if slot < 0:
            continue
        decodes = sl[slot, s.STATE] == s.DECODES
        prefills = sl[slot, s.STATE] == s.PREFILLS
        if defers and prefills:
            continue
        if decodes:
            if sl[slot, s.END] < g[s.STEP]:
                continue
            before, wanted = computed_before(g, sl, slot), 1
            known = before + (1 if not g[s.AHEAD] or sl[slot, s.MISSED] else 0)
        else:
            before = sl[slot, s.COMPUTED]
            known = sl[slot, s.PROMPT] + sl[slot, s.ANSWERED]
            wanted = known - before if prefills else to_verify(g, sl, slot)
            if wanted <= 0:
                continue
            if 0 < threshold < wanted:
                wanted = threshold
            wanted = min(wanted, budget - beside)
            if prefills and g[s.STATES]:
                wanted = part_of_prompt(g, sl, slot, wanted)
                if wanted == 0:
                    continue
        needed, states = _needed(g, before + wanted, g[s.LOOKAHEAD]), 1
        if prefills and g[s.TWO_EVERY]:
            states = states_of_part(g, sl, slot, before, before + wanted)
        fits, omitted = True, 0
        slide(g, sl, kv, slot, settled_before(g, sl, slot))
        while taken_by(g, needed - sl[slot, s.BLOCKS], states) > g[s.FREE]:
            worst = _worst(g, w, sl, tr)
            if sl[worst, s.TAKEN] > 0:
                budget += sl[worst, s.TAKEN] + beside
            if (
                g[s.OMITS]
                and sl[worst, s.TAKEN] == 0
                and sl[worst, s.PLACE] < sl[slot, s.PLACE]
            ):
                omitted += 1
            preempt(g, x, w, sl, f, kv, worst)
            preempted += 1
            if worst == slot:
                fits = False
                break
        if not fits:
            if g[s.YIELDS]:
                continue
            break
        if prefills:
            g[s.CARRIES] = 1
        grow(g, sl, r, kv, slot, needed, states)
        if g[s.IS_CACHED]:
            keyed = min(before + wanted, known - g[s.HASHED_AHEAD])
            cache_up_to(g, sl, kv, slot, keyed, g[s.STEP])
        sl[slot, s.TAKEN] = wanted
        budget -= wanted + beside
        while omitted > 0 and i < g[s.RUN_LENGTH]:
            omitted -= w[g[s.AT_RUN] + i] >= 0
            i += 1
    return budget, preempted


@inlined
def _note_prefill(g, w, sl, batch, slot, taken):
    """Take note of what is computed of a running request's prompt."""
    before = sl[slot, s.COMPUTED]
    _count_in(w, batch, sl[slot, s.ANSWERED] > 0 and taken <= 1, before, taken)
    sl[slot, s.COMPUTED] = before + taken
    sl[slot, s.LATEST], sl[slot, s.PART] = g[s.STEP], taken
    drafts_of_step(g, sl, slot, 0)
    if _prefilled(g, w, sl, slot):
        g[s.PREFILLING] -= 1
    else:
        g[s.LAST_PREFILL] = slot


@inner
def _note_running(g, x, w, sl, f, kv):
    """Take note of what was scheduled of each running request, and of who was left out."""
    step = g[s.STEP]
    batch = batch_at(g, step)
    for i in range(g[s.RUN_LENGTH]):
        slot = w[g[s.AT_RUN] + i]
        if slot < 0:
            continue
        taken = sl[slot, s.TAKEN]
        if sl[slot, s.STATE] == s.DECODES:
            if sl[slot, s.END] < step:
                continue
            if taken:
                _count_in(w, batch, s.DECODES, computed_before(g, sl, slot), 1)
                if sl[slot, s.MISSED]:
                    sl[slot, s.MISSED] = 0
                    g[s.MISSING] -= 1
                    add_single(g, w, sl, step, slot)
                else:
                    w[batch + s.B_EVEN] += 1
                continue
            split_off(g, x, w, sl, f, slot)
            if g[s.AHEAD] and g[s.IS_CACHED] and not sl[slot, s.MISSED]:
                cache_up_to(g, sl, kv, slot, computed_before(g, sl, slot), -1)
            decodes_no_more(g, w, sl, slot)
            sl[slot, s.END] += 1
            sl[slot, s.MISSED] = 1
            g[s.MISSING] += 1
            decodes_on(g, w, sl, slot)
        elif taken and sl[slot, s.STATE] == s.VERIFIES:
            _count_in(w, batch, s.DECODES, sl[slot, s.COMPUTED], taken)
            verify(g, w, sl, slot, taken)
        elif taken:
            _note_prefill(g, w, sl, batch, slot, taken)


@inlined
def _calm_prefill(g, sl, threshold, defers):
    """Return how much the only prompt in pieces gets; -1 where their order matters."""
    if g[s.PREFILLING] == 0 or defers:
        return 0
    slot = g[s.LAST_PREFILL]
    if (
        g[s.PREFILLING] > 1
        or sl[slot, s.STATE] != s.PREFILLS
        or sl[slot, s.ORDER] != g[s.ORDERS] - 1
    ):
        return -1
    wanted = sl[slot, s.PROMPT] + sl[slot, s.ANSWERED] - sl[slot, s.COMPUTED]
    if 0 < threshold < wanted:
        wanted = threshold
    wanted = min(wanted, g[s.BUDGET] - g[s.DECODING])
    return part_of_prompt(g, sl, slot, wanted) if g[s.STATES] else wanted


@inner
def _following(w, sl, first, ran, found):
    """Return who of a bucket and one found before runs next behind an order; -1 if nobody."""
    slot = w[first]
    while slot >= 0:
        order = sl[slot, s.ORDER]
        if order > ran and (found < 0 or order < sl[found, s.ORDER]):
            found = slot
        slot = sl[slot, s.BUCKET_NEXT]
    return found


@inner
def _let_slide(g, w, sl, r, kv):
    """Let those who decode give back what lies behind their windows, and have their blocks.

    In the order in which they run, since who comes later may have what another gave back.
    """
    wants = g[s.AT_BUCKETS] + g[s.STEP] % g[s.BLOCK]
    leaves = g[s.STEP] - g[s.SETTLES] - g[s.WINDOW] + 1
    leaves = g[s.AT_BUCKETS] + leaves % g[s.BLOCK]
    ran = -1
    while True:
        slot = _following(w, sl, leaves, ran, _following(w, sl, wants, ran, -1))
        for i in range(g[s.UNSTEADY]):
            at = g[s.AT_UNSTEADY] + 2 * i
            order = w[at + 1]
            if order > ran and (slot < 0 or order < sl[slot, s.ORDER]):
                slot = w[at] if is_unsteady(g, w, sl, at) else slot
        if slot < 0:
            return
        ran = sl[slot, s.ORDER]
        slide(g, sl, kv, slot, settled_before(g, sl, slot))
        before = computed_before(g, sl, slot)
        grow(g, sl, r, kv, slot, before // g[s.BLOCK] + 1, 1)
        if g[s.KEYS_ANEW]:
            key_anew(g, sl, kv, slot, before + (not g[s.AHEAD]), g[s.STEP])


@inlined
def let_decode(g, w, sl, r, kv):
    """Let everybody who decodes have the blocks and keys of this step."""
    step, block = g[s.STEP], g[s.BLOCK]
    if not g[s.IS_CACHED]:
        g[s.FREE] -= g[s.GROUPS] * w[g[s.AT_PHASES] + step % block]
        if g[s.WINDOWED]:
            g[s.FREE] += overtake(g, w, step)
            for i in range(g[s.UNSTEADY]):
                at = g[s.AT_UNSTEADY] + 2 * i
                if is_unsteady(g, w, sl, at):
                    slide(g, sl, kv, w[at], settled_before(g, sl, w[at]))
        return
    if g[s.WINDOWED]:
        _let_slide(g, w, sl, r, kv)
    else:
        slot = w[g[s.AT_BUCKETS] + step % block]
        while slot >= 0:
            grow(g, sl, r, kv, slot, sl[slot, s.BLOCKS] + 1, 1)
            slot = sl[slot, s.BUCKET_NEXT]
    ahead = g[s.AHEAD]
    slot = w[g[s.AT_BUCKETS] + (step + (0 if ahead else 1)) % block]
    while slot >= 0:
        full = computed_before(g, sl, slot) + (0 if ahead else 1)
        cache_up_to(g, sl, kv, slot, full, step)
        slot = sl[slot, s.BUCKET_NEXT]


@inlined
def _schedule_calmly(g, w, sl, r, kv, threshold, defers):
    """Schedule running requests where their order does not matter; False where it does."""
    if g[s.DRAFTS]:
        return False
    block = g[s.BLOCK]
    needed = g[s.GROUPS] * w[g[s.AT_PHASES] + g[s.STEP] % block]
    if g[s.DECODING] > g[s.BUDGET] or g[s.MISSING] > 0 or needed > g[s.FREE]:
        return False
    wanted = _calm_prefill(g, sl, threshold, defers)
    if wanted < 0:
        return False
    slot = g[s.LAST_PREFILL]
    blocks = states = 0
    if wanted > 0:
        before, states = sl[slot, s.COMPUTED], 1
        blocks = (before + wanted + block - 1) // block
        if g[s.TWO_EVERY]:
            states = states_of_part(g, sl, slot, before, before + wanted)
        if needed + taken_by(g, blocks - sl[slot, s.BLOCKS], states) > g[s.FREE]:
            return False
    batch = batch_at(g, g[s.STEP])
    w[batch + s.B_DECODES] = w[batch + s.B_EVEN] = g[s.DECODING]
    w[batch + s.B_DECODE_CONTEXT] = g[s.CONTEXT] + g[s.DECODING] * g[s.STEP]
    w[batch + s.B_SQUARES] = squares_at(g, g[s.STEP])
    if g[s.DECODING] > 0:
        let_decode(g, w, sl, r, kv)
    if wanted > 0:
        g[s.CARRIES] = 1
        slide(g, sl, kv, slot, settled_before(g, sl, slot))
        grow(g, sl, r, kv, slot, blocks, states)
        before = sl[slot, s.COMPUTED]
        if g[s.IS_CACHED]:
            cache_up_to(g, sl, kv, slot, before + wanted, g[s.STEP])
        _count_in(w, batch, sl[slot, s.ANSWERED] > 0 and wanted <= 1, before, wanted)
        sl[slot, s.COMPUTED] = before + wanted
        sl[slot, s.LATEST], sl[slot, s.PART] = g[s.STEP], wanted
        if _prefilled(g, w, sl, slot):
            g[s.PREFILLING] -= 1
    return True


@inlined
def note_decodes(g, w, step):
    """Note a batch of those who decode, and of nobody else."""
    batch = batch_at(g, step)
    for field in range(s.BATCH_FIELDS):
        w[batch + field] = 0
    w[batch + s.B_DECODES] = w[batch + s.B_EVEN] = g[s.DECODING]
    w[batch + s.B_DECODE_CONTEXT] = g[s.CONTEXT] + g[s.DECODING] * step
    w[batch + s.B_SQUARES] = squares_at(g, step)
    w[batch + s.B_RUNNING], w[batch + s.B_WAITING] = g[s.RUNNING], g[s.WAITING]
    w[batch + s.B_USED] = g[s.ALL_BLOCKS] - g[s.FREE]


@inlined
def schedule_decodes(g, w, sl, r, kv):
    """Send a batch on its way of those who decode, for whom there are blocks."""
    step = g[s.STEP]
    let_decode(g, w, sl, r, kv)
    note_decodes(g, w, step)
    g[s.TIDY] = 0
    g[s.STEP] += 1
    g[s.IN_PIPE] += 1


@inlined
def schedule(g, x, w, sl, f, r, q, tr, kv):
    """Put the next batch together and send it on its way; return whether it is empty."""
    batch = batch_at(g, g[s.STEP])
    for field in range(s.BATCH_FIELDS):
        w[batch + field] = 0
    threshold, defers, preempted = _threshold(g), _defers(g), 0
    g[s.CARRIES] = 0
    if g[s.WINDOWED]:
        forget_steady(g, w, sl)
    if _schedule_calmly(g, w, sl, r, kv, threshold, defers):
        budget = g[s.BUDGET] - w[batch + s.B_DECODES] - w[batch + s.B_PREFILL]
    else:
        budget, preempted = _schedule_running(g, x, w, sl, f, r, tr, kv, threshold, defers)
        _note_running(g, x, w, sl, f, kv)
    came = False
    if preempted == 0 and budget > 0 and g[s.WAITING] > 0:
        came = _admit_waiting(g, w, sl, r, q, tr, kv, budget, threshold, defers)
    is_calm = preempted == 0 and w[batch + s.B_PREFILL] == 0 and g[s.PREFILLING] == 0
    # What lies behind a window may be given back at any step, and let somebody in.
    stays = g[s.WINDOWED] == 0 or g[s.RUNNING] >= g[s.CAP]
    g[s.HELD] = is_calm and not came and not defers and stays
    if preempted == 0 and not defers:
        g[s.BACKED_UP] = g[s.WAITING] > 0
    let_end(g, w, sl, g[s.STEP])
    is_empty = w[batch + s.B_DECODES] == 0 and w[batch + s.B_PREFILL] == 0
    # as engine.compat.core.BatchReader: a turn without a batch tells of nothing.
    w[batch + s.B_PREEMPTED] = 0 if is_empty else preempted
    w[batch + s.B_RUNNING], w[batch + s.B_WAITING] = g[s.RUNNING], g[s.WAITING]
    w[batch + s.B_USED] = g[s.ALL_BLOCKS] - g[s.FREE]
    g[s.TIDY] = 0
    g[s.STEP] += 1
    g[s.IN_PIPE] += 1
    g[s.EMPTY] += is_empty
    if g[s.CARRIES]:
        g[s.CARRIED] = g[s.STEP] - g[s.EMPTY]
    return is_empty
