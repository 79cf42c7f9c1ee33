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
    Forecasts,
    RaceRun,
    agreed,
    by_round,
    compare,
    gain,
    is_equal,
    is_far,
    is_harmless,
    is_vain,
    paired,
    ratios,
)
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError
from tuner.objective import Tier
from tuner.observation import Observation, leader
from tuner.stats import Estimate

TOO_FEW = "the budget ended before three rounds could tell"


class Verdict(StrEnum):
    """What to do with the present configuration."""

    CHANGE = "change"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Decision:
    """The race's outcome.

    `gain` is the ratio winner / present of `metric` (less is better) with its interval, None
    when they are not comparable by value; `tied` are those that three rounds or more cannot
    tell from the best. `is_thin` says that there were too few rounds to tell anything, and
    `is_predicted` that no round was looked at.
    """

    verdict: Verdict
    winner: EngineLimits
    best: EngineLimits
    tied: tuple[EngineLimits, ...]
    gain: Estimate | None
    rounds: int
    why: str
    metric: str = ""
    is_thin: bool = False
    is_predicted: bool = False

    @property
    def shown(self) -> EngineLimits:
        """Whose gain is told: the one to change to, or the best there was to keep from."""
        return self.winner if self.verdict is Verdict.CHANGE else self.best


def _leader(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> EngineLimits | None:
    """Return who has the best middle round so far."""
    medians = []
    for limits in field:
        mine = by_round(runs, limits).values()
        scores = sorted((run.score for run in mine), key=lambda s: s.order)
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
    attempt: str = "",
) -> tuple[int, EngineLimits] | None:
    """Return the round and the configuration to replay next, or None when all is decided.

    The order rotates from round to round. The present configuration stays in until it is
    separated or shown to be equal, because the gain is measured against it; once it is out,
    the others race on only while that is likely to tell them apart and worth it. A round that
    another process left half done is run anew in this `attempt`.
    """
    if len(field) < 2:
        return None
    for number in range(1, MOST_ROUNDS + 1):
        before = [run for run in runs if run.round < number]
        inside = _still_in(before, field) if number > LEAST_ROUNDS else list(field)
        if number > LEAST_ROUNDS and _decided(before, inside, present):
            return None
        missing = _missing([run for run in runs if run.round == number], inside, attempt)
        if missing:
            turn = number % len(inside)
            return number, next(x for x in (*inside[turn:], *inside[:turn]) if x in missing)
    return None


def _missing(
    ran: Sequence[RaceRun], inside: Sequence[EngineLimits], attempt: str
) -> set[EngineLimits]:
    """Return who has to run for one process to have made a whole round."""
    by_attempt: dict[str, set[EngineLimits]] = {attempt: set()}
    for run in ran:
        by_attempt.setdefault(run.attempt, set()).add(run.limits)
    if any(set(inside) <= done for done in by_attempt.values()):
        return set()
    return set(inside) - by_attempt[attempt]


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
    if _is_thin(runs, best, present):
        return TOO_FEW
    if is_equal(runs, best, present):
        return f"the two differ by less than {EQUAL_RATIO:.0%}"
    return "the gain is within noise"


def _is_thin(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> bool:
    return len(paired(runs, a, b)[0]) < LEAST_ROUNDS


def _shared_rounds(
    runs: Sequence[RaceRun], field: Sequence[EngineLimits], best: EngineLimits | None
) -> int:
    """Return how many rounds the best shared with any other of the field."""
    if best is None:
        return 0
    return max((len(paired(runs, best, x)[0]) for x in field if x != best), default=0)


def whole_rounds(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> int:
    """Return how many rounds the present configuration and another have both run."""
    present = field[-1]
    return max((len(paired(runs, x, present)[0]) for x in field if x != present), default=0)


def decide(
    runs: Sequence[RaceRun],
    field: Sequence[EngineLimits],
    present: EngineLimits,
    forecasts: Forecasts = Forecasts(),  # noqa: B008 - frozen
) -> Decision:
    """Name the winner and say whether the present configuration should go.

    A tie goes to the smaller cap, then the smaller budget, among those that measured worse
    than the best by no more than matters. A winner that is not separated from the present
    configuration, or by less than matters, means: keep what you have. What the rounds alone
    leave open is told where every one of them and the prediction agree on a large difference.
    """
    inside = survivors(runs, field)
    best = _leader(runs, inside)
    rounds = _shared_rounds(runs, field, best)
    if best is None:
        alone = list(field) == [present]
        why = "nothing that was tried is better" if alone else "there was no time to race"
        return Decision(Verdict.KEEP, present, present, (), None, 0, why, is_thin=not alone)
    tied = _tied(runs, inside, best, forecasts)
    if present in inside:
        found = agreed(runs, best, present, forecasts)
        if found is not None:
            why = f"all {rounds} rounds and the prediction agree"
            return Decision(Verdict.CHANGE, best, best, tied, found[1], rounds, why, found[0])
        return _kept(runs, best, present, tied, rounds)
    better = [
        limits
        for limits in inside
        if compare(runs, limits, present) < 0 and not is_equal(runs, limits, present)
    ]
    winner = min(limits for limits in better if limits == best or _is_near(runs, limits, best))
    metric, change = gain(runs, winner, present) or ("", None)
    why = "better beyond noise"
    return Decision(Verdict.CHANGE, winner, best, tied, change, rounds, why, metric)


def _kept(
    runs: Sequence[RaceRun],
    best: EngineLimits,
    present: EngineLimits,
    tied: tuple[EngineLimits, ...],
    rounds: int,
) -> Decision:
    """Keep the present configuration, and say what the best there was measured."""
    if best == present:
        is_thin = rounds < LEAST_ROUNDS
        why = TOO_FEW if is_thin else "nothing that was tried is better"
        return Decision(Verdict.KEEP, present, best, tied, None, rounds, why, is_thin=is_thin)
    why, is_thin = _why_tied(runs, best, present), _is_thin(runs, best, present)
    metric, change = gain(runs, best, present) or ("", None)
    return Decision(Verdict.KEEP, present, best, tied, change, rounds, why, metric, is_thin)


def _tied(
    runs: Sequence[RaceRun],
    inside: Sequence[EngineLimits],
    best: EngineLimits,
    forecasts: Forecasts,
) -> tuple[EngineLimits, ...]:
    """Return the best and who raced with it long enough and cannot be told from it."""
    if all(_is_thin(runs, best, limits) for limits in inside if limits != best):
        inside = [best]
    return tuple(
        sorted(
            limits
            for limits in inside
            if limits == best
            or not (
                _is_thin(runs, best, limits)
                or agreed(runs, best, limits, forecasts) is not None
            )
        )
    )


def decide_predicted(
    seen: Sequence[Observation], present: EngineLimits, wrong_ratio: float
) -> Decision:
    """Name the best of what was predicted; a gain within the prediction's error is none.

    Raises: NoFeasibleConfigError if nothing could be predicted.
    """
    best = leader(seen, wrong_ratio)
    baseline = next((o for o in seen if o.limits == present), None)
    if best is None:
        raise NoFeasibleConfigError(
            "no configuration survived its shadow replay", "see trials.jsonl"
        )
    if best.limits == present or baseline is None:
        why = "nothing that was tried is better"
        return Decision(
            Verdict.KEEP, present, present, (present,), None, 0, why, is_predicted=True
        )
    metric, change = "", None
    if (found := best.score.ratio_to(baseline.score)) is not None:
        metric, value = found
        change = Estimate(value, value * (1 - wrong_ratio), value * (1 + wrong_ratio), 1)
    is_better = baseline.score.clearly_worse_than(best.score, wrong_ratio)
    if not is_better or best.score.tier is Tier.FAILED:
        verdict, winner, why = Verdict.KEEP, present, "the gain is within the shadow's error"
    else:
        verdict, winner, why = Verdict.CHANGE, best.limits, "better beyond the shadow's error"
    return Decision(
        verdict, winner, best.limits, (winner,), change, 0, why, metric, is_predicted=True
    )
