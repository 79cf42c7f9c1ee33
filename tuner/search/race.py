"""The race of the finalists against the current configuration: which wins, and by how much.

Every round replays the same requests on every configuration that is still in, in turns, so
that the machine's drift hits all alike. Pairs are compared by their paired ratios with an
interval at every look; rounds end by futility, equivalence or negligible loss. The same
decision is made of predictions alone, where nothing was raced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tuner import stats
from tuner.engine.limits import EngineLimits
from tuner.search.objective import RATE, Score, Tier
from tuner.stats import Estimate

# Three rounds are the fewest with a usable interval; eight separate a few percent on a noisy
# machine, beyond which the budget is better spent elsewhere: ours.
MIN_ROUNDS = 3
MAX_ROUNDS = 8
# Wrongly separating two equal configurations at any of the looks: 5 % in all (Bonferroni).
ERROR_RATE = 0.05
LOOKS = MAX_ROUNDS - MIN_ROUNDS + 1
CONFIDENCE_PER_LOOK = 1 - ERROR_RATE / LOOKS
# One look suffices to drop a configuration that is worse by more than this; for less the next
# has to agree, so that noise alone ends fewer races between equals: ours.
CLEAR_RATIO = 0.10
# Two configurations are equivalent where the whole interval lies within this of 1: ours.
EQUIVALENCE_RATIO = 0.02
# More rounds are futile if not even a difference larger by this many standard errors than the
# observed one would be separated by the last of them: ours. In simulated races of three equals,
# once the current one was out, it saves four replays in ten and finds gains as often.
FUTILITY_ERRORS = 1.0
# Two configurations that both beat the current one race no further once taking the better one
# so far costs less than this in expectation: ours, the width of equivalence. In simulated races
# of three that differ by 0 to 10 %, with 2 to 10 % of noise, it saves three replays in ten, and
# the winner is as good.
NEGLIGIBLE_LOSS = EQUIVALENCE_RATIO
# Fewer rounds than MIN_ROUNDS suffice for a difference that the prediction agrees on: ours.
MIN_AGREED = 2
# ... if every round and the prediction show more than this many times the prediction's own
# error: ours, since that error is a median.
AGREED_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class RaceRun:
    """One finalist's replay in one round; `attempt` names the process that made it."""

    limits: EngineLimits
    round: int
    score: Score
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class RacePredictions:
    """What was predicted of the finalists on the windows that they race, and how wrong it is.

    `wrong_ratio` is the typical error of a prediction.
    """

    scores: Mapping[EngineLimits, Score] = field(default_factory=dict)
    wrong_ratio: float = 0.0


def by_round(runs: Sequence[RaceRun], limits: EngineLimits) -> dict[int, RaceRun]:
    """Return a configuration's replays by the number of the round, the last of each.

    Those that the wall clock cut short are left out.
    """
    mine = (run for run in runs if run.limits == limits and run.score.tier is not Tier.CUT)
    return {run.round: run for run in mine}


def paired(
    runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits
) -> tuple[list[Score], list[Score]]:
    """Return the scores of the rounds that both ran, one after the other in one process."""
    ours, theirs = by_round(runs, a), by_round(runs, b)
    shared = sorted(r for r in set(ours) & set(theirs) if ours[r].attempt == theirs[r].attempt)
    return [ours[r].score for r in shared], [theirs[r].score for r in shared]


def compare_pair(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> int:
    """Return -1 if a is separated as better, 1 if b is, 0 if neither is.

    A configuration that failed in some rounds is worse than one that never did. Different tiers
    separate only when every shared round agrees on the order. Where the tiers of some rounds
    differ, some metric must separate, and no other metric and no tier may contradict it.
    """
    ours, theirs = paired(runs, a, b)
    if len(ours) < MIN_ROUNDS:
        return 0
    failed, others_failed = _failures(ours), _failures(theirs)
    if bool(failed) != bool(others_failed):
        return 1 if failed else -1
    signs = _tier_signs(runs, a, b)
    if signs in ({-1}, {1}):
        return signs.pop()
    sides = _sides(ratios(runs, a, b))
    side = sides.pop() if len(sides) == 1 else 0
    return 0 if -side in signs - {0} else side


def _failures(scores: Sequence[Score]) -> int:
    return sum(score.tier is Tier.FAILED for score in scores)


def _sides(gains: Sequence[Estimate]) -> set[int]:
    """Return which of the two is better by any metric, -1 or 1; of several, the large gains."""
    counted = [g for g in gains if len(gains) == 1 or not _is_small(g)]
    return {_side(gain) for gain in counted} - {0}


def _tier_signs(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> set[int]:
    """Return -1 where a was in the better tier in a round, 1 where b was, 0 for the same."""
    pairs = zip(*paired(runs, a, b), strict=True)
    return {(x.tier > y.tier) - (x.tier < y.tier) for x, y in pairs}


def _side(gain: Estimate) -> int:
    """Return -1 if the whole interval lies below equality, 1 if above, else 0."""
    if gain.low is None or gain.high is None:
        return 0
    return -1 if gain.high < 1 else 1 if gain.low > 1 else 0


def ratios(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> list[Estimate]:
    """Return the paired ratios a / b by what all rounds of both can be judged by.

    That is their metric where they share it. A configuration at the edge of what it sustains
    is in one tier in some rounds and in another in others: then it is every metric that both
    have. Two that never sustain the load and serve it at the same rate, as far as can be told,
    are judged by the tail. Empty where there is nothing.
    """
    gains = _ratios_by_metric(runs, a, b)
    return list(gains.values())


def _ratios_by_metric(
    runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits
) -> dict[str, Estimate]:
    values = _shared_values(runs, a, b)
    gains = {
        metric: stats.paired_ratio(mine, other, CONFIDENCE_PER_LOOK)
        for metric, (mine, other) in values.items()
    }
    ours, theirs = paired(runs, a, b)
    if {score.tier for score in (*ours, *theirs)} == {Tier.NOT_SUSTAINED} and RATE in gains:
        rate = gains.pop(RATE)
        tied = gains and (_side(rate) == 0 or _is_small(rate))
        return gains if tied else {RATE: rate}
    return gains


def _shared_values(
    runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the values of both, round by round, by each metric that `ratios` covers."""
    pairs = [
        (mine, other)
        for mine, other in zip(*paired(runs, a, b), strict=True)
        if Tier.FAILED not in (mine.tier, other.tier)
    ]
    if len(pairs) < 2:
        return {}
    values = {}
    for metric in _shared_metrics([score for pair in pairs for score in pair]):
        ours = [mine.value_of(metric) for mine, _ in pairs]
        theirs = [other.value_of(metric) for _, other in pairs]
        finite = [
            value for value in (*ours, *theirs) if value is not None and 0 < value < math.inf
        ]
        if len(finite) == 2 * len(pairs):
            values[metric] = finite[: len(pairs)], finite[len(pairs) :]
    return values


def _shared_metrics(scores: Sequence[Score]) -> list[str]:
    """Return the one metric that all are judged by, or else all metrics that come up.

    All, too, where the one has no end, as of a tail that falls on lost requests, and where
    neither configuration sustains the load.
    """
    own = dict.fromkeys(score.metric for score in scores)
    others = dict.fromkeys(name for score in scores for name, _ in score.others)
    is_enough = all(
        math.isfinite(score.value) and score.tier is not Tier.NOT_SUSTAINED for score in scores
    )
    return list(own) if len(own) == 1 and is_enough else list(own | others)


def gain(
    runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits
) -> tuple[str, Estimate] | None:
    """Return the paired ratio a / b of what both are judged by and its metric, or None."""
    ours, theirs = paired(runs, a, b)
    scores = [score for score in (*ours, *theirs) if score.tier is not Tier.FAILED]
    if len({score.metric for score in scores}) != 1:
        return None
    return next(iter(_ratios_by_metric(runs, a, b).items()), None)


def ratio(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> Estimate | None:
    """Return the paired ratio a / b of the scores' values, or None if not comparable."""
    judged = gain(runs, a, b)
    return None if judged is None else judged[1]


def agreed(
    runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits, predictions: RacePredictions
) -> tuple[str, Estimate] | None:
    """Return the metric and the ratio a / b by which a is far better, if all agree on it.

    Every round and the prediction must put a ahead by far more than either may be wrong, in
    every metric that can be compared, and none may put it in a worse tier. The prediction
    counts as one more round, so that two rounds have an interval.
    """
    ours, theirs = paired(runs, a, b)
    predicted = predictions.scores.get(a), predictions.scores.get(b)
    if predicted[0] is None or predicted[1] is None or len(ours) < MIN_AGREED:
        return None
    mine, other = [*ours, predicted[0]], [*theirs, predicted[1]]
    if _failures(mine) or any(x.tier > y.tier for x, y in zip(mine, other, strict=True)):
        return None
    together = [
        RaceRun(limits, number, score)
        for limits, scores in ((a, mine), (b, other))
        for number, score in enumerate(scores)
    ]
    gains = _ratios_by_metric(together, a, b)
    min_ratio = max(CLEAR_RATIO, AGREED_ERRORS * predictions.wrong_ratio)
    for x, y in _shared_values(together, a, b).values():
        if any(one * (1 + min_ratio) > two for one, two in zip(x, y, strict=True)):
            return None
    if not gains or any(_side(one) != -1 for one in gains.values()):
        return None
    metric = a_metric if (a_metric := mine[-1].metric) in gains else next(iter(gains))
    return metric, gains[metric]


def is_equivalent(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> bool:
    """Whether the whole interval of two configurations' ratio lies within EQUIVALENCE_RATIO."""
    gain = ratio(runs, a, b)
    return gain is not None and gain.n >= MIN_ROUNDS and _is_small(gain)


def _is_small(gain: Estimate) -> bool:
    """Whether the whole interval lies within EQUIVALENCE_RATIO."""
    if gain.low is None or gain.high is None:
        return False
    return gain.low > 1 / (1 + EQUIVALENCE_RATIO) and gain.high < 1 + EQUIVALENCE_RATIO


def is_futile(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> bool:
    """Whether the rounds that are left are unlikely to separate two configurations.

    Source: stochastic curtailment, Jennison & Turnbull, Group Sequential Methods, chapter 10,
        with Student's interval in place of a normal one.
    """
    gains = ratios(runs, a, b)
    if len(paired(runs, a, b)[0]) < MIN_ROUNDS:
        return False
    if {-1, 1} in (_tier_signs(runs, a, b) - {0}, _sides(gains)):
        return True
    # Rounds that were cut or failed have nothing but their tiers.
    return all(
        stats.would_include_one(gain, MAX_ROUNDS, FUTILITY_ERRORS, CONFIDENCE_PER_LOOK)
        for gain in gains
    )


def loss_is_negligible(
    runs: Sequence[RaceRun], best: EngineLimits, other: EngineLimits
) -> bool:
    """Whether little would be lost by taking the best so far, should the other be better."""
    gains = ratios(runs, best, other)
    losses = [stats.expected_loss(gain, CONFIDENCE_PER_LOOK) for gain in gains]
    return bool(losses) and gains[0].n >= MIN_ROUNDS and max(losses) < NEGLIGIBLE_LOSS


def is_clearly_worse(runs: Sequence[RaceRun], best: EngineLimits, other: EngineLimits) -> bool:
    """Whether the other is worse by CLEAR_RATIO, or of a worse tier and incomparable.

    By the interval, or in every single round if the tier was worse in every round as well.
    """
    limit = 1 / (1 + CLEAR_RATIO)
    gains = ratios(runs, best, other)
    if not gains or any(g.high is not None and g.high < limit for g in gains):
        return True
    return _tier_signs(runs, best, other) == {-1} and any(
        all(mine < limit * its for mine, its in zip(*pair, strict=True))
        for pair in _shared_values(runs, best, other).values()
    )


TOO_FEW = "the budget ended before three rounds"
NOTHING_ELSE = (
    "only the current configuration was replayed in the time: nothing can be said of others; "
    "give --budget more"
)


class RaceVerdict(StrEnum):
    """What to do with the current configuration."""

    CHANGE = "change"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Odds:
    """How sure a decision is, over other traffic of the kind and the model's own error.

    `p_better` is the probability that what is recommended, or was closest to it, is better than
    the current configuration, `p_slo` and `p_sustained` that it meets every SLO, None without
    any, and sustains the load. `loss` is what keeping the current configuration costs in
    expectation, as a share.
    `meets_more`: it surely keeps bounds that the current configuration does not. Where the
    traffic was not drawn, `is_resampled` is False: it is that of the model's error alone.
    """

    p_better: float
    p_slo: float | None
    p_sustained: float
    loss: float
    meets_more: bool = False
    is_resampled: bool = True

    @property
    def basis(self) -> str:
        """What the interval of the gain is over."""
        if self.is_resampled:
            return "other traffic of the kind and the profile's error"
        return "the profile's error alone: of this traffic no other can be drawn"

    @property
    def text(self) -> str:
        """Return the probabilities in a line.

        >>> Odds(0.99, 0.97, 1.0, 0.12).text
        'P(better) 0.99, P(SLOs met) 0.97, P(load sustained) 1.00, keeping loses 12.0%'
        """
        slo = "" if self.p_slo is None else f"P(SLOs met) {self.p_slo:.2f}, "
        return (
            f"P(better) {self.p_better:.2f}, {slo}"
            f"P(load sustained) {self.p_sustained:.2f}, keeping loses {self.loss:.1%}"
        )


@dataclass(frozen=True, slots=True)
class RaceDecision:
    """The race's outcome.

    `gain` is the ratio winner / current of `metric` (less is better) with its interval, None
    when they are not comparable by value; `tied` are those that three rounds or more do not
    separate from the best. `is_thin` marks a race of too few rounds, `is_predicted` a decision
    without any.
    """

    verdict: RaceVerdict
    winner: EngineLimits
    best: EngineLimits
    tied: tuple[EngineLimits, ...]
    gain: Estimate | None
    rounds: int
    why: str
    metric: str = ""
    is_thin: bool = False
    is_predicted: bool = False
    odds: Odds | None = None

    @property
    def shown(self) -> EngineLimits:
        """The configuration whose gain is shown: the one to change to, or the best measured."""
        return self.winner if self.verdict is RaceVerdict.CHANGE else self.best


def _leader(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> EngineLimits | None:
    """Return the configuration with the best middle round so far."""
    medians = []
    for limits in field:
        mine = by_round(runs, limits).values()
        scores = sorted((run.score for run in mine), key=lambda s: s.order)
        if scores:
            medians.append((scores[len(scores) // 2].order, limits))
    return min(medians)[1] if medians else None


def survivors(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return the configurations not yet shown to be worse than the leader beyond equivalence.

    Shapes: in the field's order.
    """
    best = _leader(runs, field)
    if best is None:
        return list(field)
    return [
        limits
        for limits in field
        if limits == best
        or compare_pair(runs, best, limits) >= 0
        or is_equivalent(runs, best, limits)
    ]


def _still_in(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return the survivors, and those worse than the leader neither clearly nor a look before.

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
        or not (is_clearly_worse(runs, best, limits) or compare_pair(before, best, limits) < 0)
    ]


def next_run(
    runs: Sequence[RaceRun],
    field: Sequence[EngineLimits],
    current: EngineLimits,
    attempt: str = "",
) -> tuple[int, EngineLimits] | None:
    """Return the round and the configuration to replay next, or None when all is decided.

    The order rotates from round to round. The current configuration stays in until it is
    separated or shown to be equivalent, because the gain is measured against it; once it is
    out, the others race on until futility, equivalence or negligible loss. A round that another
    process left half done is run anew in this `attempt`.
    """
    if len(field) < 2:
        return None
    for number in range(1, MAX_ROUNDS + 1):
        before = [run for run in runs if run.round < number]
        inside = round_of(runs, field, number)
        if number > MIN_ROUNDS and _decided(before, inside, current):
            return None
        missing = _missing([run for run in runs if run.round == number], inside, attempt)
        if missing:
            return number, next(x for x in inside if x in missing)
    return None


def round_of(
    runs: Sequence[RaceRun], field: Sequence[EngineLimits], number: int
) -> list[EngineLimits]:
    """Return the configurations that race in a round, in the order in which they take turns."""
    before = [run for run in runs if run.round < number]
    inside = _still_in(before, field) if number > MIN_ROUNDS else list(field)
    turn = number % len(inside)
    return [*inside[turn:], *inside[:turn]]


def _missing(
    ran: Sequence[RaceRun], inside: Sequence[EngineLimits], attempt: str
) -> set[EngineLimits]:
    """Return the configurations that must run for one process to have made a whole round."""
    by_attempt: dict[str, set[EngineLimits]] = {attempt: set()}
    for run in ran:
        by_attempt.setdefault(run.attempt, set()).add(run.limits)
    if any(set(inside) <= done for done in by_attempt.values()):
        return set()
    return set(inside) - by_attempt[attempt]


def _decided(
    runs: Sequence[RaceRun], inside: Sequence[EngineLimits], current: EngineLimits
) -> bool:
    """Whether more rounds are unlikely to change the answer beyond equivalence."""
    best = _leader(runs, inside)
    if best is None or len(inside) == 1:
        return True
    others = [limits for limits in inside if limits != best]
    if current in inside:
        return all(is_equivalent(runs, limits, best) for limits in others)
    return all(
        is_equivalent(runs, limits, best)
        or loss_is_negligible(runs, best, limits)
        or is_futile(runs, limits, best)
        for limits in others
    )


def _is_near(runs: Sequence[RaceRun], limits: EngineLimits, best: EngineLimits) -> bool:
    """Whether a configuration measured worse than the best by EQUIVALENCE_RATIO at most."""
    gains = ratios(runs, limits, best)
    return bool(gains) and all(gain.value <= 1 + EQUIVALENCE_RATIO for gain in gains)


def _why_tied(runs: Sequence[RaceRun], best: EngineLimits, current: EngineLimits) -> str:
    """Return whether the rounds show a tie or are too few, in words."""
    if _is_thin(runs, best, current):
        return TOO_FEW
    if is_equivalent(runs, best, current):
        return f"the two differ by less than {EQUIVALENCE_RATIO:.0%}"
    return "the gain is within noise"


def _is_thin(runs: Sequence[RaceRun], a: EngineLimits, b: EngineLimits) -> bool:
    return len(paired(runs, a, b)[0]) < MIN_ROUNDS


def _shared_rounds(
    runs: Sequence[RaceRun], field: Sequence[EngineLimits], best: EngineLimits | None
) -> int:
    """Return how many rounds the best shared with any other of the field."""
    if best is None:
        return 0
    return max((len(paired(runs, best, x)[0]) for x in field if x != best), default=0)


def whole_rounds(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> int:
    """Return how many rounds the current configuration and another have both run."""
    current = field[-1]
    return max((len(paired(runs, x, current)[0]) for x in field if x != current), default=0)


def decide(
    runs: Sequence[RaceRun],
    field: Sequence[EngineLimits],
    current: EngineLimits,
    predictions: RacePredictions = RacePredictions(),
    *,
    is_searched: bool = True,
) -> RaceDecision:
    """Return the winner, and whether it should replace the current configuration.

    `is_searched` is off where the time ended before any other configuration was replayed whole,
    so that a field of one says nothing.

    A tie goes to the smaller cap, then the smaller budget, among those that measured worse
    than the best by EQUIVALENCE_RATIO at most. Where the winner is not separated from the
    current configuration, or is equivalent to it, the current one stays. What the rounds alone
    leave open is decided where all of them and the prediction agree on a large difference.
    """
    inside = survivors(runs, field)
    best = _leader(runs, inside)
    rounds = _shared_rounds(runs, field, best)
    if best is None:
        return _keep_unraced(field, current, is_searched=is_searched)
    tied = _tied(runs, inside, best, predictions)
    if current in inside:
        far_better = agreed(runs, best, current, predictions)
        if far_better is not None:
            why = f"all {rounds} rounds and the prediction agree"
            return RaceDecision(
                RaceVerdict.CHANGE, best, best, tied, far_better[1], rounds, why, far_better[0]
            )
        return _keep_current(runs, best, current, tied, rounds)
    better = [
        limits
        for limits in inside
        if compare_pair(runs, limits, current) < 0 and not is_equivalent(runs, limits, current)
    ]
    winner = min(limits for limits in better if limits == best or _is_near(runs, limits, best))
    metric, change = gain(runs, winner, current) or ("", None)
    why = "better beyond noise"
    return RaceDecision(RaceVerdict.CHANGE, winner, best, tied, change, rounds, why, metric)


def _keep_unraced(
    field: Sequence[EngineLimits], current: EngineLimits, *, is_searched: bool
) -> RaceDecision:
    """Return the decision where nothing raced: nobody was worth it, or there was no time."""
    is_known = list(field) == [current] and is_searched
    why = "nothing that was tried is better" if is_known else "there was no time to race"
    if not is_searched:
        why = NOTHING_ELSE
    return RaceDecision(
        RaceVerdict.KEEP, current, current, (), None, 0, why, is_thin=not is_known
    )


def _keep_current(
    runs: Sequence[RaceRun],
    best: EngineLimits,
    current: EngineLimits,
    tied: tuple[EngineLimits, ...],
    rounds: int,
) -> RaceDecision:
    """Return the decision to keep the current configuration, with what the best measured."""
    if best == current:
        is_thin = rounds < MIN_ROUNDS
        why = TOO_FEW if is_thin else "nothing that was tried is better"
        return RaceDecision(
            RaceVerdict.KEEP, current, best, tied, None, rounds, why, is_thin=is_thin
        )
    why, is_thin = _why_tied(runs, best, current), _is_thin(runs, best, current)
    metric, change = gain(runs, best, current) or ("", None)
    return RaceDecision(
        RaceVerdict.KEEP, current, best, tied, change, rounds, why, metric, is_thin
    )


def _tied(
    runs: Sequence[RaceRun],
    inside: Sequence[EngineLimits],
    best: EngineLimits,
    predictions: RacePredictions,
) -> tuple[EngineLimits, ...]:
    """Return the best and those that raced with it long enough without being separated."""
    if all(_is_thin(runs, best, limits) for limits in inside if limits != best):
        inside = [best]
    return tuple(
        sorted(
            limits
            for limits in inside
            if limits == best
            or not (
                _is_thin(runs, best, limits)
                or agreed(runs, best, limits, predictions) is not None
            )
        )
    )
