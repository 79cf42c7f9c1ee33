"""How much load the answer bears: foretold by the shadow, confirmed live for the winner.

A line of every result with an SLO. What a capacity is, and how it is bisected, is in
`capacity`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tuner.confirm import Decision
from tuner.engine.protocol import EngineLimits
from tuner.forecast import Forecast
from tuner.objective import Tier
from tuner.observation import Phase
from tuner.records import observation_of
from tuner.replay_plan import CutRule
from tuner.run_state import RunState


@dataclass(frozen=True, slots=True)
class Carried:
    """The loads that winner and present configuration bear, as multiples of the recorded one.

    None where the SLOs hold at no load. `live` says whether they held at the winner's load on
    the engine itself, None where nobody looked.
    """

    winner: float | None
    present: float | None
    live: bool | None

    @property
    def text(self) -> str:
        """Say it in a sentence.

        >>> Carried(1.7, 1.2, None).text
        "holds up to 1.7 x today's load (the present one 1.2 x), foretold by the shadow"
        """
        if self.winner is None:
            return "the SLOs hold at no load, foretold by the shadow"
        before = "none" if self.present is None else f"{self.present:.2g} x"
        judged = {
            None: "foretold by the shadow",
            True: "foretold by the shadow and confirmed live",
            False: "foretold by the shadow, but live the SLOs broke at that load",
        }[self.live]
        holds = f"holds up to {self.winner:.2g} x today's load"
        return f"{holds} (the present one {before}), {judged}"

    def as_json(self) -> dict[str, Any]:
        """Return the loads for result.json."""
        return {
            "winner": self.winner,
            "present": self.present,
            "confirmed_live": self.live,
            "text": self.text,
        }


def carried(run: RunState, forecast: Forecast, decision: Decision) -> Carried:
    """Ask the shadow how much load winner and present configuration bear."""
    began_s = time.monotonic()
    settings = list(dict.fromkeys([decision.winner, run.space.present]))
    loads = dict(zip(settings, forecast.capacities(settings), strict=True))
    run.walls_s["capacity"] = time.monotonic() - began_s
    return Carried(loads[decision.winner], loads[run.space.present], None)


def confirmed_live(run: RunState, winner: EngineLimits, found: Carried) -> Carried:
    """Replay the winner at the load it is said to bear, where time allows."""
    if found.winner is None or run.left_s < 2 * run.usual_wall_s:
        return found
    cut = CutRule(max_wall_s=max(30.0, run.left_s))
    record = run.trial(winner, Phase.CAPACITY, cut, load=found.winner)
    score = observation_of(record).score
    holds = score.tier not in (Tier.BREAKS_SLO, Tier.CUT, Tier.FAILED)
    return Carried(found.winner, found.present, holds)
