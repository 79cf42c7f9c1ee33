"""Batches whose end an asynchronous engine's host noticed late, and what each of them took.

With asynchronous scheduling the host launches the next batch before it waits for the one on its
way. Where launching takes longer than what is on its way, a prompt without a graph beside few
decodes say, the end of that is noticed late: it seems to take longer than it did, and the next
one as much less. A model that is fitted to such steps takes the long ones for stalls, leaves
them out, and believes the short ones. Their sum is right, however they are told apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.engine.steps import StepColumns, chains
from tuner.stats import Floats

PASSES = 4
"""How often times are told apart anew by what was learnt of them: ours, since a step that only
decodes is known from those that were noticed in time, and the others follow from it."""


def told_apart(steps: StepColumns, predicted_s: Floats) -> StepColumns:
    """Return the steps with the time of each chain given to its batches as predicted.

    `predicted_s` is what each row is thought to take. A turn that launched the first batch has
    no time of its own then, one that tidied up keeps its own.

    Shapes: predicted_s is [rows].
    """
    is_late, has_batch = steps.is_late > 0, steps.has_batch
    if not is_late.any():
        return steps
    of, is_shared = chains(steps), has_batch | is_late
    wanted_s = np.where(has_batch, predicted_s * steps.repeats, 0.0)
    took_s = np.where(is_shared, steps.duration_s, 0.0)
    ratio = np.bincount(of, took_s) / np.maximum(np.bincount(of, wanted_s), 1e-12)
    return replace(
        steps, duration_s=np.where(is_shared, wanted_s * ratio[of], steps.duration_s)
    )
