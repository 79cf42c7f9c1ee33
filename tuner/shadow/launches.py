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
from tuner.shadow.fit import MIN_STEPS
from tuner.stats import Floats

PASSES = 4
"""How often what batches took is found anew by what was learnt of them: ours, since a step that
only decodes is known from those that were noticed in time, and others follow from it."""
# Of a kind of which fewer were noticed in time, those noticed late took as long as they seemed:
# ours. Those done sooner than thought are no measure of that alone: what is thought of the next
# ones would be the shorter for each that was left out.
_LEAST_IN_TIME = 20


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
    kinds = [
        has_prompt
        for has_prompt in (True, False)
        if sum(one.in_time(has_prompt=has_prompt) for one in found) < _LEAST_IN_TIME
    ]
    if sum(one.told.sum() for one in found) < MIN_STEPS:
        kinds = [True, False]
    for has_prompt in kinds:
        found = [
            one.as_they_seemed(each_s, has_prompt=has_prompt)
            for one, each_s in zip(found, predicted_s, strict=True)
        ]
    return [replace(one.steps, duration_s=one.most_s).take(one.told) for one in found]


@dataclass(frozen=True, slots=True)
class _Told:
    """Steps with what the device had for each at most, and of which that is what it took.

    Of those noticed in time it is, and of those done sooner than thought.
    """

    steps: StepColumns
    most_s: Floats
    is_in_time: NDArray[np.bool_]
    is_taken: NDArray[np.bool_]

    @classmethod
    def of(cls, steps: StepColumns, predicted_s: Floats) -> Self:
        """Follow each chain of late steps to the one after it."""
        is_late, most_s = steps.is_late > 0, steps.duration_s.copy()
        is_in_time = ~is_late
        begins = is_late & ~np.concatenate([[False], is_late[:-1]])[: len(steps)]
        for row in np.flatnonzero(begins).tolist():
            end = _follow(steps, predicted_s, most_s, row)
            # Its own launch held it up, and no other launch made that seem late.
            is_in_time[end : end + 1] = steps.duration_s[end : end + 1] > NO_WAIT_S
        is_sooner = is_late & steps.has_batch & (most_s < predicted_s)
        return cls(steps, most_s, is_in_time, is_sooner & cls._says_anything(steps))

    @staticmethod
    def _says_anything(steps: StepColumns) -> NDArray[np.bool_]:
        """Mark the steps after whose launch another was: of the last of all nothing is seen."""
        mask: NDArray[np.bool_] = steps.duration_s > NO_WAIT_S
        return mask

    @property
    def told(self) -> NDArray[np.bool_]:
        """Mark the steps of which is known, or taken to be, what they took."""
        mask: NDArray[np.bool_] = self.is_in_time | self.is_taken
        return mask

    def in_time(self, *, has_prompt: bool) -> int:
        """Return how many steps with a prompt, or without, were noticed in time."""
        is_like = self.steps.has_batch & ((self.steps.prefill_tokens > 0) == has_prompt)
        return int((is_like & self.is_in_time).sum())

    def as_they_seemed(self, predicted_s: Floats, *, has_prompt: bool) -> Self:
        """Return them with all steps with a prompt, or without, taking what they had at most.

        Or what they are thought to take, where that is less and anything is thought of them:
        then nothing is learnt of them, but that there are such.
        """
        is_like = self.steps.has_batch & ((self.steps.prefill_tokens > 0) == has_prompt)
        is_like &= self._says_anything(self.steps)
        is_open = is_like & ~self.told & (predicted_s > 0)
        most_s = np.where(is_open, np.minimum(self.most_s, predicted_s), self.most_s)
        return replace(self, most_s=most_s, is_taken=self.is_taken | is_like)


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
                begins_s + float(predicted_s[row]), launched_from_s + float(steps.launch_s[row])
            )
            device_s = min(ends_s, noticed_s)
        launched_from_s, began_s = began_s, noticed_s
        row += 1
    return row
