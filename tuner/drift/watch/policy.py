"""When to act on a verdict: minimum gain, minimum time between changes, the same verdict again.

Pure: a memory, a proposal and the time go in, an act and the next memory come out.

The same verdict again is one on traffic of its own: checks that look back six hours every
quarter of an hour share nearly all of it, and whatever chance or an odd hour did to one of them
it does to the next. So a verdict stands only once later traffic alone gives the same, which
begins a sixth of what a check looks back at after the verdict: an odd stretch that lasted no
longer is over by then.

Tried and given up: counting a verdict again only if its best is the very same configuration.
Two samples of the same traffic often differ by a step of the ladder, and nothing was ever done.
Letting later traffic begin with the verdict: an odd hour of which each of the two checks has a
half gets its way. Dropping a verdict at once when later traffic does not bear it out: a quarter
of an hour rarely shows what six hours do, and nothing was ever done either; it is dropped when
what a check looks back at does not bear it out any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError

ALIKE_RATIO: Final = 2.0
"""Ours: the step of the default ladder of caps; limits within it are one verdict."""

ODD_SHARE: Final = 1 / 6
"""Ours: of the default six hours an hour; what lasts no longer never changes anything."""

MIN_SHARE: Final = 1 / 24
"""Ours: of the default six hours a quarter; a minute's burst is no traffic to tune for."""


class Act(StrEnum):
    """What to do about a verdict, and why not more."""

    NONE = "nothing to change"
    TOO_SMALL = "the gain is below the minimum"
    BARRED = "it was rolled back before, and the profile is still the same"
    CONFIRM = "waiting for the same verdict on later traffic"
    GUARDED = "the last change is still on probation"
    TOO_SOON = "the last change was too recent"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Policy:
    """What it takes to act.

    Units: seconds; since_s is how far a check looks back, min_s the shortest traffic to check.
    Raises: UsageError for a value that makes no sense.
    """

    min_gain_ratio: float = 0.05
    min_interval_s: float = 6 * 3600.0
    confirmations: int = 2
    since_s: float = 6 * 3600.0
    min_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what could never, or would always, act."""
        if not 0 <= self.min_gain_ratio < 1:
            raise UsageError(
                f"--min-gain must be from 0% to below 100%, got {self.min_gain_ratio:.0%}"
            )
        if not self.min_interval_s >= 0:
            raise UsageError(f"--min-interval must be at least 0 s, got {self.min_interval_s}")
        if self.confirmations < 1:
            raise UsageError(f"--confirmations must be at least 1, got {self.confirmations}")

    @property
    def min_later_s(self) -> float:
        """How long later traffic must be before it is checked."""
        return max(self.min_s, MIN_SHARE * self.since_s)


@dataclass(frozen=True, slots=True)
class ChangeProposal:
    """A re-tune that pays: what to change to, from what, and what that gains, perhaps inf.

    `meets_more`: it meets a demand that the current configuration does not; then no gain is too
    small.
    """

    limits: EngineLimits
    gain_ratio: float
    meets_more: bool = False
    against: EngineLimits | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What of earlier verdicts and changes matters to the next act.

    `pending` is what the standing verdict proposes in place of `against`, `verdict_s` when it
    was first given or last confirmed, `confirmed` how often it was given on traffic of its own.

    Units: Unix seconds.
    """

    pending: EngineLimits | None = None
    confirmed: int = 0
    last_change_s: float | None = None
    barred: tuple[EngineLimits, ...] = ()
    verdict_s: float | None = None
    against: EngineLimits | None = None


def next_act(
    policy: Policy,
    memory: Memory,
    proposal: ChangeProposal | None,
    now_s: float,
    *,
    on_guard: bool,
) -> tuple[Act, Memory]:
    """Return what to do about a verdict; None is the verdict that nothing pays.

    For verdicts only: partial data, which has none, neither confirms nor refutes.
    """
    memory = _not_ahead(memory, now_s)
    if proposal is None:
        return Act.NONE, forgotten(memory)
    if reason := _against(policy, memory, proposal):
        return reason, forgotten(memory)
    if _is_pending(memory, proposal):
        # The verdict goes on from when it was given, the limits from what they are by now.
        memory = replace(memory, pending=proposal.limits)
    else:
        memory = replace(
            memory,
            pending=proposal.limits,
            against=proposal.against,
            confirmed=1,
            verdict_s=now_s,
        )
    if memory.confirmed < policy.confirmations:
        return Act.CONFIRM, memory
    return _unless_waiting(policy, memory, now_s, on_guard=on_guard), memory


def later_from_s(policy: Policy, memory: Memory, now_s: float) -> float | None:
    """Return from when on traffic can confirm the standing verdict; None while there is none.

    It grows until it holds enough, but reaches no further back than any check does.

    Units: Unix seconds.
    """
    if memory.verdict_s is None:
        return None
    from_s = memory.verdict_s + ODD_SHARE * policy.since_s
    if now_s - from_s < policy.min_later_s:
        return None
    return max(from_s, now_s - policy.since_s)


def confirm(
    policy: Policy,
    memory: Memory,
    proposal: ChangeProposal | None,
    now_s: float,
    *,
    on_guard: bool,
) -> tuple[Act, Memory]:
    """Return what to do about the verdict on later traffic alone.

    While something else forbids the change, it renews the standing verdict and does not add
    to it: what is acted on in the end is a verdict on the traffic of then.
    """
    is_same = (
        proposal is not None
        and _against(policy, memory, proposal) is None
        and _is_pending(memory, proposal)
    )
    if not is_same:
        return Act.CONFIRM, memory
    again = replace(memory, verdict_s=now_s)
    more = replace(again, confirmed=memory.confirmed + 1)
    if more.confirmed < policy.confirmations:
        return Act.CONFIRM, more
    act = _unless_waiting(policy, memory, now_s, on_guard=on_guard)
    return act, more if act is Act.CHANGE else again


def forgotten(memory: Memory) -> Memory:
    """Return the memory without the standing verdict."""
    return replace(memory, pending=None, against=None, confirmed=0, verdict_s=None)


def changed(memory: Memory, now_s: float) -> Memory:
    """Return the memory after a change was made."""
    return replace(forgotten(memory), last_change_s=now_s)


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
    """Return whether two pairs of limits are one verdict.

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


def _against(policy: Policy, memory: Memory, proposal: ChangeProposal) -> Act | None:
    """Return why a proposal does not even count, None where it does."""
    if any(alike(proposal.limits, barred) for barred in memory.barred):
        return Act.BARRED
    is_small = proposal.gain_ratio < policy.min_gain_ratio
    return Act.TOO_SMALL if is_small and not proposal.meets_more else None


def _is_pending(memory: Memory, proposal: ChangeProposal) -> bool:
    """Return whether a proposal is that of the standing verdict."""
    if memory.pending is None:
        return False
    return alike(proposal.limits, memory.pending) and proposal.against == memory.against


def _not_ahead(memory: Memory, now_s: float) -> Memory:
    """Return the memory for a clock that was put back: waiting begins anew."""

    def past(at_s: float | None) -> float | None:
        return None if at_s is None else min(at_s, now_s)

    return replace(
        memory, last_change_s=past(memory.last_change_s), verdict_s=past(memory.verdict_s)
    )


def _unless_waiting(policy: Policy, memory: Memory, now_s: float, *, on_guard: bool) -> Act:
    """Return the change, or what still forbids it."""
    if on_guard:
        return Act.GUARDED
    last_s = -math.inf if memory.last_change_s is None else memory.last_change_s
    return Act.TOO_SOON if last_s + policy.min_interval_s > now_s else Act.CHANGE
