"""Whether the simulator decides what the vLLM at hand decides, step for step, found by trying.

Both replay the same stretch of the user's own traffic; what is compared is every batch, every
queue and every block. Another vLLM may admit, book blocks or preempt otherwise; what comes of
that would look like any other prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import EngineError
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.profiles import Agreement
from tuner.shadow.reference import ReferenceReplay
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.stats import Floats
from tuner.traffic.traces import Trace

# Instants that differ by less are the same: sums of some thousand seconds in doubles.
SAME_S: Final = 1e-6
_COMPARED: Final = {
    "decode_seqs": "decoding sequences",
    "prefill_tokens": "prompt tokens",
    "decode_context_tokens": "tokens of context decoded from",
    "prefill_context_tokens": "tokens of context prefilled from",
    "decode_spread_tokens": "tokens by which contexts decoded from are apart",
    "running": "running requests",
    "waiting": "waiting requests",
    "preempted": "preempted requests",
    "cached_tokens": "tokens found in the prefix cache",
    "kv_peak_ratio": "share of the KV cache in use",
    "end_s": "seconds at its end",
}


def compare(
    engine: SimulatedEngine,
    trace: Trace,
    limits: EngineLimits,
    plan: ReplayPlan,
    reference: ReferenceReplay,
) -> Agreement:
    """Compare a replay of a trace with what vLLM's scheduler made of it, step by step.

    Raises: ShadowError.
    """
    own = replace(plan, keep_steps=True, cut=CutRule())
    try:
        found = simulate(engine, PreparedTrace(trace, plan), limits, own).kept_steps
    except EngineError as error:
        departs = "" if reference.error else f"a replay of it ends in: {error.message}"
        return Agreement(reference.vllm_version, 0, departs)
    if found is None:
        raise ValueError("the plan asked for the steps to be kept")
    if reference.steps is None:
        return Agreement(
            reference.vllm_version, 0, f"a replay of it ends in: {reference.error}"
        )
    wanted = reference.steps
    whole = int(found.repeats.sum())
    wanted = replace(wanted, kv_peak_ratio=_peaks(wanted.kv_usage_ratio, found.repeats))
    steps, departs = first_departure(singly(found, len(wanted)), wanted)
    if not departs and reference.is_whole and whole > len(wanted):
        departs = f"step {len(wanted) + 1}: vLLM has ended"
    return Agreement(reference.vllm_version, steps, departs)


def together(found: Sequence[Agreement]) -> Agreement:
    """Return several comparisons as one: the first departure, else all the steps that agreed.

    Raises: ValueError without any.
    """
    if not found:
        raise ValueError("nothing was compared")
    departed = next((one for one in found if one.departs), None)
    steps = sum(one.steps for one in found)
    return departed or Agreement(found[0].vllm_version, steps)


def singly(columns: StepColumns, most: int) -> StepColumns:
    """Return a row for each step, of as many as asked for, where a row stands for like ones.

    The instants of the steps within a row are not kept: theirs are nan. So is the usage, but
    for the last, which has the most of its row.
    """
    times = columns.repeats.astype(np.int64)
    rows = int(np.searchsorted(np.cumsum(times), most)) + 1
    times = times[:rows]
    at = np.repeat(np.arange(times.size), times)
    within = np.arange(at.size) - np.repeat(np.cumsum(times) - times, times)
    is_last = within == times[at] - 1
    picked = {name: getattr(columns, name)[at] for name in StepColumns.__dataclass_fields__}
    picked["decode_context_tokens"] += within * picked["decode_seqs"]
    picked["end_s"] = np.where(is_last, picked["end_s"], np.nan)
    picked["kv_peak_ratio"] = np.where(is_last, picked["kv_peak_ratio"], np.nan)
    picked["repeats"] = np.ones(at.size)
    return StepColumns(**{name: column[:most] for name, column in picked.items()})


def _peaks(usage: Floats, repeats: Floats) -> Floats:
    """Return the most of each row of like steps, which hold so many, in place of its last.

    Shapes: usage and what is returned are [steps], repeats [rows].
    """
    ends = np.cumsum(repeats).astype(np.int64)
    ends = ends[ends <= usage.size]
    peaks = usage.copy()
    if ends.size:
        peaks[ends - 1] = np.maximum.reduceat(usage[: ends[-1]], np.r_[0, ends[:-1]])
    return peaks


def first_departure(found: StepColumns, wanted: StepColumns) -> tuple[int, str]:
    """Return how many steps agree from the first on, and what differs in the one after.

    Shapes: a row a step; where found has nan, nothing is compared.
    """
    first, what = len(wanted), ""
    if len(found) < len(wanted):
        first, what = len(found), f"step {len(found) + 1}: the simulator has ended"
    for name, words in _COMPARED.items():
        differs = _differs(getattr(found, name), getattr(wanted, name))
        at = int(np.argmax(differs)) if differs.any() else first
        if at < first:
            here, there = getattr(found, name)[at], getattr(wanted, name)[at]
            first = at
            what = f"step {at + 1}: {words}: {here:g} simulated, {there:g} by vLLM"
    return first, what


def _differs(found: Floats, wanted: Floats) -> NDArray[np.bool_]:
    both = min(found.size, wanted.size)
    known = ~np.isnan(found[:both])
    apart: NDArray[np.bool_] = known & (np.abs(found[:both] - wanted[:both]) > SAME_S)
    return apart
