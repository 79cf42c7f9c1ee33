"""Race the finalists against the present configuration until evidence separates them.

Every round replays the same requests on every configuration that is still in, in turns, so
that the machine's drift hits all alike. Intervals are paired by round and corrected for
looking several times. Says who won and by how much; finding finalists is left to `search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner import stats
from tuner.engine.protocol import EngineLimits
from tuner.objective import Score, Tier
from tuner.stats import Estimate

# Three rounds are the fewest with a usable interval; eight separate a few percent on a noisy
# machine, beyond which the budget is better spent elsewhere: ours.
LEAST_ROUNDS = 3
MOST_ROUNDS = 8
# Wrongly separating two equal configurations at any of the looks: 5 % in all (Bonferroni).
ERROR_RATE = 0.05
LOOKS = MOST_ROUNDS - LEAST_ROUNDS + 1
CONFIDENCE_PER_LOOK = 1 - ERROR_RATE / LOOKS
# One look suffices to drop who is worse by more than this; for less the next has to agree, so
# that noise alone ends fewer races between equals: ours.
FAR_RATIO = 0.10
# Two configurations whose whole interval lies within this of equality tie for good: ours.
EQUAL_RATIO = 0.02


class Verdict(StrEnum):
    """What to do with the present configuration."""

    CHANGE = "change"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class RaceRun:
    """One finalist's replay in one round."""

    limits: EngineLimits
    round: int
    score: Score


@dataclass(frozen=True, slots=True)
class Decision:
    """The race's outcome.

    `gain` is the ratio winner / present of the score's value (less is better) with its
    interval, None when they are not comparable by value; `tied` are those that the evidence
    cannot tell from the best.
    """

    verdict: Verdict
    winner: EngineLimits
    best: EngineLimits
    tied: tuple[EngineLimits, ...]
    gain: Estimate | None
    rounds: int
    why: str

    @property
    def shown(self) -> EngineLimits:
        """Whose gain is told: the one to change to, or the best there was to keep from."""
        return self.winner if self.verdict is Verdict.CHANGE else self.best


def _by_round(runs: Sequence[RaceRun], limits: EngineLimits) -> dict[int, Score]:
    return {run.round: run.score for run in runs if run.limits == limits}


def _paired(
    runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits
) -> tuple[list[Score], list[Score]]:
    """Return the scores of the rounds that both ran."""
    ours, theirs = _by_round(runs, a), _by_round(runs, b)
    shared = sorted(set(ours) & set(theirs))
    return [ours[r] for r in shared], [theirs[r] for r in shared]


def compare(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> int:
    """Return -1 if a is separated as better, 1 if b is, 0 if the evidence cannot tell.

    Different tiers separate only when every shared round agrees on the order. Where the tiers
    of some rounds differ, the values must separate and no tier may speak against them.
    """
    ours, theirs = _paired(runs, a, b)
    if len(ours) < LEAST_ROUNDS:
        return 0
    signs = {_tier_sign(x, y) for x, y in zip(ours, theirs, strict=True)}
    if signs in ({-1}, {1}):
        return signs.pop()
    gain = _across_tiers(runs, a, b)
    if gain is None or gain.low is None or gain.high is None:
        return 0
    side = -1 if gain.high < 1 else 1 if gain.low > 1 else 0
    return 0 if -side in signs - {0} else side


def _across_tiers(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> Estimate | None:
    """Return the paired ratio a / b by what the lowest tier of any round is judged by.

    A configuration at the edge of what it sustains is in one tier in some rounds and in
    another in others; None where the two have nothing in common.
    """
    ours, theirs = _paired(runs, a, b)
    if len(ours) < 2:
        return None
    lowest = max((*ours, *theirs), key=lambda score: score.tier)
    if lowest.tier in (Tier.CUT, Tier.FAILED):
        return None
    values = [score.value_of(lowest.metric) for score in (*ours, *theirs)]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    half = len(ours)
    return stats.paired_ratio(known[:half], known[half:], CONFIDENCE_PER_LOOK)


def _tier_sign(a: Score, b: Score) -> int:
    return (a.tier > b.tier) - (a.tier < b.tier)


def ratio(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> Estimate | None:
    """Return the paired ratio a / b of the scores' values, or None if not comparable."""
    ours, theirs = _paired(runs, a, b)
    if len(ours) < 2:
        return None
    if len({score.metric for score in (*ours, *theirs)}) != 1:
        return None
    if any(score.tier in (Tier.CUT, Tier.FAILED) for score in (*ours, *theirs)):
        return None
    return stats.paired_ratio(
        [score.value for score in ours], [score.value for score in theirs], CONFIDENCE_PER_LOOK
    )


def _is_equal(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> bool:
    """Whether two configurations are shown to differ by less than matters."""
    gain = ratio(runs, a, b)
    if gain is None or gain.low is None or gain.high is None or gain.n < LEAST_ROUNDS:
        return False
    return gain.low > 1 - EQUAL_RATIO and gain.high < 1 + EQUAL_RATIO


def _leader(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> EngineLimits | None:
    """Return who has the best middle round so far."""
    medians = []
    for limits in field:
        scores = sorted(_by_round(runs, limits).values(), key=lambda s: s.order)
        if scores:
            medians.append((scores[len(scores) // 2].order, limits))
    return min(medians)[1] if medians else None


def survivors(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return who is not yet shown to be worse than the leader by more than matters.

    Shapes: in the field's order.
    """
    best = _leader(runs, field)
    if best is None:
        return list(field)
    return [
        limits
        for limits in field
        if limits == best or compare(runs, best, limits) >= 0 or _is_equal(runs, best, limits)
    ]


def _still_in(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return the survivors, and who is worse than the leader neither by far nor a look before.

    Shapes: in the field's order.
    """
    best, inside = _leader(runs, field), survivors(runs, field)
    last = max((run.round for run in runs), default=0)
    before = [run for run in runs if run.round < last]
    return [
        limits
        for limits in field
        if limits in inside
        or best is None
        or not (_is_far(runs, best, limits) or compare(before, best, limits) < 0)
    ]


def _is_far(runs: Sequence[RaceRun], best: EngineLimits, other: EngineLimits) -> bool:
    """Whether the other is of a worse tier, or worse by FAR_RATIO at least."""
    gain = _across_tiers(runs, best, other)
    return gain is None or (gain.high is not None and gain.high < 1 / (1 + FAR_RATIO))


def next_run(
    runs: Sequence[RaceRun],
    field: Sequence[EngineLimits],
    present: EngineLimits,  # noqa: ARG001 - callers pass what they pass to decide
) -> tuple[int, EngineLimits] | None:
    """Return the round and the configuration to replay next, or None when all is decided.

    The order rotates from round to round. The present configuration stays in until it is
    separated or shown to be equal, because the gain is measured against it.
    """
    if len(field) < 2:
        return None
    for number in range(1, MOST_ROUNDS + 1):
        before = [run for run in runs if run.round < number]
        inside = _still_in(before, field) if number > LEAST_ROUNDS else list(field)
        if number > LEAST_ROUNDS and _decided(before, inside):
            return None
        turn = number % len(inside)
        ran = {run.limits for run in runs if run.round == number}
        for limits in (*inside[turn:], *inside[:turn]):
            if limits not in ran:
                return number, limits
    return None


def _decided(runs: Sequence[RaceRun], inside: Sequence[EngineLimits]) -> bool:
    """Whether more rounds could not change the answer by more than matters."""
    best = _leader(runs, inside)
    if best is None or len(inside) == 1:
        return True
    return all(_is_equal(runs, limits, best) for limits in inside if limits != best)


def _why_tied(runs: Sequence[RaceRun], best: EngineLimits, present: EngineLimits) -> str:
    """Say whether the evidence shows a tie or is merely too thin."""
    if len(_paired(runs, best, present)[0]) < LEAST_ROUNDS:
        return "the budget ended before three rounds could tell"
    if _is_equal(runs, best, present):
        return f"the two differ by less than {EQUAL_RATIO:.0%}"
    return "the gain is within noise"


def decide(
    runs: Sequence[RaceRun], field: Sequence[EngineLimits], present: EngineLimits
) -> Decision:
    """Name the winner and say whether the present configuration should go.

    A tie goes to the smaller cap, then the smaller budget. A winner that is not separated
    from the present configuration, or by less than matters, means: keep what you have.
    """
    rounds = max((run.round for run in runs), default=0)
    inside = survivors(runs, field)
    best = _leader(runs, inside)
    if best is None:
        alone = list(field) == [present]
        why = "nothing that was tried is better" if alone else "there was no time to race"
        return Decision(Verdict.KEEP, present, present, (), None, 0, why)
    tied = tuple(sorted(inside))
    if present in inside:
        is_best = best == present
        why = "nothing that was tried is better" if is_best else _why_tied(runs, best, present)
        gain = None if is_best else ratio(runs, best, present)
        return Decision(Verdict.KEEP, present, best, tied, gain, rounds, why)
    winner = min(limits for limits in inside if compare(runs, limits, present) < 0)
    gain = ratio(runs, winner, present)
    return Decision(Verdict.CHANGE, winner, best, tied, gain, rounds, "better beyond noise")
