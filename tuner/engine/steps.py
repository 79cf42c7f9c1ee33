"""What the engine's steps did and how long they took, as columns.

The log is what decode-step time, queue depth, KV usage and the noise share are computed from,
and what a step-time model can be fitted to. It draws no conclusion beyond the noise share.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.engine.protocol import Step

Floats = NDArray[np.float64]

# A step is distorted when it took half as long again as the median of its like: ours; the
# steps of one batch size repeat within a few percent on an undisturbed core.
DISTORTED_RATIO = 1.5
# Like steps: same number of decoding sequences, at least this many of them (ours).
LIKE_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepColumns:
    """One row per step that completed a batch or passed time.

    Shapes: every column is [steps].
    Units: seconds on the replay's clock, tokens, sequences, ratios in 0 to 1.
    """

    end_s: Floats
    duration_s: Floats
    decode_seqs: Floats
    prefill_tokens: Floats
    decode_context_tokens: Floats
    prefill_context_tokens: Floats
    running: Floats
    waiting: Floats
    kv_usage_ratio: Floats
    preempted: Floats
    cached_tokens: Floats

    def __len__(self) -> int:
        return int(self.end_s.size)

    @property
    def is_decode_only(self) -> NDArray[np.bool_]:
        """Mark the steps in which nothing but decoding happened."""
        mask: NDArray[np.bool_] = (self.decode_seqs > 0) & (self.prefill_tokens == 0)
        return mask

    def distorted_ratio(self) -> float | None:
        """Return the share of comparable steps that the machine's noise stretched.

        Only steps that decode alone can be compared with their like, so only they count;
        None when there are too few of them.
        """
        alone = self.is_decode_only
        seqs, took_s = self.decode_seqs[alone], self.duration_s[alone]
        compared = distorted = 0
        for n in np.unique(seqs):
            like_s = took_s[seqs == n]
            if like_s.size >= LIKE_STEPS:
                compared += like_s.size
                distorted += int((like_s > DISTORTED_RATIO * np.median(like_s)).sum())
        return distorted / compared if compared else None


class StepLog:
    """Collects steps while a replay runs."""

    def __init__(self) -> None:
        self._rows = array("d")

    def append(self, step: Step, end_s: float) -> None:
        """Note one step that ended at end_s on the replay's clock."""
        batch = step.batch
        self._rows.extend((end_s, step.duration_s))
        if batch is None:
            self._rows.extend((0.0, 0.0, 0.0, 0.0))
        else:
            self._rows.extend(
                (
                    float(batch.decode_seqs),
                    float(batch.prefill_tokens),
                    float(batch.decode_context_tokens),
                    float(batch.prefill_context_tokens),
                )
            )
        self._rows.extend((float(step.running), float(step.waiting), step.kv_usage_ratio))
        self._rows.extend(
            (0.0, 0.0) if batch is None else (batch.preempted, batch.cached_tokens)
        )

    def finish(self) -> StepColumns:
        """Return the log as columns."""
        width = len(StepColumns.__dataclass_fields__)
        table = np.array(self._rows, dtype=np.float64).reshape(-1, width)
        return StepColumns(*(np.ascontiguousarray(table[:, i]) for i in range(width)))
