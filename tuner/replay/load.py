"""How much work a trace offers, and whether the engine kept up with it.

The work that was offered is set against the time in which it came, and requests in flight must
not grow: both must hold for a load to be sustained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepSummary
from tuner.replay.timeline import Outcome, Timelines
from tuner.stats import Floats, Ints
from tuner.traffic.traces import Trace


def offered_work_s(
    trace: Trace, lines: Timelines, steps: StepSummary, limits: EngineLimits, most: float
) -> Floats:
    """Return for each request how long the engine is busy with it when its batches are full.

    What a step, a decoding sequence and a prompt token cost is taken from the replay's own
    steps; a step is shared by as many sequences as the limits and the KV cache hold, `most`
    at most, also where the replay was too short to fill its batches. Prompt tokens count as
    they were computed: less what the prefix cache held, more what preemption repeated. The
    steps are those after the lead-in, in which prompts of its queue are computed too.

    Shapes: [n], the lead-in too; 0 for refused requests, nan where no step was seen.
    Units: seconds.
    """
    answered = lines.first_s >= trace.lead_in_s
    if not steps.steps or not answered.any():
        return np.full(len(lines), math.nan)
    wanted = lines.outcome != int(Outcome.REFUSED)
    prompts, outputs = trace.prompt_tokens * wanted, trace.output_tokens * wanted
    computed = steps.prefill_tokens / max(float(prompts[answered].sum()), 1.0)
    seqs = min(limits.max_num_seqs, _seqs_in_cache(steps), most)
    costs = steps.costs
    # The seconds of a step, shared by its tokens, count where there are more of such steps.
    decode_s, prefill_s = costs.base_s / seqs, costs.base_s / limits.max_num_batched_tokens
    if float(outputs.sum()) * decode_s >= float(prompts.sum()) * computed * prefill_s:
        prefill_s = 0.0
    else:
        decode_s = 0.0
    work_s: Floats = prompts * (computed * (prefill_s + costs.prefill_s))
    work_s += outputs * (decode_s + costs.decode_s)
    work_s -= wanted * costs.decode_s
    return work_s


def _seqs_in_cache(steps: StepSummary) -> float:
    """Return how many sequences as these a full KV cache holds, without end if unknown."""
    running, usage = steps.levels["running"], steps.levels["kv_usage_ratio"]
    used = float(usage.values @ usage.weights)
    return max(1.0, float(running.values @ running.weights) / used) if used > 0 else math.inf


def utilisation(lines: Sequence[Timelines]) -> float | None:
    """Return the offered work over the time in which it was offered, 1 and more is overload.

    Pooled over the windows of a replay. None where it is unknown: without steps, without a
    span of arrivals, or in a closed loop, which offers what the engine can take.

    Source: the traffic intensity of queueing theory, Kleinrock, Queueing Systems I (1975).
    """
    work_s = sum(float(line.work_s.sum()) for line in lines)
    span_s = sum(arrival_span_s(line) for line in lines)
    if math.isnan(work_s) or span_s <= 0:
        return None
    return work_s / span_s


def arrival_span_s(line: Timelines) -> float:
    """Return for how long requests arrived, a mean gap after the last of them included."""
    due_s = line.due_s
    if due_s.size < 2:
        return 0.0
    return float(due_s.max() - due_s.min()) * due_s.size / (due_s.size - 1)


def share_done(trace: Trace, lines: Timelines, steps: StepSummary) -> float:
    """Return how much of its work a replay had done when it ended, in 0 to 1.

    By tokens, prompts and answers each weighted with what they cost: of long answers much may
    be done before the first request ends.
    """
    wanted = lines.outcome != int(Outcome.REFUSED)
    prompts, outputs = trace.prompt_tokens[wanted], trace.output_tokens[wanted]
    if not outputs.size:
        return 1.0
    begun = lines.output_tokens[wanted] > 0
    decoded = float(lines.output_tokens[wanted].sum() - begun.sum())
    read = steps.cached_tokens + steps.prefill_tokens
    needed = float(prompts.sum()) * (steps.prefill_tokens / read if read else 1.0)
    prefill_s = steps.costs.prefill_s * min(float(steps.prefill_tokens), needed)
    # What is left of the steps' time went into decoding.
    each_s = (steps.duration_s - prefill_s) / decoded if decoded else steps.costs.prefill_s
    decodes_s = each_s * float(outputs.sum() - outputs.size)
    all_s = steps.costs.prefill_s * needed + decodes_s
    return min(1.0, (prefill_s + each_s * decoded) / all_s) if all_s > 0 else 1.0


# Requests in flight count as growing when their rise over the middle of the window is worth
# this share of the requests offered, at least this many requests, and this many standard
# errors of its own noise: ours, see `is_sustained`.
GROWTH_RATIO = 0.05
GROWTH_REQUESTS = 4.0
GROWTH_ERRORS = 3.0
# An empty engine fills for about so many lives of a request, over the share of its capacity
# that is spare, which counts as this at least: ours, a batch grows until as many end as come.
FILLING_LIVES, MIN_SPARE = 2.0, 0.05
# Stretches of the middle from which the noise of the requests in flight is taken: ours.
STRETCHES = 10
# Rounding of the offered work: what is just full is not overloaded.
_ROUNDING = 1e-6


def is_sustained(line: Timelines) -> bool:
    """Return whether the engine kept up with what an open loop offered.

    It did not when the offered work exceeds the time in which it came, however early everybody
    was admitted; nor when the requests in flight grow, beyond their noise, through the middle
    of the window. The first sees what a window shorter than its requests live cannot show,
    the second what the cost of a step does not tell. Nor when many were given up.

    Source: ours; the criterion of a stable queue is that its mean has no trend.
    """
    waits = line.outcome != int(Outcome.REFUSED)
    # Stable sorting is linear on what is almost in order.
    due_s = np.sort(line.due_s[waits], kind="stable")
    if due_s.size < 2 or due_s[-1] <= due_s[0]:
        return True
    if line.count(Outcome.TIMED_OUT) > GROWTH_RATIO * due_s.size:
        return False
    offered = utilisation([line])
    if offered is not None and offered > 1 + _ROUNDING:
        return False
    return not _grows(due_s, _ends_s(line)[waits], offered or 0.0)


def _ends_s(line: Timelines) -> Floats:
    """Return when each request left the engine; what was given up at the end never did."""
    answered = line.completed | (line.outcome == int(Outcome.TRUNCATED))
    return np.where(answered, line.last_s, np.inf)


def _grows(due_s: Floats, ends_s: Floats, offered: float) -> bool:
    """Whether the requests in flight rise through the middle of the window.

    The middle begins when the first batch of requests has come and gone, and ends with the
    arrivals. An engine fills for some lives of a request, and the longer the nearer it is to
    what it can take; where the middle is shorter nothing can be told. What more arrivals in its
    second half explain is no growth, nor is a burst that is worked off.
    """
    finite = np.isfinite(ends_s)
    if not finite.any():
        return True
    life_s = float(ends_s[finite].mean()) - float(due_s[finite].mean())
    begin_s, end_s = float(due_s[0]) + life_s, float(due_s[-1])
    filling_s = FILLING_LIVES * life_s / max(1.0 - offered, MIN_SPARE)
    if end_s - begin_s < filling_s:
        return not finite.all()
    edges_s = np.linspace(begin_s, end_s, STRETCHES + 1)
    flight = _mean_in_flight(due_s, ends_s, edges_s)
    arrivals = np.diff(np.searchsorted(due_s, edges_s)) / np.diff(edges_s)
    half = STRETCHES // 2
    explained = arrivals * _life_s(due_s, ends_s, begin_s, (begin_s + end_s) / 2)
    excess = flight - explained
    growth = 2 * float(excess[half:].mean() - excess[:half].mean())
    limit = max(GROWTH_REQUESTS, GROWTH_RATIO * due_s.size, GROWTH_ERRORS * _noise(excess))
    return growth > limit and bool(flight[-1] >= flight[half:].mean())


def _mean_in_flight(due_s: Floats, ends_s: Floats, edges_s: Floats) -> Floats:
    """Return the mean number of requests in flight in each stretch between the edges.

    Shapes: [edges - 1]. Edges are as far from each other everywhere.
    """
    points = STRETCHES * 200
    width_s = (edges_s[-1] - edges_s[0]) / points

    def reached(instants_s: Floats) -> Ints:
        """Return how many instants have come at each point."""
        places = np.ceil((instants_s - edges_s[0]) * (1.0 / width_s)).clip(0, points)
        return np.bincount(places.astype(np.int64), minlength=points + 1)[:points].cumsum()

    count = reached(due_s) - reached(ends_s)
    means: Floats = count.reshape(STRETCHES, -1).mean(axis=1)
    return means


def _life_s(due_s: Floats, ends_s: Floats, begin_s: float, end_s: float) -> float:
    """Return the mean life of the requests due in a stretch; of those that ended."""
    mine = (due_s >= begin_s) & (due_s < end_s) & np.isfinite(ends_s)
    return float((ends_s - due_s)[mine].mean()) if mine.any() else 0.0


def _noise(excess: Floats) -> float:
    """Return the standard error of a growth between halves, from what is no trend."""
    places = np.arange(excess.size) - (excess.size - 1) / 2
    around = excess - excess.mean()
    left = around - places * (places @ around / (places @ places))
    spread = math.sqrt(float(left @ left) / (excess.size - 2))
    return 2 * spread * math.sqrt(4 / excess.size)
