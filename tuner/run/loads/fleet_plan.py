"""What a fleet is asked for, and what is told of it: its plan, its ways, how sure they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.replay.slo import Slo
from tuner.run.drawing import FEW_DRAWS
from tuner.search.race import CONFIDENCE
from tuner.shadow.calibration import StatedError
from tuner.shadow.fleet import Autoscaler
from tuner.traffic.reshape import Router


@dataclass(frozen=True, slots=True)
class FleetAim:
    """What a fleet has to keep, what it is made of, and what that costs.

    `most` is the largest number of replicas that is tried, `devices` how many GPUs each takes.

    Units: seconds; the price is of a GPU for an hour, in whatever money.
    """

    slos: tuple[Slo, ...]
    router: Router
    devices: int
    gpu_hour_price: float | None = None
    most: int = 64
    start_s: float = 120.0
    stretch_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the trace on a fleet: what it offers, and what came of it.

    `replicas` is how many were wanted, or under an autoscaler how many got requests; `broken`
    names the SLOs that do not hold, None where too few requests came to judge by.
    """

    start_s: float
    offered_per_s: float
    replicas: float
    slo_attainment_ratio: float
    broken: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a fleet over the whole trace.

    Units: gpu_hours in hours of one GPU; cost in the money of the price, None without one.
    """

    name: str
    replicas: int
    gpu_hours: float
    cost: float | None
    slo_attainment_ratio: float
    autoscaler: Autoscaler | None
    stretches: tuple[Stretch, ...]

    @property
    def breaks(self) -> list[Stretch]:
        """The stretches in which an SLO does not hold."""
        return [one for one in self.stretches if one.broken]


@dataclass(frozen=True, slots=True)
class FleetOdds:
    """The share of draws in which so many replicas keep the SLOs and bear the load.

    Of the stretch that begins at `start_s`, which takes the most. `sure` is the fewest that do
    so with the usual confidence, and the share; None where no number that is tried does.
    `basis` says what the draws are of.
    """

    replicas: int
    p_kept: float
    sure: tuple[int, float] | None
    start_s: float
    basis: str

    def as_json(self) -> dict[str, Any]:
        """Return the odds for --json."""
        fewest, p_kept = self.sure or (None, None)
        return {
            "stretch_start_s": self.start_s,
            "replicas": self.replicas,
            "p_kept": self.p_kept,
            "basis": self.basis,
            "draws": FEW_DRAWS,
            "confidence": CONFIDENCE,
            "sure": None if fewest is None else {"replicas": fewest, "p_kept": p_kept},
        }

    def text(self, most: int) -> str:
        """Say it in a sentence, where up to so many replicas are tried.

        >>> FleetOdds(3, 0.54, (4, 0.96), 0.0, "other traffic").text(64)
        'P(SLOs met, load borne) 0.54, with 4 replicas 0.96: 50 draws of other traffic'
        >>> FleetOdds(3, 0.54, None, 0.0, "other traffic").text(4)
        'P(SLOs met, load borne) 0.54, 0.90 with none up to 4: 50 draws of other traffic'
        """
        more = f", {CONFIDENCE:.2f} with none up to {most}"
        if self.sure is not None:
            fewest, p_kept = self.sure
            more = "" if fewest == self.replicas else f", with {fewest} replicas {p_kept:.2f}"
        found = f"P(SLOs met, load borne) {self.p_kept:.2f}{more}"
        return f"{found}: {FEW_DRAWS} draws of {self.basis}"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fewest replicas at the best limits, and the ways to run them.

    `needed` says how many replicas the busiest stretch needs at the current limits, None where
    no number is enough, and at each that needed fewer than those before; `odds` how surely as
    many as are fixed keep the SLOs.
    """

    limits: EngineLimits
    current: EngineLimits
    aim: FleetAim
    needed: dict[EngineLimits, int | None]
    odds: FleetOdds
    error: StatedError
    ways: tuple[Way, ...]

    def as_json(self) -> dict[str, Any]:
        """Return for --json all that was found."""
        return {
            "engine": "shadow",
            "limits": self.limits,
            "current": self.current,
            "router": str(self.aim.router),
            "devices_per_replica": self.aim.devices,
            "gpu_hour_price": self.aim.gpu_hour_price,
            **self.error.as_json(),
            "odds": self.odds.as_json(),
            "needed": [
                {"limits": limits, "replicas": count} for limits, count in self.needed.items()
            ],
            "ways": self.ways,
        }
