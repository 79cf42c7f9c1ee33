"""What a step computes: who runs on, who has to give way, and who decodes on beside.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py, async_scheduler.py.
"""

from __future__ import annotations

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.admission import admit_waiting
from tuner.shadow.schedule.batches import (
    add_single,
    batch_at,
    count_in,
    let_end,
    preempt,
    prefilled,
    split_off,
)
from tuner.shadow.schedule.blocks import (
    cache_up_to,
    grow,
    grow_states,
    key_anew,
    needed_blocks,
    slide,
    taken_by,
    taken_for_states,
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
    wanted_blocks,
)
from tuner.shadow.schedule.drafts import drafts_of_step, to_verify, verify
from tuner.shadow.schedule.layout import inlined, inner
from tuner.shadow.schedule.states import (
    part_of_prompt,
    states_of_part,
)
from tuner.shadow.schedule.waiting import (
    compact,
    is_before,
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
        needed, states = needed_blocks(g, before + wanted, g[s.LOOKAHEAD]), 1
        if prefills and g[s.TWO_EVERY]:
            states = states_of_part(g, sl, slot, before, before + wanted)
        fits, omitted = True, 0
        slide(g, sl, kv, slot, settled_before(g, sl, slot))
        stated = needed_blocks(g, before + wanted, 0)
        taken = taken_by(g, sl[slot, s.BLOCKS], needed) if needed > sl[slot, s.BLOCKS] else 0
        taken += taken_for_states(g, sl[slot, s.STATED], stated, states)
        while taken > g[s.FREE]:
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
        grow(g, sl, r, kv, slot, needed)
        grow_states(g, sl, r, kv, slot, stated, states, s.GOES_FURTHER)
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
    count_in(w, batch, sl[slot, s.ANSWERED] > 0 and taken <= 1, before, taken)
    sl[slot, s.COMPUTED] = before + taken
    sl[slot, s.LATEST], sl[slot, s.PART] = g[s.STEP], taken
    drafts_of_step(g, sl, slot, 0)
    if prefilled(g, w, sl, slot):
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
                count_in(w, batch, s.DECODES, computed_before(g, sl, slot), 1)
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
            count_in(w, batch, s.DECODES, sl[slot, s.COMPUTED], taken)
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
        grow(g, sl, r, kv, slot, before // g[s.BLOCK] + 1)
        grow_states(g, sl, r, kv, slot, before // g[s.BLOCK] + 1, 1, s.GOES_FURTHER)
        if g[s.KEYS_ANEW]:
            key_anew(g, sl, kv, slot, before + (not g[s.AHEAD]), g[s.STEP])


@inlined
def let_decode(g, w, sl, r, kv):
    """Let everybody who decodes have the blocks and keys of this step."""
    step, block = g[s.STEP], g[s.BLOCK]
    if not g[s.IS_CACHED]:
        g[s.FREE] -= wanted_blocks(g, w, step)
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
            grow(g, sl, r, kv, slot, sl[slot, s.BLOCKS] + 1)
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
    needed = wanted_blocks(g, w, g[s.STEP])
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
        taken = taken_by(g, sl[slot, s.BLOCKS], blocks)
        taken += taken_for_states(g, sl[slot, s.STATED], blocks, states)
        if needed + taken > g[s.FREE]:
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
        grow(g, sl, r, kv, slot, blocks)
        grow_states(g, sl, r, kv, slot, blocks, states, s.GOES_FURTHER)
        if g[s.IS_CACHED]:
            cache_up_to(g, sl, kv, slot, sl[slot, s.COMPUTED] + wanted, g[s.STEP])
        _note_prefill(g, w, sl, batch, slot, wanted)
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
        came = admit_waiting(g, w, sl, r, q, tr, kv, budget, threshold, defers)
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
