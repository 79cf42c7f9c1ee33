"""Whether a configuration that was handed over does as well as the one before it would have.

Live metrics of the time since are held against what the shadows foretell of both
configurations on the very traffic of that time, so that a busier hour is not held against the
new one. Taking the file back is left to `loop`.

Tried and given up: comparing live before with live after. Traffic has just shifted, or there
would have been no change; the two hours do not compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tuner.bench import Failure
from tuner.engine.protocol import EngineLimits
from tuner.metrics import Measurement
from tuner.objective import tail_statistic
from tuner.slo import QUANTILES
from tuner.watch.live import Live

LEAST_REQUESTS: Final = 200
"""Ours: ten of them lie beyond a p95."""

LEAST_COVERED: Final = 0.8
"""Ours: a stretch that Prometheus saw less of may have been quite another."""

MOST_BIAS: Final = 2.0
"""Ours: a live server is slower than its shadow by what HTTP and its clients add; where it is
slower by more, the shadow is wrong, and that must not excuse the new configuration."""

SETTLE_RATIO: Final = 0.2
"""Ours: a share of the guard's time for the restart and the queue that it leaves."""

PATIENCE: Final = 4.0
"""Ours: after so many times the guard's own time without a verdict it gives up and says so."""

TAIL, RATE = "e2e tail", "requests_per_s"


class Guarded(StrEnum):
    """What the guard makes of a change."""

    AGREES = "does as well as foretold"
    WORSE = "does worse than the old configuration would"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True, slots=True)
class Judged:
    """What the guard found, and why."""

    found: Guarded
    why: str
    restarted_s: float | None = None
    """When the server was up anew, if only then: the guard's time begins again there."""


@dataclass(frozen=True, slots=True)
class Look:
    """A stretch of time: how the server did, and what was foretold of each configuration.

    `foretold` is empty where there was no traffic to replay, `why_not` then says why.
    """

    live: Live
    foretold: Mapping[EngineLimits, Measurement | Failure]
    why_not: str = ""


LookAt = Callable[[float, float, Sequence[EngineLimits]], Look]
"""Look at a stretch between two Unix times. Raises: TunerError if nobody can be asked."""


@dataclass(frozen=True, slots=True)
class Guard:
    """How long a change is on probation, how to look at it, how wrong the shadows may be."""

    lasting_s: float
    look: LookAt
    wrong_ratio: float

    def window(self, handed_s: float) -> tuple[float, float]:
        """Return the stretch that is judged: after the restart has settled."""
        start_s = handed_s + SETTLE_RATIO * self.lasting_s
        return start_s, start_s + self.lasting_s

    def is_over(self, decided_s: float, now_s: float) -> bool:
        """Whether it is time to give up on a change of back then."""
        return now_s > decided_s + PATIENCE * self.lasting_s

    def bias_before(self, now_s: float, old: EngineLimits) -> dict[str, float]:
        """Return how much worse the old configuration does live than foretold, by metric.

        Raises: TunerError if nobody can be asked.
        """
        look = self.look(now_s - self.lasting_s, now_s, (old,))
        measured = look.foretold.get(old)
        if _too_little(look) or not isinstance(measured, Measurement):
            return {}
        tail = tail_statistic(min(look.live.requests, measured.completed))
        within_s = look.live.e2e_within_s(QUANTILES[tail])
        foretold_s = measured.latency("e2e_s", tail)
        found: dict[str, float] = {}
        if within_s is not None and foretold_s:
            found[TAIL] = _bounded(within_s[0] / foretold_s)
        if look.live.requests_per_s > 0:
            found[RATE] = _bounded(measured.requests_per_s / look.live.requests_per_s)
        return found

    def judge(
        self,
        handed_s: float,
        old: EngineLimits,
        new: EngineLimits,
        bias: Mapping[str, float],
    ) -> Judged:
        """Return what to make of the change. Raises: TunerError if nobody can be asked."""
        look = self.look(*self.window(handed_s), (old, new))
        if look.live.covered_ratio >= LEAST_COVERED and not look.live.is_there:
            return Judged(Guarded.WORSE, "the server shows no metrics any more")
        if look.live.restarted_s is not None:
            # The queue that a restart leaves is not the configuration's doing.
            why = "the server was up again only then"
            return Judged(Guarded.UNKNOWN, why, look.live.restarted_s)
        if reason := _too_little(look):
            return Judged(Guarded.UNKNOWN, reason)
        before, after = look.foretold.get(old), look.foretold.get(new)
        if not isinstance(before, Measurement) or not isinstance(after, Measurement):
            return Judged(Guarded.UNKNOWN, look.why_not or "its traffic cannot be replayed")
        return compared(look.live, before, after, self.wrong_ratio, bias)


def compared(
    live: Live,
    old: Measurement,
    new: Measurement,
    wrong_ratio: float,
    bias: Mapping[str, float],
) -> Judged:
    """Return whether live metrics are worse than foretold, beyond the interval.

    Where the new configuration was meant to be worse in one metric, as a throughput that costs
    latency, it is held against its own prediction there.
    """
    tail = tail_statistic(min(live.requests, old.completed, new.completed))
    within_s = live.e2e_within_s(QUANTILES[tail])
    most_s = max(_high_s(old, tail), _high_s(new, tail)) * (1 + wrong_ratio)
    most_s *= bias.get(TAIL, 1.0)
    # What chance does to a count of so many requests, at two standard deviations.
    chance = 2 / math.sqrt(live.requests)
    least_per_s = min(old.requests_per_s, new.requests_per_s) * (1 - wrong_ratio - chance)
    least_per_s /= bias.get(RATE, 1.0)
    per_s = live.requests_per_s
    if within_s is not None and within_s[0] > most_s:
        told = f"e2e_{tail} is above {within_s[0]:.3g} s, foretold was at most {most_s:.3g} s"
        return Judged(Guarded.WORSE, f"{told} on the same {live.requests:,} requests")
    if per_s < least_per_s:
        told = f"{per_s:.3g} requests/s finish, foretold were at least {least_per_s:.3g}"
        return Judged(Guarded.WORSE, told)
    high = (
        "" if within_s is None else f"e2e_{tail} within {within_s[0]:g} … {within_s[1]:g} s, "
    )
    told = f"{high}at most {most_s:.3g} s foretold; {per_s:.3g} requests/s"
    return Judged(Guarded.AGREES, told)


def _too_little(look: Look) -> str:
    """Say why a stretch cannot carry a verdict, or nothing."""
    if look.live.covered_ratio < LEAST_COVERED:
        return f"Prometheus looked at {look.live.covered_ratio:.0%} of the time only"
    if look.live.requests < LEAST_REQUESTS:
        return f"{look.live.requests} requests finished, {LEAST_REQUESTS} are needed"
    for measured in look.foretold.values():
        if isinstance(measured, Measurement) and measured.completed < LEAST_REQUESTS:
            return f"the traffic holds {measured.completed} requests, too few to replay"
    return ""


def _high_s(measured: Measurement, tail: str) -> float:
    """Return the upper end of a predicted tail."""
    spread = measured.latencies["e2e_s"]
    if spread is None:
        return math.inf
    found = spread.quantiles[tail]
    return found.value if found.high is None else found.high


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1.0), MOST_BIAS)
