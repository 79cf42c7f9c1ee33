"""A replay from turn to turn, and many steps that are alike in one go."""

from __future__ import annotations

import math

from tuner.shadow.compiled import compiled
from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.arrivals import admit, next_due, queued
from tuner.shadow.schedule.batches import batch_at, let_end, singles_at
from tuner.shadow.schedule.clock import (
    count_sample,
    launch,
    note_steps,
    notice,
    spread_of,
    step_s,
)
from tuner.shadow.schedule.decoding import day_of, overtake, squares_at, wanted_blocks
from tuner.shadow.schedule.drafts import bring_out
from tuner.shadow.schedule.ends import finish_batch, is_cut, stop, time_out
from tuner.shadow.schedule.layout import inlined, inner
from tuner.shadow.schedule.steps import let_decode, note_decodes, schedule, schedule_decodes


@inlined
def _complete(g, x, w, t, sl, f, h, log, kv):
    """Complete the batch whose turn it is, but for those who end with it."""
    step = g[s.DONE] + 1
    batch = batch_at(g, step)
    decodes, prefill = w[batch + s.B_DECODES], w[batch + s.B_PREFILL]
    context, pairs = w[batch + s.B_DECODE_CONTEXT], w[batch + s.B_PREFILL_CONTEXT]
    spread = spread_of(decodes, context, w[batch + s.B_SQUARES])
    if g[s.AHEAD]:
        took_s = -x[s.NOW]
        notice(x, step)
        took_s += x[s.NOW]
    else:
        drafts = w[batch + s.B_DRAFTS]
        took_s = step_s(g, x, t, decodes, prefill, context, pairs, spread, drafts)
        x[s.NOW] += took_s
    g[s.DONE] = step
    g[s.IN_PIPE] -= 1
    used = w[batch + s.B_USED]
    note_steps(
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
        w[batch + s.B_RUNNING],
        w[batch + s.B_WAITING],
        used,
        used,
        w[batch + s.B_PREEMPTED],
        w[batch + s.B_CACHED],
        w[batch + s.B_DRAFTS],
    )
    if decodes > 0 and prefill == 0:
        count_sample(h, s.DECODE_STEPS, took_s, 1.0, took_s)
    even = w[batch + s.B_EVEN]
    if even > 0:
        gap_s = x[s.NOW] - x[s.BEFORE]
        count_sample(h, s.GAPS, gap_s, even, gap_s * even)
    at = singles_at(g, step)
    for i in range(w[batch + s.B_SINGLES]):
        slot = w[at + 2 * i]
        if sl[slot, s.ORDER] != w[at + 2 * i + 1] or sl[slot, s.STATE] == s.NOBODY:
            continue
        row = sl[slot, s.ROW]
        if g[s.DRAFTS]:
            bring_out(g, w, t, sl, kv, step, slot)
        if math.isnan(f[row, s.FIRST]):
            f[row, s.FIRST] = x[s.NOW]
        else:
            gap_s = x[s.NOW] - f[row, s.LAST]
            count_sample(h, s.GAPS, gap_s, 1.0, gap_s)
        f[row, s.LAST] = x[s.NOW]
    x[s.BEFORE] = x[s.NOW]
    if decodes == 0 and prefill == 0:
        g[s.STUCK] += 1
    else:
        g[s.STUCK] = 0


@inlined
def _turn(g, x, w, t, sl, f, r, q, h, log, tr, kv):
    """Schedule a batch, and complete the one whose turn it is."""
    x[s.LAUNCHED] = x[s.NOW]
    if g[s.RUNNING] > 0 or g[s.WAITING] > 0 or g[s.TIDY]:
        is_empty = schedule(g, x, w, sl, f, r, q, tr, kv)
        if g[s.STATUS] != s.GOES:
            return
        if g[s.AHEAD]:
            launch(g, x, w, t)
        has_requests = g[s.RUNNING] > 0 or g[s.WAITING] > 0
        if g[s.AHEAD] and g[s.IN_PIPE] < 2 and (has_requests or not is_empty):
            took_s = x[s.LAUNCHED] - x[s.NOW]
            x[s.NOW], x[s.WAS_LATE] = x[s.LAUNCHED], 0.0
            note_steps(g, x, h, log, took_s, 1, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0, 0)
            g[s.STUCK] += 1
            return
    _complete(g, x, w, t, sl, f, h, log, kv)
    finish_batch(g, x, w, sl, f, r, q, kv, tr, g[s.DONE])


# steps that are alike, in one go


@inlined
def _only_decode(g, w):
    """Whether the next step only decodes, and nobody who runs ends with the one on its way."""
    if (
        g[s.DECODING] == 0
        or g[s.DECODING] != g[s.RUNNING]
        or g[s.PREFILLING] > 0
        or g[s.MISSING] > 0
        or g[s.DECODING] > g[s.BUDGET]
        or (g[s.WAITING] > 0 and not g[s.HELD])
        or (g[s.WINDOWED] and g[s.STEP] < g[s.ALL_STEADY])
    ):
        return False
    return not g[s.AHEAD] or (
        g[s.IN_PIPE] == 1 and w[batch_at(g, g[s.STEP] - 1) + s.B_ENDS] == 0
    )


@inlined
def _quiet_until(g, x, f, r, q, due_s):
    """Return before when nothing but decoding happens; a little early does no harm."""
    until_s = min(due_s, x[s.END_S])
    if not g[s.MEASURES]:
        until_s = min(until_s, x[s.LEAD_S])
    if x[s.PATIENCE] < math.inf:
        while g[s.OLDEST] < g[s.QUEUE_TAIL]:
            row = queued(r, g[s.OLDEST])
            if q[row, s.OUTCOME] == s.GOES_ON:
                until_s = min(until_s, f[row, s.DUE] + x[s.PATIENCE] * (1 - 1e-9))
                break
            g[s.OLDEST] += 1
    elif x[s.LATE_S] < math.inf:
        while g[s.NEXT_LATE] < g[s.QUEUE_TAIL]:
            row = queued(r, g[s.NEXT_LATE])
            if q[row, s.OUTCOME] == s.GOES_ON and not r[row, s.IS_LATE]:
                until_s = min(until_s, f[row, s.DUE] + x[s.LATE_S] * (1 - 1e-9))
                break
            g[s.NEXT_LATE] += 1
    if g[s.GATE_HEAD] < g[s.GATE_TAIL] and x[s.GATE_WAIT_S] < math.inf:
        row = r[g[s.GATE_HEAD], s.AT_GATE]
        until_s = min(until_s, f[row, s.DUE] + x[s.GATE_WAIT_S] * (1 - 1e-9))
    if x[s.MAX_CLOCK] < math.inf and not math.isnan(x[s.FIRST_DUE]):
        until_s = min(until_s, x[s.FIRST_DUE] + x[s.MAX_CLOCK] * (1 - 1e-9))
    return until_s


@inlined
def _leap(g, x, w, t, sl, f, r, q, h, log, kv, tr, due_s):
    """Take steps that only decode until something else happens; return how many.

    With a batch ahead the one on its way is completed first, whatever is in it, and the last
    one scheduled is left.
    """
    until_s = _quiet_until(g, x, f, r, q, due_s)
    ahead, began = g[s.AHEAD], g[s.STEP]
    if ahead:
        if wanted_blocks(g, w, began) > g[s.FREE]:
            return 0
        schedule_decodes(g, w, sl, r, kv)
        launch(g, x, w, t)
        _complete(g, x, w, t, sl, f, h, log, kv)
    if not ahead or (x[s.NOW] < until_s and w[day_of(g, began)] < 0):
        _decode_on(g, x, w, t, sl, r, h, log, kv, until_s)
    if g[s.STEP] == began:
        return 0
    if g[s.WAITING] == 0:
        g[s.BACKED_UP] = 0
    last = g[s.STEP] - 1
    if w[day_of(g, last)] >= 0:
        if not ahead:
            w[batch_at(g, last) + s.B_ENDS] = 0
        let_end(g, w, sl, last)
        if not ahead:
            finish_batch(g, x, w, sl, f, r, q, kv, tr, last)
    return g[s.STEP] - began


@inlined
def _decode_on(g, x, w, t, sl, r, h, log, kv, until_s):
    """Take steps of those who decode until one of them ends, or an instant has come."""
    ahead, n, began, step = g[s.AHEAD], g[s.DECODING], g[s.STEP], g[s.STEP]
    wanted, calendar, free, blocks = (
        g[s.AT_WANTED],
        g[s.AT_CALENDAR],
        g[s.FREE],
        g[s.ALL_BLOCKS],
    )
    at_wanted, last_wanted = wanted + step % g[s.ROUND], wanted + g[s.ROUND] - 1
    used = last_used = float(blocks - free)
    most_used, windowed = 0.0, g[s.WINDOWED] > 0
    attended = g[s.CONTEXT] + n * (step - ahead)
    context = first_context = float(attended)
    spread = spread_of(n, attended, squares_at(g, step - ahead))
    now, slope_s, alone_s = x[s.NOW], x[s.DECODE_CONTEXT_S], x[s.BASE_S] + t[n]
    apart_s, factor = x[s.SPREAD_S] * spread + 0.0, t[g[s.CAP] + 1 + n]
    launch_s, device, is_late = t[g[s.AT_LAUNCHES] + n], x[s.DEVICE], x[s.WAS_LATE] > 0
    first_s, took_s, used_sum, launched, was_late = 0.0, 0.0, 0.0, 0.0, False
    while w[at_wanted] <= free:
        if ahead:
            launched = now + launch_s
            was_late, is_late = is_late, launched > device
            # Like ones are noticed alike; the first that is not goes by itself.
            if is_late != was_late and step > began:
                is_late = was_late
                break
        last_used = used
        if g[s.IS_CACHED]:
            g[s.STEP] = step
            let_decode(g, w, sl, r, kv)
            free = g[s.FREE]
        else:
            free -= w[at_wanted]
            if windowed:
                free += overtake(g, w, step)
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
                x[s.HOST_BOUND_S] += took_s
            if step == began:
                first_s = took_s
        else:
            # As StepModel.step_s adds them, so that both come to the same instants.
            took_s = (alone_s + (slope_s * context + apart_s)) * factor
            now += took_s
        used_sum += last_used * took_s
        if windowed:
            most_used = max(most_used, last_used)
        context += n
        at_wanted = at_wanted + 1 if at_wanted < last_wanted else wanted
        step += 1
        if now >= until_s or w[calendar + ((step - 1) & g[s.LAST_DAY])] >= 0:
            break
        if ahead and is_late != was_late:
            break
    steps = step - began
    if steps == 0:
        return
    if not ahead:
        first_s = (alone_s + (slope_s * first_context + apart_s)) * factor
    g[s.STEP], g[s.FREE] = step, free
    g[s.DONE] += steps
    g[s.STUCK] = g[s.TIDY] = 0
    took_all_s = now - x[s.NOW]
    x[s.NOW] = x[s.BEFORE] = now
    note_steps(
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
        g[s.RUNNING],
        g[s.WAITING],
        used_sum / took_all_s if took_all_s > 0.0 else last_used,
        max(most_used, last_used),
        0,
        0,
        0,
    )
    _count_like(h, steps, n, first_s, took_s, took_all_s)
    if ahead:
        note_decodes(g, w, step - 1)
        x[s.DEVICE] = x[s.ENDS_0 + ((step - 1) & (s.PIPE - 1))] = device
        x[s.WAS_LATE] = is_late


@inlined
def _count_like(h, steps, n, first_s, last_s, took_s):
    """Count steps of n decoding requests, and the gaps between their tokens, as long as they.

    Steps grow by the same from one to the next.
    """
    if last_s <= first_s * (1 + s.BIN_RATIO):
        count_sample(h, s.DECODE_STEPS, took_s / steps, steps, took_s)
        count_sample(h, s.GAPS, took_s / steps, n * steps, n * took_s)
        return
    growth_s = (last_s - first_s) / (steps - 1)
    for i in range(steps):
        each_s = first_s + growth_s * i
        count_sample(h, s.DECODE_STEPS, each_s, 1.0, each_s)
        count_sample(h, s.GAPS, each_s, n, n * each_s)


@inner
def _begin_to_measure(g, x, h):
    """Forget what was counted while the engine warmed up."""
    g[s.MEASURES], g[s.LOGGED] = 1, 0
    for field in range(s.STEPS_N, s.FLOATS):
        x[field] = 0.0
    for at in range(h.size):
        h[at] = 0.0


@inner
def _leave_unfinished(g, x, f, q):
    """Close the books where the recording ends: of what is in flight, and of the rest."""
    for row in range(g[s.REQUESTS]):
        if q[row, s.OUTCOME] == s.GOES_ON:
            q[row, s.OUTCOME] = s.UNFINISHED
            g[s.ENDED] += 1
    for row in range(g[s.NEXT], g[s.REQUESTS]):
        f[row, s.DUE] = x[s.NOW]
        q[row, s.OUTCOME] = s.UNFINISHED
        g[s.ENDED] += 1


@inlined
def has_work(g):
    """Whether the engine takes a step before anything arrives."""
    return g[s.RUNNING] > 0 or g[s.WAITING] > 0 or g[s.TIDY] or g[s.IN_PIPE] > 0


@inlined
def work_on(g, x, w, t, sl, f, r, q, h, log, tr, kv, due_s):
    """Take a step, or as many as are alike before an instant."""
    steps = 0
    if _only_decode(g, w):
        steps = _leap(g, x, w, t, sl, f, r, q, h, log, kv, tr, due_s)
    if steps == 0:
        _turn(g, x, w, t, sl, f, r, q, h, log, tr, kv)
    if x[s.PATIENCE] < math.inf:
        time_out(g, x, w, sl, f, r, q, kv, tr)
    if g[s.STUCK] > s.STUCK_TURNS:
        g[s.STATUS] = s.IS_STUCK


@compiled
def stop_all(g, x, w, sl, f, q):
    """Note how far every answer in flight came."""
    for slot in range(g[s.SLOTS]):
        if sl[slot, s.STATE] != s.NOBODY:
            stop(g, x, w, sl, f, q, slot)


@compiled
def advance(g, x, w, t, sl, f, r, q, h, log, tr, kv, turns):
    """Go on with a replay for so many turns, or until it has ended; True while there is more.

    The status says how it ended. Everything is in the arrays, which `simulated` lays out.
    """
    for _ in range(turns):
        if g[s.KEEPS_LOG] and g[s.LOGGED] >= log.shape[0] - 2:
            return True
        if not g[s.MEASURES] and x[s.NOW] >= x[s.LEAD_S]:
            _begin_to_measure(g, x, h)
        if x[s.NOW] >= x[s.END_S]:
            stop_all(g, x, w, sl, f, q)
            _leave_unfinished(g, x, f, q)
            g[s.STATUS] = s.ENDED_WELL
            return False
        admit(g, x, f, r, q, tr)
        due_s = next_due(g, x, f, tr)
        if has_work(g):
            work_on(g, x, w, t, sl, f, r, q, h, log, tr, kv, due_s)
        elif due_s == math.inf:
            g[s.STATUS] = s.LOST_WORK if g[s.IN_FLIGHT] > 0 else s.ENDED_WELL
        else:
            x[s.NOW] = max(x[s.NOW], due_s)
        if g[s.STATUS] != s.GOES or is_cut(g, x, f, r, q):
            stop_all(g, x, w, sl, f, q)
            return False
    return True
