"""How surely so many replicas serve a stretch, on other traffic and as fast as they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing
from tuner.run.predict import Predictions, at_once
from tuner.search.posterior import MODEL_ALONE, around
from tuner.search.race import CONFIDENCE, OTHER_TRAFFIC
from tuner.shadow.predictor import Predictor
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine

Judge = Callable[[SimulatedEngine, PreparedTrace, int], tuple[float, bool]]
"""Simulates so many replicas of an engine; returns how much of the tightest SLO they use, 1 is
all of it, and whether they bear the load. Raises: EngineError, UsageError."""


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


@dataclass(frozen=True)
class PossibleFleets:
    """Fleets at one setting on draws of a stretch and of how fast the engine may be.

    `used` is how much of the tightest SLO is used up on the stretch as recorded, by so many
    replicas. Resampled traffic is less bound together: only how it varies is taken from it.
    """

    predictor: Predictor
    workload: Workload
    limits: EngineLimits
    judge: Judge
    used: Callable[[int], float]

    @cached_property
    def _drawing(self) -> Drawing:
        return Drawing(self.predictor, Predictions(self.workload))

    @cached_property
    def _engines(self) -> list[SimulatedEngine]:
        return self._drawing.engines(self.limits, FEW_DRAWS)

    @property
    def basis(self) -> str:
        """What the draws are of."""
        return OTHER_TRAFFIC if self._drawing.stretches else MODEL_ALONE

    def p_kept(self, replicas: int) -> float:
        """Return in which share of the draws so many keep the SLOs and bear the load.

        Raises: EngineError; UsageError where memory is too little.
        """

        def judged(k: int) -> tuple[float, bool]:
            (drawn,) = self._drawing.other_traffic(k).traffic_at(self.workload.plan)
            return self.judge(self._engines[k], drawn, replicas)

        found = at_once(self.predictor, self.workload, judged, range(FEW_DRAWS))
        used, bears = (np.array(column) for column in zip(*found, strict=True))
        at = np.array([[self.used(replicas)]])
        moved = around(at, used[:, None, None], self._drawing.wider)[:, 0, 0]
        return float(((moved <= 1.0) & bears).mean())
