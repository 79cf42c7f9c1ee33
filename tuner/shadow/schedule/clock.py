"""How long a batch takes, device and host, and what is noted of it."""

from __future__ import annotations

import math

import numpy as np

from tuner.shadow.schedule import layout as s
from tuner.shadow.schedule.batches import batch_at
from tuner.shadow.schedule.layout import inlined, inner


@inlined
def count_sample(h, which, value, weight, total):
    """Count a sample of which `weight` come to `total`."""
    at = (np.float64(value).view(np.int64) >> s.BIN_SHIFT) - s.LOWEST_KEY
    at = min(max(at, 0), s.BINS - 1)
    first = which * s.ROOM
    h[first + 2 * at] += weight
    h[first + 2 * at + 1] += total
    h[first + 2 * s.BINS + (at >> s.STRETCH_SHIFT)] = 1.0


# time and what is noted of it


@inner
def spread_of(seqs, total, squares):
    """Return how far apart contexts are, as engine.protocol.spread_tokens has it."""
    if seqs == 0:
        return 0.0
    return math.sqrt((seqs * squares - total * total) / seqs)


@inner
def _tokens_s(g, t, tokens):
    """Return the seconds of so many tokens that no graph serves, as StepModel's curve."""
    knots, n = g[s.AT_KNOTS], g[s.KNOTS]
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if t[knots + middle] <= tokens:
            low = middle + 1
        else:
            high = middle
    i = low - 1
    return t[knots + n + i] + t[knots + 2 * n + i] * (tokens - t[knots + i])


@inner
def _factor(g, t, decodes, prefill):
    """Return a batch's factor, as step_model.Factors.at has it: knots at 0, 1, 2, 4, 8 ..."""
    at, rows, columns = g[s.AT_FACTORS], g[s.FACTOR_ROWS], g[s.FACTOR_COLUMNS]
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


@inner
def _any_tokens_s(g, x, t, tokens):
    """Return the seconds of so many tokens, in a graph that serves any or without one."""
    if g[s.AT_MIXED] + tokens < g[s.AT_KNOTS]:
        return t[g[s.AT_MIXED] + tokens]
    return _tokens_s(g, t, tokens) + x[s.EAGER_S]


@inlined
def step_s(g, x, t, decodes, prefill, decode_context, prefill_context, spread, drafts):
    """Return the seconds of a batch, as StepModel.step_s does."""
    if decodes == 0 and prefill == 0:
        return x[s.TIDY_S]
    decode_s, apart_s, prefill_s = x[s.DECODE_CONTEXT_S], x[s.SPREAD_S], 0.0
    if prefill:
        tokens = decodes + drafts + prefill
        work_s = _any_tokens_s(g, x, t, tokens) + x[s.SEQ_S] * decodes
        factor = _factor(g, t, decodes, prefill)
        decode_s += x[s.MIXED_CONTEXT_S]
        apart_s += x[s.MIXED_SPREAD_S]
        prefill_s = x[s.PREFILL_BASE_S] + x[s.PREFILL_CONTEXT_S] * prefill_context
    else:
        work_s, factor = t[decodes], t[g[s.CAP] + 1 + decodes]
        if drafts != g[s.DRAFTS] * decodes:  # of another shape than graphs of decodes are
            work_s = _any_tokens_s(g, x, t, decodes + drafts) + x[s.SEQ_S] * decodes
    context_s = decode_s * decode_context
    context_s += apart_s * spread + prefill_s
    return (x[s.BASE_S] + work_s + context_s) * factor


@inlined
def _launch_s(g, x, t, decodes, prefill, drafts):
    """Return the seconds that launching a batch takes the host, as Host.launch_s does."""
    if prefill == 0:
        return t[g[s.AT_LAUNCHES] + decodes]
    is_in_graph = g[s.AT_MIXED] + decodes + drafts + prefill < g[s.AT_KNOTS]
    kind_s = x[s.HOST_MIXED_S] if is_in_graph else x[s.HOST_EAGER_S]
    return kind_s + x[s.HOST_SEQ_S] * decodes + x[s.HOST_TOKEN_S] * prefill


@inlined
def launch(g, x, w, t):
    """Launch the newest batch: the device begins once it is free, and ends no sooner."""
    step = g[s.STEP] - 1
    batch = batch_at(g, step)
    decodes, prefill = w[batch + s.B_DECODES], w[batch + s.B_PREFILL]
    context, pairs = w[batch + s.B_DECODE_CONTEXT], w[batch + s.B_PREFILL_CONTEXT]
    spread = spread_of(decodes, context, w[batch + s.B_SQUARES])
    drafts = w[batch + s.B_DRAFTS]
    took_s = step_s(g, x, t, decodes, prefill, context, pairs, spread, drafts)
    x[s.LAUNCHED] = x[s.NOW] + _launch_s(g, x, t, decodes, prefill, drafts)
    x[s.DEVICE] = max(max(x[s.DEVICE], x[s.NOW]) + took_s, x[s.LAUNCHED])
    x[s.ENDS_0 + (step & (s.PIPE - 1))] = x[s.DEVICE]


@inlined
def notice(x, step):
    """Wait for a batch that the device computes; the next one is launched before."""
    ends_s = x[s.ENDS_0 + (step & (s.PIPE - 1))]
    is_late = x[s.LAUNCHED] > ends_s
    now_s = x[s.LAUNCHED] if is_late else ends_s
    if is_late and x[s.WAS_LATE]:
        x[s.HOST_BOUND_S] += now_s - x[s.NOW]
    x[s.WAS_LATE] = is_late
    x[s.NOW] = now_s


@inlined
def note_steps(
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
    drafts,
):
    """Count like steps that took so long together, and keep them where they are asked for."""
    x[s.STEPS_N] += repeats
    x[s.STEPS_S] += took_s
    x[s.CACHED_N] += cached
    x[s.PREEMPTED_N] += preempted
    counted = decodes + drafts + prefill + g[s.DRAFT_SLOTS] * running
    x[s.FULLEST] = max(x[s.FULLEST], counted)
    x[s.PEAK_RUNNING] = max(x[s.PEAK_RUNNING], running)
    x[s.PEAK_WAITING] = max(x[s.PEAK_WAITING], waiting)
    x[s.PEAK_USED] = max(x[s.PEAK_USED], most_used)
    if prefill == 0 and decodes > 0:
        x[s.ALONE_N] += repeats
        x[s.ALONE_SEQS] += repeats * decodes
        x[s.ALONE_SQUARES] += repeats * decodes * decodes
        x[s.ALONE_S] += took_s
        x[s.ALONE_PRODUCT] += took_s * decodes
    else:
        x[s.MIXED_N] += repeats * (prefill > 0)
        x[s.MIXED_SEQS] += repeats * decodes
        x[s.MIXED_TOKENS] += prefill
        x[s.MIXED_S] += took_s
    if took_s > 0.0:
        count_sample(h, s.H_RUNNING, running, took_s, running * took_s)
        count_sample(h, s.H_WAITING, waiting, took_s, waiting * took_s)
        count_sample(h, s.H_USED, used, took_s, used * took_s)
    if g[s.KEEPS_LOG]:
        at = g[s.LOGGED]
        log[at, 0], log[at, 1], log[at, 2] = x[s.NOW], took_s, repeats
        log[at, 3], log[at, 4] = decodes, prefill
        log[at, 5], log[at, 6], log[at, 7] = decode_context, prefill_context, spread
        log[at, 8], log[at, 9], log[at, 10], log[at, 11] = running, waiting, used, most_used
        log[at, 12], log[at, 13] = preempted, cached
        log[at, 14] = log[at, 15] = 0.0
        log[at, 16] = drafts
        g[s.LOGGED] = at + 1
