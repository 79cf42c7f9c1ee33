"""When to act on a verdict: minimum gain, minimum time between changes, the same verdict again.

Pure: a memory, a proposal and the time go in, an act and the next memory come out. What to
propose is left to `check`, doing it to `loop`.

Tried and given up: counting a verdict again only if its best is the very same configuration.
Two samples of the same traffic often differ by a step of the ladder, and nothing was ever done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from tuner.engine.protocol import EngineLimits
from tuner.errors import UsageError

ALIKE_RATIO: Final = 2.0
"""Ours: the step of the default ladder of caps; limits within it are one verdict."""


class Act(StrEnum):
    """What to do about a verdict, and why not more."""

    NONE = "nothing to change"
    TOO_SMALL = "the gain is below the minimum"
    BARRED = "it was rolled back before, and the profile is still the same"
    CONFIRM = "waiting for the same verdict again"
    GUARDED = "the last change is still on probation"
    TOO_SOON = "the last change was too recent"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Policy:
    """What it takes to act.

    Raises: UsageError for a value that makes no sense.
    """

    least_gain_ratio: float = 0.05
    least_interval_s: float = 6 * 3600.0
    confirmations: int = 2

    def __post_init__(self) -> None:
        """Refuse what could never, or would always, act."""
        if not 0 <= self.least_gain_ratio < 1:
            raise UsageError(
                f"--min-gain must be from 0% to below 100%, got {self.least_gain_ratio:.0%}"
            )
        if not self.least_interval_s >= 0:
            raise UsageError(
                f"--min-interval must be at least 0 s, got {self.least_interval_s}"
            )
        if self.confirmations < 1:
            raise UsageError(f"--confirmations must be at least 1, got {self.confirmations}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A re-tune that pays: what to change to, and what that gains.

    `meets_more` says that it meets what the present configuration does not; then no gain is
    too small.
    """

    limits: EngineLimits
    gain_ratio: float
    meets_more: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """What of earlier verdicts and changes matters to the next act.

    Units: Unix seconds.
    """

    pending: EngineLimits | None = None
    confirmed: int = 0
    last_change_s: float | None = None
    barred: tuple[EngineLimits, ...] = ()


def decide(
    policy: Policy, memory: Memory, proposal: Proposal | None, now_s: float, *, on_guard: bool
) -> tuple[Act, Memory]:
    """Return what to do about a verdict; None is the verdict that nothing pays.

    No verdict at all, as from partial data, is not to be brought here: it neither confirms nor
    refutes.
    """
    if memory.last_change_s is not None and memory.last_change_s > now_s:
        # The clock was put back: wait from now on, not until it has caught up.
        memory = replace(memory, last_change_s=now_s)
    reason = _against(policy, memory, proposal)
    if proposal is None or reason is not None:
        return reason or Act.NONE, replace(memory, pending=None, confirmed=0)
    is_again = memory.pending is not None and alike(proposal.limits, memory.pending)
    confirmed = memory.confirmed + 1 if is_again else 1
    kept = replace(memory, pending=proposal.limits, confirmed=confirmed)
    if confirmed < policy.confirmations:
        return Act.CONFIRM, kept
    if on_guard:
        return Act.GUARDED, kept
    return (Act.TOO_SOON if _waits_s(policy, kept, now_s) > 0 else Act.CHANGE), kept


def changed(memory: Memory, now_s: float) -> Memory:
    """Return the memory after a change was made."""
    return replace(memory, pending=None, confirmed=0, last_change_s=now_s)


def rolled_back(memory: Memory, limits: EngineLimits, now_s: float) -> Memory:
    """Return the memory after a change to the limits was taken back.

    The profile was wrong about them and would be again, so they are barred for as long as it
    is used.
    """
    after = changed(memory, now_s)
    if limits in after.barred:
        return after
    return replace(after, barred=(*after.barred, limits))


def alike(one: EngineLimits, other: EngineLimits) -> bool:
    """Tell whether two pairs of limits are one verdict.

    >>> alike(EngineLimits(8, 2048), EngineLimits(16, 2048))
    True
    >>> alike(EngineLimits(8, 2048), EngineLimits(17, 2048))
    False
    """
    pairs = (
        (one.max_num_seqs, other.max_num_seqs),
        (one.max_num_batched_tokens, other.max_num_batched_tokens),
    )
    return all(max(pair) <= ALIKE_RATIO * min(pair) for pair in pairs)


def _against(policy: Policy, memory: Memory, proposal: Proposal | None) -> Act | None:
    """Return why a proposal does not even count, None where it does."""
    if proposal is None:
        return Act.NONE
    if any(alike(proposal.limits, barred) for barred in memory.barred):
        return Act.BARRED
    is_small = proposal.gain_ratio < policy.least_gain_ratio
    return Act.TOO_SMALL if is_small and not proposal.meets_more else None


def _waits_s(policy: Policy, memory: Memory, now_s: float) -> float:
    """Return how long the last change still forbids the next."""
    if memory.last_change_s is None:
        return 0.0
    return memory.last_change_s + policy.least_interval_s - now_s
