"""What batches take the device where an asynchronous host launches the next one meanwhile.

With asynchronous scheduling the host launches a batch before it waits for the one on its way.
The device begins with it once that one is done, and is done no sooner than the launch. Where
launching takes longer than what is on its way, a prompt without a graph beside few decodes say,
the end of that is noticed late: it seems to take longer than it did, and the next one as much
less. A model that is fitted to such steps takes the long ones for stalls, leaves them out, and
believes the short ones. Of a batch that was noticed in time is known what it took, if it is
known when the one before was done; of one that was noticed late, that it took no longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tuner.engine.steps import NO_WAIT_S, StepColumns
from tuner.stats import Floats

PASSES = 4
"""How often what batches took is found anew by what was learnt of them: ours, since a step that
only decodes is known from those that were noticed in time, and others follow from it."""
# Of a kind with fewer that are known, those noticed late took as long as they seemed: ours.
_LEAST_KNOWN = 20


def on_device(
    replays: Sequence[StepColumns], predicted_s: Sequence[Floats]
) -> list[StepColumns]:
    """Return the steps of which is known what they took the device, with that as duration.

    `predicted_s` is what each row is thought to take: by it those that were noticed late end,
    and the ones after them begin. They are left out, but for those that were done sooner than
    thought, which take what they had at most. Steps that were noticed in time after another
    stay as they are; the turn that launched the first batch is left out.

    Shapes: a replay and its predictions each [rows].
    """
    if not any(steps.is_late.any() for steps in replays):
        return list(replays)
    found = [
        _Told.of(steps, each_s) for steps, each_s in zip(replays, predicted_s, strict=True)
    ]
    for has_prompt in (True, False):
        if sum(one.known(has_prompt=has_prompt) for one in found) < _LEAST_KNOWN:
            found = [one.as_they_seemed(has_prompt=has_prompt) for one in found]
    return [replace(o.steps, duration_s=o.most_s).take(o.is_known) for o in found]


@dataclass(frozen=True, slots=True)
class _Told:
    """Steps with what the device had for each at most, and of which that is what it took."""

    steps: StepColumns
    most_s: Floats
    is_known: NDArray[np.bool_]

    @classmethod
    def of(cls, steps: StepColumns, predicted_s: Floats) -> Self:
        """Follow each chain of late steps to the one after it."""
        is_late, most_s = steps.is_late > 0, steps.duration_s.copy()
        is_known = ~is_late
        begins = is_late & ~np.concatenate([[False], is_late[:-1]])[: len(steps)]
        for row in np.flatnonzero(begins).tolist():
            end = _follow(steps, predicted_s, most_s, row)
            # Its own launch held it up, and no other launch made that seem late.
            is_known[end : end + 1] = steps.duration_s[end : end + 1] > NO_WAIT_S
        is_sooner = is_late & steps.has_batch & (most_s < predicted_s)
        return cls(steps, most_s, is_known | (is_sooner & cls._says_anything(steps)))

    @staticmethod
    def _says_anything(steps: StepColumns) -> NDArray[np.bool_]:
        """Mark the steps after whose launch another was: of the last of all nothing is seen."""
        mask: NDArray[np.bool_] = steps.duration_s > NO_WAIT_S
        return mask

    def known(self, *, has_prompt: bool) -> int:
        """Return of how many steps with a prompt, or without, is known what they took."""
        is_like = self.steps.has_batch & ((self.steps.prefill_tokens > 0) == has_prompt)
        return int((is_like & self.is_known).sum())

    def as_they_seemed(self, *, has_prompt: bool) -> Self:
        """Return them with all steps with a prompt, or without, as long as they had at most."""
        is_like = self.steps.has_batch & ((self.steps.prefill_tokens > 0) == has_prompt)
        is_like &= self._says_anything(self.steps)
        return replace(self, is_known=self.is_known | is_like)


def _follow(steps: StepColumns, predicted_s: Floats, most_s: Floats, row: int) -> int:
    """Follow a chain from its first late row to the one noticed in time; return that.

    Notes what the device had for each at most, which the last one took. Time is counted from
    the beginning of the first row's turn, by when the device has nothing else.
    """
    began_s, device_s, launched_from_s = 0.0, 0.0, -math.inf
    while row < len(steps):
        noticed_s = began_s + float(steps.duration_s[row])
        begins_s = max(device_s, launched_from_s)
        has_batch = steps.decode_seqs[row] or steps.prefill_tokens[row]
        if has_batch:
            most_s[row] = noticed_s - begins_s
        if not steps.is_late[row]:
            return row
        if has_batch:
            ends_s = max(
                begins_s + float(predicted_s[row]),
                launched_from_s + float(steps.launch_s[row]),
            )
            device_s = min(ends_s, noticed_s)
        launched_from_s, began_s = began_s, noticed_s
        row += 1
    return row
