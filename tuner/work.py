"""How long the offered requests keep an engine busy, each of them and at a given setting.

Answers how far an engine is from being overloaded, also where a replay was too short for its
queue to show that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.arrays import Floats
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepSummary
from tuner.timeline import Outcome, Timelines
from tuner.traffic.traces import Trace


def offered_work_s(
    trace: Trace, lines: Timelines, steps: StepSummary, limits: EngineLimits, most: float
) -> Floats:
    """Return for each request how long the engine is busy with it when its batches are full.

    What a step, a decoding sequence and a prompt token cost is taken from the replay's own
    steps; a step is shared by as many sequences as the limits and the KV cache hold, `most`
    at most, also where the replay was too short to fill its batches. Prompt tokens count as
    they were computed: less what the prefix cache held, more what preemption repeated.

    Shapes: [n]; 0 for refused requests, nan where no step was seen.
    Units: seconds.
    """
    answered = lines.output_tokens > 0
    if not steps.steps or not answered.any():
        return np.full(len(lines), math.nan)
    wanted = lines.outcome != int(Outcome.REFUSED)
    prompts = np.where(wanted, trace.prompt_tokens, 0).astype(np.float64)
    outputs = np.where(wanted, trace.output_tokens, 0).astype(np.float64)
    computed = prompts * (steps.prefill_tokens / max(float(prompts[answered].sum()), 1.0))
    seqs = min(limits.max_num_seqs, _seqs_in_cache(steps), most)
    by_decodes, by_prefills = outputs / seqs, computed / limits.max_num_batched_tokens
    needed = by_decodes if by_decodes.sum() >= by_prefills.sum() else by_prefills
    costs = steps.costs
    decodes = np.maximum(outputs - 1, 0)
    work_s: Floats = (
        costs.base_s * needed + costs.decode_s * decodes + costs.prefill_s * computed
    )
    return work_s


def _seqs_in_cache(steps: StepSummary) -> float:
    """Return how many sequences as these a full KV cache holds, without end if unknown."""
    running, usage = steps.levels["running"], steps.levels["kv_usage_ratio"]
    used = float(usage.values @ usage.weights)
    return max(1.0, float(running.values @ running.weights) / used) if used > 0 else math.inf


def utilisation(lines: Sequence[Timelines]) -> float | None:
    """Return the offered work over the time in which it was offered, 1 and more is overload.

    Pooled over the windows of a replay. None where it cannot be told: without steps, without a
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


def pace_s(lines: Timelines) -> float:
    """Return the middle time per output token, also of unfinished answers; 0 if unknown."""
    begun = lines.output_tokens >= 2
    gaps = lines.output_tokens[begun] - 1
    each_s = (lines.last_s[begun] - lines.first_s[begun]) / gaps
    return float(np.median(each_s)) if each_s.size else 0.0
