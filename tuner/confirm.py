"""Race the finalists against the present configuration until evidence separates them.

Every round replays the same requests on every configuration that is still in, in turns, so
that the machine's drift hits all alike. Says who won and by how much; which of two is better
is told by `duel`, and finding finalists is left to `search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.duel import (
    EQUAL_RATIO,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    RaceRun,
    by_round,
    compare,
    is_equal,
    is_far,
    is_harmless,
    is_vain,
    paired,
    ratio,
    ratios,
)
from tuner.engine.protocol import EngineLimits
from tuner.stats import Estimate


class Verdict(StrEnum):
    """What to do with the present configuration."""

    CHANGE = "change"
    KEEP = "keep"


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


def _leader(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> EngineLimits | None:
    """Return who has the best middle round so far."""
    medians = []
    for limits in field:
        scores = sorted(by_round(runs, limits).values(), key=lambda s: s.order)
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
        if limits == best or compare(runs, best, limits) >= 0 or is_equal(runs, best, limits)
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
        or not (is_far(runs, best, limits) or compare(before, best, limits) < 0)
    ]


def next_run(
    runs: Sequence[RaceRun],
    field: Sequence[EngineLimits],
    present: EngineLimits,
) -> tuple[int, EngineLimits] | None:
    """Return the round and the configuration to replay next, or None when all is decided.

    The order rotates from round to round. The present configuration stays in until it is
    separated or shown to be equal, because the gain is measured against it; once it is out,
    the others race on only while that is likely to tell them apart and worth it.
    """
    if len(field) < 2:
        return None
    for number in range(1, MOST_ROUNDS + 1):
        before = [run for run in runs if run.round < number]
        inside = _still_in(before, field) if number > LEAST_ROUNDS else list(field)
        if number > LEAST_ROUNDS and _decided(before, inside, present):
            return None
        turn = number % len(inside)
        ran = {run.limits for run in runs if run.round == number}
        for limits in (*inside[turn:], *inside[:turn]):
            if limits not in ran:
                return number, limits
    return None


def _decided(
    runs: Sequence[RaceRun], inside: Sequence[EngineLimits], present: EngineLimits
) -> bool:
    """Whether more rounds are unlikely to change the answer by more than matters."""
    best = _leader(runs, inside)
    if best is None or len(inside) == 1:
        return True
    others = [limits for limits in inside if limits != best]
    if present in inside:
        return all(is_equal(runs, limits, best) for limits in others)
    return all(
        is_equal(runs, limits, best)
        or is_harmless(runs, best, limits)
        or is_vain(runs, limits, best)
        for limits in others
    )


def _is_near(runs: Sequence[RaceRun], limits: EngineLimits, best: EngineLimits) -> bool:
    """Whether a configuration measured worse than the best by no more than matters."""
    gains = ratios(runs, limits, best)
    return bool(gains) and all(gain.value <= 1 + EQUAL_RATIO for gain in gains)


def _why_tied(runs: Sequence[RaceRun], best: EngineLimits, present: EngineLimits) -> str:
    """Say whether the evidence shows a tie or is merely too thin."""
    if len(paired(runs, best, present)[0]) < LEAST_ROUNDS:
        return "the budget ended before three rounds could tell"
    if is_equal(runs, best, present):
        return f"the two differ by less than {EQUAL_RATIO:.0%}"
    return "the gain is within noise"


def decide(
    runs: Sequence[RaceRun], field: Sequence[EngineLimits], present: EngineLimits
) -> Decision:
    """Name the winner and say whether the present configuration should go.

    A tie goes to the smaller cap, then the smaller budget, among those that measured worse
    than the best by no more than matters. A winner that is not separated from the present
    configuration, or by less than matters, means: keep what you have.
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
    better = [
        limits
        for limits in inside
        if compare(runs, limits, present) < 0 and not is_equal(runs, limits, present)
    ]
    winner = min(limits for limits in better if limits == best or _is_near(runs, limits, best))
    gain = ratio(runs, winner, present)
    return Decision(Verdict.CHANGE, winner, best, tied, gain, rounds, "better beyond noise")
