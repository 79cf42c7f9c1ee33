"""The race of the finalists against the current configuration: who replays when, who wins.

Every round replays the same requests on every configuration that may still be the best, in
turns, so that the machine's drift hits all alike. What the replays say is weighed in
`search.choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.engine.limits import EngineLimits
from tuner.search.objective import Score, Tier
from tuner.stats import Estimate

# How sure a change must be, and an SLO to be met: ours, as an interval of 90 % says it.
CONFIDENCE = 0.9
# What is more likely than not.
LIKELY = 0.5
# Rounds of live replays at most: ours; what is left open then is open for another reason than
# too few replays.
MAX_ROUNDS = 8
# What is lost at most in a draw, as where a setting fails: ours, so that a mean exists.
MAX_LOSS = 10.0
UNFINISHED = "the run has not ended"
"""Why the best so far is named where a run ended before it had decided."""
OTHER_TRAFFIC = "other traffic of the kind and the model's error"
"""What odds and intervals are over where other traffic than the recorded can be drawn."""
# Which quantiles are kept of what a setting costs: intervals of 90 and 50 %, and the middle.
STANDING_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, slots=True)
class RaceRun:
    """One finalist's replay in one round; `attempt` names the process that made it."""

    limits: EngineLimits
    round: int
    score: Score
    attempt: str = ""

    @property
    def turn(self) -> tuple[int, str]:
        """What it shares with those that it compares with: the round, in one process."""
        return self.round, self.attempt


def by_round(runs: Sequence[RaceRun], limits: EngineLimits) -> dict[tuple[int, str], RaceRun]:
    """Return a configuration's replays by the round and its process, the last of each.

    Those that the wall clock cut short are left out.
    """
    mine = (run for run in runs if run.limits == limits and run.score.tier is not Tier.CUT)
    return {run.turn: run for run in mine}


def compared(runs: Sequence[RaceRun]) -> list[RaceRun]:
    """Return the replays that stand beside another setting's of the same round and process.

    What an interruption or the wall clock split off stands alone, in a mood of its own.
    """
    whole = [run for run in runs if run.score.tier is not Tier.CUT]
    beside: dict[tuple[int, str], set[EngineLimits]] = {}
    for run in whole:
        beside.setdefault(run.turn, set()).add(run.limits)
    return [run for run in whole if len(beside[run.turn]) > 1]


def missing_in(
    runs: Sequence[RaceRun], number: int, inside: Sequence[EngineLimits], attempt: str = ""
) -> list[EngineLimits]:
    """Return who has yet to replay in a round, in the order in which they take turns.

    The order turns around from round to round. A round that another process left half done is
    run anew in this `attempt`: what is compared was replayed one after the other.
    """
    by_attempt: dict[str, set[EngineLimits]] = {attempt: set()}
    for run in runs:
        if run.round == number:
            by_attempt.setdefault(run.attempt, set()).add(run.limits)
    if any(set(inside) <= done for done in by_attempt.values()):
        return []
    order = inside if number % 2 else list(reversed(inside))
    return [limits for limits in order if limits not in by_attempt[attempt]]


def whole_rounds(runs: Sequence[RaceRun], field: Sequence[EngineLimits]) -> int:
    """Return in how many rounds a setting of the field raced beside another one."""
    return len({run.round for run in compared([run for run in runs if run.limits in field])})


class RaceVerdict(StrEnum):
    """What to do with the current configuration."""

    CHANGE = "change"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Odds:
    """How sure a decision is, by all that is known of the engine's speed.

    `p_better` is the probability that what is recommended, or was closest to it, is better than
    the current configuration on the recorded traffic, `p_slo` and `p_sustained` that it meets
    every SLO, None without any, and sustains the load, None where that does not count: it is
    told under `balanced` alone, and not in a closed loop. `loss` is what keeping the current
    configuration costs in expectation, as a share. `p_elsewhere` is the probability that it is
    better on other traffic of the kind, `p_slo_elsewhere` that it meets every SLO there, and
    `cost_elsewhere` what it costs there over the current one in the mean, None where it meets
    the SLOs less often. `meets_more`: it surely keeps bounds that the current configuration
    does not. `open_ratio` is how far off what is known of the two may be on the recorded
    traffic: half the interval of their ratio, None without end. `basis` is what the intervals
    and probabilities are over, and `confidence` what was asked of those of a change.

    Where the current configuration itself is thought best, `p_better`, `p_elsewhere` and
    `cost_elsewhere` are of its `rival`, the likeliest other one to be better, or of nobody
    where it `is_alone`; the bounds are the current one's, and `loss` is what it costs more than
    whoever is the best.
    """

    p_better: float
    p_slo: float | None
    p_sustained: float | None
    loss: float
    p_elsewhere: float
    meets_more: bool = False
    basis: str = ""
    confidence: float = CONFIDENCE
    rival: EngineLimits | None = None
    is_alone: bool = False
    open_ratio: float | None = None
    p_slo_elsewhere: float | None = None
    cost_elsewhere: float | None = None

    @property
    def meets_slos(self) -> bool:
        """Whether every SLO is more likely to be met than not."""
        return self.p_slo is None or self.p_slo >= LIKELY

    @property
    def has_other_traffic(self) -> bool:
        """Whether what is other traffic of the kind was drawn for them."""
        return self.basis == OTHER_TRAFFIC

    @property
    def text(self) -> str:
        """Return the probabilities in a line.

        >>> Odds(0.99, None, 1.0, 0.12, 0.95, basis=OTHER_TRAFFIC).text
        'P(better) 0.99 (other hours 0.95), P(load sustained) 1.00, keeping loses 12.0%'
        >>> Odds(0.2, None, 1.0, 0.003, 0.2, rival=EngineLimits(8, 512)).text[:21]
        'P(8/512 better) 0.20,'
        """
        slo = self.p_slo_elsewhere if self.has_other_traffic else None
        chances = (("SLOs met", self.p_slo, slo), ("load sustained", self.p_sustained, None))
        bounds = [
            f"P({name}) {chance:.2f}{_on_other_hours(there)}"
            for name, chance, there in chances
            if chance is not None
        ]
        if self.is_alone:
            return ", ".join([*bounds, "beside no other setting"]) if bounds else ""
        who, to = "", ""
        if self.rival is not None:
            who, to = f"{self.rival} ", " to whoever is best"
            bounds[:1] = [f"of the current one {bound}" for bound in bounds[:1]]
        loses = f"loses {self.loss:.1%}{to}" if self.loss < 1 else _times_as_much(self.loss)
        better = f"P({who}better) {self.p_better:.2f}{self._better_elsewhere}"
        return ", ".join([better, *bounds, f"keeping {loses}"])

    @property
    def _better_elsewhere(self) -> str:
        """Say how sure it is on other traffic, and what it costs where that alone is open."""
        if not self.has_other_traffic:
            return ""
        is_open = self.p_elsewhere < LIKELY and self.p_better >= self.confidence
        if not is_open or self.cost_elsewhere is None:
            return _on_other_hours(self.p_elsewhere)
        cost = f"{self.cost_elsewhere:.2f} times the cost in the mean"
        return f" (other hours {self.p_elsewhere:.2f}, {cost})"


def _on_other_hours(chance: float | None) -> str:
    """Say how probable the same is on other traffic of the kind, where that is known."""
    return "" if chance is None else f" (other hours {chance:.2f})"


def _times_as_much(loss: float) -> str:
    """Say what it costs to keep a setting that loses more than all.

    >>> _times_as_much(1.287), _times_as_much(MAX_LOSS)
    ('costs 2.29 times as much', 'costs 11 times as much or more')
    """
    return f"costs {1 + loss:.3g} times as much" + (" or more" if loss >= MAX_LOSS else "")


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one of the settings that were decided between.

    `quantiles` are those of STANDING_SHARES of what it costs on the recorded traffic, by the
    metric that decides (less is better). `p_best` is the probability that none costs less,
    `loss` what it is expected to cost more than whoever is the best, as a share; both among
    those that may be recommended, and None for one that may not, since it is not sure enough
    to keep its bounds. `p_slo` and `p_sustained` as in `Odds`.
    """

    limits: EngineLimits
    quantiles: tuple[float, ...]
    p_slo: float | None
    p_sustained: float | None
    p_best: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class RaceDecision:
    """What to do, and how sure that is.

    `gain` is the ratio winner / current of `metric` (less is better) with its interval, None
    when they are not comparable by value; `gain_here` the same on the traffic as it was
    recorded, where `gain` is on other traffic of the kind. `tied` are those that lose no more
    than the winner by any difference worth a restart. `rounds` were replayed live;
    `is_predicted` marks a decision without any. `standings` are those of the settings that were
    decided between, of the least expected loss first.
    """

    verdict: RaceVerdict
    winner: EngineLimits
    best: EngineLimits
    tied: tuple[EngineLimits, ...]
    gain: Estimate | None
    rounds: int
    why: str
    metric: str = ""
    gain_here: Estimate | None = None
    is_predicted: bool = False
    odds: Odds | None = None
    standings: tuple[Standing, ...] = ()

    @property
    def shown(self) -> EngineLimits:
        """The configuration whose gain is shown: the one to change to, or the best measured."""
        return self.winner if self.verdict is RaceVerdict.CHANGE else self.best

    @property
    def told(self) -> EngineLimits:
        """Of whom a run tells: who is deployed, or nearest to SLOs that nothing meets."""
        return self.winner if self.odds is None or self.odds.meets_slos else self.best
