"""Service-level objectives: bounds on one statistic of one latency.

Answers what `--slo` means, whether a window can carry it and whether a latency meets it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.errors import TooFewSamplesError, UsageError
from tuner.stats import QUANTILES, Floats
from tuner.traffic.windows import parse_duration

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "decode_step_s")
_SLO = re.compile(r"(ttft|tpot|itl|e2e|decode_step)_(mean|p50|p90|p95|p99)=(.+)")


class Measured(Protocol):
    """What an SLO asks of a measurement."""

    def slo_value(self, metric: str, statistic: str) -> float | None:
        """Return one statistic as an SLO bounds it, or None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A bound on one statistic of one latency.

    Units: bound_s in seconds.
    Raises: UsageError for what no replay measures, and for a bound that nothing meets.

    >>> str(Slo.parse("ttft_p99=500ms"))
    'ttft_p99=0.5s'
    """

    metric: str
    statistic: str
    bound_s: float

    def __post_init__(self) -> None:
        """Refuse what cannot be judged by."""
        is_known = self.metric in LATENCIES and self.statistic in (*QUANTILES, "mean")
        if not is_known or not self.bound_s > 0:
            raise UsageError(
                f"an SLO cannot bound {self.metric} {self.statistic} by {self.bound_s} s",
                f"one of {', '.join(LATENCIES)}; mean, p50, p90, p95 or p99; more than 0 s",
            )

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Return the SLO that a text such as ttft_p99=500ms stands for, as `--slo` takes it.

        Raises: UsageError if it stands for none.
        """
        match = _SLO.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"--slo {text!r} is not an SLO, expected for example ttft_p99=500ms",
                "metric ttft, tpot, itl, e2e or decode_step; then mean, p50, p90, p95 or p99",
            )
        metric, statistic, bound = match.groups()
        bound_s = parse_duration(bound)
        if bound_s <= 0:
            raise UsageError(f"--slo {text!r} must have a bound above 0, got {bound}")
        return cls(f"{metric}_s", statistic, bound_s)

    @property
    def name(self) -> str:
        """Return the name as the option spells it."""
        return f"{self.metric.removesuffix('_s')}_{self.statistic}"

    def __str__(self) -> str:
        return f"{self.name}={self.bound_s:g}s"

    @property
    def is_per_request(self) -> bool:
        """Whether each request has one such latency, of itself."""
        return self.metric not in ("itl_s", "decode_step_s")

    @property
    def needed_samples(self) -> int:
        """Return how many samples put at least one beyond the quantile."""
        return round(1 / (1 - QUANTILES[self.statistic])) if self.statistic in QUANTILES else 1

    def check_carried_by(self, n: int) -> None:
        """Refuse a window too small for the quantile.

        Raises: TooFewSamplesError if not one of n requests would lie beyond it.
        """
        if n < self.needed_samples:
            raise TooFewSamplesError(
                f"SLO {self} needs at least {self.needed_samples} requests, the window has {n}",
                "widen --window, or ask for a lower quantile",
            )

    def slack_ratio(self, measured: Measured) -> float | None:
        """Return measured / bound - 1, feasible at or below zero; None if not measured.

        Requests that were never answered exceed every bound.
        """
        value = measured.slo_value(self.metric, self.statistic)
        return None if value is None else value / self.bound_s - 1.0

    def is_broken_by(self, measured: Measured) -> bool:
        """Whether a measurement exceeds the bound; one that has no such latency does not."""
        return (self.slack_ratio(measured) or 0.0) > 0

    def is_met_by(self, ttft_s: Floats, tpot_s: Floats, e2e_s: Floats) -> NDArray[np.bool_]:
        """Mark the requests that meet the bound themselves; one without that latency does."""
        column = {"ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}.get(self.metric)
        if column is None:
            return np.ones(ttft_s.size, dtype=np.bool_)
        return ~(column > self.bound_s)
